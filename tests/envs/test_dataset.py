"""PromptDatasetEnv: rows of a dataset as one-turn episodes."""

from __future__ import annotations

import copy
import inspect
import json
import pickle
import random
from collections import Counter
from functools import partial

import numpy as np
import pytest
import torch
from dataset_rows import ROWS, SPLITS, collect_rows, exact_match, make_env, make_policy
from torchrl.envs import check_env_specs

from torchrl_llm import keys
from torchrl_llm.collectors import AsyncTurnCollector
from torchrl_llm.envs import (
    CHATML,
    GEMEnv,
    NotAppendOnlyError,
    PromptFormatter,
    RowTaskSampler,
    read_rows,
    train_test_split,
)
from torchrl_llm.envs.rewards import WantedColumns
from torchrl_llm.keys import StopReason


@pytest.fixture
def make(tokenizer):
    return partial(make_env, tokenizer=tokenizer)


@pytest.fixture
def says(tokenizer):
    return partial(make_policy, tokenizer=tokenizer)


class TestRows:
    def test_lists_and_jsonl_give_the_same_rows(self, tmp_path):
        path = tmp_path / "rows.jsonl"
        path.write_text("\n".join(map(json.dumps, ROWS)) + "\n\n")
        assert read_rows(ROWS) == read_rows(path) == read_rows(str(path))

    @pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c", "\x1e"])
    def test_only_a_line_feed_ends_a_line(self, tmp_path, separator):
        rows = [{"question": f"a{separator}b{i}", "answer": separator} for i in range(2)]
        raw = separator >= "\x20"  # JSON itself escapes the others
        (tmp_path / "rows.jsonl").write_bytes("\n".join(json.dumps(row, ensure_ascii=not raw) for row in rows).encode())
        assert read_rows(tmp_path / "rows.jsonl") == read_rows(rows)
        splits = train_test_split(tmp_path / "rows.jsonl", test_size=0.5)
        assert sorted(row["question"] for part in splits.values() for row in part) == [r["question"] for r in rows]

    @pytest.mark.parametrize("end", ["\n", "\r\n"])
    @pytest.mark.parametrize("last", ["", "\n", "\n \t\n\n"])
    @pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"], ids=["", "BOM"])
    def test_as_other_programs_write_it(self, tmp_path, end, last, mark):
        text = end.join(map(json.dumps, ROWS)) + last.replace("\n", end)
        (tmp_path / "rows.jsonl").write_bytes(mark + text.encode())
        assert read_rows(tmp_path / "rows.jsonl") == read_rows(ROWS)

    def test_a_hugging_face_dataset(self, make):
        datasets = pytest.importorskip("datasets")
        table = datasets.Dataset.from_list(ROWS)
        assert read_rows(table) == read_rows(ROWS)
        splits = table.train_test_split(test_size=2, seed=0)
        assert len(make(splits).rows) == 3
        assert len(make(splits, stream="test").rows) == 2

    def test_other_columns(self):
        assert read_rows([{"problem": "?", "solution": [1, 2]}], question="problem", answer="solution")[0][:2] == (
            "?",
            [1, 2],
        )

    @pytest.mark.parametrize(
        ("dataset", "message"),
        [
            ([{"problem": "?", "answer": 1}], r"no column \['question'\]; its columns are \['problem', 'answer'\]"),
            ([{"question": 3, "answer": 1}], "Row 0 has the question 3; expected text"),
            (["text"], "Row 0 is 'text'; expected a mapping"),
            ([], "no rows"),
            (iter(ROWS), "list_iterator; expected a list of dicts"),
            ([{"prompt": "?", "ground_truth": 1}], "such as question='prompt', answer='ground_truth'"),
            (
                [{"question": [{"type": "text", "text": "?"}], "answer": 1}],
                "is not a message; expected texts as role and content",
            ),
            ("nowhere.jsonl", "There is no file 'nowhere.jsonl'"),
        ],
    )
    def test_what_is_no_dataset_is_refused(self, dataset, message):
        with pytest.raises(ValueError, match=message):
            read_rows(dataset)

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            (b'{"question": ', "Expecting value"),
            (b'{"question": "a", "answer": 1} {"question": "b", "answer": 2}', "Extra data"),
            (b'{"question": "\xff", "answer": 1}', "can't decode byte 0xff"),
            (b'"text"', "is 'text'; expected a mapping"),
            (b'{"question": "b"}', r"has no column \['answer'\]"),
            (b'{"question": null, "answer": 1}', "has the question None"),
            (b"[" * 100_000, "recursion"),
        ],
        ids=lambda value: str(value)[:20],
    )
    def test_a_bad_line_is_named(self, tmp_path, line, message):
        (tmp_path / "rows.jsonl").write_bytes(b'{"question": "a", "answer": 1}\n\n' + line + b"\n")
        with pytest.raises(ValueError, match=rf"rows\.jsonl, line 3.*{message}"):
            read_rows(tmp_path / "rows.jsonl")

    @pytest.mark.parametrize("asked", [[{"role": "user", "content": "1 + 1?"}], [{"from": "human", "value": "1 + 1?"}]])
    def test_a_question_may_be_the_users_message(self, asked, make):
        rows = [{"prompt": asked, "reward_model": {"ground_truth": "2"}}]
        assert read_rows(rows, question="prompt", answer="reward_model")[0].question == "1 + 1?"
        env = make(rows, question="prompt", answer="reward_model")
        plain = make([{"question": "1 + 1?", "answer": "2"}])
        assert env.reset()[keys.PROMPT].equal(plain.reset()[keys.PROMPT])

    def test_a_system_message_has_to_be_that_of_the_environment(self, make):
        rows = [
            {"question": [{"role": "system", "content": "Add."}, {"role": "user", "content": "1 + 1?"}], "answer": "2"}
        ]
        env = make(rows, system_prompt="Add.")
        plain = make([{"question": "1 + 1?", "answer": "2"}], system_prompt="Add.")
        assert env.reset()[keys.PROMPT].equal(plain.reset()[keys.PROMPT])
        with pytest.raises(
            ValueError, match=r"Row 0 .*its system message is 'Add\.', and the environment's is None: set system"
        ):
            make(rows)

    def test_questions_of_several_turns_are_refused(self):
        said = [{"role": role, "content": "x"} for role in ("user", "assistant", "user")]
        with pytest.raises(
            ValueError, match=r"its roles are \['user', 'assistant', 'user'\], and expected is a user's message"
        ):
            read_rows([{"question": said, "answer": "2"}])

    def test_a_table_and_columns_and_splits_are_no_rows(self, make):
        table = pytest.importorskip("pandas").DataFrame(ROWS)
        assert read_rows(table.to_dict("records")) == read_rows(ROWS)
        with pytest.raises(ValueError, match=r"The dataset is a DataFrame; .*table\.to_dict"):
            read_rows(table)
        with pytest.raises(ValueError, match=r"Rows of columns are datasets\.Dataset\.from_dict"):
            make({"question": ["?"], "answer": ["!"]})
        with pytest.raises(ValueError, match=r"is a mapping with \['train', 'test'\]; expected rows"):
            train_test_split(SPLITS, test_size=0.5)

    @pytest.mark.parametrize("name", ["image", "images", "Video", "audio"])
    def test_a_column_that_no_model_would_see_is_refused(self, name):
        rows = [ROWS[0], ROWS[1] | {name: "cat.png"}]
        with pytest.raises(ValueError, match=rf"Row 1 has the column '{name}', and a prompt is text alone.*Remove"):
            read_rows(rows)
        with pytest.raises(ValueError, match="a prompt is text alone"):  # **columns names nothing
            read_rows(rows, wanted=WantedColumns(others=True))
        rows = [row | {name: "cat.png"} for row in ROWS]
        assert read_rows(rows, wanted=WantedColumns((name,)))[0].columns == {name: "cat.png"}
        for nothing in (None, [], ""):
            assert len(read_rows([row | {name: nothing} for row in ROWS])) == len(ROWS)

    def test_so_is_one_of_that_type_in_a_hugging_face_dataset(self):
        datasets = pytest.importorskip("datasets")
        dataset = datasets.Dataset.from_list([row | {"seen": None, "frames": []} for row in ROWS])
        assert len(read_rows(dataset)) == len(ROWS)
        for kind, name in ((datasets.Image(decode=False), "seen"), ([datasets.Image(decode=False)], "frames")):
            typed = datasets.Features(dataset.features | {name: kind})
            with pytest.raises(ValueError, match=rf"Row 0 has the column '{name}', and a prompt is text alone"):
                read_rows(dataset.cast(typed))


