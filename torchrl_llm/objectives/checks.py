"""What a loss of one's own must return: :func:`check_objective`."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def check_objective(name: str, objective: Any, log_ratio: Tensor) -> Tensor:
    """The objective of each token, or an error that says what is wrong with it.

    Args:
        name: of the class that it is of, for messages.
        objective: what its method returned.
        log_ratio: ``[B, L]``, what the method was given.

    Raises:
        TypeError: it is no tensor.
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
