"""Attention on a GPU: which kernels run, what a new shape costs, and whether masked gradients are
finite.

Shapes are taken from this library's calls: a stage of shared prefixes in an update (all queries of
a group of heads side by side, one mask), and a step of :class:`~torchrl_llm.modules.HFPolicy` (one
query for each row). Each is measured as the library calls it, inside
:func:`~torchrl_llm.modules.kernels.attention_kernels`, and as PyTorch chooses by itself.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.place import Place
from benchmarks.gpu.report import Part, expect
from torchrl_llm.modules.kernels import attention_kernels

CHOICES: dict[str, Callable[[], AbstractContextManager[None]]] = {"here": attention_kernels, "PyTorch's": nullcontext}
"""Who chooses the kernel."""

STEPS = 8
"""New shapes that are tried, one token longer each."""


class Shape(NamedTuple):
    """A call of attention: heads of keys, query heads for each, their size, rows, and queries and
    keys before them."""

    kv_heads: int
    heads: int
    size: int
    rows: int
    queries: int
    before: int

    def tensors(self, device: str, *, grad: bool, longer: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries, keys, values and the causal mask, with ``longer`` keys more."""
        keys = self.before + self.queries + longer
        options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16, "requires_grad": grad}
        query = torch.randn(self.rows, self.kv_heads, self.heads * self.queries, self.size, **options)
        key, value = (torch.randn(self.rows, self.kv_heads, keys, self.size, **options) for _ in "kv")
        places = torch.arange(keys, device=device)
        hidden = places[-self.queries :, None] < places
        mask = torch.zeros(hidden.shape, device=device, dtype=torch.bfloat16).masked_fill_(hidden, -torch.inf)
        return query, key, value, mask.repeat(self.heads, 1)


UPDATES = {
    "Qwen2.5-0.5B": Shape(2, 7, 64, 8, 61, 300),
    "Qwen2.5-1.5B": Shape(2, 6, 128, 8, 61, 300),
    "Qwen2.5-7B": Shape(4, 7, 128, 8, 61, 300),
}
DECODE = Shape(2, 7, 64, 64, 1, 300)


def attend(tensors: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    """Forward, and backward if there is a gradient."""
    query, key, value, mask = tensors
    found = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    if query.requires_grad:
        found.backward(found.detach())


def kernels(place: Place, tensors: tuple[Tensor, Tensor, Tensor, Tensor]) -> list[str]:
    """Names of what runs on the device."""
    activity = ProfilerActivity.CUDA if place.on_gpu else ProfilerActivity.CPU
    with profile(activities=[activity]) as seen:
        attend(tensors)
        place.wait()
    names = {event.name[:90] for event in seen.events()}
    return sorted(names if place.on_gpu else {name for name in names if "attention" in name})


def milliseconds(place: Place, work: Callable[[], None]) -> float:
    """Of one call."""
    place.wait()
    start = time.perf_counter()
    work()
    place.wait()
    return 1e3 * (time.perf_counter() - start)


def measured(place: Place, shape: Shape, *, grad: bool) -> dict[str, Any]:
    """By who chooses: kernels, and milliseconds of a shape that is new and of the same again
    (mean)."""
    shape = shape._replace(before=place.size(shape.before), rows=place.size(shape.rows))
    found: dict[str, Any] = {}
    for name, choice in CHOICES.items():
        with choice():
            attend(shape.tensors(place.device, grad=grad))  # loads what the first call loads
            # One token longer each; those that PyTorch chooses for are new to it as well.
            given = [shape.tensors(place.device, grad=grad, longer=1 + n) for n in range(STEPS)]
            new, again = ([milliseconds(place, partial(attend, each)) for each in given] for _ in range(2))
            ran = kernels(place, shape.tensors(place.device, grad=grad))
        found[name] = {"kernels": ran, "new_ms": sum(new) / STEPS, "again_ms": sum(again) / STEPS}
    return found


def not_finite(place: Place, keys: int, choice: str) -> int:
    """Entries of the gradient of masked queries that are not finite, where all logits are near -120
    (pytorch#196678)."""
    shape = Shape(1, 1, 64, 1, 64, keys - 64)
    query, key, value, mask = shape.tensors(place.device, grad=False)
    query, key = 0.1 * query, 0.1 * key
    query[..., 0], key[..., 0] = 1.0, -120 * 8.0
    query, key, value = (each.requires_grad_() for each in (query, key, value))
    with CHOICES[choice]():
        found = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        found.backward(torch.ones_like(found))
    return sum(int((~each.grad.isfinite()).sum()) for each in (query, key, value))


def finite_gradients(place: Place) -> dict[str, float]:
    """With the kernels that this library takes, gradients are finite at all lengths; how many
    PyTorch's choice has is noted."""
    lengths = (640, 704, 832)
    here, others = (sum(not_finite(place, keys, choice) for keys in lengths) for choice in CHOICES)
    return expect({"here": here, "PyTorch's": others}, here=0)


def checks(place: Place) -> dict[str, Part]:
    """All checks by name."""
    return {"masked attention has finite gradients": partial(finite_gradients, place)}


def measurements(place: Place) -> dict[str, Part]:
    """All measurements by name."""
    found: dict[str, Part] = {
        f"attention: an update's, {name}": partial(measured, place, shape, grad=True) for name, shape in UPDATES.items()
    }
    return found | {"attention: a decode step's": partial(measured, place, DECODE, grad=False)}
