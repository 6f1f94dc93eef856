"""Turn-level credit as TorchRL value estimators, one file each."""

from torchrl_llm.objectives.estimators.base import CriticEstimator, ReturnEstimator, TurnEstimator
from torchrl_llm.objectives.estimators.gae import TurnGAE
from torchrl_llm.objectives.estimators.group_relative import GroupRelative
from torchrl_llm.objectives.estimators.rebn import ReBN
from torchrl_llm.objectives.estimators.vtrace import TurnVTrace

__all__ = ["CriticEstimator", "GroupRelative", "ReBN", "ReturnEstimator", "TurnEstimator", "TurnGAE", "TurnVTrace"]
