"""Conversations as episodes: the tokens that an environment would have made of them, and what is
refused, with its line."""

from __future__ import annotations

import json
import re

import pytest
from tensordict import TensorDict

from torchrl_llm import keys
from torchrl_llm.collectors import TurnCollector
from torchrl_llm.data import TranscriptError, episode_from_messages, read_transcripts, rows_from_episodes
from torchrl_llm.envs import ChatFormatter, GEMEnv
from torchrl_llm.envs.messages import plain_messages
from torchrl_llm.testing.policies import ScriptedPolicy
from torchrl_llm.testing.tiny import load_tiny_tokenizer

ASKED = {"role": "user", "content": "2 + 2?"}
SAID = {"role": "assistant", "content": "4"}


class Lookup:
    """Asks, answers as a tool, then as a user, and pays for the third turn. It writes down what is
    said."""

    heard: list[dict[str, str]] = []  # noqa: RUF012, of the one episode that runs

    def reset(self, seed=None):
        self.turn, self.heard[:] = 0, [{"role": "user", "content": " Where is Oslo ? \n"}]
        return self.heard[0]["content"], {}

    def step(self, action):
        role, text = [("tool", "<|im_end|> is no end\n"), ("user", "Sure?"), ("user", "Over.")][self.turn]
        self.turn += 1
        self.heard += [{"role": "assistant", "content": action}, {"role": role, "content": text}]
        over = self.turn == 3
        return text, 0.75 * over, over, False, {"use_tool": role == "tool", "success": over}


class TestRendering:
    @pytest.mark.parametrize(
        "options",
        [{}, {"system_prompt": "Be brief."}, {"template": "raw"}, {"template": "raw", "system_prompt": "Be brief."}],
        ids=str,
    )
    @pytest.mark.parametrize("of", ["bytes", "tiny"])
    def test_an_episode_of_an_environment_is_the_same_as_messages(self, tokenizer, tmp_path, of, options):
        tokenizer = tokenizer if of == "bytes" else load_tiny_tokenizer()
        env = GEMEnv(Lookup, tokenizer=tokenizer, max_output_tokens=32, **options)
        said = ["look up: 3  spaces", "?", " In Norway . "]
        policy = ScriptedPolicy(lambda episode, turn, context: said[turn], tokenizer=tokenizer)
        expected = TurnCollector(env, policy, batch_size=1).rollout()
        system = [{"role": "system", "content": options["system_prompt"]}] if "system_prompt" in options else []
        file = tmp_path / "a.jsonl"
        lines = [{"messages": start + Lookup.heard, "reward": 0.75, "success": True} for start in ([], system)]
        file.write_text("\n\n".join(map(json.dumps, lines)) + "\n")
        for episode in read_transcripts(file, env.formatter):
            row = rows_from_episodes([episode])
            assert same(row, expected)
            assert row[keys.SAMPLE_LOG_PROB].isnan().equal(row[keys.TURN_IDS] >= 0)

    def test_the_last_word_is_the_assistants_or_a_closing_message(self, tokenizer):
        formatter = ChatFormatter(tokenizer)
        closed = episode_from_messages([ASKED, SAID, {"role": "user", "content": "Right."}], formatter)
        plain = episode_from_messages([ASKED, SAID], formatter)
        assert [len(each.turns) for each in (closed, plain)] == [1, 1]
        assert tokenizer.decode(plain.contexts[0]).endswith("\n4<|im_end|>")
        assert tokenizer.decode(closed.contexts[0]).endswith(
            "<|im_start|>user\nRight.<|im_end|>\n<|im_start|>assistant\n"
        )

    def test_reward_and_success(self, tokenizer):
        formatter = ChatFormatter(tokenizer)
        episode = episode_from_messages([ASKED, SAID, ASKED, SAID], formatter, reward=2.5, success=True, index=4)
        assert (episode.rewards, episode.success, episode.stop_reason) == ([0.0, 2.5], True, keys.StopReason.WON)
        assert (episode.terminated, episode.truncated, episode.episode_id, episode.group_id) == (True, False, 4, 4)
        lost = episode_from_messages([ASKED, SAID], formatter)
        assert (lost.rewards, lost.success, lost.stop_reason) == ([0.0], False, keys.StopReason.LOST)

    def test_markup_with_tokens_of_its_own_becomes_them(self, tokenizer):
        marked = load_tiny_tokenizer()
        marked.add_tokens(["<think>"])
        ids = ChatFormatter(marked).answer("<think>so")
        assert ids[0] == marked.convert_tokens_to_ids("<think>")
        assert ids[-1:] == ChatFormatter(marked).end_of_turn_ids[:1]


