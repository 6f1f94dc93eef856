"""REINFORCE over episodes: :class:`LLMReinforceLoss`."""

from __future__ import annotations

from dataclasses import dataclass

from torchrl_llm.objectives.estimators.returns import ReBN
from torchrl_llm.objectives.loss import KLPlace, TurnPolicyLoss
from torchrl_llm.utils.options import NonNegative


@dataclass(kw_only=True, eq=False, repr=False)
class LLMReinforceLoss(TurnPolicyLoss):
    """REINFORCE (Williams, 1992) with return batch normalization; the clipped ratio allows more
    than one epoch.

    :class:`~torchrl_llm.objectives.TurnPolicyLoss` with the KL in the reward by default, where its
    sum is exact, and no critic. REINFORCE++ (Hu et al., 2025, arXiv:2501.03262) without its
    baseline is ``estimator=ReBN(granularity="token")``.

    Args:
        actor: see :class:`~torchrl_llm.objectives.TurnPolicyLoss`.

    Keyword Args:
        estimator: Default: :class:`~torchrl_llm.objectives.ReBN`.
        kl_coeff: weight of the KL to the reference. Default: 0.01.
        kl_in: subtract the KL from the ``"reward"``, or add it to the ``"loss"``. Default:
            ``"reward"``.
        **options: see :class:`~torchrl_llm.objectives.TurnPolicyLoss`.
    """

    default_value_estimator = ReBN

    kl_coeff: NonNegative = 0.01
    kl_in: KLPlace = "reward"
