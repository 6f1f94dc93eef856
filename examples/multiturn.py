"""Train a language model in a multi-turn environment, evaluate it before and after, and write a
report.

    python examples/multiturn.py --config examples/configs/tiny_ppo_llm.yaml
    python examples/multiturn.py --algo GRPO --config examples/configs/grpo_multiturn.yaml --wandb
    python examples/multiturn.py --config examples/configs/tiny_ppo_llm.yaml --resume
    accelerate launch --config_file examples/configs/accelerate_fsdp2.yaml examples/multiturn.py \\
        --config examples/configs/tiny_ppo_llm.yaml

It is ``torchrl-llm train``. ``--help`` lists the settings; ``--resume`` continues where a run
was stopped. The report goes to ``--output-dir``: ``report.html`` (one page with curves and
episodes: open it in a browser), ``episodes.md``, ``result.json``, ``metrics.csv``, and checkpoints
whose weights PEFT and transformers load.
"""

import sys
from functools import partial

from torchrl_llm.cli import main as command
from torchrl_llm.report import run_and_report
from torchrl_llm.runs import RunSettings, build_run


def main(config: RunSettings) -> dict:
    """Evaluate, train, evaluate, report; returns what ``result.json`` holds (of several processes
    the first one writes it)."""
    return run_and_report(config, partial(build_run, config))


if __name__ == "__main__":
    raise SystemExit(command(["train", *sys.argv[1:]]))
