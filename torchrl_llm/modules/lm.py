"""The inside of a causal language model: its backbone, its head, its vocabulary.

Policies and scorers run the backbone once and the head only where they need logits. These functions
find the two, in a plain transformers model and in one inside a ``PeftModel``.
:mod:`torchrl_llm.modules.checks` says which models are supported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from inspect import signature
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from torchrl_llm.modules.kernels import attention_kernels

_SOFT_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
MOVING_ROPES = ("dynamic", "longrope")
"""Rotary embeddings whose frequencies depend on the length of the input: dynamic NTK scaling and
LongRoPE.

transformers applies other frequencies to the whole batch as soon as its longest row passes the
length of pretraining. A row's log-probs and values would then depend on its neighbors
(:func:`rope_by_row`).
"""


def causal_lm(model: nn.Module) -> Any:
    """The transformers model itself: what a ``PeftModel`` wraps (its adapters stay in place), else
    ``model``."""
    wrapped: Any = model
    return wrapped.get_base_model() if hasattr(model, "get_base_model") else model


def embedding_of(model: nn.Module) -> Tensor:
    """The weight ``[V, H]`` of the token embedding: its device is where ids go, its dtype what the
    model computes in."""
    return causal_lm(model).get_input_embeddings().weight


def max_positions(config: Any) -> float:
    """The longest context of a text configuration; infinite where it does not say.

    Rope variants that depend on the batch's longest row count up to where scaling begins.
    """
    longest = getattr(config, "max_position_embeddings", None)
    rope, original = getattr(config, "rope_parameters", None) or {}, "original_max_position_embeddings"
    if rope.get("rope_type") in MOVING_ROPES:
        longest = rope.get(original) or getattr(config, original, None) or longest
    return float("inf") if longest is None else longest


def vocabulary_of(model: nn.Module) -> int:
    """Number of logits; the head may have more rows than the tokenizer has tokens."""
    return int(causal_lm(model).get_output_embeddings().weight.shape[0])


def is_full_precision(dtype: torch.dtype) -> bool:
    """Whether two orders of computation agree to about 1e-6 in this dtype; in half precision they
    differ by about 1e-2."""
    return dtype in (torch.float32, torch.float64)


def is_quantized(model: nn.Module) -> bool:
    """Whether weights are kept in fewer bits than they compute in."""
    return bool(getattr(causal_lm(model), "is_quantized", False))


def backbone(model: nn.Module) -> Any:
    """The part of a causal language model that maps ``[B, L]`` ids to ``[B, L, H]`` hidden states,
    without the head.

    Args:
        model: a transformers model, with or without its head, or a ``PeftModel`` around one.
    """
    lm = causal_lm(model)
    found = lm.get_decoder()
    if isinstance(found, PreTrainedModel) and found.get_output_embeddings() is None:
        return found
    # transformers goes by names, and for some families it finds the head (ModernBertDecoder) or the
    # whole (Llama4).
    return next((child for child in lm.children() if isinstance(child, PreTrainedModel)), found)


def cache_argument(decoder: nn.Module) -> str:
    """The argument of a forward that takes cached keys and values: transformers 5.24 renamed
    ``past_key_values`` ``cache``."""
    return "cache" if "cache" in signature(decoder.forward).parameters else "past_key_values"


def hidden_states(model: nn.Module, tokens: Tensor, lengths: Tensor | None = None) -> Tensor:
    """Last hidden states ``[B, L, H]`` of right-padded ``tokens`` ``[B, L]``, each row as if it
    were alone.

    ``lengths`` ``[B]`` are the tokens of each row that matter, the most of them L, for models whose
    rotary frequencies depend on them (:data:`MOVING_ROPES`); ``None``: all L.

    Attention is causal and padding lies on the right, so no valid position ever sees it: no mask is
    passed, and attention kernels take their fast causal path. States at padded positions are
    undefined.

    """
    decoder = backbone(model)
    if lengths is None:
        lengths = torch.full(tokens.shape[:1], tokens.shape[1])
    with checkpointing(decoder), rope_by_row(decoder, lengths), attention_kernels():
        return decoder(input_ids=tokens, use_cache=False).last_hidden_state


def checkpointing(decoder: nn.Module) -> AbstractContextManager[None]:
    """Around a forward, which then checkpoints activations if the model is set to, and if it builds
    a graph.

    transformers checkpoints in training mode only, and in that mode it also refuses the KV cache
    that generation needs. So models stay in evaluation mode, and only the modules that checkpoint
    are switched, and nothing inside them: dropout, jitter and random routing stay off, in the
    forward as in its recomputation.
    """
    return training_flags(_checkpointed(decoder) if torch.is_grad_enabled() else (), True)


def is_checkpointed(model: nn.Module) -> bool:
    """Whether activations of the model are checkpointed in a forward that builds a graph."""
    return any(True for _ in _checkpointed(backbone(model)))


def _checkpointed(decoder: nn.Module) -> Iterator[nn.Module]:
    return (module for module in outer_modules(decoder) if vars(module).get("gradient_checkpointing"))


def outer_modules(model: nn.Module) -> Iterator[nn.Module]:
    """All modules, outermost first, but for what is inside a PEFT layer beside its base layer.

    The factors of adapters hold no further layers, and are most of the modules of a model with
    LoRA: forwards on a GPU wait for a walk over all of them.
    """
    stack: list[nn.Module] = [model]
    while stack:
        module = stack.pop()
        yield module
        stack.extend([module.base_layer] if isinstance(module, BaseTunerLayer) else module.children())


@contextmanager
def training_flags(modules: Iterable[nn.Module], training: bool) -> Iterator[None]:
    """Set the training flag of these modules, without their children, and put it back
    afterwards."""
    switched = [module for module in modules if module.training is not training]
    try:
        for module in switched:
            module.training = training
        yield
    finally:
        for module in switched:
            module.training = not training


def lm_logits(model: nn.Module, hidden: Tensor) -> Tensor:
    """Logits of hidden states, as the model's own forward computes them.

    Covers the factors and the soft cap that some families apply after the head (Cohere's
    ``logit_scale``, Granite's ``logits_scaling``, Falcon-H1's ``lm_head_multiplier``, the soft caps
    of Gemma, RecurrentGemma and xLSTM); :func:`torchrl_llm.modules.check_head` tells whether that
    is all.

    Args:
        model: a causal language model or a ``PeftModel`` around one.
        hidden: ``[..., H]``.

    Returns:
        ``[..., V]`` in the head's dtype.
    """
    return logits_function(model)(hidden)


def logits_function(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """:func:`lm_logits` of one model, its configuration read once: for loops in which that time
    counts."""
    lm = causal_lm(model)
    config, head = lm.config.get_text_config(), lm.get_output_embeddings()
    factor, cap = logits_factor(config), soft_cap(config)

    def logits_of(hidden: Tensor) -> Tensor:
        logits = head(hidden)
        if factor != 1.0:
            logits = logits * factor
        return torch.tanh(logits / cap) * cap if cap else logits

    return logits_of


def logits_factor(config: Any) -> float:
    """What a model multiplies its head's outputs by."""
    factor = getattr(config, "logit_scale", None) or 1.0
    factor = factor * (getattr(config, "lm_head_multiplier", None) or 1.0)
    return factor / (getattr(config, "logits_scaling", None) or 1.0)