class TestSplits:
    def test_train_test_split_divides_and_keeps_every_row(self):
        splits = train_test_split(ROWS, test_size=0.4, seed=1)
        assert len(splits["test"]) == 2
        assert sorted(row["answer"] for part in splits.values() for row in part) == sorted(r["answer"] for r in ROWS)
        assert splits == train_test_split(ROWS, test_size=0.4, seed=1)
        assert len({str(train_test_split(ROWS, test_size=0.4, seed=s)["test"]) for s in range(20)}) > 3

    @pytest.mark.parametrize("share", [0.0, 1.0, 0.01, -0.2, 7])
    def test_a_split_without_rows_is_refused(self, share):
        with pytest.raises(ValueError, match="test_size"):
            train_test_split(ROWS, test_size=share)

    def test_streams_read_their_splits(self, make):
        splits = {**SPLITS, "validation": [{"question": "v", "answer": "v"}]}
        answers = {stream: {row.answer for row in make(splits, stream=stream).rows} for stream in ("eval", "test")}
        assert answers == {"eval": {"v"}, "test": {"secret 0", "secret 1", "secret 2"}}
        assert len(make(SPLITS, stream="eval").rows) == 3

    def test_rows_alone_are_for_training_only(self, make):
        with pytest.raises(ValueError, match=r"reads the split 'validation' or 'test'; the dataset has \['train'\]"):
            make(ROWS, stream="eval")

    def test_a_question_in_both_splits_is_refused(self, make):
        with pytest.raises(ValueError, match="1 questions of the split 'test' are in 'train' too, such as 'What is 0"):
            make({"train": ROWS, "test": ROWS[:1]})


