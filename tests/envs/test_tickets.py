"""Tickets: pure functions of a counter."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrl_llm.envs import Tickets
from torchrl_llm.envs.tickets import STREAM_IDS, Stream


class TestTickets:
    @given(st.integers(0, 2**63), st.integers(1, 8), st.integers(1, 4), st.integers(1, 50))
    def test_whole_groups_share_a_task(self, seed, group_size, num_tasks, groups):
        tickets = Tickets(seed=seed, group_size=group_size, num_tasks=num_tasks)
        dealt = [tickets[i] for i in range(groups * group_size)]
        assert [ticket.episode_id for ticket in dealt] == list(range(len(dealt)))
        for i in range(0, len(dealt), group_size):
            assert len({ticket[1:] for ticket in dealt[i : i + group_size]}) == 1
        assert {ticket.env_id for ticket in dealt} == set(range(min(groups, num_tasks)))
        assert len({ticket.seed for ticket in dealt}) > 0.9 * groups

    @given(st.lists(st.integers(0, 99), min_size=3, max_size=3))
    def test_streams_share_no_task_and_no_id(self, seeds):
        streams = [Tickets(seed=seed, stream=stream) for seed, stream in zip(seeds, get_args(Stream), strict=True)]
        tasks = [{stream[i].seed for i in range(50)} for stream in streams]
        assert len(set.union(*tasks)) == sum(map(len, tasks))
        assert [stream[0].episode_id for stream in streams] == [0, STREAM_IDS, 2 * STREAM_IDS]
        assert [stream[0].group_id for stream in streams] == [0, STREAM_IDS, 2 * STREAM_IDS]

    @given(st.integers(1, 5), st.integers(1, 4))
    def test_workers_split_one_stream(self, num_workers, group_size):
        rounds = 3 * group_size
        whole = Tickets(group_size=group_size)
        workers = [Tickets(group_size=group_size, worker=w, num_workers=num_workers) for w in range(num_workers)]
        dealt = sorted(worker[i] for worker in workers for i in range(rounds))
        assert dealt == [whole[i] for i in range(rounds * num_workers)]

    def test_seeds_are_fixed_for_ever(self):
        # A change here changes every game of every seeded run.
        assert [Tickets(seed=1)[i].seed for i in range(3)] == [3023998540, 2970908264, 2253905056]

    @pytest.mark.parametrize(
        "wrong",
        [{"seed": -1}, {"stream": "dev"}, {"group_size": 0}, {"num_tasks": 0}, {"worker": 2, "num_workers": 2}],
    )
    def test_wrong_options_are_named(self, wrong):
        with pytest.raises(ValueError, match=f"Tickets.{next(iter(wrong))}"):
            Tickets(**wrong)

    def test_negative_index(self):
        with pytest.raises(IndexError, match="counted from 0"):
            Tickets()[-1]


class TestWeights:
    def test_shares_follow_the_weights(self):
        tickets = Tickets(seed=5, num_tasks=3, weights=(1, 2, 5))
        dealt = [tickets[i].env_id for i in range(4000)]
        for env_id, share in enumerate((1 / 8, 2 / 8, 5 / 8)):
            assert abs(dealt.count(env_id) / 4000 - share) < 0.03

    def test_a_group_plays_one_environment_whoever_deals_it(self):
        whole = Tickets(num_tasks=2, weights=(1, 1), group_size=3)
        workers = [Tickets(num_tasks=2, weights=(1, 1), group_size=3, worker=w, num_workers=2) for w in range(2)]
        assert [whole[i] for i in range(12)] == [workers[i // 3 % 2][i // 6 * 3 + i % 3] for i in range(12)]
        assert len({whole[i].env_id for i in range(3)}) == 1

    def test_weights_change_no_seed(self):
        plain, weighted = Tickets(num_tasks=2), Tickets(num_tasks=2, weights=(1, 3))
        assert [plain[i].seed for i in range(20)] == [weighted[i].seed for i in range(20)]

    @pytest.mark.parametrize("weights", [(1,), (1, 0), (1, -1), (1, float("nan")), (1, float("inf"))])
    def test_weights_that_make_no_sense_are_refused(self, weights):
        with pytest.raises(ValueError, match="weights"):
            Tickets(num_tasks=2, weights=weights)
