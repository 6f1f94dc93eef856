"""GEMEnv with threads: the same episodes, slow environments side by side, hanging ones left
behind."""

from __future__ import annotations

import random
import threading
from functools import partial

import pytest
from waiting import LIMIT

from torchrl_llm import keys
from torchrl_llm.collectors import TurnCollector
from torchrl_llm.envs import EnvironmentFault, EnvironmentUnavailableError, GEMEnv
from torchrl_llm.keys import StopReason
from torchrl_llm.testing.environments import Dice, StopOrGo
from torchrl_llm.testing.policies import ScriptedPolicy
from torchrl_llm.trainers import evaluate


def length(episode):
    return random.Random(episode).choice([1, 1, 2, 3, 6])


def script(episode, turn, context):
    return "stop" if turn == length(episode) - 1 else f"go on {episode}.{turn}"


@pytest.fixture
def make(tokenizer):
    made = []

    def make(env=StopOrGo, **kwargs):
        made.append(GEMEnv(env, **{"tokenizer": tokenizer, "max_output_tokens": 16, **kwargs}))
        return made[-1]

    yield make
    for env in made:
        env.close(raise_if_closed=False)


@pytest.fixture
def policy(tokenizer):
    return ScriptedPolicy(script, tokenizer=tokenizer, max_output_tokens=16)


class Hangs(StopOrGo):
    """Hangs in a task, at its reset (turn -1) or in a later turn."""

    def __init__(self, hang, seed, turn):
        self.hang, self.seed, self.at = hang, seed, turn

    def call(self):
        if self.task == self.seed and self.turn == self.at:
            random.seed(1)
            self.hang()
        self.turn += 1

    def reset(self, seed=None):
        self.task, self.turn = seed, -1
        self.call()
        return super().reset(seed)

    def step(self, action):
        self.call()
        return super().step(action)


class Trusted(Hangs):
    thread_safe = True


def episodes(batch):
    return batch["episode_id"].tolist()


class TestThreads:
    @pytest.mark.parametrize("env", [Dice, StopOrGo, "game:GuessTheNumber-v0-easy", [Dice, StopOrGo]])
    def test_the_number_of_threads_changes_nothing(self, make, policy, env):
        def rollout(**options):
            return TurnCollector(make(env, num_envs=4, **options), policy, batch_size=12).rollout()

        plain = rollout()
        for options in ({"num_threads": 1}, {"num_threads": 4}, {"step_timeout": 30.0}):
            assert (rollout(**options) == plain).all()

    def test_slow_environments_answer_side_by_side(self, make, policy):
        together = threading.Barrier(8, timeout=LIMIT)

        class Meeting(StopOrGo):
            thread_safe = True

            def reset(self, seed=None):
                together.wait()
                return super().reset(seed)

        TurnCollector(make(Meeting, num_envs=8, num_threads=8), policy, batch_size=8).rollout()

    def test_threads_end_with_the_environment(self, make, policy):
        env = make(num_envs=3, num_threads=3)
        TurnCollector(env, policy, batch_size=3).rollout()
        mine = [t for t in threading.enumerate() if t in env.lockstep._pool._threads]
        assert mine
        env.close()
        assert not any(thread.is_alive() for thread in mine)

    def test_what_is_no_fault_of_an_environment_is_raised(self, make, policy):
        with pytest.raises(EnvironmentUnavailableError):
            make("math:GSM8K", num_envs=2, num_threads=2).reset()

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"step_timeout": 0.0}, "step_timeout is 0.0; expected a number, greater than 0"),
            ({"num_threads": -1}, "num_threads is -1; expected an integer, at least 0"),
            ({"num_threads": 0, "step_timeout": 1.0}, ">= 1 with a step_timeout"),
        ],
    )
    def test_options_that_make_no_sense_are_refused(self, make, options, message):
        with pytest.raises(ValueError, match=message):
            make(**options)


class TestHanging:
    @pytest.mark.parametrize("kind", [Hangs, Trusted])
    @pytest.mark.parametrize("turn", [-1, 0])
    @pytest.mark.parametrize("group", [1, 2])
    def test_an_environment_that_hangs_ends_its_group_only(self, make, policy, hang, kind, turn, group, caplog):
        seed = make(group_size=group, num_envs=group).task_sampler[4].seed
        env = make(partial(kind, hang, seed, turn), num_envs=4, group_size=group, step_timeout=0.3)
        state = random.getstate()
        collector = TurnCollector(env, policy, batch_size=8)
        bad = 4 // group
        batches = [collector.rollout(), collector.rollout()]
        played = [e for batch in batches for e in episodes(batch)]
        assert played == [e for e in range(16 + group) if e // group != bad][:16]
        assert env.faults["timeout"] == sum(env.faults.values()) == group
        assert "step_timeout=0.3" in caplog.text
        if kind is Hangs:
            assert random.getstate() == state, "the generators were taken from it"
            assert "taken from it" in caplog.text
        whole = TurnCollector(make(num_envs=4, group_size=group), policy, batch_size=16 + group).rollout()
        kept = [e for e in range(16 + group) if e // group != bad]
        turns = [n for batch in batches for n in batch[keys.TURN_MASK].sum(-1).tolist()]
        assert turns == whole[keys.TURN_MASK][kept].sum(-1).tolist()

    def test_its_own_step_ends_as_a_timeout(self, make, hang):
        env = make(partial(Hangs, hang, make().task_sampler[1].seed, 0), num_envs=3, step_timeout=0.2)
        td = env.reset()
        td[keys.RESPONSE], td[keys.RESPONSE_MASK] = (
            env.action_spec.rand()[keys.RESPONSE],
            env.action_spec.one()[keys.RESPONSE_MASK],
        )
        after = env.step(td)["next"]
        assert after[keys.STOP_REASON].flatten().tolist() == [0, StopReason.TIMEOUT, 0]
        assert after[keys.TRUNCATED].flatten().tolist() == [False, True, False]
        assert "no answer within" in str(env.last_fault)

    def test_too_many_in_a_row_stop_the_run(self, make, hang):
        class Always(Trusted):
            def call(self):
                self.hang()

        env = make(partial(Always, hang, None, None), num_envs=2, step_timeout=0.1, max_faults=2)
        with pytest.raises(EnvironmentFault, match="no answer within"):
            env.reset()
        assert env.faults == {"timeout": 3}

    def test_an_evaluation_continues(self, make, policy, hang):
        seed = make(stream="eval").task_sampler[3].seed
        env = make(partial(Hangs, hang, seed, 0), stream="eval", num_envs=4, step_timeout=0.2)
        result = evaluate(env, policy, 8)
        assert result.episodes == 8
        assert (result.success, result.faults) == (7 / 8, 1)
        assert env.faults == {"timeout": 1}
