"""The two modes that pretend: :class:`Functions` for what Python calls, :class:`Operations` for
what is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from torchrl_llm.testing.pretended_gpu._attention import choose_kernel
from torchrl_llm.testing.pretended_gpu._record import (
    EITHER,
    HOST,
    AttentionCall,
    PretendedGPU,
    device_of,
    memory_of,
    place,
)

aten = torch.ops.aten

_ALL_KERNELS = [
    *(SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH),
]


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors of arguments, and those in lists among them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _same_memory(one: Tensor, other: Any) -> bool:
    return isinstance(other, Tensor) and _address(one) == _address(other)


def _address(tensor: Tensor) -> int | None:
    return None if (memory := memory_of(tensor)) is None else memory._cdata


class Functions(TorchFunctionMode):
    """Answers where a tensor is, and moves and makes tensors on the devices that are asked for.

    Attributes:
        making: where what C++ makes without a tensor to go by belongs, innermost call last.
    """

    def __init__(self, gpu: PretendedGPU) -> None:
        super().__init__()
        self.gpu = gpu
        self.making = gpu.making

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (answer := _ANSWERS.get(func)) is not None:
            return answer(self, func, *args, **kwargs)
        if kwargs.get("device") is not None or kwargs.get("pin_memory"):
            return self.make(func, args, dict(kwargs))
        device = next((device_of(each) for each in _tensors(args)), HOST)
        self.check_generator(kwargs.get("generator"), device)
        with self.makes_on(device):
            return func(*args, **kwargs)

    def check_generator(self, generator: Any, target: torch.device) -> None:
        """A generator draws on its own device only."""
        if generator is not None and generator.device.type != target.type:
            self.gpu.fault(f"a generator of {generator.device.type!r} draws on {target.type!r}")

    @contextmanager
    def makes_on(self, device: torch.device) -> Iterator[None]:
        """Inside, what C++ makes belongs on ``device``."""
        self.making.append(device)
        try:
            yield
        finally:
            self.making.pop()

    def on(self) -> AbstractContextManager[Any]:
        """Enter the mode where C++ calls back into Python and has left it."""
        stack = torch.overrides._get_current_function_mode_stack()
        return nullcontext() if any(mode is self for mode in stack) else self

    @contextmanager
    def called_back(self) -> Iterator[None]:
        """The mode is also on in what backward passes and hooks of saved tensors run, such as
        checkpointed forwards."""
        run, push = torch.autograd._engine_run_backward, torch._C._autograd._push_saved_tensors_default_hooks

        def run_here(*args: Any, **options: Any) -> Any:
            with self.on(), self.makes_on(EITHER):
                return run(*args, **options)

        def push_here(*hooks: Callable[[Any], Any]) -> None:
            push(*(self.hook(each) for each in hooks))

        with (
            mock.patch.object(torch.autograd, "_engine_run_backward", run_here),
            mock.patch.object(torch._C._autograd, "_push_saved_tensors_default_hooks", push_here),
        ):
            yield

    def hook(self, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """``function``, called with the mode on."""

        def called(value: Any) -> Any:
            with self.on(), self.makes_on(HOST):
                return function(value)

        return called

    def make(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A factory with ``device=`` or ``pin_memory=``."""
        pinned, given = kwargs.pop("pin_memory", False), kwargs.get("device")
        device = HOST if given is None else self.gpu.normal(given)
        if device.type == "cuda":
            kwargs["device"] = HOST
        self.check_generator(kwargs.get("generator"), device)
        with self.makes_on(device):
            made = func(*args, **kwargs)
        if isinstance(made, Tensor) and device.type in ("cpu", "cuda"):
            self.gpu.put(made, device)
            return self.pin_memory(None, made) if pinned else made
        return made

    def make_of_data(self, func: Callable[..., Any], data: Any, *args: Any, **kwargs: Any) -> Any:
        """``torch.tensor`` and its kin: data of the host are copied to the device."""
        source = device_of(data) if isinstance(data, Tensor) else HOST
        device = self.gpu.normal(kwargs.get("device") or source)
        if device.type == "cuda":
            kwargs["device"] = HOST
        made = func(data, *args, **kwargs)
        if device.type not in ("cpu", "cuda"):
            return made
        if not _same_memory(made, data):
            self.gpu.put(made, source)
        return self.copy(made, device, lambda tensor: tensor, blocking=True)

    def move(self, func: Any, tensor: Tensor, *args: Any, copy: bool = False, **kwargs: Any) -> Tensor:
        """``Tensor.to``."""
        if args and isinstance(args[0], Tensor):
            args = (self.device(None, args[0]), args[0].dtype, *args[1:])
        if args and isinstance(args[0], int) and not isinstance(args[0], bool):
            args = (self.gpu.normal(args[0]), *args[1:])
        if isinstance(kwargs.get("device"), int):
            kwargs["device"] = self.gpu.normal(kwargs["device"])
        device, dtype, non_blocking, layout = torch._C._nn._parse_to(*args, **kwargs)
        asked = {"dtype": dtype, "memory_format": layout, "copy": copy or None}
        options: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}

        def change(given: Tensor) -> Tensor:
            return given.to(**options) if options else given

        if device is None or device.type not in ("cpu", "cuda"):
            return tensor.to(device=device, **options) if device is not None else change(tensor)
        return self.copy(tensor, self.gpu.normal(device), change, blocking=not non_blocking)

    def copy(
        self, tensor: Tensor, device: torch.device, change: Callable[[Tensor], Tensor], *, blocking: bool
    ) -> Tensor:
        """``tensor``, changed, on ``device``."""
        source = device_of(tensor)
        moved = change(tensor)
        if source == device:
            return moved
        moved = moved.clone() if _same_memory(moved, tensor) else moved
        pageable = source == HOST and not self.is_pinned(None, tensor)
        if HOST in (source, device) and (blocking or pageable):
            self.gpu.wait("copy to the device" if source == HOST else "copy to the host")
        self.gpu.put(moved, device)
        return moved

    # Answers: of the mode and the function, then what the function gets.

    def device(self, func: Any, tensor: Tensor) -> torch.device:
        """``Tensor.device``."""
        found = device_of(tensor)
        return torch.Tensor.device.__get__(tensor) if found == EITHER else found

    def is_cuda(self, func: Any, tensor: Tensor) -> bool:
        """``Tensor.is_cuda``."""
        return device_of(tensor).type == "cuda"

    def is_cpu(self, func: Any, tensor: Tensor) -> bool:
        """``Tensor.is_cpu``."""
        return self.device(None, tensor).type == "cpu"

    def get_device(self, func: Any, tensor: Tensor) -> int:
        """``Tensor.get_device``."""
        return -1 if (device := device_of(tensor)).index is None else device.index

    def cpu(self, func: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """``Tensor.cpu``."""
        return self.copy(tensor, HOST, lambda given: given, blocking=True)

    def cuda(self, func: Any, tensor: Tensor, device: Any = None, non_blocking: bool = False, **kwargs: Any) -> Tensor:
        """``Tensor.cuda``."""
        return self.copy(tensor, self.gpu.normal(device), lambda given: given, blocking=not non_blocking)

    def numpy(self, func: Any, tensor: Tensor, *args: Any, force: bool = False, **kwargs: Any) -> Any:
        """``Tensor.numpy`` and ``Tensor.__array__``."""
        if device_of(tensor).type == "cuda":
            if force:
                tensor = self.cpu(None, tensor)
            else:
                self.gpu.fault("numpy() of a tensor of the GPU, which needs .cpu() first,")
        return func(tensor, *args, **{"force": True} if force else {}, **kwargs)

    def to_list(self, func: Any, tensor: Tensor) -> Any:
        """``Tensor.tolist``."""
        if device_of(tensor).type == "cuda":
            self.gpu.wait("tolist")
        return func(tensor)

    def show(self, func: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> str:
        """``Tensor.__repr__``, for which the values are copied to the host."""
        device = device_of(tensor)
        if device.type != "cuda":
            return func(tensor, *args, **kwargs)
        self.gpu.wait("print")
        # the text names other devices
        with mock.patch.object(torch._C, "_get_default_device", return_value="cuda"):
            return func(tensor, *args, **kwargs).replace("device='cpu'", f"device='{device}'", 1)

    def is_pinned(self, func: Any, tensor: Tensor, *args: Any) -> bool:
        """``Tensor.is_pinned``."""
        return getattr(memory_of(tensor), "pinned", False)

    def pin_memory(self, func: Any, tensor: Tensor, *args: Any) -> Tensor:
        """``Tensor.pin_memory``."""
        if device_of(tensor).type == "cuda":
            self.gpu.fault("memory of the GPU is pinned, and only that of the host can be")
        if self.is_pinned(None, tensor):
            return tensor
        pinned = tensor.clone()
        pinned.untyped_storage().pinned = True  # type: ignore[attr-defined]
        return pinned

    def deep_copy(self, func: Any, tensor: Tensor, memo: Any) -> Tensor:
        """``Tensor.__deepcopy__``."""
        copied = func(tensor, memo)
        if (device := device_of(tensor)) != EITHER:
            self.gpu.put(copied, device)
        return copied

    def new_tensor(self, func: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """``Tensor.new_tensor``."""
        return self.make_of_data(torch.tensor, *args, **{"device": self.device(None, tensor)} | kwargs)

    def histogram(self, func: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """``torch.histc``, which counts integers on a GPU only."""
        with self.makes_on(device_of(tensor)):
            return func(tensor.double(), *args, **kwargs).to(tensor.dtype)

    def attention(self, func: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """``scaled_dot_product_attention``."""
        given = [query, key, value, *args]
        if device_of(query).type == "cuda" and self.note_attention(given, kwargs) is None:
            raise RuntimeError("No available kernel. Aborting execution.")
        restricted = not torch.backends.cuda.math_sdp_enabled()
        with sdpa_kernel(_ALL_KERNELS) if restricted else nullcontext(), self.makes_on(device_of(query)):
            return func(*given, **kwargs)

    def note_attention(self, given: list[Any], kwargs: dict[str, Any]) -> str | None:
        """Note a call; returns its kernel."""
        if torch.is_autocast_enabled("cuda"):
            half = torch.get_autocast_dtype("cuda")
            given = [each.to(half) if isinstance(each, Tensor) and each.is_floating_point() else each for each in given]
        query, key, value, *more = given
        kernel = choose_kernel(*given, **kwargs)
        mask = more[0] if more else kwargs.get("attn_mask")
        gradient = torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, value))
        called = AttentionCall(
            kernel or "none", place(), mask is not None, gradient, tuple(query.shape), tuple(key.shape)
        )
        self.gpu.attention[called] += 1
        return kernel


_ANSWERS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.Tensor.device.__get__: Functions.device,
    torch.Tensor.is_cuda.__get__: Functions.is_cuda,  # type: ignore[attr-defined]
    torch.Tensor.is_cpu.__get__: Functions.is_cpu,  # type: ignore[attr-defined]
    torch.Tensor.get_device: Functions.get_device,
    torch.Tensor.to: Functions.move,
    torch.Tensor.cpu: Functions.cpu,
    torch.Tensor.cuda: Functions.cuda,
    torch.Tensor.numpy: Functions.numpy,
    torch.Tensor.__array__: Functions.numpy,
    torch.Tensor.tolist: Functions.to_list,
    torch.Tensor.__repr__: Functions.show,
    torch.Tensor.is_pinned: Functions.is_pinned,
    torch.Tensor.pin_memory: Functions.pin_memory,
    torch.Tensor.__deepcopy__: Functions.deep_copy,
    torch.Tensor.new_tensor: Functions.new_tensor,
    torch.tensor: Functions.make_of_data,
    torch.as_tensor: Functions.make_of_data,
    torch.asarray: Functions.make_of_data,
    torch.histc: Functions.histogram,
    scaled_dot_product_attention: Functions.attention,
}

_WAITS = {
    aten._local_scalar_dense.default: "item",
    aten.item.default: "item",  # in inference mode these arrive whole
    aten.is_nonzero.default: "bool",
    aten.allclose.default: "allclose",
    aten.equal.default: "equal",
    aten.nonzero.default: "nonzero",
    aten.masked_select.default: "masked_select",
    aten._unique2.default: "unique",
    aten.unique_dim.default: "unique",
    aten.unique_consecutive.default: "unique_consecutive",
    aten.bincount.default: "bincount",
}
_READS = {aten.index.Tensor, aten._unsafe_index.Tensor}
_WRITES = {aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
_COPIES = {aten.copy_.default, aten._foreach_copy_.default}
_ANY_DEVICES = {aten._to_copy.default, aten.set_.source_Tensor, aten.lift_fresh.default}
_SHAPES_ONLY = ("expand_as", "view_as", "reshape_as")
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "linear", "matmul")
# With any other, a scalar of the host may stand beside tensors of a GPU.
_NO_SCALARS = (
    *("cat", "stack", "index_select", "gather", "searchsorted", "embedding"),
    *("scatter", "scatter_", "scatter_add", "scatter_add_", "index_add", "index_add_", "index_copy", "index_copy_"),
    *_PRODUCTS,
)
_NO_KERNEL = ("lift_fresh", "detach", "_local_scalar_dense", "item", "alias")


class Operations(TorchDispatchMode):
    """Compares the devices of an operation's tensors, notes where its results are, and counts
    kernels and waits."""

    def __init__(self, gpu: PretendedGPU) -> None:
        super().__init__()
        self.gpu = gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            return self.compute(func, args, kwargs or {})

    def compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation."""
        name = func._schema.name.removeprefix("aten::")
        tensors = [*_tensors((*args, *kwargs.values()))]
        devices = [device_of(each) for each in tensors]
        on_gpu = next((device for device in devices if device.type == "cuda"), None)
        if on_gpu is not None:
            self.note(func, name, args, kwargs, tensors[0])
            if any(device not in (on_gpu, EITHER) for device in devices):
                self.check(func, name, args, kwargs, tensors, devices)
        target = on_gpu or (self.gpu.making[-1] if not tensors else HOST)
        result = func(*args, **kwargs)
        if target != HOST and func not in _COPIES:
            self.place(func, name, tensors, result, target)
        return result

    def place(self, func: Any, name: str, tensors: list[Tensor], result: Any, target: torch.device) -> None:
        """Note that results are on ``target``, and that a kernel was launched for them."""
        results = [*_tensors([result])]
        known = {None, *map(_address, tensors)}
        fresh = [each for each in results if _address(each) not in known]
        for each in fresh:
            self.gpu.put(each, target)
        if target != EITHER and (fresh or func._schema.is_mutable) and name not in _NO_KERNEL:
            self.gpu.launches += 1

    def note(self, func: Any, name: str, args: Any, kwargs: Any, first: Tensor) -> None:
        """Count waits and products of tensors of a GPU."""
        if (what := _WAITS.get(func)) is not None and device_of(first).type == "cuda":
            self.gpu.wait(what)
        elif func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None:
            self.gpu.wait("repeat_interleave without output_size")
        elif func in _READS | _WRITES and any(each is not None and each.dtype == torch.bool for each in args[1]):
            # A number is written through the mask, without its ids.
            if not (func in _WRITES and args[2].dim() == 0):
                self.gpu.wait("index by a mask")
        elif name in _PRODUCTS:
            self.gpu.products[first.dtype] += 1
            if self.gpu.host_autocast:
                self.gpu.fault('autocast("cpu") changes nothing about a product of the GPU')

    def check(
        self, func: Any, name: str, args: Any, kwargs: Any, tensors: list[Tensor], devices: list[torch.device]
    ) -> None:
        """Tensors of two devices meet: allowed for copies, ids of the host and scalars of the
        host."""
        on_gpu = next(device for device in devices if device.type == "cuda")
        if func in _COPIES:
            self.check_copy(args, kwargs)
        elif func in _READS | _WRITES and devices[0].type == "cuda":
            value = args[2] if func in _WRITES else None
            if value is not None and value.dim() and device_of(value) != devices[0]:
                self.mixed(name, tensors, devices)
            elif any(each is not None and device_of(each) == HOST for each in args[1]):
                self.gpu.wait("index by ids of the host")
        elif func in _ANY_DEVICES or name in _SHAPES_ONLY:
            return
        else:
            others = [each for each, device in zip(tensors, devices, strict=True) if device not in (on_gpu, EITHER)]
            if name in _NO_SCALARS or any(each.dim() or device_of(each) != HOST for each in others):
                self.mixed(name, tensors, devices)

    def check_copy(self, args: Any, kwargs: Any) -> None:
        """``copy_`` between host and device."""
        into, source, non_blocking = args[0], args[1], kwargs.get("non_blocking") or args[2:3] == (True,)
        host = next(each for each in _tensors([into, source]) if device_of(each) == HOST)
        if not (non_blocking and getattr(memory_of(host), "pinned", False)):
            self.gpu.wait("copy_ between host and device")

    def mixed(self, name: str, tensors: list[Tensor], devices: list[torch.device]) -> None:
        """Note an operation that mixes devices."""
        shown = (f"{device} {[*each.shape]}" for each, device in zip(tensors, devices, strict=True))
        self.gpu.fault(f"{name}({', '.join(shown)}) mixes devices")