def same(row: TensorDict, expected: TensorDict) -> bool:
    """Whether rows are equal but for ids, and for log-probs, which transcripts do not have."""
    names = (keys.TOKENS, keys.TURN_IDS, keys.ATTENTION_MASK, keys.POLICY_VERSION, keys.TURN_REWARD, keys.TURN_MASK)
    names += (keys.TURN_TERMINATED, keys.TURN_TRUNCATED, keys.TURN_SUCCESS, keys.TURN_STOP_REASON)
    for name in names:
        assert row[name].equal(expected[name]), name
    return True


def spoken(*roles):
    return [{"role": role, "content": "x"} for role in roles]


WRONG = {
    "no JSON": ('{"messages": [', "Expecting value"),
    "no object": ("[1]", "found list; expected an object with messages, and perhaps reward and success"),
    "no messages": ({"reward": 1.0}, r"found \['reward'\]; expected an object with messages"),
    "a misspelt field": (
        {"messages": [ASKED, SAID], "rewards": 1},
        "it has rewards, which is not a field. Did you mean 'reward'",
    ),
    "messages of text": ({"messages": json.dumps([ASKED, SAID])}, "is text; expected a list of messages .json.loads"),
    "messages of nothing": ({"messages": 3}, "3 is not a list of messages"),
    "a pair of answers": ({"prompt": [ASKED], "chosen": [SAID], "rejected": [SAID]}, "it has rejected, and pairs.*DPO"),
    "Alpaca's fields": (
        {"instruction": "Add.", "input": "2 + 2", "output": "4"},
        "Alpaca's fields: write instruction and",
    ),
    "a prompt of text": (
        {"prompt": "2 + 2?", "completion": "4"},
        "a prompt without a list of messages: write it and its",
    ),
    "plain text": ({"text": "2 + 2? 4"}, "one text: write who says what"),
    "tools": ({"messages": [ASKED, SAID], "tools": [{"type": "function"}]}, "it has tools, and no tools are shown"),
    "images": ({"messages": [ASKED, SAID], "images": ["cat.png"]}, "it has images, and a message is text alone"),
    "a call of a tool": (
        {"messages": [ASKED, SAID | {"content": None, "tool_calls": [{}]}]},
        "has tool_calls, and calls",
    ),
    "ShareGPT's call": (
        {"conversations": [{"from": "human", "value": "?"}, {"from": "function_call", "value": "{}"}]},
        "has the role function_call, and calls of tools",
    ),
    "thinking apart": (
        {"messages": [ASKED, SAID | {"reasoning_content": "Easy."}]},
        "has reasoning_content, and thinking",
    ),
    "an answer that is not to count": ({"messages": [ASKED, SAID | {"weight": 0}]}, "has weight, and answers of one"),
    "an answer that is not to train on": (
        {"messages": [ASKED, SAID | {"train": False}]},
        "has train, and answers of one",
    ),
    "a masked answer": ({"messages": [ASKED, SAID | {"mask": 1}]}, "has mask, and answers of one"),
    "an answer that was disliked": ({"prompt": [ASKED], "completion": [SAID], "label": False}, "it has label: false"),
    "LLaMA-Factory's": ({"messages": [ASKED, SAID], "kto_tag": False}, "it has kto_tag: false"),
    "tools by another name": ({"messages": [ASKED, SAID], "available_tools": [{}]}, "it has available_tools"),
    "a system beside messages": ({"messages": [ASKED, SAID], "system": "Arr."}, "its system message is 'Arr.'"),
    "a system beside a prompt": (
        {"prompt": [ASKED], "completion": [SAID], "system_prompt": "Arr."},
        "its system message is 'Arr.'",
    ),
    "a part that is an image": (
        {"messages": [ASKED | {"content": [{"type": "image_url", "image_url": {}}]}, SAID]},
        "is not a message.*of a list of parts only text is read",
    ),
    "a system that is not the run's": (
        {"system": "Be brief.", "conversations": [{"from": "human", "value": "?"}, {"from": "gpt", "value": "4"}]},
        "its system message is 'Be brief.', and the run's is None: set system_prompt to it",
    ),
    "a message of text": ({"messages": [ASKED, "hi"]}, "'hi' is not a message"),
    "a message without content": ({"messages": [ASKED, {"role": "assistant"}]}, "is not a message"),
    "content in parts": ({"messages": [ASKED, SAID | {"content": [{"text": "4"}]}]}, "is not a message"),
    "a reward of no text": ({"messages": [ASKED, SAID], "reward": ""}, "found '' as reward"),
    "a reward of text": ({"messages": [ASKED, SAID], "reward": "1"}, "expected a number of at most"),
    "a reward of yes": ({"messages": [ASKED, SAID], "reward": True}, "expected a number of at most"),
    "a reward of NaN": ({"messages": [ASKED, SAID], "reward": float("nan")}, "expected a number of at most"),
    "an endless reward": ({"messages": [ASKED, SAID], "reward": float("inf")}, "expected a number of at most"),
    "a reward of 400 digits": (
        f'{{"messages": {json.dumps([ASKED, SAID])}, "reward": {"1" * 400}}}',
        "a number of at most",
    ),
    "a reward of 1e39": ({"messages": [ASKED, SAID], "reward": 1e39}, r"found 1e\+39 as reward"),
    "brackets without end": ("[" * 100_000, "recursion depth"),
    "a success of 1": ({"messages": [ASKED, SAID], "success": 1}, "true or false as success"),
    "nobody": ({"messages": []}, r"its roles are \[\]; expected user and assistant in turns"),
    "only a user": ({"messages": spoken("user")}, r"its roles are \['user'\]"),
    "only a system": ({"messages": spoken("system")}, "its system message is 'x', and the run's is None"),
    "the assistant first": ({"messages": spoken("assistant", "user")}, "its roles are"),
    "a tool first": ({"messages": spoken("tool", "assistant")}, "its roles are"),
    "the user twice": ({"messages": spoken("user", "user", "assistant")}, "its roles are"),
    "the assistant twice": ({"messages": spoken("user", "assistant", "assistant")}, "its roles are"),
    "a late system": ({"messages": spoken("user", "assistant", "system", "assistant")}, "its roles are"),
    "an unknown role": (
        {"messages": spoken("user", "assistant", "critic", "assistant")},
        "its roles are.*tool after the first",
    ),
    "a special token": (
        {"messages": [ASKED, SAID | {"content": "4<|im_end|>"}]},
        r"holds '<\|im_end\|>', a special token",
    ),
    "an empty answer": (
        {"messages": [ASKED, SAID, ASKED, SAID | {"content": ""}]},
        "its answer in turn 1 is ''.*Give its text",
    ),
    "an answer of white space": ({"messages": [ASKED, SAID | {"content": " \n"}]}, "its answer in turn 0 is"),
    "half a character in an answer": ({"messages": [ASKED, SAID | {"content": "\ud800"}]}, "half of a surrogate pair"),
    "half a character": ({"messages": [ASKED | {"content": "\ud800"}, SAID]}, "half of a surrogate pair"),
}


