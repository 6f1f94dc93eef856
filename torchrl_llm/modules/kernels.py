"""The kernels that PyTorch chooses from: of attention (:func:`attention_kernels`), of float32
products (:func:`float32_products`)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.backends import cuda, mkldnn

__all__ = ["Numerics", "attention_kernels", "float32_products"]

_MKLDNN: Any = mkldnn  # whose attributes type checkers do not see

# PyTorch has one switch for all threads: who enters first turns it off, who leaves last puts it
# back.
_LOCK = threading.Lock()
_found: list[bool] = []
"""What each that is inside found; the first of them found what was there before."""


@contextmanager
def attention_kernels() -> Iterator[None]:
    """Inside, ``scaled_dot_product_attention`` takes its flash, memory-efficient or math kernel,
    and not cuDNN's.

    PyTorch 2.11 and later would take cuDNN's first on H100s. Two things are wrong with it here.
    With a mask it has a gradient of NaN at some lengths (pytorch#196678). And it makes a plan for
    every new shape, 23 to 37 ms each: each micro-batch has new shapes, and so has each sampled
    token. A kernel that is switched off outside stays off, and threads may enter at the same time.

    Examples:
        >>> from torch.backends.cuda import cudnn_sdp_enabled
        >>> with attention_kernels():
        ...     cudnn_sdp_enabled()
        False
        >>> cudnn_sdp_enabled()
        True
    """
    with _LOCK:
        _found.append(cuda.cudnn_sdp_enabled())
        cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        with _LOCK:
            before = _found[0]
            _found.pop()
            if not _found:
                cuda.enable_cudnn_sdp(before)


@contextmanager
def float32_products(precision: str) -> Iterator[None]:
    """Inside, float32 products of the whole process have a precision; afterwards the one of before.

    Two computations that must agree to float32's rounding are compared under "highest": with TF32
    they differ a thousand times more, since it rounds factors that differ in their last bit to
    different 10 bits.

    Args:
        precision: as :func:`torch.set_float32_matmul_precision` takes it.

    Examples:
        >>> with float32_products("high"):
        ...     torch.get_float32_matmul_precision()
        'high'
        >>> torch.get_float32_matmul_precision()
        'highest'
    """
    backends = (cuda.matmul, _MKLDNN.matmul)
    of_each = [backend.fp32_precision for backend in backends]
    try:
        of_all = torch.get_float32_matmul_precision()
    except RuntimeError:
        # They were set apart, as `torch.backends.cuda.matmul.fp32_precision`: the common one cannot
        # be read then.
        of_all = "highest"
    try:
        torch.set_float32_matmul_precision(precision)
        yield
    finally:
        torch.set_float32_matmul_precision(of_all)
        for backend, before in zip(backends, of_each, strict=True):
            backend.fp32_precision = before


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

    def products(self) -> AbstractContextManager[None]:
        """Inside, float32 products have the precision. For sampling and learning alike, whose
        log-probs are compared."""
        precision = self.float32_matmul_precision
        return nullcontext() if precision is None else float32_products(precision)

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
