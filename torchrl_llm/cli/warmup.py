"""Teach a model a game by demonstrations, before reinforcement learning: supervised fine-tuning on
episodes.

    torchrl-llm warmup --model-path tiny --demonstrations guess_by_half_the_hints \\
        --output-dir runs/warm
    torchrl-llm train --model-path tiny --algo LLMREINFORCE \\
        --init-from runs/warm/checkpoints/last --output-dir runs/learned

It is torchrl-llm train with --algo SFT: the same settings, checkpoints and report. --demonstrations
names what is imitated: a scripted player of torchrl_llm.envs.players or of your own
("package.module:name", a function (context, rng) -> text), a file of messages (.jsonl, .json or
.parquet), or the folder of a run with recorded episodes. --imitate success leaves out what was not
won; without --demonstrations the model imitates its own episodes (rejection sampling).
"""

from __future__ import annotations

from argparse import Namespace

from torchrl_llm.cli.train import train
from torchrl_llm.runs.flags import USAGE, add_settings
from torchrl_llm.utils.arguments import ArgumentParser
from torchrl_llm.utils.options import ConfigError


def add_arguments(parser: ArgumentParser) -> None:
    """Add the settings, and what is printed."""
    parser.usage, parser.noun = USAGE, "setting"
    parser.add_switch("--json", "print result.json, and all else to stderr")
    add_settings(parser)


def run(arguments: Namespace) -> int:
    """Train with SFT."""
    algo = getattr(arguments, "algo", "SFT")
    if algo != "SFT":
        raise ConfigError(f"algo is {algo!r}; torchrl-llm warmup is for SFT: leave it out, or use torchrl-llm train.")
    arguments.algo = "SFT"
    return train(arguments)
