"""The folder of a run: :class:`RunFolder` marks and locks ``output_dir``, and moves an earlier run
there aside::

    runs/multiturn/
        torchrl_llm.json            the mark
        torchrl_llm.lock            locked while a process runs here
        config.yaml                 its settings, for --config
        checkpoints/  metrics.csv  ...    the run
        previous-1/                 an earlier run, or an abandoned branch; with a mark of its own

Other files stay where they are. Of a run that was moved aside, only files of this library are ever
deleted, and only if ``overwrite`` replaced it and the new run has a whole checkpoint.

``checkpoints/`` may be a link to a folder elsewhere. The link stays, and checkpoints that are moved
aside stay on their disk, in ``previous-1/`` of that folder, which ``previous-1/checkpoints`` links
to. That folder is locked too, because another run may link to it.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from torchrl.checkpoint import Checkpoint
from torchrl.record.loggers import Logger

from torchrl_llm.runs.checkpoint import LINKS, CheckpointStore
from torchrl_llm.runs.checkpoint_files import is_checkpoint
from torchrl_llm.runs.config import RunSettings
from torchrl_llm.runs.folder_lock import LOCK, FolderLock
from torchrl_llm.runs.table import FILE as METRICS
from torchrl_llm.utils.files import write_text
from torchrl_llm.utils.options import ConfigError

logger = logging.getLogger(__name__)

MARK = "torchrl_llm.json"
"""The file that tells a run's folder from any other."""

_TRACKERS = ("tensorboard", "wandb", "wandb_id", "trackio_id")
_REPORT = (
    *("merged", "result.json", "evaluation_before.json", "evaluation_after.json", "report.html", "episodes.md"),
    # of versions to 0.2.1
    *("learning_curve.png", "conversations_before.md", "conversations_after.md"),
)
_NAMES = ("config.yaml", "checkpoints", "csv", METRICS, "run.json", "rollouts", *_TRACKERS, *_REPORT)
"""The files and folders that a run writes; versions to 0.2.1 wrote ``csv`` too, and pages in
``rollouts``."""

_WORK = (METRICS, "csv/scalars/**/*.csv", "rollouts/*.safetensors", *_REPORT)
"""Those that a run has only if it got results; checkpoints are the others."""

_TOKENIZER = ("tokenizer", "tokenizer_config", "special_tokens_map")
_MERGED = ("config", "generation_config", "model.safetensors.index", *_TOKENIZER)
_FILES = (
    *("csv/scalars/*/*.csv", "csv/texts/hparams[0-9]*.txt", "tensorboard/**/events.out.tfevents.*", *_TRACKERS[2:]),
    *("config.yaml", "run.json", METRICS, *(f"merged/{name}.json" for name in _MERGED), *_REPORT),
    *("rollouts/*.safetensors", "rollouts/*.md", "rollouts/.*.safetensors*.new", "rollouts/.*.md*.new"),
    # of writers that were killed
    *(f".{name}.*new" for name in (MARK, "config.yaml", "run.json", METRICS, *_REPORT)),
    *("merged/model*.safetensors", "merged/chat_template.jinja", "merged/run_config.yaml"),
)
"""The files in these folders, without the files of checkpoints, which list theirs. Other files
stay, W&B's own among them."""

_MOVING, _REPLACED, _KEPT = "moving", "replaced", "kept"
"""States of a folder beside the run: put back after a crash; deleted when the new run is saved;
kept."""


