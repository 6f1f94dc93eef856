"""The optimizer steps of an iteration: :class:`Update`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import chain

import torch
from accelerate import Accelerator
from tensordict import TensorDictBase
from torch import Tensor, nn

from torchrl_llm import data, keys
from torchrl_llm.metrics.rollouts import checked_metrics, loss_metric
from torchrl_llm.modules.positions import prefix_cost
from torchrl_llm.objectives import TurnLoss, total, write_loss_weights
from torchrl_llm.objectives.steps import check_optimizer, clip_gradients, group_names
from torchrl_llm.trainers.config import TrainerConfig, wrong_warmup
from torchrl_llm.trainers.distributed import Distributed
from torchrl_llm.trainers.fsdp import full_on_cpu
from torchrl_llm.trainers.trust_region import TrustRegion
from torchrl_llm.utils.accelerated import check_accumulation
from torchrl_llm.utils.options import ConfigError

logger = logging.getLogger(__name__)

SKIPPED = "optim/skipped_steps"

MAX_SKIPPED_STEPS = 5
"""Optimizer steps in a row whose gradient is not finite, after which a run ends."""


class NonFiniteGradientError(FloatingPointError):
    """Gradients stay NaN or infinite. Weights and optimizer are as after the last step that was
    taken."""


class Update:
    """Takes the optimizer steps of an iteration, on rows that :class:`~torchrl_llm.trainers.Credit`
    has credited.

    Loss and frozen modules are moved to the device of ``distributed``, in place, and wrapped where
    there are several processes.

    Args:
        loss: one of :mod:`torchrl_llm.objectives`.
        optimizer: of all trainable parameters of ``loss``, the actor's as its first group, the
            critic's, if any, as its second; it has not stepped.
        distributed: the training processes. Default: accelerate's.
        config: ``epochs``, ``minibatch_size``, ``max_tokens``, ``max_grad_norm``,
            ``critic_warmup``, ``target_kl`` and ``target_kl_share`` are read. Default:
            ``TrainerConfig()``.
        frozen: modules that compute with weights and are not trained, such as a reference.
        generator: of the order of minibatches. Default: one seeded with ``config.seed``.
        logprobs_match_trainer: as in :class:`~torchrl_llm.trainers.Credit`, and with its default.
        on_step: called with the rows ``[b]`` and the metrics (scalars) of each optimizer step. What
            it adds to them, scalars under names of their own, is returned as the mean over the
            steps that add it.

    Attributes:
        module: computes the loss on all ranks.
        optimizer: the one given, as accelerate prepares it.
        skipped_in_a_row: optimizer steps that were skipped since the last one that was taken.
        iteration: of the present or the last update.

    Raises:
        ConfigError: the optimizer's parameters are not the loss's, ``config.critic_warmup``
            has no critic to warm up, or weights cannot be moved.

    Examples:
        >>> from torchrl_llm.modules import TokenScorer
        >>> from torchrl_llm.objectives import LLMReinforceLoss
        >>> from torchrl_llm.testing.enumerable import EnumerableMDP, tiny_lm
        >>> from torchrl_llm.trainers import Credit
        >>> actor, here = TokenScorer(tiny_lm(0)), Distributed.of(Accelerator(cpu=True))
        >>> loss = LLMReinforceLoss(actor, kl_coeff=0.0)
        >>> rows = Credit(loss, distributed=here)(EnumerableMDP().rows(actor))
        >>> optimizer = torch.optim.SGD(actor.parameters(), lr=0.5)
        >>> update = Update(loss, optimizer, here, config=TrainerConfig(epochs=2, target_kl=0.01))
        >>> metrics = update(rows)
        >>> metrics["optim/skipped_steps"], metrics["policy/kl_update"] <= 0.01
        (0.0, True)
    """

    def __init__(
        self,
        loss: TurnLoss,
        optimizer: torch.optim.Optimizer,
        distributed: Distributed | None = None,
        *,
        config: TrainerConfig | None = None,
        frozen: Sequence[nn.Module] = (),
        generator: torch.Generator | None = None,
        logprobs_match_trainer: Callable[[], bool] | None = None,
        on_step: Callable[[TensorDictBase, dict[str, Tensor]], None] | None = None,
    ) -> None:
        self.loss, self.config = loss, config or TrainerConfig()
        self.distributed = distributed or Distributed.of(Accelerator())
        self.generator = generator or torch.Generator().manual_seed(self.config.seed)
        self.logprobs_match_trainer = logprobs_match_trainer or (lambda: not self.distributed.autocasts)
        self.on_step = on_step
        self.skipped_in_a_row = self.iteration = self._next_iteration = 0
        self.group_names = group_names(loss)
        # Before sharding, which fails with a KeyError on a parameter that is none of the loss's.
        check_optimizer(optimizer, loss)
        for problem in wrong_warmup(self.config, loss, num_groups=len(optimizer.param_groups)):
            raise ConfigError(problem)
        self.module, self.optimizer = self.distributed.prepare(loss, optimizer, *frozen)

    @property
    def warms_up_critic(self) -> bool:
        """Whether the actor's parameters take no step in this iteration."""
        return self.iteration < self.config.critic_warmup

    def __call__(self, batch: TensorDictBase, iteration: int | None = None) -> dict[str, float]:
        """Take ``config.epochs`` passes of optimizer steps over rows ``[B]``.

        Args:
            batch: scored and credited.
            iteration: of the run, from 0: ``config.critic_warmup`` counts them, and messages name
                them. ``None``: one more than in the last call; the first call is 0.

        Returns:
            The means of the steps' metrics, by name.

        Raises:
            ValueError: there are no rows, on any rank.
            NonFiniteGradientError: as many steps in a row as
                :data:`~torchrl_llm.trainers.MAX_SKIPPED_STEPS` were skipped.
        """
        if not self.distributed.all_reduce_sum(self.distributed.own_rows(batch).shape[0]):
            raise ValueError("There are no rows to learn from (no group has an advantage?): skip the update.")
        self.iteration = self._next_iteration if iteration is None else iteration
        self._next_iteration = self.iteration + 1
        steps, added, region = [], [], self._region(batch)
        for minibatch, last in self._passes(batch):
            metrics = self.accumulate(self.micro_batches(minibatch))
            if region is not None and region.settle(metrics.get("policy/kl_old")):
                # The gradient was taken where the step before led, and not where it is now.
                self.optimizer.zero_grad(set_to_none=True)
                break
            metrics |= self.step(region)
            if last and region is not None:
                region.settle(None)
            steps.append(metrics)
            added.append(self._added(minibatch, metrics))
        means = _means(steps) | {SKIPPED: sum(metrics[SKIPPED].item() for metrics in steps)}
        means |= checked_metrics(_means(added), source="callbacks")
        means |= self.log_prob_gap(batch, steps[0]) | _at_start(steps[0])
        return means if region is None else means | region.metrics()

    def _region(self, batch: TensorDictBase) -> TrustRegion | None:
        if self.config.target_kl is None or self.warms_up_critic:
            return None
        return TrustRegion(
            self.loss,
            self.optimizer,
            batch,
            self.config.target_kl,
            share=self.config.target_kl_share,
            max_tokens=self.config.micro_batch_tokens,
            distributed=self.distributed,
            logprobs_match_trainer=self.logprobs_match_trainer(),
        )

    def _added(self, minibatch: TensorDictBase, metrics: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What :attr:`on_step` adds to the metrics of an optimizer step, or changes in them."""
        heard = dict(metrics)
        if self.on_step is not None:
            self.on_step(minibatch, heard)
        return {name: torch.as_tensor(value).float() for name, value in heard.items() if value is not metrics.get(name)}

    def _passes(self, batch: TensorDictBase) -> Iterator[tuple[TensorDictBase, bool]]:
        """The optimizer batches of all epochs, each with whether it is the last."""
        for left in reversed(range(self.config.epochs)):
            *others, final = self.minibatches(batch)
            yield from ((rows, False) for rows in others)
            yield final, not left

    def minibatches(self, batch: TensorDictBase) -> list[TensorDictBase]:
        """Rows ``[B]``, shuffled and cut into optimizer batches; equally many on all ranks, none
        empty."""
        distributed = self.distributed
        # again: an Accelerator made since then may have changed it
        check_accumulation(distributed.accelerator)
        own = distributed.own_rows(batch)
        size = self.config.minibatch_size or int(distributed.all_reduce_sum(own.shape[0]))
        found = data.minibatches(own, size, generator=self.generator, process_group=distributed.process_group)
        # One spare row will do: the credit is written, and no groups are compared any more.
        return [distributed.nonempty(rows, batch[:1]) for rows in found]

    def micro_batches(self, rows: TensorDictBase) -> list[TensorDictBase]:
        """An optimizer batch with its loss weights, cut so that a part fits into memory; equally
        many on all ranks."""
        distributed, loss = self.distributed, self.loss
        weighted = write_loss_weights(rows, loss, distributed.process_group)
        cost = prefix_cost(loss.actor_network, *([loss.critic_network] if loss.critic_network is not None else []))
        return distributed.equal_count(data.micro_batches(weighted, self.config.micro_batch_tokens, cost))

    def accumulate(self, parts: list[TensorDictBase]) -> dict[str, Tensor]:
        """Accumulate the gradient of one optimizer batch: losses are weighted sums, so its
        micro-batches ``parts`` add up."""
        outputs = []
        for i, part in enumerate(parts):
            # DDP averages gradients once an optimizer step, with the last micro-batch.
            with self.distributed.no_sync(self.module) if i + 1 < len(parts) else nullcontext():
                with self.distributed.accelerator.autocast():
                    out = self.module(part)
                loss = total(out)
                if self.warms_up_critic:
                    loss = self.distributed.reach_all_parameters(out["loss_critic"], loss)
                self.distributed.backward(loss)
            outputs.append(out)
        merged = self.distributed.merge_outputs(outputs)
        padding = torch.tensor(data.padding_share(parts), dtype=torch.float64)
        metrics = {name: value for key, value in merged.items() if (name := loss_metric(key))}
        return metrics | {"data/padding_share": padding}

    def step(self, region: TrustRegion | None = None) -> dict[str, Tensor]:
        """Clip the gradient and step; a gradient that is not finite takes no step, and weights and
        optimizer stay as they are.

        Args:
            region: takes the step, which it may shorten later; ``None``: it is taken as it is.

        Returns:
            The norms before clipping if the step was taken, and whether it was skipped (1.0, or
            0.0).

        Raises:
            NonFiniteGradientError: as many steps in a row as
                :data:`~torchrl_llm.trainers.MAX_SKIPPED_STEPS` were skipped.
        """
        norms = self.clip()
        taken = _all_finite(norms, self.distributed.device)
        if taken:
            self.skipped_in_a_row = 0
            if region is None:
                self.optimizer.step()
            else:
                region.take(self.optimizer.step)
        self.optimizer.zero_grad(set_to_none=True)
        if not taken:
            self._skip(norms)
        return (norms if taken else {}) | {SKIPPED: torch.tensor(float(not taken))}

    def _skip(self, norms: Mapping[str, Tensor]) -> None:
        """Account for an optimizer step that is not taken, because a norm of its gradient is not
        finite.

        In float16 a loss scale that is too high makes gradients infinite: it is lowered, as is
        normal in the first steps of a run. All other steps count, and
        :data:`~torchrl_llm.trainers.MAX_SKIPPED_STEPS` in a row end the run.
        """
        found = ", ".join(f"{name.rpartition('_')[2]} {norm.item():.3g}" for name, norm in norms.items())
        iteration = self.iteration + 1  # as in the table of metrics
        if (scale := _lowered_loss_scale(self.distributed.accelerator)) is not None:
            logger.info(
                "iteration %d: the loss scale is lowered to %g (norms of the gradient: %s)", iteration, scale, found
            )
            return
        self.skipped_in_a_row += 1
        logger.warning(
            "iteration %d: an optimizer step is skipped, because its gradient is not finite (norms: %s): weights and optimizer stay "
            "as they are",
            iteration,
            found,
        )
        if self.skipped_in_a_row >= MAX_SKIPPED_STEPS:
            raise NonFiniteGradientError(
                f"The gradients of {self.skipped_in_a_row} optimizer steps in a row were not finite (norms of the last: {found}), so the "
                f"run ends in iteration {iteration}. None of them was taken: the weights are finite. Look for the square root, the "
                "logarithm or a division by 0 in a loss of your own (torch.autograd.set_detect_anomaly(True) names the operation); "
                "with fp16, try bf16. resume=true continues from the last checkpoint."
            )

    def clip(self) -> dict[str, Tensor]:
        """Clip the gradient, actor and critic apart; returns the norms before."""
        if self.warms_up_critic:
            # None and not zeros, which AdamW would step with its moments and weight decay. A trunk
            # that actor and critic share is in the actor's group, and keeps still too.
            groups = zip(self.group_names, self.optimizer.param_groups, strict=False)
            for parameter in chain.from_iterable(group["params"] for name, group in groups if name != "critic"):
                parameter.grad = None
        # Once for all groups: a gradient scaler refuses to unscale twice.
        self.distributed.accelerator.unscale_gradients(self.optimizer)
        norms = clip_gradients(self.optimizer, self.config.max_grad_norm)
        named = zip(self.group_names, norms, strict=False)
        return {f"optim/grad_norm_{name}": full_on_cpu(norm) for name, norm in named}

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
        return {name: self.distributed.all_reduce_mean(gap)}


def _all_finite(norms: Mapping[str, Tensor], device: torch.device) -> bool:
    """Whether all norms of a gradient are finite: with one wait for the device, and the same on all
    ranks.

    The norms are the same there: DDP has averaged the gradients, and with FSDP2 a norm covers
    all shards.
    """
    return bool(torch.stack([norm.detach().isfinite().to(device) for norm in norms.values()]).all())


def _lowered_loss_scale(accelerator: Accelerator) -> float | None:
    """The loss scale of float16 after it was lowered for a step that is skipped; ``None``: it
    cannot be the cause.

    Only a scale above 1 can: without any scale, smaller gradients are lost and not infinite.
    """
    scaler = accelerator.scaler
    if scaler is None:
        return None
    before = scaler.get_scale()
    # In place of scaler.step(), which would skip the step too, but takes one whose gradient is
    # finite and too large for a norm.
    scaler.update()
    after = scaler.get_scale()
    return after if 1.0 <= after < before else None


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
