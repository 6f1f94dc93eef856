"""RayTurnCollector: workers that are lost, and what fails on them. Needs Ray."""

from __future__ import annotations

import os
import random
import signal
import threading
from functools import partial

import pytest

pytest.importorskip("ray", reason="needs Ray: run make test-scale")
pytestmark = pytest.mark.ray

import ray_parts as parts  # noqa: E402
from ray_collectors import gone, pids, ray_collectors, running_ray, same  # noqa: E402
from ray_parts import Doomed, ReusingCluster, Sometimes, Stamp, make_env, make_script, make_sleeper  # noqa: E402
from scripted_episodes import episodes, versions  # noqa: E402
from waiting import wait_until  # noqa: E402

from torchrl_llm.collectors import RayTurnCollector, TurnCollector, WorkerLostError  # noqa: E402
from torchrl_llm.envs import EnvironmentFault  # noqa: E402


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


class TestLosses:
    """A worker that is lost changes nothing but the time."""

    def play(self, collector, expected):
        for _ in range(2):
            assert same(collector.rollout(), expected.rollout())

    @pytest.mark.parametrize("moment", [0.02, 0.25, 0.6])
    def test_a_worker_is_killed_in_mid_batch(self, collect, moment):
        env = partial(make_env, group_size=2)
        collector = collect(env, make_policy=partial(make_sleeper, seconds_per_step=0.01), batch_size=32)
        victim = random.Random(moment).choice(pids(collector))
        timer = threading.Timer(moment, os.kill, (victim, signal.SIGKILL))
        timer.start()
        self.play(collector, TurnCollector(env(), make_script(), batch_size=32))
        timer.join()
        assert collector.lost_workers == 1
        assert collector.stats()["lost_workers"] == 1
        assert gone(victim)

    def test_all_workers_are_killed_at_once(self, collect):
        collector = collect(make_policy=partial(make_sleeper, seconds_per_step=0.01), batch_size=32)

        def kill():
            for pid in pids(collector):
                os.kill(pid, signal.SIGKILL)

        timer = threading.Timer(0.3, kill)
        timer.start()
        self.play(collector, TurnCollector(make_env(), make_script(), batch_size=32))
        assert collector.lost_workers == 2

    def test_a_worker_is_killed_between_batches_of_a_background_run(self, collect):
        policy = make_script()
        collector = collect(
            policy=policy,
            make_policy=partial(make_sleeper, seconds_per_step=0.01),
            max_staleness=1,
            weight_sync_schemes={"policy": Stamp(policy)},
        )
        seen = []
        for i in range(6):
            batch = collector.rollout()
            assert int((policy.policy_version - versions(batch)).max()) <= 1
            seen += episodes(batch)
            if i == 2:
                os.kill(pids(collector)[0], signal.SIGKILL)
            collector.update_policy_weights_()
        assert seen == list(range(48))
        assert not collector.dropped

    def test_a_worker_is_killed_that_has_nothing_to_do(self, collect):
        collector, expected = collect(), TurnCollector(make_env(), make_script(), batch_size=8)
        self.play(collector, expected)
        os.kill(pids(collector)[1], signal.SIGKILL)
        self.play(collector, expected)
        assert collector.lost_workers == 1

    def test_a_worker_that_dies_again_and_again(self, collect):
        doomed = partial(make_script, Doomed, deed=parts.die)
        collector = collect(make_policy=doomed, num_workers=1, max_losses=1)
        with pytest.raises(WorkerLostError, match=r"rollout worker 0 .*lost 2 times"):
            collector.rollout()
        assert collector.closed

    def test_without_a_replacement_the_others_continue(self, collect, monkeypatch, caplog):
        collector = collect(make_policy=partial(make_sleeper, seconds_per_step=0.01), batch_size=32)
        monkeypatch.setattr(collector._executor, "_start_timeout", 0.5)
        with ReusingCluster.none_spare():
            timer = threading.Timer(0.3, os.kill, (pids(collector)[1], signal.SIGKILL))
            timer.start()
            self.play(collector, TurnCollector(make_env(), make_script(), batch_size=32))
        assert collector.lost_workers == 1
        assert "continue without it" in caplog.text

    def test_one_that_hangs_is_replaced(self, collect, tmp_path):
        doomed = partial(make_script, Doomed, deed=parts.hang, episode=5, once=tmp_path / "hung")
        collector = collect(make_policy=doomed, worker_timeout=10.0)
        before = pids(collector)
        self.play(collector, TurnCollector(make_env(), make_script(), batch_size=8))
        assert collector.lost_workers == 1
        wait_until(lambda: any(gone(pid) for pid in before))


