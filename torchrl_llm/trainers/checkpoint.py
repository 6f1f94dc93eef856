"""Checkpoints of a run: weights that PEFT and transformers load, and all else that an exact resume needs.

A checkpoint is a folder, a :class:`torchrl.checkpoint.Checkpoint` that TorchRL writes beside its place and then renames, so
that it is there whole or not at all::

    checkpoint-000000000040/
        actor/  critic/  reference/    weights, in the formats of PEFT or transformers (safetensors)
        tokenizer/
        components/                    optimizer, trainer, collector, global random generators: tensors and JSON
        manifest.json                  versions, settings, git revision, metrics
        sums.json                      the SHA-256 of every other file

Nothing in it is a pickle, and none is read. ``sums.json`` is written last; all files are checked against it before any is read.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import subprocess
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tensordict
import torch
from torchrl.checkpoint import (
    Checkpoint,
    CheckpointAdapter,
    CheckpointError,
    CheckpointRotation,
    GlobalRNGState,
    StateDictCheckpointAdapter,
)

from torchrl_llm.modules import ActorCritic
from torchrl_llm.trainers.distributed import Distributed
from torchrl_llm.trainers.fsdp import shard_like

if TYPE_CHECKING:
    from torchrl_llm.trainers.trainer import LLMTrainer

logger = logging.getLogger(__name__)

SUCCESS = "evaluation_success"
"""The metric, in a checkpoint's manifest, that the best one is chosen by."""

NOT_EVALUATED = -1.0
_SUMS = "sums.json"
_NAME = re.compile(r"checkpoint-(\d{12})")
"""How :class:`torchrl.checkpoint.CheckpointRotation` names a checkpoint: by its iteration."""
_PICKLES = {".pickle", ".pkl", ".pt", ".pth", ".bin", ".ckpt", ".joblib"}
_METADATA = {SUCCESS, "iteration", "steps", "config", "environment"}

LINKS = ("last", "best")
"""The links to checkpoints beside them. A copy of a run that follows links has folders of these names."""


class Weights(CheckpointAdapter):
    """Saves an :class:`~torchrl_llm.modules.ActorCritic` in the folder of the checkpoint itself, not below ``components``."""

    adapter_id = "torchrl_llm.weights"

    def __init__(self, tokenizer: Any = None, *, merged: bool = False) -> None:
        self.tokenizer, self.merged = tokenizer, merged

    def save(self, component: ActorCritic, path: Path, *, args: Any, kwargs: Any) -> None:
        """Write ``actor``, ``critic``, ``reference`` and ``tokenizer`` beside ``components``."""
        path.mkdir(parents=True)
        root = path.parents[1]
        component.save_pretrained(root)
        if self.merged:
            component.export_merged(root / "merged", self.tokenizer)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(root / "tokenizer")

    def load(self, component: ActorCritic, path: Path, **_: Any) -> None:
        """Read them into ``component``."""
        component.load_pretrained(path.parents[1])


class State(StateDictCheckpointAdapter):
    """Saves a ``state_dict`` as JSON and one archive of tensors, and reads nothing else.

    An archive, because it is written and not mapped: where a disk is full, writing to a mapped file ends the process (SIGBUS).
    """

    def __init__(self) -> None:
        super().__init__("archive")

    def load(self, component: Any, path: Path, **options: Any) -> None:
        """Read them into ``component``.

        Raises:
            CheckpointError: there are other files, which TorchRL would read instead.
            RuntimeError: the archive holds a pickle.
        """
        expected = {self.state_archive, self.schema_filename}
        found = {file.name for file in path.iterdir()}
        if found != expected:
            raise CheckpointError(f"{path} holds {sorted(found)}; expected {sorted(expected)}.")
        tensordict.load(path / self.state_archive, allow_pickle=False)  # TorchRL's own call allows them
        super().load(component, path, **options)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Optimizer:
    """The optimizer of all ranks as one component of a checkpoint, in the same format however its state is shared out.

    Args:
        optimizer: this rank's.
        distributed: all ranks; each calls :meth:`gather` before the first one saves, and loads.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, distributed: Distributed) -> None:
        self.optimizer, self.distributed = optimizer, distributed
        self._state: dict[str, Any] = {}

    def gather(self) -> None:
        """Bring the state together on the first rank."""
        self._state = self.distributed.full_state(self.optimizer.state_dict())

    def state_dict(self) -> dict[str, Any]:
        """What :meth:`gather` found."""
        return self._state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the state, or this rank's part of it."""
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        state = {
            index: {name: shard_like(parameters[int(index)], value) for name, value in values.items()}
            for index, values in state_dict["state"].items()
        }
        self.optimizer.load_state_dict(state_dict | {"state": state})


