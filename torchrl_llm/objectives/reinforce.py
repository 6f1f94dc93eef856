"""REINFORCE over conversations: :class:`LLMReinforceLoss`."""

from __future__ import annotations

from typing import Any

from tensordict.nn import TensorDictModuleBase

from torchrl_llm.objectives.advantages import ReBN
from torchrl_llm.objectives.policy import TurnPolicyLoss


class LLMReinforceLoss(TurnPolicyLoss):
    """REINFORCE (Williams, 1992) with return batch normalisation; the ratio, clipped, allows for more than one epoch.

    :class:`~torchrl_llm.objectives.policy.TurnPolicyLoss` with the KL in the reward, where its sum is exact, and no
    critic.

    Args:
        actor: see :class:`~torchrl_llm.objectives.policy.TurnPolicyLoss`.

    Keyword Args:
        gamma: discount per turn. Default: 0.9.
        kl_coeff: weight of the KL to the reference. Default: 0.01.
        **options: see :class:`~torchrl_llm.objectives.policy.TurnPolicyLoss`.
    """

    default_value_estimator = ReBN

    def __init__(
        self, actor: TensorDictModuleBase, *, gamma: float = 0.9, kl_coeff: float = 0.01, **options: Any
    ) -> None:
        super().__init__(actor, kl_coeff=kl_coeff, kl_in="reward", **options)
        self.estimator_options |= {"gamma": gamma}
        self.make_value_estimator()
