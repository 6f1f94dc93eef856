"""The parts and counters of a run: :class:`TrainerBase`, which the helpers of the loop work on, and
what it asks of its parts."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from torchrl.collectors import BaseCollector, Collector
from torchrl.data import ReplayBuffer
from torchrl.objectives.value import ValueEstimatorBase
from torchrl.record.loggers import Logger

from torchrl_llm.collectors import EpisodeCollector
from torchrl_llm.collectors.collector import base_env
from torchrl_llm.envs import GEMEnv, SeenTasks
from torchrl_llm.metrics import Timer
from torchrl_llm.modules import TokenScorer
from torchrl_llm.modules.policy import TurnPolicy
from torchrl_llm.objectives import TurnEstimator, TurnPolicyLoss
from torchrl_llm.trainers.callbacks import Callback
from torchrl_llm.trainers.config import NOTHING_TO_CORRECT, TrainerConfig, wrong_penalty
from torchrl_llm.trainers.distributed import Distributed
from torchrl_llm.trainers.numerics import Numerics
from torchrl_llm.trainers.schedule import GROUPS, LearningRateSchedule
from torchrl_llm.trainers.states import read_state, state_of
from torchrl_llm.utils.interrupts import interruptible
from torchrl_llm.utils.options import ConfigError
from torchrl_llm.weight_update import WeightSync

logger = logging.getLogger(__name__)

Evaluator = Callable[[], Mapping[str, Any]]
"""Collects episodes of evaluation and returns metrics, under names that training does not use;
``evaluation/success`` decides which checkpoint is best."""

_ARGUMENTS = ("accelerator", "collector", "config", "optimizer", "policy", "reference", "replay_buffer", "weight_sync")
_FIXED = {name: f"LLMTrainer({name}=...)" for name in _ARGUMENTS} | {
    "distributed": "LLMTrainer(accelerator=...)",
    "loss": "build_run(config, make_loss=...), or LLMTrainer(loss=...)",
    "module": "it wraps the loss of LLMTrainer(loss=...)",
}
"""Read-only attribute -> how to give the trainer another one."""

_SAVED = ("iteration", "steps", "episodes", "best_success", "history", "stop_reason", "elapsed")


class RunStore(Protocol):
    """Saves a run, as :class:`~torchrl_llm.runs.CheckpointStore` does."""

    def save(self, trainer: Any, metrics: Mapping[str, float], *, early: bool = False) -> Any:
        """Save it after an iteration with these metrics; ``early``: because an error or a signal
        ends it."""


class StockCollector:
    """What the loop assumes of a collector of TorchRL's own: one task a group, and weights that are
    never stale.

    Its attributes are what the loop asks of a collector; an
    :class:`~torchrl_llm.collectors.EpisodeCollector` has its own.
    """

    batch_size: int | None = None
    group_size, max_staleness = 1, 0
    runs_here = logprobs_match_trainer = True
    background = True  # as one with a thread, it cannot go back to its state before a rollout
    interruptible: Any = None
    texts: Mapping[int, str] = MappingProxyType({})  # its batches are tensors, which hold no texts

    def __init__(self, env_names: tuple[str, ...] = ()) -> None:
        self.env_names = env_names

    @classmethod
    def of(cls, collector: BaseCollector) -> StockCollector:
        """For a collector of TorchRL's; one of several processes does not show its environment, nor
        the names of a mixture."""
        env = base_env(collector.env) if isinstance(collector, Collector) else None
        return cls(env.names if isinstance(env, GEMEnv) else ())

    def metrics(self) -> dict[str, float]:
        """None."""
        return {}


class TrainerBase:
    """The parts, counters, clock and random generator of a run. The arguments are those of
    :class:`~torchrl_llm.trainers.LLMTrainer`.

    Attributes:
        iteration, steps, episodes: iterations, turns and episodes so far.
        best_success: the highest success rate of an evaluation.
        history: the metrics of every iteration.
        stop_reason: why the run ends; ``None`` while it runs.
        elapsed: seconds of training up to the last checkpoint.
        loaded_loss_state: the estimator for which a checkpoint's state of the loss was loaded, and
            that state; ``None`` once training has begun.
        skipped_in_a_row: optimizer steps that were skipped since the last one that was taken.
        unfinished: the metrics of an iteration that is to be evaluated and logged, in a run that
            was interrupted there.
        saved_iteration: the iteration of the last checkpoint; -1 before the first.
        rollouts: the collector as the loop sees it.
        env_names: the environments of a mixture.
        collector_state: the collector's state before the rollout or evaluation that runs, or was
            dropped; ``None``: the state that it has.
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
        callbacks: Sequence[Callback] = (),
        accelerator: Accelerator | None = None,
        seen_tasks: SeenTasks | None = None,
        offload: Callable[[], AbstractContextManager[None]] = nullcontext,
        numerics: Numerics | None = None,
    ) -> None:
        self.collector, self.replay_buffer, self.policy, self.loss = collector, replay_buffer, policy, loss
        self.config, self.reference, self.weight_sync = config, reference, weight_sync
        self.evaluator, self.checkpoints = evaluator, checkpoints
        self.loggers, self.callbacks = tuple(loggers), tuple(callbacks)
        self.offload, self.numerics = offload, numerics or Numerics()
        _warn_of_half_weights(optimizer)
        self.accelerator = accelerator or Accelerator()
        self.distributed = Distributed.of(self.accelerator)
        self.prepare(optimizer)
        # After prepare(), which makes FSDP2's.
        if weight_sync is not None:
            weight_sync.parameter_gather = self.distributed.parameter_gather
        self.check_options()
        self.rollouts: Any = collector if isinstance(collector, EpisodeCollector) else StockCollector.of(collector)
        self.rollouts.interruptible = partial(interruptible, all_reduce_max=self.distributed.all_reduce_max)
        self.env_names: tuple[str, ...] = self.rollouts.env_names
        self.timer = Timer()
        self.seen_tasks = SeenTasks() if seen_tasks is None else seen_tasks
        self.generator = torch.Generator().manual_seed(config.seed)
        self.iteration = self.steps = self.episodes = self.skipped_in_a_row = 0
        self.best_success, self.elapsed = -math.inf, 0.0
        self.history: list[dict[str, float]] = []
        self.stop_reason: str | None = None
        self.unfinished: dict[str, float] | None = None
        self.saved_iteration = -1
        self.loaded_loss_state: tuple[ValueEstimatorBase, dict[str, Any]] | None = None
        self.collector_state: dict[str, Any] | None = None
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
        # Before sharding, which fails with a KeyError on a parameter that is none of the loss's.
        self._check_parameters(optimizer)
        # Not through accelerate, which steps a scheduler once for each process.
        self.schedule = LearningRateSchedule(optimizer, self.config)
        others = [] if self.reference is None else [self.reference]
        module, optimizer = self.distributed.prepare(self.loss, optimizer, *others)
        self.__dict__ |= {"module": module, "optimizer": optimizer}  # past __setattr__

    def _check_parameters(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse an optimizer whose parameters or groups are not those of the loss, which would run
        without an error."""
        groups, names = len(optimizer.param_groups), GROUPS if self.loss.critic_network is not None else GROUPS[:1]
        if groups > len(names):
            raise ConfigError(
                f"The optimizer has {groups} groups of parameters; expected {' and '.join(f'one for the {name}' for name in names)}: "
                "gradients are clipped, and critic_warmup and target_kl hold the actor back, by group. Give each network's "
                "parameters as one group."
            )
        stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        trained = {id(parameter): name for name, parameter in self.loss.named_parameters() if parameter.requires_grad}
        idle = sorted(trained[each] for each in trained.keys() - stepped)
        if idle or stepped - trained.keys():
            listed = ", ".join(idle[:3]) + (", ..." if len(idle) > 3 else "")
            raise ConfigError(
                f"The optimizer steps {len(stepped - trained.keys())} parameters that are none of {type(self.loss).__name__}'s "
                f"trainable ones, and leaves out {len(idle)} that are{f' ({listed})' if idle else ''}. Make the loss of the networks "
                "whose parameters the optimizer has (build_run: models.actor and models.critic), and set requires_grad_(False) on "
                "what is not to be trained."
            )

    def check_options(self) -> None:
        """Refuse settings of the loop that do not go with the other parts.

        Raises:
            ConfigError: names the setting and what to do.
        """
        for problem in self._contradictions():
            raise ConfigError(problem)

    def _contradictions(self) -> Iterator[str]:
        config, limit = self.config, self.policy.sampling.max_output_tokens
        warmup, buffer = config.critic_warmup, config.overlong_buffer
        if warmup and self.loss.critic_network is None:
            yield f"critic_warmup={warmup}, but {type(self.loss).__name__} has no critic: leave it 0, or use LLMPPO."
        if warmup and len(self.optimizer.param_groups) < 2:
            yield (
                f"critic_warmup={warmup} steps the optimizer's second group of parameters, and there is one: give the critic's a "
                "group of their own, after the actor's."
            )
        if config.min_entropy_fraction and self.loss.entropy_target is None:
            yield (
                f"min_entropy_fraction={config.min_entropy_fraction} is a share of the loss's entropy_target, and it has none: set it, "
                "or leave min_entropy_fraction out."
            )
        if config.kl_decay_fraction is not None and not (self.loss.kl_coeff or self.credit_holds_kl):
            yield (
                f"kl_decay_fraction={config.kl_decay_fraction} lowers the loss's kl_coeff, which is 0: set it, or leave "
                "kl_decay_fraction out."
            )
        if buffer is not None and buffer > limit:
            yield (
                f"overlong_buffer={buffer} is more than a response has, {limit} tokens: lower it, or raise the policy's "
                "max_output_tokens."
            )
        yield from wrong_penalty(config.overlong_penalty, self.loss.value_estimator)
        if config.old_log_probs == "sampler" and (self.loss.sampler_correction or self.credit_corrects_sampler):
            yield NOTHING_TO_CORRECT

    @property
    def logprobs_match_trainer(self) -> bool:
        """Whether the sampler's log-probs are the trained model's own, so that none need be scored
        before the update."""
        # Autocast is around the training's forwards only: the sampler then computes in another
        # precision.
        everywhere = self.policy.logprobs_match_trainer and self.rollouts.logprobs_match_trainer
        return everywhere and self.accelerator.mixed_precision == "no"

    @property
    def credit_holds_kl(self) -> bool:
        """Whether the estimator takes the KL to the reference out of the rewards, with the loss's
        ``kl_fraction``."""
        estimator = self.loss.value_estimator
        return isinstance(estimator, TurnEstimator) and estimator.kl_coeff != 0

    @property
    def credit_corrects_sampler(self) -> bool:
        """Whether the advantages hold the ratio of the policy to the sampler, for which old
        log-probs are scored."""
        estimator = self.loss.value_estimator
        return isinstance(estimator, TurnEstimator) and estimator.corrects_sampler

    # ---------------------------------------- where the run is

    def start_clock(self) -> None:
        """Start the clock at the seconds of the last checkpoint."""
        # Monotonic: a clock that is set during the run must not end it by max_seconds.
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
        """The counters and generators of the run, without weights, optimizer and collector; to be
        taken between iterations."""
        return {name: getattr(self, name) for name in _SAVED} | {
            "generator": self.generator.get_state(),
            "unfinished": self.unfinished,
            "skipped_in_a_row": self.skipped_in_a_row,
            "policy_version": self.policy.policy_version,
            **state_of(self.seen_tasks),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where :meth:`state_dict` was taken."""
        for name in _SAVED:
            setattr(self, name, state_dict[name])
        self.generator.set_state(state_dict["generator"])
        self.unfinished = state_dict.get("unfinished")
        self.skipped_in_a_row = state_dict.get("skipped_in_a_row", 0)
        self.policy.policy_version = state_dict["policy_version"]
        read_state(self.seen_tasks, state_dict)
        self.saved_iteration = self.iteration


def _warn_of_half_weights(optimizer: torch.optim.Optimizer) -> None:
    """Warn if an optimizer of PyTorch's steps weights narrower than float32: rounding loses most of
    its steps."""
    kind, parameters = type(optimizer), [each for group in optimizer.param_groups for each in group["params"]]
    # Measured in bfloat16 with AdamW at 5e-6: 2 to 8 % of the entries change at all.
    narrow = {str(p.dtype) for p in parameters if p.is_floating_point() and torch.finfo(p.dtype).bits < 32}
    # Optimizers of other packages may keep float32 copies themselves.
    if narrow and kind.__module__.startswith("torch.optim"):
        logger.warning(
            "%s steps %s weights without a float32 copy: at usual learning rates rounding takes all but a few of its steps. "
            "load_actor_critic keeps float32 weights (the default, master_weights=True); mixed precision computes in half.",
            kind.__name__, " and ".join(sorted(narrow)),
        )  # fmt: skip
