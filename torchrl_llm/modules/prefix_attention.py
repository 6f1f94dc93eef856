"""Forwards that compute what rows share once: :func:`row_states`, for models that
:func:`enable_prefix_sharing` prepared.

One call of the backbone gets the distinct tokens of all rows as a single sequence. Only attention
tells prefixes apart: this module's function for it gives every stage of the layout
(:mod:`torchrl_llm.modules.prefixes`) its own keys and values.
"""

from __future__ import annotations

import inspect
import logging
import re
import sys
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward, use_gqa_in_sdpa
from transformers.masking_utils import sdpa_mask

from torchrl_llm.modules import checks, lm
from torchrl_llm.modules.kernels import attention_kernels, float32_products
from torchrl_llm.modules.prefixes import PrefixCost, PrefixPlan, plan_prefixes
from torchrl_llm.modules.stage_attention import StageMask, masked_attention

logger = logging.getLogger(__name__)

ATTENTION = "sdpa_prefixes"
"""The name of :func:`prefix_attention` in transformers. Without a tree it is ``"sdpa"``."""

_STAGE_FLOPS = {"cpu": 1e7, "cuda": 3e10}
"""Floating-point operations that a device does in the time that the calls of one stage take in one
layer.

Measured on CPUs. The number for "cuda" is a guess, for an H100, with which an update took 0.57 to
0.8 of the time without sharing (docs/results/gpu.md). It decides how much rows have to share for a
stage of their own, and changes results by rounding only.
"""

_OTHER_ATTENTION = ("position_bias", "softcap", "s_aux", "indices", "cache")
"""What some models pass to their attention function, and :func:`prefix_attention` does not know."""


class PrefixSharing(NamedTuple):
    """How a model computes shared prefixes once, from :func:`enable_prefix_sharing`.

    Attributes:
        hidden_size: of the model.
        kv_share: numbers in a key, of all heads, for each number in a hidden state.
        max_length: rows of more tokens are computed one by one: attention may have a window that
            was not tried.
    """

    hidden_size: int
    kv_share: float = 1.0
    max_length: float = float("inf")

    def cost(self, device: torch.device, *, recomputed: bool = False) -> PrefixCost:
        """What decides where rows are cut, and whether. It depends on nothing measured, so that a
        run can be repeated.

        Args:
            device: of the model.
            recomputed: with gradient checkpointing.
        """
        size = self.hidden_size
        # A layer of width H does about 24 H^2 operations on a token, and 4 H for each token that it
        # attends to.
        flops = 24 * size**2
        return PrefixCost(
            stage=_STAGE_FLOPS.get(device.type, 3e10) / flops,
            context=4 * size / flops,
            key=4 / size * self.kv_share,
            # A layer copies keys and values again for its backward. Of what a model with
            # recomputation has in memory, a layer's copies are a part that counts: of about 16
            # numbers for each of a hidden state, a key and a value are two.
            key_size=self.kv_share / 8 if recomputed else 0.0,
            max_length=self.max_length,
        )


def enable_prefix_sharing(model: nn.Module) -> PrefixSharing | None:
    """Prepare a model for forwards that compute shared prefixes once, after a comparison with plain
    rows on a few tokens.

    The model's attention becomes :data:`ATTENTION`, which is ``"sdpa"`` for every other forward.

    Args:
        model: a causal language model of transformers, not yet a ``PeftModel``.

    Returns:
        ``None``, with a line in the log that says why, for models that do not support it.
    """
    causal = lm.causal_lm(model)
    problem = _problem(causal)
    if problem is None:
        # transformers 5 has a public setter of the implementation, and no public getter.
        before = causal.config._attn_implementation
        try:
            problem = _try(model)
            if problem is None:
                return _sharing(causal.config.get_text_config())
        except checks.FAILURES as error:
            problem = str(error)
        causal.set_attn_implementation(before)
    logger.warning("%s computes every row by itself, also what rows share: %s.", checks.name_of(causal), problem)
    return None


def _sharing(config: Any) -> PrefixSharing:
    size, heads = config.hidden_size, config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    untried = [window for window in checks.declared_windows(config) if window > checks.LONGEST_TRIED]
    return PrefixSharing(size, kv_heads * head_dim / size, min(untried, default=float("inf")))


def _problem(causal: Any) -> str | None:
    """Why a model cannot share prefixes, as far as its configuration and its code tell."""
    decoder = lm.backbone(causal)
    attention = decoder.config._attn_implementation
    if attention not in ("sdpa", ATTENTION):
        return f"its attention is {attention!r}, and not 'sdpa'"
    if lm.moving_ropes(decoder):
        return "the frequencies of its positions depend on a row's length"
    try:
        code = inspect.getsource(sys.modules[type(decoder).__module__])
    except (OSError, TypeError):  # a class of a notebook or of an interpreter
        return "its code, which may ask for the name of its attention, cannot be read"
    if re.search(r"_attn_implementation\s*(?:==|!=|(?:not )?in\b)[^\n]*sdpa", code):
        return "its code does something else where its attention is not called 'sdpa'"
    return checks.unusual_layers(causal)


