"""Conversions between tokens ``[B, L]`` and turns ``[B, T]``, by ``turn_ids``."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from torchrl_llm.functional._common import check_shapes, masked
from torchrl_llm.utils.options import check_value

__all__ = [
    "ValueReduction",
    "count_turns",
    "turn_first",
    "turn_last",
    "turn_lengths",
    "turn_mean",
    "turn_reduce",
    "turn_sum",
    "turn_to_token",
]

ValueReduction = Literal["first", "mean", "last"]
"""Which of the values at a turn's tokens is the turn's."""


def count_turns(turn_ids: Tensor) -> int:
    """The smallest ``num_turns`` that holds every id of ``turn_ids [B, L]``, and at least 1.

    Examples:
        >>> count_turns(torch.tensor([[-1, 0, 0, -1, 2]]))
        3
    """
    return max(1, int(turn_ids.max()) + 1) if turn_ids.numel() else 1


def check_turn_ids(turn_ids: Tensor, num_turns: int) -> None:
    # On a GPU an index out of range fails an assertion in a kernel: it names nothing, and the CUDA
    # context is lost.
    if turn_ids.numel() and int(turn_ids.max()) >= num_turns:
        raise ValueError(
            f"turn_ids holds turn {int(turn_ids.max())}, but num_turns is {num_turns}; turns count from 0."
        )


def turn_sum(x: Tensor, turn_ids: Tensor, num_turns: int) -> Tensor:
    """Sum over each turn's action tokens.

    Args:
        x: ``[B, L]``.
        turn_ids: ``[B, L]`` int64, -1 off actions.
        num_turns: ``T``.

    Returns:
        ``[B, T]``, float32 or wider; 0 where a turn has no token.

    Examples:
        >>> turn_sum(torch.tensor([[9.0, 1.0, 2.0, 9.0, 5.0]]), torch.tensor([[-1, 0, 0, -1, 2]]), 3)
        tensor([[3., 0., 5.]])
    """
    check_shapes(x=x, turn_ids=turn_ids)
    check_turn_ids(turn_ids, num_turns)
    x = masked(x, turn_ids >= 0)
    # Tokens off actions are 0 by now, so they may be added to turn 0.
    return x.new_zeros(x.shape[0], num_turns).scatter_add(1, turn_ids.clamp_min(0), x)


def turn_lengths(turn_ids: Tensor, num_turns: int) -> Tensor:
    """Number of action tokens of each turn, ``[B, T]`` float32; a turn was *acted* where this is
    positive.

    Examples:
        >>> turn_lengths(torch.tensor([[-1, 0, 0, -1, 2]]), 3)
        tensor([[2., 0., 1.]])
    """
    return turn_sum(torch.ones_like(turn_ids, dtype=torch.float32), turn_ids, num_turns)


def turn_mean(x: Tensor, turn_ids: Tensor, num_turns: int) -> Tensor:
    """Mean over each turn's action tokens, ``[B, T]``; 0 where a turn has no token. Arguments as
    :func:`turn_sum`.

    Examples:
        >>> turn_mean(torch.tensor([[9.0, 1.0, 2.0, 9.0, 5.0]]), torch.tensor([[-1, 0, 0, -1, 2]]), 3)
        tensor([[1.5000, 0.0000, 5.0000]])
    """
    return turn_sum(x, turn_ids, num_turns) / turn_lengths(turn_ids, num_turns).clamp_min(1.0)


def edge_positions(turn_ids: Tensor, num_turns: int, edge: Literal["first", "last"]) -> Tensor:
    """``[B, T]`` int64 position of each turn's first or last token; meaningless (but in range)
    without a token."""
    check_turn_ids(turn_ids, num_turns)
    rows, length = turn_ids.shape
    position = torch.arange(length, device=turn_ids.device).expand(rows, length)
    # Tokens that are not actions go to a column of their own, which is dropped.
    slot = torch.where(turn_ids >= 0, turn_ids, num_turns)
    reduce, start = ("amin", max(length - 1, 0)) if edge == "first" else ("amax", 0)
    out = turn_ids.new_full((rows, num_turns + 1), start)
    return out.scatter_reduce(1, slot, position, reduce)[:, :num_turns]


def _turn_edge(x: Tensor, turn_ids: Tensor, num_turns: int, edge: Literal["first", "last"]) -> Tensor:
    check_shapes(x=x, turn_ids=turn_ids)
    acted = turn_lengths(turn_ids, num_turns) > 0
    return masked(x.gather(1, edge_positions(turn_ids, num_turns, edge)), acted)


def turn_first(x: Tensor, turn_ids: Tensor, num_turns: int) -> Tensor:
    """The value at each turn's first action token, ``[B, T]``; 0 without a token. Arguments as
    :func:`turn_sum`.

    On token-aligned values (index i is the value of the prefix before token i) this is the value of
    the state before the turn.

    Examples:
        >>> turn_first(torch.tensor([[9.0, 1.0, 2.0, 9.0, 5.0]]), torch.tensor([[-1, 0, 0, -1, 2]]), 3)
        tensor([[1., 0., 5.]])
    """
    return _turn_edge(x, turn_ids, num_turns, "first")


def turn_last(x: Tensor, turn_ids: Tensor, num_turns: int) -> Tensor:
    """The value at each turn's last action token, ``[B, T]``; 0 without a token. Arguments as
    :func:`turn_sum`.

    Examples:
        >>> turn_last(torch.tensor([[9.0, 1.0, 2.0, 9.0, 5.0]]), torch.tensor([[-1, 0, 0, -1, 2]]), 3)
        tensor([[2., 0., 5.]])
    """
    return _turn_edge(x, turn_ids, num_turns, "last")


def turn_reduce(x: Tensor, turn_ids: Tensor, num_turns: int, reduction: ValueReduction = "first") -> Tensor:
    """:func:`turn_first`, :func:`turn_mean` or :func:`turn_last`, by name.

    For values only ``"first"`` keeps the policy gradient unbiased: it is the value of the context
    before the action. ``"mean"`` and ``"last"`` depend on the action's own tokens.

    Examples:
        >>> turn_reduce(torch.tensor([[1.0, 3.0]]), torch.tensor([[0, 0]]), 1, reduction="mean")
        tensor([[2.]])
    """
    check_value("value_reduction", reduction, ValueReduction)
    return {"first": turn_first, "mean": turn_mean, "last": turn_last}[reduction](x, turn_ids, num_turns)


def turn_to_token(x: Tensor, turn_ids: Tensor) -> Tensor:
    """Give every action token the value of its turn.

    Args:
        x: ``[B, T]``.
        turn_ids: ``[B, L]`` int64, -1 off actions.

    Returns:
        ``[B, L]``, float32 or wider; 0 where ``turn_ids < 0``.

    Examples:
        >>> turn_to_token(torch.tensor([[3.0, 7.0]]), torch.tensor([[-1, 0, 0, -1, 1]]))
        tensor([[0., 3., 3., 0., 7.]])
    """
    check_turn_ids(turn_ids, x.shape[1])
    return masked(x.gather(1, turn_ids.clamp_min(0)), turn_ids >= 0)
