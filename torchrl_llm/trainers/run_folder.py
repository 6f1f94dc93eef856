"""Who owns ``output_dir``: :class:`RunFolder` marks the folder of a run, and moves what an earlier run left there aside.

::

    runs/multiturn/
        torchrl_llm.json                        the mark
        checkpoints/  csv/  result.json  ...    the run
        previous-1/                             an earlier run, or a branch that was given up; with a mark of its own

Files under other names than those of a run stay where they are. Of what was moved aside, only files that this library wrote
are ever deleted, and only those of a run that ``overwrite`` replaced by one that has a whole checkpoint by now.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from torchrl.checkpoint import Checkpoint
from torchrl.record.loggers import Logger

from torchrl_llm.trainers.checkpoint import CheckpointStore, foreign_files, rewind_csv
from torchrl_llm.trainers.config import ConfigError, RunConfig

logger = logging.getLogger(__name__)

MARK = "torchrl_llm.json"
"""The file that tells a run's folder from any other."""

_REPORT = (
    *("merged", "result.json", "evaluation_before.json", "learning_curve.png"),
    *("conversations_before.md", "conversations_after.md"),
)
_NAMES = ("checkpoints", "csv", "tensorboard", "wandb", "wandb_id", *_REPORT)
"""What a run writes."""

_WORK = ("checkpoints/checkpoint-*", "csv/scalars/**/*.csv", *_REPORT)
"""What it has only if it came to something."""

_FILES = (
    *("csv/scalars/*/*.csv", "csv/texts/hparams[0-9]*.txt", "tensorboard/**/events.out.tfevents.*", "wandb_id"),
    *("merged/model*.safetensors", "merged/model.safetensors.index.json", "merged/chat_template.jinja"),
    *(
        f"merged/{name}.json"
        for name in ("config", "generation_config", "tokenizer", "tokenizer_config", "special_tokens_map")
    ),
    *_REPORT,
)
_LINKS = ("checkpoints/last", "checkpoints/best")
"""The files and links of these, but for checkpoints, which list theirs. Others of a folder stay, W&B's own among them."""

_MOVING, _REPLACED, _KEPT = "moving", "replaced", "kept"
"""What becomes of a folder beside the run: it goes back after a crash; it is deleted when the new run is saved; it stays."""


