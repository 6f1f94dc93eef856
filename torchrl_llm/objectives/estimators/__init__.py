"""Turn-level credit as TorchRL value estimators."""

from torchrl_llm.objectives.estimators.base import TurnEstimator
from torchrl_llm.objectives.estimators.critic import CriticEstimator, TurnGAE, TurnVTrace
from torchrl_llm.objectives.estimators.group_relative import GroupRelative
from torchrl_llm.objectives.estimators.imitation import ImitationWeights, NoCredit
from torchrl_llm.objectives.estimators.returns import ReBN, ReturnEstimator
from torchrl_llm.objectives.estimators.roles import RoleRelative
from torchrl_llm.objectives.estimators.vine import TurnVine

__all__ = [
    "CriticEstimator",
    "GroupRelative",
    "ImitationWeights",
    "NoCredit",
    "ReBN",
    "ReturnEstimator",
    "RoleRelative",
    "TurnEstimator",
    "TurnGAE",
    "TurnVTrace",
    "TurnVine",
]
