"""Compare runs: what each came to, in which games it differs from the first, and what their
settings differ in.

torchrl-llm compare runs/ppo runs/reinforce runs/grpo
torchrl-llm compare runs/* --plot runs.png
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from torchrl_llm.utils.arguments import ArgumentParser
from torchrl_llm.utils.options import ConfigError
from torchrl_llm.utils.terminal import say


def add_arguments(parser: ArgumentParser) -> None:
    """Add the folders."""
    parser.add_argument("folders", metavar="RUN", nargs="+", type=Path, help="the folders of the runs")
    parser.add_argument(
        "--plot", metavar="FILE", type=Path, default=None, help="draw their win rates, as .png, .svg or .pdf"
    )


def run(arguments: Namespace) -> int:
    """Print the comparison, and draw it if that is asked for."""
    from torchrl_llm.report import compare_runs, plot_runs  # here, so that --help needs no PyTorch

    try:
        say(compare_runs(arguments.folders))
        if arguments.plot is not None:
            plot_runs(arguments.folders, arguments.plot)
            say(f"\nplot: {arguments.plot}")
    except (FileNotFoundError, ValueError) as error:
        raise ConfigError(str(error)) from error
    return 0
