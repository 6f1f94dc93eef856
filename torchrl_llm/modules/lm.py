"""The inside of a causal language model: its backbone, its head, its vocabulary.

Policies and scorers run the backbone once and the head only where they need logits; these functions find the two, in a plain
transformers model and in one inside a ``PeftModel``. :mod:`torchrl_llm.modules.checks` says which models can be computed with.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from torchrl_llm.modules._randomness import checkpointing
from torchrl_llm.modules._rope import rope_by_row


def causal_lm(model: nn.Module) -> Any:
    """The transformers model itself: what a ``PeftModel`` wraps (its adapters stay in place), else ``model``."""
    wrapped: Any = model
    return wrapped.get_base_model() if hasattr(model, "get_base_model") else model


def embedding_of(model: nn.Module) -> Tensor:
    """The weight ``[V, H]`` of the token embedding: its device is where ids go, its dtype what the model computes in."""
    return causal_lm(model).get_input_embeddings().weight


def vocabulary_of(model: nn.Module) -> int:
    """Number of logits; the head may have more rows than the tokenizer has tokens."""
    return int(causal_lm(model).get_output_embeddings().weight.shape[0])


def is_full_precision(dtype: torch.dtype) -> bool:
    """Whether two orders of computation agree to about 1e-6 in this dtype; in half precision they differ by about 1e-2."""
    return dtype in (torch.float32, torch.float64)


def is_quantized(model: nn.Module) -> bool:
    """Whether weights are kept in fewer bits than they compute in."""
    return bool(getattr(causal_lm(model), "is_quantized", False))


def backbone(model: nn.Module) -> Any:
    """The part of a causal language model that maps ``[B, L]`` ids to ``[B, L, H]`` hidden states, without the head.

    Args:
        model: a transformers model, with or without its head, or a ``PeftModel`` around one.
    """
    lm = causal_lm(model)
    found = lm.get_decoder()
    if isinstance(found, PreTrainedModel) and found.get_output_embeddings() is None:
        return found
    # transformers goes by names, and for some families it finds the head (ModernBertDecoder) or the whole (Llama4).
    return next((child for child in lm.children() if isinstance(child, PreTrainedModel)), found)


def hidden_states(model: nn.Module, tokens: Tensor, lengths: Tensor | None = None) -> Tensor:
    """Last hidden states ``[B, L, H]`` of right-padded ``tokens`` ``[B, L]``, each row as if it were alone.

    ``lengths`` ``[B]`` are the tokens of each row that matter, for models whose rotary frequencies depend on them
    (:mod:`torchrl_llm.modules._rope`); ``None``: all L.

    Attention is causal and padding lies on the right, so no valid position ever sees it: no mask is passed, and
    attention kernels take their fast causal path. What is computed at padded positions means nothing.

    transformers checkpoints activations in training mode only, and in that mode it also refuses the KV cache that
    generation needs. So models stay in evaluation mode, and a forward that builds a graph switches for its own time.
    """
    decoder = backbone(model)
    if lengths is None:
        lengths = torch.full(tokens.shape[:1], tokens.shape[1])
    with checkpointing(decoder) if torch.is_grad_enabled() else nullcontext(), rope_by_row(decoder, lengths):
        return decoder(input_ids=tokens, use_cache=False).last_hidden_state


def lm_logits(model: nn.Module, hidden: Tensor) -> Tensor:
    """Logits of hidden states, as the model's own forward computes them.

    Covers the factors and the soft cap that some families put behind the head (Cohere's ``logit_scale``, Granite's
    ``logits_scaling``, Falcon-H1's ``lm_head_multiplier``, the soft caps of Gemma, RecurrentGemma and xLSTM);
    :func:`torchrl_llm.modules.check_head` tells whether that is all.

    Args:
        model: a causal language model or a ``PeftModel`` around one.
        hidden: ``[..., H]``.

    Returns:
        ``[..., V]`` in the head's dtype.
    """
    return logits_function(model)(hidden)


_SOFT_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")


def logits_function(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """:func:`lm_logits` of one model, its configuration read once: for loops in which that time counts."""
    lm = causal_lm(model)
    config, head = lm.config.get_text_config(), lm.get_output_embeddings()
    factor = getattr(config, "logit_scale", None) or 1.0
    factor = factor * (getattr(config, "lm_head_multiplier", None) or 1.0)
    factor = factor / (getattr(config, "logits_scaling", None) or 1.0)
    cap = next((cap for name in _SOFT_CAPS if (cap := getattr(config, name, None))), None)

    def logits_of(hidden: Tensor) -> Tensor:
        logits = head(hidden)
        if factor != 1.0:
            logits = logits * factor
        return torch.tanh(logits / cap) * cap if cap else logits

    return logits_of


def generation_end_ids(model: nn.Module) -> int | list[int] | None:
    """The end tokens of the model's ``generation_config``."""
    return getattr(getattr(causal_lm(model), "generation_config", None), "eos_token_id", None)
