"""set_curriculum: what is sampled from then on, with every collector, and in a state that is loaded
again."""

from __future__ import annotations

import pickle
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_episodes import Streaming, async_collectors

from torchrl_llm import keys
from torchrl_llm.collectors import AsyncTurnCollector, TurnCollector
from torchrl_llm.collectors._worker import RolloutWorker, WorkerRequest
from torchrl_llm.envs import GEMEnv, TaskSampler
from torchrl_llm.envs.tasks import MOST_STAGES
from torchrl_llm.testing.environments import Echo, StopOrGo
from torchrl_llm.testing.policies import ScriptedPolicy
from torchrl_llm.testing.worlds import Coins
from torchrl_llm.utils.options import ConfigError

ONLY = {0: (1.0, 0.0), 1: (0.0, 1.0)}


@pytest.fixture
def make(tokenizer):
    return lambda env=(Coins, Coins), **kwargs: GEMEnv(
        list(env), **{"tokenizer": tokenizer, "num_envs": 4, "max_output_tokens": 16, "max_turns": 9, **kwargs}
    )


@pytest.fixture
def policy(tokenizer):
    return lambda: ScriptedPolicy(
        lambda episode, turn, _: "left" if (episode + turn) % 3 else "right", tokenizer=tokenizer, max_output_tokens=16
    )


def turns(batch):
    """The environment and the number of turns of each episode."""
    return list(zip(batch[keys.ENV_ID].tolist(), batch[keys.TURN_MASK].sum(-1).tolist(), strict=True))


