"""An optimizer step by hand, as the trainer takes it: :func:`clipped_step`."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

logger = logging.getLogger(__name__)


def clip_gradients(optimizer: torch.optim.Optimizer, max_norm: float) -> list[Tensor]:
    """Clip the gradient of each parameter group, so that actor and critic are clipped apart;
    returns the norms before.

    Args:
        optimizer: its gradients are changed in place.
        max_norm: largest 2-norm of a group.
    """
    return [torch.nn.utils.clip_grad_norm_(group["params"], max_norm) for group in optimizer.param_groups]


def clipped_step(optimizer: torch.optim.Optimizer, max_norm: float) -> bool:
    """Clip the gradient of each parameter group, step, and set gradients to zero; NaN and infinite
    gradients take no step.

    One such step would make all weights NaN. It is left out with a warning: weights and the
    optimizer's state stay as they are.

    Args:
        optimizer: of one or more parameter groups.
        max_norm: largest 2-norm of a group; ``inf`` clips nothing.

    Returns:
        Whether the step was taken.

    Examples:
        >>> weight = torch.nn.Parameter(torch.ones(()))
        >>> optimizer = torch.optim.SGD([weight], lr=0.5)
        >>> (3 * weight).backward()
        >>> clipped_step(optimizer, max_norm=4.0), weight.item(), weight.grad
        (True, -0.5, None)
        >>> (weight * 0.0).sqrt().backward()
        >>> clipped_step(optimizer, max_norm=4.0), weight.item()
        (False, -0.5)
    """
    norms = clip_gradients(optimizer, max_norm)
    finite = all(norm.isfinite().item() for norm in norms)
    if finite:
        optimizer.step()
    else:
        found = ", ".join(f"{norm.item():.3g}" for norm in norms)
        logger.warning("an optimizer step is left out, because its gradient is not finite (norms: %s)", found)
    optimizer.zero_grad(set_to_none=True)
    return finite
