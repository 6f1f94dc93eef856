"""What a turn sees of its episode: the template's own rendering, made of the ids that were sampled,
or what another rule selects."""

from __future__ import annotations

import logging
import pickle
import random
from functools import partial
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from test_template_probe import DROPS_CHANNEL, OPENS, tokenizer_with
from test_templates import STYLES as FAMILIES
from test_templates import make_tokenizer

from torchrl_llm import keys
from torchrl_llm.collectors import AsyncTurnCollector, TurnCollector
from torchrl_llm.data import TranscriptError, episode_from_messages, rows_from_episodes, turns_to_rows
from torchrl_llm.envs import (
    CHATML,
    Append,
    AsTemplate,
    ChatFormatter,
    ChatTemplateError,
    GEMEnv,
    KeepLast,
    NotAppendOnlyError,
    PromptFormatter,
    SelfPlayEnv,
    Slide,
    Span,
    Summarize,
)
from torchrl_llm.metrics import rollout_metrics
from torchrl_llm.modules import HFPolicy, SamplingConfig, TokenScorer, enable_prefix_sharing
from torchrl_llm.rendering import Message, Renderer
from torchrl_llm.runs import RunSettings, build_run
from torchrl_llm.stops import response_end_ids
from torchrl_llm.testing.policies import ScriptedPolicy
from torchrl_llm.testing.take_away import TakeAway
from torchrl_llm.testing.tiny import load_tiny_model, load_tiny_tokenizer
from torchrl_llm.testing.tokenizers import byte_tokenizer
from torchrl_llm.trainers import Callback
from torchrl_llm.utils.options import ConfigError

# Thinking stays up to the next message of a user, and through the output of tools (Qwen3's rule).
KEPT_FOR_TOOLS = """{% set ns = namespace(last=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- set answer = m.content.split('</think>')[-1].lstrip('\\n') if m.role == 'assistant' and loop.index0 < ns.last else m.content %}
{{- '<|im_start|>' + m.role + '\\n' + answer + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
# What stands in the place of a thought (Nemotron's way).
MARKED = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' and not loop.last %}{{ '<think></think>' + m.content.split('</think>')[-1].strip() }}
{%- else %}{{ m.content }}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"""

THINKS, CHANNEL = ("<think>", "</think>"), ("<|channel>", "<channel|>")
SPACES = ["", "\n", "\n\n", " ", "\n \n", "\t"]
TEMPLATES = {
    "drops": (
        CHATML.replace("message['content']", "message['content'].split('</think>')[-1].lstrip('\n')"),
        THINKS,
        {},
    ),
    "through tools": (KEPT_FOR_TOOLS, THINKS, {}),
    "marked": (MARKED, THINKS, {}),
    "opens": (OPENS, THINKS, {}),
    "an empty thought": (OPENS, THINKS, {"brief": True}),
    "channel": (DROPS_CHANNEL, CHANNEL, {}),
}


def make_formatter(name, *, special=False, **options):
    template, pair, kwargs = TEMPLATES[name]
    return ChatFormatter(tokenizer_with(template, *pair, special=special), chat_template_kwargs=kwargs, **options)


def shown(formatter, spans, rule=None, room=10**6):
    return [i for span in (rule or formatter.rule)(spans, formatter, room) for i in span.ids]


def turn_of(formatter, response, message, turn, role="user"):
    return formatter.turn_spans(response, message, turn, role=role, said=formatter.decode(response))


@pytest.fixture(params=[*TEMPLATES, "qwen3"], scope="module")
def formatter(request):
    if request.param == "qwen3":
        return ChatFormatter(make_tokenizer(FAMILIES["qwen3"]))
    return make_formatter(request.param)