class TestTestAnswers:
    @pytest.mark.parametrize("batched", [False, True])
    def test_never_reach_the_reward_of_training(self, make, batched):
        received = []

        def reward_fn(completion, answer, question):
            received.extend(answer if batched else [answer])
            return [0.0] * len(answer) if batched else 0.0

        collect_rows(make(SPLITS, reward_fn, num_envs=4, batched=batched), 40)
        assert set(received) == {row["answer"] for row in SPLITS["train"]}
        received.clear()
        collect_rows(make(SPLITS, reward_fn, num_envs=4, batched=batched, stream="test"), 8)
        assert set(received) == {row["answer"] for row in SPLITS["test"]}

    def test_are_not_held_by_a_training_environment(self, make):
        assert b"secret" not in pickle.dumps(make(SPLITS))
        assert b"secret" in pickle.dumps(make(SPLITS, stream="test"))


class TestEpochs:
    def test_each_epoch_has_every_row_once_in_a_new_order(self, make):
        env = make(num_envs=2)
        rows = collect_rows(env, 20)[0]
        epochs = [rows[i : i + 5] for i in range(0, 20, 5)]
        assert all(sorted(epoch) == [0, 1, 2, 3, 4] for epoch in epochs)
        assert len({tuple(epoch) for epoch in epochs}) > 1
        assert env.epoch == 4

    def test_the_order_is_named_by_the_seed(self, make):
        orders = [collect_rows(make(num_envs=n, seed=seed), 10)[0] for n, seed in ((1, 0), (3, 0), (1, 1))]
        assert orders[0] == orders[1] != orders[2]

    def test_without_shuffling_the_order_is_the_datasets(self, make):
        assert collect_rows(make(shuffle=False), 7)[0] == [0, 1, 2, 3, 4, 0, 1]

    def test_evaluation_keeps_the_order(self, make):
        assert collect_rows(make(SPLITS, stream="test"), 4)[0] == [0, 1, 2, 0]

    def test_a_group_is_one_row(self, make):
        rows, _, groups = collect_rows(make(num_envs=6, group_size=3), 15)
        assert rows[::3] == rows[1::3] == rows[2::3]
        assert sorted(rows[::3]) == [0, 1, 2, 3, 4]
        assert groups == [i // 3 for i in range(15)]

    def test_workers_share_an_epoch_without_overlap(self):
        workers = [RowTaskSampler(num_rows=6, group_size=2, worker=w, num_workers=3, seed=5) for w in range(3)]
        sampled = Counter(task_sampler[i].seed for task_sampler in workers for i in range(4))
        assert sampled == dict.fromkeys(range(6), 2)

    def test_a_run_continues_in_the_middle_of_an_epoch(self, make):
        env, other = make(num_envs=2), make(num_envs=2, seed=9)
        collect_rows(env, 7)
        other.load_state_dict(env.state_dict())
        assert collect_rows(other, 8) == collect_rows(env, 8)

    def test_a_state_of_another_dataset_is_refused(self, make):
        env = make(num_envs=2)
        env.reset()
        with pytest.raises(ValueError, match="num_rows=5"):
            make(ROWS[:4], num_envs=2).load_state_dict(env.state_dict())

    def test_global_generators_are_left_alone(self, make):
        before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
        collect_rows(make(num_envs=2), 12)
        assert before == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())


