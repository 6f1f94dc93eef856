"""What PyTorch, accelerate and tensordict say and keep of CUDA devices, replaced while some are
pretended."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from tensordict.memmap import MemoryMappedTensor
from torch import Tensor, serialization
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import DefaultDeviceType

from torchrl_llm.testing.pretended_gpu._record import HOST, PretendedGPU, device_of, device_of_memory


def _queue(gpu: PretendedGPU) -> type:
    """Streams and events, which do nothing but wait; a class, because annotations name it."""

    class Queue(mock.MagicMock):
        def __init__(self, *_: Any, **given: Any) -> None:
            super().__init__(**given)

        def synchronize(self) -> None:
            gpu.wait("synchronize")

        def is_capturing(self) -> bool:
            return False

        def elapsed_time(self, end: Any) -> float:
            return 0.0

    return Queue


@contextmanager
def devices(gpu: PretendedGPU) -> Iterator[None]:
    """``torch.cuda``, ``torch.accelerator`` and ``torch.Generator``."""

    def empty_cache() -> None:
        gpu.emptied += 1

    def set_device(device: Any) -> None:
        gpu.current = gpu.normal(device).index

    class device:
        def __init__(self, wanted: Any) -> None:
            self.idx = gpu.normal(wanted).index

        def __enter__(self) -> None:
            self.prev_idx, gpu.current = gpu.current, self.idx

        def __exit__(self, *_: object) -> None:
            gpu.current = self.prev_idx

    def allocated(wanted: Any = None) -> int:
        return gpu.allocated(gpu.normal(wanted).index)

    properties = SimpleNamespace(
        name="pretended H100", total_memory=gpu.memory, major=9, minor=0, multi_processor_count=132
    )
    state = torch.zeros(16, dtype=torch.uint8)
    says: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda *_, **__: True,
        "device_count": lambda: gpu.count,
        "current_device": lambda: gpu.current,
        "get_device_name": lambda *_: properties.name,
        "get_device_properties": lambda wanted=None: gpu.normal(wanted) and properties,
        "get_device_capability": lambda *_: (9, 0),
        "mem_get_info": lambda wanted=None: (gpu.memory - allocated(wanted), gpu.memory),
        **dict.fromkeys(
            ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"), allocated
        ),
        "synchronize": lambda *_: gpu.wait("synchronize"),
        "set_device": set_device,
        "device": device,
        "empty_cache": empty_cache,
        "get_rng_state": lambda *_: state.clone(),
        "get_rng_state_all": lambda: [state.clone() for _ in range(gpu.count)],
        "is_current_stream_capturing": lambda: False,
        **dict.fromkeys(("Event", "Stream", "current_stream", "default_stream"), _queue(gpu)),
        "stream": lambda *_: nullcontext(),
    }
    nothing: tuple[str, ...] = (
        "_lazy_init",
        "init",
        "ipc_collect",
        "reset_peak_memory_stats",
        "manual_seed",
        "manual_seed_all",
    )
    nothing += ("set_rng_state", "set_rng_state_all")
    says |= {name: lambda *_, **__: None for name in nothing}
    accelerator: dict[str, Any] = {
        "is_available": lambda: True,
        "current_accelerator": lambda *_, **__: torch.device("cuda"),
        "device_count": lambda: gpu.count,
        "current_device_index": lambda: gpu.current,
        "set_device_index": set_device,
        "current_stream": lambda *_: says["Stream"](),
        "synchronize": says["synchronize"],
    }
    with (
        mock.patch.multiple(torch.cuda, **says),
        mock.patch.multiple(torch.accelerator, **accelerator),
        # Asked for once, and kept.
        mock.patch.object(DefaultDeviceType, "_default_device_type", None),
        mock.patch.object(torch, "Generator", _generator(gpu)),
        mock.patch.object(torch._C, "_group_tensors_by_device_and_dtype", _by_device_and_dtype),
    ):
        yield


@contextmanager
def files(gpu: PretendedGPU) -> Iterator[None]:
    """``torch.save`` writes where a tensor is, and ``torch.load`` puts it there, or where
    ``map_location`` says."""
    tag, restore = serialization.location_tag, serialization.default_restore_location

    def location_tag(storage: torch.UntypedStorage) -> str:
        if (device := device_of_memory(storage)) == HOST:
            return tag(storage)
        gpu.wait("copy to the host")
        return str(device)

    def restore_location(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage:
        if not location.startswith("cuda"):
            return restore(storage, location)
        gpu.wait("copy to the device")
        gpu.put_memory(storage, gpu.normal(location))
        return storage

    with mock.patch.multiple(serialization, location_tag=location_tag, default_restore_location=restore_location):
        yield


def _by_device_and_dtype(lists: list[list[Any]], with_indices: bool = False) -> dict[Any, Any]:
    """How optimizers and clipping group tensors: by the tensors of the first list; empty lists stay
    so."""
    groups: dict[Any, tuple[list[list[Any]], list[int]]] = {}
    for index, first in enumerate(lists[0]):
        members, indices = groups.setdefault((device_of(first), first.dtype), ([[] for _ in lists], []))
        indices.append(index)
        for group, values in zip(members, lists, strict=True):
            group.extend(values[index : index + 1])
    return groups


def _generator(gpu: PretendedGPU) -> type:
    """``torch.Generator`` for devices that are pretended, too."""
    real = torch.Generator

    class AnyGenerator(type(real)):  # type: ignore[misc]
        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, real)

    class Generator(real, metaclass=AnyGenerator):  # type: ignore[misc, valid-type]
        def __new__(cls, device: Any = HOST) -> Any:
            made = super().__new__(cls)
            made.pretended = gpu.normal(device)
            return made

        @property
        def device(self) -> torch.device:
            return self.pretended

    return Generator


@contextmanager
def autocast(gpu: PretendedGPU) -> Iterator[None]:
    """Autocast of "cuda" is the CPU's, where all is computed; autocast of "cpu" is only noted."""
    is_enabled, enable = torch.is_autocast_enabled, torch.set_autocast_enabled
    get_dtype, set_dtype = torch.get_autocast_dtype, torch.set_autocast_dtype
    host_dtype, before = [get_dtype("cpu")], get_dtype("cpu")

    def is_autocast_enabled(device: str = "cuda") -> bool:
        return gpu.host_autocast if device == "cpu" else is_enabled("cpu")

    def set_autocast_enabled(device: str, enabled: bool) -> None:
        if device == "cpu":
            gpu.host_autocast = enabled
        else:
            enable("cpu", enabled)

    def get_autocast_dtype(device: str) -> torch.dtype:
        return host_dtype[0] if device == "cpu" else get_dtype("cpu")

    def set_autocast_dtype(device: str, dtype: torch.dtype) -> None:
        if device == "cpu":
            host_dtype[0] = dtype
        else:
            set_dtype("cpu", dtype)

    replaced: tuple[Any, ...] = (is_autocast_enabled, set_autocast_enabled, get_autocast_dtype, set_autocast_dtype)
    set_dtype("cpu", torch.float16)  # as it is for CUDA
    try:
        with mock.patch.multiple(torch, **{each.__name__: each for each in replaced}):
            yield
    finally:
        set_dtype("cpu", before)


