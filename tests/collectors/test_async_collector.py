"""AsyncTurnCollector: the same batches without a barrier between turns."""

from __future__ import annotations

import logging
import random
import threading
import time
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random.mtrand import get_bit_generator
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.envs import Compose, RewardScaling, TransformedEnv
from torchrl.envs.utils import ExplorationType, exploration_type, set_exploration_type

from torchrl_llm import keys
from torchrl_llm.collectors import AsyncTurnCollector, TurnCollector
from torchrl_llm.data import TurnsToSequence
from torchrl_llm.envs import EnvironmentFault, GEMEnv
from torchrl_llm.episode import Episode
from torchrl_llm.modules import HFPolicy, SamplingConfig
from torchrl_llm.modules.policy import TurnResponse
from torchrl_llm.testing.environments import Dice, Faulty, Slow, StopOrGo
from torchrl_llm.testing.policies import ScriptedPolicy
from torchrl_llm.testing.tiny import load_tiny_model, load_tiny_tokenizer
from torchrl_llm.testing.tokenizers import byte_tokenizer

EASY = "game:GuessTheNumber-v0-easy"


def length(episode):
    return random.Random(episode).choice([1, 1, 2, 3, 6])


def script(episode, turn, context):
    return "stop" if turn == length(episode) - 1 else f"go on {episode}.{turn}"


class Streaming(ScriptedPolicy):
    """Answers a request after 1 to ``delay`` polls, drawn by episode and turn; one version a token, as it is sampled."""

    owns_weights = True

    def __init__(self, *args, delay=5, seconds=0.0, **kwargs):
        super().__init__(*args, **kwargs)
        self.delay, self.seconds = delay, seconds
        self.running = {}
        self.joined = 0  # requests that came while others were half answered
        self.most = 0
        self.polls = 0

    def submit(self, request):
        assert request.slot not in self.running
        self.joined += any(versions for _, versions in self.running.values())
        self.running[request.slot] = request, []
        self.most = max(self.most, len(self.running))

    @property
    def pending(self):
        return len(self.running)

    def cancel(self, slots=None):
        for slot in list(self.running if slots is None else slots):
            self.running.pop(slot, None)

    def needs(self, request):
        return random.Random(f"{request.episode_id} {request.turn}").randint(1, self.delay)

    def poll(self):
        time.sleep(self.seconds)
        self.polls += 1
        answers = []
        for slot, (request, versions) in list(self.running.items()):
            versions.append(self.policy_version)
            if len(versions) < self.needs(request):
                continue
            del self.running[slot]
            (answer,) = self._answer([request], greedy=False)
            spread = np.array([versions[min(i, len(versions) - 1)] for i in range(len(answer.tokens))])
            answers.append(TurnResponse(slot, answer.tokens, answer.log_probs, spread))
        return answers


@pytest.fixture
def make(tokenizer):
    def make(env=StopOrGo, **kwargs):
        return GEMEnv(env, **{"tokenizer": tokenizer, "max_output_tokens": 16, **kwargs})

    return make


@pytest.fixture
def says(tokenizer):
    return partial(ScriptedPolicy, tokenizer=tokenizer, max_output_tokens=16)


@pytest.fixture
def streams(tokenizer):
    return partial(Streaming, tokenizer=tokenizer, max_output_tokens=16)


@pytest.fixture
def collect():
    """Makes collectors and shuts them down."""
    made = []

    def collect(*args, **kwargs):
        made.append(AsyncTurnCollector(*args, **kwargs))
        return made[-1]

    yield collect
    for collector in made:
        collector.shutdown(raise_on_error=False)


def episodes(batch):
    return batch["episode_id"].tolist()


def versions(batch):
    return batch[keys.POLICY_VERSION][batch[keys.TURN_IDS] >= 0]


def same(batch, other):
    assert set(batch.keys(True, True)) == set(other.keys(True, True))
    assert batch.shape == other.shape
    for key in batch.keys(True, True):
        assert batch[key].dtype == other[key].dtype, key
        assert batch[key].shape == other[key].shape, key
        assert batch[key].equal(other[key]), key
    return True


