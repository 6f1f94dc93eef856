"""The correction for a sampler whose log-probs are not the trainer's: :class:`SamplerRule`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchrl_llm import functional as F


@dataclass(frozen=True)
class SamplerRule:
    """The options ``sampler_*`` of a loss, checked; see
    :class:`~torchrl_llm.objectives.TurnPolicyLoss`.

    Args:
        kind: ``"truncate"``, ``"mask"`` or ``"reject"``.
        bounds: the cap of ``"truncate"``, ``(low, high)`` of the others.
        level, reduction: what has one weight, and how its log-ratios are pooled.

    Raises:
        ValueError: bounds are missing, or do not fit the kind.

    Examples:
        >>> rule = SamplerRule(kind="mask", bounds=(0.5, 2.0), level="token", reduction="sum")
        >>> old, sample = torch.tensor([[0.5, 0.5, 0.1]]).log(), torch.tensor([[0.5, 0.1, 0.5]]).log()
        >>> weight = rule.weights(old, sample, torch.tensor([[0, 0, 0]]))
        >>> weight.tolist(), {name: round(value.item(), 2) for name, value in rule.metrics(weight, torch.full((1, 3), 1 / 3)).items()}
        ([[1.0, 0.0, 0.0]], {'sampler_rejected': 0.67, 'sampler_weight': 0.33})
    """

    kind: F.SamplerCorrection
    bounds: Any
    level: F.RatioLevel
    reduction: F.RatioReduction

    def __post_init__(self) -> None:
        expected = "a cap, such as 2.0" if self.kind == "truncate" else "(low, high), such as (0.5, 2.0)"
        if self.bounds is None:
            raise ValueError(
                f"sampler_correction={self.kind!r} without sampler_bounds: give {expected}, of the ratio between what is trained and what "
                "sampled."
            )
        if isinstance(self.bounds, tuple | list) == (self.kind == "truncate"):
            raise ValueError(f"sampler_bounds is {self.bounds!r}; sampler_correction={self.kind!r} takes {expected}.")
        nothing = torch.zeros(1, 1)
        self.weights(nothing, nothing, nothing.long())  # raises on invalid bounds

    def weights(self, old: Tensor, sample: Tensor, turn_ids: Tensor) -> Tensor:
        """See :func:`~torchrl_llm.functional.sampler_weights`; ``[B, L]`` each."""
        low, high = (0.0, self.bounds) if self.kind == "truncate" else self.bounds
        return F.sampler_weights(old, sample, turn_ids, self.kind, low, high, self.level, self.reduction)

    @staticmethod
    @torch.no_grad()
    def metrics(correction: Tensor, weight: Tensor) -> dict[str, Tensor]:
        """The share of tokens that the correction leaves out, and its mean; by ``weight``, the mean
        of the loss."""
        # 0 in rows that only keep ranks in step
        whole = weight.sum().clamp_min(torch.finfo(weight.dtype).tiny)
        rejected = (weight * (correction == 0)).sum() / whole
        return {"sampler_rejected": rejected, "sampler_weight": (weight * correction).sum() / whole}
