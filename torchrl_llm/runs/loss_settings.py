"""The settings of the algorithms: a class each, with the options that its loss and estimator
declare."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from tensordict.nn import TensorDictModule
from torch import nn

from torchrl_llm import keys, objectives
from torchrl_llm.objectives.base import TurnLossOptions
from torchrl_llm.objectives.estimators.critic import GAEOptions
from torchrl_llm.objectives.estimators.group_relative import GroupOptions
from torchrl_llm.objectives.estimators.imitation import ImitationOptions
from torchrl_llm.objectives.estimators.returns import ReBNOptions
from torchrl_llm.objectives.grpo import GRPOOptions
from torchrl_llm.objectives.ppo import PPOOptions
from torchrl_llm.objectives.reinforce import ReinforceOptions
from torchrl_llm.utils.options import Idle
from torchrl_llm.utils.sections import Alternative

NO_ACTOR = TensorDictModule(nn.Identity(), in_keys=[keys.TOKENS], out_keys=[keys.LOG_PROB, keys.ENTROPY])
NO_CRITIC = TensorDictModule(nn.Identity(), in_keys=[keys.TOKENS], out_keys=[keys.STATE_VALUE, keys.BOOTSTRAP_VALUE])
"""The keys of actor and critic, and no weights: what a loss asks of them when it is made."""


@dataclass(kw_only=True)
class LossSettings(Alternative):
    """The algorithm's loss and estimator."""

    named_by = "algo"
    # Loss and estimator have rules of their own, and are made beside the other settings:
    # max_staleness sets a correction.
    idle: ClassVar[tuple[Idle, ...]] = ()

    loss: ClassVar[type[objectives.TurnLoss]]
    """The algorithm's loss."""

    estimator: str | None = None
    """The value estimator: a class of torchrl_llm.objectives, such as "TurnVTrace", or
    "package.module:Name", which gets those of these options that it has and that are not the
    algorithm's defaults; None takes the algorithm's own."""

    def __post_init__(self) -> None:
        for name in ("clip_epsilon", "sampler_bounds"):
            # YAML has lists only, and settings that were saved must equal those that are read
            # again.
            if isinstance(value := getattr(self, name, None), list):
                setattr(self, name, tuple(value))


@dataclass(kw_only=True)
class LLMPPO(LossSettings, PPOOptions, GAEOptions):
    """Options of :class:`~torchrl_llm.objectives.LLMPPOLoss` and
    :class:`~torchrl_llm.objectives.TurnGAE`."""

    loss = objectives.LLMPPOLoss


@dataclass(kw_only=True)
class LLMREINFORCE(LossSettings, ReinforceOptions, ReBNOptions):
    """Options of :class:`~torchrl_llm.objectives.LLMReinforceLoss` and
    :class:`~torchrl_llm.objectives.ReBN`."""

    loss = objectives.LLMReinforceLoss


@dataclass(kw_only=True)
class GRPO(LossSettings, GRPOOptions, GroupOptions):
    """Options of :class:`~torchrl_llm.objectives.LLMGRPOLoss` and
    :class:`~torchrl_llm.objectives.GroupRelative`."""

    loss = objectives.LLMGRPOLoss


@dataclass(kw_only=True)
class SFT(LossSettings, TurnLossOptions, ImitationOptions):
    """Options of :class:`~torchrl_llm.objectives.LLMSFTLoss` and
    :class:`~torchrl_llm.objectives.ImitationWeights`."""

    loss = objectives.LLMSFTLoss
    harmless: ClassVar[Mapping[str, Any]] = {"kl_coeff": 0}


ALGORITHMS: tuple[type[LossSettings], ...] = (LLMPPO, LLMREINFORCE, GRPO, SFT)
"""The settings of each algorithm; the class has its name."""
