"""Tasks: pure functions of a counter."""

from __future__ import annotations

import itertools
from dataclasses import asdict
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrl_llm.envs import RowTaskSampler, TaskSampler
from torchrl_llm.envs.resharding import reshard_state
from torchrl_llm.envs.tasks import FLOOR, MEMORY, SEED_IDS, STREAM_IDS, Stream


class TestTickets:
    @given(st.integers(0, 2**63), st.integers(1, 8), st.integers(1, 4), st.integers(1, 50))
    def test_whole_groups_share_a_task(self, seed, group_size, mixture_size, groups):
        task_sampler = TaskSampler(seed=seed, group_size=group_size, mixture_size=mixture_size)
        sampled = [task_sampler[i] for i in range(groups * group_size)]
        assert [task_spec.episode_id for task_spec in sampled] == list(range(len(sampled)))
        for i in range(0, len(sampled), group_size):
            assert len({task_spec[1:] for task_spec in sampled[i : i + group_size]}) == 1
        assert {task_spec.env_id for task_spec in sampled} == set(range(min(groups, mixture_size)))
        assert len({task_spec.seed for task_spec in sampled}) > 0.9 * groups

    @given(st.lists(st.integers(0, 99), min_size=3, max_size=3))
    def test_streams_share_no_seed_and_no_id(self, seeds):
        streams = [TaskSampler(seed=seed, stream=stream) for seed, stream in zip(seeds, get_args(Stream), strict=True)]
        tasks = [{stream[i].seed for i in range(50)} for stream in streams]
        assert len(set.union(*tasks)) == sum(map(len, tasks))
        assert [stream[0].episode_id for stream in streams] == [0, STREAM_IDS, 2 * STREAM_IDS]
        assert [stream[0].group_id for stream in streams] == [0, STREAM_IDS, 2 * STREAM_IDS]

    @given(st.integers(1, 5), st.integers(1, 4))
    def test_workers_split_one_stream(self, num_workers, group_size):
        rounds = 3 * group_size
        whole = TaskSampler(group_size=group_size)
        workers = [TaskSampler(group_size=group_size, worker=w, num_workers=num_workers) for w in range(num_workers)]
        sampled = sorted(worker[i] for worker in workers for i in range(rounds))
        assert sampled == [whole[i] for i in range(rounds * num_workers)]

    def test_ids_by_seed_are_shared_by_no_seed_and_stream(self):
        named = [
            TaskSampler(seed=seed, stream=stream, ids_by_seed=True)
            for seed in (0, 1, 2, 2**32 - 1)
            for stream in get_args(Stream)
        ]
        plain = [TaskSampler(stream=stream) for stream in get_args(Stream)]
        starts = sorted(task_sampler.base for task_sampler in (*named, *plain))
        assert min(b - a for a, b in itertools.pairwise(starts)) >= SEED_IDS
        assert max(starts) + SEED_IDS <= 2**63
        assert [t[3].seed for t in named[:3]] == [t[3].seed for t in plain]
        assert RowTaskSampler(num_rows=5, seed=9, ids_by_seed=True, shuffle=False)[7].seed == 2
        with pytest.raises(IndexError, match="share its id"):
            named[0][SEED_IDS]

    def test_seeds_are_fixed_for_ever(self):
        # A change here changes every game of every seeded run.
        assert [TaskSampler(seed=1)[i].seed for i in range(3)] == [3023998540, 2970908264, 2253905056]

    @pytest.mark.parametrize(
        "wrong",
        [{"seed": -1}, {"stream": "dev"}, {"group_size": 0}, {"mixture_size": 0}, {"worker": 2, "num_workers": 2}],
    )
    def test_wrong_options_are_named(self, wrong):
        with pytest.raises(ValueError, match=f"TaskSampler.{next(iter(wrong))}"):
            TaskSampler(**wrong)

    def test_negative_index(self):
        with pytest.raises(IndexError, match="counted from 0"):
            TaskSampler()[-1]


