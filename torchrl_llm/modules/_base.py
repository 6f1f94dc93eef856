"""The base model as it is before adapters: :func:`load_base`."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path
from typing import Any, Literal

import torch
from peft import PeftModel
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from torchrl_llm.modules._randomness import disable_randomness

logger = logging.getLogger(__name__)

Quantization = Literal["nf4"]


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

    The arguments are those of :func:`torchrl_llm.modules.load_actor_critic`.
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
    else:
        if isinstance(model, PeftModel):
            raise ValueError(
                "model is a PeftModel already; expected the bare model. Merge and unload its adapter first."
            )
        if quantization is not None:
            raise ValueError(
                f"quantization is {quantization!r}, but model is a {type(model).__name__} that is loaded already: "
                "weights are quantized while they are read. Pass its directory or hub id."
            )
        lm = model
        if attn_implementation is not None:
            lm.set_attn_implementation(attn_implementation)
        if precision is not None:
            lm.to(precision)
    if master_weights:
        _widen(lm)
    for module in lm.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):  # bitsandbytes' kernel for inference on a CPU has no gradient
            module.support_avx512bf16_for_cpu = False
    disable_randomness(lm)
    return lm.eval() if device is None or quantization is not None else lm.to(device).eval()


def _widen(model: Any) -> None:
    """Float32 for weights narrower than that, with a word on what it costs."""
    narrow = [parameter for parameter in model.parameters() if _is_narrow(parameter.dtype)]
    if not narrow:
        return
    before, dtype, count = model.get_memory_footprint(), narrow[0].dtype, sum(p.numel() for p in model.parameters())
    model.to(torch.float32)
    logger.warning(
        "All weights of %s train, so they are kept in float32 and not in %s, to which most of AdamW's steps would be lost: %.3g "
        "GiB instead of %.3g, and %.3g GiB with gradients and AdamW's two moments. Under autocast (mixed_precision) they still "
        "compute in half precision.",
        type(model).__name__, str(dtype).removeprefix("torch."), 4 * count / 2**30, before / 2**30, 16 * count / 2**30,
    )  # fmt: skip


def _is_narrow(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and torch.finfo(dtype).bits < 32


def _dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    found = getattr(torch, dtype, None) if isinstance(dtype, str) and dtype != "auto" else dtype
    if found in (None, "auto") and dtype in (None, "auto"):
        return None
    if not isinstance(found, torch.dtype):
        raise ValueError(f"dtype is {dtype!r}; expected 'auto' or the name of a torch dtype such as 'bfloat16'.")
    return found


def _quantization_config(quantization: str, dtype: torch.dtype | None) -> BitsAndBytesConfig:
    if quantization != "nf4":
        raise ValueError(f"quantization is {quantization!r}; expected 'nf4' or None.")
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ImportError("quantization='nf4' needs bitsandbytes, which is not installed: pip install bitsandbytes")
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype or torch.bfloat16,
    )
