"""Float64 all through: the norms of transformers compute in float32 even in a float64 model, so
sums in another order differ by 1e-8."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm


def _forward(self: Qwen2RMSNorm, x: Tensor) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normal = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
    return self.weight * normal.to(x.dtype)


@contextmanager
def exact_norms() -> Iterator[None]:
    """Inside, Qwen2's norm keeps float64; in narrower dtypes it computes what it did."""
    before = Qwen2RMSNorm.forward
    Qwen2RMSNorm.forward = _forward
    try:
        yield
    finally:
        Qwen2RMSNorm.forward = before
