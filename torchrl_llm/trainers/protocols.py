"""What the training loop asks of its parts: :class:`WeightSync`, :class:`RunStore`, :class:`RunWatcher`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class WeightSync(Protocol):
    """Brings the new weights to a policy that has its own."""

    sleep_level: int
    """0: the engine keeps its memory while the trainer works; else it gives it up in :meth:`sleep`."""

    parameter_gather: Any
    """How to read weights that are sharded over processes; a trainer sets it."""

    @property
    def result(self) -> Any:
        """What the last sync found; ``None``: nothing that is logged."""

    def sleep(self) -> None:
        """Free the engine's memory until the next sync."""

    def send(self) -> Any:
        """Send the weights as they are."""


class RunStore(Protocol):
    """Saves a run, as :class:`~torchrl_llm.trainers.CheckpointStore` does."""

    def save(self, trainer: Any, metrics: Mapping[str, float], *, early: bool = False) -> Any:
        """Save it after an iteration with these metrics; ``early``: because an error or a signal ends it."""


class RunWatcher(Protocol):
    """Watches a run, as a :class:`~torchrl_llm.trainers.Callback` does."""

    def on_start(self, trainer: Any) -> None:
        """Before the first iteration."""

    def on_iteration(self, trainer: Any, metrics: dict[str, float]) -> None:
        """After each iteration."""

    def on_end(self, trainer: Any) -> None:
        """After the last iteration, also when the run failed."""
