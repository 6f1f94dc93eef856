"""The attention kernels that PyTorch chooses from in forwards and recomputations here: :func:`attention_kernels`."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch.backends import cuda

__all__ = ["attention_kernels"]

# PyTorch has one switch for all threads: who enters first turns it off, who leaves last puts it back.
_LOCK = threading.Lock()
_found: list[bool] = []
"""What each that is inside found; the first of them found what was there before."""


@contextmanager
def attention_kernels() -> Iterator[None]:
    """Inside, ``scaled_dot_product_attention`` takes its flash, memory-efficient or math kernel, and not cuDNN's.

    PyTorch 2.11 and later would take cuDNN's first on H100s. Two things are wrong with it here. With a mask it has a
    gradient of NaN at some lengths (pytorch#196678). And it makes a plan for every new shape, 23 to 37 ms each: each
    micro-batch has new shapes, and so has each sampled token. A kernel that is switched off outside stays off, and threads
    may enter at the same time.

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
