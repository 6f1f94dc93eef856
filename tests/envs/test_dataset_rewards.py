"""PromptDatasetEnv: what a reward function gets, how it is called, and what its faults end."""

from __future__ import annotations

import asyncio
import re
import threading
import traceback
from functools import partial, wraps

import numpy as np
import pytest
import torch
from dataset_rows import ROWS, collect_rows, exact_match, make_env, make_policy
from waiting import LIMIT, wait_until

from torchrl_llm import keys
from torchrl_llm.collectors import AsyncTurnCollector, TurnCollector
from torchrl_llm.envs import EnvironmentFault, RewardError
from torchrl_llm.keys import StopReason


@pytest.fixture
def make(tokenizer):
    return partial(make_env, tokenizer=tokenizer)


@pytest.fixture
def says(tokenizer):
    return partial(make_policy, tokenizer=tokenizer)


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
            lambda a, b, c, d=1, /: 0.0,
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
            (lambda *, completion, answer, question: 0.0, "three positional arguments"),
            (partial(exact_match, question=""), "three positional arguments"),
            (lambda c, a, q, level, /: 0.0, "three positional arguments .*'level'"),
            (1.0, r"reward_fn is 1\.0; expected a function"),
        ],
    )
    def test_others_are_refused_before_anything_runs(self, make, reward_fn, message):
        with pytest.raises(TypeError, match=message):
            make(reward_fn=reward_fn)
        with pytest.raises(TypeError, match=r"a function|completions, answers, questions"):
            make(reward_fn=reward_fn, batched=True)


def _of_trl(prompts, completions, answer, **kwargs):
    return [float(completion == right) for completion, right in zip(completions, answer, strict=True)]


def _of_verl(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str == ground_truth)


class TestNames:
    """Reward functions are called by position; one that names its arguments in another order would
    get them mixed up."""

    @pytest.mark.parametrize(
        ("reward_fn", "batched", "said"),
        [
            (_of_trl, True, "lambda completions, answers, questions: _of_trl(prompts=questions, completions=completions, answer=answers)"),
            (
                _of_verl,
                False,
                "lambda completion, answer, question, data_source: _of_verl(solution_str=completion, ground_truth=answer, "
                "data_source=data_source)",
            ),
            (lambda completion, question, answer: 0.0, False, "whose argument 'question' would be given the answer"),
            (lambda question, completion, answer: 0.0, False, "whose argument 'question' would be given the completion"),
            (lambda answer, completion, question: 0.0, False, "whose argument 'answer' would be given the completion"),
            (lambda completions, completion_ids, answers: 0.0, True, "'completion_ids' would be given the answers"),
            (lambda prompt, response, target, level: 0.0, False, "lambda completion, answer, question, level:"),
        ],
    )  # fmt: skip
    def test_another_order_is_refused_with_a_function_around_it(self, make, reward_fn, batched, said):
        with pytest.raises(TypeError, match=re.escape(said)):
            make(reward_fn=reward_fn, batched=batched)

    def test_the_function_around_it_does_what_it_should(self, make):
        rows = [{**row, "data_source": "mine"} for row in ROWS]
        for reward_fn, batched in (
            (
                lambda completion, answer, question, data_source: _of_verl(
                    solution_str=completion, ground_truth=answer, data_source=data_source
                ),
                False,
            ),
            (
                lambda completions, answers, questions: _of_trl(
                    prompts=questions, completions=completions, answer=answers
                ),
                True,
            ),
        ):
            got, rewards, _ = collect_rows(make(rows, reward_fn, batched=batched, num_envs=5), 5)
            assert rewards == [float(row == 2) for row in got]

    @pytest.mark.parametrize(
        "reward_fn",
        [
            lambda response, ground_truth, prompt: 0.0,
            lambda answer, solution, question: 0.0,  # the model's answer
            lambda c, a, prompt: 0.0,
            lambda output, label, query, data_source, extra_info=None: 0.0,
            lambda completion, answer, _, prompt="": 0.0,
        ],
    )
    def test_names_that_fit_are_taken(self, make, reward_fn):
        make([{**row, "data_source": "mine"} for row in ROWS], reward_fn)


LEVELED = [{"question": f"{i}?", "answer": "4", "level": i, "tests": [i, i + 1], "source": "s"} for i in range(3)]


