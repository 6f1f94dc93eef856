"""LoRA whose products with the frozen weights are computed in bfloat16:
:func:`narrow_base_products`.

Everything else stays float32: weights, activations, adapters, sums. For CPUs with instructions for
bfloat16, which multiply about twice as fast; on a GPU autocast does the same and more.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from peft.tuners.lora import Linear
from torch import Tensor, nn
from torch.nn import functional as nnf

from torchrl_llm.modules.adapters import AdapterError, adapter_layers, is_plain

__all__ = ["narrow_base_products"]

_COPY, _COPIED = "weight_in_bfloat16", "weight_copied"
"""Of a layer: the copy, and where its weight was, in which version, when it was made."""


class _LoraProduct(torch.autograd.Function):
    """``x W' + b + scaling * x A' B'`` of ``x [n, in]``, with ``W`` in bfloat16 and without a
    gradient.

    As one function: PEFT's operations one by one make four tensors of the output's size, and as
    many in the backward.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scaling: float
    ) -> Tensor:
        inner = x @ a.t()
        out = _narrow(x, weight)
        if bias is not None:
            out += bias
        ctx.save_for_backward(x, inner, weight, a, b)
        ctx.scaling = scaling
        return out.addmm_(inner, b.t(), alpha=scaling)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,), (x, inner, weight, a, b) = gradients, ctx.saved_tensors
        of_inner = gradient @ b
        of_b = (gradient.t() @ inner).mul_(ctx.scaling)
        of_a = (of_inner.t() @ x).mul_(ctx.scaling)
        of_x = None
        if ctx.needs_input_grad[0]:
            of_x = _narrow(gradient, weight.t()).addmm_(of_inner, a, alpha=ctx.scaling)
        return of_x, None, None, of_a, of_b, None


def _narrow(x: Tensor, weight: Tensor) -> Tensor:
    """``x W'`` in float32, of factors in bfloat16; sums are float32 and rounded to bfloat16
    once."""
    return nnf.linear(x.to(torch.bfloat16), weight).to(x.dtype)


def narrow_base_products(model: nn.Module) -> None:
    """Let the LoRA layers of ``model`` multiply by their frozen weights in bfloat16, in every
    forward and backward from now on.

    Sampling and scoring too, and with adapters off (the reference), so that log-probs stay
    comparable. Each layer holds a copy of its weight in bfloat16 beside the float32 one: 2 bytes
    more a weight. Where the weight is another one at a forward, or was changed in place
    (``load_state_dict``), the copy is made again first. A change through ``.data`` is not seen:
    call this again.

    Args:
        model: with adapters (:func:`~torchrl_llm.modules.load_actor_critic`).

    Raises:
        AdapterError: the model has a LoRA layer that is not plain LoRA on a float32 ``nn.Linear``,
            or none at all.
    """
    layers = [module for module in model.modules() if isinstance(module, Linear)]
    wrong = [layer for layer in layers if not _fits(layer)]
    if wrong or not layers:
        such = [f"{len(wrong)} of them are not, such as one on {layer.base_layer.weight.dtype}" for layer in wrong]
        found = such[0] if such else "there are none"
        raise AdapterError(
            f"base_products='bfloat16' is for plain LoRA layers on float32 nn.Linear modules, and {found}. Load the base in "
            "float32 (dtype), without quantization, or leave base_products out."
        )
    for layer in layers:
        weight = layer.base_layer.weight
        layer.register_buffer(_COPY, weight.detach().to(torch.bfloat16), persistent=False)
        setattr(layer, _COPIED, _identity(weight))
        # Copies, also by pickle, bind it to the copy; of a method, pickle knows only a name
        # that its class does not have.
        layer.forward = partial(_forward, layer)


def _fits(layer: Any) -> bool:
    is_float32 = layer.base_layer.weight.dtype == torch.float32
    return is_float32 and all(is_plain(layer, name) for name in (None, *layer.lora_A))


def _identity(weight: Tensor) -> tuple[int, int]:
    return weight.data_ptr(), weight._version


def _narrow_weight(layer: Any) -> Tensor:
    """The weight in bfloat16, as it is now."""
    weight, copy = layer.base_layer.weight, getattr(layer, _COPY)
    if torch.compiler.is_compiling():
        # compile_decode: the forward of the prompts, which is not compiled, has looked before the
        # turn's first step
        return copy
    if (now := _identity(weight)) != getattr(layer, _COPIED):
        with torch.no_grad():
            copy.copy_(weight)
        setattr(layer, _COPIED, now)
    return copy


def has_narrow_base_products(model: nn.Module) -> bool:
    """Whether :func:`narrow_base_products` was called."""
    return any(hasattr(layer, _COPY) for layer in adapter_layers(model))


def _forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    active = [] if self.disable_adapters else [name for name in self.active_adapters if name in self.lora_A]
    if self.merged or args or kwargs or len(active) > 1 or torch.is_autocast_enabled(x.device.type):
        return Linear.forward(self, x, *args, **kwargs)
    weight, bias, flat = _narrow_weight(self), self.base_layer.bias, x.reshape(-1, x.shape[-1])
    if active:
        name = active[0]
        a, b = self.lora_A[name].weight, self.lora_B[name].weight
        out = _LoraProduct.apply(flat, weight, bias, a, b, self.scaling[name])
    else:
        out = _narrow(flat, weight)
        out = out if bias is None else out + bias
    return out.view(*x.shape[:-1], -1)