class TestWeights:
    def test_shares_follow_the_weights(self):
        task_sampler = TaskSampler(seed=5, mixture_size=3, weights=(1, 2, 5))
        sampled = [task_sampler[i].env_id for i in range(4000)]
        for env_id, share in enumerate((1 / 8, 2 / 8, 5 / 8)):
            assert abs(sampled.count(env_id) / 4000 - share) < 0.03

    def test_a_group_has_one_environment_whichever_worker_samples_it(self):
        whole = TaskSampler(mixture_size=2, weights=(1, 1), group_size=3)
        workers = [TaskSampler(mixture_size=2, weights=(1, 1), group_size=3, worker=w, num_workers=2) for w in range(2)]
        assert [whole[i] for i in range(12)] == [workers[i // 3 % 2][i // 6 * 3 + i % 3] for i in range(12)]
        assert len({whole[i].env_id for i in range(3)}) == 1

    def test_weights_change_no_seed(self):
        plain, weighted = TaskSampler(mixture_size=2), TaskSampler(mixture_size=2, weights=(1, 3))
        assert [plain[i].seed for i in range(20)] == [weighted[i].seed for i in range(20)]

    @pytest.mark.parametrize("weights", [(1,), (1, 0), (1, -1), (1, float("nan")), (1, float("inf"))])
    def test_weights_that_make_no_sense_are_refused(self, weights):
        with pytest.raises(ValueError, match="weights"):
            TaskSampler(mixture_size=2, weights=weights)


class TestSuccess:
    def sampled(self, task_sampler, groups):
        return [task_sampler[i * task_sampler.group_size].env_id for i in range(groups)]

    @given(st.lists(st.floats(0, 1), min_size=2, max_size=4), st.booleans())
    def test_shares_are_the_learnability_and_a_floor_times_the_weights(self, success, weighted):
        weights = tuple(range(1, len(success) + 1)) if weighted else None
        task_sampler = TaskSampler(mixture_size=len(success), success=tuple(success), weights=weights)
        for share, rate, weight in zip(task_sampler.shares, success, weights or [1] * len(success), strict=True):
            assert share == pytest.approx(weight * (rate * (1 - rate) + FLOOR))

    def test_tasks_follow_the_shares(self):
        task_sampler = TaskSampler(mixture_size=3, success=(0.0, 0.5, 1.0))
        sampled = self.sampled(task_sampler, 4000)
        for env_id, share in enumerate((1 / 8, 6 / 8, 1 / 8)):
            assert abs(sampled.count(env_id) / 4000 - share) < 0.03

    def test_before_anything_is_learned_nothing_changes(self):
        plain, fresh = (
            TaskSampler(mixture_size=3, weights=(1, 2, 3)),
            TaskSampler(mixture_size=3, weights=(1, 2, 3), success=(0.5,) * 3),
        )
        assert self.sampled(plain, 200) == self.sampled(fresh, 200)

    def test_rates_decide_the_environment_and_nothing_else(self):
        before = TaskSampler(mixture_size=3, group_size=4)
        after = before.learn([0, 1, 1, 2], [True, False, True, False])
        assert [before[i]._replace(env_id=0) for i in range(80)] == [after[i]._replace(env_id=0) for i in range(80)]
        assert self.sampled(before, 20) != self.sampled(after, 20)
        for group in range(20):
            assert len({after[4 * group + i][1:] for i in range(4)}) == 1

    def test_a_rate_is_the_average_of_recent_episodes(self):
        rate = TaskSampler(mixture_size=2).learn([1], [True]).success[1]
        assert rate == pytest.approx(0.5 + 0.5 / MEMORY)
        assert TaskSampler(mixture_size=2).learn([0] * 999, [False] * 999).success == pytest.approx((0, 0.5))
        parts = TaskSampler(mixture_size=2).learn([0] * 5, [True] * 5).learn([0] * 3, [True] * 3)
        assert parts.success == pytest.approx(TaskSampler(mixture_size=2).learn([0] * 8, [True] * 8).success)

    def test_the_order_within_a_batch_does_not_count(self):
        task_sampler = TaskSampler(mixture_size=2)
        one, other = [True, False, True, True], [True, True, True, False]
        assert task_sampler.learn([0, 0, 0, 1], one).success == task_sampler.learn([1, 0, 0, 0], other).success

    def test_rates_are_progress_and_no_setting(self):
        assert TaskSampler(mixture_size=2) == TaskSampler(mixture_size=2).learn([0], [True])

    @pytest.mark.parametrize("success", [(0.5,), (0.5, 1.1), (0.5, float("nan"))])
    def test_rates_that_make_no_sense_are_refused(self, success):
        with pytest.raises(ValueError, match=r"TaskSampler\.success"):
            TaskSampler(mixture_size=2, success=success)

    @pytest.mark.parametrize("stream", ["eval", "test"])
    def test_evaluation_does_not_adapt(self, stream):
        with pytest.raises(ValueError, match="for the stream 'train'"):
            TaskSampler(mixture_size=2, stream=stream).learn([0], [True])


def test_workers_continue_a_state_that_was_written_before_there_were_stages():
    new, old = ({"task_sampler": asdict(TaskSampler()), "num_sampled": count} for count in (0, 3))
    del old["task_sampler"]["stages"]
    state = reshard_state([old], new)
    assert state == new | {"num_sampled": 3}
