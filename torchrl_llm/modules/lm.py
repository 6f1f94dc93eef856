"""The inside of a causal language model: its backbone, its head, its vocabulary.

Policies and scorers run the backbone once and the head only where they need logits; these functions say where the two
are, for a plain transformers model and for one inside a ``PeftModel``. Adapters live in
:mod:`torchrl_llm.modules.adapters`, sampling distributions elsewhere.
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


class VocabularyMismatchError(ValueError):
    """The tokenizer and the model do not agree on what a token id is."""


class UnsupportedModelError(ValueError):
    """A model of a family that cannot be computed with as policies, scorers and critics do."""


class UnsupportedHeadError(UnsupportedModelError):
    """The model does more to its logits than :func:`lm_logits` knows."""


def causal_lm(model: nn.Module) -> Any:
    """The transformers model itself: what a ``PeftModel`` wraps (its adapters stay in place), else ``model``."""
    wrapped: Any = model
    return wrapped.get_base_model() if hasattr(model, "get_base_model") else model


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
    :func:`check_head` tells whether that is all.

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


class RandomForwardError(ValueError):
    """A forward that builds a graph computes something else than one that does not."""


def check_repeatable(model: nn.Module) -> None:
    """Compare a forward that builds a graph, under two seeds, with one that does not, on eight tokens.

    With gradient checkpointing the first runs in training mode where the model asks for it. The random generators are left
    as they were.

    Raises:
        RandomForwardError: they differ, so a recomputation would not repeat its forward.
    """
    weight = causal_lm(model).get_input_embeddings().weight
    tokens = torch.arange(8, device=weight.device).unsqueeze(0) % weight.shape[0]
    with torch.no_grad():
        expected = hidden_states(model, tokens)
    with torch.random.fork_rng(devices=[weight.device] if weight.is_cuda else []), torch.enable_grad():
        for seed in range(2):
            torch.manual_seed(seed)
            found = hidden_states(model, tokens).detach()
            if not torch.allclose(found, expected, rtol=1e-2, atol=1e-2 * float(expected.abs().max())):
                raise RandomForwardError(
                    f"In training mode {type(causal_lm(model)).__name__} computes something else than in evaluation mode "
                    f"(largest difference {float((found - expected).abs().max()):.3g} on {tokens.tolist()}): dropout, jitter or "
                    "random routing that cannot be switched off from here. Pass gradient_checkpointing=False."
                )


@torch.no_grad()
def check_head(model: nn.Module) -> None:
    """Compare backbone + :func:`lm_logits` with the model's own forward on four tokens.

    Raises:
        UnsupportedHeadError: they differ, so log-probs computed here would be wrong.
    """
    lm = causal_lm(model)
    device = lm.get_input_embeddings().weight.device
    tokens = torch.arange(4, device=device).unsqueeze(0) % lm.get_input_embeddings().weight.shape[0]
    training = lm.training
    lm.eval()
    try:
        expected = lm(input_ids=tokens, use_cache=False).logits.float()
        logits = lm_logits(model, hidden_states(model, tokens)).float()
    except (TypeError, ValueError, RuntimeError, LookupError, AttributeError, AssertionError) as error:
        raise UnsupportedModelError(
            f"{type(lm).__name__} cannot be computed as a backbone and a head on it: {error} Use a decoder-only language "
            "model."
        ) from error
    finally:
        lm.train(training)
    exact = lm.get_input_embeddings().weight.dtype in (torch.float32, torch.float64)
    if not torch.allclose(logits, expected, rtol=0, atol=(1e-4 if exact else 1e-2) * float(expected.abs().max())):
        raise UnsupportedHeadError(
            f"The logits of {type(lm).__name__} are not its head applied to its backbone's last hidden state "
            f"(largest difference {float((logits - expected).abs().max()):.3g} on {tokens.tolist()}): it rescales "
            "them in a way that torchrl_llm.modules.lm.lm_logits does not know. Extend lm_logits for this family."
        )


def check_vocabulary(model: nn.Module, tokenizer: Any) -> None:
    """Make sure that every id of the tokenizer is a row of the model's embedding, and every special id of the model
    is a token of the tokenizer.

    An embedding with more rows than the tokenizer has tokens is common (padding to a multiple of 64) and accepted.

    Args:
        model: a causal language model or a ``PeftModel`` around one.
        tokenizer: a transformers tokenizer.

    Raises:
        VocabularyMismatchError: otherwise.
    """
    lm = causal_lm(model)
    rows = lm.get_input_embeddings().weight.shape[0]
    size = max(tokenizer.get_vocab().values()) + 1
    if size > rows:
        raise VocabularyMismatchError(
            f"The tokenizer {_name(tokenizer)} has ids up to {size - 1}, but the model {_name(lm.config)} embeds only "
            f"{rows} tokens. Load the tokenizer that belongs to the model, or call "
            f"model.resize_token_embeddings({size}) and train the new rows."
        )
    strange = {name: ids for name, ids in _special_ids(lm).items() if any(not 0 <= i < size for i in ids)}
    if strange:
        raise VocabularyMismatchError(
            f"The model {_name(lm.config)} names special token ids {strange} which the tokenizer {_name(tokenizer)} "
            f"(ids 0 to {size - 1}) does not have. Load the tokenizer that belongs to the model, or set these fields "
            "of model.config and model.generation_config to ids of this tokenizer."
        )


def generation_end_ids(model: nn.Module) -> int | list[int] | None:
    """The end tokens of the model's ``generation_config``."""
    return getattr(getattr(causal_lm(model), "generation_config", None), "eos_token_id", None)


def _special_ids(lm: Any) -> dict[str, list[int]]:
    """The special ids that the model's two configurations name, by field."""
    found: dict[str, list[int]] = {}
    for where in ("config", "generation_config"):
        config = getattr(lm, where, None)
        for field in ("bos_token_id", "eos_token_id", "pad_token_id"):
            found[f"{where}.{field}"] = _ids(getattr(config, field, None))
    return found


def _ids(value: Any) -> list[int]:
    """A special-token field of a configuration, which is an id, a list of them or None, as a list."""
    return [i for i in (value if isinstance(value, list | tuple) else [value]) if i is not None]


def _name(thing: Any) -> str:
    return repr(getattr(thing, "name_or_path", None) or type(thing).__name__)
