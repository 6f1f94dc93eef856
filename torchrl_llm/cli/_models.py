"""What the commands that use a trained model share: their arguments, and how it is loaded."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from transformers.utils.logging import disable_progress_bar

from torchrl_llm.runs.flags import add_flags, given_settings
from torchrl_llm.runs.saved import USED, LoadedModel, SavedModel, find_saved_model, load_saved_model
from torchrl_llm.utils.arguments import ArgumentParser

CHECKPOINT = (
    "a run's folder (its newest checkpoint), a checkpoint such as RUN/checkpoints/best, or a folder with a model; "
    '"tiny" is the small model of the package, "smollm2" SmolLM2-135M-Instruct'
)


_MEANINGS = {
    "model_path": "Of an adapter: the base model, if it is not where training found it.",
    "seed": "Of the tasks and of the sampling noise.",
}


def add_checkpoint(parser: ArgumentParser, names: Sequence[str] = USED, *, optional: bool = False) -> None:
    """Add the checkpoint, and the settings that it may be used with in another way than it was
    trained with."""
    how: dict[str, Any] = {"nargs": "?", "default": None} if optional else {}
    parser.usage = "%(prog)s [CHECKPOINT] [--FLAG VALUE ...]" if optional else "%(prog)s CHECKPOINT [--FLAG VALUE ...]"
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help=CHECKPOINT, **how)
    group = parser.add_argument_group(
        "settings",
        "Those of the run that trained the model hold, unless they are given here (the defaults are a run's).",
    )
    add_flags(group, ("model_path", *names), _MEANINGS)


def load(arguments: Namespace, saved: SavedModel | None = None, **changes: Any) -> LoadedModel:
    """The model that the arguments name, with the settings that they give, and ``changes`` to those
    (:meth:`SavedModel.config`)."""
    disable_progress_bar()  # of loading weights
    saved = saved or find_saved_model(arguments.checkpoint)
    return load_saved_model(saved, saved.config(**{**given_settings(arguments), **changes}))