class TestErrors:
    """What fails on a worker fails here, and says where."""

    def error(self, call, kind, match):
        with pytest.raises(kind, match=match) as caught:
            call()
        return caught.value, " ".join(caught.value.__notes__)

    def test_the_policy_raises(self, collect):
        deed = partial(parts.fail, parts.OutOfLuckError, "no luck", 7)
        collector = collect(make_policy=partial(make_script, Doomed, deed=deed), num_workers=1)
        error, notes = self.error(collector.rollout, parts.OutOfLuckError, "no luck")
        assert type(error) is parts.OutOfLuckError
        assert error.luck == 7
        assert "rollout worker 0 (process" in notes
        assert collector.closed
        with pytest.raises(RuntimeError, match="shut down"):
            collector.rollout()

    def test_the_policy_raises_what_cannot_be_pickled(self, collect):
        deed = partial(parts.fail, parts.LockedError, "locked up")
        collector = collect(make_policy=partial(make_script, Doomed, deed=deed), num_workers=1)
        _, notes = self.error(collector.rollout, RuntimeError, "LockedError: locked up")
        assert "rollout worker 0" in notes

    @pytest.mark.parametrize("name", ["make_env", "make_policy"])
    @pytest.mark.parametrize("kind", [ValueError, parts.LockedError])
    def test_making_fails(self, collect, name, kind):
        here = os.getpid()
        broken = {
            "make_env": {"env": partial(parts.fail_elsewhere, here, make_env, kind)},
            "make_policy": {"make_policy": partial(parts.fail_elsewhere, here, make_script, kind)},
        }[name]
        expected = kind if kind is ValueError else RuntimeError
        _, notes = self.error(lambda: collect(**broken, num_workers=1), expected, "no paper")
        assert f"by {name}" in notes
        assert "rollout worker 0" in notes

    def faulty(self, deed, bad, **kwargs):
        seeds = {make_env(**kwargs).task_sampler[index].seed for index in bad}
        return partial(make_env, partial(Sometimes, seeds, deed), max_turns=8, **kwargs)

    @pytest.mark.parametrize(
        ("deed", "reason"),
        [
            (partial(parts.fail, parts.OutOfLuckError, "no luck", 7), "error"),
            (partial(parts.fail, parts.LockedError, "locked up"), "error"),
            (parts.hang, "timeout"),
        ],
        ids=["raises", "raises what cannot be pickled", "hangs"],
    )
    def test_an_environment_that_fails_ends_its_group_only(self, collect, deed, reason, caplog):
        env = self.faulty(deed, [2], group_size=2)
        collector = collect(env, batch_size=8, step_timeout=5.0)
        assert episodes(collector.rollout()) == [0, 1, *range(4, 10)]
        assert 1 <= collector.faults[reason] == sum(collector.faults.values()) <= 2
        assert collector.dropped[reason] == 2
        assert {"raises": "OutOfLuckError: no luck"}.get(reason, "group 1") in caplog.text

    def test_too_many_faults_raise_the_first(self, collect):
        env = self.faulty(partial(parts.fail, parts.OutOfLuckError, "no luck", 7), range(2, 8))
        collector = collect(env, max_faults=3)
        error, notes = self.error(collector.rollout, EnvironmentFault, "OutOfLuckError: no luck")
        assert "max_faults=3" in notes
        assert error.cause.luck == 7
        assert collector.closed

    def test_too_few_resources(self, new):
        with pytest.raises(WorkerLostError, match="not up after") as caught:
            new(worker_options={"num_cpus": 64}, start_timeout=2.0)
        assert "'CPU'" in str(caught.value)

    @pytest.mark.parametrize(
        ("there", "name"),
        [
            ({"env": partial(parts.differently, os.getpid(), make_env, group_size=2)}, "group_size"),
            ({"env": partial(parts.differently, os.getpid(), make_env, max_model_len=77)}, "max_model_len"),
            ({"make_policy": partial(make_script, max_output_tokens=17)}, "sampling"),
        ],
        ids=["group_size", "max_model_len", "sampling"],
    )
    def test_workers_that_are_not_like_here(self, collect, there, name):
        with pytest.raises(ValueError, match=f"rollout worker 0 .* has {name}"):
            collect(**there, num_workers=1)

    @pytest.mark.parametrize(
        "wrong", [{"num_workers": 0}, {"worker_timeout": 0.0}, {"start_timeout": 0.0}, {"max_losses": -1}]
    )
    def test_wrong_settings_are_named(self, collect, wrong):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            collect(**wrong)
