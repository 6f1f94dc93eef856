"""Rotary embeddings whose frequencies move with the length of the input: :func:`rope_by_row`.

Dynamic NTK scaling and LongRoPE, as transformers has them, take other frequencies for the whole batch as soon as its
longest row passes the length of pretraining. A row's log-probs and values would then depend on its neighbors.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

MOVING_ROPES = ("dynamic", "longrope")


def moving_ropes(model: nn.Module) -> list[nn.Module]:
    """The rotary embeddings of ``model`` whose frequencies depend on the largest position they are given."""
    return [module for module in model.modules() if any(kind in MOVING_ROPES for kind in _rope_types(module))]


@contextmanager
def rope_by_row(model: nn.Module, lengths: Tensor) -> Iterator[None]:
    """Inside, each row of a batch has the frequencies that it would have alone.

    It is one forward still, so all ranks of a sharded model run the same number of them.

    Args:
        model: its forwards get rows ``[B, L]`` without a cache. Nothing happens if none of its embeddings moves.
        lengths: ``[B]`` int64, between 1 and L: the tokens of each row. What is computed behind them means nothing.
    """
    modules = moving_ropes(model)
    sizes: list[int] = lengths.tolist() if modules else []

    def by_row(module: nn.Module, args: Any, kwargs: Any, _: Any) -> Any:
        call = signature(module.forward).bind(*args, **kwargs)
        positions = call.arguments["position_ids"][:1]
        width = positions.shape[1]

        def embeddings(size: int) -> Any:
            # Dynamic scaling keeps the frequencies of the longest input so far until it gets one that needs no scaling.
            for end in (1, size):
                call.arguments["position_ids"] = positions[:, :end]
                found = module.forward(*call.args, **call.kwargs)
            return found

        each = {size: embeddings(size) for size in sorted(set(sizes))}
        embeddings(1)
        if isinstance(each[sizes[0]], Tensor):
            return _stacked([each[size] for size in sizes], width)
        return tuple(_stacked(list(parts), width) for parts in zip(*(each[size] for size in sizes), strict=True))

    with ExitStack() as stack:
        for module in modules:
            stack.callback(module.register_forward_hook(by_row, with_kwargs=True).remove)
        yield


def reset_ropes(model: nn.Module) -> None:
    """Forget what longer inputs left in embeddings with dynamic scaling."""
    for module in moving_ropes(model):
        device = next((buffer.device for buffer in module.buffers()), None)
        start = torch.zeros(1, 1, dtype=torch.int64, device=device)
        for layer_type in module.rope_type if isinstance(module.rope_type, dict) else (None,):
            module.forward(start.float(), start, **({} if layer_type is None else {"layer_type": layer_type}))


def _rope_types(module: nn.Module) -> list[str]:
    found = vars(module).get("rope_type") or []  # much faster than getattr, which looks through parameters and buffers
    return [found] if isinstance(found, str) else list(found.values()) if isinstance(found, dict) else []


def _stacked(parts: list[Tensor], width: int) -> Tensor:
    """``[1, n_i, ...]`` as ``[B, width, ...]``, zeros behind."""
    whole = parts[0].new_zeros(len(parts), width, *parts[0].shape[2:])
    for row, part in zip(whole, parts, strict=True):
        row[: part.shape[1]] = part[0]
    return whole
