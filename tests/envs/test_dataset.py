"""PromptDatasetEnv: rows of a dataset as one-turn episodes."""

from __future__ import annotations

import asyncio
import copy
import inspect
import json
import pickle
import random
import threading
import time
import traceback
from collections import Counter
from functools import partial

import numpy as np
import pytest
import torch
from torchrl.envs import check_env_specs

from torchrl_llm import keys
from torchrl_llm.collectors import AsyncTurnCollector, TurnCollector
from torchrl_llm.envs import (
    CHATML,
    EnvironmentFault,
    GEMEnv,
    NotAppendOnlyError,
    PromptDatasetEnv,
    PromptFormatter,
    RewardError,
    RowTaskSampler,
    read_rows,
    train_test_split,
)
from torchrl_llm.keys import StopReason
from torchrl_llm.testing.policies import ScriptedPolicy

ROWS = [{"question": f"What is {i} + {i}?", "answer": str(2 * i)} for i in range(5)]
SPLITS = {"train": ROWS, "test": [{"question": f"Held out {i}?", "answer": f"secret {i}"} for i in range(3)]}


def exact_match(completion, answer, question):
    return completion == answer


@pytest.fixture
def make(tokenizer):
    def make(dataset=ROWS, reward_fn=exact_match, **kwargs):
        return PromptDatasetEnv(
            dataset,
            reward_fn,
            **{"tokenizer": tokenizer, "max_model_len": 128, "max_output_tokens": 16, "max_faults": 0, **kwargs},
        )

    return make


@pytest.fixture
def says(tokenizer):
    def says(script="4"):
        function = script if callable(script) else lambda episode, turn, context: script
        return ScriptedPolicy(function, tokenizer=tokenizer, max_output_tokens=16)

    return says