@contextmanager
def accelerate_state() -> Iterator[None]:
    """accelerate's device and precision, of which a process has one, are put away."""
    states = PartialState, AcceleratorState, GradientState
    kept = [{**state._shared_state} for state in states]
    try:
        for state in states:
            state._shared_state.clear()
        yield
    finally:
        for state, values in zip(states, kept, strict=True):
            state._shared_state.clear()
            state._shared_state.update(values)


@contextmanager
def loading() -> Iterator[None]:
    """transformers loads in this thread: others see no GPU."""
    with mock.patch.dict(os.environ, HF_DEACTIVATE_ASYNC_LOAD="1"):
        yield


@contextmanager
def memory_maps() -> Iterator[None]:
    """tensordict's mapped tensors are a subclass, which PyTorch cannot make of a tensor that a
    dispatch mode has seen."""

    def without_modes(make: Callable[..., Any]) -> Callable[..., Any]:
        def made(*args: Any, **kwargs: Any) -> Any:
            args = tuple(each.detach().clone() if isinstance(each, Tensor) else each for each in args)
            with _disable_current_modes(), torch._C.DisableTorchFunction():
                return make(*args, **kwargs)

        return made

    names = ("from_tensor", "from_filename", "empty", "zeros", "full", "ones", "empty_like")
    with ExitStack() as patches:
        for name in names:
            make = without_modes(getattr(MemoryMappedTensor, name))
            patches.enter_context(mock.patch.object(MemoryMappedTensor, name, make))
        yield
