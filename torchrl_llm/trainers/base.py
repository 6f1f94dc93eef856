"""What a trainer is made of and where its run is: :class:`TrainerBase`, which the helpers of the loop work on."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from torchrl.collectors import BaseCollector
from torchrl.data import ReplayBuffer
from torchrl.record.loggers import Logger

from torchrl_llm.envs import SeenTasks
from torchrl_llm.modules import TokenScorer
from torchrl_llm.modules.policy import TurnPolicy
from torchrl_llm.objectives import TurnPolicyLoss
from torchrl_llm.record import Timer
from torchrl_llm.trainers.checks import check_options, check_parameters
from torchrl_llm.trainers.collector_view import CollectorView
from torchrl_llm.trainers.config import TrainerConfig
from torchrl_llm.trainers.distributed import Distributed
from torchrl_llm.trainers.precision import warn_of_half_weights
from torchrl_llm.trainers.protocols import RunStore, RunWatcher, WeightSync
from torchrl_llm.trainers.schedule import LearningRateSchedule

logger = logging.getLogger(__name__)

Evaluator = Callable[[], Mapping[str, Any]]
"""Plays held-out episodes and returns metrics, of any names but those of training; ``evaluation/success`` decides what is best."""

_ARGUMENTS = ("accelerator", "collector", "config", "optimizer", "policy", "reference", "replay_buffer", "weight_sync")
_FIXED = {name: f"LLMTrainer({name}=...)" for name in _ARGUMENTS} | {
    "distributed": "it is that of LLMTrainer(accelerator=...)",
    "loss": "build_run(config, make_loss=...), or LLMTrainer(loss=...)",
    "module": "it wraps the loss of LLMTrainer(loss=...)",
}
"""Read-only attribute -> how to give the trainer another one."""

_SAVED = ("iteration", "steps", "episodes", "best_success", "history", "stop_reason", "elapsed")


class TrainerBase:
    """Parts, counters, clock and random generator of a run. The arguments are those of :class:`~torchrl_llm.trainers.LLMTrainer`.

    Attributes:
        iteration, steps, episodes: iterations, turns and episodes so far.
        best_success: the highest success rate of an evaluation.
        history: the metrics of every iteration.
        stop_reason: why the run ends; ``None`` while it runs.
        elapsed: seconds of training up to the last checkpoint.
        unfinished: the metrics of an iteration that is to be evaluated and logged, in a run that was interrupted there.
        saved_iteration: the iteration of the last checkpoint; -1 before the first.
        module: computes the loss on all ranks.
        distributed: the training processes.
    """

    module: torch.nn.Module
    optimizer: torch.optim.Optimizer

    def __init__(
        self,
        *,
        collector: BaseCollector,
        replay_buffer: ReplayBuffer,
        policy: TurnPolicy,
        loss: TurnPolicyLoss,
        optimizer: torch.optim.Optimizer,
        config: TrainerConfig,
        reference: TokenScorer | None = None,
        weight_sync: WeightSync | None = None,
        evaluator: Evaluator | None = None,
        checkpoints: RunStore | None = None,
        loggers: Sequence[Logger] = (),
        callbacks: Sequence[RunWatcher] = (),
        accelerator: Accelerator | None = None,
        seen_tasks: SeenTasks | None = None,
    ) -> None:
        self.collector, self.replay_buffer, self.policy, self.loss = collector, replay_buffer, policy, loss
        self.config, self.reference, self.weight_sync = config, reference, weight_sync
        self.evaluator, self.checkpoints = evaluator, checkpoints
        self.loggers, self.callbacks = tuple(loggers), tuple(callbacks)
        warn_of_half_weights(optimizer)
        self.accelerator = accelerator or Accelerator()
        self.distributed = Distributed.of(self.accelerator)
        self.prepare(optimizer)
        if weight_sync is not None:
            weight_sync.parameter_gather = self.distributed.parameter_gather
        check_options(config, loss, optimizer, policy)
        self.rollouts = CollectorView(collector, self.distributed)
        self.timer = Timer()
        self.seen_tasks = SeenTasks() if seen_tasks is None else seen_tasks
        self.generator = torch.Generator().manual_seed(config.seed)
        self.iteration = self.steps = self.episodes = 0
        self.best_success, self.elapsed = -math.inf, 0.0
        self.history: list[dict[str, float]] = []
        self.stop_reason: str | None = None
        self.unfinished: dict[str, float] | None = None
        self.saved_iteration = -1
        self.start_clock()

    def __setattr__(self, name: str, value: Any) -> None:
        # Other parts hold these too: one assigned later would be used by half of the trainer.
        if name in _FIXED and name in self.__dict__:
            raise AttributeError(
                f"LLMTrainer.{name} is read-only: other parts hold the one that the trainer was made with, and would go on "
                f"with it. Make the trainer with yours: {_FIXED[name]}."
            )
        super().__setattr__(name, value)

    def prepare(self, optimizer: torch.optim.Optimizer) -> None:
        """Train the loss with an optimizer that has not stepped."""
        check_parameters(self.loss, optimizer)
        self.schedule = LearningRateSchedule(optimizer, self.config)
        others = [] if self.reference is None else [self.reference]
        module, optimizer = self.distributed.prepare(self.loss, optimizer, *others)
        self.__dict__ |= {"module": module, "optimizer": optimizer}  # past __setattr__

    # ------------------------------------------------------------------ where the run is

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
        """Where the run is, without weights, optimizer and collector; to be taken between iterations."""
        return {name: getattr(self, name) for name in _SAVED} | {
            "generator": self.generator.get_state(),
            "unfinished": self.unfinished,
            "policy_version": self.policy.policy_version,
            "seen_tasks": torch.from_numpy(self.seen_tasks.tasks.copy()),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where :meth:`state_dict` was taken."""
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
