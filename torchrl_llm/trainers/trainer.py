"""The training loop, written out: :class:`LLMTrainer`.

It knows no algorithm: credit and objective are the loss's, sampling is the policy's, games are the collector's. What
is built from settings stands in :mod:`torchrl_llm.trainers.build`.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.checkpoint import GlobalRNGState
from torchrl.collectors import BaseCollector
from torchrl.data import ReplayBuffer
from torchrl.objectives.value import ValueEstimatorBase
from torchrl.record.loggers import Logger

from torchrl_llm import keys
from torchrl_llm.collectors import ConversationCollector, RayTurnCollector
from torchrl_llm.data import (
    apply_in_micro_batches,
    cat_rows,
    informative,
    micro_batches,
    minibatches,
    overlong,
    padding_share,
    penalise_overlong,
)
from torchrl_llm.envs import SeenTasks
from torchrl_llm.interrupts import Interrupted, catch_signals, interruptible, run_begins
from torchrl_llm.modules import TokenScorer
from torchrl_llm.modules.policy import TurnPolicy
from torchrl_llm.objectives import TurnPolicyLoss, merge, total, write_loss_weights
from torchrl_llm.record import LOSS_METRICS, Timer, credit_metrics, named, rollout_metrics
from torchrl_llm.trainers.callbacks import Callback
from torchrl_llm.trainers.checkpoint import CheckpointStore
from torchrl_llm.trainers.config import ConfigError, TrainerConfig
from torchrl_llm.trainers.precision import warn_of_half_weights
from torchrl_llm.trainers.ranks import Ranks, check_accumulation, silenced
from torchrl_llm.trainers.sharding import on_host
from torchrl_llm.weight_update import RayWeightSync, VLLMWeightSync

logger = logging.getLogger(__name__)
_END = object()
_PLAYED = (
    keys.TURN_IDS,
    keys.ATTENTION_MASK,
    keys.POLICY_VERSION,
    keys.EPISODE_ID,
    keys.ENV_ID,
    keys.TASK_ID,
    keys.TURN_MASK,
    keys.TURN_REWARD,
    keys.TURN_SUCCESS,
    keys.TURN_TERMINATED,
    keys.TURN_TRUNCATED,
)
"""What metrics of conversations read."""
_VALUED = (keys.ATTENTION_MASK, keys.EPISODE_ID, keys.TURN_MASK, keys.TURN_VALUE, keys.TURN_VALUE_TARGET)
_FIXED = {
    "accelerator": "LLMTrainer(accelerator=...)",
    "collector": "LLMTrainer(collector=...)",
    "config": "LLMTrainer(config=...)",
    "loss": "build_run(config, make_loss=...), or LLMTrainer(loss=...)",
    "module": "it wraps the loss of LLMTrainer(loss=...)",
    "optimizer": "LLMTrainer(optimizer=...)",
    "policy": "LLMTrainer(policy=...)",
    "ranks": "they are those of LLMTrainer(accelerator=...)",
    "reference": "LLMTrainer(reference=...)",
    "replay_buffer": "LLMTrainer(replay_buffer=...)",
    "weight_sync": "LLMTrainer(weight_sync=...)",
}
"""Parts that other parts hold as well, and where they come from: one put here later would be used by half of a trainer."""
_STATE = ("iteration", "steps", "episodes", "best_success", "history", "stop_reason", "elapsed")
Evaluator = Callable[[], dict[str, float]]
"""Plays held-out episodes and returns metrics, of any names but those of training; ``evaluation/success`` decides what is best."""


class Boundary(NamedTuple):
    """Where the run was before what it does now and may drop.

    Attributes:
        collector: the collector's state; ``None``: it has changed nothing since, or is not to be asked.
        rng: the global generators' state; ``None``: nothing is dropped now.
    """

    collector: dict[str, Any] | None = None
    rng: dict[str, Any] | None = None


class LLMTrainer:
    """Collects, credits, updates, evaluates, until a limit of ``config`` is reached.

    Args:
        collector: fills ``replay_buffer`` with one on-policy batch of whole conversations per iteration.
        replay_buffer: holds rows (its transform is :class:`~torchrl_llm.data.TurnsToSequence`).
        policy: what the collector plays with; told after each update that its weights are new.
        loss: one of the losses of :mod:`torchrl_llm.objectives`, with its value estimator made.
        optimizer: its first parameter group is the actor's, its second, if any, the critic's.
        config: the loop's settings.
        reference: scores the reference log-probs; None where the loss needs none.
        weight_sync: brings the new weights to a policy that has its own, after each update; None where the policy samples
            from the trained model itself.
        evaluator: run every ``config.evaluation_interval`` iterations; its metrics may have names of their own. If it fails
            (or a logger, or a callback), the iteration is saved before the error goes on.
        checkpoints: where the run is saved: every ``config.checkpoint_interval`` iterations, after an evaluation that is the
            best so far, and at the end.
        loggers: TorchRL loggers; each gets every metric.
        callbacks: watch the run.
        accelerator: device, mixed precision and backward; None makes a plain one.
        seen_tasks: remembers what training has played, for :func:`~torchrl_llm.trainers.evaluate`; None makes an empty one.

    Attributes:
        iteration, steps, episodes: iterations, turns and conversations so far.
        history: the metrics of every iteration.
        stop_reason: why the run ends; None while it runs.
        elapsed: seconds of training up to the last checkpoint.
        unfinished: the metrics of an iteration that is to be evaluated and logged, in a run that was interrupted there.

    The parts it is made with are read-only, because others hold them too (the loss is wrapped for several processes, the
    optimizer has its parameters, ...): assigning one raises ``AttributeError``. ``evaluator``, ``checkpoints``, ``loggers``
    and ``callbacks`` may be replaced at any time.

    Raises:
        ConfigError: parts that do not go together, such as an optimizer that steps other parameters than the loss's.
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
        weight_sync: VLLMWeightSync | RayWeightSync | None = None,
        evaluator: Evaluator | None = None,
        checkpoints: CheckpointStore | None = None,
        loggers: Sequence[Logger] = (),
        callbacks: Sequence[Callback] = (),
        accelerator: Accelerator | None = None,
        seen_tasks: SeenTasks | None = None,
    ) -> None:
        self.seen_tasks = SeenTasks() if seen_tasks is None else seen_tasks
        self.collector, self.replay_buffer, self.policy = collector, replay_buffer, policy
        self.loss, self.reference, self.config = loss, reference, config
        self.weight_sync, self.evaluator, self.checkpoints = weight_sync, evaluator, checkpoints
        self.loggers, self.callbacks = tuple(loggers), tuple(callbacks)
        warn_of_half_weights(optimizer)
        self.accelerator = accelerator or Accelerator()
        self.ranks = Ranks(self.accelerator)
        self._use(optimizer)
        if weight_sync is not None:
            weight_sync.access = self.ranks.access
        self._check_options()
        self.generator = torch.Generator().manual_seed(config.seed)
        self.iteration = self.steps = self.episodes = 0
        self.best_success = -math.inf
        self.history: list[dict[str, float]] = []
        self.stop_reason: str | None = None
        self.elapsed = 0.0
        self.unfinished: dict[str, float] | None = None
        self.boundary = Boundary()
        if isinstance(collector, ConversationCollector):
            collector.interruptible = partial(interruptible, ranks=self.ranks)
        self._timer = Timer()
        self._started = time.monotonic()
        self._saved_iteration = -1

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _FIXED and name in self.__dict__:
            raise AttributeError(
                f"LLMTrainer.{name} is read-only: other parts hold the one that the trainer was made with, and would go on "
                f"with it. Make the trainer with yours: {_FIXED[name]}."
            )
        super().__setattr__(name, value)

    def _use(self, optimizer: torch.optim.Optimizer) -> None:
        """Train the loss with an optimizer that has not stepped yet."""
        _check_parameters(self.loss, optimizer)
        self._learning_rates = [group["lr"] for group in optimizer.param_groups]
        others = [] if self.reference is None else [self.reference]
        self.__dict__["module"], self.__dict__["optimizer"] = self.ranks.wrap(self.loss, optimizer, *others)

    def replace_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Go on with another optimizer, for parameters that were made anew (merged adapters); with one process only.

        Args:
            optimizer: of all trainable parameters of the loss, with the groups and rates of the old one; it has not stepped.

        Raises:
            ConfigError: there are several processes, whose gradients are averaged for the old parameters.
        """
        if self.ranks.count > 1:
            raise ConfigError(
                f"replace_optimizer() with {self.ranks.count} processes, which average the gradients of the old parameters: "
                "make the trainer anew."
            )
        self._use(optimizer)

    def _check_options(self) -> None:
        config, loss = self.config, self.loss
        if config.critic_warmup and loss.critic_network is None:
            raise ConfigError(
                f"critic_warmup={config.critic_warmup}, but {type(loss).__name__} has no critic: leave it 0, or use LLMPPO."
            )
        if config.critic_warmup and len(self.optimizer.param_groups) < 2:
            raise ConfigError(
                f"critic_warmup={config.critic_warmup} steps the optimizer's second group of parameters, and there is one: give "
                "the critic's a group of their own, after the actor's."
            )
        limit = self.policy.sampling.max_output_tokens
        if config.overlong_buffer is not None and config.overlong_buffer > limit:
            raise ConfigError(
                f"overlong_buffer={config.overlong_buffer} is more than a response has, {limit} tokens: lower it, or raise the "
                "policy's max_output_tokens."
            )
        if config.old_log_probs == "sampler" and (
            loss.sampler_correction or getattr(self.estimator, "corrects_sampler", False)
        ):
            raise ConfigError(
                'old_log_probs="sampler" leaves no gap between sampler and trainer to correct for: use "auto" or '
                '"scorer", or no correction.'
            )

    @property
    def exact(self) -> bool:
        """Whether the sampler's log-probs are the trained model's own, so that none need be scored before the update."""
        everywhere = self.policy.exact and getattr(self.collector, "logprobs_match_trainer", True)
        return everywhere and self.accelerator.mixed_precision == "no"

    @property
    def estimator(self) -> ValueEstimatorBase:
        """The loss's value estimator, which takes its statistics over all ranks.

        Looked up each time, because ``loss.make_value_estimator`` may replace it during a run.
        """
        estimator: Any = self.loss.value_estimator
        if getattr(estimator, "process_group", self) is None:
            estimator.process_group = self.ranks.process_group
        return estimator

    @property
    def scores_old(self) -> bool:
        """Whether the log-probs that ratios are taken against are scored, and not the sampler's."""
        if self.config.old_log_probs == "auto":
            corrects = getattr(self.estimator, "corrects_sampler", False)
            return not self.exact or corrects or getattr(self.collector, "max_staleness", 0) > 0
        return self.config.old_log_probs == "scorer"

    def train(self) -> list[dict[str, float]]:
        """Run until a limit is reached; returns :attr:`history`. Collector and loggers are closed at the end.

        SIGINT and SIGTERM are caught (:mod:`torchrl_llm.interrupts`): what is played or evaluated is dropped, an update is
        finished, the run is saved where it goes on in the same bytes.

        Raises:
            Interrupted: a signal has come; it ends the process with the signal's exit code if nobody catches it.
        """
        self._started = time.monotonic() - self.elapsed
        self._check_options()  # again: the loss may have another estimator by now
        with catch_signals("resume=True and else the same settings, without overwrite and resume_from"):
            try:
                self._train()
            except Interrupted as interrupted:
                self._end_interrupted(interrupted)
                raise
            finally:
                try:
                    for callback in self.callbacks:
                        callback.on_end(self)
                finally:
                    self.close()
        return self.history

    def _train(self) -> None:
        for callback in self.callbacks:
            callback.on_start(self)
        run_begins()
        batches = iter(self.collector)
        if self.unfinished is not None:
            self._finish(self.unfinished)
        while self.stop_reason is None:
            self._stop_if_asked()
            batch = self.collect(batches)
            if batch is not None:
                self._finish(self.iterate(batch))
        if self.checkpoints is not None and self._saved_iteration != self.iteration:
            self._save({})
        logger.info("training ends: %s", self.stop_reason)
        self._stop_if_asked()

    def _stop_if_asked(self) -> None:
        interruptible(lambda: None, self.ranks)

    def _finish(self, metrics: dict[str, float]) -> None:
        """The end of an iteration: evaluate when it is time, log, save."""
        self.unfinished = metrics
        interval = self.config.evaluation_interval
        if self.evaluator is not None and interval and (self.iteration % interval == 0 or self.stop_reason):
            metrics = metrics | self._evaluate(self.evaluator) | _named_seconds(self._timer.read())
        self.unfinished = None
        self._report(metrics)

    def _end_interrupted(self, interrupted: Interrupted) -> None:
        """Save the run where it was before what was dropped."""
        interrupted.state = f" after {self.iteration} iterations"
        if self.boundary.rng is not None:
            GlobalRNGState().load_state_dict(self.boundary.rng)
        if self.checkpoints is None:
            interrupted.state += ", of which nothing is saved (save_checkpoints=False)"
            interrupted.goes_on = False
        elif self._saved_iteration != self.iteration:
            self._save({}, early=True)

    @contextmanager
    def _droppable(self) -> Iterator[None]:
        """Around what changes collector and global generators only: an interrupted run is saved as it was before."""
        # What a collector with a thread of its own has in flight is dealt again anyway, and to ask it makes it pause.
        asked = isinstance(self.collector, ConversationCollector) and not getattr(self.collector, "background", False)
        self.boundary = Boundary(self.collector.state_dict() if asked else None, GlobalRNGState().state_dict())
        yield
        self.boundary = Boundary()

    def _report(self, metrics: dict[str, float]) -> None:
        """Log and save a finished iteration; a logger or callback that fails does not cost the checkpoint."""
        try:
            self._log(metrics)
        except Exception:
            # Saving takes all processes, and this may be the only one that knows: of several, they save if it is time for all.
            self._save(metrics, early=True) if self.ranks.count == 1 else self._save_if_due(metrics)
            raise
        self._save_if_due(metrics)

    def _save_if_due(self, metrics: dict[str, float]) -> None:
        interval = self.config.checkpoint_interval
        best = "evaluation/success" in metrics and metrics["evaluation/success"] >= self.best_success
        if self.stop_reason or best or (interval and self.iteration % interval == 0):
            self._save(metrics)

    def _save(self, metrics: dict[str, float], *, early: bool = False) -> None:
        if self.checkpoints is not None:
            self.elapsed = time.monotonic() - self._started
            self.checkpoints.save(self, metrics, early=early)
            self._saved_iteration = self.iteration

    def state_dict(self) -> dict[str, Any]:
        """Where the run is, but for weights, optimizer and collector; to be taken between iterations."""
        return {name: getattr(self, name) for name in _STATE} | {
            "generator": self.generator.get_state(),
            "unfinished": self.unfinished,
            "policy_version": self.policy.policy_version,
            "seen_tasks": torch.from_numpy(self.seen_tasks.tasks.copy()),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where :meth:`state_dict` was taken."""
        for name in _STATE:
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
        self._saved_iteration = self.iteration

    @property
    def logged_steps(self) -> int:
        """Turns up to the last iteration that was logged."""
        if self.unfinished is None:
            return self.steps
        return int(self.history[-1]["rollout/steps"]) if self.history else 0

    def reconsider(self) -> None:
        """Forget why the run ended and look at the limits again: they may be others since it was resumed."""
        self.stop_reason = None
        self._started = time.monotonic() - self.elapsed
        self._check_limits()

    def collect(self, batches: Iterator[object]) -> TensorDictBase | None:
        """What is played for one iteration, rows ``[B]``; None, and a :attr:`stop_reason`, when the collector has no more.

        One batch of the collector; with ``config.dynamic_sampling``, as many as it takes (and the setting allows) until
        one batch's number of conversations is in groups that get credit.
        """
        # A resumed run starts with no contexts cached; one that goes on must not have those of an evaluation.
        self.policy.drop_cache()
        with self._droppable():
            rows = self._play(batches)
            if rows is None:
                return None
            wanted = self._wanted(rows)
            for _ in range(self.config.dynamic_sampling - 1):
                if self.ranks.sum(int(self._informative(rows).sum())) >= wanted:
                    break
                more = self._play(batches)
                if more is None:
                    break
                rows = cat_rows([rows, more])
        return rows

    def _play(self, batches: Iterator[object]) -> TensorDictBase | None:
        """One batch of the collector, rows ``[B]``; None, and a :attr:`stop_reason`, when it has no more."""
        with self._timer("rollout"), self.playing(here=not isinstance(self.collector, RayTurnCollector)):
            if self.ranks.any(next(batches, _END) is _END):
                self.stop_reason = "the collector reached its own limit"
                return None
            batch = self.replay_buffer[:].contiguous().to(self.accelerator.device)
            self.replay_buffer.empty(empty_write_count=False)
        return batch

    def playing(self, *, here: bool = True) -> AbstractContextManager[None]:
        """Around whatever the policy plays ``here``: where it samples from the trained model, every rank needs all weights."""
        return self.ranks.weights_here() if here and not self.policy.concurrent else nullcontext()

    def _wanted(self, rows: TensorDictBase) -> int:
        """How many conversations the update of one iteration is meant to have, on all ranks together."""
        return int(self.ranks.sum(getattr(self.collector, "batch_size", rows.shape[0])))

    def _informative(self, batch: TensorDictBase) -> Tensor:
        """Which rows are of groups that the update would learn from, ``[B]`` bool: whatever the estimator does decides."""
        rows = batch.copy()
        with self._timer("score"), self.accelerator.autocast():
            if self._credit_reads_scores:
                with self.ranks.weights_here():
                    self.score(rows)
            return informative(self.credit(rows))

    @property
    def _credit_reads_scores(self) -> bool:
        estimator = self.estimator
        penalised, corrects = getattr(estimator, "kl_coeff", 0.0), getattr(estimator, "corrects_sampler", False)
        return bool(penalised) or corrects or self.loss.critic_network is not None

    def iterate(self, batch: TensorDictBase) -> dict[str, float]:
        """What is done with what was played: score, credit, update."""
        played, before = self.ranks.rows(batch, _PLAYED), self.steps
        self.steps += int(played[keys.TURN_MASK].sum())
        self.episodes += played.shape[0]
        self._set_learning_rates(before)
        if played.get(keys.TASK_ID, None) is not None:
            self.seen_tasks.add(played[keys.TASK_ID].cpu())
        chosen = self.choose(batch)
        num_chosen = self.ranks.sum(chosen.shape[0])
        metrics = rollout_metrics(played, getattr(getattr(self.collector, "env", None), "names", ())) | {
            "data/chosen_share": num_chosen / played.shape[0],
            "data/staleness": self._staleness(played),
        }
        if num_chosen:
            # A rank that has nothing to learn from still has to take every step with the others.
            metrics |= self.learn(chosen if chosen.shape[0] else self._silent(batch))
        else:
            logger.warning("iteration %d: no group has an advantage; nothing to learn from", self.iteration)
        self.iteration += 1
        self._check_limits()
        return metrics | self._progress_metrics(played)

    def _silent(self, batch: TensorDictBase) -> TensorDictBase:
        return silenced(batch[: getattr(self.collector, "group_size", 1)])

    def choose(self, batch: TensorDictBase) -> TensorDictBase:
        """Of what was played, the rows to learn from: with ``config.dynamic_sampling`` those of groups that get credit.

        At most as many as one batch has, on all ranks together: the first in the order of the tickets, as one process that
        plays for all of them would take.
        """
        if not self.config.dynamic_sampling:
            return batch
        rows = batch[self._informative(batch)]
        found = zip(rows[keys.GROUP_ID].tolist(), rows[keys.EPISODE_ID].tolist(), strict=True)
        first = [episode for _, episode in sorted(self.ranks.gather(list(found)))[: self._wanted(batch)]]
        return rows[torch.isin(rows[keys.EPISODE_ID], torch.tensor(first, dtype=torch.int64, device=rows.device))]

    def credit(self, batch: TensorDictBase) -> TensorDictBase:
        """Shape the rewards of scored rows ``[B]`` as the settings say, and write the estimator's credit."""
        config, limit = self.config, self.policy.sampling.max_output_tokens
        if config.overlong_penalty:
            buffer = config.overlong_buffer or limit
            penalise_overlong(batch, config.overlong_penalty, max_response_length=limit, buffer=buffer)
        return self.estimator(batch)

    def learn(self, batch: TensorDictBase) -> dict[str, float]:
        """Score, credit and update on rows ``[B]``; then the policy gets the new weights."""
        config, limit = self.config, self.policy.sampling.max_output_tokens
        sleeper = self.weight_sync if self.weight_sync is not None and self.weight_sync.sleep_level else None
        if sleeper is not None:
            sleeper.sleep()
        with self._timer("score"), self.accelerator.autocast():
            with self.ranks.weights_here():
                self.score(batch)
            self.credit(batch)
        kept = batch[~overlong(batch, limit)] if config.overlong_filter else batch
        num_kept = self.ranks.sum(kept.shape[0])
        batch = kept if kept.shape[0] or not num_kept else self._silent(batch)
        valued = keys.TURN_VALUE in batch.keys(include_nested=True)
        metrics = credit_metrics(self.ranks.rows(batch, _VALUED)) if valued else {}
        if num_kept:
            with self._timer("update"):
                metrics |= self.update(batch)
        else:
            logger.warning("iteration %d: every conversation is overlong; nothing to learn from", self.iteration)
        if num_kept or sleeper is not None:
            metrics |= self._send_weights()
        return metrics

    def _send_weights(self) -> dict[str, float]:
        """Let the policy know of the update, or bring it the new weights."""
        if self.weight_sync is None:
            self.policy.weights_changed()
            return {}
        with self._timer("sync"):
            self.weight_sync.send()
        figures = self.weight_sync.figures
        return {} if figures is None else {"policy/canary_gap": figures.canary_difference}

    def _staleness(self, batch: TensorDictBase) -> float:
        versions = batch[keys.POLICY_VERSION]
        return (self.policy.policy_version - versions[versions >= 0]).double().mean().item()

    @torch.no_grad()
    def score(self, batch: TensorDictBase) -> None:
        """Write what the loss needs from frozen weights: old and reference log-probs, values."""
        limit, loss = self.config.max_tokens, self.loss
        if self.scores_old:
            apply_in_micro_batches(loss.actor_network, batch, limit)
            batch.rename_key_(keys.LOG_PROB, keys.OLD_LOG_PROB)
        if self.reference is not None:
            apply_in_micro_batches(self.reference, batch, limit)
            batch.rename_key_(keys.LOG_PROB, keys.REF_LOG_PROB)
        if loss.critic_network is not None:
            apply_in_micro_batches(loss.critic_network, batch, limit)

    def update(self, batch: TensorDictBase) -> dict[str, float]:
        """``config.epochs`` passes of optimizer steps over ``batch``; returns the means of the loss's figures."""
        check_accumulation(self.accelerator)
        steps: list[dict[str, Tensor]] = []
        padding: list[float] = []
        size = self.config.minibatch_size or int(self.ranks.sum(batch.shape[0]))
        everyone = self.ranks.process_group
        for _ in range(self.config.epochs):
            for minibatch in minibatches(batch, size, generator=self.generator, process_group=everyone):
                rows = minibatch if minibatch.shape[0] else silenced(batch[:1])
                parts = micro_batches(write_loss_weights(rows, self.loss, everyone), self.config.max_tokens)
                # Every rank takes part in every backward.
                parts += [silenced(parts[-1][:1])] * (self.ranks.most(len(parts)) - len(parts))
                padding.append(padding_share(parts))
                steps.append(self._backward(parts) | self._optimizer_step())
        means = {name: torch.stack([step[name] for step in steps]).mean().item() for name in steps[0]}
        # Before the first step the model still is the one that sampled.
        means["policy/log_prob_gap"] = self._log_prob_gap(batch, steps[0])
        return means | {"data/padding_share": sum(padding) / len(padding)}

    def _backward(self, parts: list[TensorDictBase]) -> dict[str, Tensor]:
        """Accumulate the gradient of one optimizer batch: losses are weighted sums, so parts add up."""
        outputs = []
        for i, part in enumerate(parts):
            with self.ranks.alone(self.module) if i + 1 < len(parts) else nullcontext():
                with self.accelerator.autocast():
                    out = self.module(part)
                # Gradients are averaged over the ranks; the loss is a sum.
                self.accelerator.backward(self._objective(out) * self.ranks.count)
            outputs.append(out)
        merged = merge(self.ranks.gather([merge(outputs).cpu()])) if self.ranks.count > 1 else merge(outputs)
        return {name: merged[key] for key, name in LOSS_METRICS.items() if key in merged}

    @property
    def _warms_up_critic(self) -> bool:
        return self.iteration < self.config.critic_warmup

    def _objective(self, out: TensorDictBase) -> Tensor:
        if not self._warms_up_critic:
            return total(out)
        # DDP's ranks wait for a gradient of every parameter: those that the critic does not reach get zeros, and no step.
        ddp = self.ranks.count > 1 and not self.ranks.sharded
        return out["loss_critic"] + (0.0 * total(out) if ddp else 0.0)

    def _optimizer_step(self) -> dict[str, Tensor]:
        norms = {}
        if self._warms_up_critic:
            # None, not zeros: AdamW passes over them, with moments and weight decay. Of a shared trunk, too, for it is the policy's.
            for parameter in self.optimizer.param_groups[0]["params"]:
                parameter.grad = None
        # Once for all groups: a gradient scaler refuses to unscale twice.
        self.accelerator.unscale_gradients()
        for name, group in zip(("actor", "critic"), self.optimizer.param_groups, strict=False):
            norm = torch.nn.utils.clip_grad_norm_(group["params"], self.config.max_grad_norm)
            norms[f"optim/grad_norm_{name}"] = on_host(norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norms

    def _log_prob_gap(self, batch: TensorDictBase, first_step: dict[str, Tensor]) -> float:
        if not self.scores_old:
            return first_step["policy/log_ratio"].item()
        actions = batch[keys.TURN_IDS] >= 0
        gap = (batch[keys.OLD_LOG_PROB] - batch[keys.SAMPLE_LOG_PROB])[actions].abs().sum().item()
        return self.ranks.sum(gap) / self.ranks.sum(int(actions.sum()))

    def _set_learning_rates(self, before: int) -> None:
        """Those of an update on the turns that were played since there were ``before``."""
        factor = _lr_factor(self.config, before, self.steps)
        for group, rate in zip(self.optimizer.param_groups, self._learning_rates, strict=True):
            group["lr"] = rate * factor

    def _check_limits(self) -> None:
        config, seconds = self.config, self.ranks.agree(time.monotonic() - self._started)
        if self.steps >= config.max_steps:
            self.stop_reason = f"max_steps={config.max_steps} turns played"
        elif config.max_iterations is not None and self.iteration >= config.max_iterations:
            self.stop_reason = f"max_iterations={config.max_iterations}"
        elif config.max_seconds is not None and seconds >= config.max_seconds:
            self.stop_reason = f"max_seconds={config.max_seconds}"

    def _evaluate(self, evaluator: Evaluator) -> dict[str, float]:
        try:
            with self._droppable(), self._timer("evaluation"), self.playing():
                metrics = _as_numbers(interruptible(evaluator))
            self._judge(metrics)
        except Exception:
            if self.ranks.count == 1:  # of several, the others may be anywhere in their evaluation
                self._save({}, early=True)
            raise
        return metrics

    def _judge(self, metrics: dict[str, float]) -> None:
        """Take note of the success rate, if the evaluator reports one."""
        success, target = metrics.get("evaluation/success"), self.config.stop_at_success
        if success is None and target is not None:
            raise ConfigError(
                f'stop_at_success={target} needs "evaluation/success", and the evaluator returned {sorted(metrics)}: return '
                "it, or set stop_at_success to null."
            )
        if success is not None:
            self.best_success = max(self.best_success, success)
            if target is not None and success >= target:
                self.stop_reason = f"stop_at_success={target} reached: {success:.3f}"

    def _progress_metrics(self, batch: TensorDictBase) -> dict[str, float]:
        seconds = self._timer.read()
        learning = seconds.get("score", 0.0) + seconds.get("update", 0.0)
        groups = zip(("actor", "critic"), self.optimizer.param_groups, strict=False)
        losses = {name: getattr(self.collector, name, None) for name in ("dropped", "faults")}
        return {
            "rollout/episodes": float(self.episodes),
            "rollout/steps": float(self.steps),
            "policy/version": float(self.policy.policy_version),
            **{f"optim/lr_{name}": group["lr"] for name, group in groups},
            **{f"data/{name}": float(sum(n.values())) for name, n in losses.items() if n is not None},
            **self._worker_metrics(),
            **_named_seconds(seconds),
            "time/rollout_tokens_per_s": (batch[keys.TURN_IDS] >= 0).sum().item() / seconds["rollout"],
            **({"time/update_tokens_per_s": batch[keys.ATTENTION_MASK].sum().item() / learning} if learning else {}),
        }

    def _worker_metrics(self) -> dict[str, float]:
        if not isinstance(self.collector, RayTurnCollector):
            return {}
        return {
            "data/lost_workers": float(self.collector.lost_workers),
            "policy/canary_gap": self.collector.canary_difference,
        }

    def _log(self, metrics: dict[str, float]) -> None:
        self.history.append(metrics)
        for target in self.loggers:
            target.log_metrics(metrics, step=self.steps)
        for callback in self.callbacks:
            callback.on_iteration(self, metrics)

    def close(self) -> None:
        """Shut the collector down and flush the loggers; safe to call twice."""
        self.collector.shutdown()
        for target in self.loggers:
            target.flush()


def _check_parameters(loss: TurnPolicyLoss, optimizer: torch.optim.Optimizer) -> None:
    """What is trained is what is stepped: an optimizer of other parameters would run without a word."""
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    trained = {id(parameter): name for name, parameter in loss.named_parameters() if parameter.requires_grad}
    idle = sorted(trained[each] for each in trained.keys() - stepped)
    if idle or stepped - trained.keys():
        listed = ", ".join(idle[:3]) + (", ..." if len(idle) > 3 else "")
        raise ConfigError(
            f"The optimizer steps {len(stepped - trained.keys())} parameters that are none of {type(loss).__name__}'s trainable "
            f"ones, and leaves out {len(idle)} that are{f' ({listed})' if idle else ''}. Make the loss of the networks whose "
            "parameters the optimizer has (build_run: models.actor and models.critic), and set requires_grad_(False) on what "
            "is not to be trained."
        )


def _lr_factor(config: TrainerConfig, before: int, after: int) -> float:
    """The share of the learning rates in an update on the turns from ``before`` to ``after``: warm-up, then the schedule.

    The warm-up goes by the turns after them and the cosine by those before: no update has a rate of 0, neither the first nor
    the one that reaches ``max_steps``.
    """
    began, ended = before / config.max_steps, after / config.max_steps
    if began < config.warmup_fraction:
        return min(1.0, ended / config.warmup_fraction)
    if config.schedule == "constant":
        return 1.0
    rest = (min(1.0, began) - config.warmup_fraction) / max(1e-12, 1 - config.warmup_fraction)
    return config.min_lr_fraction + (1 - config.min_lr_fraction) * 0.5 * (1 + math.cos(math.pi * rest))


def _named_seconds(seconds: dict[str, float]) -> dict[str, float]:
    return {f"time/{phase}_s": value for phase, value in seconds.items()}


def _as_numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """What an evaluator returned, as loggers and checkpoints take it."""
    taken = sorted(name for name in metrics if named(name) and not name.startswith("evaluation"))
    if taken:
        raise ValueError(
            f"The evaluator returned {taken}, which are metrics of training: give them names of their own."
        )
    numbers = {}
    for name, value in metrics.items():
        try:
            numbers[name] = float(value)
        except (TypeError, ValueError) as error:
            raise TypeError(f"The evaluator's metric {name!r} is {value!r}; expected a number.") from error
    return numbers
