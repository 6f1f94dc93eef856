"""Train a language model in a multi-turn environment, evaluate it before and after, and write a
report.

    torchrl-llm train --config examples/configs/tiny_ppo_llm.yaml --output-dir runs/first
    torchrl-llm train --config examples/configs/tiny_ppo_llm.yaml --output-dir runs/first --resume
    accelerate launch --module torchrl_llm train --config examples/configs/ppo_llm.yaml

The report goes to --output-dir: report.html (one page with curves and episodes: open it in a
browser), episodes.md, result.json, the metrics as CSV, and checkpoints whose weights PEFT and
transformers load.
"""

from __future__ import annotations

import json
from argparse import Namespace
from functools import partial

from transformers.utils.logging import disable_progress_bar

from torchrl_llm.report.run_report import run_and_report
from torchrl_llm.runs.flags import USAGE, add_settings, run_settings_of
from torchrl_llm.runs.run import build_run
from torchrl_llm.runs.schema import settings_schema
from torchrl_llm.utils.arguments import ArgumentParser
from torchrl_llm.utils.terminal import say


def add_arguments(parser: ArgumentParser) -> None:
    """Add the settings, and what is printed."""
    parser.usage, parser.noun = USAGE, "setting"
    parser.add_switch("--print_schema", "print a JSON schema of the settings")
    parser.add_switch("--json", "print result.json, and all else to stderr")
    add_settings(parser)


def run(arguments: Namespace) -> int:
    """Train, or print the schema."""
    if arguments.print_schema:
        say(json.dumps(settings_schema(), indent=2))
        return 0
    return train(arguments)


def train(arguments: Namespace) -> int:
    """Train with the settings of parsed arguments."""
    config = run_settings_of(arguments)
    disable_progress_bar()  # transformers' own, for loading and saving: they break ours
    tell = partial(say, stderr=bool(arguments.json))
    if run_and_report(config, partial(build_run, config), say=tell) and arguments.json:
        say((config.output.output_dir / "result.json").read_text(), end="")
    return 0
