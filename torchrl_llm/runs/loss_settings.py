"""The settings of the algorithms: a class each, with the options that its loss and estimator
declare."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any, ClassVar, Self

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
from torchrl_llm.utils.options import ConfigError, Idle, fits, options_of
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
    "package.module:Name", which gets those of these options that it has, and whose defaults they
    then have; None takes the algorithm's own."""

    def __new__(cls, *args: Any, **options: Any) -> Self:
        made = super().__new__(cls, *args, **options)
        if options:  # none for a copy
            made.__dict__["given"] = options.keys()
        return made

    def __post_init__(self) -> None:
        given = self.__dict__.pop("given", ())
        if (kind := self.value_estimator()) is not None:
            self._take_defaults(kind, given)
        for name in ("clip_epsilon", "sampler_bounds"):
            # YAML has lists only, and settings that were saved must equal those that are read
            # again.
            if isinstance(value := getattr(self, name, None), list):
                setattr(self, name, tuple(value))

    def value_estimator(self) -> type[objectives.TurnEstimator] | None:
        """The class that ``estimator`` names; ``None``: the algorithm's own.

        Raises:
            ConfigError: there is no such class, or it is not a
                :class:`~torchrl_llm.objectives.TurnEstimator`.
        """
        if self.estimator is None:
            return None
        name = self.estimator if ":" in self.estimator else f"torchrl_llm.objectives:{self.estimator}"
        try:
            found = resolve_name(name)
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigError(
                f"estimator is {self.estimator!r}, which cannot be imported ({error}); expected a class of torchrl_llm.objectives, "
                'or "package.module:Name".'
            ) from error
        if not (isinstance(found, type) and issubclass(found, objectives.TurnEstimator)):
            raise ConfigError(f"estimator={self.estimator!r} is {found!r}; expected a subclass of TurnEstimator.")
        return found

    def _take_defaults(self, kind: type[objectives.TurnEstimator], given: Collection[str]) -> None:
        """Take the defaults of the estimator for options that are not given. Those that the loss
        has too are the loss's."""
        own, theirs = options_of(type(self)), options_of(kind)
        of_estimator = options_of(self.loss.default_value_estimator).keys() - options_of(self.loss)
        for name in (of_estimator & own.keys() & theirs.keys()) - {*given}:
            default = theirs[name].default
            if not fits(default, own[name].hint):
                default = getattr(kind(), name)  # which decides it when it is made
            setattr(self, name, default)

    def defaults(self) -> dict[str, Any]:
        """Those beside the estimator."""
        return {**vars(type(self)(estimator=self.estimator)), "estimator": None}


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
