"""The run of ``multiturn.py`` with rollouts on Ray: workers play, this process trains.

    python examples/multiturn_ray.py --config examples/configs/tiny_reinforce_llm.yaml --ray-workers 2
    python examples/multiturn_ray.py --config examples/configs/tiny_reinforce_llm.yaml --max-staleness 1
    python examples/multiturn_ray.py --config examples/configs/grpo_multiturn.yaml --policy vllm \\
        --ray-workers 8 --ray-worker-gpus 1 --address auto

Without ``--address`` a Ray of its own starts on this machine and ends with the run; ``--address auto`` takes the cluster that
this machine is part of. All other settings are those of ``multiturn.py``. Workers read model and environment from where this
process does: on a cluster, from a path or a hub that all machines see.
"""

import argparse
import logging
import os

from multiturn import main
from transformers.utils.logging import disable_progress_bar

from torchrl_llm.optional import import_ray
from torchrl_llm.trainers import parse_run_config

if __name__ == "__main__":
    disable_progress_bar()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    flags = argparse.ArgumentParser(add_help=False)
    flags.add_argument("--address", help="of a running cluster, such as auto")
    own, rest = flags.parse_known_args()
    config = parse_run_config([*rest, "--collector=ray"], description=__doc__)
    local = (
        {}
        if own.address
        else {"num_cpus": max(os.cpu_count() or 1, config.ray_workers or 2), "include_dashboard": False}
    )
    ray = import_ray()
    ray.init(address=own.address, **local)
    try:
        main(config)
    finally:
        ray.shutdown()
