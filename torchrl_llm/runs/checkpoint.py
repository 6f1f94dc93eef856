"""Checkpoints of a run: weights that PEFT and transformers load, and all else that an exact resume
needs.

A checkpoint is a folder, written beside its place and then renamed, so that it is there whole or
not at all::

    checkpoint-000000000040/
        actor/  critic/  reference/    weights, in the formats of PEFT or transformers (safetensors)
        tokenizer/
        components/                    optimizer, trainer, collector, global random generators:
                                       tensors and JSON
        manifest.json                  versions, settings, git revision, metrics
        sums.json                      the SHA-256 of every other file

Nothing in it is a pickle, and none is read. ``sums.json`` is written last; all files are checked
against it before any is read.
"""

from __future__ import annotations

import logging
import os
import shutil
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torchrl.checkpoint import Checkpoint, CheckpointError, CheckpointRotation, GlobalRNGState

from torchrl_llm.modules import ActorCritic
from torchrl_llm.runs import checkpoint_files as files
from torchrl_llm.runs.finite import check_finite, not_finite
from torchrl_llm.runs.identity import environment, git_revision
from torchrl_llm.runs.loss_state import LossState
from torchrl_llm.runs.states import Collectors, Optimizer, states_of
from torchrl_llm.trainers import LLMTrainer
from torchrl_llm.utils.options import ConfigError

logger = logging.getLogger(__name__)

NOT_EVALUATED = -1.0
"""The success rate, in a manifest, of an iteration without an evaluation."""

_OPTIONAL = {"scaler", "loss_state"}
"""Names of components that only some runs have: those in float16, and those whose loss or estimator
keeps something."""

_OWN = {"optimizer", "collector", "rng", "trainer"} | _OPTIONAL
"""Names of the components of runs."""

LINKS = ("last", "best")
"""The links to checkpoints beside them. A copy of a run that follows links has folders of these
names."""


