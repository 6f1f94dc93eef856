"""PyTorch's switches for products and kernels, while a trainer works: :class:`Numerics`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch

from torchrl_llm.modules.kernels import float32_products


@dataclass(frozen=True, kw_only=True)
class Numerics:
    """How PyTorch computes while a trainer works. Its switches are the whole process's: afterwards
    they are as they were.

    Attributes:
        float32_matmul_precision: as :func:`torch.set_float32_matmul_precision` takes it: "high"
            computes float32 products on GPUs from 10 bits of each factor (TF32). Default ``None``:
            as the process has it.
        deterministic: score and update with :func:`torch.use_deterministic_algorithms`. Default
            ``False``: as the process has it.

    Examples:
        >>> numerics = Numerics(float32_matmul_precision="high", deterministic=True)
        >>> with numerics.learning():
        ...     torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()
        ('high', True)
        >>> torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()
        ('highest', False)
    """

    float32_matmul_precision: str | None = None
    deterministic: bool = False

    @contextmanager
    def products(self) -> Iterator[None]:
        """Inside, float32 products have the precision. For sampling and learning alike, whose
        log-probs are compared."""
        precision = self.float32_matmul_precision
        with nullcontext() if precision is None else float32_products(precision):
            yield

    @contextmanager
    def learning(self) -> Iterator[None]:
        """:meth:`products`, and deterministic algorithms. Not for sampling, whose cumulative sum
        has none on a GPU."""
        before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
        try:
            if self.deterministic:
                torch.use_deterministic_algorithms(True)
            with self.products():
                yield
        finally:
            if self.deterministic:
                torch.use_deterministic_algorithms(before[0], warn_only=before[1])
