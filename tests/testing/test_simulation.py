"""The collector on simulated workers: exact where it can be worked out by hand, and its laws for
any number of workers."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_llm.collectors._cluster import ProcessLostError
from torchrl_llm.testing.simulation import (
    Costs,
    SimulatedCluster,
    SimulatedCollector,
    simulate,
    uniform_lengths,
)

FREE = Costs(request=0.0, message=0.0, call=0.0, episode=0.0)
SHORT = uniform_lengths((1, 4), (8, 16))


def collector_of(costs=FREE, lengths=SHORT, *, slots=4, **kwargs):
    return SimulatedCollector(costs, lengths, slots=slots, **{"num_workers": 3, "batch_size": 24} | kwargs)


class TestTime:
    @pytest.mark.parametrize(("slots", "expected"), [(1, 8 * 30), (8, 30), (16, 30)])
    def test_of_equal_episodes(self, slots, expected):
        """8 episodes of 3 turns of 10 tokens: a slot plays one after the other, and slots side by
        side."""
        collector = collector_of(lengths=lambda _: [10, 10, 10], slots=slots, num_workers=1, batch_size=8)
        collector.batch()
        assert collector.cluster.now == pytest.approx(expected * FREE.step)
        assert collector.cluster.busy == 0.0

    @pytest.mark.parametrize(
        ("costs", "more"),
        [
            ({"turn": 0.5}, 3 * 0.5),
            ({"env": 0.5}, 3 * 0.5),
            ({"request": 0.5}, 0.5),
            ({"call": 0.05}, 0.05),
            ({"message": 0.5}, 1.0),
        ],
    )
    def test_of_what_costs_something(self, costs, more):
        """One episode: its first prompt and two more come from the environment, and one message is
        enough."""
        costs = replace(FREE, **costs)
        collector = collector_of(costs, lambda _: [5, 5, 5], num_workers=1, batch_size=1)
        collector.batch()
        assert collector.cluster.now == pytest.approx(15 * costs.step + more)

    def test_of_an_update(self):
        collector = collector_of()
        collector.batch()
        before = collector.cluster.now
        collector.update(3.0)
        assert collector.cluster.now == pytest.approx(before + 3.0)
        assert collector.policy.policy_version == 1

    def test_engines_have_work_as_long_as_there_is_some(self):
        run = simulate(FREE, lambda _: [10], workers=4, slots=8, batch_size=4 * 8 * 16)
        assert run.of_engines == pytest.approx(1.0, abs=0.02)


class TestEpisodes:
    @settings(max_examples=20)
    @given(seed=st.integers(0, 2**32), workers=st.integers(1, 6), slots=st.integers(1, 9), staleness=st.integers(0, 2))
    def test_are_delivered_once_and_in_order_whatever_is_lost(self, seed, workers, slots, staleness):
        numbers = random.Random(seed)

        class Losing(SimulatedCluster):
            def answer(self, call):
                if numbers.random() < 0.2:
                    raise ProcessLostError("gone")
                return super().answer(call)

        class OnLosing(SimulatedCollector):
            def _make_cluster(self, options):
                old = self.cluster
                self.cluster = Losing(old.costs, old.slots, old.lengths, old.info)
                return self.cluster

        collector = OnLosing(
            Costs(), SHORT, slots=slots, num_workers=workers, batch_size=12, max_staleness=staleness, max_losses=10_000
        )
        delivered = []
        for _ in range(4):
            delivered += [episode.index for episode in collector.batch()]
            collector.update(0.3)
        assert delivered == sorted(set(delivered))
        missing = set(range(delivered[-1])) - set(delivered)
        assert len(missing) <= collector.dropped["stale"]
        assert collector.lost_workers > 0


class TestManyWorkers:
    @pytest.mark.parametrize(("staleness", "per_slot", "share"), [(0, 16, 0.83), (1, 4, 0.93)])
    def test_one_process_feeds_64(self, staleness, per_slot, share):
        """Of 8 slots each: 750 conversations a second. With a message for each of them it would
        have no time left."""
        run = simulate(
            Costs(),
            SHORT,
            workers=64,
            slots=8,
            batch_size=64 * 8 * per_slot,
            max_staleness=staleness,
            update=0.2 * staleness,
        )
        assert run.of_engines > share
        assert run.busy < 0.7

    @pytest.mark.slow
    @pytest.mark.extra
    def test_one_process_feeds_512(self):
        """Where conversations take a minute or so, and every slot has more than one."""
        lengths = uniform_lengths((1, 8), (100, 600))
        run = simulate(Costs(step=0.03), lengths, workers=512, slots=4, batch_size=512 * 4 * 4)
        assert run.of_engines > 0.6
        assert run.busy < 0.6