class TestBatches:
    """The batches of TurnCollector, whatever is done first."""

    @pytest.mark.parametrize(
        ("slots", "size", "group", "threads"), [(4, 16, 4, 4), (6, 10, 2, 3), (1, 3, 1, 1), (8, 4, 2, 0)]
    )
    def test_byte_identical_to_the_collector_with_a_barrier(self, make, says, collect, slots, size, group, threads):
        env = partial(make, [StopOrGo, partial(Dice, turns=2)], num_envs=slots, group_size=group)
        barrier = TurnCollector(env(), says(script), batch_size=size, total_batches=3)
        collector = collect(env(), says(script), batch_size=size, total_batches=3, num_threads=threads)
        assert sum(same(a, b) for a, b in zip(collector, barrier, strict=True)) == 3

    @pytest.mark.parametrize("shuffle", range(3))
    def test_any_completion_order_gives_the_same_bytes(self, make, streams, says, collect, shuffle):
        slow = partial(Slow, partial(Dice, turns=3), mean=0.004, sigma=1.5, seed=shuffle)
        expected = TurnCollector(make(partial(Dice, turns=3), num_envs=5), says(script), batch_size=10).rollout()
        collector = collect(make(slow, num_envs=4), streams(script, delay=1 + 3 * shuffle), batch_size=10)
        assert same(collector.rollout(), expected)

    def test_rows(self, make, says, collect):
        rows = collect(make(num_envs=4), says(script), batch_size=8).rollout()
        assert rows[keys.TURN_MASK].sum(-1).tolist() == [length(episode) for episode in range(8)]

    @pytest.mark.parametrize("env", [EASY, partial(Slow, EASY, mean=0.003, sigma=1.0)])
    def test_a_model_says_the_same(self, collect, env):
        tokenizer, model = load_tiny_tokenizer(), load_tiny_model()
        sampling = SamplingConfig(max_output_tokens=16)

        def rollout(kind, env, **kwargs):
            env = GEMEnv(env, tokenizer=tokenizer, num_envs=4, max_output_tokens=16)
            return kind(env, HFPolicy(model, tokenizer, sampling, seed=3), batch_size=12, **kwargs).rollout()

        expected, batch = rollout(TurnCollector, EASY), rollout(collect, env)
        for key in expected.keys(True, True):
            if key == keys.SAMPLE_LOG_PROB:
                assert (batch[key] - expected[key]).abs().max() < 1e-5
            else:
                assert batch[key].equal(expected[key]), key

    def test_greedy(self, make, streams, collect):
        asked = []
        policy = streams(script)
        submit = policy.submit
        policy.submit = lambda request: (asked.append(request.greedy), submit(request))
        collect(make(), policy, batch_size=1, exploration_type=ExplorationType.DETERMINISTIC).rollout()
        assert asked
        assert all(asked)


class TestNoBarrier:
    def test_environments_are_called_at_the_same_time(self, make, says, collect):
        together = threading.Barrier(4)

        class Meeting(StopOrGo):
            thread_safe = True

            def step(self, action):
                together.wait(5.0)
                return super().step(action)

        batch = collect(make(Meeting, num_envs=4), says(lambda *_: "stop"), batch_size=8).rollout()
        assert episodes(batch) == list(range(8))

    def test_requests_join_while_others_are_half_answered(self, make, streams, collect):
        policy = streams(script, delay=8)
        collect(make(num_envs=4), policy, batch_size=32).rollout()
        assert policy.joined > 20
        turns = sum(length(episode) for episode in range(32))
        assert policy.polls < 0.6 * sum(
            random.Random(f"{e} {t}").randint(1, 8) for e in range(32) for t in range(length(e))
        ), f"{policy.polls} polls for {turns} turns"

    def test_a_slow_environment_does_not_hold_up_the_others(self, make, streams, collect):
        released = threading.Event()

        class First(StopOrGo):
            thread_safe = True

            def reset(self, seed=None):
                self.waits = seed == first
                return super().reset(seed)

            def step(self, action):
                if self.waits:
                    assert released.wait(5.0)
                return super().step(action)

        env = make(First, num_envs=2)
        first = env.task_sampler[0].seed

        def others(episode, turn, context):
            if episode == 7:
                released.set()
            return "stop"

        assert episodes(collect(env, streams(others), batch_size=8).rollout()) == list(range(8))

    def test_what_is_ready_is_asked_at_once(self, make, says, collect):
        calls = []
        policy = says(lambda *_: "stop")
        generate = policy.generate
        policy.generate = lambda prompt, *args, **kwargs: (
            calls.append(len(prompt)),
            generate(prompt, *args, **kwargs),
        )[1]
        collect(make(num_envs=8), policy, batch_size=32, num_threads=0).rollout()
        assert calls == [8] * 4

    def test_it_waits_a_little_for_more_to_ask_at_once(self, make, says, collect):
        calls = []
        policy = says(lambda episode, turn, _: "stop" if turn == 3 else "go")
        generate = policy.generate
        policy.generate = lambda prompt, *args, **kwargs: (
            calls.append(len(prompt)),
            time.sleep(0.1),
            generate(prompt, *args, **kwargs),
        )[2]
        collect(make(partial(Slow, StopOrGo, mean=0.01, sigma=0.5), num_envs=8), policy, batch_size=8).rollout()
        assert sum(calls) == 32
        assert len(calls) <= 6, "8 when it asks for whatever came first"


