"""adapt_mixture: which environments a mixture samples after a batch."""

from __future__ import annotations

from functools import partial
from itertools import islice

import pytest
from torchrl.envs import StepCounter, TransformedEnv

from torchrl_llm.collectors import AsyncTurnCollector, TurnCollector, adapt_mixture
from torchrl_llm.envs import GEMEnv
from torchrl_llm.testing.environments import Echo, Faulty, StopOrGo
from torchrl_llm.testing.policies import ScriptedPolicy


@pytest.fixture
def make(tokenizer):
    def make(env=(StopOrGo, Echo), **kwargs):
        return GEMEnv(list(env), **{"tokenizer": tokenizer, "num_envs": 4, "max_output_tokens": 16, **kwargs})

    return make


@pytest.fixture
def stops(tokenizer):
    """Wins StopOrGo in two episodes of five, in turn 0 or 1; the others end at max_turns. Echo is
    never won."""
    return ScriptedPolicy(
        lambda episode, turn, context: "stop" if episode % 5 < 2 and turn == episode % 2 else "go",
        tokenizer=tokenizer,
        max_output_tokens=16,
    )


class TestAdaptTasks:
    @pytest.mark.parametrize("kind", [TurnCollector, AsyncTurnCollector])
    @pytest.mark.parametrize("group_size", [1, 2])
    def test_it_learns_from_the_success_of_whole_episodes(self, make, stops, kind, group_size):
        env = make(max_turns=2, group_size=group_size)
        hook = partial(adapt_mixture, env)
        collector = kind(env, stops, batch_size=40, post_collect_hook=hook)
        first, second = collector.rollout(), collector.rollout()
        collector.shutdown()
        expected = env.task_sampler.__class__(mixture_size=2, group_size=group_size)
        for batch in (first, second):
            index = batch["episode_id"].tolist()
            played = [expected[i].env_id for i in index]
            assert batch["env_id"].tolist() == played
            won = [env_id == 0 and i % 5 < 2 for i, env_id in zip(index, played, strict=True)]
            assert 0 < sum(won) < len(won)
            expected = expected.learn(played, won)
        assert env.task_sampler.success == expected.success
        assert env.task_sampler.success[0] > env.task_sampler.success[1]

    def test_a_failed_episode_says_nothing_of_its_environment(self, make, stops):
        env = make([StopOrGo, partial(Faulty, "raise")], max_faults=99)
        hook = partial(adapt_mixture, env)
        TurnCollector(env, stops, batch_size=8, post_collect_hook=hook, max_faults=99).rollout()
        assert env.task_sampler.success[1] == 0.5

    def test_the_state_continues_with_the_next_task(self, make, stops):
        def collect():
            env = make(max_turns=2)
            return TurnCollector(env, stops, batch_size=16, post_collect_hook=partial(adapt_mixture, env))

        one, other = collect(), collect()
        for _ in range(3):
            one.rollout()
        other.load_state_dict(one.state_dict())
        for _ in range(2):
            assert (one.rollout() == other.rollout()).all()
        assert one.env.task_sampler.success == other.env.task_sampler.success

    def test_a_mixture_beneath_transforms(self, make, stops):
        env = make(max_turns=2)
        within = TransformedEnv(env, StepCounter())
        collector = TurnCollector(within, stops, batch_size=40, post_collect_hook=partial(adapt_mixture, within))
        collector.rollout()
        assert env.task_sampler.success is not None
        assert within.task_sampler is env.task_sampler

    def test_one_environment_is_no_mixture(self, make, stops):
        env = make([StopOrGo], max_turns=2)
        with pytest.raises(ValueError, match="'StopOrGo' is the only environment"):
            adapt_mixture(env, TurnCollector(env, stops, batch_size=4).rollout())

    def test_running_episodes_are_not_changed(self, make, stops):
        env = make(max_turns=2)
        collector = AsyncTurnCollector(
            env, stops, batch_size=4, max_staleness=2, post_collect_hook=partial(adapt_mixture, env)
        )
        with pytest.raises(RuntimeError, match="max_staleness=0"):
            list(islice(collector, 4))
        collector.shutdown()
