"""What chat templates do is found out by trying them: ends, thinking, roles, errors.

Each template has a few lines in the style of a family of models, and a byte-level tokenizer that
has its tokens.
"""

from __future__ import annotations

import string

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from torchrl_llm import keys
from torchrl_llm.collectors import TurnCollector
from torchrl_llm.data import episode_from_messages
from torchrl_llm.envs import (
    CHATML,
    Append,
    AsTemplate,
    ChatFormatter,
    ChatTemplateError,
    GEMEnv,
    NotAppendOnlyError,
    PromptFormatter,
)
from torchrl_llm.modules import SamplingConfig
from torchrl_llm.stops import response_end_ids
from torchrl_llm.testing.environments import Echo
from torchrl_llm.testing.policies import ScriptedPolicy
from torchrl_llm.testing.tokenizers import byte_tokenizer

PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
# The model stops at the token that opens the next message: another one for a user than for a tool.
ENDS_BY_ROLE = (
    "[gMASK]{% for m in messages %}{{ {'user': '<|user|>\n', 'tool': '<|observation|>\n', 'assistant': '<|assistant|>\n'}[m.role]"
    " }}{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
# The token that ends an answer is written when the next message comes.
ENDS_LATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|as|>{{ m.content }}{% if not loop.last %}<|as_end|>{% endif %}"
    "{% else %}<|us|>{{ m.content }}<|us_end|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|as|>{% endif %}"
)
STYLES = {
    "ends by role": (ENDS_BY_ROLE, ("[gMASK]", "<|user|>", "<|assistant|>", "<|observation|>"), "<|user|>"),
    "ends late": (ENDS_LATE, ("<|us|>", "<|us_end|>", "<|as|>", "<|as_end|>"), "<|as_end|>"),
}


def tokenizer_with(template, *tokens, special=True):
    tokenizer = byte_tokenizer(chat_template=template)
    tokenizer.add_tokens([AddedToken(token, special=special, normalized=False) for token in tokens])
    return tokenizer


def as_messages(*contents, roles=("user", "assistant")):
    return [{"role": roles[i % len(roles)], "content": content} for i, content in enumerate(contents)]


def rendered(tokenizer, messages, **kwargs):
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **kwargs)


@pytest.fixture(params=STYLES)
def style(request):
    return request.param


class TestEnds:
    @pytest.fixture
    def tokenizer(self, style):
        template, tokens, _ = STYLES[style]
        return tokenizer_with(template, *tokens)

    def test_the_sampled_end_stands_once_and_is_the_action(self, tokenizer, style):
        end = tokenizer.convert_tokens_to_ids(STYLES[style][2])
        env = GEMEnv(lambda: Echo(turns=3), tokenizer=tokenizer, max_model_len=400, max_output_tokens=32)
        policy = ScriptedPolicy(lambda *_: f"ok{STYLES[style][2]}", tokenizer=tokenizer, end_turn=False)
        policy.sampling = SamplingConfig(max_output_tokens=32, stop_ids=response_end_ids(tokenizer))
        (rows,) = TurnCollector(env, policy, batch_size=1, total_batches=1)
        ids, turns = rows[keys.TOKENS][0][rows[keys.ATTENTION_MASK][0]], rows[keys.TURN_IDS][0]
        conversation = as_messages("Speak.", "ok", "ok", "ok", "ok", "ok", "ok")
        assert tokenizer.decode(ids) == rendered(tokenizer, conversation)
        for turn in range(3):
            assert rows[keys.TOKENS][0][turns == turn].tolist() == [*tokenizer.encode("ok"), end]

    def test_demonstrations_end_with_it(self, tokenizer, style):
        conversation = as_messages("Speak.", "one", "And?", "two")
        episode = episode_from_messages(conversation, ChatFormatter(tokenizer))
        assert tokenizer.decode(episode.contexts[0]) == (
            tokenizer.apply_chat_template(conversation, tokenize=False) + STYLES[style][2]
        )
        end = tokenizer.convert_tokens_to_ids(STYLES[style][2])
        assert [turn.tokens[-1] for turn in episode.turns] == [end, end]

    def test_a_cut_response_is_closed(self, tokenizer, style):
        formatter, cut = ChatFormatter(tokenizer), tokenizer.encode("ok")
        whole = tokenizer.decode([*formatter.start("a"), *cut, *formatter.feedback(cut, "b")])
        assert whole == rendered(tokenizer, as_messages("a", "ok", "b"))

    def test_policies_stop_at_it(self, tokenizer, style):
        end = tokenizer.convert_tokens_to_ids(STYLES[style][2])
        assert end in response_end_ids(tokenizer)
        assert ChatFormatter(tokenizer).end_of_turn_ids[0] == end


