"""What is noted of a pretended GPU, and on which device a tensor would be."""

from __future__ import annotations

import sys
import sysconfig
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor

HOST = torch.device("cpu")
_SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
EITHER = torch.device("meta")
"""Of what C++ makes in a backward pass: on a GPU it would be on the device of a tensor that is not
seen here."""

_HERE = str(Path(__file__).parent)
_PACKAGE = Path(__file__).parents[2]
_PATHS = sysconfig.get_paths()
_INSTALLED = (*{_PATHS[name] for name in ("purelib", "platlib", "stdlib")}, str(Path(torch.__file__).parent), "<frozen")


class DeviceError(RuntimeError):
    """A GPU would refuse this operation, or silently do something else; the message names file and
    line."""


class Wait(NamedTuple):
    """A wait of the host for the device.

    Attributes:
        place: file and line; files of this package from ``torchrl_llm/`` on.
        what: the operation, such as ``"item"``.
    """

    place: str
    what: str


class AttentionCall(NamedTuple):
    """A call of ``scaled_dot_product_attention``.

    Attributes:
        kernel: what PyTorch would choose on an H100: ``"cudnn"``, ``"flash"``, ``"efficient"`` or
            ``"math"``.
        place: file and line.
        mask: whether there was a mask.
        gradient: whether it will be differentiated.
        query: shape of the queries ``[B, H, Q, D]``.
        key: shape of the keys ``[B, H, K, D]``.
    """

    kernel: str
    place: str
    mask: bool
    gradient: bool
    query: tuple[int, ...]
    key: tuple[int, ...]


@dataclass
class PretendedGPU:
    """What happened on pretended GPUs.

    Attributes:
        count: number of devices.
        memory: bytes that each says it has.
        raise_errors: whether errors are raised, too.
        errors: messages of :class:`DeviceError`, and how often each came; also of those that
            somebody caught.
        waits: how often the host would have waited, by place and operation.
        attention: calls of attention, by kernel, place and shapes.
        products: matrix products on the device, by the dtype in which they are computed.
        launches: operations that would have launched a kernel.
        emptied: how often ``torch.cuda.empty_cache()`` was called.
        current: index of the current device.
    """

    count: int = 1
    memory: int = 80 * 2**30
    raise_errors: bool = True
    errors: Counter[str] = field(default_factory=Counter)
    waits: Counter[Wait] = field(default_factory=Counter)
    attention: Counter[AttentionCall] = field(default_factory=Counter)
    products: Counter[torch.dtype] = field(default_factory=Counter)
    launches: int = 0
    emptied: int = 0
    current: int = 0
    host_autocast: bool = field(default=False, repr=False)
    making: list[torch.device] = field(default_factory=lambda: [HOST], repr=False)
    _storages: WeakSet[torch.UntypedStorage] = field(default_factory=WeakSet, repr=False)

    @property
    def device(self) -> torch.device:
        """The current device."""
        return torch.device("cuda", self.current)

    def reset(self) -> None:
        """Set all counts to zero; tensors stay where they are."""
        for counter in (self.errors, self.waits, self.attention, self.products):
            counter.clear()
        self.launches = self.emptied = 0

    def waits_in(self, *places: str) -> int:
        """The number of waits in files whose names begin so, such as ``"torchrl_llm/modules/"``."""
        return sum(number for wait, number in self.waits.items() if wait.place.startswith(places))

    def report(self) -> str:
        """All of it as text, the most frequent first.

        Examples:
            >>> print(PretendedGPU(launches=3, waits=Counter({Wait("mine.py:7", "item"): 2})).report())
            3 kernels launched, 2 waits, 0 calls of attention, 0 errors
                 2 wait: item at mine.py:7
        """
        numbers = [
            f"{self.launches} kernels launched",
            f"{self.waits.total()} waits",
            f"{self.attention.total()} calls of attention",
        ]
        lines = [", ".join([*numbers, f"{self.errors.total()} errors"])]
        lines += [f"{number:6} error: {message}" for message, number in self.errors.most_common()]
        lines += [f"{number:6} wait: {wait.what} at {wait.place}" for wait, number in self.waits.most_common()]
        kinds: Counter[str] = Counter()
        for call, number in self.attention.items():
            kinds[f"{call.kernel}, {'with' if call.mask else 'without'} a mask at {call.place}"] += number
        return "\n".join([*lines, *(f"{number:6} attention: {kind}" for kind, number in kinds.most_common())])

    def allocated(self, index: int | None = None) -> int:
        """Bytes of the tensors on a device (default: the current one)."""
        device = torch.device("cuda", self.current if index is None else index)
        return sum(storage.nbytes() for storage in self._storages if device_of_memory(storage) == device)

    # What the modes write.

    def normal(self, device: torch.device | str | int | None) -> torch.device:
        """``device`` with an index; one that there is not is an error."""
        found = torch.device("cuda", device) if isinstance(device, int) else torch.device(device or "cuda")
        if found.type != "cuda":
            return found
        if found.index is None:
            return self.device
        if found.index >= self.count:
            self.fault(f"{found} does not exist: the number of CUDA devices is {self.count}, and the first is cuda:0,")
        return found

    def put(self, tensor: Tensor, device: torch.device) -> None:
        """Note that the memory of ``tensor`` is on ``device``."""
        if (storage := memory_of(tensor)) is None:
            raise NotImplementedError(f"a pretended GPU holds dense and sparse tensors only: given {tensor.layout}")
        self.put_memory(storage, device)

    def put_memory(self, storage: torch.UntypedStorage, device: torch.device) -> None:
        """Note that ``storage`` is on ``device``."""
        storage.pretended = device  # type: ignore[attr-defined]
        if device.type == "cuda":
            self._storages.add(storage)

    def wait(self, what: str) -> None:
        """Count a wait."""
        self.waits[Wait(place(), what)] += 1

    def fault(self, message: str) -> None:
        """Note an error of devices, and raise it."""
        message = f"{message} at {place()}"
        self.errors[message] += 1
        if self.raise_errors:
            raise DeviceError(message)


def device_of_memory(storage: torch.UntypedStorage) -> torch.device:
    """Where memory would be."""
    return getattr(storage, "pretended", HOST)


def memory_of(tensor: Tensor) -> torch.UntypedStorage | None:
    """The memory of a tensor, of a sparse one the memory of its values; ``None`` for tensors that
    functorch wraps or oneDNN packed."""
    try:
        if tensor.layout in _SPARSE:
            tensor = tensor._values() if tensor.layout == torch.sparse_coo else tensor.values()
        # which the mode does not answer for, as it does for the tensor's device
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None


def device_of(tensor: Tensor) -> torch.device:
    """Where a tensor would be: :data:`HOST`, a CUDA device, or :data:`EITHER` for those that have
    no memory, too."""
    storage = memory_of(tensor)
    return EITHER if storage is None or storage.device.type != "cpu" else device_of_memory(storage)


def place() -> str:
    """File and line of the innermost frame that is neither of an installed package but this, nor of
    this folder."""
    frame, package = sys._getframe(1), str(_PACKAGE)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_HERE):
            if name.startswith(package):
                return f"{Path(name).relative_to(_PACKAGE.parent)}:{frame.f_lineno}"
            if not name.startswith(_INSTALLED):
                return f"{name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "a place outside your code"