class RunFolder:
    """The folder of one run.

    Args:
        config: of the run; ``output_dir`` is the folder. Nothing is made or changed before :meth:`open`.
    """

    def __init__(self, config: RunConfig) -> None:
        self.config, self.path = config, config.output_dir.absolute()
        self.checkpoints = CheckpointStore(self.path / "checkpoints", models=None)

    def check(self) -> None:
        """Refuse a folder that cannot be written to, or that holds what looks like a run and is none of this library's.

        What a crash has left half moved is put back.

        Raises:
            ConfigError: the message says what is there, and what to do.
        """
        nearest = next(each for each in (self.path, *self.path.parents) if os.path.lexists(each))
        if not nearest.is_dir():
            raise ConfigError(f"output_dir is {self.path}, but {nearest} is no folder: choose another output_dir.")
        try:
            with tempfile.TemporaryFile(dir=nearest) as file:
                file.write(bytes(1 << 16))
                file.flush()
        except OSError as error:
            raise ConfigError(
                f"output_dir is {self.path}, but nothing can be written to {nearest} ({error.strerror}): choose another "
                "output_dir, or make room."
            ) from error
        for aside in self._asides(_MOVING):
            self._give_back(aside)
        names = [item.name for item in self._items()]
        if names and not (self.path / MARK).is_file():
            raise ConfigError(
                f"{self.path} holds {', '.join(names)}, which this library did not write, or an earlier version did (it has no "
                f"{MARK}): choose another output_dir, or move them elsewhere."
            )

    def open(self, start: Path | None, steps: int, make_loggers: Callable[[], list[Logger]]) -> list[Logger]:
        """Make the folder this run's: move aside what is not, and open the loggers.

        Args:
            start: the checkpoint that the run goes on from; ``None``: it starts anew.
            steps: those of ``start``; what the CSV logger wrote after them is dropped, for it is written again.
            make_loggers: if it fails, everything is put back.

        Returns:
            What ``make_loggers`` made.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        _write_mark(self.path, "run")
        self.checkpoints.clean()
        if not self.config.overwrite:
            for old in self._asides(_REPLACED):
                _write_mark(old, _KEPT)  # by a run that did not get far; nobody asks for its deletion any more
        aside = self._make_room(start)
        try:
            loggers = make_loggers()
        except BaseException:
            if aside is not None:
                if start is None:
                    _discard(self.path)
                self._give_back(aside)
            raise
        if start is not None:
            rewind_csv(self.path / "csv", steps)
        return loggers

    def settle(self) -> None:
        """The run has a whole checkpoint: delete what it replaced."""
        for aside in self._asides(_REPLACED):
            self._remove(aside)

    def _make_room(self, start: Path | None) -> Path | None:
        if start is not None and start.parent == self.checkpoints.directory:
            newer = [path for path in self.checkpoints.checkpoints() if path.name > start.name]
            return self._move(newer[::-1], _KEPT, f"{start} is gone on from, and is the newest now") if newer else None
        if not any(item for pattern in _WORK for item in self.path.glob(pattern)):
            _discard(self.path)
            aside = None
        else:
            state = _REPLACED if self.config.overwrite else _KEPT
            aside = self._move(self._items(), state, "a new run starts")
        if start is not None and self.config.save_checkpoints:
            self._adopt(start)
        return aside

    def _adopt(self, start: Path) -> None:
        """Copy another run's checkpoint, so that a resume of this one finds it."""
        name = f"checkpoint-{Checkpoint.manifest(start)['metadata']['iteration']:012d}"
        stage = self.checkpoints.directory / f".{name}.stage-copy"
        shutil.copytree(start, stage)
        stage.replace(self.checkpoints.directory / name)
        self.checkpoints.link()

    def _items(self) -> list[Path]:
        return [item for name in _NAMES for item in sorted(self.path.glob(name))]

    def _asides(self, state: str) -> list[Path]:
        return [path for path in sorted(self.path.glob("previous-*")) if _state(path) == state]

    def _move(self, items: Sequence[Path], state: str, why: str) -> Path:
        """Move ``items`` of the run to a new folder beside it; if they are not all of it, the metrics are copied there."""
        numbers = [int(path.name[9:]) for path in self.path.glob("previous-*") if path.name[9:].isdigit()]
        aside = self.path / f"previous-{max(numbers, default=0) + 1}"
        aside.mkdir()
        _write_mark(aside, _MOVING)
        csv = self.path / "csv"
        if csv.is_dir() and csv not in items:
            shutil.copytree(csv, aside / "csv")
        for item in items:
            place = aside / item.relative_to(self.path)
            place.parent.mkdir(exist_ok=True)
            item.rename(place)
        _write_mark(aside, state)
        self.checkpoints.link()
        rest = "deleted when this run has a whole checkpoint" if state == _REPLACED else "yours to delete"
        logger.warning("%s: %s moved to %s, %s", why, ", ".join(item.name for item in items), aside, rest)
        return aside

    def _give_back(self, aside: Path) -> None:
        """Move back what was moved; what the run has by itself was copied."""
        parts = [part for part in aside.iterdir() if part.name != MARK]
        for part in [*parts, *aside.glob("checkpoints/checkpoint-*")]:
            place = self.path / part.relative_to(aside)
            if part.exists() and not os.path.lexists(place):
                part.rename(place)
        self._remove(aside)
        self.checkpoints.link()

    def _remove(self, aside: Path) -> None:
        left = _discard(aside)
        if left:
            logger.warning("%s is kept: it holds %s, which may not be this library's", aside, ", ".join(left))
            _write_mark(aside, _KEPT)
        else:
            (aside / MARK).unlink()
            aside.rmdir()


def _write_mark(folder: Path, state: str) -> None:
    new = folder / f".{MARK}.new"
    new.write_text(json.dumps({"written_by": "torchrl_llm", "state": state}) + "\n")
    new.replace(folder / MARK)


def _state(folder: Path) -> str | None:
    try:
        return json.loads((folder / MARK).read_text())["state"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _discard(folder: Path) -> list[str]:
    """Delete the files of a run in ``folder``, and return the names of those left."""
    found = [file for pattern in _FILES for file in folder.glob(pattern) if file.is_file()]
    for file in [*found, *(link for name in _LINKS if (link := folder / name).is_symlink())]:
        file.unlink()
    for path in folder.glob("checkpoints/checkpoint-*"):
        if not path.is_symlink() and not foreign_files(path):
            shutil.rmtree(path)
    for item in (item for name in _NAMES for item in folder.glob(name)):
        _remove_empty([*item.rglob("*"), item])
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path != folder / MARK)


def _remove_empty(paths: Iterable[Path]) -> None:
    for path in sorted(paths, reverse=True):
        if path.is_dir() and not path.is_symlink() and not any(path.iterdir()):
            path.rmdir()
