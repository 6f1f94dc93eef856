"""AsyncTurnCollector: the same batches without a barrier between turns."""

from __future__ import annotations

import logging
import random
import threading
import time
from functools import partial

import numpy as np
import pytest
from global_generators import draws
from numpy.random.mtrand import get_bit_generator
from scripted_episodes import episodes, length, same, script, versions
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.envs import Compose, RewardScaling, TransformedEnv
from torchrl.envs.utils import ExplorationType, exploration_type, set_exploration_type
from waiting import LIMIT, wait_until

from torchrl_llm import keys
from torchrl_llm.collectors import AsyncTurnCollector, TurnCollector
from torchrl_llm.data import TurnsToSequence
from torchrl_llm.envs import GEMEnv
from torchrl_llm.modules import HFPolicy, SamplingConfig
from torchrl_llm.testing.environments import Dice, Slow, StopOrGo
from torchrl_llm.testing.policies import SleepingPolicy
from torchrl_llm.testing.tiny import load_tiny_model, load_tiny_tokenizer

EASY = "game:GuessTheNumber-v0-easy"


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


class Counting(SleepingPolicy):
    """Counts its steps."""

    steps = 0

    def poll(self):
        self.steps += 1
        return super().poll()


def of_lengths(*episodes):
    """A script of responses with so many tokens, their end-of-turn token included."""

    def say(episode, turn, context):
        tokens = episodes[episode]
        return ("stop" if turn == len(tokens) - 1 else "go").ljust(tokens[turn] - 1, ".")

    return say


class TestNoBarrier:
    def test_environments_are_called_at_the_same_time(self, make, says, collect):
        together = threading.Barrier(4)

        class Meeting(StopOrGo):
            thread_safe = True

            def step(self, action):
                together.wait(LIMIT)
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
                    assert released.wait(LIMIT)
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

    def test_it_waits_a_little_for_more_to_ask_at_once(self, make, says, collect, clock):
        class Late(StopOrGo):
            thread_safe = True

            def reset(self, seed=None):
                self.seconds = random.Random(seed).uniform(0.0, 0.02)
                return super().reset(seed)

            def step(self, action):
                time.sleep(self.seconds)
                return super().step(action)

        calls = []
        policy = says(lambda episode, turn, _: "stop" if turn == 3 else "go")
        generate = policy.generate
        policy.generate = lambda prompt, *args, **kwargs: (
            calls.append(len(prompt)),
            clock.sleep(0.1),
            generate(prompt, *args, **kwargs),
        )[2]
        collect(make(Late, num_envs=8), policy, batch_size=8).rollout()
        assert sum(calls) == 32
        assert len(calls) <= 5, (
            "many more when it asks for whatever came first: 4 turns, and a first step that cannot know"
        )

    @pytest.mark.parametrize("num_threads", [0, None])
    def test_a_quick_environment_costs_its_slot_no_step(self, make, tokenizer, collect, num_threads, clock):
        """A long response, and beside it as many tokens in 12 short episodes."""
        policy = Counting(
            of_lengths([60], *[[5]] * 12), tokenizer=tokenizer, max_output_tokens=64, seconds_per_step=0.08
        )
        env = make(num_envs=2, max_output_tokens=64, max_model_len=1024)
        collector = collect(env, policy, batch_size=13, num_threads=num_threads)
        poll = policy.poll
        # What is a moment for the environment takes no time at all for the clock.
        policy.poll = lambda: (wait_until(lambda: not collector._executor.pool._unfinished), poll())[1]
        collector.rollout()
        assert 60 <= policy.steps <= 64, "66 when each episode waits for a step"


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
        before = {*threading.enumerate()}  # a test of an engine that hangs leaves a thread behind
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
        wait_until(lambda: before.issuperset(threading.enumerate()), "the end of the collector's threads")

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
            resets = 0

            def reset(self):
                Late.resets += 1
                if Late.resets > 1:
                    inside.set()
                    assert told_to_stop.wait(LIMIT)
                return super().reset()

        inside, told_to_stop = threading.Event(), threading.Event()
        before = random.getstate(), get_bit_generator(), np.random.get_state()[1].tolist()
        collector = collect(make(Late, num_envs=1), streams(script), batch_size=1, max_staleness=1)
        collector.rollout()
        assert inside.wait(LIMIT)  # the task of the next batch is being reset
        threading.Timer(0.1, told_to_stop.set).start()
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
    caplog.set_level(logging.WARNING)
    collector = collect(make(Dice, num_envs=8), says(script), batch_size=32)
    assert draws(lambda: None) == draws(collector.rollout)
    assert not caplog.text