class TestOnPolicy:
    def test_drained_and_one_version_a_batch(self, make, streams, collect):
        policy = streams(script)
        collector = collect(make(num_envs=4, group_size=2), policy, batch_size=6, total_batches=4)
        for i, batch in enumerate(collector):
            assert collector.in_flight == 0
            assert collector.env.num_sampled == 6 * (i + 1)
            assert versions(batch).unique().tolist() == [i]
            assert episodes(batch) == list(range(6 * i, 6 * i + 6))
            policy.weights_changed()
        assert not collector.dropped


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
        policy.needs = lambda request: 12 if request.episode_id == 1 else 1
        collector = collect(make(num_envs=2), policy, batch_size=1, max_staleness=1, background=False)
        assert episodes(collector.rollout()) == [0]
        while not any(versions for _, versions in policy.running.values()):
            collector._queue.limit = 2
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
        for _ in range(100):
            if collector.in_flight == 0:
                break
            time.sleep(0.01)
        time.sleep(0.05)
        assert collector.env.num_sampled <= 4 + 12
        assert collector.in_flight == 0
        assert policy.most <= 12


class TestBackground:
    def test_it_collects_while_the_caller_trains(self, make, streams, collect):
        policy = streams(script, seconds=0.001)
        collector = collect(make(num_envs=4), policy, batch_size=8, max_staleness=1)
        collector.next()
        before = policy.polls
        for _ in range(300):
            if policy.polls > before + 3:
                break
            time.sleep(0.01)
        assert policy.polls > before + 3

    def test_paused(self, make, streams, collect):
        policy = streams(script, seconds=0.001, delay=50)
        collector = collect(make(num_envs=4), policy, batch_size=4, max_staleness=4)
        collector.next()
        with collector.paused(), collector.paused():
            before, pending = policy.polls, policy.pending
            time.sleep(0.05)
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

    def test_an_engine_that_does_not_come_back(self, make, streams, collect):
        policy = streams(script)
        collector = collect(make(num_envs=4), policy, batch_size=4, max_staleness=1)
        policy.poll = lambda: time.sleep(4.0)
        collector.engine_timeout = 0.1
        collector.shutdown = partial(collector.shutdown, 0.1)
        with pytest.raises(RuntimeError, match="has not come back"):
            collector.next()

    def test_a_policy_that_shares_its_weights_is_refused(self, make, says):
        with pytest.raises(ValueError, match="owns_weights"):
            AsyncTurnCollector(make(), says(script), batch_size=1, background=True)


class Hangs(StopOrGo):
    """Hangs in the first step of the first task, until told to go on."""

    def __init__(self, release, seed, draws=False):
        self.release, self.seed, self.draws = release, seed, draws

    def reset(self, seed=None):
        self.now = seed == self.seed
        return super().reset(seed)

    def step(self, action):
        if self.now:
            random.seed(1)
            self.release.wait(20.0)
        return super().step(action)


class Trusted(Hangs):
    thread_safe = True


