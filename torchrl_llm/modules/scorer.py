"""Log-probs of the action tokens of whole rows: :class:`TokenScorer`, one forward per batch of
rows.

Values are computed by the critic, losses and ratios by the objectives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from torchrl_llm import keys
from torchrl_llm.modules.adapters import recompute_contexts, use_adapter
from torchrl_llm.modules.critic import values_of
from torchrl_llm.modules.head import HeldBack, LinearHead, head_scores
from torchrl_llm.modules.lm import embedding_of, hidden_states, lm_logits, vocabulary_of
from torchrl_llm.modules.positions import RowModule, action_positions
from torchrl_llm.modules.prefix_attention import PrefixSharing, row_states
from torchrl_llm.modules.sampling import SamplingConfig, SamplingProcessor

_CHUNK_LOGITS = {"cuda": 2**27}
_CHUNK_LOGITS_ELSEWHERE = 2**24


def default_chunk_logits(device: torch.device) -> int:
    """The most logits in one chunk of a :class:`TokenScorer` for which none are given, by the kind
    of device.

    A GPU needs many tokens at a time for the head to be a fast product: 2**24 logits are 110 tokens
    of a vocabulary of 152 thousand ids. On a CPU larger chunks gain nothing. It does not depend on
    the memory that happens to be free, so that runs can be repeated.

    Examples:
        >>> default_chunk_logits(torch.device("cpu")) == 2**24, default_chunk_logits(torch.device("cuda")) == 2**27
        (True, True)
    """
    return _CHUNK_LOGITS.get(device.type, _CHUNK_LOGITS_ELSEWHERE)


class TokenScorer(RowModule):
    """Log-prob, and optionally entropy, of every action token of a batch of rows.

    The backbone runs once over the right-padded rows, trimmed behind the last action token; only
    the hidden states before action tokens meet the LM head. Log-softmax is taken in float32
    (float64 for a float64 model).

    Reads ``"tokens"``, ``"attention_mask"``, ``"turn_ids"``, all ``[B, L]``; writes ``"log_prob"``
    ``[B, L]`` float: index i is log p(token_i | the tokens before it), 0 where ``turn_ids < 0``;
    and, if asked, ``"entropy"`` likewise, the entropy in nats of the distribution that token_i was
    sampled from.

    Scores belong to the distribution which ``sampling`` describes: its temperature, and its stop
    ids excluded from the first ``min_output_tokens`` tokens of a turn. By default truncation
    (top-k, top-p, min-p) is left out: once the weights change, a sampled token may fall outside the
    new support, where its log-prob is minus infinity. Where the policy truncates, ``old_log_prob``
    is scored again and the loss corrects for the sampler. The repetition penalty is always left
    out, for the distribution it makes depends on the whole context.

    A gap in ``attention_mask`` starts a segment, which is computed as a row of its own
    (:mod:`torchrl_llm.modules.segments`).

    Memory: the ``[M, V]`` logits of M action tokens are made in chunks, which ``backward`` makes
    again, so that only one chunk of logits is alive at a time (where the head or the sampling do
    more than ``head_scores`` of ``modules.head`` covers: as soon as there is more than one).

    Args:
        model: a causal language model of transformers, or a ``PeftModel`` around one.
        sampling: how the tokens were sampled, such as ``policy.sampling``; default
            ``SamplingConfig()``: temperature 1. With ``min_output_tokens`` its ``stop_ids`` must be
            given.
        adapter: the LoRA adapter to score under; ``None``: the model itself, adapters off.
        truncate: apply top-k, top-p and min-p too; a token that they drop gets minus infinity.
        entropy: write the entropy as well. Costs about one more pass over the logits.
        frozen: never build a graph (a reference model).
        value_head: the head of a critic on the same model and adapter. The scorer then writes the
            critic's ``"state_value"`` as well, from the same forward, and a loss needs no other.
            Default ``None``.
        prefixes: what :func:`~torchrl_llm.modules.enable_prefix_sharing` returned for the model:
            what rows share is computed once. Default ``None``: every row by itself.
        log_prob_key, entropy_key, state_value_key: where to write.
        chunk_logits: most logits (tokens times vocabulary) in one chunk, which takes up to 12 bytes
            for each. Changes results by rounding only. Default ``None``: 2**27 on CUDA, elsewhere
            2**24 (:func:`default_chunk_logits`).

    Raises:
        ValueError: ``chunk_logits`` is less than 1.
        RowError: rows that are not right-padded, or have an action where none can be (from
            ``forward``).

    Examples:
        >>> from tensordict import TensorDict
        >>> from transformers import Qwen2Config, Qwen2ForCausalLM
        >>> model = Qwen2ForCausalLM(Qwen2Config(
        ...     vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        ...     num_key_value_heads=1))
        >>> rows = TensorDict(
        ...     tokens=torch.tensor([[3, 4, 5, 6, 0]]), attention_mask=torch.tensor([[True, True, True, True, False]]),
        ...     turn_ids=torch.tensor([[-1, -1, 0, 0, -1]]), batch_size=[1])
        >>> TokenScorer(model, entropy=True)(rows)["log_prob"] < 0
        tensor([[False, False,  True,  True, False]])
    """

    def __init__(
        self,
        model: nn.Module,
        sampling: SamplingConfig | None = None,
        *,
        adapter: str | None = None,
        truncate: bool = False,
        entropy: bool = False,
        frozen: bool = False,
        value_head: nn.Linear | None = None,
        prefixes: PrefixSharing | None = None,
        log_prob_key: keys.NestedKey = keys.LOG_PROB,
        entropy_key: keys.NestedKey = keys.ENTROPY,
        state_value_key: keys.NestedKey = keys.STATE_VALUE,
        chunk_logits: int | None = None,
    ) -> None:
        if chunk_logits is not None and chunk_logits < 1:
            raise ValueError(f"chunk_logits is {chunk_logits}; expected None, or a number of logits >= 1.")
        written = {log_prob_key: True, entropy_key: entropy, state_value_key: value_head is not None}
        super().__init__(model, adapter, prefixes, [key for key, is_written in written.items() if is_written])
        self.value_head = value_head
        self.sampling = sampling or SamplingConfig()
        self.entropy = entropy
        self.frozen = frozen
        self.chunk_logits = chunk_logits
        self.held_back = _held_back_ids(self.sampling)
        self._masked = bool(self.held_back) or (truncate and self.sampling.truncates)
        self._process = SamplingProcessor(_position_wise(self.sampling, truncate))
        self._truncates = truncate and self.sampling.truncates

    def score(self, tokens: Tensor, attention_mask: Tensor, turn_ids: Tensor) -> tuple[Tensor, ...]:
        """``log_prob`` and, where they are written, ``entropy`` and ``state_value``: each
        ``[B, L]``, of tensors ``[B, L]``."""
        return self._compute(tokens, attention_mask, turn_ids)

    def _compute_rows(self, tokens: Tensor, attention_mask: Tensor, turn_ids: Tensor) -> tuple[Tensor, ...]:
        positions = action_positions(attention_mask, turn_ids)
        targets = tokens[positions.rows, positions.columns]
        early = torch.zeros_like(targets, dtype=torch.bool)
        if self.held_back:
            early = positions.index_in_turn(turn_ids) < self.sampling.min_output_tokens
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.frozen), use_adapter(self.model, self.adapter):
            # What follows the last action token is behind everything that is scored; at least one
            # column stays, so that rows without actions still give a graph (distributed training
            # needs one on every rank).
            seen = tokens[:, : max(positions.last_action, 1)]
            found = row_states(self.model, seen, positions.last_actions(), self.prefixes)
            before = found.places[positions.rows, positions.columns - 1]
            if not found.repeats:
                scores = self._score_actions(found.states, before, targets, early)
            else:  # what rows share is scored once
                size = vocabulary_of(self.model)
                # One number for the three, because torch.unique takes fifty times as long for
                # columns.
                codes, index = ((before * size + targets) * 2 + early).unique(return_inverse=True)
                distinct = codes // (2 * size), codes // 2 % size, codes % 2
                scores = [x.index_select(0, index) for x in self._score_actions(found.states, *distinct)]
            if self.value_head is not None:
                scores = [*scores, values_of(self.value_head, found.states.index_select(0, before))]
        return tuple(positions.scatter(values) for values in scores)

    def _score_actions(self, states: Tensor, places: Tensor, targets: Tensor, early: Tensor) -> list[Tensor]:
        """Scores ``[M]`` of the tokens ``targets`` from the states at ``places`` before them, chunk
        by chunk."""
        most = self.chunk_logits or default_chunk_logits(states.device)
        hidden, chunk_size = states.index_select(0, places), max(1, most // vocabulary_of(self.model))
        head = None if self._truncates else LinearHead.of(self.model)
        if head is not None:
            ids = torch.tensor(self.held_back, dtype=torch.int64, device=targets.device)
            held_back = HeldBack(early.bool(), ids) if self.held_back else None
            score = partial(head_scores, temperature=float(self.sampling.temperature), held_back=held_back)
            return [*score(hidden, targets, head, entropy=self.entropy, chunk_size=chunk_size)]
        chunks = [x.split(chunk_size) for x in (hidden, targets, early.bool())]
        score_chunk: Callable[..., tuple[Tensor, ...]] = self._score_chunk
        # One chunk is not recomputed: backward would make its logits again, at the same size.
        if len(chunks[0]) > 1 and torch.is_grad_enabled():
            # The head may be adapted too, and backward may run under another adapter.
            context_fn = partial(recompute_contexts, self.model)
            # The reentrant variant takes no context_fn.
            score_chunk = partial(checkpoint, score_chunk, use_reentrant=False, context_fn=context_fn)
        parts = [score_chunk(*chunk) for chunk in zip(*chunks, strict=True)]
        return [torch.cat(part) for part in zip(*parts, strict=True)]

    def _score_chunk(self, hidden: Tensor, targets: Tensor, early: Tensor) -> tuple[Tensor, ...]:
        """``hidden`` ``[m, H]``, ``targets`` ``[m]``, ``early`` ``[m]`` (stop ids excluded) ->
        scores ``[m]``."""
        logits = lm_logits(self.model, hidden)
        # Also under autocast: the log of a ratio is a small difference of two log-probs.
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.held_back:
            stops = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device)
            stops[list(self.held_back)] = True
            logits = logits.masked_fill(early.unsqueeze(-1) & stops, -torch.inf)
        # min_output_tokens is 0 in these settings: which tokens are early differs within a chunk,
        # and is masked above.
        logits = self._process(logits, index=0)
        if not self.entropy:
            return (-F.cross_entropy(logits, targets, reduction="none"),)
        log_probs = logits.log_softmax(-1)
        return log_probs.gather(-1, targets.unsqueeze(-1)).squeeze(-1), entropy_of(log_probs, masked=self._masked)


def entropy_of(log_probs: Tensor, *, masked: bool = True) -> Tensor:
    """Entropy in nats ``[...]`` of distributions given by their log-probs ``[..., V]``.

    Args:
        log_probs: normalized.
        masked: some entries may be minus infinity; they contribute 0.

    Examples:
        >>> entropy_of(torch.tensor([[0.0, 0.0, -torch.inf]]).log_softmax(-1))
        tensor([0.6931])
    """
    # exp(-inf) * -inf is NaN, in the value and in the gradient: such entries are replaced before
    # the product.
    finite = log_probs.masked_fill(log_probs == -torch.inf, 0.0) if masked else log_probs
    return -(log_probs.exp() * finite).sum(-1)


@torch.no_grad()
def next_log_probs(model: nn.Module, adapter: str | None, prompts: Tensor, temperature: float) -> Tensor:
    """Log-probs ``[n, V]`` of the token after ``prompts`` ``[n, L]``, float32 on the CPU."""
    with use_adapter(model, adapter):
        logits = lm_logits(model, hidden_states(model, prompts.to(embedding_of(model).device))[:, -1])
    return (logits.float() / temperature).log_softmax(-1).cpu()


def _held_back_ids(sampling: SamplingConfig) -> tuple[int, ...]:
    """The ids that cannot be sampled at the start of a turn."""
    if sampling.min_output_tokens and sampling.stop_ids is None:
        raise ValueError(
            f"SamplingConfig.min_output_tokens is {sampling.min_output_tokens} and stop_ids is None: the scorer cannot "
            "know which ids were held back. Pass the policy's own settings (policy.sampling), or set SamplingConfig.stop_ids."
        )
    return (sampling.stop_ids or ()) if sampling.min_output_tokens else ()


def _position_wise(sampling: SamplingConfig, truncate: bool) -> SamplingConfig:
    """The part of ``sampling`` that is the same function of the logits at every position."""
    if truncate and sampling.repetition_penalty != 1:
        raise ValueError(
            f"truncate=True with repetition_penalty={sampling.repetition_penalty}: the penalty depends on the whole "
            "context, which is not kept here. Set repetition_penalty=1.0, or truncate=False and score old_log_prob again."
        )
    rest = replace(sampling, min_output_tokens=0, repetition_penalty=1.0)
    return rest if truncate else replace(rest, top_k=0, top_p=1.0, min_p=0.0)