@torch.no_grad()
def _try(model: nn.Module) -> str | None:
    """Give a model its new attention, and say how it then fails to compute what it did."""
    causal = lm.causal_lm(model)
    with lm.training_flags(causal.modules(), False), float32_products("highest"):
        probes = [_probe_rows(model, length) for length in checks.probe_lengths(causal.config.get_text_config())]
        expected = [lm.hidden_states(model, tokens) for tokens, _ in probes]
        causal.set_attn_implementation(ATTENTION)
        if lm.backbone(model).config._attn_implementation != ATTENTION:
            return "transformers cannot change its attention"
        gap = max(_gap(model, *probe, states) for probe, states in zip(probes, expected, strict=True))
    limit = 1e-3 if lm.is_full_precision(lm.embedding_of(model).dtype) else 5e-2
    return None if gap <= limit else f"its states would differ by {gap:.2g}"


class PrefixTree:
    """A :class:`~torchrl_llm.modules.prefixes.PrefixPlan` as tensors on a device.

    Attributes:
        plan: where it comes from.
        keys: of each stage, flat.
        recomputed: layers are checkpointed.
    """

    def __init__(self, plan: PrefixPlan, device: torch.device, *, recomputed: bool = False) -> None:
        self.plan, self.recomputed = plan, recomputed
        arrays = plan.tokens, plan.positions, plan.places, *(stage.keys.ravel() for stage in plan.stages)
        self.tokens, self.positions, self.places, *self.keys = (torch.from_numpy(x).to(device) for x in arrays)
        self._masks: dict[tuple[Any, ...], StageMask] = {}

    def mask(self, stage: int, groups: int, window: int | None, dtype: torch.dtype) -> StageMask:
        """The mask of a stage, for all its prefixes and all layers."""
        key = stage, groups, window, dtype
        if key not in self._masks:
            start, width, _ = self.plan.stages[stage]
            kind: dict[str, Any] = {"groups": groups, "window": window, "dtype": dtype, "device": self.tokens.device}
            self._masks[key] = StageMask.of(start, width, **kind)
        return self._masks[key]


class RowStates(NamedTuple):
    """The hidden states of rows ``[B, L]``, computed once for shared tokens.

    Attributes:
        states: ``[N, H]``.
        places: ``[B, L]`` where in ``states`` the state of each token is; behind a row's end,
            anything.
        repeats: some places occur more than once.
    """

    states: Tensor
    places: Tensor
    repeats: bool


def row_states(model: nn.Module, tokens: Tensor, lengths: Tensor, sharing: PrefixSharing | None = None) -> RowStates:
    """Last hidden states of right-padded ``tokens`` ``[B, L]``, as
    :func:`~torchrl_llm.modules.lm.hidden_states`.

    Args:
        model: a causal language model or a ``PeftModel`` around one.
        tokens: ``[B, L]``.
        lengths: ``[B]`` the tokens of each row that matter, the most of them L.
        sharing: of this model; ``None``: every row is computed by itself.
    """
    if sharing is not None and len(tokens) > 1 and tokens.shape[1] <= sharing.max_length:
        plan = plan_prefixes(tokens.cpu().numpy(), lengths.cpu().numpy(), sharing.cost(tokens.device))
        if plan is not None:
            tree = PrefixTree(plan, tokens.device, recomputed=lm.is_checkpointed(model))
            return RowStates(tree_states(model, tree), tree.places, repeats=True)
    hidden = lm.hidden_states(model, tokens, lengths)
    places = torch.arange(tokens.numel(), device=tokens.device).view(tokens.shape)
    return RowStates(hidden.flatten(0, 1), places, repeats=False)


def tree_states(model: nn.Module, tree: PrefixTree) -> Tensor:
    """Last hidden states ``[T, H]`` of the tokens of a tree.

    Raises:
        RuntimeError: the model's attention is not :data:`ATTENTION` any more, and would see the
            rows as one.
    """
    decoder = lm.backbone(model)
    if decoder.config._attn_implementation != ATTENTION:
        raise RuntimeError(
            f"The attention of {checks.name_of(decoder)} is {decoder.config._attn_implementation!r}; expected {ATTENTION!r}, which "
            "enable_prefix_sharing() sets: it was changed since. Call enable_prefix_sharing() again, or set prefixes=None."
        )
    # transformers makes no mask where it gets one of four dimensions.
    no_mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=tree.tokens.device)
    ids, positions = tree.tokens.unsqueeze(0), tree.positions.unsqueeze(0)
    with lm.checkpointing(decoder), attention_kernels():
        out = decoder(input_ids=ids, position_ids=positions, attention_mask=no_mask, use_cache=False, prefix_tree=tree)
    return out.last_hidden_state[0]


