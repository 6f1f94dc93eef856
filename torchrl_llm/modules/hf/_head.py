"""The head while sampling: :func:`sampling_head`, which packs the weights of a large one for
products of few rows."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from torchrl_llm.modules.head import LinearHead
from torchrl_llm.modules.lm import logits_function

_LEAST = 2**20
"""Weights of a head that is packed. Smaller ones gain nothing: their product is as short as a
call."""

_ROWS = 32
"""Rows that the layout of packed weights is made for. A constant, so that a row's logits do not
depend on how many there are."""


def packs_head(numel: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether :func:`sampling_head` packs a plain head of so many weights: a copy that takes as
    much memory as they.

    Examples:
        >>> packs_head(2**20, torch.float32, torch.device("cuda")), packs_head(2**19, torch.float32, torch.device("cpu"))
        (False, False)
    """
    return numel >= _LEAST and dtype == torch.float32 and device.type == "cpu" and torch.backends.mkldnn.is_available()


def sampling_head(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """Logits ``[..., V]`` of hidden states ``[..., H]``, as
    :func:`~torchrl_llm.modules.lm.logits_function` computes them.

    The product of a few rows and a large matrix spends most of its time in copying the matrix to a
    layout for it. oneDNN takes a matrix that has this layout already, which on a CPU makes the head
    of a vocabulary of 49 to 152 thousand ids 1.5 to 2.5 times as fast at 8 to 64 rows. The weights
    are read at this moment: another head is to be made when they change.
    """
    head = LinearHead.of(model)
    if head is None or not packs_head(head.weight.numel(), head.weight.dtype, head.weight.device):
        return logits_function(model)
    # PyTorch's own compiler calls these two for the frozen weights of a linear layer.
    pack, product = torch.ops.mkldnn._reorder_linear_weight, torch.ops.mkldnn._linear_pointwise
    bias, factor = head.bias, head.factor
    packed = pack(head.weight.detach(), _ROWS)

    def logits_of(hidden: Tensor) -> Tensor:
        logits = product(hidden, packed, bias, "none", [], "")
        return logits if factor == 1 else logits * factor

    return logits_of
