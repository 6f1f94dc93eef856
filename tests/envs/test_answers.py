"""Answers behind the prompt: thoughts that a template opens, and what environments and reward
functions get of responses."""

from __future__ import annotations

import copy
import json
import pickle
from functools import partial

import cloudpickle
import pytest
import torch
import yaml
from tokenizers import AddedToken

from torchrl_llm.collectors import SelfPlayCollector, TurnCollector
from torchrl_llm.data import TranscriptError, episode_from_messages, read_transcripts
from torchrl_llm.envs import (
    CHATML,
    ChatFormatter,
    ControlTokenError,
    GEMEnv,
    MissingThinkingError,
    PromptDatasetEnv,
    PromptFormatter,
    Response,
    SelfPlayEnv,
)
from torchrl_llm.modules import PlayerPolicy
from torchrl_llm.testing.policies import ScriptedPolicy
from torchrl_llm.testing.take_away import TakeAway
from torchrl_llm.testing.tokenizers import byte_tokenizer

HEAD = "{% for m in messages %}<|im_start|>{{ m.role }}\n"
FOOT = "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
OPENED = FOOT.replace("assistant\n", "assistant\n<think>\n")
SPLIT = (
    "{% set thought = m.content.split('</think>')[0].split('<think>')[-1].strip() if '</think>' in m.content else '' %}"
    "{% set said = m.content.split('</think>')[-1].strip() %}"
)
TEMPLATES = {
    # Each opens a thought, but for the last three, and writes answers: as they are, without
    # thoughts, and in a form of its own.
    "as they are": HEAD + "{{ m.content }}" + OPENED,
    "dropped": HEAD + "{{ m.content.split('</think>')[-1].lstrip('\n') if m.role == 'assistant' else m.content }}" + OPENED,
    "in its form": HEAD + "{% if m.role == 'assistant' %}" + SPLIT + "<think>\n{{ thought }}\n</think>\n\n{{ said }}"
    "{% else %}{{ m.content }}{% endif %}" + OPENED,
    "in a field": HEAD + "{% if m.role == 'assistant' %}<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}"
    "{{ m.content }}" + OPENED,
    "closed": HEAD + "{% if m.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}"
    + FOOT.replace("assistant\n", "assistant\n<think>\n\n</think>\n\n"),
    "written": HEAD + "{{ '<think>\n\n</think>\n\n' if m.role == 'assistant' and '</think>' not in m.content }}{{ m.content }}" + FOOT,
    "trimmed in its form": HEAD + "{% set m = {'role': m.role, 'content': m.content | trim} %}{% if m.role == 'assistant' %}"
    "{{ '<think>\n\n</think>\n\n' if '</think>' not in m.content }}{% endif %}{{ m.content }}" + OPENED,
    "trimmed": HEAD + "{{ m.content | trim }}" + FOOT,
}  # fmt: skip
OPEN = ("as they are", "dropped", "in its form", "in a field")
THOUGHT = "<think>\nEasy.\n</think>\n\n4"
ASKED = [{"role": "user", "content": text} for text in ("2 + 2?", "3 + 1?", "1 + 3?")]


def tokenizer_of(name, *, special=False, markers=("<think>", "</think>")):
    tokenizer = byte_tokenizer(chat_template=TEMPLATES[name])
    tokenizer.add_tokens([AddedToken(token, special=special, normalized=False) for token in markers])
    return tokenizer


def formatter_of(name, **options):
    return ChatFormatter(tokenizer_of(name), **{"contexts": "append"} | options)


def conversation(*answers):
    said = [{"role": "assistant", "content": text} for text in answers]
    return [message for pair in zip(ASKED, said, strict=False) for message in pair]


def context_of(formatter, *answers):
    return formatter.tokenizer.decode(episode_from_messages(conversation(*answers), formatter).contexts[0])


