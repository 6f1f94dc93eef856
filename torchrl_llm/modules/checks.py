"""Checks of a model, by a few forwards when it is loaded: whether policies, scorers and critics
support it.

Each compares two computations that must agree, on a few tokens, and refuses the model by name where
they do not. A model that passed would otherwise give wrong log-probs without any error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from torchrl_llm.modules.kernels import attention_kernels, float32_products
from torchrl_llm.modules.lm import causal_lm, embedding_of, hidden_states, is_full_precision, lm_logits, training_flags


class VocabularyMismatchError(ValueError):
    """The tokenizer has ids that the model does not embed, or the model names special ids that the
    tokenizer lacks."""


class UnsupportedModelError(ValueError):
    """A model of a family that policies, scorers and critics do not support."""


class UnsupportedHeadError(UnsupportedModelError):
    """The model changes its logits in a way that :func:`~torchrl_llm.modules.lm_logits` does not
    cover."""


class RandomForwardError(ValueError):
    """A forward that builds a graph computes other values than one that does not."""


# max_window_layers and sliding_window_pattern are numbers of layers, not of tokens.
_WINDOW = re.compile("window(?!_layers|_pattern)|local_att|chunk_size")
LONGEST_TRIED = 512  # windows up to here are tried when a model is loaded
FAILURES = (TypeError, ValueError, RuntimeError, LookupError, AttributeError, AssertionError)
"""Errors that forwards raise for a family of models that is not supported."""


def declared_windows(config: Any) -> list[int]:
    """Every number of a text configuration that may say how far back attention reaches, in
    order."""
    fields = config.to_dict().items()
    return sorted({value for name, value in fields if type(value) is int and value > 1 and _WINDOW.search(name)})


def unusual_layers(lm: Any) -> str | None:
    """What some layers of a model keep instead of keys and values by position, for messages;
    ``None``: they all keep these."""
    layers = getattr(lm.config.get_text_config(), "layer_types", None) or ()
    kinds = {*layers} - {"full_attention", "sliding_attention"}
    # `_is_stateful` is what transformers' own generate() goes by; nothing public says it.
    if getattr(lm, "_is_stateful", False) or kinds:
        return f"has layers that keep a state of another kind ({', '.join(sorted(kinds)) or 'recurrent'})"
    return None


def probe_lengths(config: Any) -> list[int]:
    """Lengths of rows to try a model on: a short one, and one beyond each window of at most
    :data:`LONGEST_TRIED` tokens."""
    most = getattr(config, "max_position_embeddings", None) or float("inf")
    windows = [window for window in declared_windows(config) if window <= LONGEST_TRIED and window < most]
    # Twice a window and more: the row of half the length is beyond it too.
    return [int(min(length, most)) for length in (6, *(2 * window + 4 for window in windows))]


def name_of(lm: Any) -> str:
    """A model's class and type, for messages."""
    return f"{type(lm).__name__} (model_type {lm.config.get_text_config().model_type!r})"


@contextmanager
def _probing(lm: Any, problem: str) -> Iterator[None]:
    """Evaluation mode, no graph, no TF32; errors of forwards become :class:`UnsupportedModelError`,
    beginning with ``problem``."""
    try:
        with training_flags(lm.modules(), False), torch.no_grad(), attention_kernels(), float32_products("highest"):
            yield
    except FAILURES as error:
        raise UnsupportedModelError(f"{name_of(lm)} {problem}: {error} Use a decoder-only language model.") from error


def probe_ids(model: nn.Module, rows: int, columns: int) -> Tensor:
    """Token ids ``[rows, columns]`` to try a model on, not in the order of the vocabulary."""
    weight = embedding_of(model)
    return (torch.arange(rows * columns, device=weight.device).view(rows, columns) * 7 + 1) % weight.shape[0]


def check_head(model: nn.Module) -> None:
    """Compare backbone + :func:`~torchrl_llm.modules.lm_logits` with the model's own forward on
    four tokens.

    Raises:
        UnsupportedHeadError: they differ, so log-probs computed here would be wrong.
        UnsupportedModelError: a forward fails.
    """
    lm, tokens = causal_lm(model), probe_ids(model, 1, 4)
    with _probing(lm, "cannot be computed as a backbone and a head on it"):
        expected = lm(input_ids=tokens, use_cache=False).logits.float()
        logits = lm_logits(model, hidden_states(model, tokens)).float()
    # Tiny models of the families refused differ by 2.9 and more; rounding is near 1e-6, in half
    # precision 1e-2.
    tolerance = 1e-4 if is_full_precision(embedding_of(model).dtype) else 1e-2
    if not torch.allclose(logits, expected, rtol=0, atol=tolerance * float(expected.abs().max())):
        raise UnsupportedHeadError(
            f"The logits of {name_of(lm)} are not its head applied to its backbone's last hidden state "
            f"(largest difference {float((logits - expected).abs().max()):.3g} on {tokens.tolist()}): it rescales "
            "them in a way that torchrl_llm.modules.lm.lm_logits does not know. Extend lm_logits for this family."
        )


