"""How responses are sampled: :class:`SamplingConfig`, and from logits to tokens.

Pure functions and one small callable, without a model: logit processing, keyed noise, sampling by
the inverse cumulative distribution. The processors come from transformers, the same that
``generate`` uses. The engines sample token by token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from torchrl_llm.stops import response_end_ids
from torchrl_llm.utils import options

_BLOCK = {"cpu": 2**19}
"""Logits of the rows that are sampled from at a time, by kind of device. On a CPU their float64
sums fill 4 MiB, which the allocator reuses; it returns arrays of more than 32 MiB to the system
after every token."""
_LARGE_BLOCK = 2**26  # of other devices, whose allocators keep memory: 512 MiB of float64 sums


@dataclass(frozen=True, kw_only=True)
class SamplingConfig(options.Checked):
    """How responses are sampled. Complete: nothing is inherited from a model's
    ``generation_config``.

    The processors are applied in this order: ``min_output_tokens``, ``repetition_penalty``,
    ``temperature``, ``top_k``, ``top_p``, ``min_p``; the log-prob recorded belongs to the
    distribution which is left after all of them.

    Examples:
        >>> SamplingConfig(temperature=0.7, max_output_tokens=32).truncates
        False
        >>> SamplingConfig(top_p=0.9).truncates
        True
    """

    temperature: options.Temperature = 1.0
    """Divides the logits; > 0 (greedy decoding is TorchRL's ``ExplorationType.DETERMINISTIC``)."""
    top_k: options.Natural = 0
    """Keep the ``top_k`` likeliest tokens; 0 keeps all."""
    top_p: options.PositiveShare = 1.0
    """Keep the smallest set of tokens with at least this mass; 1.0 keeps all."""
    min_p: options.MinP = 0.0
    """Drop tokens less likely than ``min_p`` times the likeliest; 0.0 keeps all."""
    repetition_penalty: options.Positive = 1.0
    """As in CTRL (Keskar et al., 2019), over the whole context; 1.0 is off."""
    min_output_tokens: options.Natural = 0
    """Stop ids cannot be sampled before this many tokens of the response."""
    max_output_tokens: options.Count = 64
    """A response is cut after this many tokens; the width ``A`` of the response keys."""
    stop_ids: tuple[int, ...] | None = None
    """Ids that end a response. They are part of its tokens, and not of the text that an environment
    gets. ``None``: the engine decides by :func:`decide_stop_ids` when it is made: the chat
    template's end-of-turn id, the tokenizer's EOS id and the model's own end tokens. An empty
    tuple: responses end at ``max_output_tokens`` only."""

    __repr__ = options.brief_repr

    def __post_init__(self) -> None:
        if isinstance(self.stop_ids, list):  # of YAML and JSON
            object.__setattr__(self, "stop_ids", tuple(self.stop_ids))
        if self.min_output_tokens > self.max_output_tokens:
            raise options.ConfigError(
                f"min_output_tokens is {self.min_output_tokens}; expected at most max_output_tokens={self.max_output_tokens}."
            )

    @property
    def truncates(self) -> bool:
        """Whether some tokens get probability zero, or the distribution depends on more than the
        logits."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0 or self.repetition_penalty != 1


def decide_stop_ids(
    sampling: SamplingConfig, model_ids: int | Sequence[int] | None, tokenizer: Any, *, vocabulary: int
) -> SamplingConfig:
    """``sampling`` with ``stop_ids``: its own, or those found by
    :func:`torchrl_llm.stops.response_end_ids`.

    Engines and :func:`~torchrl_llm.modules.load_actor_critic` call it once; all others read
    ``sampling.stop_ids``.

    Args:
        sampling: how responses are sampled.
        model_ids: the end tokens of the model's ``generation_config``.
        tokenizer: the model's.
        vocabulary: number of logits.

    Raises:
        ValueError: neither names an end token, or an id is none of the model's.
    """
    found = sampling.stop_ids
    if found is None:
        found = response_end_ids(tokenizer, model_ids)
        if not found:
            raise ValueError(
                "SamplingConfig.stop_ids is None, but neither the tokenizer nor model.generation_config names an end "
                "token. Set tokenizer.eos_token, or pass stop_ids=(...); stop_ids=() lets every response run to "
                "max_output_tokens."
            )
    strange = [i for i in found if not 0 <= i < vocabulary]
    if strange:
        raise options.ConfigError(
            f"stop_ids {options.brief(strange)} are not ids of the model, whose vocabulary has {vocabulary} tokens."
        )
    return replace(sampling, stop_ids=found)


class SamplingProcessor:
    """The logit processors of a :class:`SamplingConfig`; those that are off are left out.

    Order: ``min_output_tokens``, repetition penalty, temperature, top-k, top-p, min-p.

    Args:
        sampling: what to apply. Its ``stop_ids`` cannot be sampled before ``min_output_tokens``
            tokens.

    Attributes:
        needs_context: whether calls need the ids before the token (repetition penalty only).

    Examples:
        >>> processor = SamplingProcessor(SamplingConfig(top_k=2, temperature=0.5))
        >>> processor(torch.tensor([[1.0, 3.0, 2.0]]), index=0)
        tensor([[-inf, 6., 4.]])
    """

    def __init__(self, sampling: SamplingConfig) -> None:
        penalty = sampling.repetition_penalty
        steps = [
            (penalty != 1, transformers.RepetitionPenaltyLogitsProcessor, penalty),
            (sampling.temperature != 1, transformers.TemperatureLogitsWarper, float(sampling.temperature)),
            (sampling.top_k > 0, transformers.TopKLogitsWarper, sampling.top_k),
            (sampling.top_p < 1, transformers.TopPLogitsWarper, sampling.top_p),
            (sampling.min_p > 0, transformers.MinPLogitsWarper, sampling.min_p),
        ]
        self._steps = transformers.LogitsProcessorList(make(value) for is_on, make, value in steps if is_on)
        self.needs_context = penalty != 1
        # Not transformers' MinNewTokensLengthLogitsProcessor: it counts from one prompt length for
        # the whole batch.
        self._held_back = torch.tensor(sampling.stop_ids or (), dtype=torch.int64)
        self._min_output_tokens = sampling.min_output_tokens

    def __call__(self, logits: Tensor, *, index: int, context: Tensor | None = None) -> Tensor:
        """The logits of the distribution that is sampled from.

        Args:
            logits: ``[n, V]``; converted to float32 if narrower.
            index: 0-based index of the token in its response.
            context: ``[n, L]`` int64, every id before the token, padded with ids that occur in the
                row; only read if ``needs_context``.

        Returns:
            ``[n, V]`` float32 or float64, minus infinity where a token cannot be sampled.
        """
        logits = logits if logits.dtype == torch.float64 else logits.float()
        # Before the others: top-k and top-p must not count ids that cannot be sampled.
        if index < self._min_output_tokens:
            # once: every copy to a device would wait for it
            if self._held_back.device != logits.device:
                self._held_back = self._held_back.to(logits.device)
            logits = logits.index_fill(-1, self._held_back, -torch.inf)
        return self._steps(context, logits) if self._steps else logits


def draw(logits: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Sample one token a row by inverting the cumulative distribution, accumulated in float64.

    Token i is sampled if ``cdf(i - 1) <= uniform < cdf(i)``, so a token of probability zero never
    is.

    Args:
        logits: ``[n, V]`` float, minus infinity where a token cannot be sampled.
        uniform: ``[n]`` float64 in [0, 1).

    Returns:
        ids ``[n]`` int64 and their log-probs ``[n]`` in the dtype of ``logits``; where the logits
        hold NaN, or are all minus infinity, the log-prob is NaN.

    Examples:
        >>> logits = torch.tensor([[0.0, 0.0, -torch.inf], [0.0, 0.0, -torch.inf]])
        >>> ids, log_probs = draw(logits, torch.tensor([0.2, 0.9999999], dtype=torch.float64))
        >>> ids, log_probs.exp()
        (tensor([0, 1]), tensor([0.5000, 0.5000]))
    """
    return _by_blocks(_draw, logits, uniform)


def likeliest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The likeliest token of each row ``[n]`` and its log-prob ``[n]``, from logits ``[n, V]``.

    Examples:
        >>> likeliest(torch.tensor([[0.0, 0.0, -torch.inf]]))
        (tensor([0]), tensor([-0.6931]))
    """
    return _by_blocks(_likeliest, logits)


def _by_blocks(sample: Callable[..., tuple[Tensor, Tensor]], logits: Tensor, *rows: Tensor) -> tuple[Tensor, Tensor]:
    """``sample(logits, *rows)``, a few rows at a time. Rows do not meet in it, so the results are
    the same."""
    height = max(1, _BLOCK.get(logits.device.type, _LARGE_BLOCK) // logits.shape[-1])
    if len(logits) <= height:
        return sample(logits, *rows)
    blocks = zip(*(x.split(height) for x in (logits, *rows)), strict=True)
    ids, log_probs = zip(*(sample(*block) for block in blocks), strict=True)
    return torch.cat(ids), torch.cat(log_probs)


def _draw(logits: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    # Not torch.multinomial: it draws for the whole batch from one generator, so a token would
    # depend on its neighbors.
    top = logits.amax(-1, keepdim=True)
    weights = (logits - top).exp_()
    # In float32 a weight below 6e-8 of the sum would not move it, so such tokens could not be
    # sampled.
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    ids = torch.searchsorted(cumulative, uniform.unsqueeze(-1) * total, right=True)
    ids.clamp_(max=logits.shape[-1] - 1)  # the search runs off the end where the logits are NaN
    if logits.device.type != "cpu":
        # A parallel scan may step up by a rounding error at a weight of zero.
        ids = torch.where(weights.gather(-1, ids) > 0, ids, logits.argmax(-1, keepdim=True))
    log_probs = (logits.gather(-1, ids) - top) - total.log()
    return ids.squeeze(-1), log_probs.squeeze(-1).to(logits.dtype)


def _likeliest(logits: Tensor) -> tuple[Tensor, Tensor]:
    log_probs, ids = logits.log_softmax(-1).max(-1)
    return ids, log_probs


def turn_noise(*, seed: int, episode_id: Sequence[int], turn: Sequence[int], width: int) -> Tensor:
    """Uniform noise of one turn for each row, a function of ``(seed, episode_id, turn)`` alone.

    Args:
        seed: >= 0.
        episode_id, turn: ``n`` ints each, >= 0.
        width: tokens a turn.

    Returns:
        ``[n, width]`` float64 in [0, 1). The first tokens' noise does not depend on ``width``.

    Examples:
        >>> one = turn_noise(seed=0, episode_id=[7], turn=[2], width=3)
        >>> two = turn_noise(seed=0, episode_id=[5, 7], turn=[0, 2], width=4)
        >>> torch.equal(one[0], two[1, :3])
        True
    """
    # PCG64 by name: what default_rng uses may change with NumPy, and with it every episode.
    seeds = [(seed, episode, t) for episode, t in zip(episode_id, turn, strict=True)]
    rows = [np.random.Generator(np.random.PCG64(each)).random(width) for each in seeds]
    return torch.from_numpy(np.stack(rows))


def turn_seed(*, seed: int, episode_id: int, turn: int, retry: int = 0) -> int:
    """A seed in ``[0, 2**63)`` for engines that make their own noise, a hash of
    ``(seed, episode_id, turn)``.

    Args:
        seed, episode_id, turn: the noise key.
        retry: how often the turn has been sampled before; default 0.

    Examples:
        >>> turn_seed(seed=0, episode_id=7, turn=2) == turn_seed(seed=0, episode_id=7, turn=2)
        True
        >>> turn_seed(seed=0, episode_id=7, turn=2) == turn_seed(seed=0, episode_id=2, turn=7)
        False
    """
    # The spaces tell (1, 23) from (12, 3).
    key = f"{seed} {episode_id} {turn}" + (f" {retry}" if retry else "")
    digest = blake2b(key.encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1  # 63 bits fit into a signed 64-bit integer
