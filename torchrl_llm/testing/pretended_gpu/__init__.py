"""A CUDA device that is pretended: faults of devices and waits for them, found and tested on a
machine without a GPU.

Inside :func:`pretended_gpu`, ``device="cuda"`` works, PyTorch says that there is a GPU, and
everything is computed on the CPU: tensors have real values, and each says on which device it would
be. What a GPU would do then is known:

- An operation that mixes devices raises :class:`DeviceError`, which names file and line; and so do
  a generator of another device, ``numpy()`` of a tensor of the GPU, and ``autocast("cpu")`` around
  a product there, which would change nothing.
- Each wait of the host for the device (``item()``, ``tolist()``, ``nonzero``, ``.cpu()``, indexing
  by a mask or by ids of the host, blocking copies, ``synchronize``) is counted by its place:
  PyTorch runs ahead of a GPU, and each wait lets it run dry.
- Each call of ``scaled_dot_product_attention`` is noted with the kernel that PyTorch would choose
  on an H100, shapes and place.

Places are in your own code or of this package: frames of PyTorch and of other installed
packages are passed over.

    >>> import torch
    >>> def loss(logits, labels):
    ...     weights = torch.ones(len(labels))
    ...     return (logits.log_softmax(-1).gather(1, labels[:, None])[:, 0] * weights).sum()
    >>> with pretended_gpu() as gpu:
    ...     logits, labels = torch.zeros(4, 8, device="cuda"), torch.zeros(4, dtype=torch.int64, device="cuda")
    ...     loss(logits, labels)
    Traceback (most recent call last):
    torchrl_llm...DeviceError: mul(cuda:0 [4], cpu [4]) mixes devices at <doctest ...>:3

What it does not do, and where it differs:

- Speed, the order in which kernels run, rounding and the capacity of the memory are not pretended;
  sizes are counted. Streams and events do nothing, and measure 0 ms. A CUDA graph cannot be
  captured: PyTorch built for CPUs has none, and says so.
- Draws come from the CPU's generators: ``torch.cuda.manual_seed`` does nothing, and a checkpoint
  that forgets the state of the GPU's global generator is not found.
- ``autocast("cpu")`` changes no product, of the CPU's tensors neither.
- Functions of ``torch.compile`` run as if they were not compiled: what is said of them is true of
  the eager ones.
- Other threads see no GPU. ``device="cuda"`` is an error of PyTorch's there, and a tensor says that
  it is on the CPU, where its results stay: they are an error of devices once this thread computes
  with them. Nor do other processes, as if the machine they run on had no GPU: a tensor of the GPU
  that is pickled for one cannot be loaded there.
- ``torch.save`` keeps the device, as it does on a GPU: a file that is loaded outside needs
  ``map_location="cpu"``.
- Sparse tensors are where their values are; how often their kernels wait (``coalesce``,
  ``to_sparse``) is not counted.
- ``print(tensor)`` counts as one wait, though a GPU waits for several copies.
- Pinned memory is noted: only from it is ``copy_`` or ``to`` with ``non_blocking=True`` no wait.
  That the host must not read early what was copied to it so is not checked.
- A device beyond ``count`` is an error, such as ``cuda:1`` by default. Collectives between devices
  are not pretended.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from torchrl_llm.testing.pretended_gpu import _cuda
from torchrl_llm.testing.pretended_gpu._modes import Functions, Operations
from torchrl_llm.testing.pretended_gpu._record import AttentionCall, DeviceError, PretendedGPU, Wait

__all__ = ["AttentionCall", "DeviceError", "PretendedGPU", "Wait", "pretended_gpu"]


@contextmanager
def pretended_gpu(*, count: int = 1, memory: int = 80 * 2**30, raise_errors: bool = True) -> Iterator[PretendedGPU]:
    """Pretend CUDA devices, H100s, in this thread; yields what is noted of them.

    accelerate's device and precision, of which a process has one, are chosen again inside, and are
    what they were afterwards.

    Args:
        count: number of devices; default 1.
        memory: bytes that each says it has; default 80 GiB.
        raise_errors: whether an error of devices is raised, as a GPU would; default ``True``. With
            ``False`` they are only collected in :attr:`PretendedGPU.errors`, so that one run shows
            all of them.

    Raises:
        RuntimeError: there is a GPU already, real or pretended.

    Examples:
        >>> with pretended_gpu() as gpu:
        ...     layer = torch.nn.Linear(4, 4, device=gpu.device)
        ...     layer(torch.ones(2, 4, device="cuda")).sum().backward()
        ...     gpu.reset()
        ...     norm = float(layer.weight.grad.norm())
        >>> [(wait.what, count) for wait, count in gpu.waits.items()]
        [('item', 1)]
        >>> layer.weight.grad.device  # outside, it is a tensor of the CPU
        device(type='cpu')
    """
    if torch.cuda.is_available():
        raise RuntimeError(
            "pretended_gpu() is for machines without a GPU, and not for use inside itself: PyTorch sees a CUDA device."
        )
    gpu = PretendedGPU(count=count, memory=memory, raise_errors=raise_errors)
    with ExitStack() as entered:
        functions = Functions(gpu)
        for each in (
            _cuda.accelerate_state(),
            _cuda.loading(),
            _cuda.memory_maps(),
            _cuda.files(gpu),
            _cuda.autocast(gpu),
            _cuda.devices(gpu),
            functions.called_back(),
        ):
            entered.enter_context(each)
        entered.enter_context(functions)
        entered.enter_context(Operations(gpu))
        yield gpu
