"""Write a checkpoint as a folder for others: an adapter for PEFT, or one merged model for
transformers and vLLM.

    torchrl-llm export runs/first exports/first --as merged
    torchrl-llm export runs/first/checkpoints/best exports/best --as adapter

The folder gets a model card (README.md) with what it was trained on, the settings, and results with
their intervals.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from transformers.utils.logging import disable_progress_bar

from torchrl_llm.cli._models import add_checkpoint
from torchrl_llm.runs.export import export_model
from torchrl_llm.runs.flags import given_settings
from torchrl_llm.runs.saved import find_saved_model
from torchrl_llm.utils.arguments import ArgumentParser
from torchrl_llm.utils.interrupts import catch_signals, interruptible
from torchrl_llm.utils.terminal import say


def add_arguments(parser: ArgumentParser) -> None:
    """Add the checkpoint, the folder and the format."""
    add_checkpoint(parser, ("dtype", "device", "trust_remote_code"))
    parser.usage = "%(prog)s CHECKPOINT OUT [--as adapter|merged] [--FLAG VALUE ...]"
    parser.add_argument("folder", metavar="OUT", help="the new folder")
    parser.add_argument(
        "--as", dest="format", choices=("adapter", "merged"), default="merged", help="the format (default: merged)"
    )


def run(arguments: Namespace) -> int:
    """Export, and print where to."""
    disable_progress_bar()
    # A signal raises, so that what is half written is removed.
    with catch_signals():
        say(interruptible(lambda: _export(arguments)))
    return 0


def _export(arguments: Namespace) -> Path:
    saved = find_saved_model(arguments.checkpoint)
    return export_model(saved, arguments.folder, format=arguments.format, **given_settings(arguments))
