"""Optimizer steps on scored and credited rows: :class:`Updater`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_llm import keys
from torchrl_llm.data import micro_batches, minibatches, padding_share
from torchrl_llm.objectives import total, write_loss_weights
from torchrl_llm.record import LOSS_METRICS
from torchrl_llm.trainers.base import TrainerBase
from torchrl_llm.trainers.distributed import check_accumulation
from torchrl_llm.trainers.fsdp import full_on_cpu
from torchrl_llm.trainers.schedule import GROUPS


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

    def minibatches(self, batch: TensorDictBase) -> list[TensorDictBase]:
        """Rows ``[B]``, shuffled and cut into optimizer batches; equally many on all ranks, none empty."""
        run, distributed = self.run, self.run.distributed
        check_accumulation(run.accelerator)  # again: an Accelerator made since then may have changed it
        size = run.config.minibatch_size or int(distributed.all_reduce_sum(batch.shape[0]))
        found = minibatches(batch, size, generator=run.generator, process_group=distributed.process_group)
        return [distributed.nonempty(rows, batch[:1]) for rows in found]

    def micro_batches(self, rows: TensorDictBase) -> list[TensorDictBase]:
        """An optimizer batch with its loss weights, cut so that a part fits into memory; equally many on all ranks."""
        distributed = self.run.distributed
        weighted = write_loss_weights(rows, self.run.loss, distributed.process_group)
        return distributed.equal_count(micro_batches(weighted, self.run.config.max_tokens))

    def accumulate(self, parts: list[TensorDictBase]) -> dict[str, Tensor]:
        """Accumulate the gradient of one optimizer batch: losses are weighted sums, so its micro-batches add up."""
        outputs = []
        for i, part in enumerate(parts):
            with self.run.distributed.no_sync(self.run.module) if i + 1 < len(parts) else nullcontext():
                with self.run.accelerator.autocast():
                    out = self.run.module(part)
                loss = total(out)
                if self.warms_up_critic:
                    loss = self.run.distributed.reach_all_parameters(out["loss_critic"], loss)
                self.run.distributed.backward(loss)
            outputs.append(out)
        merged = self.run.distributed.merge_outputs(outputs)
        padding = torch.tensor(padding_share(parts), dtype=torch.float64)
        return {name: merged[key] for key, name in LOSS_METRICS.items() if key in merged} | {
            "data/padding_share": padding
        }

    def step(self) -> dict[str, Tensor]:
        """Clip the gradient, actor and critic apart, and step; returns the norms before."""
        if self.warms_up_critic:
            # None and not zeros, which AdamW would step with its moments and weight decay. A trunk that actor and
            # critic share is in the actor's group, and keeps still too.
            for parameter in self.run.optimizer.param_groups[0]["params"]:
                parameter.grad = None
        # Once for all groups: a gradient scaler refuses to unscale twice.
        self.run.accelerator.unscale_gradients()
        norms = {}
        for name, group in zip(GROUPS, self.run.optimizer.param_groups, strict=False):
            norm = torch.nn.utils.clip_grad_norm_(group["params"], self.run.config.max_grad_norm)
            norms[f"optim/grad_norm_{name}"] = full_on_cpu(norm)
        self.run.optimizer.step()
        self.run.optimizer.zero_grad(set_to_none=True)
        return norms

    def log_prob_gap(self, batch: TensorDictBase, first_step: Mapping[str, Tensor]) -> float:
        """The mean difference of the log-probs of scorer and sampler before the update."""
        if keys.OLD_LOG_PROB not in batch:
            # The ratio is to the sampler then, and before the first step the model is the one that sampled.
            return first_step["policy/log_ratio"].item()
        actions = batch[keys.TURN_IDS] >= 0
        gap = (batch[keys.OLD_LOG_PROB] - batch[keys.SAMPLE_LOG_PROB])[actions].abs().sum().item()
        return self.run.distributed.all_reduce_sum(gap) / self.run.distributed.all_reduce_sum(int(actions.sum()))