class TestEndsByRole:
    def setup_method(self):
        template, tokens, _ = STYLES["ends by role"]
        self.tokenizer = tokenizer_with(template, *tokens)
        self.user, self.tool = self.tokenizer.convert_tokens_to_ids(["<|user|>", "<|observation|>"])

    def test_policies_stop_at_the_end_before_any_role(self):
        assert {self.user, self.tool} <= {*response_end_ids(self.tokenizer)}
        assert ChatFormatter(self.tokenizer).end_of_turn_ids[:2] == (self.user, self.tool)

    def test_a_demonstration_with_a_tool(self):
        conversation = as_messages("Add.", "call", "4", "It is 4.", roles=("user", "assistant", "tool", "assistant"))
        episode = episode_from_messages(conversation, ChatFormatter(self.tokenizer))
        assert [turn.tokens[-1] for turn in episode.turns] == [self.tool, self.user]
        expected = self.tokenizer.apply_chat_template(conversation, tokenize=False) + "<|user|>"
        assert self.tokenizer.decode(episode.contexts[0]) == expected

    @pytest.mark.parametrize(("ended", "role"), [("<|user|>", "tool"), ("<|observation|>", "user")])
    def test_a_response_that_opened_another_role_is_answered_in_it(self, ended, role):
        formatter, response = ChatFormatter(self.tokenizer), self.tokenizer.encode(f"ok{ended}")
        whole = self.tokenizer.decode([*formatter.start("a"), *response, *formatter.feedback(response, "b", role=role)])
        opened = {"<|user|>": "user", "<|observation|>": "tool"}[ended]
        conversation = as_messages("a", "ok", "b", roles=("user", "assistant", opened))
        conversation[0]["role"] = "user"
        assert whole == rendered(self.tokenizer, conversation)


def test_stop_ids_are_found_with_the_kwargs_of_the_template():
    template = "{% for t in tools %}{{ t }}{% endfor %}" + CHATML.replace(
        "<|im_end|>", "{{ '<|end|>' if brief else '<|im_end|>' }}"
    )
    tokenizer = tokenizer_with(template, "<|end|>")
    tokenizer.eos_token = None
    (end,) = tokenizer.encode("<|end|>")
    assert response_end_ids(tokenizer) == ()
    assert response_end_ids(tokenizer, chat_template_kwargs={"tools": [], "brief": True}) == (end,)


# ---------------------------------------- thinking

DROPS_CHANNEL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('<channel|>')[-1] if m.role == 'assistant' else "
    "m.content }}<|im_end|>\n{% endfor %}" + PROMPT
)
# Keeps thinking if it is asked to; what the prompt opened is part of the message.
OPENS = """{% for m in messages %}<|im_start|>{{ m.role }}
{%- if m.role == 'assistant' %}
{%- set thought = m.content.split('</think>')[0].split('<think>')[-1].strip() if '</think>' in m.content else '' %}
{{- '\n' }}{{- '<think>\n' + thought + '\n</think>\n\n' if keep or loop.last else '' }}{{ m.content.split('</think>')[-1].strip() }}
{%- else %}
{{- '\n' + m.content }}
{%- endif %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{{ '<think>\n\n</think>\n\n' if brief else '<think>\n' }}{% endif %}"""
BY_FIELD = OPENS.replace(
    "m.content.split('</think>')[0].split('<think>')[-1].strip() if '</think>' in m.content else ''",
    "m.reasoning_content or ''",
)
BY_FIELD = BY_FIELD.replace("m.content.split('</think>')[-1].strip()", "m.content")


