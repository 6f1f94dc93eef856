"""The run of ``multiturn.py`` with rollouts on Ray: workers collect, this process trains.

    python examples/multiturn_ray.py --config examples/configs/tiny_reinforce_llm.yaml \\
        --ray-workers 2
    python examples/multiturn_ray.py --config examples/configs/tiny_reinforce_llm.yaml \\
        --max-staleness 1
    python examples/multiturn_ray.py --config examples/configs/grpo_multiturn.yaml --policy vllm \\
        --ray-workers 8 --ray-worker-gpus 1 --address auto

Without ``--address`` a Ray of its own starts on this machine and ends with the run;
``--address auto`` takes the cluster that this machine is part of. All other settings work as in
``multiturn.py``. Workers read model and environment from where this process does: on a cluster,
from a path or a hub that all machines see.
"""

import argparse
import logging
import math
import os
from typing import Any

from multiturn import main
from transformers.utils.logging import disable_progress_bar

from torchrl_llm.runs import RunSettings, parse_settings
from torchrl_llm.utils.optional import import_ray


def start_ray(config: RunSettings, address: str | None) -> Any:
    """Ray, connected to the cluster at ``address``, or to one of its own that has CPUs to give to
    all workers."""
    ray = import_ray()
    if address is not None:
        ray.init(address=address)
    else:
        asked = math.ceil(config.rollouts.num_collectors * (config.rollouts.ray_worker_cpus or 1))
        ray.init(address="local", num_cpus=max(os.cpu_count() or 1, asked), include_dashboard=False)
    return ray


if __name__ == "__main__":
    disable_progress_bar()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    flags = argparse.ArgumentParser(add_help=False)
    flags.add_argument("--address")
    own, rest = flags.parse_known_args()
    config = parse_settings([*rest, "--collector=ray"], description=__doc__)
    ray = start_ray(config, own.address)
    try:
        main(config)
    finally:
        ray.shutdown()