def prefix_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    prefix_tree: PrefixTree | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in every layer: ``[1, heads, T, D]`` queries, and keys and values of
    a divisor of these heads."""
    if prefix_tree is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, sliding_window=sliding_window, **kwargs
        )
    if unknown := [name for name in _OTHER_ATTENTION if kwargs.get(name) is not None]:
        raise ValueError(f"its attention takes {', '.join(unknown)}")
    # Tokens first, as they lie in memory: the tokens of a prefix are then gathered as whole rows.
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
    heads, groups, dtype = key.shape[1], query.shape[1] // key.shape[1], _computed_in(query)
    stages, used, parts = prefix_tree.plan.stages, 0, []
    # Split at once: the gradient of a slice is as large as the whole, for every stage.
    queries = query.to(dtype).split([len(places) * width for _, width, places in stages])
    for index, ((start, width, places), q) in enumerate(zip(stages, queries, strict=True)):
        span = slice(used, used := used + len(q))
        q = q.view(len(places), width, heads, groups, -1)
        if start == 0 and (sliding_window or width) >= width and _takes_groups(key, value, groups, dtype):
            parts.append(_causal_attention(q, key[span], value[span], scaling))
        else:
            mask = prefix_tree.mask(index, groups, sliding_window, dtype)
            sources, own = ((key, value), prefix_tree.keys[index]) if start else ((key[span], value[span]), None)
            parts.append(masked_attention(q, sources, own, mask, scaling=scaling, recomputed=prefix_tree.recomputed))
    return torch.cat(parts).unsqueeze(0), None


def _computed_in(query: Tensor) -> torch.dtype:
    """The dtype of attention: of the queries, or what autocast makes of it, with masks that would
    be copied in every layer."""
    kind = query.device.type
    if query.dtype == torch.float32 and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return query.dtype


def _takes_groups(key: Tensor, value: Tensor, groups: int, dtype: torch.dtype) -> bool:
    """Whether a kernel without a mask takes fewer keys than queries. CUDA's for float32 does not:
    PyTorch would fall back to one whose memory grows with the square of the tokens."""
    return groups == 1 or (use_gqa_in_sdpa(None, key, value) and not (key.is_cuda and lm.is_full_precision(dtype)))


def _causal_attention(query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    """As :func:`masked_attention`, of prefixes that begin at column 0, and whose keys are the
    stage's own."""
    nodes, width, heads, groups, _ = query.shape
    k, v = (x.to(query.dtype).view(nodes, width, heads, -1).transpose(1, 2) for x in (key, value))
    q = query.flatten(2, 3).transpose(1, 2)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=groups > 1)
    return out.transpose(1, 2).reshape(nodes * width, heads * groups, -1)


def _probe_rows(model: nn.Module, longest: int) -> tuple[Tensor, list[int]]:
    """Eight rows ``[8, longest]`` that fork from the first, or from one of its branches, and the
    columns where they do."""
    forks = [longest] + [longest // 2] * 4 + [longest - 1] * 3
    tokens = checks.probe_ids(model, 1, longest).repeat(8, 1)
    for row, fork in enumerate(forks):
        if row > 4:
            tokens[row] = tokens[4]
        tokens[row, fork:] = (tokens[row, fork:] + row) % lm.embedding_of(model).shape[0]
    return tokens, forks


def _gap(model: nn.Module, tokens: Tensor, forks: list[int], expected: Tensor) -> float:
    """The difference of the states of the probe's rows, behind their forks, with a tree; as a share
    of the largest state."""
    free = PrefixCost(stage=0, context=0, key=0)
    plan = plan_prefixes(tokens.cpu().numpy(), np.full(len(tokens), tokens.shape[1]), free)
    if plan is None:
        return 0.0
    tree = PrefixTree(plan, tokens.device)
    gaps = (tree_states(model, tree)[tree.places] - expected).abs().amax(-1).float()
    branches = torch.stack([gaps[row, fork:].amax() for row, fork in enumerate(forks) if row])
    # In half precision the experts of a mixture may tip over in one branch or another.
    found = branches.max() if lm.is_full_precision(lm.embedding_of(model).dtype) else branches.median()
    return float(found / expected.abs().max())


AttentionInterface.register(ATTENTION, prefix_attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