class TestAnswers:
    @pytest.mark.parametrize("name", OPEN)
    @pytest.mark.parametrize("given", [THOUGHT, "Easy.\n</think>\n\n4", f"\n{THOUGHT}"])
    def test_a_thought_that_is_open_is_not_opened_again(self, name, given):
        text = context_of(formatter_of(name), given, given)
        assert text.count("<think>") == text.count("</think>") == 2
        assert text.count("<think>\nEasy.\n</think>\n\n4<|im_end|>") == 2

    @pytest.mark.parametrize(
        "name", ["as they are", "in its form", "trimmed in its form", "closed", "written", "trimmed"]
    )
    @pytest.mark.parametrize("given", [THOUGHT, "<think>Easy.</think>  4", "4", " 4\n"])
    def test_the_context_is_the_templates_own_text(self, name, given):
        """Where the template keeps answers, it renders the conversation as we do, to the letter."""
        formatter = formatter_of(name, contexts="template", missing_thinking="empty")
        if name == "closed" and "think" in given:
            with pytest.raises(MissingThinkingError, match="thinks, and its prompt ends with the empty thought"):
                context_of(formatter, given)
            return
        if name in ("as they are", "trimmed in its form") and "think" in given:
            given = THOUGHT
        if name == "as they are":  # it shows a thought only where the message has one
            given = given if given.startswith("<think>\n") else f"<think>\n\n</think>\n\n{given}"
        own = formatter.tokenizer.apply_chat_template(conversation(given, given), tokenize=False)
        assert context_of(formatter, given, given) + "\n" == own

    def test_a_thought_that_is_closed_is_not_closed_again(self):
        """A sampled answer whose prompt had opened its thought, behind a prompt that has closed
        it."""
        with pytest.raises(MissingThinkingError, match="thinks, and its prompt ends with the empty thought"):
            context_of(formatter_of("closed", contexts="template"), "Easy.\n</think>\n\n4")

    def test_a_field_of_the_message_gets_the_thought(self):
        formatter = formatter_of("in a field", contexts="template")
        messages = [*ASKED[:1], {"role": "assistant", "content": "4", "reasoning_content": "Easy."}]
        own = formatter.tokenizer.apply_chat_template(messages, tokenize=False)
        assert context_of(formatter, "<think>Easy.</think>4") + "\n" == own

    @pytest.mark.parametrize("name", OPEN)
    @pytest.mark.parametrize("given", ["4", "<think>\n4", "<think>"])
    def test_what_does_not_close_the_thought_is_refused_with_its_line(self, name, given, tmp_path):
        file = tmp_path / "a.jsonl"
        lines = [{"messages": conversation(answer)} for answer in (THOUGHT, given)]
        file.write_text("\n".join(map(json.dumps, lines)))
        with pytest.raises(TranscriptError) as error:
            read_transcripts(file, formatter_of(name))
        said = f"a.jsonl, line 2: The answer {given!r} lacks '</think>', and its prompt ends with the open thought '<think>\\n': give"
        assert said in str(error.value)
        assert ('missing_thinking="empty"' in str(error.value)) == (given == "4")

    @pytest.mark.parametrize("name", OPEN)
    def test_or_closed_by_an_empty_thought(self, name):
        formatter = formatter_of(name, missing_thinking="empty")
        text = context_of(formatter, "4", THOUGHT)
        assert "assistant\n<think>\n\n</think>\n\n4<|im_end|>" in text
        assert text.endswith("<think>\nEasy.\n</think>\n\n4<|im_end|>")
        # a thought that was cut off
        with pytest.raises(MissingThinkingError, match="lacks '</think>'"):
            formatter.answer("<think>\nEas")

    def test_what_the_prompt_holds_of_an_empty_thought_is_not_repeated(self):
        formatter = formatter_of("closed")
        assert context_of(formatter, "<think>\n\n</think>\n\n4") == context_of(formatter, "4")

    @pytest.mark.parametrize("name", ["written", "as they are"])
    def test_markers_may_be_special_tokens(self, name):
        formatter = ChatFormatter(tokenizer_of(name, special=True), contexts="append")
        assert formatter.tokenizer.decode(formatter.answer(THOUGHT)).endswith("Easy.\n</think>\n\n4<|im_end|>")
        with pytest.raises(ControlTokenError, match="special token"):
            formatter.answer(f"{THOUGHT}<|im_end|>")

    def test_special_tokens_are_the_templates_own_alone(self):
        """It may write one within an answer, which must not hold one itself."""
        thought = "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think><|say|>{% endif %}"
        tokenizer = byte_tokenizer(chat_template=HEAD + thought + "{{ m.content.split('</think>')[-1] }}" + FOOT)
        tokenizer.add_tokens([AddedToken("<|say|>", special=True, normalized=False)])
        formatter = ChatFormatter(tokenizer)
        assert tokenizer.decode(formatter.answer("<think>Easy.</think>4")) == "<think>Easy.</think><|say|>4<|im_end|>"
        for text in ("<|say|>4", "<think>Easy.</think><|say|>4"):
            with pytest.raises(ControlTokenError, match=r"holds '<\|say\|>', a special token"):
                formatter.answer(text)

    def test_a_long_answer_is_encoded_once(self, monkeypatch):
        formatter, encoded = formatter_of("as they are", missing_thinking="empty"), []
        encode = formatter.tokenizer.encode
        monkeypatch.setattr(
            formatter.tokenizer, "encode", lambda text, **kwargs: encoded.append(text) or encode(text, **kwargs)
        )
        formatter.answer("so " * 1000)
        assert sum(map(len, encoded)) < 3100

    def test_where_the_template_trims_answers_are_trimmed(self):
        formatter = formatter_of("trimmed")
        assert formatter.answer(" Sure.\n") == formatter.answer("Sure.")
        assert ChatFormatter(byte_tokenizer()).answer(" Sure.\n") != ChatFormatter(byte_tokenizer()).answer("Sure.")

    def test_players_write_as_demonstrations_do(self):
        formatter = formatter_of("as they are", missing_thinking="empty")
        env = GEMEnv(Listens, tokenizer=formatter.tokenizer, missing_thinking="empty", max_output_tokens=32)
        player = PlayerPolicy(lambda *_: "4", env.formatter.tokenizer, env.formatter.answer, max_output_tokens=32)
        TurnCollector(env, player, batch_size=1).rollout()
        assert Listens.heard == ["<think>\n\n</think>\n\n4"] * 2


