"""``torch.compile`` for the forwards that score whole conversations: :func:`compile_layers`.

Generation stays as it is: its shapes change with every token.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import MethodType
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

_MOST_GRAPHS = 64  # adapters, with and without gradients, times the shapes that PyTorch tells apart (0, 1, more)


def compile_layers(decoder: nn.Module, *, backend: str = "inductor") -> None:
    """Compile the forward without a KV cache of every layer of a transformers decoder, in place.

    The layers share one compiled function, so the time to compile does not grow with their number. Each adapter, with
    and without gradients, is one graph; switching between adapters compiles nothing anew.

    Args:
        decoder: what :func:`torchrl_llm.modules.lm.backbone` returns.
        backend: of :func:`torch.compile`.

    Raises:
        ValueError: ``decoder`` has no layers of transformers' common base class.
    """
    layers = [module for module in decoder.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ValueError(
            f"compile=True: {type(decoder).__name__} has no layers derived from transformers' "
            "GradientCheckpointingLayer, which are what is compiled. Pass compile=False."
        )
    for layer in layers:
        layer_type: Any = type(layer)
        # A bound method, because copy.deepcopy binds it to the copy.
        layer.forward = MethodType(_forward(layer_type, backend), layer)


@cache
def _forward(layer_type: Any, backend: str) -> Callable[..., Any]:
    eager: Callable[..., Any] = layer_type.forward
    # A graph break or too many graphs is an error: a silent fall back to eager would look like a slow success.
    compiled = torch.compile(eager, dynamic=True, fullgraph=True, backend=backend)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("past_key_values") is not None:
            return eager(self, *args, **kwargs)
        with torch.compiler.config.patch(recompile_limit=_MOST_GRAPHS):  # type: ignore[attr-defined]
            return compiled(self, *args, **kwargs)

    return forward
