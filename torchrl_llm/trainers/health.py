"""Warnings in the log where a run goes wrong: :class:`HealthWatch`."""

from __future__ import annotations

import logging
from typing import Any

from torchrl_llm.record.health import HealthRules
from torchrl_llm.trainers.callbacks import Callback
from torchrl_llm.trainers.schedule import endless_warm_up

logger = logging.getLogger(__name__)


class HealthWatch(Callback):
    """Warns in the log, once of each kind, of what precedes a collapse, of the collapse itself, and of a warm-up that the run is too short for.

    A warning says what to change; the section "My run collapsed" of the documentation says more. Nothing is changed here.

    Args:
        teacher: the reference of the KL is a teacher, which may be far away. Default ``False``.
    """

    def __init__(self, *, teacher: bool = False) -> None:
        self.teacher = teacher
        self._rules = HealthRules(teacher=teacher)

    def on_start(self, trainer: Any) -> None:
        """Take note of the iterations before: a resumed run falls from its best, and has been warned of what it was warned of."""
        self._rules = HealthRules(teacher=self.teacher)
        for metrics in trainer.history:
            self._rules.problems(metrics)

    def on_iteration(self, trainer: Any, metrics: dict[str, float]) -> None:
        problems = self._rules.problems(metrics)
        if trainer.iteration == 1:  # later it is no use to start again
            wrong = endless_warm_up(trainer.config, trainer.steps)
            problems += [wrong] if wrong else []
        for problem in problems:
            logger.warning("iteration %d: %s", trainer.iteration, problem)