class _Rotation(CheckpointRotation):
    """TorchRL's rotation, but it deletes only files that were saved."""

    # TorchRL 0.14 has no public method for what its prune() deletes with.
    def _remove_atomically(self, path: Path) -> None:
        foreign = files.foreign_files(path)
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
        config: the run's settings as JSON-compatible values, written to the manifest and compared
            on resume.
        keep_last: how many of the newest are kept, >= 1. Two, so that there is one to go back to.
        on_save: called after each :meth:`save` but an early one, where the files are written.
        python_parts: names (``identity.names_of_parts``) of what the run was given as objects,
            compared on resume. With ``env`` or ``make_env`` the settings' ``env_name`` is only a
            label.
        components: further parts of the run, by name, saved and loaded by their ``state_dict`` and
            ``load_state_dict`` (tensors, numbers, text; on several processes the state of the first
            one).
        loss_state: what loss and estimator keep; needed where ``models`` are, and a callback of the
            trainer too.

    Raises:
        ValueError: a component has the name of one of the run's own.
        ConfigError: ``models`` without ``loss_state``.

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
        python_parts: Mapping[str, str] = MappingProxyType({}),
        components: Mapping[str, Any] | None = None,
        optional: Collection[str] = (),
        loss_state: LossState | None = None,
    ) -> None:
        git_revision()  # read now, and remembered: the first save may come hours later
        self.components, self.optional = dict(components or {}), {*_OPTIONAL, *optional}
        if taken := sorted(self.components.keys() & _OWN):
            raise ValueError(f"A component is called {taken[0]!r}; every run has one of that name. Choose another.")
        if models is not None and loss_state is None:
            raise ConfigError(
                "CheckpointStore(models=...) saves what the loss keeps, too: give it loss_state=LossState(loss, distributed) "
                "(torchrl_llm.runs.loss_state), which is a callback of the trainer as well."
            )
        self.on_save, self.python_parts = on_save, dict(python_parts)
        self.models: Any = models
        self.loss_state: Any = loss_state
        self.tokenizer, self.config = tokenizer, dict(config or {})
        self.rotation = _Rotation(directory, keep_last=keep_last, keep_best=(files.SUCCESS, "max"))
        self.directory = self.rotation.directory

    @property
    def env_from_python(self) -> bool:
        """Whether the environment was given to the run as an object."""
        return not self.python_parts.keys().isdisjoint(("env", "make_env"))

    def latest(self) -> Path | None:
        """The newest checkpoint, whole or damaged; ``None`` if there is none."""
        return next(reversed(self.checkpoints()), None)

    def checkpoints(self) -> list[Path]:
        """All checkpoints, the oldest first. A folder ``last`` or ``best`` counts if no other has
        the checkpoint of its iteration.

        Raises:
            CheckpointError: a folder ``last`` or ``best`` is not a copy of a checkpoint.
        """
        found = {self.own_place(copy): copy for copy in self._copies()}
        for path in self.directory.glob("checkpoint-*"):
            if files.NAME.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
                found[path] = path
        return [found[place] for place in sorted(found)]

    def own_place(self, path: Path) -> Path:
        """The right place of the checkpoint in ``path``: ``path``, or, for a folder ``last`` or
        ``best``, the checkpoint of its iteration.

        Raises:
            CheckpointError: such a folder is not a checkpoint, holds other files too, or is another
                than the one in its place.
        """
        if path not in self._copies():
            return path
        foreign = files.foreign_files(path)
        try:
            place = self.directory / f"checkpoint-{Checkpoint.manifest(path)['metadata']['iteration']:012d}"
        except (CheckpointError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            why = f"{type(error).__name__}: {error}"
        else:
            if foreign:
                why = f"it holds {', '.join(foreign[:3])} besides"
            elif os.path.lexists(place) and not files.same_sums(path, place):
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
        """Save the run at the end of an iteration, and delete what is neither among the newest nor
        the best.

        Args:
            trainer: between two iterations, where no episode is in flight.
            metrics: of the iteration.
            early: a signal or an error ends the run: ``on_save``, which may delete what the run
                replaces, is not called.

        Returns:
            The new checkpoint's folder. ``last`` and ``best`` beside it are links. Of several ranks
            the first one writes.

        Raises:
            NonFiniteWeightsError: weights or optimizer are NaN or infinite; nothing is written or
                deleted.
            CheckpointError: the files could not be written.
        """
        place = self.directory / f"checkpoint-{trainer.iteration:012d}"
        with self._writing(trainer, metrics) as write:
            trainer.distributed.on_main(lambda: self._save(place, write, early=early))
        return place

    def _save(self, place: Path, write: Callable[[Path], None], *, early: bool) -> None:
        try:
            files.publish(place, write)
        # of Python, of safetensors or of tokenizers; all of them end the run
        except Exception as error:
            last = self.latest()
            rest = f"{last} is whole: resume=true continues it." if last else "There is no earlier one."
            raise CheckpointError(f"{place} could not be saved ({type(error).__name__}: {error}). {rest}") from error
        # Not before: until the new one is whole, the old ones are what a resume has.
        self.rotation.prune()
        self.link()
        if self.on_save is not None and not early:
            self.on_save()

    def link(self) -> None:
        """Let ``last`` and ``best`` point to the newest and the best checkpoint; a link that has
        none is removed.

        A folder in place of a link is moved to the place of its checkpoint, and deleted only where
        that is whole already.

        Raises:
            CheckpointError: the folder is not a copy of a checkpoint, or the checkpoint that it is
                a copy of is damaged.
        """
        for copy in self._copies():
            self._put_in_place(copy)
        best = self.best()
        if best is not None and Checkpoint.manifest(best)["metadata"][files.SUCCESS] == NOT_EVALUATED:
            best = None
        self._link("last", self.latest())
        self._link("best", best)

    def save_to(
        self, path: str | Path, trainer: LLMTrainer, *, lora_only: bool = True, save_optimizer: bool = True
    ) -> Path:
        """Save to a folder of the caller's choice; see
        :meth:`torchrl_llm.runs.Run.save_checkpoint`."""
        path = Path(path)
        merged = not lora_only and self.models.adapter is not None
        if merged and trainer.distributed.sharded:
            raise CheckpointError(
                "lora_only=False merges a copy of the model, which is sharded (FSDP2): save adapters, and merge them in a run "
                "of one process."
            )
        trainer.distributed.on_main(lambda: files.check_replaceable(path))
        with self._writing(trainer, {}, components=None if save_optimizer else (), merged=merged) as write:
            trainer.distributed.on_main(lambda: files.publish(path, write))
        return path

    @contextmanager
    def _writing(
        self,
        trainer: LLMTrainer,
        metrics: Mapping[str, float],
        *,
        components: Collection[str] | None = None,
        merged: bool = False,
    ) -> Iterator[Callable[[Path], None]]:
        """Gather states and weights of all ranks; inside, the function that is yielded writes them
        to a new folder on the first rank.

        Args:
            trainer: between two iterations.
            metrics: for the manifest.
            components: names of the states to write; ``None`` writes all.
            merged: add the actor as one whole model.
        """
        check_finite(trainer)
        shared = self._shared(trainer)
        # On all ranks, before the first one writes alone: a collective within its save would wait
        # for ever.
        for part in shared.values():
            part.gather()
        metadata = {
            files.SUCCESS: float(metrics.get("evaluation/success", NOT_EVALUATED)),
            "iteration": trainer.iteration,
            "steps": trainer.steps,
            "config": self.config,
            "env_from_python": self.env_from_python,
            "python_parts": self.python_parts,
            "environment": environment(),
        }

        def write(root: Path) -> None:
            # The weights lie beside TorchRL's files, where PEFT and transformers look.
            states = self._states(trainer, shared)
            if not shared["loss_state"].state_dict():
                del states["loss_state"]
            states_of(**states).save(root, components=components, metadata=metadata)
            self.models.save_pretrained(root)
            if merged:
                self.models.export_merged(root / "merged", self.tokenizer)
            if self.tokenizer is not None:
                self.tokenizer.save_pretrained(root / "tokenizer")

        with trainer.distributed.full_state_on_cpu():
            yield write

    def resume(self, trainer: LLMTrainer, path: str | Path, manifest: dict[str, Any] | None = None) -> dict[str, Any]:
        """Put ``trainer`` where it was when ``path`` was saved.

        Args:
            trainer: a new one, with the parts that were saved.
            path: the checkpoint's folder.
            manifest: what :meth:`verify` returned for it; ``None``: the first rank verifies it
                here.

        Returns:
            The manifest.

        Raises:
            CheckpointError: the checkpoint is damaged; the message names the file, and a whole one
                if there is one. Or its manifest does not belong to the rest.
        """
        if manifest is None:
            # On one rank: the sums take a pass over all files, which all ranks share.
            manifest = trainer.distributed.on_main(lambda: self.verify(path))
        with trainer.distributed.full_state_on_cpu(read=True):
            try:
                self.models.load_pretrained(path)
            except Exception as error:
                raise CheckpointError(f"The weights of {path} cannot be loaded: {error}") from error
            # After the weights: reading those may draw random numbers, and the generators must be
            # as they were saved.
            self._load_states(trainer, path, manifest["components"])
        said = {name: manifest["metadata"][name] for name in ("iteration", "steps")}
        found = {"iteration": trainer.iteration, "steps": trainer.steps}
        if said != found:
            raise CheckpointError(f"{Path(path) / 'manifest.json'} says {said}, but what was saved is of {found}.")
        if wrong := not_finite(trainer):  # versions up to 0.2.0 saved such a run
            raise CheckpointError(
                f"{path} holds {' and '.join(wrong)} that are NaN or infinite. {self._offer(Path(path))}"
            )
        return manifest

    def _shared(self, trainer: LLMTrainer) -> dict[str, Any]:
        """The components of a checkpoint that every rank holds a part of."""
        distributed = trainer.distributed
        collectors = Collectors(trainer.collector, distributed, trainer.collector_state)
        optimizer = Optimizer(trainer.optimizer, distributed)
        return {"collector": collectors, "optimizer": optimizer, "loss_state": self.loss_state}

    def _states(self, trainer: LLMTrainer, shared: Mapping[str, Any]) -> dict[str, Any]:
        states = {**self.components, **shared, "rng": GlobalRNGState(), "trainer": trainer}
        if (scaler := trainer.accelerator.scaler) is not None:
            states["scaler"] = scaler
        return states

    def _load_states(self, trainer: LLMTrainer, path: str | Path, saved: Collection[str]) -> None:
        """Load all components; optional ones only where the checkpoint has them."""
        states = self._states(trainer, self._shared(trainer))
        new = {name for name in self.optional if name in states and name not in saved}
        if added := sorted(new - _OPTIONAL):
            logger.warning("%s has no state of %s: it begins as new", path, ", ".join(added))
        states_of(**{name: state for name, state in states.items() if name not in new}).load(path)
        if "loss_state" not in saved:  # of a loss without any, or of an earlier version
            self.loss_state.load_state_dict({})

    def verify(self, path: str | Path) -> dict[str, Any]:
        """:func:`verify`; the error offers the newest other checkpoint that is whole."""
        try:
            return files.verify(path)
        except CheckpointError as error:
            raise CheckpointError(f"{error} {self._offer(Path(path))}") from error

    def clean(self) -> None:
        """Repair what a crash in the middle of a save or of a deletion has left."""
        for old in list(self.directory.glob(".checkpoint-*.old-*")):
            if name := files.NAME.search(old.name):
                files.recover(self.directory / name[0])
        # Stages are of saves; TorchRL's rotation renames a checkpoint to .delete- before it deletes
        # it.
        for pattern in (".checkpoint-*.stage-*", ".checkpoint-*.delete-*", ".last.link", ".best.link"):
            for leftover in self.directory.glob(pattern):
                shutil.rmtree(leftover) if leftover.is_dir() and not leftover.is_symlink() else leftover.unlink()
        if self._copies():
            self.link()

    def _copies(self) -> list[Path]:
        """The folders that a copy which follows links has in place of ``last`` and ``best``."""
        found = (self.directory / name for name in LINKS)
        return [path for path in found if path.is_dir() and not path.is_symlink()]

    def _put_in_place(self, copy: Path) -> None:
        place = self.own_place(copy)
        if not os.path.lexists(place):
            copy.rename(place)
            return
        try:
            files.verify(place)
        except CheckpointError as error:
            raise CheckpointError(
                f"{error} {copy} is a copy of it, and may be whole: move {place} elsewhere, and the copy takes its place."
            ) from error
        # Renamed first: after a crash in the middle of the deletion, clean() deletes what has this
        # name.
        shutil.rmtree(copy.replace(self.directory / f".{place.name}.delete-{uuid.uuid4().hex}"))

    def _link(self, name: str, target: Path | None) -> None:
        if target is None:
            if (self.directory / name).is_symlink():
                (self.directory / name).unlink()
            return
        link = self.directory / f".{name}.link"
        # Made beside its place and renamed, so that there is a link at every moment. Its target is
        # relative, as the folder may be moved.
        link.unlink(missing_ok=True)
        link.symlink_to(target.name, target_is_directory=True)
        link.replace(self.directory / name)

    def _offer(self, damaged: Path) -> str:
        for path in reversed(self.checkpoints()):
            if path != damaged.resolve():
                with suppress(CheckpointError):
                    files.verify(path)
                    return f"{path} is whole: resume from it with resume_from={str(path)!r}."
        return "There is no other whole checkpoint."
