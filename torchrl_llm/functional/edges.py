"""The first and the last token of each turn: values that are read there, and rewards that are put
there."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from torchrl_llm.functional._common import check_shapes, masked
from torchrl_llm.functional.turns import check_turn_ids, turn_lengths, turn_mean
from torchrl_llm.utils.options import check_value

__all__ = ["ValueReduction", "token_rewards", "turn_first", "turn_last", "turn_reduce"]

ValueReduction = Literal["first", "mean", "last"]
"""Which of the values at a turn's tokens is the turn's."""


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
    :func:`~torchrl_llm.functional.turn_sum`.

    On token-aligned values (index i is the value of the prefix before token i) this is the value of
    the state before the turn.

    Examples:
        >>> turn_first(torch.tensor([[9.0, 1.0, 2.0, 9.0, 5.0]]), torch.tensor([[-1, 0, 0, -1, 2]]), 3)
        tensor([[1., 0., 5.]])
    """
    return _turn_edge(x, turn_ids, num_turns, "first")


def turn_last(x: Tensor, turn_ids: Tensor, num_turns: int) -> Tensor:
    """The value at each turn's last action token, ``[B, T]``; 0 without a token. Arguments as
    :func:`~torchrl_llm.functional.turn_sum`.

    Examples:
        >>> turn_last(torch.tensor([[9.0, 1.0, 2.0, 9.0, 5.0]]), torch.tensor([[-1, 0, 0, -1, 2]]), 3)
        tensor([[2., 0., 5.]])
    """
    return _turn_edge(x, turn_ids, num_turns, "last")


def turn_reduce(x: Tensor, turn_ids: Tensor, num_turns: int, reduction: ValueReduction = "first") -> Tensor:
    """:func:`turn_first`, :func:`~torchrl_llm.functional.turn_mean` or :func:`turn_last`, by name.

    For values only ``"first"`` keeps the policy gradient unbiased: it is the value of the context
    before the action. ``"mean"`` and ``"last"`` depend on the action's own tokens.

    Examples:
        >>> turn_reduce(torch.tensor([[1.0, 3.0]]), torch.tensor([[0, 0]]), 1, reduction="mean")
        tensor([[2.]])
    """
    check_value("value_reduction", reduction, ValueReduction)
    return {"first": turn_first, "mean": turn_mean, "last": turn_last}[reduction](x, turn_ids, num_turns)


def token_rewards(reward: Tensor, turn_ids: Tensor, mask: Tensor) -> Tensor:
    """Put each turn's reward on its last action token; without one, on the last action token before
    the turn.

    Args:
        reward: ``[B, T]``.
        turn_ids: ``[B, L]`` int64, -1 off actions.
        mask: ``[B, T]`` bool, the turns that were taken.

    Returns:
        ``[B, L]``, float32 or wider. A reward before the first action token belongs to no action
        and is left out.

    Examples:
        >>> token_rewards(torch.tensor([[1.0, 2.0]]), torch.tensor([[-1, 0, 0, -1, 1]]), torch.ones(1, 2) > 0)
        tensor([[0., 0., 1., 0., 2.]])
    """
    check_shapes(reward=reward, mask=mask)
    num_turns = reward.shape[1]
    acted = turn_lengths(turn_ids, num_turns) > 0
    order = torch.arange(num_turns, device=reward.device).expand_as(acted)
    host = torch.where(acted, order, -1).cummax(1).values
    credit = masked(reward, mask & (host >= 0))
    credit = torch.zeros_like(credit).scatter_add(1, host.clamp_min(0), credit)
    target = edge_positions(turn_ids, num_turns, "last")
    return credit.new_zeros(turn_ids.shape).scatter_add(1, target, masked(credit, acted))