@pytest.fixture
def collect_rows(says):
    def collect_rows(env, episodes, script="4"):
        """The rows, rewards and groups of the next episodes."""
        batch = TurnCollector(env, says(script), batch_size=episodes).rollout()
        tokenizer = env.formatter.tokenizer
        lengths = (batch[keys.TURN_IDS] >= 0).long().argmax(-1)  # of the prompts
        texts = [tokenizer.decode(ids[:length]) for ids, length in zip(batch[keys.TOKENS], lengths, strict=True)]
        rows = [next(i for i, row in enumerate(env.rows) if row.question in text) for text in texts]
        return rows, batch[keys.TURN_REWARD][:, 0].tolist(), batch["group_id"].tolist()

    return collect_rows


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

    def test_a_hugging_face_dataset(self, make, collect_rows):
        datasets = pytest.importorskip("datasets")
        table = datasets.Dataset.from_list(ROWS)
        assert read_rows(table) == read_rows(ROWS)
        splits = table.train_test_split(test_size=2, seed=0)
        assert len(make(splits).rows) == 3
        assert len(make(splits, stream="test").rows) == 2

    def test_other_columns(self):
        assert read_rows([{"problem": "?", "solution": [1, 2]}], question="problem", answer="solution")[0] == (
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
    def test_never_reach_the_reward_of_training(self, make, collect_rows, batched):
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
    def test_each_epoch_has_every_row_once_in_a_new_order(self, make, collect_rows):
        env = make(num_envs=2)
        rows = collect_rows(env, 20)[0]
        epochs = [rows[i : i + 5] for i in range(0, 20, 5)]
        assert all(sorted(epoch) == [0, 1, 2, 3, 4] for epoch in epochs)
        assert len({tuple(epoch) for epoch in epochs}) > 1
        assert env.epoch == 4

    def test_the_order_is_named_by_the_seed(self, make, collect_rows):
        orders = [collect_rows(make(num_envs=n, seed=seed), 10)[0] for n, seed in ((1, 0), (3, 0), (1, 1))]
        assert orders[0] == orders[1] != orders[2]

    def test_without_shuffling_the_order_is_the_datasets(self, make, collect_rows):
        assert collect_rows(make(shuffle=False), 7)[0] == [0, 1, 2, 3, 4, 0, 1]

    def test_evaluation_keeps_the_order(self, make, collect_rows):
        assert collect_rows(make(SPLITS, stream="test"), 4)[0] == [0, 1, 2, 0]

    def test_a_group_is_one_row(self, make, collect_rows):
        rows, _, groups = collect_rows(make(num_envs=6, group_size=3), 15)
        assert rows[::3] == rows[1::3] == rows[2::3]
        assert sorted(rows[::3]) == [0, 1, 2, 3, 4]
        assert groups == [i // 3 for i in range(15)]

    def test_workers_share_an_epoch_without_overlap(self):
        workers = [RowTaskSampler(num_rows=6, group_size=2, worker=w, num_workers=3, seed=5) for w in range(3)]
        sampled = Counter(task_sampler[i].seed for task_sampler in workers for i in range(4))
        assert sampled == dict.fromkeys(range(6), 2)

    def test_a_run_continues_in_the_middle_of_an_epoch(self, make, collect_rows):
        env, other = make(num_envs=2), make(num_envs=2, seed=9)
        collect_rows(env, 7)
        other.load_state_dict(env.state_dict())
        assert collect_rows(other, 8) == collect_rows(env, 8)

    def test_a_state_of_another_dataset_is_refused(self, make):
        env = make(num_envs=2)
        env.reset()
        with pytest.raises(ValueError, match="num_rows=5"):
            make(ROWS[:4], num_envs=2).load_state_dict(env.state_dict())

    def test_global_generators_are_left_alone(self, make, collect_rows):
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

    def test_the_reward_function_gets_completion_answer_and_question(self, make, collect_rows):
        received = []
        collect_rows(
            make(reward_fn=lambda *arguments: received.append(arguments) or 0.0, shuffle=False), 2, "hö <|im_start|>"
        )
        assert received == [("hö <|im_start|>", row["answer"], row["question"]) for row in ROWS[:2]]

    def test_the_async_collector_has_the_same_rows(self, make, says, collect_rows):
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


class Callable3:
    def __call__(self, completion, answer, question):
        return 0.0


class TestArguments:
    @pytest.mark.parametrize(
        "reward_fn",
        [
            exact_match,
            Callable3(),
            max,
            lambda *a: 0.0,
            lambda a, b, c, d=1: 0.0,
            partial(exact_match),
            lambda a, b, *c: 0.0,
        ],
    )
    def test_three_are_enough(self, make, reward_fn):
        make(reward_fn=reward_fn)

    @pytest.mark.parametrize(
        ("reward_fn", "message"),
        [
            (
                lambda completion: 0.0,
                r"is <lambda>\(completion\); expected .* reward_fn\(completion, answer, question\)",
            ),
            (lambda a, b: 0.0, "three positional arguments"),
            (lambda a, b, c, d: 0.0, "missing a required argument: 'd'"),
            (lambda *, completion, answer, question: 0.0, "three positional arguments"),
            (partial(exact_match, question=""), "three positional arguments"),
            (1.0, r"reward_fn is 1\.0; expected a function"),
        ],
    )
    def test_others_are_refused_before_anything_runs(self, make, reward_fn, message):
        with pytest.raises(TypeError, match=message):
            make(reward_fn=reward_fn)
        with pytest.raises(TypeError, match=r"a function|completions, answers, questions"):
            make(reward_fn=reward_fn, batched=True)


class TestOptions:
    """Every keyword of GEMEnv has its effect, or is refused."""

    def test_history_is_honored(self, make, tokenizer):
        rewriting = copy.deepcopy(tokenizer)
        rewriting.chat_template = CHATML.replace("message in messages", "message in messages[-3:]")
        with pytest.raises(NotAppendOnlyError, match='history="append"'):
            make(tokenizer=rewriting)
        assert make(tokenizer=rewriting, history="append").formatter.history == "append"

    @pytest.mark.parametrize(
        ("name", "value"), [("max_turns", 3), ("overflow", "slide"), ("success_by", "return"), ("weights", [1.0])]
    )
    def test_what_means_nothing_is_refused(self, make, name, value):
        with pytest.raises(ValueError, match=f"PromptDatasetEnv: {name} is .* expected"):
            make(**{name: value})

    def test_no_other_keyword_is_swallowed(self, make, tokenizer):
        """All of GEMEnv's, each with another value than its default, in the environment that results."""
        given = {
            "num_envs": 4, "max_model_len": 99, "max_output_tokens": 9, "max_turns": 1, "overflow": "truncate",
            "group_size": 2, "weights": None, "max_faults": 5, "num_threads": 3, "step_timeout": 7.0, "system_prompt": "S",
            "template": "raw", "history": "append", "chat_template_kwargs": {"a": 1}, "success_reward": 0.5,
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
        assert tokenizer.decode(env.formatter.start("Q")).startswith("S")


class TestBatchedRewards:
    def test_a_step_is_one_call(self, make, collect_rows):
        calls = []

        def reward_fn(completions, answers, questions):
            calls.append(questions)
            return torch.tensor([float(c == a) for c, a in zip(completions, answers, strict=True)])

        rows, rewards, _ = collect_rows(make(reward_fn=reward_fn, batched=True, num_envs=5), 10)
        assert [len(call) for call in calls] == [5, 5]
        assert rewards == [float(row == 2) for row in rows]

    def test_equal_responses_to_one_row_keep_their_own_rewards(self, make, collect_rows):
        def reward_fn(completions, answers, questions):
            return [0.25 * i for i in range(len(answers))]

        assert collect_rows(make(reward_fn=reward_fn, batched=True, num_envs=3, group_size=3), 3)[1] == [0.0, 0.25, 0.5]

    def test_slots_that_are_not_stepped_are_not_graded(self, make, says):
        sizes = []

        def reward_fn(completions, answers, questions):
            sizes.append(len(answers))
            return [0.0] * len(answers)

        env = make(reward_fn=reward_fn, batched=True, num_envs=3)
        td = says()(env.reset())
        env.step(td.set("_step", torch.tensor([[True], [False], [True]])))
        assert sizes == [2]

    @pytest.mark.parametrize("returned", [[0.0], 0.0, None])
    def test_another_number_of_rewards_is_a_fault(self, make, collect_rows, returned):
        with pytest.raises(EnvironmentFault, match=r"for 2 completions; expected as many numbers"):
            collect_rows(make(reward_fn=lambda *_: returned, batched=True, num_envs=2), 2)


class TestAsyncRewards:
    def test_calls_of_a_step_run_at_once_in_one_loop(self, make, collect_rows):
        running, peak, loops = 0, 0, set()

        async def reward_fn(completion, answer, question):
            nonlocal running, peak
            running, peak = running + 1, max(peak, running + 1)
            loops.add((id(asyncio.get_running_loop()), threading.get_ident()))
            await asyncio.sleep(0.05)
            running -= 1
            return float(completion == answer)

        env = make(reward_fn=reward_fn, num_envs=5)
        rows, rewards, _ = collect_rows(env, 10)
        assert peak == 5
        assert len(loops) == 1
        assert rewards == [float(row == 2) for row in rows]
        env.close()
        assert "reward_fn" not in {thread.name for thread in threading.enumerate()}

    def test_a_batched_one_is_awaited_once(self, make, collect_rows):
        calls = []

        async def reward_fn(completions, answers, questions):
            calls.append(len(answers))
            return [1.0] * len(answers)

        assert collect_rows(make(reward_fn=reward_fn, batched=True, num_envs=4), 4)[1] == [1.0] * 4
        assert calls == [4]

    def test_the_async_collector_awaits_them_at_once(self, make, says):
        async def reward_fn(completion, answer, question):
            await asyncio.sleep(0.02)
            return float(completion == answer)

        collector = AsyncTurnCollector(make(reward_fn=reward_fn, num_envs=5), says(), batch_size=10)
        batch = collector.rollout()
        collector.shutdown()
        assert batch[keys.TURN_REWARD].sum() == 2

    def test_one_that_takes_too_long_is_a_fault(self, make, collect_rows):
        async def reward_fn(completion, answer, question):
            await asyncio.sleep(30)

        start = time.monotonic()
        with pytest.raises(EnvironmentFault, match=r"took too long \(reward_timeout=0\.05 s\)") as caught:
            collect_rows(make(reward_fn=reward_fn, reward_timeout=0.05), 1)
        assert isinstance(caught.value.cause, TimeoutError)
        assert time.monotonic() - start < 5


async def _async_failure(completion, answer, question):
    raise KeyError("oops")


def _failure(completion, answer, question):
    raise KeyError("oops")


class TestFaults:
    @pytest.mark.parametrize("batched", [False, True])
    @pytest.mark.parametrize("reward_fn", [_failure, _async_failure])
    def test_a_reward_function_that_raises_names_the_row(self, make, collect_rows, reward_fn, batched):
        with pytest.raises(
            EnvironmentFault, match=r"KeyError: 'oops' \(row 0, question 'What is 0 \+ 0\?'\)"
        ) as caught:
            collect_rows(make(reward_fn=reward_fn, batched=batched, shuffle=False), 1)
        assert isinstance(caught.value.cause, RewardError)
        assert isinstance(caught.value.cause.__cause__, KeyError)
        assert (caught.value.task_spec.seed, caught.value.turn) == (0, 0)

    @pytest.mark.parametrize("returned", [float("nan"), float("inf"), "1", None, 1j, [1.0, 2.0]])
    def test_what_is_no_finite_number_is_a_fault(self, make, collect_rows, returned):
        with pytest.raises(EnvironmentFault, match="expected a finite number"):
            collect_rows(make(reward_fn=lambda *_: returned), 1)

    @pytest.mark.parametrize("returned", [True, 1, np.float32(1), torch.tensor(1.0)])
    def test_numbers_of_every_kind_are_taken(self, make, collect_rows, returned):
        assert collect_rows(make(reward_fn=lambda *_: returned), 1)[1] == [1.0]

    def test_one_bad_reward_of_a_batch_is_the_fault_of_its_row(self, make, collect_rows):
        def reward_fn(completions, answers, questions):
            return [float("nan") if answer == "6" else 0.0 for answer in answers]

        with pytest.raises(EnvironmentFault, match=r"returned nan; expected a finite number \(row 3"):
            collect_rows(make(reward_fn=reward_fn, batched=True, num_envs=5, shuffle=False), 5)

    @pytest.mark.parametrize("batched", [False, True])
    def test_are_contained_like_those_of_any_environment(self, make, says, batched):
        def of_one(completion, answer, question):
            return float("nan") if answer == "6" else 1.0

        def of_many(completions, answers, questions):
            return [of_one(*each) for each in zip(completions, answers, questions, strict=True)]

        env = make(reward_fn=of_many if batched else of_one, batched=batched, num_envs=5, shuffle=False, max_faults=1)
        td = env.rollout(1, says())["next"]
        assert td["stop_reason"].flatten().tolist() == [
            StopReason.ERROR if i == 3 else StopReason.WON for i in range(5)
        ]
        assert td["truncated"].flatten().tolist() == [i == 3 for i in range(5)]
        assert env.faults == {"error": 1}

    @pytest.mark.parametrize("is_async", [False, True])
    def test_a_batched_call_that_fails_counts_once(self, make, says, is_async, caplog):
        """Whatever the number of rows: 5 of them are within ``max_faults=1``, and a second call is not."""

        def reward_fn(completions, answers, questions):
            raise KeyError("oops")

        async def async_reward_fn(completions, answers, questions):
            raise KeyError("oops")

        env = make(reward_fn=async_reward_fn if is_async else reward_fn, batched=True, num_envs=5, max_faults=1)
        td = env.rollout(1, says())["next"]
        assert td["stop_reason"].flatten().tolist() == [StopReason.ERROR] * 5
        assert env.faults == {"error": 1}
        assert caplog.text.count("oops") == 1
        with pytest.raises(EnvironmentFault, match="oops") as caught:
            env.rollout(1, says())
        assert "the first of 2 failed episodes" in str(caught.value.__notes__)

    def test_of_a_collector_too(self, make, says):
        """One call that fails is within the collector's ``max_faults``; its rows are played again by other tasks."""
        failing = [True]

        def reward_fn(completions, answers, questions):
            if failing:
                raise RuntimeError(failing.pop())
            return [1.0] * len(answers)

        env = make(reward_fn=reward_fn, batched=True, num_envs=5, max_faults=3)
        collector = TurnCollector(env, says(), batch_size=5, max_faults=1)
        assert collector.rollout()[keys.TURN_REWARD].sum() == 5
        assert (collector.faults.total(), collector.dropped.total()) == (1, 5)

    @pytest.mark.parametrize("is_async", [False, True])
    def test_a_batched_call_has_the_time_of_a_step(self, make, says, is_async):
        release = threading.Event()

        def reward_fn(completions, answers, questions):
            release.wait(30)
            return [1.0] * len(answers)

        async def async_reward_fn(completions, answers, questions):
            await asyncio.sleep(30)

        env = make(reward_fn=async_reward_fn if is_async else reward_fn, batched=True, num_envs=2, step_timeout=0.2,
            max_faults=1)  # fmt: skip
        start = time.monotonic()
        td = env.rollout(1, says())["next"]
        release.set()
        assert time.monotonic() - start < 10
        assert td["stop_reason"].flatten().tolist() == [StopReason.TIMEOUT] * 2
        assert env.faults == {"timeout": 1}
        assert "step_timeout=0.2" in str(env.last_fault)

    def test_a_bug_is_one_traceback_with_its_task(self, make, says, caplog):
        def reward_fn(completion, answer, question):
            return answer["no such key"]  # the user's line

        env = make(reward_fn=reward_fn, num_envs=4, max_faults=3, shuffle=False)
        collector = TurnCollector(env, says(), batch_size=8)
        with pytest.raises(EnvironmentFault) as caught:
            collector.rollout()
        assert "Traceback" not in caplog.text
        assert "".join(traceback.format_exception(caught.value)).count("# the user's line") == 1
        assert not any(record.exc_info for record in caplog.records)
        line = reward_fn.__code__.co_firstlineno + 1
        for part in ("TypeError: string indices", f"(row 0, question '{ROWS[0]['question']}')", f"({__file__}:{line})"):
            assert part in str(caught.value)

    def test_the_next_step_is_graded_anew(self, make, says):
        failing = [True]

        def reward_fn(completions, answers, questions):
            if failing:
                raise RuntimeError(failing.pop())
            return [1.0] * len(answers)

        env = make(reward_fn=reward_fn, batched=True, num_envs=2)
        with pytest.raises(EnvironmentFault):
            env.step(says()(env.reset()))
        assert env.step(says()(env.reset()))["next", "reward"].flatten().tolist() == [1.0, 1.0]
