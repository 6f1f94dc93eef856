"""Conversions between tokens ``[B, L]`` and turns ``[B, T]``, by ``turn_ids``."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_llm.functional._common import check_shapes, masked

__all__ = ["count_turns", "turn_lengths", "turn_mean", "turn_sum", "turn_to_token"]


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