class TestEpisodes:
    @pytest.mark.parametrize("batched", [False, True])
    def test_specs(self, make, batched):
        reward_fn = (lambda completions, answers, questions: [0.0] * len(answers)) if batched else exact_match
        check_env_specs(make(num_envs=3, batched=batched, reward_fn=reward_fn))

    def test_end_after_one_turn_as_success_or_not(self, make, says):
        env = make(num_envs=5, shuffle=False)
        td = env.rollout(3, says("4"))["next"]
        assert td.shape == (5, 1)
        assert td["terminated"].all()
        assert not td["truncated"].any()
        assert td["stop_reason"].flatten().tolist() == [StopReason.WON if i == 2 else StopReason.LOST for i in range(5)]
        assert td["success"].flatten().tolist() == [i == 2 for i in range(5)]

    def test_the_reward_function_gets_completion_answer_and_question(self, make):
        received = []
        collect_rows(
            make(reward_fn=lambda *arguments: received.append(arguments) or 0.0, shuffle=False), 2, "hö <|im_start|>"
        )
        assert received == [("hö <|im_start|>", row["answer"], row["question"]) for row in ROWS[:2]]

    def test_the_async_collector_has_the_same_rows(self, make, says):
        expected = collect_rows(make(num_envs=2), 10)[:2]
        with_threads = AsyncTurnCollector(make(num_envs=2), says(), batch_size=10)
        batch = with_threads.rollout()
        with_threads.shutdown()
        assert batch[keys.TURN_REWARD][:, 0].tolist() == expected[1]


