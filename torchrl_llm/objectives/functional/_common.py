"""What the functions share: wide floats, masks, checks, sums over ranks."""

from __future__ import annotations

from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor


def check_choice(name: str, value: object, choices: Any) -> None:
    """Raise ``ValueError`` unless ``value`` is one of the ``Literal`` type ``choices``.

    Examples:
        >>> from typing import Literal
        >>> check_choice("ratio_level", "word", Literal["token", "turn"])
        Traceback (most recent call last):
        ValueError: ratio_level is 'word'; expected one of 'token', 'turn'.
    """
    if value not in get_args(choices):
        raise ValueError(f"{name} is {value!r}; expected one of {', '.join(map(repr, get_args(choices)))}.")


def wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def masked(x: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, wide(x), 0.0)


def check_shapes(**tensors: Tensor | None) -> None:
    shapes = {name: tuple(x.shape) for name, x in tensors.items() if x is not None}
    if len(set(shapes.values())) > 1:
        given = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ValueError(f"Expected tensors of one shape; got {given}.")


def all_sum(x: Tensor, process_group: dist.ProcessGroup | None) -> Tensor:
    if process_group is None:
        return x
    x = x.detach().clone()
    dist.all_reduce(x, group=process_group)
    return x
