"""What the tests of RayTurnCollector share in the process of the caller: Ray, collectors on it, and
their processes."""

from __future__ import annotations

import os
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import ray
import scripted_episodes
from ray_parts import ReusingCluster, make_env, make_script

from torchrl_llm.collectors import RayTurnCollector

HERE = Path(__file__).parent

# Log-probs depend on who else is in an engine's batch.
same = partial(scripted_episodes.same, atol=1e-5)


@contextmanager
def running_ray():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]))
        ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
        ReusingCluster.warm_up(3)
        yield
        ray.shutdown()


@contextmanager
def ray_collectors():
    """Makes collectors whose workers are new processes, and shuts them down at the end."""
    made = []

    def make(env=make_env, policy=None, *, make_policy=make_script, num_workers=2, batch_size=8, **kwargs):
        policy = make_script() if policy is None else policy
        options = {"worker_options": {"num_cpus": 0}, "num_workers": num_workers, "batch_size": batch_size, **kwargs}
        made.append(RayTurnCollector(env, policy, make_policy=make_policy, **options))
        return made[-1]

    try:
        yield make
    finally:
        for collector in made:
            collector.shutdown(raise_on_error=False)


def pids(collector):
    return [worker.info.pid for worker in collector._executor.workers if worker.info is not None]


def gone(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True
