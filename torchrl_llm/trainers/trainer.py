"""The training loop: :class:`LLMTrainer`.

It knows no algorithm: credit and objective are the loss's, sampling is the policy's, episodes are
the collector's. How a run is built from settings is :mod:`torchrl_llm.runs.build`; how several
processes train as one is :mod:`torchrl_llm.trainers.distributed`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import cached_property

import torch
from tensordict import TensorDictBase

from torchrl_llm import keys
from torchrl_llm.data import cat_rows, overlong
from torchrl_llm.metrics import credit_metrics, rollout_metrics, staleness, throughput
from torchrl_llm.metrics.rollouts import CREDIT_KEYS, ROLLOUT_KEYS
from torchrl_llm.trainers.base import Evaluator, TrainerBase
from torchrl_llm.trainers.evaluation import checked_metrics
from torchrl_llm.trainers.loss_state import settle
from torchrl_llm.trainers.saving import RunSaver
from torchrl_llm.trainers.schedule import entropy_fraction, is_due, kl_fraction, limit_reached, success_reached
from torchrl_llm.trainers.update import RowScorer, Updater
from torchrl_llm.utils.interrupts import catch_signals, interruptible, run_begins

logger = logging.getLogger(__name__)
_END = object()


class LLMTrainer(TrainerBase):
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

    The attributes are those of :class:`~torchrl_llm.trainers.base.TrainerBase` and the parts, which
    are read-only, because other parts hold them too: assigning one raises ``AttributeError``.
    ``evaluator``, ``checkpoints``, ``loggers`` and ``callbacks`` may be replaced at any time.

    Raises:
        ConfigError: parts that do not go together, such as an optimizer that steps other parameters
            than the loss's.
    """

    _wanted = 0
    """Episodes that dynamic sampling fills an update with."""

    @cached_property
    def scorer(self) -> RowScorer:
        """Scores and credits rows, and chooses those to learn from."""
        return RowScorer(self)

    @cached_property
    def updater(self) -> Updater:
        """Takes the optimizer steps."""
        return Updater(self)

    @cached_property
    def saver(self) -> RunSaver:
        """Saves the run."""
        return RunSaver(self)

    def replace_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Train with another optimizer, of new parameters (merged adapters); with one process only.

        Args:
            optimizer: of all trainable parameters of the loss, with the groups and rates of the old
                one; it has not stepped.

        Raises:
            ConfigError: there are several processes, whose gradients are averaged for the old
                parameters.
        """
        self.distributed.check_replaceable()
        self.prepare(optimizer)

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
        settle(self)
        self.check_options()  # again: the estimator may be another
        resume = "resume=True and else the same settings, without overwrite and resume_from"
        # They end from right to left: the run is saved before the collector shuts down, and the
        # handlers go last.
        products = self.numerics.products()
        with catch_signals(resume), products, closing(self), self._end_watched(), self.saver.saved_if_interrupted():
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
            self.saver.save_if_new()
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
        with self.saver.droppable():
            rows = self._next_batch(batches)
            if rows is None or not self.config.dynamic_sampling:
                return rows
            # Of the first batch: a stock collector does not say how many episodes it delivers.
            self._wanted = self.scorer.batch_size(rows)
            self.scorer.score_for_credit(rows)
            for _ in range(self.config.dynamic_sampling - 1):
                if self.scorer.found(rows) >= self._wanted:
                    break
                more = self._next_batch(batches)
                if more is None:
                    break
                self.scorer.score_for_credit(more)
                rows = cat_rows([rows, more])
        return rows

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
        chosen = self.scorer.choose(batch, self._wanted) if dynamic else batch
        num_chosen = self.distributed.all_reduce_sum(chosen.shape[0])
        metrics = rollout_metrics(collected, self.env_names)
        metrics["data/frac_nonzero_variance"] = num_chosen / collected.shape[0]
        metrics["data/staleness"] = staleness(collected, self.policy.policy_version)
        if num_chosen:
            # The spare rows are a whole group, because GroupRelative refuses a part of one.
            rows = self.distributed.nonempty(chosen, batch[: self.rollouts.group_size])
            metrics |= self.learn(rows, scored=dynamic and self.scorer.credit_reads_scores)
        else:
            logger.warning("iteration %d: no group has an advantage; nothing to learn from", self.iteration)
        self.iteration += 1
        self._check_limits()
        return metrics | self._progress(collected)

    def _weigh_terms(self, before: int) -> None:
        """The loss's terms that fall during a run, for an update on turns after the first
        ``before``."""
        self.loss.entropy_fraction = entropy_fraction(self.config, before)
        self.loss.kl_fraction = kl_fraction(self.config, before)

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
        kept = self.distributed.nonempty(kept, batch[: self.rollouts.group_size])
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
            return self.updater.update(self.distributed.on_device(batch))

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
        if self.evaluator is not None and interval and (self.stop_reason or is_due(interval, self.iteration)):
            metrics = metrics | self.evaluate(self.evaluator) | self.timer.read()
        self.unfinished = None
        with self.saver.saved_if_it_fails(metrics):
            self._log(metrics)
        self.saver.save_if_due(metrics)

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
        with self.saver.saved_if_it_fails():
            with self.saver.droppable(), self.timer("evaluation"), self.policy_weights():
                metrics = checked_metrics(interruptible(evaluator))
                for callback in self.callbacks:
                    callback.on_evaluation(self, metrics)
                metrics = checked_metrics(metrics, source="callbacks")
            self.stop_reason = success_reached(self.config, metrics) or self.stop_reason
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
        reached = limit_reached(self.config, steps=self.steps, iteration=self.iteration, seconds=seconds)
        self.stop_reason = reached or self.stop_reason

    def _stop_if_interrupted(self) -> None:
        interruptible(lambda: None, self.distributed.all_reduce_max)

    def reconsider(self) -> None:
        """Forget why the run ended and look at the limits again: they may be others since it was
        resumed."""
        self.stop_reason = None
        self.start_clock()
        self._check_limits()

    @contextmanager
    def _end_watched(self) -> Iterator[None]:
        try:
            yield
        finally:
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
