"""A driver that plays on two workers of a Ray of its own until it is killed; prints the workers'
process ids."""

from __future__ import annotations

import ray
from ray_parts import make_env, make_script, make_sleeper

from torchrl_llm.collectors import RayTurnCollector

if __name__ == "__main__":
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    collector = RayTurnCollector(
        make_env, make_script(), make_policy=make_sleeper, num_workers=2, batch_size=8, max_staleness=1
    )
    collector.rollout()
    print(*(worker.info.pid for worker in collector._executor.workers), flush=True)  # noqa: T201
    while True:
        collector.rollout()
