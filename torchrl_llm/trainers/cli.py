"""Command line and YAML -> :class:`~torchrl_llm.trainers.RunConfig`. Needs the ``examples`` extra (jsonargparse)."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import fields

from torchrl_llm.trainers.config import ConfigError, RunConfig


def parse_run_config(argv: Sequence[str] | None = None, *, description: str | None = None) -> RunConfig:
    """Read the settings of a run from ``--config FILE.yaml`` and flags; a later one overrides an earlier one.

    Every field of :class:`~torchrl_llm.trainers.RunConfig` is a flag (``--max-steps`` and ``--max_steps`` are the same),
    a bare flag of a boolean field means true, and an unknown or contradictory field is an error.

    Args:
        argv: the arguments; None takes those of the process.
        description: shown by ``--help``.

    Returns:
        The settings. Exits with a message as :mod:`argparse` does if they are wrong.

    Examples:
        >>> config = parse_run_config(["--algo", "GRPO", "--batch-size", "8", "--group-size", "4", "--wandb"])
        >>> config.algo, config.batch_size, config.wandb
        ('GRPO', 8, True)
    """
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(description=description)
    parser.add_argument("--config", action="config", help="a YAML file of the fields below")
    parser.add_class_arguments(RunConfig, as_group=False)
    arguments = _normalise(sys.argv[1:] if argv is None else list(argv))
    settings = parser.parse_args(arguments)
    settings.pop("config", None)
    try:
        return RunConfig(**settings.as_dict())
    except (ConfigError, ValueError) as error:
        parser.error(str(error))


def resume_command(config: RunConfig) -> str:
    """The command line that goes on with a run which this process began from :func:`parse_run_config`.

    Args:
        config: the run's settings.

    Examples:
        >>> resume_command(RunConfig(overwrite=True)).endswith(" --overwrite=false --resume")
        True
    """
    undone = ["--overwrite=false"] if config.overwrite else []
    undone += ["--resume_from=null"] if config.resume_from is not None else []
    given = [word for word in sys.argv if word != "--resume"]
    return shlex.join(["python", *given, *undone, "--resume"])


def _normalise(argv: list[str]) -> list[str]:
    """``--max-steps`` -> ``--max_steps``; a boolean flag without a value gets ``true``."""
    booleans = {f"--{field.name}" for field in fields(RunConfig) if field.type == "bool"}
    out = []
    for position, word in enumerate(argv):
        if word.startswith("--"):
            flag, sign, value = word.partition("=")
            word = flag.replace("-", "_").replace("__", "--", 1) + sign + value
            bare = position + 1 == len(argv) or argv[position + 1].startswith("--")
            if word in booleans and bare:
                word += "=true"
        out.append(word)
    return out
