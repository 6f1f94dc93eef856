"""How environments fail: :class:`EnvironmentFault` of an episode, the errors of an environment that
cannot be made, and how many episodes may fail, :class:`FaultCounter`."""

from __future__ import annotations

import logging
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchrl_llm.envs.tasks import TaskSpec
from torchrl_llm.keys import StopReason

logger = logging.getLogger(__name__)


class UnknownEnvironmentError(ValueError):
    """No environment has this id."""


class EnvironmentUnavailableError(RuntimeError):
    """An environment cannot be made: a package or data is missing, or it needs arguments.

    Attributes:
        env_id: its id.
        cause: the exception.
    """

    def __init__(self, env_id: str, needs: str, cause: BaseException) -> None:
        message = " ".join(str(cause).split())
        super().__init__(f"The environment {env_id!r} cannot be made. {needs} ({type(cause).__name__}: {message:.200})")
        self.env_id, self.needs, self.cause = env_id, needs, cause

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions are pickled by their message, which this constructor does not take.
        return type(self), (self.env_id, self.needs, self.cause)


class EnvironmentFault(RuntimeError):
    """An environment raised, or returned something that is not a step.

    Attributes:
        task_spec: the :class:`~torchrl_llm.envs.tasks.TaskSpec` of the episode.
        turn: 0-based turn that failed; -1 is the reset.
        cause: the exception.
    """

    def __init__(self, name: str, task_spec: TaskSpec, turn: int, cause: BaseException) -> None:
        where = "at its reset" if turn < 0 else f"in turn {turn}"
        super().__init__(
            f"The environment {name!r} failed {where} (episode {task_spec.episode_id}, group {task_spec.group_id}, task seed "
            f"{task_spec.seed}): {type(cause).__name__}: {str(cause).removesuffix('.')}{_place(cause)}. To see it again, reset it with that seed "
            "and replay the turns."
        )
        self.name, self.task_spec, self.turn, self.cause = name, task_spec, turn, cause

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions are pickled by their message, which this constructor does not take.
        return type(self), (self.name, self.task_spec, self.turn, self.cause)

    @property
    def batched_call(self) -> object | None:
        """The call in which episodes of other slots failed too; ``None``: this one failed alone."""
        return getattr(self.cause, "batched_call", None)

    @property
    def kind(self) -> tuple[str, ...]:
        """What faults that are alike have in common: the environment, the exception's class, and
        where or with what it was raised."""
        return self.name, type(self.cause).__name__, _place(self.cause) or str(self.cause)

    @property
    def reason(self) -> str:
        """``"error"``, ``"timeout"`` or ``"context"``, for counts."""
        return self.stop_reason.name.lower()

    @property
    def stop_reason(self) -> StopReason:
        """``TIMEOUT`` for a ``TimeoutError``, ``ERROR`` for everything else."""
        return StopReason.TIMEOUT if isinstance(self.cause, TimeoutError) else StopReason.ERROR


class PromptTooLongError(EnvironmentFault):
    """The first context of an episode leaves no room for a response."""

    @property
    def stop_reason(self) -> StopReason:
        """``CONTEXT``."""
        return StopReason.CONTEXT


@dataclass
class FaultCounter:
    """Counts failed episodes, and raises the first of them if there are too many.

    Attributes:
        max_faults: failed episodes tolerated since ``recent`` was cleared.
        scope: which these are, for the message.
        counts: all failed episodes, by :attr:`EnvironmentFault.reason`.
        recent: the faults since the last batch, or the last episode that ended well.
        alike: all faults that :meth:`warn` was told of, by :attr:`EnvironmentFault.kind`.
    """

    max_faults: int
    scope: str
    counts: Counter[str] = field(default_factory=Counter)
    recent: list[EnvironmentFault] = field(default_factory=list)
    alike: Counter[tuple[str, ...]] = field(default_factory=Counter)

    def record(self, fault: EnvironmentFault) -> None:
        """Count a failed episode.

        Raises:
            EnvironmentFault: the first of ``recent``, if there are more than ``max_faults``.
        """
        self.counts[fault.reason] += 1
        self.recent.append(fault)
        if (count := len(self.recent)) > self.max_faults:
            first, self.recent = self.recent[0], []
            first.add_note(f"It was the first of {count} failed episodes {self.scope}; max_faults={self.max_faults}.")
            raise first

    def warn(self, fault: EnvironmentFault, outcome: str) -> None:
        """Log a fault: of those that are alike the first, the tenth, the hundredth and so on,
        because a bug fails every episode.

        Args:
            fault: what failed. Its traceback is left out: where it ends the run, it is shown then.
            outcome: a sentence on what becomes of the episode.
        """
        self.alike[fault.kind] += 1
        count = self.alike[fault.kind]
        if count == 1:
            logger.warning("%s %s Of faults like it, only the 10th, the 100th and so on are shown.", fault, outcome)
        elif count == 10 ** (len(str(count)) - 1):
            logger.warning("%s %s It is the %dth fault like it.", fault, outcome, count)


def _place(error: BaseException) -> str:
    """Where an exception was first raised, for messages; nothing if that was in this package."""
    while error.__cause__ is not None:
        error = error.__cause__
    frames = traceback.extract_tb(error.__traceback__)
    if not frames or Path(frames[-1].filename).parent == Path(__file__).parent:
        return ""
    return f" ({frames[-1].filename}:{frames[-1].lineno})"
