"""What is reported of an update and enters no gradient: how much a weighted sample is worth, and
how well values predict."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_llm.functional._common import check_shapes, masked
from torchrl_llm.functional.statistics import has_spread
from torchrl_llm.functional.surrogate import kl_estimate

__all__ = ["effective_sample_size", "explained_variance", "ratio_diagnostics"]


def ratio_diagnostics(weight: Tensor, token_ratio: Tensor, log_ratio: Tensor, clipped: Tensor) -> dict[str, Tensor]:
    """How far a policy is from the old one, which sampled the tokens; all but the last are weighted
    sums.

    Args:
        weight: ``[B, L]``, of each token in the loss.
        token_ratio: ``[B, L]``, new minus old log-prob, 0 off actions.
        log_ratio: ``[B, L]``, the same, pooled over what has one ratio.
        clipped: ``[B, L]`` bool, the tokens whose ratio is clipped.

    Returns:
        Scalars: ``"kl_approx"``, the KL from the old policy to the new one; ``"log_ratio"``, the
        absolute log-ratio of a token; ``"clip_fraction"``; ``"ESS"``, the
        :func:`effective_sample_size` of the pooled ratios.

    Examples:
        >>> half = torch.tensor([[0.5, 0.5]])
        >>> found = ratio_diagnostics(half, torch.zeros(1, 2), torch.zeros(1, 2), torch.tensor([[True, False]]))
        >>> {name: value.item() for name, value in found.items()}
        {'kl_approx': 0.0, 'log_ratio': 0.0, 'clip_fraction': 0.5, 'ESS': 1.0}
    """
    return {
        # The tokens are the old policy's, so this is KL(old || new).
        "kl_approx": (weight * kl_estimate(torch.zeros_like(token_ratio), token_ratio, "k3")).sum(),
        "log_ratio": (weight * token_ratio.abs()).sum(),
        "clip_fraction": (weight * clipped).sum(),
        "ESS": effective_sample_size(log_ratio, weight),
    }


def effective_sample_size(log_ratio: Tensor, weight: Tensor) -> Tensor:
    """Effective share of a weighted sample: ``(sum w r)^2 / (sum w * sum w r^2)``, in (0, 1].

    Args:
        log_ratio: any shape; ``r = exp(log_ratio)``.
        weight: the shape of ``log_ratio``, >= 0.

    Returns:
        A scalar, float32 or wider; 0 where all weights are 0.

    Examples:
        >>> effective_sample_size(torch.zeros(4), torch.full((4,), 0.25))
        tensor(1.)
    """
    check_shapes(log_ratio=log_ratio, weight=weight)
    counted = weight > 0
    log_ratio, weight = masked(log_ratio, counted), masked(weight, counted)
    # The common factor of the ratios cancels; taking out the largest that counts avoids overflow
    # and underflow.
    if log_ratio.numel():
        log_ratio = log_ratio - torch.where(counted, log_ratio, log_ratio.min()).max()
    ratio = masked(log_ratio, counted).exp()
    first, second = (weight * ratio).sum(), (weight * ratio.square()).sum()
    # Not "> 0": NaN stays NaN.
    return torch.where(second == 0, 0.0, first.square() / (weight.sum() * second))


def explained_variance(value: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    """``1 - Var(target - value) / Var(target)`` under ``weight``; at most 1, and 0 for a constant
    value.

    Args:
        value: any shape, the predictions.
        target: the shape of ``value``.
        weight: the shape of ``value``, >= 0 (a mask will do).

    Returns:
        A scalar, float32 or wider; 0 where the target does not vary.

    Examples:
        >>> target = torch.tensor([0.0, 1.0, 2.0])
        >>> explained_variance(target + 5, target, torch.ones(3))
        tensor(1.)
        >>> explained_variance(torch.zeros(3), target, torch.ones(3))
        tensor(0.)
    """
    check_shapes(value=value, target=target, weight=weight)
    counted = weight > 0
    weight = masked(weight, counted)
    share = weight / torch.where(weight.sum() > 0, weight.sum(), 1.0)

    def moments(x: Tensor) -> tuple[Tensor, Tensor]:
        x = masked(x, counted)
        mean = (share * x).sum()
        return mean, (share * (x - mean).square()).sum()

    mean, variance = moments(target)
    varies = has_spread(mean, variance.sqrt())
    return torch.where(varies, 1 - moments(target - value)[1] / torch.where(varies, variance, 1.0), 0.0)