class TestAsTemplate:
    @settings(max_examples=30, deadline=None)
    @given(draw=st.randoms(use_true_random=False), turns=st.integers(1, 6))
    def test_contexts_are_the_templates_own_rendering(self, formatter, draw, turns):
        """For any roles, and with thoughts anywhere."""
        found, tokenizer = formatter.properties, formatter.tokenizer
        assert isinstance(formatter.rule, AsTemplate)
        render = Renderer(tokenizer, chat_template_kwargs=formatter.chat_template_kwargs)
        spans, messages = formatter.first_spans("Begin."), [Message("user", "Begin.")]
        for turn in range(turns):
            role = draw.choice(["user", "tool"])
            thinks = not found.opens if found.closes is None else True
            text = f"It is {draw.randint(0, 99)},\n\nor not."
            thought = "hm?" * (thinks and draw.random() < 0.7)
            thought = thought or "Well." * (found.closes is not None)
            opening, closing = found.thinks
            # Where a thought is shown, templates write it with white space of their own.
            space = draw.choice(SPACES) if role == "user" else "\n\n"
            whole = f"{opening}\n{thought}\n{closing}{space}{text}" if thought else text
            in_field = {found.thinking_field: thought} if found.thinking_field and thought else {}
            messages += [Message("assistant", text if in_field else whole, in_field)]
            messages += [Message(found.role(role), f"Go on {turn}.")]
            # As it is, not as the template writes it.
            said = whole.removeprefix(found.opens) if found.closes else whole
            response = [*formatter.encode_answer(said), *formatter.end_of_turn_ids[:1]]
            spans += turn_of(formatter, response, f"Go on {turn}.", turn, role)
            expected = tokenizer.encode(render(messages), add_special_tokens=False)
            assert tokenizer.decode(shown(formatter, spans)) == tokenizer.decode(expected)

    def test_ids_stay_as_they_were_sampled(self):
        """In whatever pieces a policy has said something."""
        formatter = make_formatter("drops")
        encode, (opening, closing) = formatter.tokenizer.encode, THINKS
        answer = [i for letter in "\n\nIt is 5." for i in encode(letter)]
        response = [*encode(opening), *encode("hm"), *encode(closing), *answer, *formatter.end_of_turn_ids[:1]]
        spans = formatter.first_spans("q") + turn_of(formatter, response, "Go on.", 0)
        ids = shown(formatter, spans)
        assert formatter.tokenizer.decode(ids).count("hm") == 0
        rest = [*answer[2:], *formatter.end_of_turn_ids[:1]]
        assert any(ids[i : i + len(rest)] == rest for i in range(len(ids)))

    @pytest.mark.parametrize("special", [False, True])
    @pytest.mark.parametrize("ended", [False, True])
    def test_a_thought_that_is_not_closed_is_dropped_whole(self, special, ended):
        formatter = make_formatter("opens", special=special)
        response = [*formatter.tokenizer.encode("5 or"), *formatter.end_of_turn_ids[: int(ended)]]
        spans = formatter.first_spans("q") + turn_of(formatter, response, "Go on.", 0)
        text = formatter.tokenizer.decode(shown(formatter, spans))
        assert text == (
            "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n<|im_start|>user\nGo on.<|im_end|>\n"
            "<|im_start|>assistant\n<think>\n"
        )

    @pytest.mark.parametrize("name", ["qwen3", "drops", "through tools"])
    def test_an_empty_thought_is_written_as_the_template_writes_it(self, name):
        """Qwen3 leaves it out before the output of a tool, where it keeps others."""
        formatter = ChatFormatter(make_tokenizer(FAMILIES["qwen3"])) if name == "qwen3" else make_formatter(name)
        text, spans, messages = "<think>\n\n</think>\n\n4", formatter.first_spans("q"), [Message("user", "q")]
        for turn, role in enumerate(["tool", "tool", "user", "tool"]):
            response = [*formatter.encode_answer(text), *formatter.end_of_turn_ids[:1]]
            spans += turn_of(formatter, response, f"r{turn}", turn, role)
            messages += [Message("assistant", text), Message(formatter.properties.role(role), f"r{turn}")]
            expected = Renderer(formatter.tokenizer)(messages)
            assert formatter.tokenizer.decode(shown(formatter, spans)) == expected, turn

    def test_it_says_so(self, caplog):
        with caplog.at_level(logging.INFO):
            make_formatter("drops")
        (record,) = [each for each in caplog.records if "Contexts are what the chat template shows" in each.message]
        assert "it drops thinking from earlier answers" in record.message

    def test_where_nothing_is_dropped_contexts_grow(self):
        assert isinstance(ChatFormatter(tokenizer_with(CHATML), contexts="template").rule, Append)
        assert isinstance(make_formatter("drops", contexts="append").rule, Append)

    def test_what_it_cannot_follow_is_refused(self):
        """A template that changes what stays, or leaves out more."""
        for content in ("split('</think>')[-1] | replace('maybe', '')", "split('</think>')[-1].split('Answer:')[-1]"):
            said = f"{{% if message.role == 'assistant' %}}{{{{ message.content.{content} }}}}{{% else %}}{{{{ message.content }}}}{{% endif %}}"
            template = CHATML.replace("{{ message['content'] }}", said)
            with pytest.raises(NotAppendOnlyError, match='contexts="append"'):
                ChatFormatter(tokenizer_with(template, *THINKS, special=False))

    def test_a_copy_goes_on(self):
        formatter = make_formatter("drops")
        spans = formatter.first_spans("q") + formatter.turn_spans(
            formatter.answer("<think>\nhm\n</think>\n\n5"), "r", 0
        )
        assert shown(pickle.loads(pickle.dumps(formatter)), spans) == shown(formatter, spans)

    @pytest.mark.parametrize("begun", ["", "<think>\n", "<think>\nok\n</think>\n\nIt is"])
    def test_worked_examples_are_shown_so_too(self, begun):
        """Whatever is begun for the answer behind them."""
        template, pair, _ = TEMPLATES["drops"]
        example = [("user", "1 + 1"), ("assistant", "<think>\nhm\n</think>\n\n2"), ("user", "{question}")]
        example += [("assistant", begun)] if begun else []
        formatter = PromptFormatter(
            tokenizer_with(template, *pair, special=False),
            conversation_template=[{"role": role, "content": content} for role, content in example],
        )
        text = formatter.tokenizer.decode(formatter.start("2 + 2"))
        assert "hm" not in text
        assert "assistant\n2<|im_end|>" in text
        assert text.endswith(f"2 + 2<|im_end|>\n<|im_start|>assistant\n{begun}")


