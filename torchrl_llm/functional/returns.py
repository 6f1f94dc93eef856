"""Returns: what follows a step, discounted."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchrl_llm.functional._common import check_shapes, masked, wide

__all__ = ["discount", "episode_return", "turn_returns"]


def reverse_scan(x: Tensor, decay: Tensor, last: Tensor | None = None) -> Tensor:
    """``y_t = x_t + decay_t * y_{t+1}`` along the last dimension, with ``y_T = last``, in log2(T)
    steps.

    Recursive doubling (Hillis and Steele, 1986, "Data parallel algorithms").
    """
    if last is not None:
        x = torch.cat([x[:, :-1], x[:, -1:] + decay[:, -1:] * last.unsqueeze(-1)], -1)
    step = 1
    while step < x.shape[-1]:
        x = x + decay * pad(x[:, step:], (0, step))
        decay = decay * pad(decay[:, step:], (0, step))
        step *= 2
    return x


def turn_inputs(
    reward: Tensor, mask: Tensor, gamma: float, bootstrap: Tensor | None, acted: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Reward ``[B, T]``, bootstrap ``[B]`` and acted ``[B, T]``, sanitized, and the discount of
    each turn ``[B, T]``.

    The discount of a turn is ``gamma`` if it was taken, and 1 in a gap of the mask.
    """
    check_shapes(reward=reward, mask=mask, acted=acted)
    reward = masked(reward, mask)
    bootstrap = reward.new_zeros(reward.shape[0]) if bootstrap is None else wide(bootstrap)
    return reward, bootstrap, mask if acted is None else mask & acted, torch.where(mask, gamma, torch.ones_like(reward))


def turn_returns(
    reward: Tensor, mask: Tensor, gamma: float, bootstrap: Tensor | None = None, *, acted: Tensor | None = None
) -> Tensor:
    """Discounted returns: ``G_k = r_k + gamma * G_{k+1}``, from every turn to the end of the
    episode.

    Args:
        reward: ``[B, T]``.
        mask: ``[B, T]`` bool, the turns that were taken. A gap in it costs no discount.
        gamma: discount per turn.
        bootstrap: ``[B]``, what follows the last turn; 0 by default.
        acted: ``[B, T]`` bool, the turns with an action token; all of ``mask`` by default. A turn
            without one counts as time and reward, but is not a decision: it is folded into the one
            before.

    Returns:
        ``[B, T]``, float32 or wider; 0 where nothing was decided.

    Examples:
        >>> reward, mask = torch.tensor([[0.0, 5.0, 1.0]]), torch.tensor([[True, False, True]])
        >>> turn_returns(reward, mask, 0.5)
        tensor([[0.5000, 0.0000, 1.0000]])
    """
    reward, bootstrap, acted, decay = turn_inputs(reward, mask, gamma, bootstrap, acted)
    return masked(reverse_scan(reward, decay, bootstrap), acted)


def episode_return(reward: Tensor, mask: Tensor, gamma: float = 1.0) -> Tensor:
    """The discounted return of each whole episode, seen from its first turn.

    Args:
        reward: ``[B, T]``.
        mask: ``[B, T]`` bool, the turns that were taken. A gap in it costs no discount.
        gamma: discount per turn.

    Returns:
        ``[B]``, float32 or wider.

    Examples:
        >>> episode_return(torch.tensor([[1.0, 9.0, 1.0]]), torch.tensor([[True, False, True]]), gamma=0.5)
        tensor([1.5000])
    """
    check_shapes(reward=reward, mask=mask)
    reward = masked(reward, mask)
    return (reward * discount(mask, gamma).to(reward.dtype)).sum(1)


def discount(mask: Tensor, gamma: float) -> Tensor:
    """The discount of each step's reward, seen from the start: ``gamma`` to the number of steps
    before it.

    Args:
        mask: ``[B, T]`` bool, the turns (or action tokens) that were taken. A gap in it costs no
            discount.
        gamma: discount per step.

    Returns:
        ``[B, T]`` float64; 0 off the mask.

    Examples:
        >>> discount(torch.tensor([[True, False, True, True]]), 0.5)
        tensor([[1.0000, 0.0000, 0.5000, 0.2500]], dtype=torch.float64)
    """
    before = (mask.cumsum(1) - mask.long()).double()
    return torch.where(mask, gamma**before, 0.0)
