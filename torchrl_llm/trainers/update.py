"""The optimizer steps of an iteration: :class:`Update`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext

import torch
from accelerate import Accelerator
from tensordict import TensorDictBase
from torch import Tensor, nn

from torchrl_llm import data
from torchrl_llm.metrics.rollouts import loss_metric
from torchrl_llm.metrics.updates import SKIPPED, update_metrics
from torchrl_llm.modules.positions import prefix_cost
from torchrl_llm.objectives import TurnLoss, steps, total, write_loss_weights
from torchrl_llm.trainers.config import TrainerConfig, wrong_warmup
from torchrl_llm.trainers.distributed import Distributed
from torchrl_llm.trainers.fsdp import full_on_cpu
from torchrl_llm.trainers.trust_region import TrustRegion
from torchrl_llm.utils.accelerated import check_accumulation, lowered_loss_scale
from torchrl_llm.utils.options import ConfigError


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
        self.group_names = steps.group_names(loss)
        # Before sharding, which fails with a KeyError on a parameter that is none of the loss's.
        steps.check_optimizer(optimizer, loss)
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
                :data:`~torchrl_llm.objectives.MAX_SKIPPED_STEPS` were skipped.
        """
        if not self.distributed.all_reduce_sum(self.distributed.own_rows(batch).shape[0]):
            raise ValueError("There are no rows to learn from (no group has an advantage?): skip the update.")
        self.iteration = self._next_iteration if iteration is None else iteration
        self._next_iteration = self.iteration + 1
        measured, added, region = [], [], self._region(batch)
        for minibatch, last in self._passes(batch):
            metrics = self.accumulate(self.micro_batches(minibatch))
            if region is not None and region.settle(metrics.get("policy/kl_old")):
                # The gradient was taken where the step before led, and not where it is now.
                self.optimizer.zero_grad(set_to_none=True)
                break
            metrics |= self.step(region)
            if last and region is not None:
                region.settle(None)
            measured.append(metrics)
            added.append(self._added(minibatch, metrics))
        means = update_metrics(measured, added, batch, self.distributed.all_reduce_mean)
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
        return [distributed.nonempty(rows, batch) for rows in found]

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
                :data:`~torchrl_llm.objectives.MAX_SKIPPED_STEPS` were skipped.
        """
        norms = self.clip()
        taken = steps.all_finite([*norms.values()])
        if taken:
            self.skipped_in_a_row = 0
            if region is None:
                self.optimizer.step()
            else:
                region.take(self.optimizer.step)
        self.optimizer.zero_grad(set_to_none=True)
        if not taken:
            # In float16 a loss scale that is too high makes gradients infinite, as is normal in the
            # first steps of a run: only other steps count.
            scale = lowered_loss_scale(self.distributed.accelerator)
            self.skipped_in_a_row += scale is None
            steps.report_skipped(norms, self.skipped_in_a_row, iteration=self.iteration, loss_scale=scale)
        return (norms if taken else {}) | {SKIPPED: torch.tensor(float(not taken))}

    def clip(self) -> dict[str, Tensor]:
        """Clip the gradient, actor and critic apart; returns the norms before."""
        if self.warms_up_critic:
            steps.drop_gradients(self.optimizer, self.group_names, keep="critic")
        # Once for all groups: a gradient scaler refuses to unscale twice.
        self.distributed.accelerator.unscale_gradients(self.optimizer)
        norms = steps.clip_gradients(self.optimizer, self.config.max_grad_norm)
        named = zip(self.group_names, norms, strict=False)
        return {f"optim/grad_norm_{name}": full_on_cpu(norm) for name, norm in named}
