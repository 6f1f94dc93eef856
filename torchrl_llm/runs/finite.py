"""Weights and optimizer must be finite before they are saved."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from torchrl_llm.trainers.trainer import LLMTrainer


class NonFiniteWeightsError(FloatingPointError):
    """Weights, or the optimizer's state, are NaN or infinite; they are not saved."""


def not_finite(trainer: LLMTrainer) -> list[str]:
    """What of the trained weights and the optimizer's state is not finite on any rank, in words;
    empty: all is finite."""
    parameters = [parameter for parameter in trainer.loss.parameters() if parameter.requires_grad]
    state = [
        value for values in trainer.optimizer.state.values() for value in values.values() if torch.is_tensor(value)
    ]
    parts = {"weights": parameters, "optimizer": state}
    counts = {name: trainer.distributed.all_reduce_max(_count(tensors)) for name, tensors in parts.items()}
    return [f"{count} of {len(parts[name])} tensors of the {name}" for name, count in counts.items() if count]


@torch.no_grad()
def _count(tensors: Iterable[Tensor]) -> int:
    """How many of the tensors, of which this rank may have a shard, hold a number that is not
    finite."""
    own = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors)
    return sum(not bool(tensor.isfinite().all()) for tensor in own)


def check_finite(trainer: LLMTrainer) -> None:
    """Refuse to save weights and an optimizer from which no run can continue.

    Raises:
        NonFiniteWeightsError: says how many tensors are not finite.
    """
    if wrong := not_finite(trainer):
        raise NonFiniteWeightsError(
            f"After iteration {trainer.iteration}, {' and '.join(wrong)} are NaN or infinite, so nothing is saved and the run ends; earlier "
            "checkpoints stay as they are. Gradients that are not finite take no step: a learning rate may be far too high, or "
            "something beside the optimizer writes to the weights. resume=true continues from the last checkpoint."
        )
