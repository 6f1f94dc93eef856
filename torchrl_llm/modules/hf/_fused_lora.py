"""Plain linear layers that compute what LoRA layers do, for forwards that train nothing: :class:`FusedLora`.

A small model spends more time in dispatching LoRA's extra operations than in computing them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft.tuners.lora import Linear as LoraLinear
from torch import nn

_MAX_BYTES = 2**26


class FusedLora:
    """Puts linear layers with weight ``W + scaling * B @ A`` in the places of a model's LoRA layers, for a while.

    Neither parameters nor LoRA layers are touched: modules are exchanged inside :meth:`in_place` and put back. Only what
    is the same computation up to float32 rounding is exchanged: plain LoRA on float32 ``nn.Linear`` layers, and no more
    than ``max_bytes`` of weights, for on large layers the extra operations cost little and the copies much.

    Args:
        model: any module.
        adapter: the adapter to fuse; ``None``: the layers without adapters.
        max_bytes: most memory for fused weights; above it nothing is exchanged.
    """

    def __init__(self, model: nn.Module, *, adapter: str | None, max_bytes: int = _MAX_BYTES) -> None:
        places = [
            (parent, name, layer)
            for parent in model.modules()
            for name, layer in parent.named_children()
            if isinstance(layer, LoraLinear) and _is_plain(layer, adapter)
        ]
        size = sum(layer.base_layer.weight.nbytes for _, _, layer in places if adapter in layer.lora_A)
        self._places = [(*place, _fused(place[-1], adapter)) for place in places] if size <= max_bytes else []

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Exchange the layers, and put them back."""
        try:
            for parent, name, _, fused in self._places:
                setattr(parent, name, fused)
            yield
        finally:
            for parent, name, layer, _ in self._places:
                setattr(parent, name, layer)


def _is_plain(layer: Any, adapter: str | None) -> bool:
    base = layer.base_layer
    if layer.merged or type(base) is not nn.Linear or base.weight.dtype != torch.float32:
        return False
    if adapter not in layer.lora_A:
        return True
    plain = adapter not in layer.lora_variant and not layer.lora_bias[adapter]
    return plain and layer.lora_A[adapter].weight.dtype == torch.float32


def _fused(layer: Any, adapter: str | None) -> nn.Module:
    base = layer.base_layer
    if adapter not in layer.lora_A:
        return base
    fused = nn.Linear(base.in_features, base.out_features, bias=False, device="meta")
    fused.weight = nn.Parameter(base.weight.detach() + layer.get_delta_weight(adapter).detach(), requires_grad=False)
    fused.bias = base.bias
    return fused.eval()
