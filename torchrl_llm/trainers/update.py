"""The two halves of an update: :class:`RowScorer` writes scores and credit into rows,
:class:`Updater` takes optimizer steps on them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.objectives.value import ValueEstimatorBase

from torchrl_llm import data, keys
from torchrl_llm.metrics.rollouts import loss_metric
from torchrl_llm.modules.positions import prefix_cost
from torchrl_llm.objectives import TurnEstimator, total, write_loss_weights
from torchrl_llm.objectives.steps import clip_gradients
from torchrl_llm.trainers.base import TrainerBase
from torchrl_llm.trainers.distributed import check_accumulation
from torchrl_llm.trainers.evaluation import checked_metrics
from torchrl_llm.trainers.finite import all_finite, skip_step
from torchrl_llm.trainers.fsdp import full_on_cpu
from torchrl_llm.trainers.schedule import GROUPS
from torchrl_llm.trainers.trust_region import TrustRegion, Unbounded

SKIPPED = "optim/skipped_steps"


class RowScorer:
    """Scores rows with weights that do not change meanwhile, and credits them.

    Args:
        run: the trainer.
    """

    def __init__(self, run: TrainerBase) -> None:
        self.run = run

    @property
    def estimator(self) -> ValueEstimatorBase:
        """The loss's value estimator, which takes its statistics over all ranks if it can."""
        # not kept: loss.make_value_estimator may replace it during a run
        estimator = self.run.loss.value_estimator
        if isinstance(estimator, TurnEstimator) and estimator.process_group is None:
            estimator.process_group = self.run.distributed.process_group
        return estimator

    @property
    def scores_old(self) -> bool:
        """Whether the log-probs that ratios are taken against are scored, and not the sampler's."""
        if self.run.loss.tensor_keys.sample_log_prob not in self.run.loss.in_keys:
            return False  # it takes no ratios
        if self.run.config.old_log_probs == "auto":
            return (
                not self.run.logprobs_match_trainer
                or self.run.credit_corrects_sampler
                # Stale tokens were sampled with other weights, however alike the computation.
                or self.run.rollouts.max_staleness > 0
            )
        return self.run.config.old_log_probs == "scorer"

    @property
    def reads_reference(self) -> bool:
        """Whether the log-probs of the reference are read: a stock loss reads none once its KL's
        weight has fallen to 0."""
        loss = self.run.loss
        return loss.kl_fraction > 0 or loss.tensor_keys.ref_log_prob in loss.in_keys or self.credit_reads_reference

    @property
    def credit_reads_reference(self) -> bool:
        """Whether the estimator reads them: a stock one, while the KL that it takes out of the
        rewards has a weight."""
        return keys.REF_LOG_PROB in self.estimator.in_keys

    # ---------------------------------------- scores and credit

    @contextmanager
    def _scoring(self) -> Iterator[None]:
        """The training's device and precision, timed."""
        with self.run.timer("score"), self.run.numerics.learning(), self.run.accelerator.autocast():
            yield

    @torch.no_grad()
    def score(self, batch: TensorDictBase) -> None:
        """Write the inputs of the loss that need frozen weights into rows ``[B]``: old and
        reference log-probs, values."""
        limit, loss = self.run.config.micro_batch_tokens, self.run.loss
        scores_old = self._lacks_log_probs(batch) or self.scores_old
        with self._scoring(), self.run.distributed.gathered_parameters():
            if scores_old:
                data.apply_in_micro_batches(loss.actor_network, batch, limit, prefix_cost(loss.actor_network))
                batch.rename_key_(keys.LOG_PROB, keys.OLD_LOG_PROB)
            if self.run.reference is not None and self.reads_reference:
                data.apply_in_micro_batches(self.run.reference, batch, limit, prefix_cost(self.run.reference))
                batch.rename_key_(keys.LOG_PROB, keys.REF_LOG_PROB)
            if loss.critic_network is not None:
                data.apply_in_micro_batches(loss.critic_network, batch, limit, prefix_cost(loss.critic_network))

    def _lacks_log_probs(self, batch: TensorDictBase) -> bool:
        """Whether ratios are taken and rows have no log-probs to take them against: those of other
        collectors may not.

        Those of conversations that nobody sampled are NaN; they are deleted then.
        """
        name = self.run.loss.tensor_keys.sample_log_prob
        if name not in self.run.loss.in_keys:
            return False
        if not self.run.distributed.all_reduce_max(name not in batch or _has_unknown(batch, batch[name])):
            return False
        loss, needs = self.run.loss, None
        if self.run.config.old_log_probs == "sampler":
            needs = 'old_log_probs="sampler" takes ratios against them: set "auto", which scores the old ones'
        elif loss.sampler_correction is not None:
            needs = f"sampler_correction={loss.sampler_correction!r} corrects for them: leave it out"
        elif self.run.credit_corrects_sampler:
            needs = f"{type(loss.value_estimator).__name__} corrects for them: choose another estimator"
        if needs is not None:
            raise KeyError(f"The rows have no {name!r}, the log-probs of the policy that sampled, and {needs}.")
        if name in batch:
            batch.del_(name)
        return True

    def credit(self, batch: TensorDictBase) -> TensorDictBase:
        """Shape the rewards of scored rows ``[B]`` as the settings say, and write the estimator's
        credit."""
        config, limit = self.run.config, self.run.policy.sampling.max_output_tokens
        if config.overlong_penalty:
            buffer = config.overlong_buffer or limit
            data.penalize_overlong(batch, config.overlong_penalty, max_response_length=limit, buffer=buffer)
        return self._estimate(batch)

    def _estimate(self, batch: TensorDictBase) -> TensorDictBase:
        with self._scoring():
            return self.estimator(batch)

    # ---------------------------------------- dynamic sampling

    @property
    def credit_reads_scores(self) -> bool:
        """Whether advantages depend on log-probs or values that are scored; if not, only rows to
        learn from are scored."""
        corrects, critic = self.run.credit_corrects_sampler, self.run.loss.critic_network
        return self.credit_reads_reference or corrects or critic is not None

    def score_for_credit(self, rows: TensorDictBase) -> None:
        """:meth:`score` one batch of the collector, if its advantages depend on it: once, because
        weights do not change meanwhile."""
        if self.credit_reads_scores:
            sync = self.run.weight_sync
            with nullcontext() if sync is None else sync.asleep():
                self.score(rows)

    def batch_size(self, rows: TensorDictBase) -> int:
        """How many episodes one batch of the collector has on all ranks, where it delivered
        ``rows``."""
        own = self.run.rollouts.batch_size
        return int(self.run.distributed.all_reduce_sum(rows.shape[0] if own is None else own))

    def found(self, rows: TensorDictBase) -> int:
        """How many episodes of ``rows``, on all ranks, are in groups that get credit."""
        return int(self.run.distributed.all_reduce_sum(int(self._nonzero_variance(rows).sum())))

    def choose(self, rows: TensorDictBase, wanted: int) -> TensorDictBase:
        """The rows of groups that get credit: at most ``wanted`` on all ranks, the first in the
        order in which one process collects them."""
        chosen = rows[self._nonzero_variance(rows)]
        ids = zip(chosen[keys.GROUP_ID].tolist(), chosen[keys.EPISODE_ID].tolist(), strict=True)
        first = [episode for _, episode in sorted(self.run.distributed.all_gather(list(ids)))[:wanted]]
        return chosen[torch.isin(chosen[keys.EPISODE_ID], torch.tensor(first, dtype=torch.int64, device=rows.device))]

    def _nonzero_variance(self, rows: TensorDictBase) -> Tensor:
        """Which rows are of groups that the update would learn from, ``[B]`` bool: what the
        estimator makes of the score decides."""
        # In a copy: the rows that are chosen are credited again, as one batch. Without
        # `overlong_penalty`: it would find every group whose answers differ in length, also where
        # all of them lost (DAPO judges its groups by the answers alone).
        return data.nonzero_variance(self._estimate(rows.copy()))


