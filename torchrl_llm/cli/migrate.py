"""Put a file of settings as version 0.2 had them, in one list, into sections.

torchrl-llm migrate old.yaml > new.yaml
torchrl-llm migrate --in-place exported/run_config.yaml
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from torchrl_llm.runs.migrate import migrated
from torchrl_llm.utils.arguments import ArgumentParser
from torchrl_llm.utils.files import write_text
from torchrl_llm.utils.terminal import say


def add_arguments(parser: ArgumentParser) -> None:
    """Add the file."""
    parser.add_argument("file", type=Path, metavar="FILE", help="a YAML file of settings")
    parser.add_switch("--in_place", "write the translation into FILE, and print nothing")


def run(arguments: Namespace) -> int:
    """Print the translation, or write it."""
    text = migrated(arguments.file)
    if arguments.in_place:
        write_text(arguments.file, text)
    else:
        say(text.removesuffix("\n"))
    return 0