class RunFolder:
    """The folder of one run.

    Args:
        config: ``output_dir`` is the folder. Nothing is made or changed before :meth:`open`.
    """

    def __init__(self, config: RunSettings) -> None:
        self.config, self.path = config, config.output.output_dir.absolute()
        self.checkpoints = CheckpointStore(self.path / "checkpoints", models=None)
        self._locks: list[FolderLock] = []

    def check(self) -> None:
        """Refuse a folder that another process uses, that cannot be written to, or that holds files
        of others.

        A move that a crash has interrupted is undone.

        Raises:
            ConfigError: the message says what is there, and what to do.
        """
        nearest = next(each for each in (self.path, *self.path.parents) if os.path.lexists(each))
        if not nearest.is_dir():
            raise ConfigError(f"output_dir is {self.path}, but {nearest} is not a folder: choose another output_dir.")
        self._check_writable(nearest)
        link = self.checkpoints.directory
        if link.is_symlink() and not link.is_dir():
            raise ConfigError(
                f"{link} links to {os.readlink(link)}, which is not a folder: make it, or remove the link."
            )
        if link.is_symlink():
            self._check_writable(link)
        asides = self._asides(_MOVING)
        with self._locked_for_a_look(self.path if asides else None):
            for aside in asides:
                self._put_back(aside)
        names = [item.name for item in self._items() if not (item.is_symlink() and item == link and not self._saved())]
        if names and not (self.path / MARK).is_file():
            raise ConfigError(
                f"{self.path} holds {', '.join(names)}, which this library did not write, or an earlier version did (it has no "
                f"{MARK}): choose another output_dir (resume_from takes a checkpoint from anywhere), or move them elsewhere."
            )

    @property
    def _places(self) -> list[Path]:
        """What belongs to one run at a time: the folder, and the folder of the checkpoints where
        another one may link to it too.

        Checkpoints in the folder of another run, which need not be a link there, belong to that
        run.
        """
        link = self.checkpoints.directory
        if not link.is_symlink():
            return [self.path]
        saved = link.resolve()
        is_a_runs = saved.name == link.name and (saved.parent / MARK).is_file()
        return [self.path, saved, *([saved.parent] if is_a_runs else [])]

    @contextmanager
    def _locked_for_a_look(self, changed: Path | None) -> Iterator[None]:
        """Inside, the places that a run has locked before are locked, and the one that is
        changed."""
        with ExitStack() as locks:
            places = [] if self._owner() is not None else self._places
            with suppress(OSError):  # no locks here: open() warns
                for place in places:
                    if place == changed or os.path.lexists(place / LOCK):
                        locks.callback(FolderLock(place).release)
            yield

    def _check_writable(self, place: Path) -> None:
        try:
            with tempfile.TemporaryFile(dir=place) as file:
                file.write(bytes(1 << 16))
                file.flush()
        except OSError as error:
            raise ConfigError(
                f"output_dir is {self.path}, but nothing can be written to {place} ({error.strerror}): choose another "
                "output_dir, or make room."
            ) from error

    def open(self, start: Path | None, make_loggers: Callable[[], list[Logger]]) -> list[Logger]:
        """Take the folder for this run: lock it, move an earlier run aside, and open the loggers.

        The lock lasts until :meth:`close`, until this object is deleted, or until the process ends,
        however it ends.

        Args:
            start: the checkpoint that the run continues; ``None``: it starts from the beginning.
            make_loggers: if it fails, everything is put back.

        Raises:
            ConfigError: another process has locked the folder.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        self.lock()
        with ExitStack() as undo:
            undo.callback(self.close)
            _write_mark(self.path, "run")
            if start is not None:
                start = self.checkpoints.own_place(start)  # clean() moves it there
            self.checkpoints.clean()
            if not self.config.output.overwrite:
                for old in self._asides(_REPLACED):
                    # by a run that did not get far; overwrite is not asked for any more
                    _write_mark(old, _KEPT)
            aside = self._make_room(start)
            if aside is not None:
                undo.callback(self._put_back, aside)
                if start is None:
                    undo.callback(self._discard, self.path)
            loggers = make_loggers()
            undo.pop_all()
        return loggers

    def lock(self) -> None:
        """Lock the folder among processes, or raise ConfigError if another one has it; a second
        call does nothing.

        A run takes the lock over from an earlier run of its process, which has usually ended, but
        may not be deleted yet.
        """
        owner = self._owner()
        if owner is not None and not all(lock.in_place() for lock in owner._locks):
            owner.close()  # the folder was deleted and made again
            owner = None
        if owner is None:
            self._locks = self._new_locks()
        elif owner is not self:
            self._locks, owner._locks = owner._locks, []
        _OPEN[self.path.resolve()] = self

    def _new_locks(self) -> list[FolderLock]:
        locks = []
        with ExitStack() as taken:  # the first is released if the second cannot be had
            for place in self._places:
                try:
                    lock = FolderLock(place)
                except OSError as error:
                    logger.warning(
                        "%s cannot be locked (%s): a second run with the same output_dir would go unnoticed, and overwrite files",
                        place, error.strerror,
                    )  # fmt: skip
                    continue
                taken.callback(lock.release)
                lock.sign()
                locks.append(lock)
            taken.pop_all()
        return locks

    def close(self) -> None:
        """Release the lock, so that another process can take the folder. A second call does
        nothing."""
        if self._owner() is self:
            del _OPEN[self.path.resolve()]
        for lock in self._locks:
            lock.release()
        self._locks = []

    def _owner(self) -> RunFolder | None:
        """The run of this process that has the folder."""
        return _OPEN.get(self.path.resolve())

    def settle(self) -> None:
        """Delete the run that this one has replaced, now that this one has a whole checkpoint.

        Raises:
            ConfigError: a later run of this process has taken the folder.
        """
        if self._owner() not in (None, self):
            raise ConfigError(
                f"{self.path} is in use by a later run of this process, which began before this one was over: give each run "
                "an output_dir of its own."
            )
        for aside in self._asides(_REPLACED):
            self._remove(aside)

    def _make_room(self, start: Path | None) -> Path | None:
        if start is not None and start.parent == self.checkpoints.directory:
            newer = [path for path in self.checkpoints.checkpoints() if path.name > start.name]
            return self._move(newer[::-1], _KEPT, f"{start} is continued, and is the newest now") if newer else None
        aside = None
        if self.checkpoints.checkpoints() or any(item for pattern in _WORK for item in self.path.glob(pattern)):
            aside = self._move(self._items(), _REPLACED if self.config.output.overwrite else _KEPT, "a new run starts")
        else:
            self._discard(self.path)
        if start is not None and self.config.output.save_checkpoints:
            self._adopt(start)
        return aside

    def _adopt(self, start: Path) -> None:
        """Copy the checkpoint of another run, so that a resume of this run finds it."""
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
        """Move ``items`` of the run to a new folder beside it; if they are not all of it, metrics
        and recordings are copied there."""
        found = [path for folder in (self.path, self.checkpoints.directory) for path in folder.glob("previous-*")]
        numbers = [int(path.name[9:]) for path in found if path.name[9:].isdigit()]
        aside = self.path / f"previous-{max(numbers, default=0) + 1}"
        aside.mkdir()
        _write_mark(aside, _MOVING)
        for own in (self.path / name for name in ("csv", METRICS, "rollouts")):
            if own.exists() and own not in items:
                (shutil.copytree if own.is_dir() else shutil.copy2)(own, aside / own.name)
        for item in self._beside(aside, items):
            place = aside / item.relative_to(self.path)
            place.parent.mkdir(exist_ok=True)
            item.rename(place)
        _write_mark(aside, state)
        self.checkpoints.link()
        rest = "deleted when this run has a whole checkpoint" if state == _REPLACED else "yours to delete"
        logger.warning("%s: %s moved to %s, %s", why, ", ".join(item.name for item in items), aside, rest)
        return aside

    def _beside(self, aside: Path, items: Sequence[Path]) -> list[Path]:
        """The items that are renamed to move ``items`` to ``aside``: of ``checkpoints``, if that is
        a link, the run's own.

        A link that is moved would point elsewhere, if it is relative, and the new run would save
        here instead of behind it.
        """
        link = self.checkpoints.directory
        if not link.is_symlink():
            return list(items)
        items = [each for item in items for each in (self._saved() if item == link else [item])]
        if any(item.parent == link for item in items):
            (link / aside.name).mkdir()
            (aside / link.name).symlink_to(Path("..", os.readlink(link), aside.name), target_is_directory=True)
        return items

    def _saved(self) -> list[Path]:
        """The entries of ``checkpoints/`` that a run has written."""
        links = [path for name in LINKS if (path := self.checkpoints.directory / name).is_symlink()]
        return [*self.checkpoints.checkpoints(), *links]

    def _put_back(self, aside: Path) -> None:
        """Move items back; those that the run still has were copied."""
        parts = [part for part in aside.iterdir() if part.name != MARK]
        for part in [*parts, *aside.glob("checkpoints/checkpoint-*")]:
            place = self.path / part.relative_to(aside)
            if part.exists() and not os.path.lexists(place):
                part.rename(place)
        self._remove(aside)
        self.checkpoints.link()

    def _remove(self, aside: Path) -> None:
        left = self._discard(aside)
        if left:
            logger.warning("%s is kept: it holds %s, which may not be this library's", aside, ", ".join(left))
            _write_mark(aside, _KEPT)
        else:
            (aside / LOCK).unlink(missing_ok=True)
            (aside / MARK).unlink()
            aside.rmdir()

    def _discard(self, folder: Path) -> list[str]:
        """Delete the files of a run in ``folder``, this one or one aside, and return the names of
        those left.

        Behind a link only checkpoints are deleted, and only where this run's link, or the link of
        :meth:`_beside`, points to.
        """
        for file in [file for pattern in _FILES for file in folder.glob(pattern) if file.is_file()]:
            file.unlink()
        checkpoints, own = folder / "checkpoints", self.checkpoints.directory
        beside = own / folder.name
        is_beside = checkpoints.is_symlink() and checkpoints.resolve() == beside.resolve()
        if is_beside or checkpoints == own or not checkpoints.is_symlink():
            for path in [*checkpoints.glob("checkpoint-*"), *(checkpoints / name for name in LINKS)]:
                if is_checkpoint(path):
                    shutil.rmtree(path)
                elif path.is_symlink() and path.name in LINKS:
                    path.unlink()
        for item in (item for name in _NAMES for item in folder.glob(name)):
            if not item.is_symlink():  # folders behind a link may be anyone's
                _remove_empty([*item.rglob("*"), item])
        if is_beside and not any(beside.glob("*")):
            checkpoints.unlink()
            if beside.is_dir():
                beside.rmdir()
        ours = (folder / MARK, folder / LOCK)
        return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path not in ours)


_OPEN: weakref.WeakValueDictionary[Path, RunFolder] = weakref.WeakValueDictionary()
"""The runs of this process, by folder."""


def _forget_all() -> None:
    """In a forked process: the folders are the parent's."""
    for folder in list(_OPEN.values()):
        folder._locks = []
    _OPEN.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)


def _write_mark(folder: Path, state: str) -> None:
    write_text(folder / MARK, json.dumps({"written_by": "torchrl_llm", "state": state}) + "\n")


def _state(folder: Path) -> str | None:
    try:
        return json.loads((folder / MARK).read_text())["state"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _remove_empty(paths: Iterable[Path]) -> None:
    for path in sorted(paths, reverse=True):
        if path.is_dir() and not path.is_symlink() and not any(path.iterdir()):
            path.rmdir()
