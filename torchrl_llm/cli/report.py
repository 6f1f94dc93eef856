"""Write the HTML report of a run, one file that needs no server and no network, and of recorded
episodes the text of some, episodes.md.

torchrl-llm report runs/first
torchrl-llm report runs/first --full
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from torchrl_llm.utils.arguments import ArgumentParser
from torchrl_llm.utils.options import ConfigError
from torchrl_llm.utils.terminal import say


def add_arguments(parser: ArgumentParser) -> None:
    """Add the folder."""
    parser.add_argument("folder", metavar="RUN", type=Path, help="the folder of the run")
    parser.add_switch("--full", "write everything that was recorded into report.html")


def run(arguments: Namespace) -> int:
    """Write both, and print where the page is."""
    if not arguments.folder.is_dir():
        raise ConfigError(f"The run is '{arguments.folder}': there is no such folder.")
    # Here, so that a wrong folder and --help need no PyTorch.
    from torchrl_llm.report import write_report
    from torchrl_llm.runs.run_folder import MARK

    # Others have files of these names too, and a report.html that would be lost.
    if not (arguments.folder / MARK).is_file():
        raise ConfigError(
            f"The run is '{arguments.folder}', which is not the folder of a run: it has no {MARK}, which every run writes there. "
            "Give a run's output_dir. Of other folders torchrl_llm.report.write_report(folder) writes a report in Python."
        )

    try:
        say(write_report(arguments.folder, full=arguments.full))
    except FileNotFoundError as error:
        raise ConfigError(str(error)) from error
    return 0
