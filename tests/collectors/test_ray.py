"""RayTurnCollector and RayWeightSync: real workers in processes of their own. Needs Ray."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial

import pytest
import torch

ray = pytest.importorskip("ray", reason="needs Ray: run make test-scale")
pytestmark = pytest.mark.ray

import ray_parts as parts  # noqa: E402
from peft import LoraConfig  # noqa: E402
from ray_collectors import HERE, gone, pids, ray_collectors, running_ray, same  # noqa: E402
from ray_parts import ReusingCluster, SpendingCluster, Stamp, make_env, make_script, make_sleeper  # noqa: E402
from scripted_episodes import episodes, length, versions  # noqa: E402
from torchrl.data import LazyTensorStorage, RayReplayBuffer, ReplayBuffer  # noqa: E402
from waiting import LIMIT, a_moment, wait_until  # noqa: E402

from torchrl_llm import keys  # noqa: E402
from torchrl_llm.collectors import RayTurnCollector, TurnCollector  # noqa: E402
from torchrl_llm.data import TurnsToSequence  # noqa: E402
from torchrl_llm.modules import TokenScorer  # noqa: E402
from torchrl_llm.modules.segments import Segments  # noqa: E402
from torchrl_llm.testing.environments import Slow  # noqa: E402
from torchrl_llm.testing.tiny import load_tiny_model  # noqa: E402
from torchrl_llm.testing.worlds import Coins  # noqa: E402
from torchrl_llm.weight_update import RayWeightSync, WeightSyncError  # noqa: E402


def test_ray_has_to_run():
    assert not ray.is_initialized()
    for schemes in (None, {"policy": Stamp(make_script())}):
        with pytest.raises(RuntimeError, match=r"ray\.init"):
            RayTurnCollector(
                make_env,
                make_script(),
                make_policy=make_script,
                num_workers=1,
                batch_size=4,
                weight_sync_schemes=schemes,
            )
    assert not ray.is_initialized(), "it was started by the way"


@pytest.fixture(scope="module")
def cluster():
    with running_ray():
        yield


@pytest.fixture
def new(cluster):
    """Makes collectors whose workers are new processes, and shuts them down."""
    with ray_collectors() as new:
        yield new


@pytest.fixture
def collect(new, monkeypatch):
    """Makes collectors on processes that other tests have used, and shuts them down."""
    monkeypatch.setattr(RayTurnCollector, "_make_cluster", ReusingCluster)
    return new


class TestBatches:
    """The batches of TurnCollector, whoever plays."""

    def test_a_curriculum_reaches_the_workers_and_extras_come_from_them(self, collect):
        env = partial(make_env, [Coins, Coins], max_model_len=512)
        collectors = TurnCollector(env(), make_script(), batch_size=8), collect(env)
        for changes in ({"weights": (0, 1)}, {"options": [{}, {"moves": 2}]}, {"weights": (1, 1)}):
            expected, batch = (collector.rollout() for collector in collectors)
            assert same(batch, expected)
            assert keys.turn_extra("regret") in batch.keys(True)
            assert collectors[0].texts == collectors[1].texts
            for collector in collectors:
                collector.set_curriculum(**changes)
        assert set(collectors[1].rollout()[keys.ENV_ID].tolist()) == {0, 1}

    @pytest.mark.parametrize("workers", [1, 2, 3])
    def test_a_model_says_the_same_on_any_number_of_workers(self, collect, workers):
        env = partial(parts.make_guess, group_size=2)
        barrier = TurnCollector(env(), parts.make_hf(), batch_size=12)
        collector = collect(env, parts.make_hf(), make_policy=parts.make_hf, num_workers=workers, batch_size=12)
        for i in range(3):
            batch = collector.rollout()
            assert same(batch, barrier.rollout())
            assert episodes(batch) == list(range(12 * i, 12 * i + 12))
        assert len(set(pids(collector))) == workers

    @pytest.mark.parametrize(("env", "group"), [(make_env, 4), (parts.make_sliding, 1)], ids=["groups", "sliding"])
    def test_groups_and_sliding_windows(self, collect, env, group):
        env = partial(env, group_size=group, num_envs=4)
        barrier = TurnCollector(env(), make_script(), batch_size=8)
        collector = collect(env, batch_size=8, num_workers=2)
        for _ in range(3):
            batch = collector.rollout()
            assert same(batch, barrier.rollout())
            assert (batch["group_id"].unique(return_counts=True)[1] == group).all()
        slid = Segments.find(batch[keys.ATTENTION_MASK]) is not None
        assert slid == (env.func is parts.make_sliding)

    def test_each_worker_collects_and_a_group_has_one_worker(self, collect):
        env = partial(make_env, group_size=2)
        collector = collect(env, make_policy=partial(make_script, log_prob=-1.0), batch_size=16)
        homes = {}
        assign = collector._executor._assign

        def watched():
            assign()
            for worker in collector._executor.workers:
                for episode in worker.held.values():
                    homes.setdefault(episode.group_id, set()).add(worker.index)

        collector._executor._assign = watched
        collector.rollout()
        assert {len(home) for home in homes.values()} == {1}
        assert set.union(*homes.values()) == {0, 1}

    def test_greedy(self, collect):
        from torchrl.envs.utils import ExplorationType

        batches = [
            collect(
                parts.make_guess,
                parts.make_hf(),
                make_policy=parts.make_hf,
                num_workers=1,
                batch_size=4,
                exploration_type=mode,
            ).rollout()
            for mode in (ExplorationType.RANDOM, ExplorationType.DETERMINISTIC)
        ]
        expected = TurnCollector(
            parts.make_guess(), parts.make_hf(), batch_size=4, exploration_type=ExplorationType.DETERMINISTIC
        ).rollout()
        assert same(batches[1], expected)
        assert batches[0][keys.TOKENS].shape != expected[keys.TOKENS].shape or (batches[0] != expected).any()


class TestWeights:
    """What is trained here is what plays there."""

    def follow(self, collect, model, adapter, make_policy, change):
        """Play, change the weights, send them, play; TurnCollector with the trained model itself
        says the same."""
        policy = parts.make_hf(model, adapter)
        sync = RayWeightSync(model, adapter, policy=policy)
        collector = collect(
            parts.make_guess, policy, make_policy=make_policy, batch_size=8, weight_sync_schemes={"policy": sync}
        )
        barrier = TurnCollector(parts.make_guess(), policy, batch_size=8)
        for version in range(3):
            batch = collector.rollout()
            assert same(batch, barrier.rollout())
            assert versions(batch).unique().tolist() == [version]
            assert collector._executor.parity_gap < 1e-4
            change()
            collector.update_policy_weights_()
        return sync, policy

    def test_a_whole_model(self, collect):
        model = load_tiny_model()
        _, policy = self.follow(collect, model, None, parts.make_hf, partial(shake, model))
        assert policy.policy_version == 3

    def test_a_lora_adapter(self, collect):
        models = parts.make_lora_models(lora=parts.LORA)
        sync, _ = self.follow(
            collect, models.model, models.adapter, parts.make_lora_policy, partial(shake, models.model)
        )
        assert not sync.merged
        assert all("lora_" in name for name in ray.get(sync.current[1]).tensors)

    def test_an_adapter_that_cannot_be_served_is_sent_merged(self, collect):
        models = parts.make_lora_models(lora=LoraConfig(r=4, target_modules=["q_proj", "v_proj"], use_dora=True))
        sync, _ = self.follow(collect, models.model, models.adapter, parts.make_hf, partial(shake, models.model))
        assert sync.merged

    def test_the_parity_check_finds_another_base_at_a_worker(self, collect):
        models = parts.make_lora_models(lora=parts.LORA)
        policy = parts.make_hf(models.model, models.adapter)
        sync = RayWeightSync(models.model, models.adapter, policy=policy)
        collector = collect(
            parts.make_guess,
            policy,
            make_policy=partial(parts.make_lora_policy, spoil=0.5),
            num_workers=1,
            weight_sync_schemes={"policy": sync},
        )
        with pytest.raises(WeightSyncError, match="parity check") as caught:
            collector.rollout()
        assert "rollout worker 0" in " ".join(caught.value.__notes__)
        assert collector.closed

    def test_each_token_has_the_log_prob_of_the_weights_it_is_stamped_with(self, collect):
        model = load_tiny_model()
        policy = parts.make_hf(model)
        collector = collect(
            partial(parts.make_guess, env=partial(Slow, parts.EASY, mean=0.02, sigma=1.0)),
            policy,
            make_policy=parts.make_hf,
            max_staleness=1,
            batch_size=16,
            total_batches=4,
            weight_sync_schemes={"policy": RayWeightSync(model, policy=policy)},
        )
        scorers, seen = {}, set()
        for rows in collector:
            scorers[policy.policy_version] = load_tiny_model()
            scorers[policy.policy_version].load_state_dict(model.state_dict())
            stamped = rows[keys.POLICY_VERSION][rows[keys.TURN_IDS] >= 0]
            assert stamped.min() >= policy.policy_version - 1
            for version in set(stamped.tolist()):
                with torch.no_grad():
                    scored = TokenScorer(scorers[version], policy.sampling)(rows.clone())[keys.LOG_PROB]
                gap = (scored - rows[keys.SAMPLE_LOG_PROB])[rows[keys.TURN_IDS] >= 0].abs()
                assert gap[stamped == version].max() <= 1e-5
                seen.add((policy.policy_version, version))
            shake(model)
            collector.update_policy_weights_()
        assert len(seen) > 4, "no batch has tokens of two versions"

    def test_weights_that_were_not_sent_are_an_error(self, collect):
        policy = make_script()
        collector = collect(policy=policy, num_workers=1, weight_sync_schemes={"policy": Stamp(policy)})
        collector.rollout()
        policy.weights_changed()
        with pytest.raises(RuntimeError, match="update_policy_weights_"):
            collector.rollout()

    def test_other_weights_than_those_of_the_model_are_refused(self):
        policy = make_script()
        with pytest.raises(ValueError, match="without arguments"):
            Stamp(policy).send({"weight": torch.zeros(1)})
        assert policy.policy_version == 0

    def test_without_a_scheme_there_are_no_updates(self, collect):
        collector = collect(num_workers=1)
        with pytest.raises(RuntimeError, match="weight_sync_schemes"):
            collector.update_policy_weights_()
        assert episodes(collector.rollout()) == list(range(8))


def shake(model):
    """Move all weights that train."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))


