"""From logits to tokens: logit processing, keyed noise, inverse-CDF drawing.

Pure functions and one small callable, without a model; what a response is and when it ends is the engine's business
(:mod:`torchrl_llm.modules.hf`). The processors themselves are those of transformers, the same that ``generate`` uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from torchrl_llm.modules.policy import SamplingConfig
from torchrl_llm.stops import response_end_ids


class SamplingProcessor:
    """The logit processors of a :class:`~torchrl_llm.modules.policy.SamplingConfig`, those that are off left out.

    Order: ``min_output_tokens``, repetition penalty, temperature, top-k, top-p, min-p.

    Args:
        sampling: what to apply.
        stop_ids: the ids that cannot be sampled before ``min_output_tokens`` tokens.
        device: of the logits; default CPU.

    Attributes:
        needs_context: whether calls need the ids before the token (repetition penalty only).

    Examples:
        >>> processor = SamplingProcessor(SamplingConfig(top_k=2, temperature=0.5), stop_ids=())
        >>> processor(torch.tensor([[1.0, 3.0, 2.0]]), index=0)
        tensor([[-inf, 6., 4.]])
    """

    def __init__(
        self, sampling: SamplingConfig, *, stop_ids: Sequence[int], device: torch.device | str = "cpu"
    ) -> None:
        steps: list[LogitsProcessor] = []
        if sampling.repetition_penalty != 1:
            steps.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
        if sampling.temperature != 1:
            steps.append(TemperatureLogitsWarper(float(sampling.temperature)))
        if sampling.top_k:
            steps.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1:
            steps.append(TopPLogitsWarper(sampling.top_p))
        if sampling.min_p:
            steps.append(MinPLogitsWarper(sampling.min_p))
        self.needs_context = sampling.repetition_penalty != 1
        self._steps = LogitsProcessorList(steps)
        self._min_output_tokens = sampling.min_output_tokens if stop_ids else 0
        self._suppress = SuppressTokensLogitsProcessor(list(stop_ids), device=str(device)) if stop_ids else None

    def __call__(self, logits: Tensor, *, index: int, context: Tensor | None = None) -> Tensor:
        """The logits of the distribution that is sampled from.

        Args:
            logits: ``[n, V]``; converted to float32 if narrower.
            index: 0-based index of the token in its response.
            context: ``[n, L]`` int64, every id before the token, padded with ids that occur in the row; only read if
                ``needs_context``.

        Returns:
            ``[n, V]`` float32 or float64, minus infinity where a token cannot be sampled.
        """
        logits = logits if logits.dtype == torch.float64 else logits.float()
        if index < self._min_output_tokens and self._suppress is not None:
            logits = self._suppress(context, logits)
        return self._steps(context, logits) if self._steps else logits


def draw(logits: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Draw one token a row by inverting the cumulative distribution, accumulated in float64.

    Token i is drawn if ``cdf(i - 1) <= uniform < cdf(i)``, so a token of probability zero is never drawn.

    Args:
        logits: ``[n, V]`` float, minus infinity where a token cannot be drawn.
        uniform: ``[n]`` float64 in [0, 1).

    Returns:
        ids ``[n]`` int64 and their log-probs ``[n]`` in the dtype of ``logits``; where the logits hold NaN, or are all
        minus infinity, the log-prob is NaN.

    Examples:
        >>> logits = torch.tensor([[0.0, 0.0, -torch.inf], [0.0, 0.0, -torch.inf]])
        >>> ids, log_probs = draw(logits, torch.tensor([0.2, 0.9999999], dtype=torch.float64))
        >>> ids, log_probs.exp()
        (tensor([0, 1]), tensor([0.5000, 0.5000]))
    """
    top = logits.amax(-1, keepdim=True)
    weights = (logits - top).exp_()
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    ids = torch.searchsorted(cumulative, uniform.unsqueeze(-1) * total, right=True)
    ids.clamp_(max=logits.shape[-1] - 1)  # the search runs off the end where the logits are NaN
    if logits.device.type != "cpu":
        # A parallel scan may step up by a rounding error at a weight of zero.
        ids = torch.where(weights.gather(-1, ids) > 0, ids, logits.argmax(-1, keepdim=True))
    log_probs = (logits.gather(-1, ids) - top) - total.log()
    return ids.squeeze(-1), log_probs.squeeze(-1).to(logits.dtype)


def likeliest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The likeliest token of each row ``[n]`` and its log-prob ``[n]``, from logits ``[n, V]``.

    Examples:
        >>> likeliest(torch.tensor([[0.0, 0.0, -torch.inf]]))
        (tensor([0]), tensor([-0.6931]))
    """
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
    rows = [
        np.random.Generator(np.random.PCG64(np.random.SeedSequence((seed, episode, t)))).random(width)
        for episode, t in zip(episode_id, turn, strict=True)
    ]
    return torch.from_numpy(np.stack(rows))


def turn_seed(*, seed: int, episode_id: int, turn: int) -> int:
    """A seed in ``[0, 2**63)`` for engines that draw their own noise, a hash of ``(seed, episode_id, turn)``.

    Examples:
        >>> turn_seed(seed=0, episode_id=7, turn=2) == turn_seed(seed=0, episode_id=7, turn=2)
        True
        >>> turn_seed(seed=0, episode_id=7, turn=2) == turn_seed(seed=0, episode_id=2, turn=7)
        False
    """
    digest = blake2b(f"{seed} {episode_id} {turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1


def stop_ids(
    sampling: SamplingConfig, model_ids: int | Sequence[int] | None, tokenizer: Any, *, vocabulary: int
) -> tuple[int, ...]:
    """The ids that end a response: ``sampling.stop_ids``, or :func:`torchrl_llm.stops.response_end_ids`.

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
        raise ValueError(f"stop_ids {strange} are no ids of the model, whose vocabulary has {vocabulary} tokens.")
    return found
