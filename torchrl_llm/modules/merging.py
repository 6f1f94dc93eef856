"""Trained weights as named tensors: :func:`merged_tensors` of a whole model,
:func:`adapter_tensors` of a LoRA adapter.

Independent of engines and files. The live model is only read.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from peft.tuners.lora import Linear, ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import ModulesToSaveWrapper
from torch import Tensor, nn

from torchrl_llm.modules.adapters import AdapterError, adapter_layers, available_adapters, check_adapter
from torchrl_llm.modules.lm import causal_lm, is_quantized
from torchrl_llm.modules.weights import WeightsError, adapter_of


def merged_tensors(model: nn.Module, adapter: str | None = None) -> Iterator[tuple[str, Tensor]]:
    """The weights of the whole model, under the names that it has without PEFT, ``adapter`` merged
    into them.

    One layer is merged at a time, so little memory is needed, and by PEFT itself, so every variant
    that PEFT merges (rsLoRA, DoRA, biases) is covered. ``lm_head.weight`` is among them, tied or
    not.

    Args:
        model: a causal language model of transformers, or a ``PeftModel`` around one.
        adapter: the adapter to merge; ``None``: the base model.

    Yields:
        Name and tensor, detached, in the dtype and on the device of the model. Tensors that no
            adapter changes are the
        model's own.

    Raises:
        AdapterError: there is no such adapter, or another one is merged already.
        WeightsError: the base is quantized, or the adapter changes one of two tied matrices.

    Examples:
        >>> from torchrl_llm.testing.tiny import load_tiny_model
        >>> tensors = dict(merged_tensors(load_tiny_model()))
        >>> tensors["lm_head.weight"].shape == tensors["model.embed_tokens.weight"].shape
        True
    """
    check_adapter(model, adapter)
    lm = causal_lm(model)
    wrappers = {id(layer) for layer in adapter_layers(lm)}
    # With both names of a module that is used twice, as in state_dict.
    layers = {name: module for name, module in lm.named_modules(remove_duplicate=False) if id(module) in wrappers}
    _check_mergeable(lm, layers, adapter)
    # Not named_parameters, which leaves out a tied head: vLLM would keep its old one, silently, 0.6
    # nats off.
    for name, tensor in lm.state_dict().items():
        if not any(parent in layers for parent in _parents(name)):
            yield name, tensor
    for name, layer in layers.items():
        if any(parent in layers for parent in _parents(name)):
            continue  # merged with what it is nested in
        try:
            with torch.no_grad():
                merged = _merged(layer, adapter)
        except Exception as error:
            raise WeightsError(f"Failed in merging {name!r}: {error}") from error
        for key, tensor in merged.items():
            yield f"{name}.{key}", tensor


class MergedTensors:
    """:func:`merged_tensors`, merged again at each iteration: a transfer between GPUs reads names
    and shapes first."""

    def __init__(self, model: nn.Module, adapter: str | None = None) -> None:
        self._arguments = model, adapter

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return merged_tensors(*self._arguments)


def adapter_tensors(model: Any, adapter: str) -> dict[str, Tensor]:
    """The tensors of a LoRA adapter, detached, under the names that PEFT and vLLM give them in
    files.

    Args:
        model: a ``PeftModel``.
        adapter: an adapter for which :func:`why_not_servable` is ``None``.

    Raises:
        AdapterError: there is no such adapter, or vLLM cannot serve it.
    """
    check_adapter(model, adapter)
    if reason := why_not_servable(model, adapter):
        raise AdapterError(f"vLLM cannot serve the adapter {adapter!r}: {reason}. Send merged weights instead.")
    return {name: tensor.detach() for name, tensor in adapter_of(model, adapter).tensors.items()}


def why_not_servable(model: Any, adapter: str) -> str | None:
    """The setting of the adapter with which vLLM cannot serve it beside the base weights; ``None``:
    there is none."""
    config = model.peft_config[adapter]
    unserved = ("use_dora", "lora_bias", "modules_to_save", "target_parameters", "trainable_token_indices")
    for field in unserved:
        if value := getattr(config, field, None):
            return f"{field}={value!r}"
    return None if config.bias == "none" else f"bias={config.bias!r}"


def _parents(name: str) -> Iterator[str]:
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def _merged(layer: Any, adapter: str | None) -> dict[str, Tensor]:
    """The tensors of the module that ``layer`` wraps, with the adapter in them."""
    if isinstance(layer, ModulesToSaveWrapper):
        held = adapter is not None and adapter in layer.modules_to_save
        return (layer.modules_to_save[adapter] if held else layer.original_module).state_dict()
    nested = isinstance(layer, BaseTunerLayer) and isinstance(layer.base_layer, BaseTunerLayer)
    if not isinstance(layer, BaseTunerLayer) or (nested and not isinstance(layer, ParamWrapper)):
        raise WeightsError(f"{type(layer).__name__} cannot be merged layer by layer; train it without this wrapper.")
    if adapter is None or adapter in layer.merged_adapters or adapter not in available_adapters(layer):
        return layer.get_base_layer().state_dict()
    # Plain LoRA, which most layers are, needs no copy of the layer.
    if isinstance(layer, Linear) and adapter not in layer.lora_variant and not layer.lora_bias[adapter]:
        tensors = layer.get_base_layer().state_dict()
        delta = layer.get_delta_weight(adapter)
        return tensors | {"weight": tensors["weight"] + delta.to(tensors["weight"].dtype)}
    # On a copy: to unmerge the live layer again would leave rounding errors in its weights.
    layer = copy.deepcopy(layer)
    if isinstance(layer, ParamWrapper):  # one for each parameter of the module, nested
        module = layer.unload_and_optionally_merge_module(merge=True, safe_merge=False, adapter_names=[adapter])
        return module.state_dict()
    layer.merge(adapter_names=[adapter])
    return layer.get_base_layer().state_dict()


def _check_mergeable(lm: Any, layers: dict[str, Any], adapter: str | None) -> None:
    if is_quantized(lm):
        raise WeightsError(
            "The base model is quantized, and so would be what is merged into it. Load it without quantization (for an export, "
            "call load_pretrained then), or let the engine serve the adapter."
        )
    ends = lm.get_input_embeddings(), lm.get_output_embeddings()
    wrapped = {name: layer for name, layer in layers.items() if any(layer is end for end in ends)}
    changed = [name for name, layer in wrapped.items() if adapter in available_adapters(layer)]
    if changed and lm.config.get_text_config().tie_word_embeddings:
        raise WeightsError(
            f"The adapter {adapter!r} changes {changed}, whose weights are tied (tie_word_embeddings): merged, it would "
            "change both. Train with untied embeddings, or leave these modules out of the LoRA settings."
        )