def check_rows(model: nn.Module) -> None:
    """Compare rows of a batch, with other tokens behind them, with each row alone, also beyond
    short attention windows.

    Raises:
        UnsupportedModelError: they differ, so log-probs and values would depend on what follows and
            on the batch.
    """
    lm = causal_lm(model)
    with _probing(lm, "fails on a batch of token ids"):
        worst = max(_gap(model, length) for length in probe_lengths(lm.config.get_text_config()))
    if worst > (1e-3 if is_full_precision(embedding_of(model).dtype) else 5e-2):
        raise UnsupportedModelError(
            f"{name_of(lm)} computes something else for a row that other tokens follow than for the row alone (relative "
            f"difference {worst:.2g}), so log-probs would be wrong: its attention is not causal, or it depends on the batch. "
            "Use a decoder-only language model."
        )


def check_repeatable(model: nn.Module) -> None:
    """Compare a forward that builds a graph, under two seeds, with one that does not, on eight
    tokens.

    With gradient checkpointing the first runs in training mode where the model asks for it. The
    random generators are left as they were.

    Raises:
        RandomForwardError: they differ, so a recomputation would not repeat its forward.
    """
    tokens = probe_ids(model, 1, 8)
    with torch.no_grad():
        expected = hidden_states(model, tokens)
    with torch.random.fork_rng(devices=[tokens.device] if tokens.is_cuda else []), torch.enable_grad():
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
def run_once(model: nn.Module) -> None:
    """Run a forward on two tokens, for the errors that it raises."""
    hidden_states(model, probe_ids(model, 1, 2))


def check_vocabulary(model: nn.Module, tokenizer: Any) -> None:
    """Make sure that every id of the tokenizer is a row of the model's embedding, and every special
    id of the model is a token of the tokenizer.

    An embedding with more rows than the tokenizer has tokens is common (padding to a multiple of
    64) and accepted.

    Args:
        model: a causal language model or a ``PeftModel`` around one.
        tokenizer: a transformers tokenizer.

    Raises:
        VocabularyMismatchError: otherwise.
    """
    lm = causal_lm(model)
    size = check_size(tokenizer, embedding_of(model).shape[0], _path_of(lm.config))
    strange = {name: ids for name, ids in _special_ids(lm).items() if any(not 0 <= i < size for i in ids)}
    if strange:
        raise VocabularyMismatchError(
            f"The model {_path_of(lm.config)} names special token ids {strange} which the tokenizer {_path_of(tokenizer)} "
            f"(ids 0 to {size - 1}) does not have. Load the tokenizer that belongs to the model, or set these fields "
            "of model.config and model.generation_config to ids of this tokenizer."
        )


def check_size(tokenizer: Any, rows: int, model: str) -> int:
    """The number of ids of a tokenizer, at most the ``rows`` that the named model embeds.

    Raises:
        VocabularyMismatchError: there are more.
    """
    # Not len(tokenizer): ids may have gaps.
    size = max(tokenizer.get_vocab().values()) + 1
    if size > rows:
        raise VocabularyMismatchError(
            f"The tokenizer {_path_of(tokenizer)} has ids up to {size - 1}, but the model {model} embeds only {rows} tokens. Load "
            f"the tokenizer that belongs to the model, or call model.resize_token_embeddings({size}) and train the new rows."
        )
    return size


def _special_ids(lm: Any) -> dict[str, list[int]]:
    """The special ids that the model's two configurations name, by field."""
    found: dict[str, list[int]] = {}
    for where in ("config", "generation_config"):
        for field in ("bos_token_id", "eos_token_id", "pad_token_id"):
            value = getattr(getattr(lm, where, None), field, None)  # an id, a list of ids, or None
            values = value if isinstance(value, list | tuple) else [value]
            found[f"{where}.{field}"] = [i for i in values if i is not None]
    return found


def _path_of(thing: Any) -> str:
    return repr(getattr(thing, "name_or_path", None) or type(thing).__name__)


def _gap(model: nn.Module, longest: int) -> float:
    """Largest difference of the hidden states of rows in a batch and alone, as a share of the
    largest state.

    In half precision it is the median over tokens: the experts of a mixture may tip over at one or
    another.
    """
    lengths, tokens = [longest, max(longest // 2, 1), 2], probe_ids(model, 3, longest)
    batch = hidden_states(model, tokens, torch.tensor(lengths))
    alone = [hidden_states(model, tokens[i : i + 1, :length])[0] for i, length in enumerate(lengths)]
    pairs = zip(batch, alone, strict=True)
    found = torch.cat([(row[: len(own)] - own).abs().amax(-1).float() for row, own in pairs])
    largest = max(float(own.abs().max()) for own in alone)
    return float(found.max() if is_full_precision(embedding_of(model).dtype) else found.median()) / (largest or 1.0)