class TestThinking:
    def test_pairs_that_the_template_spells_are_tried(self):
        found = ChatFormatter(tokenizer_with(DROPS_CHANNEL, "<|channel>", "<channel|>"))
        assert "it drops thinking from earlier answers" in found.properties.rewrites
        assert (found.properties.thinks, type(found.rule)) == (("<|channel>", "<channel|>"), AsTemplate)

    def test_the_name_of_a_channel_is_no_part_of_what_was_thought(self):
        """As in Gemma 4, whose template writes it behind the marker."""
        shows = "{{ '<|channel>thought\\n' + m.why + '\\n<channel|>' if m.why }}{{ m.content"
        names = DROPS_CHANNEL.replace("{{ m.content", shows, 1)
        formatter = ChatFormatter(tokenizer_with(names, "<|channel>", "<channel|>"))
        encode = formatter.tokenizer.encode
        said = formatter.decode(encode("<|channel>thought\nHm.\n<channel|>5<|im_end|>"))
        assert (said.thinking, said.text) == ("Hm.", "5")
        assert formatter.decode(encode("<|channel>thought\n<channel|>5<|im_end|>")).thinking == ""
        for kept in ("thoughtful", "hm\nthought"):
            assert formatter.decode(encode(f"<|channel>{kept}\n<channel|>5<|im_end|>")).thinking == kept

    @pytest.mark.parametrize("earlier", [True, False])
    @pytest.mark.parametrize(
        ("cut", "tokens", "text"),
        [
            ("split('Final answer:')[-1]", (), "Final answer:"),
            ("split('</' ~ 'plan' + '>')[-1]", (), "</plan>"),
            ("split(after)[-1]", (), "So: "),
            ("split('Thought:')[0]", (), "Thought:"),
            ("replace('Step by step:', '')", (), "Step by step:"),
            ("split('\\n')[-1] if m.content.startswith('Thinking') else m.content", (), "Thinking"),
            ("split('Assistant final')[-1]", ("Assistant final",), "Assistant final"),
        ],
    )
    def test_texts_at_which_the_template_cuts_answers_are_tried(self, cut, tokens, text, earlier):
        """Whatever it is that the template takes for the end of thinking, or for its beginning."""
        when = "m.role == 'assistant'" + " and not loop.last" * earlier
        template = (
            CHATML.replace("message", "m")
            .replace("ms", "messages")
            .replace(
                "{{ m['content'] }}",
                f"{{% if {when} %}}{{{{ m.content.{cut} }}}}{{% else %}}{{{{ m.content }}}}{{% endif %}}",
            )
        )
        tokenizer, kwargs = tokenizer_with(template, *tokens, special=False), {"after": "So: "}
        with pytest.raises(NotAppendOnlyError) as raised:
            ChatFormatter(tokenizer, chat_template_kwargs=kwargs)
        assert "it drops thinking from earlier answers" in str(raised.value) or (
            f"it changes answers with {text!r}: once a message is added, it renders" in str(raised.value)
        )
        ChatFormatter(tokenizer, chat_template_kwargs=kwargs, contexts="append")

    def test_texts_at_which_it_cuts_nothing_are_no_reason(self):
        """Its own, white space that it strips, control tokens that it takes out of messages."""
        said = "{{ m.content.strip('\n').replace('<|im_end|>', '') if 'Final answer:' in m.content else m.content.strip('\n') }}"
        template = CHATML.replace("message", "m").replace("ms", "messages").replace("{{ m['content'] }}", said)
        ChatFormatter(byte_tokenizer(chat_template="{{ 'System: ' ~ '\n\n# Tools\n' }}" + template))

    @pytest.mark.parametrize("contexts", ["template", "append"])
    @pytest.mark.parametrize(
        "pair", [("[think]", "[/think]"), ("◁think▷", "◁/think▷"), ("<thought>", "</thought>"), ("<plan>", "</plan>")]
    )
    def test_markers_of_other_spellings_are_a_pair(self, pair, contexts):
        """Also where only the one that closes is spelled, and earlier and last answers are cut
        alike."""
        template = CHATML.replace("message['content']", f"message['content'].split('{pair[1]}')[-1]")
        formatter = ChatFormatter(byte_tokenizer(chat_template=template), contexts=contexts)
        assert (formatter.properties.thinks, type(formatter.rule)) == (
            pair,
            {"template": AsTemplate, "append": Append}[contexts],
        )
        assert formatter.decode(formatter.tokenizer.encode("hm".join(pair) + "\n4")).text == "4"

    @pytest.mark.parametrize("template", [OPENS, BY_FIELD])
    def test_a_template_that_keeps_what_the_prompt_opened_appends(self, template):
        tokenizer = tokenizer_with(template, "<think>", "</think>", special=False)
        formatter = ChatFormatter(tokenizer, chat_template_kwargs={"keep": True})
        response = tokenizer.encode("hm\n</think>\n\n5<|im_end|>")
        ids = [*formatter.start("a"), *response, *formatter.feedback(response, "b")]
        thought = (
            {"content": "5", "reasoning_content": "hm"}
            if template == BY_FIELD
            else {"content": "<think>\nhm\n</think>\n\n5"}
        )
        conversation = [
            {"role": "user", "content": "a"},
            {"role": "assistant", **thought},
            {"role": "user", "content": "b"},
        ]
        assert tokenizer.decode(ids) == rendered(tokenizer, conversation, keep=True)
        assert (formatter.properties.opens, formatter.properties.closes) == ("<think>\n", "</think>")

    def test_of_one_that_drops_it_the_name_is_known(self):
        tokenizer = tokenizer_with(OPENS, "<think>", "</think>", special=False)
        assert ChatFormatter(tokenizer).properties.rewrites.startswith("it drops thinking from earlier answers")

    def test_where_the_prompt_has_an_empty_thought_answers_have_none(self):
        tokenizer = tokenizer_with(OPENS, "<think>", "</think>", special=False)
        formatter = ChatFormatter(tokenizer, chat_template_kwargs={"keep": True, "brief": True})
        response = tokenizer.encode("5<|im_end|>")
        ids = [*formatter.start("a"), *response, *formatter.feedback(response, "b")]
        assert tokenizer.decode(ids) == rendered(tokenizer, as_messages("a", "5", "b"), keep=True, brief=True)
        assert (formatter.properties.opens, formatter.properties.closes) == ("<think>\n\n</think>\n\n", None)
        rewrites = ChatFormatter(tokenizer, chat_template_kwargs={"brief": True}).properties.rewrites
        assert "which its generation prompt writes, out of earlier answers" in rewrites

    @pytest.mark.parametrize("contexts", ["template", "append"])
    @pytest.mark.parametrize("shows_thinking", [False, True])
    def test_an_answer_of_several_messages_is_refused_in_one_sentence(self, contexts, shows_thinking):
        thought = "{% if m.thinking %}<|begin|>assistant<|think|>{{ m.thinking }}<|end|>{% endif %}" * shows_thinking
        template = (
            "{% for m in messages %}" + thought + "<|begin|>{{ m.role }}<|content|>{{ m.content }}<|end|>{% endfor %}"
            "{% if add_generation_prompt %}<|begin|>assistant{% endif %}"
        )
        tokenizer = tokenizer_with(template, "<|begin|>", "<|content|>", "<|think|>", "<|end|>")
        with pytest.raises(
            ChatTemplateError, match=r"several messages of one answer: .*'<\|content\|>'.*\(harmony\)"
        ) as raised:
            ChatFormatter(tokenizer, contexts=contexts)
        assert "contexts=" not in str(raised.value)