# ---------------------------------------- answers of several messages

HARMONY = """{% for m in messages %}
{%- set last = loop.last and not add_generation_prompt %}
{%- if m.role == 'assistant' %}
{%- if m.thinking and last %}{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{% endif %}
{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + ('<|return|>' if last else '<|end|>') }}
{%- else %}{{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""
TOKENS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>")


class TestSeveralMessages:
    """Harmony's way: a thought is a message of its own, whose end does not end the response."""

    def setup_method(self):
        self.tokenizer = tokenizer_with(HARMONY, *TOKENS)
        self.formatter = ChatFormatter(self.tokenizer)

    def test_the_end_of_a_thought_is_no_end_of_the_response(self):
        end, last = self.tokenizer.convert_tokens_to_ids(["<|end|>", "<|return|>"])
        assert self.formatter.end_of_turn_ids[0] == last
        assert last in response_end_ids(self.tokenizer)
        assert end not in response_end_ids(self.tokenizer)

    @pytest.mark.parametrize("thought", ["", "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"])
    def test_the_answer_is_the_last_message(self, thought):
        said = self.tokenizer.encode(f"{thought}<|channel|>final<|message|>5<|return|>")
        assert self.formatter.decode(said).text == "5"

    def test_contexts_are_the_templates_own_rendering(self):
        spans, messages = self.formatter.first_spans("q0"), [Message("user", "q0")]
        for turn, thinks in enumerate([True, False, True]):
            thought = f"<|channel|>analysis<|message|>hm {turn}<|end|><|start|>assistant" * thinks
            said = self.tokenizer.encode(f"{thought}<|channel|>final<|message|>a{turn}<|return|>")
            spans += turn_of(self.formatter, said, f"q{turn + 1}", turn)
            messages += [Message("assistant", f"a{turn}", {"thinking": f"hm {turn}"} if thinks else {})]
            messages += [Message("user", f"q{turn + 1}")]
            text = self.tokenizer.decode(shown(self.formatter, spans))
            assert text == Renderer(self.tokenizer)(messages)
        assert "hm" not in text
        assert "<|return|>" not in text

    def test_an_answer_in_text_gets_its_header(self):
        assert self.tokenizer.decode(self.formatter.answer("5")) == "<|channel|>final<|message|>5<|return|>"

    def test_what_was_sampled_cannot_be_kept(self):
        with pytest.raises(NotAppendOnlyError, match=r"'<\|return\|>' after the last assistant message only"):
            ChatFormatter(self.tokenizer, contexts="append")

    def test_where_one_token_ends_both_it_is_refused(self):
        template = HARMONY.replace("('<|return|>' if last else '<|end|>')", "'<|end|>'")
        with pytest.raises(ChatTemplateError, match="several messages of one answer"):
            ChatFormatter(tokenizer_with(template, *TOKENS))