class TestColumns:
    """What a function names beside completion, answer and question."""

    @staticmethod
    def seen(make, reward_fn, dataset=LEVELED, **kwargs):
        """What the function got for the first three rows, which it puts into the list that is its
        attribute."""
        reward_fn.got = []
        env = make(dataset, reward_fn, num_envs=3, shuffle=False, **kwargs)
        collect_rows(env, 3)
        env.close()
        return reward_fn.got

    def test_named_ones_come_by_name(self, make):
        def reward_fn(completion, answer, question, tests, *, level):
            reward_fn.got.append((completion, answer, question, tests, level))
            return 1.0

        assert self.seen(make, reward_fn) == [("4", "4", f"{i}?", [i, i + 1], i) for i in range(3)]

    def test_a_default_stays_where_the_data_has_no_such_column(self, make):
        def reward_fn(completion, answer, question, unit="m", level=None):
            reward_fn.got.append((unit, level))
            return 1.0

        assert self.seen(make, reward_fn) == [("m", i) for i in range(3)]
        assert self.seen(make, reward_fn, [{"question": f"{i}?", "answer": ""} for i in range(3)]) == [("m", None)] * 3

    def test_keywords_get_all_others(self, make):
        def reward_fn(completion, answer, question, *, level, **others):
            reward_fn.got.append(others)
            return 1.0

        assert self.seen(make, reward_fn) == [{"tests": [i, i + 1], "source": "s"} for i in range(3)]
        # Of the same name as what is passed by position: that stays.
        rows = [{"prompt": f"{i}?", "right": "", "question": "other", "completion": "x", "level": 0} for i in range(3)]
        assert self.seen(make, reward_fn, rows, question="prompt", answer="right") == [{}] * 3

    def test_what_takes_any_arguments_gets_none(self, make):
        def reward_fn(*args, **kwargs):
            reward_fn.got.append(kwargs)
            return exact_match(*args, **kwargs)

        assert self.seen(make, reward_fn) == [{}] * 3

    def test_batched_ones_are_lists(self, make):
        def reward_fn(completions, answers, questions, level, **others):
            reward_fn.got.append((level, others))
            return [1.0] * len(completions)

        expected = {"tests": [[0, 1], [1, 2], [2, 3]], "source": ["s"] * 3}
        assert self.seen(make, reward_fn, batched=True) == [([0, 1, 2], expected)]

    def test_coroutines_get_them_too(self, make):
        async def reward_fn(completion, answer, question, level):
            await asyncio.sleep(0)
            reward_fn.got.append(level)
            return 1.0

        assert sorted(self.seen(make, reward_fn)) == [0, 1, 2]

    @pytest.mark.parametrize(
        "reward_fn", [lambda a, b, c, size: 0.0, lambda a, b, c, level=0, *, size: 0.0, lambda a, b, c, size, **k: 0.0]
    )
    def test_a_name_that_is_no_column_is_refused(self, make, reward_fn):
        with pytest.raises(
            ValueError, match=r"Row 0 has no column \['size'\]; its columns are .*'level', 'tests'.*reward_fn"
        ):
            make(LEVELED, reward_fn)
        splits = {"train": [row | {"size": 1} for row in LEVELED], "test": [{"question": "t", "answer": "a"}]}
        with pytest.raises(
            ValueError, match=r"Row 0 has no column \['size'\]; its columns are \['question', 'answer'\]"
        ):
            make(splits, reward_fn)

    def test_every_row_must_have_it(self, make):
        with pytest.raises(ValueError, match=r"Row 3 has no column \['level'\]"):
            make([*LEVELED, {"question": "?", "answer": ""}], lambda a, b, c, level=0: 0.0)

    def test_rows_keep_no_others(self, make):
        assert make(LEVELED, lambda a, b, c, level: 0.0).rows[2].columns == {"level": 2}
        assert make(LEVELED).rows[2].columns == {}


class TestBatchedRewards:
    def test_a_step_is_one_call(self, make):
        calls = []

        def reward_fn(completions, answers, questions):
            calls.append(questions)
            return torch.tensor([float(c == a) for c, a in zip(completions, answers, strict=True)])

        rows, rewards, _ = collect_rows(make(reward_fn=reward_fn, batched=True, num_envs=5), 10)
        assert [len(call) for call in calls] == [5, 5]
        assert rewards == [float(row == 2) for row in rows]

    def test_equal_responses_to_one_row_keep_their_own_rewards(self, make):
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
    def test_another_number_of_rewards_is_a_fault(self, make, returned):
        with pytest.raises(EnvironmentFault, match=r"for 2 completions; expected as many numbers"):
            collect_rows(make(reward_fn=lambda *_: returned, batched=True, num_envs=2), 2)