class TestPrompts:
    def text(self, tokenizer, template, **kwargs):
        return tokenizer.decode(PromptFormatter(tokenizer, conversation_template=template, **kwargs).start("1 + 1"))

    def test_a_whole_template(self, tokenizer):
        template = [
            {"role": "system", "content": "Use \\boxed{}."},
            {"role": "user", "content": "2 + 2?"},
            {"role": "assistant", "content": "\\boxed{4}"},
            {"role": "user", "content": "{question}?"},
            {"role": "assistant", "content": "Let me think."},
        ]
        messages = [{**message, "content": message["content"].replace("{question}", "1 + 1")} for message in template]
        expected = tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
        assert self.text(tokenizer, template) == expected + "Let me think."

    def test_the_environment_uses_it(self, make, says):
        env = make(conversation_template=[{"role": "user", "content": "Q: {question}"}], system_prompt="Be brief.")
        prompt = env.reset()[keys.PROMPT][0]
        assert "system\nBe brief.<|im_end|>\n<|im_start|>user\nQ: What is" in env.formatter.tokenizer.decode(prompt)

    def test_control_tokens_in_a_question_stay_text(self, tokenizer):
        ids = PromptFormatter(tokenizer).start("<|im_end|>")
        assert ids.count(tokenizer.convert_tokens_to_ids("<|im_end|>")) == 1

    @pytest.mark.parametrize(
        ("template", "message"),
        [
            ([], "has the roles"),
            ([{"role": "assistant", "content": "{question}"}], r"has the roles \['assistant'\]"),
            ([{"role": "user", "content": "{question}"}] * 2, "user and assistant in turn"),
            ([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "{question}"}], "no user message"),
        ],
    )
    def test_other_templates_are_refused(self, tokenizer, template, message):
        with pytest.raises(ValueError, match=message):
            PromptFormatter(tokenizer, conversation_template=template)

    def test_two_system_prompts_are_refused(self, make):
        template = [{"role": "system", "content": "a"}, {"role": "user", "content": "{question}"}]
        with pytest.raises(ValueError, match="give one"):
            make(conversation_template=template, system_prompt="b")


class TestOptions:
    """Every keyword of GEMEnv has its effect, or is refused."""

    def test_contexts_is_honored(self, make, tokenizer):
        rewriting = copy.deepcopy(tokenizer)
        rewriting.chat_template = CHATML.replace("message in messages", "message in messages[-3:]")
        with pytest.raises(NotAppendOnlyError, match='contexts="append"'):
            make(tokenizer=rewriting)
        assert make(tokenizer=rewriting, contexts="append").formatter.contexts == "append"

    @pytest.mark.parametrize(
        ("name", "value"), [("max_turns", 3), ("overflow", "slide"), ("success_by", "return"), ("weights", [1.0])]
    )
    def test_what_means_nothing_is_refused(self, make, name, value):
        with pytest.raises(ValueError, match=f"PromptDatasetEnv: {name} is .* expected"):
            make(**{name: value})

    def test_no_other_keyword_is_swallowed(self, make, tokenizer):
        """All of GEMEnv's, each with another value than its default, in the environment that
        results."""
        given = {
            "num_envs": 4, "max_model_len": 99, "max_output_tokens": 9, "max_turns": 1, "overflow": "truncate", "context_rule": None,
            "group_size": 2, "weights": None, "max_faults": 5, "num_threads": 3, "step_timeout": 7.0, "system_prompt": "S",
            "template": "raw", "contexts": "append", "chat_template_kwargs": {"a": 1}, "missing_thinking": "empty", "success_reward": 0.5,
            "template_date": "2024-02-29", "tools": (),
            "success_by": None, "on_done": "idle", "stream": "test", "seed": 8, "worker": 1, "num_workers": 2,
            "device": "cpu", "tokenizer": tokenizer,
        }  # fmt: skip
        parameters = set(inspect.signature(GEMEnv.__init__).parameters) - {"self", "env"}
        assert parameters - {"divide"} == set(given)
        env = make(SPLITS, **given)
        task_sampler = env.task_sampler
        assert (
            task_sampler.group_size,
            task_sampler.stream,
            task_sampler.seed,
            task_sampler.worker,
            task_sampler.num_workers,
        ) == (
            2,
            "test",
            8,
            1,
            2,
        )
        names = (
            "max_model_len",
            "max_output_tokens",
            "max_faults",
            "num_threads",
            "step_timeout",
            "success_reward",
            "on_done",
        )
        assert [getattr(env, name) for name in names] == [given[name] for name in names]
        assert env.batch_size == (4,)
        assert env.formatter.missing_thinking == "empty"
        assert tokenizer.decode(env.formatter.start("Q")).startswith("S")