# ---------------------------------------- given answers


def spaced_tokenizer(scheme, corpus):
    """A SentencePiece tokenizer, which puts a space before text that is encoded by itself."""
    tokens = ("<unk>", "<|im_start|>", "<|im_end|>")
    backend = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    special = [AddedToken(token, special=True, normalized=False) for token in tokens]
    options = {"special_tokens": special, "initial_alphabet": [*string.printable, "▁"], "show_progress": False}
    backend.train_from_iterator([corpus] * 3, trainers.BpeTrainer(vocab_size=400, **options))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", unk_token="<unk>", chat_template=CHATML
    )


class TestGivenAnswers:
    TRIMS = "{% for m in messages %}<|im_start|>{{ m.role }}\n\n{{ m.content | trim }}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n\n{% endif %}"

    @pytest.mark.parametrize(
        ("template", "answer"),
        [
            (TRIMS, " Sure.\n"),
            (CHATML.replace("<|im_end|>", "{{ '\n' if message.role == 'assistant' }}<|im_end|>"), "Sure."),
            (OPENS, "<think>\nhm\n</think>\n\n5"),
            (OPENS, "<think>hm</think>5"),
        ],
    )
    def test_they_are_written_as_the_template_writes_them(self, template, answer):
        tokenizer = tokenizer_with(template, "<think>", "</think>", special=False)
        conversation = as_messages("a", answer, "b", answer)
        formatter = ChatFormatter(tokenizer, chat_template_kwargs={"keep": True})
        episode = episode_from_messages(conversation, formatter)
        expected = tokenizer.apply_chat_template(conversation, tokenize=False, keep=True)
        assert tokenizer.decode(episode.contexts[0]) == expected.rstrip("\n")

    @pytest.fixture(params=["first", "always"])
    def spacing(self, request):
        return spaced_tokenizer(request.param, "user assistant it is so")

    def test_no_space_is_put_before_them(self, spacing):
        conversation = as_messages("2 + 3?", "5", "It is?", "It is so")
        ids = [*episode_from_messages(conversation, ChatFormatter(spacing)).contexts[0]]
        assert ids == spacing.apply_chat_template(conversation, return_dict=False)[: len(ids)]

    def test_nor_before_worked_examples_and_prefills(self, spacing):
        conversation = as_messages("1", "1", "{question}", "It is")
        ids = [*PromptFormatter(spacing, conversation_template=conversation).start("2")]
        conversation[2]["content"] = "2"
        assert ids == spacing.apply_chat_template(conversation, continue_final_message=True, return_dict=False)

    @pytest.mark.parametrize("message", ["it is so", "<|im_end|>"])
    def test_nor_before_raw_feedback(self, spacing, message):
        ids = ChatFormatter(spacing, template="raw").feedback(spacing.encode("so"), message)
        assert spacing.decode(ids, clean_up_tokenization_spaces=False) == f"\n{message}\n"

    @pytest.mark.parametrize("scheme", ["first", "always"])
    def test_whatever_the_vocabulary_merges(self, scheme):
        """A letter and a line break are one token here: in raw feedback, and where a template opens
        answers by text alone."""
        tokenizer = spaced_tokenizer(scheme, "ba\nca\nda\nt:\n\nu:\n\n")
        ids = ChatFormatter(tokenizer, template="raw").feedback(tokenizer.encode("so"), "it is so")
        told = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        tokenizer.chat_template = (
            "{% for m in messages %}{{ m.role }}:\n{{ m.content }}\n\n{% endfor %}"
            "{% if add_generation_prompt %}assistant:\n{% endif %}"
        )
        answer = tokenizer.decode(ChatFormatter(tokenizer).answer("\nit is so"), clean_up_tokenization_spaces=False)
        assert (told, answer) == ("\nit is so\n", "\nit is so<|im_end|>")


