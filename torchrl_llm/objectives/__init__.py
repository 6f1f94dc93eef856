"""Losses, advantage estimators, and the maths under them.

:mod:`~torchrl_llm.functional` holds pure functions; the rest are TorchRL modules around them.
"""

from torchrl_llm import functional
from torchrl_llm.objectives.base import TurnLoss, write_loss_weights
from torchrl_llm.objectives.estimators.base import TurnEstimator
from torchrl_llm.objectives.estimators.critic import CriticEstimator, TurnGAE, TurnVTrace
from torchrl_llm.objectives.estimators.group_relative import GroupRelative
from torchrl_llm.objectives.estimators.imitation import ImitationWeights, NoCredit
from torchrl_llm.objectives.estimators.returns import ReBN, ReturnEstimator
from torchrl_llm.objectives.estimators.roles import RoleRelative
from torchrl_llm.objectives.estimators.vine import TurnVine
from torchrl_llm.objectives.grpo import LLMGRPOLoss
from torchrl_llm.objectives.loss import TurnPolicyLoss
from torchrl_llm.objectives.micro_batches import merge, total
from torchrl_llm.objectives.ppo import LLMPPOLoss
from torchrl_llm.objectives.reinforce import LLMReinforceLoss
from torchrl_llm.objectives.sft import LLMSFTLoss
from torchrl_llm.objectives.steps import MAX_SKIPPED_STEPS, NonFiniteGradientError, clipped_step

__all__ = [
    "MAX_SKIPPED_STEPS",
    "CriticEstimator",
    "GroupRelative",
    "ImitationWeights",
    "LLMGRPOLoss",
    "LLMPPOLoss",
    "LLMReinforceLoss",
    "LLMSFTLoss",
    "NoCredit",
    "NonFiniteGradientError",
    "ReBN",
    "ReturnEstimator",
    "RoleRelative",
    "TurnEstimator",
    "TurnGAE",
    "TurnLoss",
    "TurnPolicyLoss",
    "TurnVTrace",
    "TurnVine",
    "clipped_step",
    "functional",
    "merge",
    "total",
    "write_loss_weights",
]
