"""The files of a checkpoint: their sums, what may be among them, and how a folder is put in place
of another."""

from __future__ import annotations

import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torchrl.checkpoint import Checkpoint, CheckpointError

from torchrl_llm.utils.files import sha256

SUCCESS = "evaluation_success"
"""The metric, in a checkpoint's manifest, that the best one is chosen by."""

NAME = re.compile(r"checkpoint-(\d{12})")
"""How :class:`torchrl.checkpoint.CheckpointRotation` names a checkpoint: by its iteration."""

_SUMS = "sums.json"
# By name, even where sums.json lists it: a planted pickle may come with its sum.
_PICKLES = {".pickle", ".pkl", ".pt", ".pth", ".bin", ".ckpt", ".joblib"}
_METADATA = {SUCCESS, "iteration", "steps", "config", "environment"}


def verify(path: str | Path) -> dict[str, Any]:
    """Check that a checkpoint holds exactly what was saved: every file against its sum, and no file
    besides.

    Args:
        path: the checkpoint's folder, or a link to it.

    Returns:
        Its manifest.

    Raises:
        CheckpointError: a file is missing, cut short or changed, was not saved, or is a link or a
            pickle; the message names it.
    """
    path = Path(path)
    try:
        sums = _read_sums(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} is not a whole checkpoint, or one of an earlier version of this library (its weights load with init_from): "
            f"{path / _SUMS} cannot be read: {error}"
        ) from error
    # Before the manifest is parsed, which the sums cover too.
    _check_files(path, sums)
    try:
        manifest = Checkpoint.manifest(path)
    except (CheckpointError, OSError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path / 'manifest.json'} is not a manifest of a checkpoint: {error}") from error
    _check_metadata(path, manifest.get("metadata"))
    return manifest


def _read_sums(path: Path) -> dict[str, str]:
    sums = json.loads((path / _SUMS).read_text())
    if not isinstance(sums, dict):
        raise ValueError(f"{path / _SUMS} holds no sums.")
    return sums


def write_sums(path: Path) -> None:
    sums = {name: sha256(path / name) for name in _files(path) if name != _SUMS}
    (path / _SUMS).write_text(json.dumps(sums, indent=1))


def _files(path: Path) -> list[str]:
    """The files below ``path``, and the links, which are not followed."""
    found = [file for file in path.rglob("*") if file.is_symlink() or not file.is_dir()]
    return sorted(file.relative_to(path).as_posix() for file in found)


def foreign_files(path: Path) -> list[str]:
    """The files in a checkpoint's folder that were not saved with it; of a folder that is not a
    checkpoint, all files."""
    try:
        saved = {_SUMS, *_read_sums(path)}
    except (OSError, ValueError):
        saved = set()
    return [name for name in _files(path) if name not in saved]


def is_checkpoint(path: Path) -> bool:
    """Whether ``path`` is a folder that holds a checkpoint, whole or damaged, and nothing that was
    not saved with it."""
    return path.is_dir() and not path.is_symlink() and (path / _SUMS).is_file() and not foreign_files(path)


def _check_files(path: Path, sums: Mapping[str, str]) -> None:
    for name in _files(path):
        file = path / name
        if file.is_symlink():
            raise CheckpointError(f"{file} is a link: a checkpoint holds files only. Remove it, or put the file there.")
        if file.suffix in _PICKLES:
            raise CheckpointError(f"{file} is a pickle, which can run any code: a checkpoint holds none. Remove it.")
    for name in foreign_files(path):
        raise CheckpointError(f"{path / name} was not saved with the checkpoint: remove it.")
    for name, expected in sums.items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"{file} is missing: the checkpoint is damaged.")
        if sha256(file) != expected:
            raise CheckpointError(f"{file} is not what was saved (its SHA-256 differs): the checkpoint is damaged.")


def same_sums(first: Path, second: Path) -> bool:
    try:
        return _read_sums(first) == _read_sums(second)
    except (OSError, ValueError):
        return False


def _check_metadata(path: Path, metadata: Any) -> None:
    lacking = sorted(_METADATA - set(metadata)) if isinstance(metadata, Mapping) else sorted(_METADATA)
    if lacking:
        raise CheckpointError(
            f"{path / 'manifest.json'} lacks {lacking} in its metadata: no run of this library saved it."
        )
    kinds = {"iteration": int, "steps": int, "config": Mapping, "environment": Mapping}
    wrong = [name for name, kind in kinds.items() if not isinstance(metadata[name], kind)]
    if wrong or not isinstance(metadata["environment"].get("versions"), Mapping):
        raise CheckpointError(
            f"{path / 'manifest.json'} has metadata of another kind ({', '.join(wrong) or 'environment'}): no run of this library saved it."
        )
    # Checkpoints are ordered and pruned by the number in their names.
    name = NAME.fullmatch(path.resolve().name)
    if name and int(name[1]) != metadata["iteration"]:
        raise CheckpointError(f"{path} was saved at iteration {metadata['iteration']}: give the folder its name back.")


def publish(place: Path, write: Callable[[Path], None]) -> None:
    """Write a checkpoint beside its place, its sums last, and move it there: after a crash it is
    whole or not there.

    Args:
        place: the checkpoint's folder; a checkpoint that is there is replaced.
        write: writes everything but the sums into the folder given to it, which does not exist yet.

    Raises:
        CheckpointError: ``place`` holds files that are not a checkpoint's.
    """
    check_replaceable(place)
    stage = place.parent / f".{place.name}.stage-{uuid.uuid4().hex}"
    try:
        # Within a folder of its own, which also takes what TorchRL's save leaves beside its target
        # after a crash.
        write(stage / place.name)
        write_sums(stage / place.name)
        old = place.parent / f".{place.name}.old-{uuid.uuid4().hex}"
        # A folder cannot be renamed over one with files: it takes two steps, and recover() after a
        # crash between them.
        if place.exists():
            place.replace(old)
        (stage / place.name).replace(place)
        if old.exists():
            shutil.rmtree(old)
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def check_replaceable(place: Path) -> None:
    """Refuse to replace a folder that holds anything but a checkpoint."""
    recover(place)
    folder = place.is_dir() and not place.is_symlink()
    foreign = foreign_files(place) if folder else [place.name] if os.path.lexists(place) else []
    if foreign:
        raise CheckpointError(
            f"{place} holds what this library did not save as a checkpoint ({', '.join(foreign[:3])}), and saving would "
            "delete it: choose another folder, or empty it."
        )


def recover(place: Path) -> None:
    """Put the old checkpoint back after a crash between the two steps of a replacement, or delete
    it."""
    for old in place.parent.glob(f".{place.name}.old-*"):
        shutil.rmtree(old) if place.exists() else old.replace(place)
