"""AsyncTurnCollector: what a fault of an environment, of the policy or of the caller ends."""

from __future__ import annotations

import random
from functools import partial

import numpy as np
import pytest
from scripted_episodes import episodes, script

from torchrl_llm import keys
from torchrl_llm.envs import EnvironmentFault
from torchrl_llm.episode import Episode
from torchrl_llm.modules.policy import TurnResponse
from torchrl_llm.testing.environments import Faulty, StopOrGo


class Hangs(StopOrGo):
    """Hangs in the first step of one task."""

    def __init__(self, hang, seed):
        self.hang, self.seed = hang, seed

    def reset(self, seed=None):
        self.now = seed == self.seed
        return super().reset(seed)

    def step(self, action):
        if self.now:
            random.seed(1)
            self.hang()
        return super().step(action)


class Trusted(Hangs):
    thread_safe = True


class TestFaults:
    @pytest.mark.parametrize("kind", [Hangs, Trusted])
    @pytest.mark.parametrize("group", [1, 2])
    def test_an_environment_that_hangs_ends_its_group_only(self, make, says, collect, hang, kind, group, caplog):
        env = make(num_envs=4, group_size=group)
        seed = env.task_sampler[2].seed
        env = make(partial(kind, hang, seed), num_envs=4, group_size=group)
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
        # the second member of each group has to wait
        executor._episodes[1] = Episode(-1, -1, -1, 0)
        queue.limit = 3
        executor.step()
        queue.limit = 4
        executor.step()
        while not collector.faults:
            executor.step()
        executor._episodes[1] = None
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