class TestPrompts:
    def make(self, *messages, name="as they are", **options):
        template = [{"role": role, "content": text} for role, text in messages]
        return PromptFormatter(tokenizer_of(name), conversation_template=template, contexts="append", **options)

    EXAMPLE = (("user", "1 + 1?"), ("assistant", "2"), ("user", "{question}"))

    def test_a_worked_example_is_an_answer(self):
        with pytest.raises(MissingThinkingError, match="The answer '2' lacks '</think>'"):
            self.make(*self.EXAMPLE)
        formatter = self.make(*self.EXAMPLE, missing_thinking="empty")
        text = formatter.tokenizer.decode(formatter.start("2 + 2?"))
        assert "assistant\n<think>\n\n</think>\n\n2<|im_end|>\n<|im_start|>user\n2 + 2?" in text
        formatter = self.make(("user", "?"), ("assistant", THOUGHT), ("user", "{question}"))
        assert formatter.tokenizer.decode(formatter.start("2 + 2?")).count("<think>") == 2

    @pytest.mark.parametrize(
        ("prefill", "ends", "whole", "text"),
        [
            ("<think>\nLet me", "<think>\nLet me", "<think>\n see.</think>4", "4"),
            ("<think>\nNo.\n</think>\n\nIt is", "<think>\nNo.\n</think>\n\nIt is", " see.</think>4", " see.</think>4"),
            ("No.</think>", "<think>\nNo.</think>", " see.</think>4", " see.</think>4"),
        ],
    )
    def test_a_response_that_is_begun(self, prefill, ends, whole, text):
        formatter = self.make(("user", "{question}"), ("assistant", prefill))
        assert formatter.tokenizer.decode(formatter.start("2 + 2?")).endswith(f"assistant\n{ends}")
        response = formatter.decode(formatter.tokenizer.encode(" see.</think>4<|im_end|>"))
        assert (response, response.text) == (whole, text)

    def test_one_that_is_begun_without_the_thought(self):
        given = ("user", "{question}"), ("assistant", "It is")
        with pytest.raises(MissingThinkingError, match="The answer 'It is' lacks"):
            self.make(*given)
        formatter = self.make(*given, missing_thinking="empty")
        assert formatter.tokenizer.decode(formatter.start("?")).endswith("<think>\n\n</think>\n\nIt is")
        assert formatter.decode(formatter.tokenizer.encode("4")) == "4"

    def test_a_thought_that_only_the_prompt_opens(self):
        formatter = self.make(("user", "{question}"), ("assistant", "<think>Let me"), name="trimmed")
        response = formatter.decode(formatter.tokenizer.encode(" see.</think>4"))
        assert (response, response.text) == (" see.</think>4", "4")


class Listens:
    """Two turns; keeps what it is told."""

    heard: list[str] = []  # noqa: RUF012, of the one episode that runs

    def reset(self, seed=None):
        self.heard.clear()
        return "2 + 2?", {}

    def step(self, action):
        self.heard.append(action)
        return "Again?", 1.0, len(self.heard) == 2, False, {}


