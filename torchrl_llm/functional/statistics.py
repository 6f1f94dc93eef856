"""Statistics over a batch: normalization of returns and advantages."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial as bind

import torch
import torch.distributed as dist
from torch import Tensor

from torchrl_llm.functional._common import all_sum, check_shapes, masked, wide

__all__ = ["SPREAD_TOLERANCE", "standardize"]


# Float32 rounds by 6e-8 of a number: sums of the same rewards in another order differ by a few
# times that.
SPREAD_TOLERANCE = 1e-6
"""Numbers whose standard deviation is at most this times ``max(1, |mean|)`` count as equal."""

Statistics = tuple[Tensor, Tensor, Tensor]
"""Mean, standard deviation, and whether there is a spread at all; each broadcasts to the scores."""


def has_spread(mean: Tensor, std: Tensor) -> Tensor:
    # Not ">": numbers that are NaN or infinite are not equal ones, and must not become advantages
    # of 0.
    return ~((std <= SPREAD_TOLERANCE * mean.abs().clamp_min(1.0)) & mean.isfinite())


@torch.no_grad()
def batch_statistics(x: Tensor, mask: Tensor, ddof: int, process_group: dist.ProcessGroup | None) -> Statistics:
    """Statistics over ``mask``, all ranks of the group included."""
    x = masked(x, mask)
    total, count = all_sum(torch.stack([x.sum(), mask.sum().to(x.dtype)]), process_group)
    # Two passes: the difference of the mean square and the squared mean loses its digits in
    # float32.
    mean = total / count.clamp_min(1.0)
    square = all_sum(masked(x - mean, mask).square().sum(), process_group)
    std = torch.where(count > ddof, square / (count - ddof).clamp_min(1.0), 0.0).sqrt()
    return mean, std, has_spread(mean, std)


def center(score: Tensor, penalty: Tensor | None, statistics: Callable[[Tensor], Statistics]) -> Statistics:
    """``score + penalty`` without its mean, its standard deviation, and whether ``score`` alone has
    a spread.

    Without a spread the score counts for 0, so that rounding noise is never blown up to unit
    variance.
    """
    spread = statistics(score)[2]
    score = torch.where(spread, score, 0.0)
    if penalty is not None:
        score = score + wide(penalty)
    mean, std, _ = statistics(score)
    return score - mean, std, spread


def standardize(
    x: Tensor,
    mask: Tensor,
    ddof: int = 1,
    eps: float = 1e-8,
    process_group: dist.ProcessGroup | None = None,
    *,
    penalty: Tensor | None = None,
) -> Tensor:
    """Standardize over ``mask``: ``(x - mean) / (std + eps)``.

    Whitens advantages, and is return batch normalization on returns. Numbers that are equal but for
    rounding (``std <= 1e-6 * max(1, |mean|)``) become 0, and the penalty enters centered but
    unscaled. Mean and standard deviation are constants to autograd.

    Args:
        x: any shape.
        mask: bool, the shape of ``x``.
        ddof: the variance divides by ``count - ddof``.
        eps: added to the standard deviation.
        process_group: take the statistics over all ranks of this group (``None``: of this process
            only).
        penalty: the shape of ``x``, added to it: the returns of a KL penalty in the reward. Whether
            there is a spread is judged on ``x`` alone.

    Returns:
        The shape of ``x``, float32 or wider; 0 off the mask, NaN on it if one of the numbers is NaN
        or infinite.

    Examples:
        >>> standardize(torch.tensor([1.0, 3.0, 99.0]), torch.tensor([True, True, False]), ddof=0)
        tensor([-1.,  1.,  0.])
        >>> mask = torch.ones(1, 2, dtype=torch.bool)
        >>> standardize(torch.tensor([[3.0, 3.0]]), mask, penalty=torch.tensor([[-0.25, -0.75]]))
        tensor([[ 0.2500, -0.2500]])
    """
    check_shapes(x=x, mask=mask, penalty=penalty)
    statistics = bind(batch_statistics, mask=mask, ddof=ddof, process_group=process_group)
    centered, std, spread = center(masked(x, mask), penalty, statistics)
    return masked(centered / torch.where(spread, std + eps, 1.0), mask)