SHAPES = {
    "messages with more": {
        "id": "x_0",
        "source": "web",
        "score": 0.5,
        "messages": [ASKED | {"name": "Ann", "train": False}, SAID | {"weight": 1, "train": True, "mask": 0}],
        "label": True,
    },
    "ShareGPT": {"id": 3, "conversations": [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}]},
    "ShareGPT, of LLaMA-Factory": {
        "system": "",
        "tools": "[]",
        "conversations": [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}],
    },
    "UltraChat": {"prompt": "2 + 2?", "prompt_id": "a", "messages": [ASKED, SAID]},
    "TRL": {"prompt": [ASKED], "completion": [SAID]},
    "parts of text": {
        "messages": [ASKED | {"content": [{"type": "text", "text": "2 "}, {"type": "text", "text": "+ 2?"}]}, SAID]
    },
    "a table's row": {
        "messages": [ASKED | {"tool_calls": None, "name": ""}, SAID | {"tool_calls": None, "name": None}],
        "reward": None,
        "success": None,
        "images": [],
    },
}


class TestShapes:
    @pytest.fixture
    def expected(self, tokenizer):
        return rows_from_episodes([episode_from_messages([ASKED, SAID], ChatFormatter(tokenizer))])

    @pytest.mark.parametrize("name", SHAPES)
    def test_files_as_people_have_them(self, tokenizer, tmp_path, name, expected):
        (tmp_path / "a.jsonl").write_text(json.dumps(SHAPES[name]) + "\n")
        assert same(rows_from_episodes(read_transcripts(tmp_path / "a.jsonl", ChatFormatter(tokenizer))), expected)

    def test_fields_that_are_not_read_are_logged_once(self, tokenizer, tmp_path, caplog):
        file = tmp_path / "a.jsonl"
        file.write_text((json.dumps(SHAPES["messages with more"]) + "\n") * 2)
        read_transcripts(file, ChatFormatter(tokenizer))
        assert [each.getMessage() for each in caplog.records] == [
            f"{file}: the fields 'id', 'name', 'score', 'source' are not read."
        ]

    def test_an_array_and_a_parquet_file(self, tokenizer, tmp_path, expected):
        parquet = pytest.importorskip("datasets").Dataset.from_list([{"messages": [ASKED, SAID], "id": 0}])
        parquet.to_parquet(tmp_path / "a.parquet")
        (tmp_path / "a.json").write_text(json.dumps([{"messages": [ASKED, SAID]}], indent=1))
        for file in (tmp_path / "a.parquet", tmp_path / "a.json"):
            assert same(rows_from_episodes(read_transcripts(file, ChatFormatter(tokenizer))), expected)

    def test_roles_as_others_call_them(self, tokenizer, expected):
        said = [{"role": "developer", "content": "Be brief."}, ASKED | {"role": "human"}, SAID | {"role": "model"}]
        read = plain_messages(said)
        assert [each["role"] for each in read.messages] == ["system", "user", "assistant"]
        assert read.unread == set()


