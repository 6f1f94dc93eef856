"""Parameters that leave the accelerator for a while: :func:`on_host`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def on_host(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Keep ``parameters`` in the host's memory, pinned for CUDA, and bring them back to where each one was.

    The ``nn.Parameter`` objects stay, so what refers to them (modules, optimizers, tied weights) need not know. Nothing
    is copied of parameters that are on the CPU already.
    """
    homes = [(parameter, parameter.device) for parameter in parameters if parameter.device.type != "cpu"]
    try:
        for parameter, _ in homes:
            parameter.data = _to_host(parameter.data)
        if homes and torch.cuda.is_available():
            torch.cuda.empty_cache()  # else the memory would stay with this process's allocator
        yield
    finally:
        for parameter, home in homes:
            parameter.data = parameter.data.to(home)


def _to_host(tensor: Tensor) -> Tensor:
    if tensor.device.type != "cuda":
        return tensor.cpu()
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor)
