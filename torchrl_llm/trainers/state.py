"""Where a run is, and what of it a checkpoint keeps: :class:`RunState`."""

from __future__ import annotations

import logging
import math
import time
from typing import Any

import torch

from torchrl_llm.envs import SeenTasks
from torchrl_llm.modules.policy import TurnPolicy
from torchrl_llm.trainers.protocols import RunStore

logger = logging.getLogger(__name__)

_SAVED = ("iteration", "steps", "episodes", "best_success", "history", "stop_reason", "elapsed")


class RunState:
    """The counters of a run, its clock and its random generator; weights, optimizer and collector are saved apart.

    Args:
        policy: its version is part of the state.
        seed: of the minibatch order.
        seen_tasks: what training has played.

    Attributes:
        iteration, steps, episodes: iterations, turns and episodes so far.
        best_success: the highest success rate of an evaluation.
        history: the metrics of every iteration.
        stop_reason: why the run ends; ``None`` while it runs.
        elapsed: seconds of training up to the last checkpoint.
        unfinished: the metrics of an iteration that is to be evaluated and logged, in a run that was interrupted there.
        checkpoints: where the run is saved; ``None``: nowhere.
        saved_iteration: the iteration of the last checkpoint; -1 before the first.
    """

    checkpoints: RunStore | None = None

    def __init__(self, policy: TurnPolicy, *, seed: int, seen_tasks: SeenTasks | None = None) -> None:
        self.policy = policy
        self.seen_tasks = SeenTasks() if seen_tasks is None else seen_tasks
        self.generator = torch.Generator().manual_seed(seed)
        self.iteration = self.steps = self.episodes = 0
        self.best_success = -math.inf
        self.history: list[dict[str, float]] = []
        self.stop_reason: str | None = None
        self.elapsed = 0.0
        self.unfinished: dict[str, float] | None = None
        self.saved_iteration = -1
        self.start_clock()

    def start_clock(self) -> None:
        """Count seconds from here on, after those of the last checkpoint."""
        self._started = time.monotonic() - self.elapsed

    @property
    def seconds(self) -> float:
        """Seconds of training, those before a resume included."""
        return time.monotonic() - self._started

    @property
    def logged_steps(self) -> int:
        """Turns up to the last iteration that was logged."""
        if self.unfinished is None:
            return self.steps
        return int(self.history[-1]["rollout/steps"]) if self.history else 0

    def state_dict(self) -> dict[str, Any]:
        """The state, to be taken between iterations."""
        return {name: getattr(self, name) for name in _SAVED} | {
            "generator": self.generator.get_state(),
            "unfinished": self.unfinished,
            "policy_version": self.policy.policy_version,
            "seen_tasks": torch.from_numpy(self.seen_tasks.tasks.copy()),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where :meth:`state_dict` was taken."""
        for name in _SAVED:
            setattr(self, name, state_dict[name])
        self.generator.set_state(state_dict["generator"])
        self.unfinished = state_dict.get("unfinished")
        self.policy.policy_version = state_dict["policy_version"]
        if "seen_tasks" in state_dict:
            self.seen_tasks.tasks = state_dict["seen_tasks"].numpy()
        else:
            logger.warning(
                "an older version saved this run: evaluation/task_overlap counts what is played from here on"
            )
        self.saved_iteration = self.iteration
