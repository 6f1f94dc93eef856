"""REINFORCE over episodes: :class:`LLMReinforceLoss`."""

from __future__ import annotations

from dataclasses import dataclass

from torchrl_llm.objectives.estimators.returns import ReBN
from torchrl_llm.objectives.loss import TurnPolicyLoss
from torchrl_llm.objectives.options import KLPlace, PolicyLossOptions
from torchrl_llm.utils.options import NonNegative


@dataclass(kw_only=True, eq=False, repr=False)
class ReinforceOptions(PolicyLossOptions):
    """Options of :class:`LLMReinforceLoss`."""

    kl_coeff: NonNegative = 0.01
    kl_in: KLPlace = "reward"


@dataclass(kw_only=True, eq=False, repr=False)
class LLMReinforceLoss(ReinforceOptions, TurnPolicyLoss):
    """REINFORCE (Williams, 1992) with return batch normalization; the clipped ratio allows more
    than one epoch.

    :class:`~torchrl_llm.objectives.TurnPolicyLoss` with the KL in the reward by default, where its
    sum is exact, and no critic. REINFORCE++ (Hu et al., 2025, arXiv:2501.03262) without its
    baseline is ``estimator=ReBN(granularity="token")``.

    Arguments are those of :class:`~torchrl_llm.objectives.TurnPolicyLoss`. Defaults of its own:
    ``estimator`` is :class:`~torchrl_llm.objectives.ReBN`, ``kl_coeff`` 0.01, ``kl_in``
    ``"reward"``.
    """

    default_value_estimator = ReBN