class TestAsyncRewards:
    def test_calls_of_a_step_run_at_once_in_one_loop(self, make):
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
        wait_until(
            lambda: "reward_fn" not in {thread.name for thread in threading.enumerate()}, "the end of the loop's thread"
        )

    def test_a_batched_one_is_awaited_once(self, make):
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

    @pytest.mark.parametrize("batched", [False, True])
    def test_a_decorator_around_one_hides_nothing(self, make, batched):
        async def one(completion, answer, question):
            await asyncio.sleep(0)
            return float(completion == answer)

        async def many(completions, answers, questions):
            return [await one(*each) for each in zip(completions, answers, questions, strict=True)]

        def decorated(function):
            @wraps(function)
            def call(*args, **kwargs):
                return function(*args, **kwargs)

            return call

        rows, rewards, _ = collect_rows(
            make(reward_fn=decorated(many if batched else one), batched=batched, num_envs=5), 5
        )
        assert rewards == [float(row == 2) for row in rows]

    def test_one_that_takes_too_long_is_a_fault(self, make):
        async def reward_fn(completion, answer, question):
            await asyncio.sleep(LIMIT)

        with pytest.raises(EnvironmentFault, match=r"took too long \(reward_timeout=0\.05 s\)") as caught:
            collect_rows(make(reward_fn=reward_fn, reward_timeout=0.05), 1)
        assert isinstance(caught.value.cause, TimeoutError)


async def _async_failure(completion, answer, question):
    raise KeyError("oops")


def _failure(completion, answer, question):
    raise KeyError("oops")


class TestNumbers:
    @pytest.mark.parametrize("one", [np.array([0.5]), torch.tensor([0.5]), torch.full((1, 1), 0.5, requires_grad=True)])
    def test_a_number_in_an_array(self, make, one):
        assert collect_rows(make(reward_fn=lambda *_: one), 2)[1] == [0.5, 0.5]

    def test_the_column_of_a_reward_model(self, make):
        def reward_fn(completions, answers, questions):
            return torch.full((len(completions), 1), 0.5, requires_grad=True)

        assert collect_rows(make(reward_fn=reward_fn, batched=True, num_envs=2), 2)[1] == [0.5, 0.5]

    @pytest.mark.parametrize(
        ("returned", "said"),
        [
            ((1.0, {"format": 1.0}), "the number alone, of parts their sum"),
            ({"score": 1.0}, "the number alone, of parts their sum"),
            ([1.0], "is given with batched=True"),
        ],
    )
    def test_what_may_have_been_meant(self, make, returned, said):
        with pytest.raises(EnvironmentFault, match=said):
            collect_rows(make(reward_fn=lambda *_: returned), 1)


class TestFaults:
    @pytest.mark.parametrize("batched", [False, True])
    @pytest.mark.parametrize("reward_fn", [_failure, _async_failure])
    def test_a_reward_function_that_raises_names_the_row(self, make, reward_fn, batched):
        with pytest.raises(
            EnvironmentFault, match=r"KeyError: 'oops' \(row 0, question 'What is 0 \+ 0\?'\)"
        ) as caught:
            collect_rows(make(reward_fn=reward_fn, batched=batched, shuffle=False), 1)
        assert isinstance(caught.value.cause, RewardError)
        assert isinstance(caught.value.cause.__cause__, KeyError)
        assert (caught.value.task_spec.seed, caught.value.turn) == (0, 0)

    @pytest.mark.parametrize("returned", [float("nan"), float("inf"), 1e39, "1", None, 1j, [1.0, 2.0]])
    def test_what_is_no_finite_number_is_a_fault(self, make, returned):
        with pytest.raises(EnvironmentFault, match="expected a finite number"):
            collect_rows(make(reward_fn=lambda *_: returned), 1)

    @pytest.mark.parametrize("returned", [True, 1, np.float32(1), torch.tensor(1.0)])
    def test_numbers_of_every_kind_are_taken(self, make, returned):
        assert collect_rows(make(reward_fn=lambda *_: returned), 1)[1] == [1.0]

    def test_one_bad_reward_of_a_batch_is_the_fault_of_its_row(self, make):
        def reward_fn(completions, answers, questions):
            return [float("nan") if answer == "6" else 0.0 for answer in answers]

        with pytest.raises(EnvironmentFault, match=r"returned nan; expected a finite number of .* \(row 3"):
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
        """Whatever the number of rows: 5 of them are within ``max_faults=1``, and a second call is
        not."""

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
        """One call that fails is within the collector's ``max_faults``; its rows are played again
        by other tasks."""
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
    def test_a_batched_call_has_the_time_of_a_step(self, make, says, is_async, hang):
        def reward_fn(completions, answers, questions):
            hang()
            return [1.0] * len(answers)

        async def async_reward_fn(completions, answers, questions):
            # one of them waits for this
            hang.threads.update(thread.ident for thread in threading.enumerate())
            await asyncio.sleep(LIMIT)

        env = make(reward_fn=async_reward_fn if is_async else reward_fn, batched=True, num_envs=2, step_timeout=0.2,
            max_faults=1)  # fmt: skip
        td = env.rollout(1, says())["next"]
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
