"""REINFORCE over episodes: :class:`LLMReinforceLoss`."""

from __future__ import annotations

from dataclasses import dataclass

from torchrl_llm.objectives.estimators.base import Granularity
from torchrl_llm.objectives.estimators.returns import Population, ReBN
from torchrl_llm.objectives.loss import KLPlace, TurnPolicyLoss
from torchrl_llm.utils.options import NonNegative, Share


@dataclass(kw_only=True, eq=False, repr=False)
class LLMReinforceLoss(TurnPolicyLoss):
    """REINFORCE (Williams, 1992) with return batch normalization; the clipped ratio allows more
    than one epoch.

    :class:`~torchrl_llm.objectives.TurnPolicyLoss` with the KL in the reward by default, where its
    sum is exact, and no critic. REINFORCE++ (Hu et al., 2025, arXiv:2501.03262) without its
    baseline is ``granularity="token"``.

    Args:
        actor: see :class:`~torchrl_llm.objectives.TurnPolicyLoss`.

    Keyword Args:
        gamma, granularity, single_turn, normalize_over, potential: see
            :class:`~torchrl_llm.objectives.ReBN`. Defaults: 0.9 (1.0 per token), ``"turn"``,
            ``None``, ``"batch"``, ``None``.
        kl_coeff: weight of the KL to the reference. Default: 0.01.
        kl_in: subtract the KL from the ``"reward"``, or add it to the ``"loss"``. Default:
            ``"reward"``.
        **options: see :class:`~torchrl_llm.objectives.TurnPolicyLoss`.
    """

    default_value_estimator = ReBN
    idle = (*TurnPolicyLoss.idle, *ReBN.idle)

    gamma: Share | None = None
    """Discount per turn."""
    granularity: Granularity = "turn"
    """Credit per "turn" or per "token"; "auto" is per token where the environment ends every
    episode with its first response."""
    single_turn: bool | None = None
    normalize_over: Population = "batch"
    """Normalize returns over the "batch", or "none"."""
    potential: str | None = None
    """Shape rewards by this extra, the potential of the state before each turn: a baseline of
    returns."""
    kl_coeff: NonNegative = 0.01
    kl_in: KLPlace = "reward"
