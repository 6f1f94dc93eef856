"""What a run takes in memory, estimated from its settings and the shapes of its model (:func:`memory_estimate`)."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from peft import get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from torchrl_llm.modules.lm import embedding_of
from torchrl_llm.options import ConfigError
from torchrl_llm.trainers.build import has_own_reference, make_lora
from torchrl_llm.trainers.config import RunConfig
from torchrl_llm.trainers.sources import model_path

_TRAINED = 16
"""Bytes of a trained weight: the weight, its gradient and AdamW's two moments, in float32."""

_NF4 = 0.55
"""Bytes of a weight of the base in 4 bits, with its scales."""

_ROW = 29
"""Bytes of a token of the batch."""

_LOGITS = 2**24
"""The most logits that a scorer holds at a time, in float32 (``TokenScorer(chunk_logits=...)``)."""

# Numbers that the backward of a layer keeps for each token, in multiples of the hidden size and of the width of the MLP:
# inputs, queries, keys, values and outputs; the two projections, their activation and its product. For the models of
# docs/memory.md this is within a tenth of what was measured with LoRA.
_HIDDEN, _WIDTH = 8, 4


def empty_model(config: RunConfig) -> Any:
    """The run's model without weights: its shapes, on PyTorch's meta device."""
    options: dict[str, Any] = {"trust_remote_code": config.trust_remote_code}
    model_config = AutoConfig.from_pretrained(model_path(config), **options)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(model_config, **options)


def memory_estimate(config: RunConfig, model: Any) -> dict[str, int]:
    """Bytes by part, at the peak of an update of one process. An estimate: allocators keep more than is in use.

    Args:
        config: the settings.
        model: :func:`empty_model`; it gets LoRA layers, if the settings ask for them.

    Raises:
        ConfigError: the model's configuration does not say how large its layers are.

    Examples:
        >>> config = RunConfig(model_path="tiny", lora_r=0, kl_coeff=0.0, algo="LLMREINFORCE")
        >>> model = empty_model(config)
        >>> memory_estimate(config, model)["trained weights"] == 16 * model.num_parameters()
        True
    """
    return {**_weights(config, model), **_activations(config, model), **_contexts(config, model)}


def _weights(config: RunConfig, model: Any) -> dict[str, int]:
    parameters, size, lora = model.num_parameters(), _bytes(config, model), make_lora(config)
    critics = config.algo == "LLMPPO" and config.critic_trunk == "separate"
    if lora is None:
        copies = 4 * parameters if config.has_reference and config.teacher is None else 0
        return {"trained weights": _TRAINED * parameters * (1 + critics), "reference": copies}
    base = parameters * (_NF4 if config.quantization else size)
    with torch.device("meta"), warnings.catch_warnings():
        # PEFT asks transformers under a name that transformers has renamed.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        adapter, _ = get_peft_model(model, lora).get_nb_trainable_parameters()
    own = 4 * adapter if has_own_reference(config) else 0
    return {"base weights": int(base), "trained weights": _TRAINED * adapter * (1 + critics), "reference": own}


def _activations(config: RunConfig, model: Any) -> dict[str, int]:
    text = model.config.get_text_config()
    layers, hidden = _size(text, "num_hidden_layers"), _size(text, "hidden_size")
    layer = _HIDDEN * hidden + _WIDTH * _size(text, "intermediate_size")
    # Recomputed one layer at a time, from the inputs of all.
    numbers = layers * hidden + layer if config.gradient_checkpointing else layers * layer
    rows = embedding_of(model).shape[0]
    narrow = config.mixed_precision in ("bf16", "fp16") or _bytes(config, model) == 2
    return {
        "activations": config.max_tokens * numbers * (2 if narrow else 4),
        "logits": 4 * min(_LOGITS, config.max_tokens * rows),
    }


def _contexts(config: RunConfig, model: Any) -> dict[str, int]:
    """At most: contexts and rows are as long as their longest."""
    text = model.config.get_text_config()
    heads, hidden = _size(text, "num_attention_heads"), _size(text, "hidden_size")
    known = {name: getattr(text, name, None) for name in ("num_key_value_heads", "head_dim")}  # families differ
    numbers = 2 * (known["num_key_value_heads"] or heads) * (known["head_dim"] or hidden // heads)
    size = 4 if not config.lora_r else _bytes(config, model)
    cache = _size(text, "num_hidden_layers") * numbers * size * config.num_envs * config.max_model_len
    # An engine takes its own share of the memory, whatever its contexts need.
    held = {"keys and values": cache} if config.policy == "hf" else {}
    return {**held, "rows": _ROW * config.batch_size * config.max_model_len}


def _size(text: Any, name: str) -> int:
    value = getattr(text, name, None)
    if name == "intermediate_size" and value is None:
        value = 4 * text.hidden_size  # of the families that do not name it, as GPT-2
    if not isinstance(value, int):
        raise ConfigError(f"The configuration of the model does not say its {name}: its memory cannot be estimated.")
    return value


def _bytes(config: RunConfig, model: Any) -> int:
    """Bytes of a weight of the base, or of what training computes in."""
    dtype = model.config.dtype if config.dtype == "auto" else getattr(torch, config.dtype)
    return int((dtype or torch.float32).itemsize)