class Updater:
    """Takes the optimizer steps of an iteration.

    Args:
        run: the trainer.
    """

    def __init__(self, run: TrainerBase) -> None:
        self.run = run

    @property
    def warms_up_critic(self) -> bool:
        """Whether the actor's parameters take no step in this iteration."""
        return self.run.iteration < self.run.config.critic_warmup

    def update(self, batch: TensorDictBase) -> dict[str, float]:
        """Take the optimizer steps of an update on rows ``[B]``; returns the means of their
        metrics."""
        target, steps, added = self.run.config.target_kl, [], []
        region = Unbounded() if target is None or self.warms_up_critic else TrustRegion(self.run, batch, target)
        for minibatch, last in self._passes(batch):
            metrics = self.accumulate(self.micro_batches(minibatch))
            if region.settle(metrics.get("policy/kl_old")):
                # The gradient was taken where the step before led, and not where it is now.
                self.run.optimizer.zero_grad(set_to_none=True)
                break
            metrics |= self.step(region)
            if last:
                region.settle(None)
            steps.append(metrics)
            added.append(self._added(minibatch, metrics))
        means = _means(steps) | {SKIPPED: sum(metrics[SKIPPED].item() for metrics in steps)}
        means |= checked_metrics(_means(added), source="callbacks")
        return means | self.log_prob_gap(batch, steps[0]) | _at_start(steps[0]) | region.metrics()

    def _added(self, minibatch: TensorDictBase, metrics: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What the callbacks add to the metrics of an optimizer step, or change in them."""
        heard = dict(metrics)
        for callback in self.run.callbacks:
            callback.on_minibatch(self.run, minibatch, heard)
        return {name: torch.as_tensor(value).float() for name, value in heard.items() if value is not metrics.get(name)}

    def _passes(self, batch: TensorDictBase) -> Iterator[tuple[TensorDictBase, bool]]:
        """The optimizer batches of all epochs, each with whether it is the last."""
        for left in reversed(range(self.run.config.epochs)):
            *others, final = self.minibatches(batch)
            yield from ((rows, False) for rows in others)
            yield final, not left

    def minibatches(self, batch: TensorDictBase) -> list[TensorDictBase]:
        """Rows ``[B]``, shuffled and cut into optimizer batches; equally many on all ranks, none
        empty."""
        run, distributed = self.run, self.run.distributed
        # again: an Accelerator made since then may have changed it
        check_accumulation(run.accelerator)
        own = distributed.own_rows(batch)
        size = run.config.minibatch_size or int(distributed.all_reduce_sum(own.shape[0]))
        found = data.minibatches(own, size, generator=run.generator, process_group=distributed.process_group)
        # One spare row will do: the credit is written, and no groups are compared any more.
        return [distributed.nonempty(rows, batch[:1]) for rows in found]

    def micro_batches(self, rows: TensorDictBase) -> list[TensorDictBase]:
        """An optimizer batch with its loss weights, cut so that a part fits into memory; equally
        many on all ranks."""
        distributed = self.run.distributed
        weighted, loss = write_loss_weights(rows, self.run.loss, distributed.process_group), self.run.loss
        cost = prefix_cost(loss.actor_network, *([loss.critic_network] if loss.critic_network is not None else []))
        return distributed.equal_count(data.micro_batches(weighted, self.run.config.micro_batch_tokens, cost))

    def accumulate(self, parts: list[TensorDictBase]) -> dict[str, Tensor]:
        """Accumulate the gradient of one optimizer batch: losses are weighted sums, so its
        micro-batches ``parts`` add up."""
        outputs = []
        for i, part in enumerate(parts):
            # DDP averages gradients once an optimizer step, with the last micro-batch.
            with self.run.distributed.no_sync(self.run.module) if i + 1 < len(parts) else nullcontext():
                with self.run.accelerator.autocast():
                    out = self.run.module(part)
                loss = total(out)
                if self.warms_up_critic:
                    loss = self.run.distributed.reach_all_parameters(out["loss_critic"], loss)
                self.run.distributed.backward(loss)
            outputs.append(out)
        merged = self.run.distributed.merge_outputs(outputs)
        padding = torch.tensor(data.padding_share(parts), dtype=torch.float64)
        return {name: value for key, value in merged.items() if (name := loss_metric(key))} | {
            "data/padding_share": padding
        }

    def step(self, region: Unbounded | TrustRegion | None = None) -> dict[str, Tensor]:
        """Clip the gradient and step; a gradient that is not finite takes no step, and weights and
        optimizer stay as they are.

        Args:
            region: takes the step, which it may shorten later; ``None``: it is taken as it is.

        Returns:
            The norms before clipping if the step was taken, and whether it was skipped (1.0, or
            0.0).

        Raises:
            NonFiniteGradientError: as many steps in a row as
                :data:`~torchrl_llm.trainers.finite.MAX_SKIPPED_STEPS` were skipped.
        """
        norms = self.clip()
        taken = all_finite(norms, self.run.accelerator.device)
        if taken:
            self.run.skipped_in_a_row = 0
            (region or Unbounded()).take(self.run.optimizer.step)
        self.run.optimizer.zero_grad(set_to_none=True)
        if not taken:
            skip_step(self.run, norms)
        return (norms if taken else {}) | {SKIPPED: torch.tensor(float(not taken))}

    def clip(self) -> dict[str, Tensor]:
        """Clip the gradient, actor and critic apart; returns the norms before."""
        if self.warms_up_critic:
            # None and not zeros, which AdamW would step with its moments and weight decay. A trunk
            # that actor and critic share is in the actor's group, and keeps still too.
            for parameter in self.run.optimizer.param_groups[0]["params"]:
                parameter.grad = None
        # Once for all groups: a gradient scaler refuses to unscale twice.
        self.run.accelerator.unscale_gradients(self.run.optimizer)
        norms = clip_gradients(self.run.optimizer, self.run.config.max_grad_norm)
        return {f"optim/grad_norm_{name}": full_on_cpu(norm) for name, norm in zip(GROUPS, norms, strict=False)}

    def log_prob_gap(self, batch: TensorDictBase, first_step: Mapping[str, Tensor]) -> dict[str, float]:
        """The mean difference of the log-probs of scorer and sampler before the update; nothing for
        a loss without ratios."""
        name = "policy/log_prob_gap"
        if keys.OLD_LOG_PROB not in batch:
            # The ratio is to the sampler then, and before the first step the model is the one that
            # sampled.
            ratio = first_step.get("policy/log_ratio")
            return {} if ratio is None else {name: ratio.item()}
        if keys.SAMPLE_LOG_PROB not in batch:
            return {}
        actions = batch[keys.TURN_IDS] >= 0
        gap = (batch[keys.OLD_LOG_PROB] - batch[keys.SAMPLE_LOG_PROB])[actions].abs()
        return {name: self.run.distributed.all_reduce_mean(gap)}


def _has_unknown(batch: TensorDictBase, log_prob: Tensor) -> bool:
    """Whether a row ``[B, L]`` has NaN as the log-prob of each of its action tokens, which were not
    sampled."""
    actions = batch[keys.TURN_IDS] >= 0
    return bool((actions.any(-1) & (log_prob.isnan() | ~actions).all(-1)).any())


def _at_start(first_step: Mapping[str, Tensor]) -> dict[str, float]:
    """The KL to the reference of the weights before the update: the mean over steps has what the
    update itself moved."""
    start = first_step.get("policy/kl_reference")
    return {} if start is None else {"policy/kl_reference_start": start.item()}


def _means(steps: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
    """The mean of each metric, over the steps that have it."""
    names = dict.fromkeys(name for step in steps for name in step)
    # One transfer from the device for a metric, and not one for each step.
    return {name: torch.stack([step[name] for step in steps if name in step]).mean().item() for name in names}