class TestResponses:
    @pytest.mark.parametrize("name", OPEN)
    def test_environments_get_the_thought_that_the_prompt_opened(self, name):
        env = GEMEnv(Listens, tokenizer=tokenizer_of(name), contexts="append", max_output_tokens=32)
        said = ["Easy.\n</think>\n\n4", "Hm"]
        policy = ScriptedPolicy(lambda episode, turn, context: said[turn], tokenizer=env.formatter.tokenizer)
        TurnCollector(env, policy, batch_size=1).rollout()
        assert Listens.heard == [f"<think>\n{text}" for text in said]
        assert [each.text for each in Listens.heard] == ["4", ""]

    def test_so_do_reward_functions(self):
        got = []

        def reward_fn(completion, answer, question):
            got.append(completion)
            return float(completion.text == answer and completion.startswith("<think>"))

        rows = [{"question": "2 + 2?", "answer": "4"}]
        env = PromptDatasetEnv(rows, reward_fn, tokenizer=tokenizer_of("dropped"), contexts="append")
        policy = ScriptedPolicy(lambda *_: "Easy.</think>4", tokenizer=env.formatter.tokenizer)
        row = TurnCollector(env, policy, batch_size=1).rollout()
        assert row["turn", "reward"].tolist() == [[1.0]]
        assert isinstance(got[0], Response)
        assert got == ["<think>\nEasy.</think>4"]

    def test_and_games(self):
        moves = []

        class Watched(TakeAway):
            def move(self, text):
                moves.append(text)
                super().move(text.text)

        env = SelfPlayEnv(Watched, tokenizer=tokenizer_of("dropped"), contexts="append", max_output_tokens=32)
        policy = ScriptedPolicy(lambda *_: "One.</think>1", tokenizer=env.formatter.tokenizer)
        SelfPlayCollector(env, policy, batch_size=2).rollout()
        assert {str(move) for move in moves} == {"<think>\nOne.</think>1"}

    @pytest.mark.parametrize("name", ["closed", "written", "trimmed"])
    @pytest.mark.parametrize("said", ["4", "<think>Easy.</think> 4", "4 </think> 4", "", " <think>"])
    def test_where_no_thought_is_open_a_response_is_what_was_sampled(self, name, said):
        formatter = formatter_of(name)
        response = formatter.decode(formatter.tokenizer.encode(f"{said}<|im_end|>"))
        assert response == said
        assert response.text == {"<think>Easy.</think> 4": "4", " <think>": ""}.get(said, said)

    def test_thinking_is_what_the_template_takes_for_it(self):
        dropped = "{{ m.content.split('<end|>')[-1] if m.role == 'assistant' else m.content }}"
        tokenizer = byte_tokenizer(chat_template=HEAD + dropped + FOOT)
        tokenizer.add_tokens(["<|end>", "<end|>"])
        formatter = ChatFormatter(tokenizer, contexts="append")
        said = formatter.decode(tokenizer.encode("<|end>hm<end|>4"))
        assert (said.text, said.thinking) == ("4", "hm")
        plain = ChatFormatter(byte_tokenizer(chat_template=CHATML))
        assert plain.decode(tokenizer.encode("[THINK]hm[/THINK]4")).text == "[THINK]hm[/THINK]4"

    @pytest.mark.parametrize(
        "passed",
        [
            copy.copy,
            copy.deepcopy,
            *(lambda each, n=n: pickle.loads(pickle.dumps(each, n)) for n in range(pickle.HIGHEST_PROTOCOL + 1)),
            lambda each: cloudpickle.loads(cloudpickle.dumps(each)),
        ],
    )
    def test_it_is_passed_on_whole(self, passed):
        response = passed(Response(THOUGHT, text="4"))
        assert (type(response), response, response.text) == (Response, THOUGHT, "4")

    def test_it_is_stored_as_a_string(self, tmp_path):
        rows = {"completion": Response(THOUGHT, text="4"), "yes": Response("yes")}
        for dump in (
            yaml.safe_dump,
            yaml.dump,
            partial(yaml.dump, Dumper=getattr(yaml, "CSafeDumper", yaml.SafeDumper)),
        ):
            assert dump(rows) == yaml.safe_dump({"completion": THOUGHT, "yes": "yes"})
            assert yaml.safe_load(dump(rows)) == {"completion": THOUGHT, "yes": "yes"}
        torch.save(rows, tmp_path / "rows.pt")
        kept = torch.load(tmp_path / "rows.pt", weights_only=True)
        assert (kept["completion"], kept["completion"].text) == (THOUGHT, "4")

    def test_it_is_a_string_like_others(self):
        response = Response(THOUGHT, text="4")
        assert response == THOUGHT
        assert hash(response) == hash(THOUGHT)
        assert {THOUGHT: 1}[response] == 1
        assert json.loads(json.dumps({"response": response})) == {"response": THOUGHT}
        assert repr(response) == repr(THOUGHT)
        assert f"{response}" == str(response) == THOUGHT
        for part in (response[:7], response.strip(), response + "", str(response), Response("4").text):
            assert type(part) is str
        assert Response().text == ""
