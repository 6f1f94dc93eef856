"""Sums over the micro-batches of an optimizer batch.

They are added, never averaged, because their weights are those of the whole batch
(:func:`~torchrl_llm.objectives.write_loss_weights`): call ``backward`` on :func:`total`;
:func:`merge` adds up their outputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

AVERAGED = ("ESS", "explained_variance", "sampler_rejected", "sampler_weight")
"""Outputs that :func:`merge` averages by the micro-batches' shares of the weight; all others are
sums."""


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
