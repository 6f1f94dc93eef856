"""What a transformers model must be like for rows to be scored: :func:`check_rows`; and how far its attention reaches."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

from torchrl_llm.modules.lm import UnsupportedModelError, causal_lm, hidden_states

_WINDOW = re.compile("window(?!_layers|_pattern)|local_att|chunk_size")
_LONGEST_TRIED = 512  # windows up to here are tried when a model is loaded
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
FAILURES = (TypeError, ValueError, RuntimeError, LookupError, AttributeError, AssertionError)
"""What forwards raise that a family of models does not support."""


def declared_windows(config: Any) -> list[int]:
    """Every number of a text configuration that may say how far back attention reaches, in order."""
    fields = config.to_dict().items()
    return sorted({value for name, value in fields if type(value) is int and value > 1 and _WINDOW.search(name)})


@torch.no_grad()
def check_rows(model: nn.Module) -> None:
    """Compare rows of a batch, with other tokens behind them, with each row alone, also beyond short attention windows.

    Raises:
        UnsupportedModelError: they differ, so log-probs and values would depend on what follows and on the batch.
    """
    lm: Any = causal_lm(model)
    config, weight = lm.config.get_text_config(), lm.get_input_embeddings().weight
    most = getattr(config, "max_position_embeddings", None) or float("inf")
    windows = [window for window in declared_windows(config) if window <= _LONGEST_TRIED and window < most]
    training = lm.training
    lm.eval()
    try:
        gaps = [
            _gap(model, int(min(longest, most)), weight) for longest in (6, *(2 * window + 4 for window in windows))
        ]
    except FAILURES as error:
        raise UnsupportedModelError(
            f"{type(lm).__name__} (model_type {config.model_type!r}) fails on a batch of token ids: {error} "
            "Use a decoder-only language model."
        ) from error
    finally:
        lm.train(training)
    if max(gaps) > _TOLERANCE.get(weight.dtype, 5e-2):
        raise UnsupportedModelError(
            f"{type(lm).__name__} (model_type {config.model_type!r}) computes something else for a row that other tokens "
            f"follow than for the row alone (relative difference {max(gaps):.2g}), so log-probs would be wrong: its attention "
            "is not causal, or it depends on the batch. Use a decoder-only language model."
        )


@torch.no_grad()
def run_once(model: nn.Module) -> None:
    """A forward on two tokens, for the errors that it raises."""
    weight = causal_lm(model).get_input_embeddings().weight
    hidden_states(model, torch.zeros(1, 2, dtype=torch.int64, device=weight.device))


def _gap(model: nn.Module, longest: int, weight: torch.Tensor) -> float:
    """Largest difference of the hidden states of rows in a batch and alone, as a share of the largest state.

    In half precision it is the median over tokens: the experts of a mixture may tip over at one or another.
    """
    lengths = torch.tensor([longest, max(longest // 2, 1), 2])
    tokens = (torch.arange(3 * longest, device=weight.device).view(3, -1) * 7 + 1) % weight.shape[0]
    batch = hidden_states(model, tokens, lengths)
    gaps, largest = [], 0.0
    for i, length in enumerate(lengths.tolist()):
        alone = hidden_states(model, tokens[i : i + 1, :length])[0]
        gaps.append((batch[i, :length] - alone).abs().amax(-1).float())
        largest = max(largest, float(alone.abs().max()))
    found = torch.cat(gaps)
    return float(found.max() if weight.dtype in _TOLERANCE else found.median()) / (largest or 1.0)
