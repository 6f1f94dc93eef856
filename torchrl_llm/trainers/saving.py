"""When and in which state a run is saved: :class:`RunSaver`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torchrl.checkpoint import GlobalRNGState

from torchrl_llm.trainers.base import TrainerBase
from torchrl_llm.trainers.schedule import is_due
from torchrl_llm.utils.interrupts import Interrupted


class RunSaver:
    """Saves a run when it is due, and at the last moment that it can resume from when an error or a
    signal ends it.

    Args:
        run: the trainer, whose ``checkpoints`` save it.
    """

    def __init__(self, run: TrainerBase) -> None:
        self.run = run
        self._rng: dict[str, Any] | None = None

    def save(self, metrics: Mapping[str, float], *, early: bool = False) -> None:
        """Save the run, if it has checkpoints, after an iteration with these metrics."""
        if self.run.checkpoints is not None:
            self.run.elapsed = self.run.seconds
            self.run.checkpoints.save(self.run, metrics, early=early)
            self.run.saved_iteration = self.run.iteration

    def save_if_due(self, metrics: Mapping[str, float]) -> None:
        """Save the run after its last iteration, after its best evaluation, and every
        ``checkpoint_interval`` iterations."""
        # Not ">": evaluate() has put this rate into best_success already.
        best = "evaluation/success" in metrics and metrics["evaluation/success"] >= self.run.best_success
        if self.run.stop_reason or best or is_due(self.run.config.checkpoint_interval, self.run.iteration):
            self.save(metrics)

    def save_if_new(self, *, early: bool = False) -> None:
        """Save the run unless its last iteration is saved."""
        if self.run.saved_iteration != self.run.iteration:
            self.save({}, early=early)

    @contextmanager
    def saved_if_it_fails(self, metrics: Mapping[str, float] | None = None) -> Iterator[None]:
        """Save the iteration if an evaluator, a logger or a callback inside raises.

        Args:
            metrics: of the iteration, if all processes have finished it: several save when it is
                due, because saving takes all of them. ``None``: the others may be anywhere, and
                several do not save.
        """
        try:
            yield
        # Not Interrupted, a SystemExit: saved_if_interrupted() saves the run then.
        except Exception:
            if self.run.distributed.saves_alone:
                self.save(metrics or {}, early=True)
            elif metrics is not None:
                self.save_if_due(metrics)
            raise

    @contextmanager
    def droppable(self) -> Iterator[None]:
        """For rollouts and evaluations, which change only the collector and the global generators:
        a signal drops them."""
        # A collector with a thread samples what was in flight again anyway, and asking for its
        # state pauses it.
        self.run.collector_state = None if self.run.rollouts.background else self.run.collector.state_dict()
        self._rng = GlobalRNGState().state_dict()
        yield
        # No finally: after a signal or an error they stay, for the save that follows.
        self.run.collector_state = self._rng = None

    @contextmanager
    def saved_if_interrupted(self) -> Iterator[None]:
        """For a whole run: a signal saves it as it was before the rollout or evaluation that the
        signal drops."""
        try:
            yield
        except Interrupted as interrupted:
            interrupted.state = f" after {self.run.iteration} iterations"
            if self._rng is not None:
                # Before the save, which writes the generators.
                GlobalRNGState().load_state_dict(self._rng)
            if self.run.checkpoints is None:
                interrupted.state += ", of which nothing is saved (save_checkpoints=False)"
                interrupted.resumable = False
            self.save_if_new(early=True)
            raise
