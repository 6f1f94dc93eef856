"""The training loop: :class:`LLMTrainer`.

It knows no algorithm: credit and objective are the loss's, sampling is the policy's, episodes are
the collector's. How a run is built from settings is :mod:`torchrl_llm.runs.build`; how several
processes train as one is :mod:`torchrl_llm.trainers.distributed`.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.checkpoint import GlobalRNGState
from torchrl.collectors import BaseCollector
from torchrl.data import ReplayBuffer
from torchrl.record.loggers import Logger

from torchrl_llm import keys
from torchrl_llm.collectors.stock import loop_view
from torchrl_llm.data import overlong
from torchrl_llm.envs import SeenTasks
from torchrl_llm.metrics import Timer, checked_metrics, credit_metrics, rollout_metrics, staleness, throughput
from torchrl_llm.metrics.rollouts import CREDIT_KEYS, ROLLOUT_KEYS
from torchrl_llm.modules import TokenScorer
from torchrl_llm.modules.kernels import Numerics
from torchrl_llm.modules.policy import TurnPolicy
from torchrl_llm.objectives import TurnLoss
from torchrl_llm.objectives.steps import group_names
from torchrl_llm.trainers import schedule
from torchrl_llm.trainers.callbacks import Callback, RunStore
from torchrl_llm.trainers.config import TrainerConfig, wrong_settings
from torchrl_llm.trainers.credit import Credit
from torchrl_llm.trainers.distributed import Distributed
from torchrl_llm.trainers.dynamic_sampling import DynamicSampling
from torchrl_llm.trainers.evaluation import Evaluator
from torchrl_llm.trainers.update import Update
from torchrl_llm.utils.fixed import Delegated, Fixed
from torchrl_llm.utils.interrupts import Interrupted, catch_signals, interruptible, run_begins
from torchrl_llm.utils.options import ConfigError, check_value
from torchrl_llm.weight_update import WeightSync

logger = logging.getLogger(__name__)
_END = object()

_SAVED = ("iteration", "steps", "episodes", "best_success", "history", "stop_reason", "elapsed")


class LLMTrainer:
    """Collects, credits, updates, evaluates, until a limit of ``config`` is reached.

    Args:
        collector: fills ``replay_buffer`` with one on-policy batch of whole episodes per iteration.
        replay_buffer: holds rows (its transform is :class:`~torchrl_llm.data.TurnsToSequence`).
        policy: the collector samples with it; it is told after each update that its weights are
            new.
        loss: one of the losses of :mod:`torchrl_llm.objectives`, with its value estimator made.
        optimizer: its first parameter group is the actor's, its second, if any, the critic's.
        config: the loop's settings.
        reference: scores the reference log-probs; None where the loss needs none.
        weight_sync: brings the new weights to a policy that has its own, after each update; None
            where the policy samples from the trained model itself.
        evaluator: run every ``config.evaluation_interval`` iterations; its metrics may have names
            of their own. If it fails (or a logger, or a callback), the iteration is saved before
            the error is raised.
        checkpoints: where the run is saved: every ``config.checkpoint_interval`` iterations, after
            an evaluation that is the best so far, and at the end.
        loggers: TorchRL loggers; each gets every metric.
        callbacks: watch the run.
        accelerator: device, mixed precision and backward; None makes a plain one, which takes a GPU
            if there is one. Loss and reference are moved to its device, in place, so that a policy
            with the same weights samples there too.
        offload: entered while episodes are collected or evaluated by an engine with weights of its
            own, as no forward runs here then
            (:meth:`~torchrl_llm.modules.ActorCritic.offload_base`); by default nothing is moved.
        numerics: what PyTorch is set to meanwhile, for the whole process; None leaves it as it is.
        seen_tasks: collects the tasks of training, for :func:`~torchrl_llm.trainers.evaluate`; None
            makes an empty one.

    The parts are attributes. Those that other parts hold too are read-only: assigning one raises
    ``AttributeError``. ``evaluator``, ``checkpoints``, ``loggers`` and ``callbacks`` may be
    replaced at any time.

    Attributes:
        scorer: scores and credits rows.
        dynamic_sampling: chooses the groups to learn from.
        updater: takes the optimizer steps.
        iteration, steps, episodes: iterations, turns and episodes so far.
        best_success: the highest success rate of an evaluation.
        history: the metrics of every iteration.
        stop_reason: why the run ends; ``None`` while it runs.
        elapsed: seconds of training up to the last checkpoint.
        unfinished: the metrics of an iteration that is to be evaluated and logged, in a run that
            was interrupted there.
        saved_iteration: the iteration of the last checkpoint; -1 before the first.
        rollouts: the collector as the loop sees it.
        env_names: the environments of a mixture.
        collector_state: the collector's state before the rollout or evaluation that runs, or was
            dropped; ``None``: the state that it has.
        module: computes the loss in all processes.
        distributed: the training processes.

    Raises:
        ConfigError: parts that do not go together, such as an optimizer that steps other parameters
            than the loss's.
    """

    accelerator = Fixed[Accelerator]()
    collector = Fixed[BaseCollector]()
    config = Fixed[TrainerConfig]()
    distributed = Fixed[Distributed]("LLMTrainer(accelerator=...)")
    loss = Fixed[TurnLoss]("build_run(config, make_loss=...), or LLMTrainer(loss=...)")
    module = Fixed[torch.nn.Module]("it wraps the loss of LLMTrainer(loss=...)", at="updater.module")
    optimizer = Fixed[torch.optim.Optimizer](at="updater.optimizer")
    policy = Fixed[TurnPolicy]()
    reference = Fixed[TokenScorer | None]()
    replay_buffer = Fixed[ReplayBuffer]()
    weight_sync = Fixed[WeightSync | None]()
    skipped_in_a_row = Delegated[int]("updater.skipped_in_a_row")
    """Optimizer steps that were skipped since the last one that was taken."""

    def __init__(
        self,
        *,
        collector: BaseCollector,
        replay_buffer: ReplayBuffer,
        policy: TurnPolicy,
        loss: TurnLoss,
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
        check_value("config", config, TrainerConfig)  # RunSettings has it in its section trainer
        self.collector, self.replay_buffer, self.policy, self.loss = collector, replay_buffer, policy, loss
        self.config, self.reference, self.weight_sync = config, reference, weight_sync
        self.evaluator, self.checkpoints = evaluator, checkpoints
        self.loggers, self.callbacks = tuple(loggers), tuple(callbacks)
        self.offload, self.numerics, self.timer = offload, numerics or Numerics(), Timer()
        self.accelerator = accelerator or Accelerator()
        self.distributed = Distributed.of(self.accelerator)
        self.generator = torch.Generator().manual_seed(config.seed)
        self.rollouts = loop_view(collector)
        self.rollouts.interruptible = partial(interruptible, all_reduce_max=self.distributed.all_reduce_max)
        self.env_names: tuple[str, ...] = self.rollouts.env_names
        # Not through accelerate, which steps a scheduler once for each process.
        self.schedule = schedule.LearningRateSchedule(optimizer, config, group_names(loss))
        self.updater = self._make_update(optimizer)
        self.scorer = Credit(
            loss,
            reference,
            config=config,
            distributed=self.distributed,
            max_output_tokens=policy.sampling.max_output_tokens,
            # Stale tokens were sampled with other weights, however alike the computation.
            logprobs_match_trainer=lambda: self.logprobs_match_trainer and not self.rollouts.max_staleness,
            around=self._scoring,
        )
        self.dynamic_sampling = DynamicSampling(self.scorer)
        # After the update was made, which shards the weights.
        if weight_sync is not None:
            weight_sync.parameter_gather = self.distributed.parameter_gather
        self.check_options()
        self.seen_tasks = SeenTasks() if seen_tasks is None else seen_tasks
        self.iteration = self.steps = self.episodes = 0
        self.best_success, self.elapsed = -math.inf, 0.0
        self.history: list[dict[str, float]] = []
        self.stop_reason: str | None = None
        self.unfinished: dict[str, float] | None = None
        self.saved_iteration = -1
        self.collector_state: dict[str, Any] | None = None
        self._rng: dict[str, Any] | None = None
        self._wanted = 0  # episodes that dynamic sampling fills an update with
        self.start_clock()

    def _make_update(self, optimizer: torch.optim.Optimizer) -> Update:
        return Update(
            self.loss,
            optimizer,
            self.distributed,
            config=self.config,
            frozen=[] if self.reference is None else [self.reference],
            generator=self.generator,
            logprobs_match_trainer=lambda: self.logprobs_match_trainer,
            on_step=self._tell_of_step,
        )

    def _tell_of_step(self, rows: TensorDictBase, metrics: dict[str, Tensor]) -> None:
        for callback in self.callbacks:
            callback.on_minibatch(self, rows, metrics)

    @contextmanager
    def _scoring(self) -> Iterator[None]:
        with self.timer("score"), self.numerics.learning():
            yield

    def check_options(self) -> None:
        """Refuse settings of the loop that do not go with the other parts.

        Raises:
            ConfigError: names the setting and what to do.
        """
        groups, limit = len(self.optimizer.param_groups), self.policy.sampling.max_output_tokens
        for problem in wrong_settings(self.config, self.loss, num_groups=groups, max_output_tokens=limit):
            raise ConfigError(problem)

    def replace_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Train with another optimizer, of new parameters (merged adapters); with one process only.

        Args:
            optimizer: of all trainable parameters of the loss, with the groups and rates of the old
                one; it has not stepped.

        Raises:
            ConfigError: there are several processes, whose gradients are averaged for the old
                parameters; or the optimizer's parameters are not the loss's, and the trainer
                continues with the old one.
        """
        self.distributed.check_replaceable()
        rates = schedule.LearningRateSchedule(optimizer, self.config, group_names(self.loss))
        # Before anything is assigned: it may refuse the optimizer.
        updater = self._make_update(optimizer)
        updater.skipped_in_a_row = self.skipped_in_a_row
        self.schedule, self.updater = rates, updater

    @property
    def logprobs_match_trainer(self) -> bool:
        """Whether the sampler's log-probs are the trained model's own, so that none need be scored
        before the update."""
        # Autocast is around the training's forwards only: the sampler then computes in another
        # precision.
        everywhere = self.policy.logprobs_match_trainer and self.rollouts.logprobs_match_trainer
        return everywhere and not self.distributed.autocasts

    # ---------------------------------------- where the run is

    def start_clock(self) -> None:
        """Start the clock at the seconds of the last checkpoint."""
        # Monotonic: a clock that is set during the run must not end it by max_seconds.
        self._started = time.monotonic() - self.elapsed

    @property
    def seconds(self) -> float:
        """Seconds of training, those before a resume included."""
        return time.monotonic() - self._started

    def state_dict(self) -> dict[str, Any]:
        """The counters and generators of the run, without weights, optimizer and collector; to be
        taken between iterations."""
        return {name: vars(self)[name] for name in _SAVED} | {
            "generator": self.generator.get_state(),
            "unfinished": self.unfinished,
            "skipped_in_a_row": self.skipped_in_a_row,
            "policy_version": self.policy.policy_version,
            **self.seen_tasks.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where :meth:`state_dict` was taken."""
        for name in _SAVED:
            setattr(self, name, state_dict[name])
        self.generator.set_state(state_dict["generator"])
        self.unfinished = state_dict.get("unfinished")
        self.skipped_in_a_row = state_dict.get("skipped_in_a_row", 0)
        self.policy.policy_version = state_dict["policy_version"]
        self.seen_tasks.load_state_dict(state_dict)
        self.saved_iteration = self.iteration

    # ---------------------------------------- the loop

    def train(self) -> list[dict[str, float]]:
        """Run until a limit is reached; returns :attr:`history`. Collector and loggers are closed
        at the end.

        SIGINT and SIGTERM are caught (:mod:`torchrl_llm.utils.interrupts`): a rollout or an
        evaluation is dropped, an update is finished, and the run is saved so that it resumes to the
        same bytes.

        Raises:
            Interrupted: a signal has come; it ends the process with the signal's exit code if
                nobody catches it.
        """
        self.start_clock()
        self.check_options()  # again: the estimator may be another
        resume = "resume=True and else the same settings, without overwrite and resume_from"
        # They end from right to left: the run is saved before the collector shuts down, and the
        # handlers go last.
        products = self.numerics.products()
        with catch_signals(resume), products, closing(self), ExitStack() as ending, self.saved_if_interrupted():
            ending.callback(self._end_callbacks)
            for callback in self.callbacks:
                callback.on_start(self)
            run_begins()
            batches = iter(self.collector)
            if self.unfinished is not None:
                self.finish(self.unfinished)
            while self.stop_reason is None:
                self._stop_if_interrupted()
                rows = self.collect(batches)
                if rows is not None:
                    self.finish(self.iterate(rows))
            self.save_if_new()
            logger.info("training ends: %s", self.stop_reason)
            # A signal during the last save ends the process with its exit code too.
            self._stop_if_interrupted()
        return self.history

    def collect(self, batches: Iterator[object]) -> TensorDictBase | None:
        """The rows ``[B]`` of one iteration; None, and a :attr:`stop_reason`, when the collector
        has no more.

        One batch of the collector; with ``config.dynamic_sampling``, as many as it takes (and the
        setting allows) until one batch's number of episodes is in groups that get credit.
        """
        # A resumed run starts without cached contexts. Drop the cache, which may hold contexts of
        # an evaluation, to be the same.
        self.policy.drop_cache()
        # also here: dynamic sampling asks the estimator which groups get credit
        self._weigh_terms(self.steps)
        with self.droppable():
            rows = self._next_batch(batches)
            if rows is None or not self.config.dynamic_sampling:
                return rows
            # Of the first batch: a stock collector does not say how many episodes it delivers.
            self._wanted = self.batch_size(rows)
            return self.dynamic_sampling.fill(rows, self._wanted, lambda: self._next_batch(batches))

    def batch_size(self, rows: TensorDictBase) -> int:
        """How many episodes one batch of the collector has in all processes, where it delivered
        ``rows``."""
        own = self.rollouts.batch_size
        return int(self.distributed.all_reduce_sum(rows.shape[0] if own is None else own))

    def _next_batch(self, batches: Iterator[object]) -> TensorDictBase | None:
        with self.timer("rollout"), self.policy_weights(here=self.rollouts.runs_here):
            # All stop together: a process that continued alone would wait for the others in the
            # update.
            if self.distributed.all_reduce_max(next(batches, _END) is _END):
                self.stop_reason = "the collector reached its own limit"
                return None
            # The storage returns a lazy stack, which stacks its rows again at each access.
            batch = self.replay_buffer[:].contiguous().to(self.distributed.device)
            self.replay_buffer.empty(empty_write_count=False)
        if self.config.dynamic_sampling:
            sync = self.weight_sync if self.dynamic_sampling.reads_scores else None
            with nullcontext() if sync is None else sync.asleep():
                self.dynamic_sampling.score(batch)
        return batch

    @contextmanager
    def policy_weights(self, *, here: bool = True) -> Iterator[None]:
        """Inside, a policy that samples ``here`` from the trained model has its full weights; where
        none does, they are offloaded."""
        full = here and not self.policy.owns_weights
        with self.numerics.products(), self.distributed.gathered_parameters() if full else self.offload():
            yield

    def iterate(self, batch: TensorDictBase) -> dict[str, float]:
        """One iteration on the rows that :meth:`collect` returned: choose, score, credit, update;
        returns its metrics."""
        collected, before = self.distributed.all_gather_rows(batch, ROLLOUT_KEYS), self.steps
        self.steps += int(collected[keys.TURN_MASK].sum())
        self.episodes += collected.shape[0]
        self.schedule.set(before, self.steps)
        self._weigh_terms(before)
        if keys.TASK_ID in collected:
            self.seen_tasks.add(collected[keys.TASK_ID].cpu())
        else:
            self.seen_tasks.complete = False
        dynamic = bool(self.config.dynamic_sampling)
        chosen = self.dynamic_sampling.choose(batch, self._wanted) if dynamic else batch
        num_chosen = self.distributed.all_reduce_sum(self.distributed.own_rows(chosen).shape[0])
        metrics = rollout_metrics(collected, self.env_names)
        metrics["data/frac_nonzero_variance"] = num_chosen / collected.shape[0]
        metrics["data/staleness"] = staleness(collected, self.policy.policy_version)
        if num_chosen:
            metrics |= self.learn(chosen, scored=dynamic and self.dynamic_sampling.reads_scores)
        else:
            logger.warning("iteration %d: no group has an advantage; nothing to learn from", self.iteration)
        self.iteration += 1
        self._check_limits()
        return metrics | self._progress(collected)

    def _weigh_terms(self, before: int) -> None:
        """The loss's terms that fall during a run, for an update on turns after the first
        ``before``."""
        self.loss.entropy_fraction = schedule.entropy_fraction(self.config, before)
        self.loss.kl_fraction = schedule.kl_fraction(self.config, before)

    def learn(self, batch: TensorDictBase, *, scored: bool = False) -> dict[str, float]:
        """Score, credit and update on rows ``[B]``; then the policy gets the new weights.

        Args:
            batch: whole groups. Where they have no ``"sample_log_prob"``, or rows that nobody
                sampled (NaN, as in rows of :func:`~torchrl_llm.data.read_transcripts`), ratios are
                taken against the present weights, which are scored first. Scores and credit are
                written into them, or into a copy where they are on another device than the weights.
            scored: they hold the scores of the present weights already, as :meth:`collect` writes
                them for dynamic sampling.

        Raises:
            KeyError: there is no ``"sample_log_prob"``, and a correction for the sampler needs it.
            ValueError: rewards, scores or credit are NaN or infinite.
            NonFiniteGradientError: too many gradients in a row were.
        """
        sleeper = self.weight_sync if self.weight_sync is not None and self.weight_sync.sleep_level else None
        if sleeper is not None:
            # Before the first forward, which needs the engine's memory.
            sleeper.sleep()
        batch = self.distributed.on_device(batch)
        if not scored:
            self.scorer.score(batch)
        self.scorer.credit(batch)
        # After the credit: baselines and normalization count the episodes that are left out.
        kept = batch[~overlong(batch, self.policy.sampling.max_output_tokens)] if self.config.overlong_filter else batch
        own = self.distributed.own_rows(kept)  # lent rows are never overlong
        num_kept = self.distributed.all_reduce_sum(own.shape[0])
        # A whole group, because GroupRelative refuses a part of one.
        kept = self.distributed.nonempty(kept, batch, self.rollouts.group_size)
        metrics, added = {}, dict[str, float]()
        if num_kept:
            for callback in self.callbacks:
                callback.on_batch(self, kept, added)
            # Before the update: a bad one leaves the weights as they were.
            metrics = checked_metrics(added, source="callbacks")
            metrics |= credit_metrics(self.distributed.all_gather_rows(own, CREDIT_KEYS))
            with self.timer("update"):
                metrics |= self.update(kept)
        else:
            logger.warning("iteration %d: every episode is overlong; nothing to learn from", self.iteration)
        # The sync also wakes the engine.
        if num_kept or sleeper is not None:
            metrics |= self._send_weights()
        return metrics

    def update(self, batch: TensorDictBase) -> dict[str, float]:
        """``config.epochs`` passes of optimizer steps over ``batch``; returns the means of the
        loss's metrics.

        A step that reaches ``config.target_kl`` is the last.
        """
        with self.numerics.learning():
            return self.updater(self.distributed.on_device(batch), self.iteration)

    def _send_weights(self) -> dict[str, float]:
        if self.weight_sync is None:
            self.policy.weights_changed()
            return {}
        with self.timer("sync"):
            self.weight_sync.send()
        gap = self.weight_sync.parity_gap
        return {} if gap is None else {"policy/parity_gap": gap}

    # ---------------------------------------- the end of an iteration, and of a run

    def finish(self, metrics: dict[str, float]) -> None:
        """End an iteration: evaluate when it is due, log, save."""
        self.unfinished = metrics
        interval = self.config.evaluation_interval
        if self.evaluator is not None and interval and (self.stop_reason or schedule.is_due(interval, self.iteration)):
            metrics = metrics | self.evaluate(self.evaluator) | self.timer.read()
        self.unfinished = None
        with self.saved_if_it_fails(metrics):
            self._log(metrics)
        self.save_if_due(metrics)

    def _log(self, metrics: dict[str, float]) -> None:
        # First: if a logger raises, the iteration that is saved has its metrics.
        self.history.append(metrics)
        # Each is called, whatever the others raise: a resumed run does not come back to this
        # iteration, and what a callback does in it, such as a stage of a curriculum, would be lost.
        with ExitStack() as last_to_first:
            for callback in reversed(self.callbacks):
                # A copy: what is added now would come too late for the loggers, and for some of the
                # callbacks.
                last_to_first.callback(callback.on_iteration, self, dict(metrics))
            for target in reversed(self.loggers):
                last_to_first.callback(target.log_metrics, metrics, step=self.steps)

    def evaluate(self, evaluator: Evaluator) -> dict[str, float]:
        """The evaluator's metrics; takes note of the success rate, if it reports one."""
        with self.saved_if_it_fails():
            with self.droppable(), self.timer("evaluation"), self.policy_weights():
                metrics = checked_metrics(interruptible(evaluator))
                for callback in self.callbacks:
                    callback.on_evaluation(self, metrics)
                metrics = checked_metrics(metrics, source="callbacks")
            self.stop_reason = schedule.success_reached(self.config, metrics) or self.stop_reason
        self.best_success = max(self.best_success, metrics.get("evaluation/success", self.best_success))
        return metrics

    def _progress(self, collected: TensorDictBase) -> dict[str, float]:
        seconds = self.timer.read()
        return {
            "rollout/episodes": float(self.episodes),
            "rollout/steps": float(self.steps),
            "policy/version": float(self.policy.policy_version),
            **self.schedule.metrics(),
            **({} if self.loss.entropy_bound is None else {"optim/entropy_target": self.loss.entropy_bound}),
            **({} if self.config.kl_decay_fraction is None else {"optim/kl_fraction": self.loss.kl_fraction}),
            **self.distributed.all_reduce_counts(self.rollouts.metrics()),
            **seconds,
            **throughput(collected, seconds),
        }

    def _check_limits(self) -> None:
        # Clocks differ, and one of several processes must not end the run alone.
        seconds = self.distributed.broadcast(self.seconds)
        reached = schedule.limit_reached(self.config, steps=self.steps, iteration=self.iteration, seconds=seconds)
        self.stop_reason = reached or self.stop_reason

    def _stop_if_interrupted(self) -> None:
        interruptible(lambda: None, self.distributed.all_reduce_max)

    def reconsider(self) -> None:
        """Forget why the run ended and look at the limits again: they may be others since it was
        resumed."""
        self.stop_reason = None
        self.start_clock()
        self._check_limits()

    def _end_callbacks(self) -> None:
        # Each ends, whatever the others raise; the first, which may hold the folder that the
        # others write to, as the last.
        with ExitStack() as last_to_first:
            for callback in self.callbacks:
                last_to_first.callback(callback.on_end, self)

    def close(self) -> None:
        """Shut the collector down and flush the loggers, also if one of them fails; safe to call
        twice."""
        with ExitStack() as last_to_first:
            for target in self.loggers:
                last_to_first.callback(target.flush)
            last_to_first.callback(self.collector.shutdown)

    # ---------------------------------------- saving

    def save(self, metrics: Mapping[str, float], *, early: bool = False) -> None:
        """Save the run, if it has checkpoints, after an iteration with these metrics."""
        if self.checkpoints is not None:
            self.elapsed = self.seconds
            self.checkpoints.save(self, metrics, early=early)
            self.saved_iteration = self.iteration

    def save_if_due(self, metrics: Mapping[str, float]) -> None:
        """Save the run after its last iteration, after its best evaluation, and every
        ``checkpoint_interval`` iterations."""
        # Not ">": evaluate() has put this rate into best_success already.
        best = "evaluation/success" in metrics and metrics["evaluation/success"] >= self.best_success
        if self.stop_reason or best or schedule.is_due(self.config.checkpoint_interval, self.iteration):
            self.save(metrics)

    def save_if_new(self, *, early: bool = False) -> None:
        """Save the run unless its last iteration is saved."""
        if self.saved_iteration != self.iteration:
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
            if self.distributed.saves_alone:
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
        self.collector_state = None if self.rollouts.background else self.collector.state_dict()
        self._rng = GlobalRNGState().state_dict()
        yield
        # No finally: after a signal or an error they stay, for the save that follows.
        self.collector_state = self._rng = None

    @contextmanager
    def saved_if_interrupted(self) -> Iterator[None]:
        """For a whole run: a signal saves it as it was before the rollout or evaluation that the
        signal drops."""
        try:
            yield
        except Interrupted as interrupted:
            interrupted.state = f" after {self.iteration} iterations"
            if self._rng is not None:
                # Before the save, which writes the generators.
                GlobalRNGState().load_state_dict(self._rng)
            if self.checkpoints is None:
                interrupted.state += ", of which nothing is saved (save_checkpoints=False)"
                interrupted.resumable = False
            self.save_if_new(early=True)
            raise
