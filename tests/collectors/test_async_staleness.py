"""AsyncTurnCollector with max_staleness: how old a token may be, and what is collected while the
caller trains."""

from __future__ import annotations

import threading
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_episodes import Streaming, episodes, length, script, versions
from waiting import a_moment, wait_until

from torchrl_llm import keys
from torchrl_llm.collectors import AsyncTurnCollector
from torchrl_llm.envs import GEMEnv
from torchrl_llm.testing.environments import StopOrGo
from torchrl_llm.testing.tokenizers import byte_tokenizer


class TestStaleness:
    @pytest.mark.parametrize("background", [False, True])
    @settings(max_examples=12)
    @given(data=st.data())
    def test_in_order_nothing_lost_nothing_twice_and_not_too_old(self, background, data):
        staleness, group = data.draw(st.integers(1, 3)), data.draw(st.sampled_from([1, 2]))
        slots, size = group * data.draw(st.integers(1, 4)), group * data.draw(st.integers(1, 4))
        tokenizer = byte_tokenizer()
        policy = Streaming(script, tokenizer=tokenizer, max_output_tokens=16, delay=data.draw(st.integers(1, 12)))
        env = GEMEnv(StopOrGo, tokenizer=tokenizer, max_output_tokens=16, num_envs=slots, group_size=group)
        collector = AsyncTurnCollector(
            env, policy, batch_size=size, max_staleness=staleness, background=background, total_batches=6, num_threads=2
        )
        seen = []
        for batch in collector:
            age = policy.policy_version - versions(batch)
            assert 0 <= int(age.min()) <= int(age.max()) <= staleness
            assert env.num_sampled - len(seen) <= (staleness + 1) * size
            seen += episodes(batch)
            assert batch[keys.TURN_MASK].sum(-1).tolist() == [length(episode) for episode in episodes(batch)]
            policy.weights_changed()
        collector.shutdown()
        assert seen == list(range(6 * size))
        assert not collector.dropped

    def test_requests_go_on_across_an_update(self, make, streams, collect):
        policy = streams(lambda e, t, c: "stop" if t == 5 else "go on", delay=12)
        collector = collect(make(num_envs=8), policy, batch_size=4, max_staleness=2, total_batches=8, background=False)
        mixed_turns = mixed_episodes = 0
        for batch in collector:
            assert collector.in_flight > 0
            for row in batch.unbind(0):
                turns = range(int(row[keys.TURN_MASK].sum()))
                spans = [row[keys.POLICY_VERSION][row[keys.TURN_IDS] == turn] for turn in turns]
                mixed_turns += sum(len(span.unique()) > 1 for span in spans)
                mixed_episodes += len(torch.cat(spans).unique()) > 1
                flat = torch.cat(spans)
                assert (flat.diff() >= 0).all(), "later tokens have later weights"
            policy.weights_changed()
        assert mixed_turns > 3
        assert mixed_episodes > 3

    def test_a_jump_of_the_version_drops_whole_groups_and_counts_them(self, make, streams, collect):
        policy = streams(script, delay=6)
        collector = collect(
            make(num_envs=8, group_size=2), policy, batch_size=4, max_staleness=1, total_batches=8, background=False
        )
        seen = []
        for batch in collector:
            age = policy.policy_version - versions(batch)
            assert int(age.max()) <= 1
            ids = episodes(batch)
            assert ids == sorted(ids)
            assert [i // 2 for i in ids[::2]] == [i // 2 for i in ids[1::2]], "whole groups"
            seen += ids
            policy.policy_version += 3
        dropped = collector.dropped["stale"]
        assert dropped > 0
        assert dropped % 2 == 0
        assert len(seen) == len(set(seen)) == 32
        missing = set(range(max(seen) + 1)) - set(seen)
        assert len(missing) <= dropped
        assert collector.stats()["dropped/stale"] == dropped

    def test_what_was_half_answered_at_a_jump_is_too_old_at_delivery(self, make, streams, collect):
        policy = streams(lambda *_: "stop")
        # Its last token comes after the jump, however often the policy is polled before it.
        policy.needs = lambda request: 10**9 if request.episode_id == 1 and policy.policy_version < 3 else 1
        collector = collect(make(num_envs=2), policy, batch_size=1, max_staleness=1, background=False)
        assert episodes(collector.rollout()) == [0]
        while not any(versions for _, versions in policy.running.values()):
            # Episode 2 does not begin: answered before the jump, it would be too old too.
            collector._queue.limit = 1
            collector._executor.step()
        policy.policy_version += 3
        assert episodes(collector.rollout()) == [2]
        assert collector.dropped == {"stale": 1}

    def test_short_episodes_are_not_favoured(self, make, streams, collect):
        policy = streams(script, delay=4)
        collector = collect(make(num_envs=16), policy, batch_size=8, max_staleness=2, total_batches=12)
        turns = []
        for batch in collector:
            turns += batch[keys.TURN_MASK].sum(-1).tolist()
            policy.weights_changed()
        assert turns == [length(episode) for episode in range(96)]

    def test_back_pressure(self, make, streams, collect):
        policy = streams(script, delay=1)
        collector = collect(make(num_envs=64), policy, batch_size=4, max_staleness=2)
        collector.next()
        assert collector.background
        wait_until(lambda: collector.in_flight == 0, "the end of all episodes that may be in flight")
        a_moment()
        assert collector.env.num_sampled <= 4 + 12
        assert collector.in_flight == 0
        assert policy.most <= 12


class TestBackground:
    def test_it_collects_while_the_caller_trains(self, make, streams, collect):
        policy, trains = streams(script, seconds=0.001), threading.Event()
        # Of the second batch nothing is answered before the first is here.
        policy.needs = lambda request: 1 if request.episode_id < 8 or trains.is_set() else 10**9
        collector = collect(make(num_envs=4), policy, batch_size=8, max_staleness=1)
        assert episodes(collector.next()) == [*range(8)]
        trains.set()
        env = collector.env
        wait_until(lambda: env.num_sampled == 16 and not collector.in_flight, "the end of the second batch's episodes")

    def test_paused(self, make, streams, collect):
        policy = streams(script, seconds=0.001, delay=50)
        collector = collect(make(num_envs=4), policy, batch_size=4, max_staleness=4)
        collector.next()
        with collector.paused(), collector.paused():
            before, pending = policy.polls, policy.pending
            a_moment()
            assert policy.polls == before
            assert policy.pending == pending
        assert episodes(collector.next()) == [4, 5, 6, 7]

    def test_an_error_of_the_thread_is_the_callers(self, make, streams, collect):
        policy = streams(script)
        collector = collect(make(num_envs=4), policy, batch_size=4, max_staleness=1, total_batches=10)
        collector.next()
        policy.poll = lambda: 1 / 0
        with pytest.raises(ZeroDivisionError):
            list(collector)
        assert collector.closed

    def test_an_engine_that_does_not_come_back(self, make, streams, collect, hang):
        policy = streams(script)
        collector = collect(make(num_envs=4), policy, batch_size=4, max_staleness=1)
        policy.poll = hang
        collector.engine_timeout = 0.1
        collector.shutdown = partial(collector.shutdown, 0.1)
        with pytest.raises(RuntimeError, match="has not come back"):
            collector.next()

    def test_a_policy_that_shares_its_weights_is_refused(self, make, says):
        with pytest.raises(ValueError, match="owns_weights"):
            AsyncTurnCollector(make(), says(script), batch_size=1, background=True)
