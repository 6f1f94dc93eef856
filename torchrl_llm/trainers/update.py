"""Optimizer steps on scored and credited rows: :class:`Updater`."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_llm import keys
from torchrl_llm.data import micro_batches, minibatches, padding_share
from torchrl_llm.objectives import TurnPolicyLoss, total, write_loss_weights
from torchrl_llm.record import LOSS_METRICS
from torchrl_llm.trainers.config import TrainerConfig
from torchrl_llm.trainers.distributed import Distributed, check_accumulation
from torchrl_llm.trainers.fsdp import full_on_cpu
from torchrl_llm.trainers.schedule import GROUPS


class Updater:
    """Takes the optimizer steps of an iteration.

    Args:
        loss: writes the loss weights of an optimizer batch.
        module: computes ``loss``, its gradients averaged over the ranks.
        optimizer: its first parameter group is the actor's, its second, if any, the critic's.
        config: epochs, sizes of minibatches and micro-batches, gradient clipping.
        distributed: the training processes.
    """

    def __init__(
        self,
        loss: TurnPolicyLoss,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        config: TrainerConfig,
        distributed: Distributed,
    ) -> None:
        self.loss, self.module, self.optimizer = loss, module, optimizer
        self.config, self.distributed, self.accelerator = config, distributed, distributed.accelerator

    def run(self, batch: TensorDictBase, generator: torch.Generator, *, critic_only: bool = False) -> dict[str, float]:
        """``config.epochs`` passes over ``batch``.

        Args:
            batch: rows ``[B]`` with advantages (and, as the loss needs them, old and reference log-probs and values).
            generator: shuffles the rows of each pass.
            critic_only: warm the critic up: the actor's parameters take no step.

        Returns:
            The means of the metrics of all steps.
        """
        check_accumulation(self.accelerator)  # again: an Accelerator made since then may have changed it
        group, size = self.distributed.process_group, self.config.minibatch_size
        size = size or int(self.distributed.all_reduce_sum(batch.shape[0]))
        steps: list[dict[str, Tensor]] = []
        padding: list[float] = []
        for _ in range(self.config.epochs):
            for minibatch in minibatches(batch, size, generator=generator, process_group=group):
                rows = self.distributed.nonempty(minibatch, batch[:1])
                parts = micro_batches(write_loss_weights(rows, self.loss, group), self.config.max_tokens)
                parts = self.distributed.equal_count(parts)
                padding.append(padding_share(parts))
                steps.append(self.accumulate(parts, critic_only) | self.step(critic_only))
        metrics = {name: torch.stack([step[name] for step in steps]).mean().item() for name in steps[0]}
        metrics["policy/log_prob_gap"] = self._log_prob_gap(batch, steps[0])
        return metrics | {"data/padding_share": sum(padding) / len(padding)}

    def accumulate(self, parts: list[TensorDictBase], critic_only: bool) -> dict[str, Tensor]:
        """Accumulate the gradient of one optimizer batch: losses are weighted sums, so its micro-batches add up."""
        outputs = []
        for i, part in enumerate(parts):
            with self.distributed.no_sync(self.module) if i + 1 < len(parts) else nullcontext():
                with self.accelerator.autocast():
                    out = self.module(part)
                loss = total(out)
                if critic_only:
                    loss = self.distributed.reach_all_parameters(out["loss_critic"], loss)
                self.distributed.backward(loss)
            outputs.append(out)
        merged = self.distributed.merge_outputs(outputs)
        return {name: merged[key] for key, name in LOSS_METRICS.items() if key in merged}

    def step(self, critic_only: bool) -> dict[str, Tensor]:
        """Clip the gradient, actor and critic apart, and step; returns the norms before."""
        if critic_only:
            # None and not zeros, which AdamW would step with its moments and weight decay. A trunk that actor and
            # critic share is in the actor's group, and keeps still too.
            for parameter in self.optimizer.param_groups[0]["params"]:
                parameter.grad = None
        # Once for all groups: a gradient scaler refuses to unscale twice.
        self.accelerator.unscale_gradients()
        norms = {}
        for name, group in zip(GROUPS, self.optimizer.param_groups, strict=False):
            norm = torch.nn.utils.clip_grad_norm_(group["params"], self.config.max_grad_norm)
            norms[f"optim/grad_norm_{name}"] = full_on_cpu(norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norms

    def _log_prob_gap(self, batch: TensorDictBase, first: dict[str, Tensor]) -> float:
        """The mean difference of the log-probs of scorer and sampler before the update."""
        if keys.OLD_LOG_PROB not in batch:
            # The ratio is to the sampler then, and before the first step the model is the one that sampled.
            return first["policy/log_ratio"].item()
        actions = batch[keys.TURN_IDS] >= 0
        gap = (batch[keys.OLD_LOG_PROB] - batch[keys.SAMPLE_LOG_PROB])[actions].abs().sum().item()
        return self.distributed.all_reduce_sum(gap) / self.distributed.all_reduce_sum(int(actions.sum()))
