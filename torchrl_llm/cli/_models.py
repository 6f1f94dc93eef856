"""What the commands that use a trained model share: their arguments, and how it is loaded."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

from transformers.utils.logging import disable_progress_bar

from torchrl_llm.arguments import ArgumentParser
from torchrl_llm.trainers.cli import add_flags, given_settings
from torchrl_llm.trainers.saved import USED, LoadedModel, SavedModel, find_saved_model, load_saved_model

CHECKPOINT = (
    "a run's folder (its newest checkpoint), a checkpoint such as RUN/checkpoints/best, or a folder with a model; "
    '"tiny" is the small model of the package'
)


def add_checkpoint(parser: ArgumentParser, names: Sequence[str] = USED) -> None:
    """Add the checkpoint, and the settings that it may be used with in another way than it was trained with."""
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help=CHECKPOINT)
    group = parser.add_argument_group(
        "settings",
        "Those of the run that trained the model hold, unless they are given here (the defaults are a run's).",
    )
    add_flags(group, ("model_path", *names))


def load(arguments: Namespace, saved: SavedModel | None = None) -> LoadedModel:
    """The model that the arguments name."""
    disable_progress_bar()  # of loading weights
    saved = saved or find_saved_model(arguments.checkpoint)
    return load_saved_model(saved, saved.config(**given_settings(arguments)))