# ---------------------------------------- roles and errors

UNKNOWN_AS = (
    "{%% for m in messages %%}{%% if m.role == 'user' %%}<|im_start|>user\n{{ m.content }}<|im_end|>\n"
    "{%% elif m.role == '%s' %%}<|im_start|>%s\n{{ m.content }}<|im_end|>\n"
    "{%% else %%}<|im_start|>%s\n{{ m.content }}<|im_end|>\n{%% endif %%}{%% endfor %%}"
)


class TestToolRole:
    @pytest.mark.parametrize(("known", "unknown"), [("assistant", "system"), ("system", "assistant")])
    def test_the_branch_for_all_other_roles_is_none(self, known, unknown):
        formatter = ChatFormatter(tokenizer_with(UNKNOWN_AS % (known, known, unknown) + PROMPT))
        assert formatter.feedback([5], "4", role="tool") == formatter.feedback([5], "4")
        assert not formatter.properties.has_tool_role

    def test_one_of_its_own_is_taken(self):
        assert ChatFormatter(byte_tokenizer()).properties.has_tool_role


class TestErrors:
    def test_a_template_that_lacks_what_it_iterates_over(self):
        tokenizer = tokenizer_with("{% for t in tools %}{{ t }}{% endfor %}" + CHATML)
        with pytest.raises(ChatTemplateError, match=r"TypeError: .*chat_template_kwargs \(it reads tools"):
            ChatFormatter(tokenizer)
        ChatFormatter(tokenizer, chat_template_kwargs={"tools": []})

    def test_a_template_that_lacks_a_variable(self):
        tokenizer = tokenizer_with("{{ 5 // rules | length }}" + CHATML)
        with pytest.raises(ChatTemplateError, match=r"ZeroDivisionError: .*it reads rules"):
            ChatFormatter(tokenizer)

    def test_contents_as_parts(self):
        template = CHATML.replace("{{ message['content'] }}", "{{ message['content'][0]['text'] }}")
        tokenizer = tokenizer_with(template)
        formatter = ChatFormatter(tokenizer, system_prompt="Be brief.")
        response = tokenizer.encode("5<|im_end|>")
        ids = [*formatter.start("a"), *response, *formatter.feedback(response, "b")]
        conversation = [{"role": "system", "content": "Be brief."}, *as_messages("a", "5", "b")]
        assert tokenizer.decode(ids) == rendered(byte_tokenizer(), conversation)
        assert response_end_ids(tokenizer) == (2,)


@pytest.mark.parametrize(
    "content",
    [
        "m.content | replace('\\n\\n', '\\n')",
        "m.content | replace('<think>', '[') | replace('</think>', ']')",
    ],
)
def test_what_is_rewritten_in_every_answer_is_found(content):
    """Also where the last answer is rewritten in the same way."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ ("
        + content
        + ") if m.role == 'assistant' else m.content }}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    with pytest.raises(NotAppendOnlyError):
        ChatFormatter(byte_tokenizer(chat_template=template))


def test_a_template_chosen_by_its_name_is_the_one_that_is_tried():
    dropping = CHATML.replace("message['content']", "message['content'].split('</thought>')[-1]")
    tokenizer = byte_tokenizer(chat_template=CHATML)
    tokenizer.chat_template = {"default": CHATML, "dropping": dropping}
    assert ChatFormatter(tokenizer)
    chosen = ChatFormatter(tokenizer, chat_template_kwargs={"chat_template": "dropping"})
    assert "drops thinking" in chosen.properties.rewrites