class TestStaleness:
    @pytest.mark.parametrize("staleness", [1, 2])
    def test_in_order_nothing_lost_nothing_twice_and_not_too_old(self, collect, staleness):
        policy = make_script()
        collector = collect(
            partial(make_env, group_size=2),
            policy,
            make_policy=partial(make_sleeper, seconds_per_step=0.01),
            max_staleness=staleness,
            total_batches=8,
            weight_sync_schemes={"policy": Stamp(policy)},
        )
        seen, turns, mixed = [], [], 0
        for batch in collector:
            age = policy.policy_version - versions(batch)
            assert 0 <= int(age.min()) <= int(age.max()) <= staleness
            assert collector.env.num_sampled - len(seen) <= (staleness + 1) * 8
            mixed += len(versions(batch).unique()) > 1
            seen += episodes(batch)
            turns += batch[keys.TURN_MASK].sum(-1).tolist()
            collector.update_policy_weights_()
        assert seen == list(range(64))
        assert turns == [length(episode) for episode in seen], "short episodes are favored"
        assert mixed
        assert not collector.dropped

    def test_a_jump_of_the_version_drops_whole_groups_and_counts_them(self, collect):
        policy = make_script()
        collector = collect(
            partial(make_env, group_size=2),
            policy,
            make_policy=partial(make_sleeper, seconds_per_step=0.03),
            max_staleness=1,
            batch_size=8,
            total_batches=4,
            weight_sync_schemes={"policy": Stamp(policy)},
        )
        seen = []
        for batch in collector:
            assert int((policy.policy_version - versions(batch)).max()) <= 1
            ids = episodes(batch)
            assert [i // 2 for i in ids[::2]] == [i // 2 for i in ids[1::2]], "whole groups"
            seen += ids
            a_moment()  # most of the next batch are half played
            for _ in range(3):
                collector.update_policy_weights_()
        dropped = collector.dropped["stale"]
        assert dropped > 0
        assert dropped % 2 == 0
        assert seen == sorted(set(seen))
        missing = set(range(max(seen) + 1)) - set(seen)
        assert len(seen) == 32
        assert len(missing) <= dropped
        assert collector.stats()["dropped/stale"] == dropped

    def test_it_continues_while_the_caller_sleeps(self, collect):
        collector = collect(make_policy=partial(make_sleeper, seconds_per_step=0.01), max_staleness=1)
        assert collector.background
        collector.rollout()
        wait_until(lambda: collector.in_flight == 0)
        assert sum(episode.finished for episode in collector._queue.episodes.values()) == 8
        assert episodes(collector.rollout()) == list(range(8, 16))

    def test_on_policy_nothing_is_in_flight_between_batches(self, collect):
        policy = make_script()
        collector = collect(policy=policy, make_policy=make_sleeper, weight_sync_schemes={"policy": Stamp(policy)})
        for i in range(3):
            batch = collector.rollout()
            assert collector.in_flight == 0
            assert collector.env.num_sampled == 8 * (i + 1)
            assert versions(batch).unique().tolist() == [i]
            collector.update_policy_weights_()


class TestTorchRL:
    def test_a_replay_buffer_on_ray(self, collect):
        buffer = RayReplayBuffer(
            storage=partial(LazyTensorStorage, 64),
            transform_factory=partial(TurnsToSequence, max_model_len=1024, max_turns=8),
            batch_size=4,
            remote_config={"num_cpus": 0},
        )
        collector = collect(batch_size=8, total_batches=2, replay_buffer=buffer)
        try:
            assert list(collector) == [None, None]
            assert len(buffer) == 16
            assert buffer[:16][keys.EPISODE_ID].flatten().tolist() == list(range(16))
            assert buffer.sample()[keys.TOKENS].shape == (4, 1024)
        finally:
            buffer.close()

    def test_a_replay_buffer_here(self, collect):
        transform = TurnsToSequence(max_model_len=1024, max_turns=8)
        buffer = ReplayBuffer(storage=LazyTensorStorage(64), transform=transform, batch_size=4)
        collector = collect(batch_size=8, total_batches=2, replay_buffer=buffer, max_staleness=1)
        assert list(collector) == [None, None]
        assert buffer[:][keys.EPISODE_ID].flatten().tolist() == list(range(16))


class TestState:
    @pytest.mark.parametrize("staleness", [0, 2])
    def test_a_new_collector_with_other_workers_continues_with_the_next_task(self, collect, staleness):
        first = collect(make_policy=make_sleeper, max_staleness=staleness, num_workers=1)
        second = collect(partial(make_env, seed=9), make_policy=make_sleeper, max_staleness=staleness)
        first.rollout(), second.rollout(), second.rollout()
        state = first.state_dict()
        second.load_state_dict(state)
        barrier = TurnCollector(make_env(), make_script(), batch_size=8)
        barrier.rollout()
        for _ in range(2):
            assert same(second.rollout(), barrier.rollout())
        assert second.stats()["batches"] == 3

    def test_set_seed_forgets_what_is_in_flight(self, collect):
        collector = collect(make_policy=make_sleeper, max_staleness=2)
        collector.rollout()
        assert collector.in_flight
        collector.set_seed(3)
        barrier = TurnCollector(make_env(), make_script(), batch_size=8)
        barrier.set_seed(3)
        for _ in range(2):
            assert same(collector.rollout(), barrier.rollout())

    def test_what_is_reported_of_forgotten_episodes_is_ignored(self, collect):
        game = partial(make_env, parts.EASY, max_turns=3, max_model_len=2048)
        guess = parts.make_constant
        barrier = TurnCollector(game(), guess(), batch_size=8)
        one = barrier.rollout()
        barrier.set_seed(3)
        other = barrier.rollout()
        assert not one[keys.TOKENS].equal(other[keys.TOKENS])
        collector = collect(game, policy=guess(), make_policy=guess)
        executor = collector._executor
        collector._queue.limit = 8
        executor._assign()
        for worker in executor.workers:
            executor._send_request(worker)
        calls = [ref for worker in executor.workers for ref in worker.calls]
        assert len(ray.wait(calls, num_returns=len(calls), timeout=LIMIT)[0]) == len(calls)
        collector.set_seed(3)
        assert same(collector.rollout(), other)

    def test_a_shutdown_in_mid_flight_leaves_no_process(self, new, monkeypatch):
        monkeypatch.setattr(RayTurnCollector, "_make_cluster", SpendingCluster)
        collector = new(make_policy=partial(make_sleeper, seconds_per_step=0.05), max_staleness=2)
        collector.rollout()
        assert collector.in_flight
        workers = pids(collector)
        collector.shutdown()
        collector.shutdown()
        assert len(set(workers)) == 2
        wait_until(lambda: all(gone(pid) for pid in workers))
        assert collector.env.is_closed
        with pytest.raises(RuntimeError, match="shut down"):
            collector.rollout()

    @pytest.mark.slow
    def test_workers_end_with_a_driver_that_is_killed(self, cluster):
        environment = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
        script = [sys.executable, str(HERE / "ray_driver.py")]
        driver = subprocess.Popen(script, env=environment, stdout=subprocess.PIPE, text=True)
        try:
            workers = [int(pid) for pid in driver.stdout.readline().split()]
            assert len(set(workers)) == 2
            assert not any(gone(pid) for pid in workers)
        finally:
            driver.kill()
            driver.wait()
        wait_until(lambda: all(gone(pid) for pid in workers))