class TestFaults:
    @pytest.fixture
    def release(self):
        event = threading.Event()
        yield event
        event.set()

    @pytest.mark.parametrize("kind", [Hangs, Trusted])
    @pytest.mark.parametrize("group", [1, 2])
    def test_an_environment_that_hangs_ends_its_group_only(self, make, says, collect, release, kind, group, caplog):
        env = make(num_envs=4, group_size=group)
        seed = env.task_sampler[2].seed
        env = make(partial(kind, release, seed), num_envs=4, group_size=group)
        state = random.getstate()
        collector = collect(env, says(script), batch_size=8, step_timeout=0.3)
        batch = collector.rollout()
        assert episodes(batch) == [e for e in range(8 + group) if e // group != 2 // group]
        assert 1 <= collector.faults["timeout"] == sum(collector.faults.values()) <= group
        assert collector.dropped["timeout"] == group
        assert "step_timeout" in caplog.text
        if kind is Hangs:
            assert random.getstate() == state, "the generators were taken from it"
            assert "taken from it" in caplog.text

    @pytest.mark.parametrize("turn", [-1, 0, 2])
    def test_one_environment_that_raises(self, make, says, collect, turn, caplog):
        class Sometimes(Faulty):
            def reset(self, seed=None):
                self.at = turn if seed == bad else 99
                return super().reset(seed)

        bad = make().task_sampler[5].seed
        env = make(partial(Sometimes, "raise"), num_envs=3, max_turns=4)
        collector = collect(env, says(lambda *_: "x"), batch_size=6, total_batches=2)
        batches = list(collector)
        assert [e for batch in batches for e in episodes(batch)] == [0, 1, 2, 3, 4, *range(6, 13)]
        assert (batches[1][keys.TURN_TERMINATED] | batches[1][keys.TURN_TRUNCATED]).sum() == 6
        assert collector.faults == {"error": 1}
        assert "episode 5" in caplog.text
        assert collector.stats()["faults/error"] == 1

    def test_members_of_a_failed_group_that_were_not_sampled_do_not_run(self, make, says, collect):
        class Sometimes(Faulty):
            def reset(self, seed=None):
                self.at = -1 if seed == bad else 99
                return super().reset(seed)

        bad = make(group_size=2, num_envs=2).task_sampler[2].seed
        env = make(partial(Sometimes, "raise"), num_envs=2, group_size=2, max_turns=6, max_model_len=4096)
        collector = collect(env, says(script), batch_size=2, num_threads=0, max_staleness=1, background=False)
        executor, queue = collector._executor, collector._queue
        executor._slots[1] = Episode(-1, -1, -1, 0)  # the second member of each group has to wait
        queue.limit = 3
        executor.step()
        queue.limit = 4
        executor.step()
        while not collector.faults:
            executor.step()
        executor._slots[1] = None
        assert [episodes(collector.rollout()) for _ in range(2)] == [[0, 1], [4, 5]]
        assert collector.faults == {"error": 1}
        assert collector.dropped == {"error": 2}

    def test_too_many_faults_raise_the_first(self, make, says, collect):
        collector = collect(make(partial(Faulty, "nan", 1), num_envs=2), says(script), batch_size=4, max_faults=3)
        with pytest.raises(EnvironmentFault, match="turn 1") as caught:
            list(collector)
        assert any("max_faults=3" in note for note in caught.value.__notes__)
        assert collector.faults["error"] == 4
        assert collector.closed

    def test_an_engine_that_dies_ends_the_run(self, make, streams, collect):
        policy = streams(script)
        poll = policy.poll
        policy.poll = lambda: poll() if policy.polls < 3 else (_ for _ in ()).throw(OSError("engine died"))
        policy.cancel = lambda slots=None: (_ for _ in ()).throw(OSError("engine is dead"))
        collector = collect(make(num_envs=4), policy, batch_size=16)
        with pytest.raises(OSError, match="engine died"):
            list(collector)
        assert collector.closed
        with pytest.raises(RuntimeError, match="shut down"):
            collector.rollout()

    def test_an_answer_nobody_asked_for(self, make, says, collect):
        policy = says(script)
        one = np.ones(1, np.int64)
        policy.poll = lambda: [TurnResponse(3, one, one.astype(np.float32), one)]
        with pytest.raises(RuntimeError, match="slot 3"):
            collect(make(num_envs=4), policy, batch_size=1, num_threads=0).rollout()

    def test_a_reset_by_someone_else_is_noticed(self, make, streams, collect):
        collector = collect(
            make(num_envs=4), streams(script), batch_size=2, max_staleness=2, background=False, total_batches=20
        )
        collector.rollout()
        collector.env.reset()
        with pytest.raises(RuntimeError, match="something else"):
            list(collector)


class TestState:
    def test_a_new_collector_continues_with_the_next_task(self, make, says, collect):
        def collector(seed):
            env = make(partial(Dice, turns=2), num_envs=3, seed=seed)
            return collect(env, says(script), batch_size=5, total_batches=3)

        first, second = collector(4), collector(0)
        first.rollout()
        second.load_state_dict(first.state_dict())
        assert sum(same(a, b) for a, b in zip(first, second, strict=True)) == 2

    @pytest.mark.parametrize("background", [False, True])
    def test_tasks_in_flight_are_sampled_again(self, make, streams, collect, background):
        def collector():
            env, policy = make(num_envs=6, group_size=2), streams(script)
            return collect(env, policy, batch_size=4, max_staleness=2, background=background)

        first, second = collector(), collector()
        first.next(), second.next(), second.next()
        second.load_state_dict(first.state_dict())
        assert episodes(second.next()) == [4, 5, 6, 7]
        assert episodes(second.next()) == [8, 9, 10, 11]

    def test_set_seed_forgets_what_is_in_flight(self, make, streams, collect):
        collector = collect(make(num_envs=6), streams(script), batch_size=4, max_staleness=2)
        collector.next()
        collector.set_seed(3)
        first = collector.env.task_sampler.base
        assert episodes(collector.next()) == [first, first + 1, first + 2, first + 3]

    @pytest.mark.parametrize("background", [False, True])
    def test_shutdown_in_mid_flight(self, make, streams, background):
        policy = streams(script, delay=30)
        collector = AsyncTurnCollector(
            make(partial(Slow, StopOrGo, mean=0.002), num_envs=6),
            policy,
            batch_size=2,
            max_staleness=3,
            background=background,
        )
        collector.next()
        collector.shutdown()
        collector.shutdown()
        assert policy.pending == 0
        assert collector.env.is_closed
        for _ in range(200):
            if not any(thread.name.startswith("torchrl_llm") for thread in threading.enumerate()):
                break
            time.sleep(0.01)
        assert not any(thread.name == "torchrl_llm collector" for thread in threading.enumerate())

    def test_in_the_background_the_exploration_type_of_the_process_is_left_alone(self, make, streams, collect):
        kind, asked = ExplorationType.DETERMINISTIC, []
        policy = streams(script)
        submit = policy.submit
        policy.submit = lambda request: (asked.append(request.greedy), submit(request))
        with set_exploration_type(ExplorationType.RANDOM):
            collector = collect(make(num_envs=4), policy, batch_size=2, max_staleness=2, exploration_type=kind)
            collector.next()
            assert collector.background
            assert exploration_type() is ExplorationType.RANDOM
            collector.next()
            collector.shutdown()
            assert exploration_type() is ExplorationType.RANDOM
        assert all(asked)

    def test_after_a_shutdown_no_environment_has_the_global_generators(self, make, streams, collect):
        class Late(Dice):
            def reset(self):
                time.sleep(0.2)
                return super().reset()

        before = random.getstate(), get_bit_generator(), np.random.get_state()[1].tolist()
        collector = collect(make(Late, num_envs=2), streams(script), batch_size=2, max_staleness=1)
        collector.rollout()
        time.sleep(0.1)  # the next tasks are being reset
        assert collector.in_flight
        collector.shutdown()
        assert (random.getstate(), get_bit_generator(), np.random.get_state()[1].tolist()) == before


class TestTorchRL:
    def test_replay_buffer(self, make, says, collect):
        transform = TurnsToSequence(max_model_len=512, max_turns=6)
        buffer = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4, transform=transform)
        collector = collect(
            make(num_envs=2),
            says(script),
            batch_size=6,
            total_batches=2,
            replay_buffer=buffer,
        )
        assert list(collector) == [None, None]
        assert buffer[:]["episode_id"].flatten().tolist() == list(range(12))

    def test_transforms_are_refused(self, make, says):
        env = TransformedEnv(make(), Compose(RewardScaling(loc=0.0, scale=2.0)))
        with pytest.raises(TypeError, match="postproc"):
            AsyncTurnCollector(env, says(script), batch_size=1)

    @pytest.mark.parametrize(
        "wrong", [{"max_staleness": -1}, {"num_threads": -1}, {"step_timeout": 0.0}, {"max_faults": -1}]
    )
    def test_wrong_settings_are_named(self, make, says, wrong):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            AsyncTurnCollector(make(), says(script), batch_size=1, **wrong)

    def test_environment_factory_and_update(self, make, says, collect):
        policy = says(script)
        collector = collect(make, policy, batch_size=1)
        assert episodes(collector.rollout()) == [0]
        collector.update_policy_weights_()
        assert policy.policy_version == 1


def test_games_in_threads_leave_the_global_generators_alone(make, says, collect, caplog):
    def draws(between):
        random.seed(3)
        np.random.seed(3)
        result = [random.gauss(0, 1), np.random.normal()]
        between()
        return [*result, random.gauss(0, 1), np.random.normal(), random.random(), np.random.rand()]

    caplog.set_level(logging.WARNING)
    collector = collect(make(Dice, num_envs=8), says(script), batch_size=32)
    assert draws(lambda: None) == draws(collector.rollout)
    assert not caplog.text