class TestSampler:
    @given(
        st.integers(1, 4),
        st.integers(1, 3),
        st.lists(st.tuples(st.integers(0, 60), st.sampled_from([*ONLY])), max_size=6).map(sorted),
    )
    def test_a_stage_holds_from_the_next_whole_group(self, group_size, num_workers, changes):
        plain = sampler = TaskSampler(
            seed=5, group_size=group_size, mixture_size=2, worker=num_workers - 1, num_workers=num_workers
        )
        for index, env_id in changes:
            sampler = sampler.with_stage(index, weights=ONLY[env_id])
        for index in range(80):
            began = [env_id for first, env_id in changes if -(-first // group_size) * group_size <= index]
            expected = plain[index]._replace(env_id=began[-1]) if began else plain[index]
            assert sampler[index] == expected

    def test_what_changes_nothing_adds_no_stage(self):
        sampler = TaskSampler(mixture_size=2, weights=(1, 3)).with_stage(4, weights=(1, 3)).with_stage(6)
        assert sampler.stages == ()

    def test_stages_are_bounded_and_plain_in_a_state(self):
        sampler = TaskSampler(mixture_size=2)
        for index in range(MOST_STAGES + 5):
            sampler = sampler.with_stage(index, weights=ONLY[index % 2], options=[{"n": index}, {}])
        assert len(sampler.stages) == MOST_STAGES
        assert sampler[MOST_STAGES + 4].options == (("n", MOST_STAGES + 4),)

    def test_learnability_is_of_the_weights_in_force(self):
        sampler = TaskSampler(mixture_size=2, success=(0.5, 0.5)).with_stage(0, weights=(1, 2))
        assert sampler.shares == pytest.approx((0.3, 0.6))


class TestRefused:
    @pytest.mark.parametrize("weights", [(0, 0), (-1, 2), (float("nan"), 1), (float("inf"), 1)])
    def test_weights(self, make, weights):
        with pytest.raises(
            ConfigError, match=r"weights of a curriculum are .*expected numbers >= 0, not all of them 0"
        ):
            make().set_curriculum(weights=weights)

    @pytest.mark.parametrize("changes", [{"weights": (1,)}, {"options": [{}] * 3}])
    def test_not_one_for_each_environment(self, make, changes):
        with pytest.raises(ConfigError, match="expected 2 of them, one an environment"):
            make().set_curriculum(**changes)

    @pytest.mark.parametrize("options", [{"moves": 0}, {"steps": 3}])
    def test_options_that_an_environment_cannot_be_made_with(self, make, options):
        env = make()
        with pytest.raises(ConfigError, match=r"'Coins' cannot be made with the options .*(moves=0|steps)"):
            env.set_curriculum(options=[{}, options])
        assert env.task_sampler.stages == ()

    @pytest.mark.parametrize("options", [{"moves": object()}, 7])
    def test_options_that_no_checkpoint_could_hold(self, make, options):
        with pytest.raises(ConfigError, match=r"options of environment 1 are .*expected a mapping of plain data"):
            make().set_curriculum(options=[{}, options])


class Counted(Coins):
    made, closed = 0, 0

    def __init__(self, **options):
        super().__init__(**options)
        Counted.made += 1

    def close(self):
        Counted.closed += 1


def test_only_options_that_changed_are_tried_and_what_was_made_is_closed(make, monkeypatch):
    env = make((Counted, Counted))
    for options, changed in (
        ([{}, {}], 0),
        ([{"moves": 2}, {}], 1),
        ([{"moves": 2}, {}], 0),
        ([{"moves": 3}, {"moves": 4}], 2),
    ):
        monkeypatch.setattr(Counted, "made", 0)
        monkeypatch.setattr(Counted, "closed", 0)
        env.set_curriculum(options=options)
        assert (Counted.made, Counted.closed) == (changed, changed)


class TestCollectors:
    @pytest.mark.parametrize("kind", [TurnCollector, AsyncTurnCollector])
    def test_the_next_batch_is_of_the_new_stage(self, make, policy, kind):
        collector = kind(make(), policy(), batch_size=8)
        assert turns(collector.rollout()) == [(0, 5), (1, 5)] * 4
        collector.set_curriculum(weights=ONLY[1])
        assert turns(collector.rollout()) == [(1, 5)] * 8
        collector.set_curriculum(options=[{}, {"moves": 2}])
        assert turns(collector.rollout()) == [(1, 2)] * 8
        collector.set_curriculum(weights=(1, 1), options=[{"moves": 7, "worths": (1, 1, 1)}, {}])
        assert set(turns(collector.rollout())) == {(0, 7), (1, 5)}
        collector.shutdown()

    def test_running_episodes_of_a_background_thread_keep_their_tasks(self, make, tokenizer):
        answers = Streaming(lambda episode, turn, _: "left", tokenizer=tokenizer, max_output_tokens=16, seconds=0.002)
        with async_collectors() as new:
            collector = new(make(), answers, batch_size=4, max_staleness=2, background=True)
            seen = []
            for number in range(12):
                batch = collector.rollout()
                seen += zip(batch[keys.EPISODE_ID].tolist(), turns(batch), strict=True)
                collector.policy.weights_changed()
                if number % 3 == 2:
                    stage = number // 3
                    collector.set_curriculum(weights=ONLY[stage % 2], options=[{"moves": 2 + stage}] * 2)
        sampler = collector.env.task_sampler
        assert len(sampler.stages) == 4
        expected = [(sampler[i].env_id, dict(sampler[i].options).get("moves", 5)) for i, _ in seen]
        assert [found for _, found in seen] == expected
        assert {length for _, length in expected} >= {5, 2, 3}

    @pytest.mark.parametrize("kind", [TurnCollector, AsyncTurnCollector])
    def test_a_loaded_state_samples_the_same_tasks(self, make, policy, kind):
        def collect(collector, numbers):
            found = []
            for number in numbers:
                found.append(collector.rollout())
                if number < 3:
                    weights = (number, 1 + number % 2)
                    collector.set_curriculum(weights=weights, options=[{"moves": 1 + number}, {}])
            return [(batch[keys.EPISODE_ID].tolist(), turns(batch), batch[keys.TASK_ID].tolist()) for batch in found]

        env = partial(make, (Coins, Coins), group_size=2)
        whole, first, second = (kind(env(), policy(), batch_size=6) for _ in range(3))
        expected = collect(whole, range(5))
        assert collect(first, range(2)) == expected[:2]
        state = first.state_dict()
        second.load_state_dict(state)
        assert collect(second, range(2, 5)) == expected[2:]
        for collector in (whole, first, second):
            collector.shutdown()

    def test_it_holds_from_the_first_task_of_another_seed(self, make, policy):
        collector = TurnCollector(make(), policy(), batch_size=8)
        collector.rollout()
        collector.set_curriculum(weights=ONLY[1], options=[{}, {"moves": 2}])
        collector.set_seed(3)
        assert turns(collector.rollout()) == [(1, 2)] * 8

    def test_an_environment_of_another_kind_has_none(self, make, policy):
        collector = TurnCollector(make([StopOrGo, Echo]), policy(), batch_size=4)
        with pytest.raises(ConfigError, match="'StopOrGo' cannot be made with"):
            collector.set_curriculum(options=[{"moves": 3}, {}])


def test_a_worker_samples_by_the_stages_that_come_with_its_requests(make, policy):
    worker = RolloutWorker(make, policy, install=None, greedy=False, num_threads=0, step_timeout=10.0)
    here, lengths = make(), {}
    for serial in range(3):
        here.num_sampled = 2 * serial
        here.set_curriculum(weights=ONLY[serial % 2], options=[{"moves": 1 + serial}] * 2)
        start = [(2 * serial + i, 2 * serial + i) for i in range(2)]
        request = pickle.loads(pickle.dumps(WorkerRequest(here.task_sampler, start, [], 60.0, 60.0)))
        for number, episode in worker.run(request).finished:
            lengths[number] = episode.env_id, len(episode.rewards)
    assert lengths == {number: (number // 2 % 2, 1 + number // 2) for number in range(6)}
    worker.close()