class Collectors:
    """The collectors of all ranks as one component of a checkpoint.

    Args:
        collector: this rank's.
        distributed: all ranks; each calls :meth:`gather` before the first one saves, and loads.
        state: what to save instead of the collector's state now; ``None``: that.
    """

    def __init__(self, collector: Any, distributed: Distributed, state: dict[str, Any] | None = None) -> None:
        self.collector, self.distributed, self.state = collector, distributed, state
        self._states: list[dict[str, Any]] = []

    def gather(self) -> None:
        """Bring the states together on the first rank."""
        self._states = self.distributed.all_gather([self.collector.state_dict() if self.state is None else self.state])

    def state_dict(self) -> dict[str, Any]:
        """What :meth:`gather` found, by rank."""
        return {str(rank): state for rank, state in enumerate(self._states)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the ticket that comes next on this rank; of another number of ranks, with one that none has dealt."""
        if len(state_dict) == self.distributed.world_size:
            state = state_dict[str(self.distributed.rank)]
        else:
            state = redealt(list(state_dict.values()), self.collector.state_dict())
        self.collector.load_state_dict(state)


def redealt(old: Sequence[Mapping[str, Any]], new: dict[str, Any]) -> dict[str, Any]:
    """The state of a fresh collector so that it goes on after others whose tickets were dealt to another number of workers.

    All new workers begin with the same round of groups, the first one that lies behind every group dealt: nothing is played
    twice, and a few groups may be left out.

    Args:
        old: states of all collectors of the earlier run.
        new: the state of one of this run.

    Returns:
        The new state, with the first ticket to deal and what the old ones have learnt.
    """
    own, first = _env_of(new), _env_of(old[0])
    workers = own["tickets"]["num_workers"]
    round_ = -(-max(_groups_dealt(_env_of(state)) for state in old) // workers)
    logger.warning(
        "%d processes go on with what %d began: from group %d, and not in the same bytes",
        workers, len(old), round_ * workers,
    )  # fmt: skip
    own["num_dealt"] = round_ * own["tickets"]["group_size"]
    own["tickets"]["success"] = first["tickets"]["success"]
    return new | {"iter": old[0]["iter"]}


def _groups_dealt(env: Mapping[str, Any]) -> int:
    """How many of all workers' groups come before the first one behind those that ``env`` has dealt."""
    tickets = env["tickets"]
    rounds = -(-env["num_dealt"] // tickets["group_size"])
    return max(0, tickets["worker"] + (rounds - 1) * tickets["num_workers"] + 1)


def _env_of(state: Mapping[str, Any]) -> Any:
    env = state["env_state_dict"]
    while "base" in env:  # of a transformed environment
        env = env["base"]
    return env


def verify(path: str | Path) -> dict[str, Any]:
    """Check that a checkpoint holds exactly what was saved: every file against its sum, and no file besides.

    Args:
        path: the checkpoint's folder, or a link to it.

    Returns:
        Its manifest.

    Raises:
        CheckpointError: a file is missing, cut short or changed, was not saved, or is a link or a pickle; the message names it.
    """
    path = Path(path)
    try:
        sums = _read_sums(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} is no whole checkpoint, or one of an earlier version of this library (its weights load with init_from): "
            f"{path / _SUMS} cannot be read: {error}"
        ) from error
    _check_files(path, sums)
    try:
        manifest = Checkpoint.manifest(path)
    except (CheckpointError, OSError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path / 'manifest.json'} is no manifest of a checkpoint: {error}") from error
    _check_metadata(path, manifest.get("metadata"))
    return manifest


def _read_sums(path: Path) -> dict[str, str]:
    sums = json.loads((path / _SUMS).read_text())
    if not isinstance(sums, dict):
        raise ValueError(f"{path / _SUMS} holds no sums.")
    return sums


def _write_sums(path: Path) -> None:
    sums = {name: _sha256(path / name) for name in _files(path) if name != _SUMS}
    (path / _SUMS).write_text(json.dumps(sums, indent=1))


def _files(path: Path) -> list[str]:
    """The files below ``path``, and the links, which are not followed."""
    found = [file for file in path.rglob("*") if file.is_symlink() or not file.is_dir()]
    return sorted(file.relative_to(path).as_posix() for file in found)


def foreign_files(path: Path) -> list[str]:
    """What a checkpoint's folder holds that was not saved with it; all that a folder holds that is no checkpoint."""
    try:
        saved = {_SUMS, *_read_sums(path)}
    except (OSError, ValueError):
        saved = set()
    return [name for name in _files(path) if name not in saved]


def is_checkpoint(path: Path) -> bool:
    """Whether ``path`` is a folder that holds a checkpoint, whole or damaged, and nothing that was not saved with it."""
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
        if _sha256(file) != expected:
            raise CheckpointError(f"{file} is not what was saved (its SHA-256 differs): the checkpoint is damaged.")


def _same_sums(first: Path, second: Path) -> bool:
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
    name = _NAME.fullmatch(path.resolve().name)
    if name and int(name[1]) != metadata["iteration"]:
        raise CheckpointError(f"{path} was saved at iteration {metadata['iteration']}: give the folder its name back.")


class _Rotation(CheckpointRotation):
    """TorchRL's, which deletes no files but those that were saved."""

    def _remove_atomically(self, path: Path) -> None:
        foreign = foreign_files(path)
        if foreign:
            logger.warning("%s is kept: it holds %s, which was not saved with it", path, ", ".join(foreign))
            return
        super()._remove_atomically(path)


class CheckpointStore:
    """The checkpoints of one run: saved in turn, the newest and the best kept, read back exactly.

    Args:
        directory: where they are; made on the first save.
        models: the weights; ``None``: nothing is saved or resumed.
        tokenizer: saved with them; ``None``: none.
        config: the run's settings as JSON-compatible values, written to the manifest and compared on resume.
        keep_last: how many of the newest are kept, >= 1. Two, so that there is one to go back to.
        on_save: called after each :meth:`save` but an early one, where the files are written.

    Examples:
        >>> store = CheckpointStore("runs/none/checkpoints", models=None)
        >>> store.latest() is None
        True
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        models: ActorCritic | None,
        tokenizer: Any = None,
        config: Mapping[str, Any] | None = None,
        keep_last: int = 2,
        on_save: Callable[[], None] | None = None,
    ) -> None:
        self.on_save = on_save
        self.models: Any = models
        self.tokenizer, self.config = tokenizer, dict(config or {})
        self.rotation = _Rotation(directory, keep_last=keep_last, keep_best=(SUCCESS, "max"))
        self.directory = self.rotation.directory

    def latest(self) -> Path | None:
        """The newest checkpoint, whole or damaged; ``None`` if there is none."""
        return next(reversed(self.checkpoints()), None)

    def checkpoints(self) -> list[Path]:
        """All of them, the oldest first. A folder ``last`` or ``best`` counts if no other has the checkpoint of its iteration.

        Raises:
            CheckpointError: a folder ``last`` or ``best`` is no copy of a checkpoint.
        """
        found = {self.own_place(copy): copy for copy in self._copies()}
        for path in self.directory.glob("checkpoint-*"):
            if _NAME.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
                found[path] = path
        return [found[place] for place in sorted(found)]

    def own_place(self, path: Path) -> Path:
        """Where the checkpoint in ``path`` belongs: ``path`` itself, or, for a folder ``last`` or ``best``, that of its iteration.

        Raises:
            CheckpointError: such a folder is no checkpoint, holds other files too, or is another than the one in its place.
        """
        if path not in self._copies():
            return path
        foreign = foreign_files(path)
        try:
            place = self.directory / f"checkpoint-{Checkpoint.manifest(path)['metadata']['iteration']:012d}"
        except (CheckpointError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            why = f"{type(error).__name__}: {error}"
        else:
            if foreign:
                why = f"it holds {', '.join(foreign[:3])} besides"
            elif os.path.lexists(place) and not _same_sums(path, place):
                why = f"it differs from {place}"
            else:
                return place
        raise CheckpointError(
            f"{path} is a folder in place of a link, and no copy of a checkpoint of this run ({why}): move it elsewhere."
        )

    def best(self) -> Path | None:
        """The one with the highest success rate in the evaluation of its iteration."""
        return self.rotation.best()

    def save(self, trainer: LLMTrainer, metrics: Mapping[str, float], *, early: bool = False) -> Path:
        """Save the run at the end of an iteration, and delete what is neither among the newest nor the best.

        Args:
            trainer: between two iterations, where no episode is in flight.
            metrics: those of the iteration.
            early: a signal or an error ends the run: ``on_save``, which may delete what the run replaces, is not called.

        Returns:
            The new checkpoint's folder. ``last`` and ``best`` beside it are links. Of several ranks the first one writes.
        """
        place = self.directory / f"checkpoint-{trainer.iteration:012d}"
        with self._gathered(trainer) as checkpoint:
            trainer.distributed.on_main(
                lambda: self._save(checkpoint, place, self._metadata(trainer, metrics), early=early)
            )
        return place

    def _save(self, checkpoint: Checkpoint, place: Path, metadata: dict[str, Any], *, early: bool) -> None:
        try:
            _write(checkpoint, place, metadata)
        except Exception as error:  # of Python, of safetensors or of tokenizers; all of them end the run
            last = self.latest()
            rest = f"{last} is whole: resume=true goes on from it." if last else "There is no earlier one."
            raise CheckpointError(f"{place} could not be saved ({type(error).__name__}: {error}). {rest}") from error
        self.rotation.prune()
        self.link()
        if self.on_save is not None and not early:
            self.on_save()

    def link(self) -> None:
        """Let ``last`` and ``best`` point to the newest and the best checkpoint; a link that has none is removed.

        A folder in place of a link is moved to the place of its checkpoint, and deleted only where that is whole already.

        Raises:
            CheckpointError: the folder is no copy of a checkpoint, or the checkpoint that it is a copy of is damaged.
        """
        for copy in self._copies():
            self._put_in_place(copy)
        best = self.best()
        if best is not None and Checkpoint.manifest(best)["metadata"][SUCCESS] == NOT_EVALUATED:
            best = None
        self._link("last", self.latest())
        self._link("best", best)

    def save_to(
        self, path: str | Path, trainer: LLMTrainer, *, lora_only: bool = True, save_optimizer: bool = True
    ) -> Path:
        """Save to a folder of the caller's choice; see :meth:`torchrl_llm.trainers.Run.save_checkpoint`."""
        path = Path(path)
        merged = not lora_only and self.models.adapter is not None
        if merged and trainer.distributed.sharded:
            raise CheckpointError(
                "lora_only=False merges a copy of the model, which is shared out (FSDP2): save adapters, and merge them in a run "
                "of one process."
            )
        trainer.distributed.on_main(lambda: _check_replaceable(path))
        names = None if save_optimizer else ["models"]
        with self._gathered(trainer, Weights(self.tokenizer, merged=merged)) as checkpoint:
            trainer.distributed.on_main(lambda: _write(checkpoint, path, self._metadata(trainer, {}), names))
        return path

    def resume(self, trainer: LLMTrainer, path: str | Path) -> dict[str, Any]:
        """Put ``trainer`` where it was when ``path`` was saved.

        Returns:
            The manifest.

        Raises:
            CheckpointError: the checkpoint is damaged; the message names the file, and a whole one if there is one. Or its
                manifest is not that of the rest.
        """
        manifest = self.verify(path)
        with trainer.distributed.full_state_on_cpu(read=True):
            self._checkpoint(trainer, _shared(trainer), Weights()).load(path)
        said, found = (
            {name: of[name] for name in ("iteration", "steps")} for of in (manifest["metadata"], vars(trainer))
        )
        if said != found:
            raise CheckpointError(f"{Path(path) / 'manifest.json'} says {said}, but what was saved is of {found}.")
        return manifest

    def verify(self, path: str | Path) -> dict[str, Any]:
        """:func:`verify`; the error offers the newest other checkpoint that is whole."""
        try:
            return verify(path)
        except CheckpointError as error:
            raise CheckpointError(f"{error} {self._offer(Path(path))}") from error

    def clean(self) -> None:
        """Put right what a crash in the middle of a save or of a deletion has left."""
        for old in list(self.directory.glob(".checkpoint-*.old-*")):
            if name := _NAME.search(old.name):
                _recover(self.directory / name[0])
        for pattern in (".checkpoint-*.stage-*", ".checkpoint-*.delete-*", ".last.link", ".best.link"):
            for leftover in self.directory.glob(pattern):
                shutil.rmtree(leftover) if leftover.is_dir() and not leftover.is_symlink() else leftover.unlink()
        if self._copies():
            self.link()

    def _copies(self) -> list[Path]:
        """The folders that a copy without links has put in place of ``last`` and ``best``."""
        found = (self.directory / name for name in LINKS)
        return [path for path in found if path.is_dir() and not path.is_symlink()]

    def _put_in_place(self, copy: Path) -> None:
        place = self.own_place(copy)
        if not os.path.lexists(place):
            copy.rename(place)
            return
        try:
            verify(place)
        except CheckpointError as error:
            raise CheckpointError(
                f"{error} {copy} is a copy of it, and may be whole: move {place} elsewhere, and the copy takes its place."
            ) from error
        # Renamed first: after a crash in the middle of the deletion, clean() deletes what has this name.
        shutil.rmtree(copy.replace(self.directory / f".{place.name}.delete-{uuid.uuid4().hex}"))

    def _metadata(self, trainer: LLMTrainer, metrics: Mapping[str, float]) -> dict[str, Any]:
        return {
            SUCCESS: float(metrics.get("evaluation/success", NOT_EVALUATED)),
            "iteration": trainer.iteration,
            "steps": trainer.steps,
            "config": self.config,
            "environment": environment(),
        }

    @contextmanager
    def _gathered(self, trainer: LLMTrainer, weights: Weights | None = None) -> Iterator[Checkpoint]:
        """What the first rank saves; all ranks bring theirs together."""
        shared = _shared(trainer)
        for part in shared.values():
            part.gather()
        with trainer.distributed.full_state_on_cpu():
            yield self._checkpoint(trainer, shared, weights or Weights(self.tokenizer))

    def _checkpoint(self, trainer: LLMTrainer, shared: Mapping[str, Any], weights: Weights) -> Checkpoint:
        states = {**shared, "rng": GlobalRNGState(), "trainer": trainer}
        if (scaler := trainer.accelerator.scaler) is not None:
            states["scaler"] = scaler
        return states_of(**states).register("models", self.models, adapter=weights)

    def _link(self, name: str, target: Path | None) -> None:
        if target is None:
            if (self.directory / name).is_symlink():
                (self.directory / name).unlink()
            return
        link = self.directory / f".{name}.link"
        link.unlink(missing_ok=True)
        link.symlink_to(target.name, target_is_directory=True)
        link.replace(self.directory / name)

    def _offer(self, damaged: Path) -> str:
        for path in reversed(self.checkpoints()):
            if path != damaged.resolve():
                try:
                    verify(path)
                except CheckpointError:
                    continue
                return f"{path} is whole: resume from it with resume_from={str(path)!r}."
        return "There is no other whole checkpoint."


def states_of(**components: Any) -> Checkpoint:
    """A checkpoint of what has a ``state_dict``, of which no pickle is read."""
    checkpoint = Checkpoint()
    for name, component in components.items():
        checkpoint.register(name, component, adapter=State())
    return checkpoint


def _write(checkpoint: Checkpoint, place: Path, metadata: dict[str, Any], names: Collection[str] | None = None) -> None:
    """Write a checkpoint beside its place, its sums last, and move it there: it is there whole or not at all."""
    _check_replaceable(place)
    stage = place.parent / f".{place.name}.stage-{uuid.uuid4().hex}"
    try:
        _write_sums(checkpoint.save(stage / place.name, components=names, metadata=metadata))
        old = place.parent / f".{place.name}.old-{uuid.uuid4().hex}"
        if place.exists():
            place.replace(old)
        (stage / place.name).replace(place)
        if old.exists():
            shutil.rmtree(old)
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def _check_replaceable(place: Path) -> None:
    """Refuse to write over anything but a checkpoint, or nothing."""
    _recover(place)
    folder = place.is_dir() and not place.is_symlink()
    foreign = foreign_files(place) if folder else [place.name] if os.path.lexists(place) else []
    if foreign:
        raise CheckpointError(
            f"{place} holds what this library did not save as a checkpoint ({', '.join(foreign[:3])}), and saving would "
            "delete it: choose another folder, or empty it."
        )


def _recover(place: Path) -> None:
    """Bring back, or delete, what a crash between the two steps of a replacement has left."""
    for old in place.parent.glob(f".{place.name}.old-*"):
        shutil.rmtree(old) if place.exists() else old.replace(place)


def _shared(trainer: LLMTrainer) -> dict[str, Any]:
    """The components that every rank has a part of."""
    distributed = trainer.distributed
    collectors = Collectors(trainer.collector, distributed, trainer.saver.collector_state)
    return {"collector": collectors, "optimizer": Optimizer(trainer.optimizer, distributed)}


def environment() -> dict[str, Any]:
    """Versions, threads and git revision: what must be the same for a run to go on in the same bytes."""
    packages = ("torch", "torchrl", "tensordict", "transformers", "peft", "accelerate", "torchrl_llm")
    versions = {}
    for name in packages:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return {"versions": versions, "threads": torch.get_num_threads(), "git_revision": _git_revision()}


def _git_revision() -> str | None:
    """The commit of this library, where it runs from its own repository (and not from one that it is installed in)."""
    here = Path(__file__)

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(here.parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", here.name)
        return git("rev-parse", "HEAD")
    except (OSError, subprocess.SubprocessError):
        return None


def config_changes(
    saved: Mapping[str, Any], present: Mapping[str, Any], *, ignore: Sequence[str] = ()
) -> dict[str, tuple[Any, Any]]:
    """The settings that differ: name -> (saved, present). A setting that only one of them has counts as ``None``.

    Examples:
        >>> config_changes({"seed": 1, "output_dir": "a"}, {"seed": 2, "output_dir": "b"}, ignore=["output_dir"])
        {'seed': (1, 2)}
    """
    names = [name for name in {**saved, **present} if name not in ignore]
    return {name: (saved.get(name), present.get(name)) for name in names if saved.get(name) != present.get(name)}


def rewind_csv(directory: str | Path, steps: int) -> None:
    """Drop the rows that TorchRL's ``CSVLogger`` wrote after ``steps``: the resumed run writes them again.

    Args:
        directory: the logger's folder; its ``scalars/**/*.csv`` have lines ``step,value``.
        steps: the last step to keep. A line that a crash has cut short is dropped too.
    """
    for path in sorted(Path(directory).glob("scalars/**/*.csv")):
        lines = path.read_text().splitlines(keepends=True)
        kept = [line for line in lines if line.endswith("\n") and int(line.partition(",")[0]) <= steps]
        if kept != lines:
            new = path.with_name(f".{path.name}.new")
            new.write_text("".join(kept))
            new.replace(path)