def soft_cap(config: Any) -> float | None:
    """The bound that a model's logits approach; ``None``: it has none."""
    return next((cap for name in _SOFT_CAPS if (cap := getattr(config, name, None))), None)


def generation_end_ids(model: nn.Module) -> int | list[int] | None:
    """The end tokens of the model's ``generation_config``."""
    return getattr(getattr(causal_lm(model), "generation_config", None), "eos_token_id", None)


# Rotary embeddings whose frequencies depend on the length of the input.


def moving_ropes(model: nn.Module) -> list[nn.Module]:
    """The rotary embeddings of ``model`` whose frequencies depend on the largest position they are
    given."""
    found = []
    for module in outer_modules(model):
        # much faster than getattr, which looks through parameters and buffers
        kinds = vars(module).get("rope_type")
        if any(kind in MOVING_ROPES for kind in (kinds.values() if isinstance(kinds, dict) else [kinds])):
            found.append(module)
    return found


@contextmanager
def rope_by_row(model: nn.Module, lengths: Tensor) -> Iterator[None]:
    """Inside, each row of a batch has the rotary frequencies that it would have alone.

    It is one forward still, so all ranks of a sharded model run the same number of them.

    Args:
        model: its forwards get rows ``[B, L]`` without a cache. Nothing happens if it has no
            :func:`moving_ropes`.
        lengths: ``[B]`` int64, at least 1, the largest L: the tokens of each row. States of the
            tokens after them are undefined.
    """
    modules = moving_ropes(model)
    sizes: list[int] = lengths.tolist() if modules else []

    def by_row(module: nn.Module, args: Any, kwargs: Any, _: Any) -> Any:
        call = signature(module.forward).bind(*args, **kwargs)
        # Without a cache every row has the positions 0, 1, 2, ...
        positions = call.arguments["position_ids"][:1]

        def embeddings(size: int) -> Any:
            # Dynamic scaling keeps the frequencies of the longest input so far until it gets one
            # that needs no scaling.
            for end in (1, size):
                call.arguments["position_ids"] = positions[:, :end]
                # `forward`, not the module: a call would run this hook again.
                found = module.forward(*call.args, **call.kwargs)
            return found

        each = {size: embeddings(size) for size in sorted(set(sizes))}
        # Back to no scaling, for forwards outside.
        embeddings(1)
        rows = [each[size] for size in sizes]
        if isinstance(rows[0], Tensor):
            return pad_sequence([row[0] for row in rows], batch_first=True)
        return tuple(pad_sequence([part[0] for part in parts], batch_first=True) for parts in zip(*rows, strict=True))

    with ExitStack() as stack:
        for module in modules:
            stack.callback(module.register_forward_hook(by_row, with_kwargs=True).remove)
        yield


def reset_ropes(model: nn.Module) -> None:
    """Undo the scaling that longer inputs left in embeddings with dynamic scaling."""
    for module in moving_ropes(model):
        device = next((buffer.device for buffer in module.buffers()), None)
        start = torch.zeros(1, 1, dtype=torch.int64, device=device)
        for layer_type in module.rope_type if isinstance(module.rope_type, dict) else (None,):
            module.forward(start.float(), start, **({} if layer_type is None else {"layer_type": layer_type}))
