"""Weights on disk, in PEFT's and transformers' own formats, replaced as a whole or not at all."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from torchrl_llm.modules import ActorCritic


def save_weights(models: ActorCritic, tokenizer: Any, path: Path) -> Path:
    """Write the weights of ``models`` and the tokenizer to the folder ``path``.

    They are written beside it first and then take its place, so a crash leaves either the old folder or the new one
    whole (for the instant between two renames, the old one is at ``<path>.old``).

    Args:
        models: actor, and critic if there is one.
        tokenizer: saved to ``<path>/tokenizer``.
        path: the folder; what it held is replaced.

    Returns:
        ``path``.
    """
    new, old = path.with_name(path.name + ".new"), path.with_name(path.name + ".old")
    if old.exists() and not path.exists():  # a crash fell between the two renames
        os.replace(old, path)
    for leftover in (new, old):
        shutil.rmtree(leftover, ignore_errors=True)
    new.mkdir(parents=True)
    models.save_pretrained(new)
    tokenizer.save_pretrained(new / "tokenizer")
    if path.exists():
        os.replace(path, old)
    os.replace(new, path)
    shutil.rmtree(old, ignore_errors=True)
    return path
