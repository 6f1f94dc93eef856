"""Helpers around a loss in a training loop: weights before a batch is split, and sums over its
micro-batches.

The weights of a loss belong to the optimizer batch: :func:`write_loss_weights` writes them once,
before the batch is split. The gradient then does not depend on how the rows are cut into
micro-batches, padded or ordered. Micro-batches are added, never averaged: call ``backward`` on
:func:`total`; :func:`merge` adds up their outputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from torchrl_llm.objectives.base import TurnLoss

AVERAGED = ("ESS", "explained_variance", "sampler_rejected", "sampler_weight")
"""Outputs that :func:`merge` averages by the micro-batches' shares of the weight; all others are
sums."""


def write_loss_weights(
    batch: TensorDictBase, loss_module: TurnLoss, process_group: dist.ProcessGroup | None = None
) -> TensorDictBase:
    """Write every weight that ``loss_module`` reads into an optimizer batch, before it is split
    into micro-batches.

    Args:
        batch: ``[B]`` rows with ``"turn_ids"``, and ``"row_weight"`` if they count differently: all
            rows of one optimizer step on this rank.
        loss_module: the loss, which computes its weights (``"loss_weight"``; ``"critic_weight"``
            too for PPO).
        process_group: count over all ranks of this group; losses are then summed over the ranks.

    Returns:
        ``batch``.
    """
    names = loss_module.tensor_keys
    weights = loss_module.weights(batch.get(names.turn_ids), process_group, batch.get(names.row_weight, None))
    for name, weight in weights.items():
        batch.set(getattr(loss_module.tensor_keys, name), weight)
    return batch


def total(losses: TensorDictBase) -> Tensor:
    """The sum of the entries whose name starts with ``loss_``; call ``backward`` on it.

    Examples:
        >>> out = {"loss_objective": torch.tensor(1.0), "loss_kl": torch.tensor(0.5), "kl": torch.tensor(9.0)}
        >>> total(TensorDict(out))
        tensor(1.5000)
    """
    terms = [value for key, value in losses.items() if key.startswith("loss_")]
    if not terms:
        raise ValueError(f"Expected entries named loss_*; got {sorted(losses.keys())}.")
    return torch.stack(terms).sum()


@torch.no_grad()
def merge(outputs: Sequence[TensorDictBase]) -> TensorDict:
    """The outputs of an optimizer batch from the outputs of its micro-batches, detached.

    Outputs are summed, but for :data:`AVERAGED`, which are averaged by ``"weight"``. That is the
    batch's value for means over tokens; of ``ESS`` and ``explained_variance`` it is an
    approximation, exact for one micro-batch.

    Examples:
        >>> half = torch.tensor(0.5)
        >>> outputs = [TensorDict({"kl": x, "ESS": x, "weight": half}) for x in torch.tensor([0.2, 0.4])]
        >>> merged = merge(outputs)
        >>> round(merged["kl"].item(), 4), round(merged["ESS"].item(), 4)
        (0.6, 0.3)
    """
    if not outputs:
        raise ValueError("merge needs the output of at least one micro-batch; got none.")
    stacked = TensorDict.stack([output.detach() for output in outputs])
    # A process that only runs zero-weight rows has the weight 0.
    share = stacked["weight"] / stacked["weight"].sum().clamp_min(torch.finfo(torch.float32).tiny)
    return TensorDict({key: ((share * x) if key in AVERAGED else x).sum(0) for key, x in stacked.items()})
