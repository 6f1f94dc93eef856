"""What a loss of one's own must return: :func:`check_objective`; which rewards an estimator takes:
:func:`wrong_penalty`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from torchrl_llm.objectives.estimators.base import TurnEstimator
from torchrl_llm.objectives.estimators.imitation import ImitationWeights


def check_objective(name: str, objective: Any, log_ratio: Tensor) -> Tensor:
    """The objective of each token, or an error that says what is wrong with it.

    Args:
        name: of the class that it is of, for messages.
        objective: what its method returned.
        log_ratio: ``[B, L]``, what the method was given.

    Raises:
        TypeError: it is not a tensor.
        ValueError: it has another shape or device than ``log_ratio``, or no gradient where that has
            one.
    """
    method = f"{name}.objective"
    if not isinstance(objective, Tensor):
        raise TypeError(
            f"{method} returned {objective!r}; expected a tensor of log_ratio's shape {list(log_ratio.shape)}."
        )
    if objective.shape != log_ratio.shape:
        raise ValueError(
            f"{method} returned the shape {list(objective.shape)}; expected that of log_ratio, {list(log_ratio.shape)}: one term a token, "
            "which the loss weighs and sums."
        )
    if objective.device != log_ratio.device:
        raise ValueError(
            f"{method} returned a tensor on {objective.device}; log_ratio is on {log_ratio.device}: make it there (device=log_ratio.device)."
        )
    if log_ratio.requires_grad and not objective.requires_grad:
        raise ValueError(
            f"{method} returned a tensor without a gradient ({objective.dtype}): expected one computed from log_ratio, neither detached nor "
            "rounded to whole numbers."
        )
    return objective


def wrong_penalty(coeff: float, estimator: Any) -> Iterator[str]:
    """What is wrong with an ``overlong_penalty``, which makes rewards smaller, for an estimator,
    and what to do.

    Args:
        coeff: the setting.
        estimator: of the run.

    Examples:
        >>> from torchrl_llm.objectives import GroupRelative
        >>> next(wrong_penalty(0.5, GroupRelative(scale="mean")))
        'overlong_penalty=0.5 makes returns negative, which scale="mean" does not take: leave one of them out.'
    """
    if not coeff or not isinstance(estimator, TurnEstimator):
        return
    if not estimator.reads_rewards:
        yield (
            f"overlong_penalty={coeff} does nothing with {type(estimator).__name__}, which does not look at rewards here: leave it out, "
            'or choose another estimator (SFT: imitate="return" or min_return).'
        )
    elif (option := estimator.needs_nonnegative_rewards) is not None:
        other = " (or set min_return=0)" if isinstance(estimator, ImitationWeights) else ""
        yield (
            f"overlong_penalty={coeff} makes returns negative, which {option} does not take: leave one of them out{other}."
        )
