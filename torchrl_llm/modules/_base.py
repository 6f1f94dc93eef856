"""The base model before adapters: loading it, switching off its randomness, compiling its
layers."""

from __future__ import annotations

import importlib.util
import logging
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import MethodType
from typing import Any, Literal

import torch
from peft import PeftModel
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Cache
from transformers.modeling_layers import GradientCheckpointingLayer

logger = logging.getLogger(__name__)

Quantization = Literal["nf4"]

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
# transformers keeps probabilities as bare numbers too: attention_dropout, attn_pdrop, layerdrop,
# drop_path_rate.
_PROBABILITY = re.compile(r"dropout|pdrop|layerdrop|drop_path|drop_prob")
# These are read in training mode only. PhiMoE's router_jitter_noise is none of them: its routing
# needs it in any mode.
_JITTER = {"jitter_noise", "input_jitter_noise", "moe_jitter_eps"}
# adapters, with and without gradients, times the shapes that PyTorch tells apart (0, 1, more)
_MAX_GRAPHS = 64


def load_base(
    model: str | Path | nn.Module,
    *,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    quantization: Quantization | None = None,
    master_weights: bool = False,
) -> Any:
    """A causal language model without dropout, in evaluation mode, from a path or as given.

    The arguments are the same as of :func:`torchrl_llm.modules.load_actor_critic`.
    """
    precision = _dtype(dtype)
    if master_weights and precision is not None and _is_narrow(precision):
        precision = None  # the checkpoint's own values, not rounded ones
    if isinstance(model, str | Path):
        options: dict[str, Any] = {"dtype": precision or "auto", "trust_remote_code": trust_remote_code}
        if attn_implementation is not None:
            options["attn_implementation"] = attn_implementation
        if quantization is not None:
            options["quantization_config"] = _quantization_config(quantization, precision)
            options["device_map"] = {"": device or "cpu"}
        lm: Any = AutoModelForCausalLM.from_pretrained(str(model), **options)
    elif isinstance(model, PeftModel):
        raise ValueError("model is a PeftModel already; expected the bare model. Merge and unload its adapter first.")
    elif quantization is not None:
        raise ValueError(
            f"quantization is {quantization!r}, but model is a {type(model).__name__} that is loaded already: "
            "weights are quantized while they are read. Pass its directory or hub id."
        )
    else:
        lm = model
        if attn_implementation is not None:
            lm.set_attn_implementation(attn_implementation)
        if precision is not None:
            lm.to(precision)
    # transformers refuses to move quantized weights; they were read to their device. Moved before
    # they are widened: the processes of a machine then share the mapped file, and none holds
    # float32 weights on the host.
    if device is not None and quantization is None:
        lm = lm.to(device)
    if master_weights:
        _widen(lm)
    for module in lm.modules():
        # bitsandbytes' kernel for inference on a CPU has no gradient
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    disable_randomness(lm)
    return lm.eval()


def unmap_weights(model: nn.Module) -> None:
    """Give weights on a CPU memory of their own.

    safetensors maps files into memory, and what an optimizer writes is in pages of the mapping.
    Writing over the file in place (``cp``, ``save_pretrained`` to the same folder) would put the
    file's values in the place of the trained ones.
    """
    for parameter in model.parameters():
        if parameter.device.type == "cpu":
            parameter.data = parameter.data.clone()


def _widen(model: Any) -> None:
    """Convert weights narrower than float32 to float32, and log what that costs."""
    # Measured with bfloat16 weights: steps of AdamW at a learning rate of 5e-6 change 2 to 8 % of
    # the entries.
    narrow = [parameter for parameter in model.parameters() if _is_narrow(parameter.dtype)]
    if not narrow:
        return
    before, dtype, after = model.get_memory_footprint(), narrow[0].dtype, 4 * sum(p.numel() for p in model.parameters())
    model.to(torch.float32)
    logger.warning(
        "All weights of %s train, so they are kept in float32 and not in %s, to which most of AdamW's steps would be lost: "
        "%.3g GiB instead of %.3g, and %.3g GiB with gradients and AdamW's two moments. Under autocast (mixed_precision) they "
        "still compute in half precision.",
        type(model).__name__,
        str(dtype).removeprefix("torch."),
        *(size / 2**30 for size in (after, before, 4 * after)),
    )


def _is_narrow(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and torch.finfo(dtype).bits < 32


def _dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    if dtype in (None, "auto"):
        return None
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype):
        raise ValueError(f"dtype is {dtype!r}; expected 'auto' or the name of a torch dtype such as 'bfloat16'.")
    return found


def _quantization_config(quantization: str, dtype: torch.dtype | None) -> BitsAndBytesConfig:
    if quantization != "nf4":
        raise ValueError(f"quantization is {quantization!r}; expected 'nf4' or None.")
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ImportError("quantization='nf4' needs bitsandbytes, which is not installed: pip install bitsandbytes")
    # Double quantization as in QLoRA: about 0.4 bits a parameter less.
    compute = {"bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": dtype or torch.bfloat16}
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", **compute)


def disable_randomness(model: nn.Module) -> None:
    """Set every dropout probability, layer drop and jitter inside ``model``, and in its
    configurations, to 0.

    The log-probs of a row must be the same whenever they are compared, and a recomputation must
    repeat its forward.
    """
    configs = {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}
    for module in model.modules():
        if isinstance(module, _DROPOUTS):
            module.p = 0.0
        _zero_probabilities(module, jitter=True)
    for config in configs.values():
        _zero_probabilities(config, jitter=False)


def _zero_probabilities(owner: Any, *, jitter: bool) -> None:
    for name, value in list(getattr(owner, "__dict__", {}).items()):
        if isinstance(value, float) and (_PROBABILITY.search(name) or (jitter and name in _JITTER)):
            setattr(owner, name, 0.0)


def compile_layers(decoder: nn.Module) -> None:
    """Compile the forward without a KV cache of every layer of a transformers decoder, in place.

    Generation stays as it is: its shapes change with every token. The layers share one compiled
    function, so the time to compile does not grow with their number. Each adapter, with and without
    gradients, is one graph; switching between adapters compiles nothing again.

    Args:
        decoder: what :func:`torchrl_llm.modules.lm.backbone` returns.

    Raises:
        ValueError: ``decoder`` has no layers of transformers' common base class.
    """
    layers = [module for module in decoder.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ValueError(
            f"compile=True: {type(decoder).__name__} has no layers derived from transformers' "
            "GradientCheckpointingLayer, which are what is compiled. Pass compile=False."
        )
    for layer in layers:
        layer_type: Any = type(layer)
        # A bound method, because copy.deepcopy binds it to the copy.
        layer.forward = MethodType(_forward(layer_type), layer)


@cache
def _forward(layer_type: Any) -> Callable[..., Any]:
    eager: Callable[..., Any] = layer_type.forward
    # A graph break or too many graphs is an error: a silent fall back to eager would look like a
    # slow success. dynamic: micro-batches differ in shape, and each shape would be compiled by
    # itself.
    compiled = torch.compile(eager, dynamic=True, fullgraph=True)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # The policy runs the same layers with a cache; its shapes change with every token.
        if any(isinstance(value, Cache) for value in kwargs.values()):
            return eager(self, *args, **kwargs)
        # PyTorch's own limit is 8, beyond which fullgraph=True raises.
        with torch.compiler.config.patch(recompile_limit=_MAX_GRAPHS):  # type: ignore[attr-defined]
            return compiled(self, *args, **kwargs)

    return forward