# ---------------------------------------- other rules


def spans_of(sizes, first=4):
    spans = [Span([0] * first, -1, "message")]
    for turn, size in enumerate(sizes):
        spans += [Span([1], turn, "answer"), Span([2] * (size - 1), turn, "message")]
    return spans


class TestRules:
    @given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=12), turns=st.integers(1, 5))
    def test_the_last_turns(self, sizes, turns):
        kept = KeepLast(turns)(spans_of(sizes), None, 10**6)
        assert [span.turn for span in kept if span.kind == "answer"] == [*range(len(sizes))][-turns:]
        assert kept[0].turn == -1

    def test_at_least_one(self):
        with pytest.raises(ValueError, match="turns is 0; expected at least 1"):
            KeepLast(0)

    @given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=12), room=st.integers(14, 30))
    def test_a_window_slides_only_where_it_is_full(self, sizes, room):
        """What a turn sees grows, or was cut to half of the room, and never has more than fits."""
        before = None
        for count in range(1, len(sizes) + 1):
            seen = Slide()(spans_of(sizes[:count]), None, room)
            size = sum(len(span.ids) for span in seen)
            assert size <= room
            if before is not None and seen[: len(before)] != before:
                assert size <= 4 + max(sizes[count - 1], (room - 4) // 2)
                assert sum(len(span.ids) for span in before) + sizes[count - 1] > room
            before = seen


# ---------------------------------------- in an environment


class Thinker:
    """Speaks for some turns, now and then as a tool; reward 1 for the last."""

    def __init__(self, turns=5):
        self.turns = turns

    def reset(self, seed=None):
        self.draw, self.turn = random.Random(seed), 0
        return "Speak.", {}

    def step(self, action):
        self.turn += 1
        self.heard = action
        last = self.turn == self.turns
        return "x" * self.draw.randint(1, 9), float(last), last, False, {"use_tool": self.draw.random() < 0.3}


def thinks(episode, turn, context):
    draw = random.Random(f"{episode} {turn}")
    thought = f"<think>\n{'h' * draw.randint(1, 9)}\n</think>\n\n" * (draw.random() < 0.8)
    return thought + "a" * draw.randint(1, 9)


def thinking_tokenizer():
    tokenizer = load_tiny_tokenizer()
    tokenizer.chat_template = KEPT_FOR_TOOLS
    return tokenizer


def make_env(env=Thinker, tokenizer=None, **options):
    tokenizer = tokenizer or thinking_tokenizer()
    return GEMEnv(env, tokenizer=tokenizer, **{"num_envs": 4, "max_model_len": 512, "max_output_tokens": 40} | options)


def scripted(tokenizer):
    return ScriptedPolicy(thinks, tokenizer=tokenizer, max_output_tokens=40)


def segments_of(row):
    """The tokens of each segment of a row, with the turn ids in it."""
    mask = row[keys.ATTENTION_MASK].tolist()
    found, start = [], None
    for i, valid in enumerate([*mask, False]):
        if valid and start is None:
            start = i
        if not valid and start is not None:
            found.append((row[keys.TOKENS][start:i].tolist(), row[keys.TURN_IDS][start:i].tolist()))
            start = None
    return found


class TestEnvironment:
    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"context_rule": KeepLast(2)},
            {"context_rule": Summarize("Sum up.", 90)},
            {"overflow": "slide", "max_model_len": 150},
        ],
    )
    def test_a_row_holds_what_each_turn_saw(self, options):
        tokenizer = thinking_tokenizer()
        env = make_env(tokenizer=tokenizer, on_done="idle", **options)
        batch = env.rollout(9, scripted(tokenizer), break_when_any_done=False)
        assert int(batch[keys.SEGMENT].max()) > 1
        for i, row in enumerate(turns_to_rows(batch)):
            segments = segments_of(row)
            for turn in range(int((batch[keys.PROMPT_LENGTH][i] > 0).sum())):
                step = batch[i, turn]
                prompt = step[keys.PROMPT][: int(step[keys.PROMPT_LENGTH])].tolist()
                response = step[keys.RESPONSE][step[keys.RESPONSE_MASK]].tolist()
                tokens, turn_ids = segments[int(step[keys.SEGMENT])]
                start = turn_ids.index(turn)
                assert tokens[:start] == prompt
                assert tokens[start : start + len(response)] == response
                assert turn_ids.count(turn) == len(response)

    @pytest.mark.parametrize(
        "options", [{}, {"max_turns": 3}, {"context_rule": KeepLast(1)}, {"context_rule": Summarize("Sum up.", 90)}]
    )
    def test_all_collectors_deliver_the_same(self, options):
        tokenizer = thinking_tokenizer()
        batches = []
        for collector, more in (
            (TurnCollector, {}),
            (AsyncTurnCollector, {}),
            (AsyncTurnCollector, {"num_threads": 2}),
        ):
            env = make_env(tokenizer=tokenizer, **options)
            (batch,) = collector(env, scripted(tokenizer), batch_size=8, total_batches=1, **more)
            batches.append(batch)
        assert all((batches[0] == batch).all() for batch in batches[1:])

    @pytest.mark.parametrize("rule", [None, Summarize("Sum up.", 60)])
    def test_a_running_episode_is_restored(self, rule):
        tokenizer = thinking_tokenizer()
        env = make_env(tokenizer=tokenizer, context_rule=rule)
        env.rollout(3, scripted(tokenizer), break_when_any_done=False)
        assert any(slot.asked for slot in env.slots) is (rule is not None)
        again = make_env(tokenizer=tokenizer, context_rule=rule)
        again.load_state_dict(env.state_dict())
        assert int(env.observe()[keys.SEGMENT].max()) > 0
        assert (again.observe() == env.observe()).all()

    def test_a_rule_of_ones_own(self):
        def without_tools(spans, formatter, room):
            return [span for span in spans if span.kind != "message" or span.role == "user"]

        tokenizer = thinking_tokenizer()
        env = make_env(tokenizer=tokenizer, context_rule=without_tools)
        batch = env.rollout(4, scripted(tokenizer), break_when_any_done=False)
        last = batch[:, -1]
        texts = [
            tokenizer.decode(prompt[:length])
            for prompt, length in zip(last[keys.PROMPT], last[keys.PROMPT_LENGTH].flatten(), strict=True)
        ]
        assert not any("tool" in text for text in texts)

    @pytest.mark.parametrize(
        "rule",
        [
            lambda spans, formatter, room: [],
            lambda spans, formatter, room: None,
            lambda spans, formatter, room: [Span([], 0, "answer")],
            lambda spans, formatter, room: [Span([1.5], 0, "answer")],
            lambda spans, formatter, room: [Span([-1], 0, "answer")],
            lambda spans, formatter, room: ["text"],
        ],
    )
    def test_what_a_rule_returns_is_checked(self, rule):
        tokenizer = thinking_tokenizer()
        env = make_env(tokenizer=tokenizer, context_rule=rule)
        with pytest.raises(ValueError, match=r"The context rule .* returned .*; expected a list of spans"):
            env.rollout(4, scripted(tokenizer), break_when_any_done=False)

    def test_any_sequence_of_spans_will_do(self):
        tokenizer = thinking_tokenizer()
        for rule in (
            lambda spans, *_: tuple(spans),
            lambda spans, *_: (span for span in spans),
            lambda spans, *_: spans.reverse() or spans[::-1],
        ):
            env = make_env(tokenizer=tokenizer, contexts="append", context_rule=rule)
            batch = env.rollout(4, scripted(tokenizer), break_when_any_done=False)
            assert int(batch[keys.SEGMENT].max()) == 0

    def test_contexts_that_grow_have_no_segments(self):
        env = make_env(contexts="append")
        assert keys.SEGMENT not in env.observation_spec.keys(True, True)
        assert keys.SEGMENT in make_env().observation_spec.keys(True, True)

    @pytest.mark.parametrize("rule", [KeepLast(2), Summarize("Sum up.", 30)])
    def test_the_scorer_agrees_with_the_sampler(self, rule):
        tokenizer, sampling = thinking_tokenizer(), SamplingConfig(max_output_tokens=12)
        model = load_tiny_model()
        env = make_env(tokenizer=tokenizer, context_rule=rule, max_output_tokens=12)
        (rows,) = TurnCollector(env, HFPolicy(model, tokenizer, sampling), batch_size=8, total_batches=1)
        assert any(len(segments_of(row)) > 2 for row in rows)
        scores = TokenScorer(model, sampling)(rows)[keys.LOG_PROB].detach()
        torch.testing.assert_close(scores, rows[keys.SAMPLE_LOG_PROB], rtol=0, atol=1e-5)

    @pytest.mark.parametrize("share_prefixes", [False, True])
    def test_log_probs_and_gradient_are_those_of_each_context_alone(self, share_prefixes):
        """The row of an episode is worth what its contexts are worth as rows of their own, with the
        same weights of turns."""
        tokenizer, sampling = thinking_tokenizer(), SamplingConfig(max_output_tokens=40)
        env = make_env(tokenizer=tokenizer)
        (rows,) = TurnCollector(env, scripted(tokenizer), batch_size=8, total_batches=1)
        model = load_tiny_model().double()
        scorer = TokenScorer(model, sampling, prefixes=enable_prefix_sharing(model) if share_prefixes else None)
        weights = torch.randn(len(rows), 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        whole, alone = [], []
        for row, row_weights in zip(rows, weights, strict=True):
            whole.append((row[keys.TOKENS], row[keys.ATTENTION_MASK], row[keys.TURN_IDS], row_weights))
            for tokens, turn_ids in segments_of(row):
                alone.append(
                    (torch.tensor(tokens), torch.ones(len(tokens)).bool(), torch.tensor(turn_ids), row_weights)
                )
        assert len(alone) > 2 * len(whole)
        values = [self.weighted(scorer, model, each) for each in (whole, alone)]
        for found, expected in zip(*values, strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)

    @staticmethod
    def weighted(scorer, model, samples):
        """The weighted sum of the log-probs, and its gradient."""
        tokens, mask, turn_ids, weights = zip(*samples, strict=True)
        pad = partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
        rows = TensorDict(
            {keys.TOKENS: pad(tokens), keys.ATTENTION_MASK: pad(mask), keys.TURN_IDS: pad(turn_ids, padding_value=-1)},
            [len(samples)],
        )
        acting = rows[keys.TURN_IDS] >= 0
        weight = torch.stack(weights).gather(1, rows[keys.TURN_IDS].clamp_min(0)) * acting
        total = (weight * scorer(rows)[keys.LOG_PROB]).sum()
        return total.detach(), *torch.autograd.grad(total, [*model.parameters()])

    @pytest.mark.parametrize("rule", [None, KeepLast(1)])
    def test_an_episode_is_the_same_as_messages(self, rule):
        """Demonstrations are read as contexts of environments are made."""
        heard = []

        class Heard(Thinker):
            def reset(self, seed=None):
                heard[:] = [{"role": "user", "content": "Speak."}]
                return super().reset(seed)

            def step(self, action):
                text, *rest, info = super().step(action)
                role = "tool" if info["use_tool"] else "user"
                heard.extend([{"role": "assistant", "content": action}, {"role": role, "content": text}])
                return text, *rest, info

        tokenizer = thinking_tokenizer()
        env = make_env(Heard, tokenizer=tokenizer, num_envs=1, context_rule=rule)
        (expected,) = TurnCollector(env, scripted(tokenizer), batch_size=1, total_batches=1)
        episode = episode_from_messages(heard, env.formatter, reward=1.0, context_rule=rule)
        rows = rows_from_episodes([episode])
        assert len(segments_of(rows[0])) > 2
        for key in (keys.TOKENS, keys.ATTENTION_MASK, keys.TURN_IDS, keys.TURN_REWARD):
            assert torch.equal(rows[key], expected[key]), key


class Notes(Thinker):
    """Remembers what it got; its steps are numbered."""

    extras: ClassVar = {"step": float}

    def __init__(self, turns=5):
        super().__init__(turns)
        self.got = []

    def step(self, action):
        self.got.append(str(action))
        _, reward, *ends, _ = super().step(action)
        return f"Message {self.turn}.", reward + 0.5, *ends, {"step": self.turn}


class TestSummarize:
    """The policy says "s" where it is asked for a summary, else "a" and the number of the turn."""

    def play(self, template=CHATML, turns=9, **options):
        def said(episode, turn, context):
            return f"<think>h</think>{'s' if 'Sum up.' in context else 'a'}{turn}"

        tokenizer = byte_tokenizer(chat_template=template)
        rule = Summarize("Sum up.", 100)
        env = make_env(Notes, tokenizer, num_envs=1, **{"context_rule": rule, "on_done": "idle"} | options)
        policy = ScriptedPolicy(said, tokenizer=tokenizer, max_output_tokens=40, read_context=True)
        batch = env.rollout(turns, policy)
        texts = [
            tokenizer.decode(step[keys.PROMPT][: int(step[keys.PROMPT_LENGTH])].tolist()) for step in batch[0].unbind(0)
        ]
        return env, batch[0], texts

    def test_contexts_are_those_of_a_conversation_that_begins_with_the_summary(self):
        env, batch, texts = self.play()
        segments = batch[keys.SEGMENT].flatten().tolist()
        asked = [
            turn for turn, text in enumerate(texts) if text.endswith("\n\nSum up.<|im_end|>\n<|im_start|>assistant\n")
        ]
        assert len(asked) > 1
        assert segments == [sum(other < turn for other in asked) for turn in range(len(texts))]
        for turn in asked:
            number = turn - asked.index(turn)  # of the step whose message came with the request
            conversation = [Message("user", "Speak."), Message("assistant", f"<think>h</think>s{turn}")]
            conversation.append(Message("user", f"Message {number}."))
            assert texts[turn + 1] == env.formatter.tokenizer.apply_chat_template(
                [{"role": each.role, "content": each.content} for each in conversation],
                tokenize=False,
                add_generation_prompt=True,
            )

    def test_the_environment_does_not_see_it_and_it_earns_nothing(self):
        env, batch, texts = self.play()
        steps = batch["next", "extra", "step"].flatten()
        asked = torch.tensor(["Sum up" in text for text in texts])
        assert steps[~asked].tolist() == [1, 2, 3, 4, 5]
        assert steps[asked].isnan().all()
        assert batch["next", "reward"].flatten()[asked].tolist() == [0.0] * int(asked.sum())
        (got,) = (each.env.got for each in env.slots[0].envs.values())
        assert len(got) == 5
        assert not any("s" in text for text in got)
        # it is trained as any other turn
        row = turns_to_rows(batch.unsqueeze(0))[0]
        assert {*row[keys.TURN_IDS].tolist()} == {*range(-1, len(texts))}

    def test_it_counts_as_a_turn(self):
        _, batch, texts = self.play(max_turns=3)
        assert len(texts) == 3
        assert int(batch["next", keys.STOP_REASON][-1]) == keys.StopReason.MAX_TURNS

    def test_without_room_for_the_request_nothing_is_asked(self):
        _, batch, texts = self.play(max_model_len=180, context_rule=Summarize("Sum up." + "!" * 40, 130))
        assert not any("Sum up" in text for text in texts)
        assert int(batch["next", keys.STOP_REASON][-1]) == keys.StopReason.CONTEXT

    def test_what_was_thought_leaves_with_the_template(self):
        _, batch, texts = self.play(TEMPLATES["drops"][0], context_rule=Summarize("Sum up.", 100))
        assert any("Sum up" in text for text in texts)
        assert not any("<think>" in text for text in texts)
        assert int(batch[keys.SEGMENT][-1]) == len(texts) - 1

    def test_demonstrations_have_none(self):
        messages = [{"role": role, "content": "word " * 20} for role in ("user", "assistant", "user", "assistant")]
        rule = Summarize("Sum up.", 150)
        with pytest.raises(TranscriptError, match="Behind answer 0, the context rule Summarize"):
            episode_from_messages(messages, ChatFormatter(byte_tokenizer()), context_rule=rule)

    def test_players_are_not_asked(self):
        with pytest.raises(ConfigError, match="context_rule is Summarize"):
            SelfPlayEnv(TakeAway, tokenizer=byte_tokenizer(), context_rule=Summarize("Sum up.", 100))

    @pytest.mark.parametrize(("prompt", "at_tokens"), [(" ", 5), ("Sum up.", 0)])
    def test_arguments_are_checked(self, prompt, at_tokens):
        with pytest.raises(ValueError, match="expected a request"):
            Summarize(prompt, at_tokens)


class TestThinkingIsCounted:
    """Four episodes of a closed thought, one that the budget cut off, an empty one, and none."""

    SAID = ("<think>\nhhh\n</think>\n\n4", f"<think>\n{'h' * 60}", "<think>\n\n</think>\n\n4", "4")

    @pytest.fixture(params=["through tools", "drops", "marked"])
    def batch(self, request):
        template, pair, _ = TEMPLATES[request.param]
        tokenizer = tokenizer_with(template, *pair)
        # Where the prompt opens the thought, the last answer has to close it.
        plain = "</think>\n\n4" if request.param == "marked" else "4"
        opened = "<think>\n" if request.param == "marked" else ""
        said = [text.removeprefix(opened) for text in (*self.SAID[:3], plain)]
        policy = ScriptedPolicy(lambda episode, turn, context: said[turn], tokenizer=tokenizer, max_output_tokens=40)
        env = make_env(partial(Thinker, 4), tokenizer, on_done="idle", max_model_len=1024)
        return env.rollout(4, policy, break_when_any_done=False)

    def test_what_is_thought_and_what_is_not_closed(self, batch):
        rows = turns_to_rows(batch)
        extras = keys.turn_extras(rows)
        assert extras["thinking_open"].tolist() == [[0, 1, 0, 0]] * 4
        lengths = extras["thinking_length"]
        tokens = batch[keys.RESPONSE_MASK].sum(-1)
        assert (lengths[:, 2:] == 0).all()
        assert (lengths[:, 1] == tokens[:, 1]).all()
        assert (lengths[:, 0] < tokens[:, 0]).all()
        assert (lengths[:, 0] > 3).all()

    def test_metrics_are_means_over_turns(self, batch):
        rows = turns_to_rows(batch)
        metrics = rollout_metrics(rows)
        assert metrics["rollout/thinking_open"] == pytest.approx(1 / 4)
        expected = keys.turn_extras(rows)["thinking_length"].mean().item()
        assert metrics["rollout/thinking_length"] == pytest.approx(expected)

    def test_a_template_without_thinking_counts_nothing(self):
        tokenizer = load_tiny_tokenizer()
        env = make_env(tokenizer=tokenizer, on_done="idle")
        rows = turns_to_rows(env.rollout(9, scripted(tokenizer), break_when_any_done=False))
        assert not keys.turn_extras(rows)
        assert not [name for name in rollout_metrics(rows) if "thinking" in name]

    def test_an_environment_keeps_its_own(self):
        class Own(Thinker):
            extras: ClassVar = {"thinking_length": float, "regret": float}

            def step(self, action):
                *step, info = super().step(action)
                return (*step, info | {"thinking_length": -1.0, "regret": 2.0})

        tokenizer = thinking_tokenizer()
        env = make_env(Own, tokenizer)
        extras = env.rollout(2, scripted(tokenizer))["next", "extra"]
        assert {*extras.keys()} == {"thinking_length", "thinking_open", "regret"}
        assert (extras["thinking_length"] == -1).all()


class TestRun:
    @pytest.mark.parametrize(
        ("algo", "options"),
        [
            ("LLMPPO", {}),
            ("LLMPPO", {"collector": "async"}),
            ("LLMREINFORCE", {"overflow": "slide", "max_model_len": 48}),
            ("LLMREINFORCE", {"estimator": "TurnVine", "branches": 2}),
            ("GRPO", {"group_size": 4, "credit": "state", "baseline": "leave_one_out", "scale": "none"}),
            ("GRPO", {"group_size": 8, "tree_branches": 3, "baseline": "leave_one_out", "scale": "none"}),
        ],
    )
    def test_the_trainer_scores_what_the_policy_saw(self, tmp_path, algo, options):
        """Where every thought is dropped, each turn is a segment."""
        config = RunSettings.from_values(
            **{"algo": algo, "model_path": "tiny", "env_name": "thinker", "chat_template": MARKED, "num_envs": 8, "batch_size": 8,
            "max_model_len": 200, "max_output_tokens": 8, "max_iterations": 2, "lora_r": 0, "dtype": "float32", "device": "cpu",
            "evaluation_interval": 0, "final_episodes": 4, "output_dir": tmp_path} | options
        )  # fmt: skip
        segments = []
        run = build_run(config, make_env=partial(GEMEnv, lambda: Thinker(turns=4)), callbacks=[Segments(segments)])
        try:
            history = run.trainer.train()
        finally:
            run.close()
        assert max(metrics["policy/log_prob_gap"] for metrics in history) < 1e-5
        assert min(segments) > 1


class Segments(Callback):
    """Counts the segments of the rows of each batch."""

    def __init__(self, counts):
        self.counts = counts

    def on_batch(self, trainer, rows, metrics):
        self.counts += [len(segments_of(row)) for row in rows]
