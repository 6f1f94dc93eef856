"""Helpers of the other modules: wide floats, masks, checks of shapes, sums over ranks."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor


def wide(x: Tensor) -> Tensor:
    # bfloat16 has 8 significant bits, too few to add up turns or a batch.
    return x.to(torch.promote_types(x.dtype, torch.float32))


def importance_ratio(log_ratio: Tensor) -> Tensor:
    """``exp(log_ratio)``, always a finite number with a finite gradient; see :func:`exponent`.

    Args:
        log_ratio: any shape, the difference of two log-probs.

    Returns:
        The same shape, float32 or wider.

    Examples:
        >>> importance_ratio(torch.tensor([0.5, 1.0]).log())
        tensor([0.5000, 1.0000])
        >>> importance_ratio(torch.tensor(1000.0)).isfinite()
        tensor(True)
    """
    return exponent(log_ratio).exp()


def exponent(log_ratio: Tensor) -> Tensor:
    """``log_ratio``, float32 or wider, but no more than a quarter of the logarithm of the largest
    float (22.2 in float32).

    Its ``exp`` (4e9) then stays finite, and so do the products with advantages and the squares in
    gradient norms that are made of it: an infinite ratio times the 0 of a clip, a mask or an
    advantage is NaN, in the value or in the gradient. The gradient passes through the bound, so
    that a far too likely token is still pushed down, as by a ratio of that size.
    """
    x = wide(log_ratio)
    most = math.log(torch.finfo(x.dtype).max) / 4
    return x - (x - most).clamp_min(0.0).detach()


def masked(x: Tensor, mask: Tensor) -> Tensor:
    # Not x * mask: what lies off the mask may be NaN, and NaN * 0 is NaN.
    return torch.where(mask, wide(x), 0.0)


def check_shapes(**tensors: Tensor | None) -> None:
    shapes = {name: tuple(x.shape) for name, x in tensors.items() if x is not None}
    if len(set(shapes.values())) > 1:
        given = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ValueError(f"Expected tensors of one shape; got {given}.")


def joint_labels(*parts: Tensor) -> Tensor:
    """Numbers 0, 1, ... in the shape of the first of ``parts``, int64 tensors that broadcast to it:
    equal where all of them are."""
    label = parts[0].unique(return_inverse=True)[1]
    for part in parts[1:]:
        # Part by part: unique(dim=0) compares rows, and takes twenty times as long.
        values, index = part.unique(return_inverse=True)
        label = (label * len(values) + index).unique(return_inverse=True)[1]
    return label


def label_totals(score: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
    """Sum (float64) and number of the scores with the label of each, in the shape of ``score``;
    labels are small integers."""
    flat = label.flatten()
    size = int(flat.max()) + 1
    total = torch.zeros(size, dtype=torch.float64, device=score.device).index_add(0, flat, score.double().flatten())
    return total[label], torch.bincount(flat, minlength=size)[label]


def all_sum(x: Tensor, process_group: dist.ProcessGroup | None) -> Tensor:
    if process_group is None:
        return x
    # all_reduce() writes into its argument, and has no gradient.
    x = x.detach().clone()
    dist.all_reduce(x, group=process_group)
    return x