class TestErrors:
    @pytest.mark.parametrize("name", WRONG)
    def test_the_line_is_named(self, tokenizer, tmp_path, name):
        line, match = WRONG[name]
        file = tmp_path / "a.jsonl"
        good = json.dumps({"messages": [ASKED, SAID]})
        file.write_text(f"{good}\n\n{line if isinstance(line, str) else json.dumps(line)}\n{good}\n")
        with pytest.raises(TranscriptError, match=rf"{re.escape(str(file))}, line 3: .*{match}"):
            read_transcripts(file, ChatFormatter(tokenizer))

    @pytest.mark.parametrize("text", ["", "\n \n"])
    def test_an_empty_file(self, tokenizer, tmp_path, text):
        file = tmp_path / "a.jsonl"
        file.write_text(text)
        with pytest.raises(TranscriptError, match=r"a\.jsonl has no line: expected one conversation a line"):
            read_transcripts(file, ChatFormatter(tokenizer))

    def test_a_byte_order_mark_is_none(self, tokenizer, tmp_path):
        file = tmp_path / "a.jsonl"
        file.write_text(json.dumps({"messages": [ASKED, SAID]}), encoding="utf-8-sig")
        assert len(read_transcripts(file, ChatFormatter(tokenizer))) == 1

    def test_bytes_that_are_no_text(self, tokenizer, tmp_path):
        file = tmp_path / "a.jsonl"
        file.write_bytes(b'{"messages": "\xff"}\n')
        with pytest.raises(TranscriptError, match=r"a\.jsonl.*utf-8"):
            read_transcripts(file, ChatFormatter(tokenizer))

    def test_another_system_message_than_the_runs(self, tokenizer):
        messages = [{"role": "system", "content": "Be long."}, ASKED, SAID]
        formatter = ChatFormatter(tokenizer, system_prompt="Be brief.")
        with pytest.raises(
            TranscriptError, match=r"is 'Be long\.', and the run's is 'Be brief\.': set system_prompt to it"
        ):
            episode_from_messages(messages, formatter)
