"""The settings of the algorithms: a class each, with the options that its loss and estimator
declare."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from tensordict.nn import TensorDictModule
from torch import nn

from torchrl_llm import keys, objectives
from torchrl_llm.objectives.estimators.critic import GAEOptions
from torchrl_llm.objectives.estimators.group_relative import GroupOptions
from torchrl_llm.objectives.estimators.imitation import ImitationOptions
from torchrl_llm.objectives.estimators.returns import ReBNOptions
from torchrl_llm.objectives.grpo import GRPOOptions
from torchrl_llm.objectives.options import TurnLossOptions
from torchrl_llm.objectives.ppo import PPOOptions
from torchrl_llm.objectives.reinforce import ReinforceOptions
from torchrl_llm.utils.hints import nearest
from torchrl_llm.utils.named import call_named, find_class
from torchrl_llm.utils.options import ConfigError, Idle, describe, fits, options_of
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
    idle: ClassVar[tuple[Idle, ...]] = (
        Idle(("loss_options",), {"loss_class": (None,)}, "name the class with loss_class"),
        Idle(("estimator_options",), {"estimator": (None,)}, "name the class with estimator"),
    )

    stock: ClassVar[type[objectives.TurnLoss]]
    """The algorithm's loss."""

    loss_class: str | None = None
    """The loss: a subclass of the algorithm's, as "package.module:Name", with its defaults; None
    takes the algorithm's own."""
    loss_options: dict[str, Any] = field(default_factory=dict)
    """Arguments of loss_class that are no settings, such as {"strength": 0.5}."""
    estimator: str | None = None
    """The value estimator: a class of torchrl_llm.objectives, such as "TurnVTrace", or
    "package.module:Name", which gets those of these options that it has, and whose defaults they
    then have; None takes the loss's own."""
    estimator_options: dict[str, Any] = field(default_factory=dict)
    """Arguments of estimator that are no settings."""

    def __new__(cls, *args: Any, **options: Any) -> Self:
        made = super().__new__(cls, *args, **options)
        if options:  # none for a copy
            made.__dict__["given"] = options.keys()
        return made

    def __post_init__(self) -> None:
        given = self.__dict__.pop("given", ())
        of_loss = options_of(self.stock)
        for chosen, known in (
            (self.loss_type(), of_loss.keys()),
            # Those that the loss has too are the loss's.
            (self.estimator_type(), options_of(self.stock.default_value_estimator).keys() - of_loss.keys()),
        ):
            if chosen not in (self.stock, self.stock.default_value_estimator):
                self._take_defaults(chosen, known - {*given})
        self._check_further("loss_options", self.loss_type())
        self._check_further("estimator_options", self.estimator_type())
        for name in ("clip_epsilon", "sampler_bounds"):
            # YAML has lists only, and settings that were saved must equal those that are read
            # again.
            if isinstance(value := getattr(self, name, None), list):
                setattr(self, name, tuple(value))

    def loss_type(self) -> type[objectives.TurnLoss]:
        """The class of the loss.

        Raises:
            ConfigError: there is no class that ``loss_class`` names, or it is none of the
                algorithm.
        """
        return self.stock if self.loss_class is None else find_class("loss_class", self.loss_class, self.stock)

    def estimator_type(self) -> type[objectives.TurnEstimator]:
        """The class of the value estimator.

        Raises:
            ConfigError: there is no class that ``estimator`` names, or it is no
                :class:`~torchrl_llm.objectives.TurnEstimator`.
        """
        if self.estimator is None:
            return self.loss_type().default_value_estimator
        name = self.estimator if ":" in self.estimator else f"torchrl_llm.objectives:{self.estimator}"
        return find_class("estimator", name, objectives.TurnEstimator, ", or the name of one of torchrl_llm.objectives")

    def _take_defaults(self, kind: type[Any], names: Collection[str]) -> None:
        """Take the defaults of a class for options that are not given."""
        own, theirs = options_of(type(self)), options_of(kind)
        for name in names & own.keys() & theirs.keys():
            default = theirs[name].default
            if issubclass(kind, objectives.TurnEstimator) and not fits(default, own[name].hint):
                made = call_named("estimator", kind.__name__, kind)  # which decides it
                default = getattr(made, name)
            if not fits(default, own[name].hint):
                raise ConfigError(
                    f"{kind.__name__}, which the settings name, has no default of {name} that the setting takes; expected "
                    f"{describe(own[name].hint)}."
                )
            setattr(self, name, default)

    def _check_further(self, setting: str, kind: type[Any]) -> None:
        for name in getattr(self, setting):
            if name in ("actor", "critic", "joint", "estimator"):
                raise ConfigError(f"{setting} has {name}, which a run makes itself: leave it out.")
            if name in options_of(type(self)):
                raise ConfigError(f"{setting} has {name}, which is a setting of its own: write it beside {setting}.")
            if name not in options_of(kind):
                known = [each for each in options_of(kind) if each not in options_of(type(self))]
                raise ConfigError(f"{setting} has {name}, which {kind.__name__} does not take.{nearest(name, known)}")

    def defaults(self) -> dict[str, Any]:
        """Those beside the classes of loss and estimator."""
        named: dict[str, Any] = {"loss_class": self.loss_class, "estimator": self.estimator}
        return {**vars(type(self)(**named)), **dict.fromkeys(named)}


@dataclass(kw_only=True)
class LLMPPO(LossSettings, PPOOptions, GAEOptions):
    """Options of :class:`~torchrl_llm.objectives.LLMPPOLoss` and
    :class:`~torchrl_llm.objectives.TurnGAE`."""

    stock = objectives.LLMPPOLoss


@dataclass(kw_only=True)
class LLMREINFORCE(LossSettings, ReinforceOptions, ReBNOptions):
    """Options of :class:`~torchrl_llm.objectives.LLMReinforceLoss` and
    :class:`~torchrl_llm.objectives.ReBN`."""

    stock = objectives.LLMReinforceLoss


@dataclass(kw_only=True)
class GRPO(LossSettings, GRPOOptions, GroupOptions):
    """Options of :class:`~torchrl_llm.objectives.LLMGRPOLoss` and
    :class:`~torchrl_llm.objectives.GroupRelative`."""

    stock = objectives.LLMGRPOLoss


@dataclass(kw_only=True)
class SFT(LossSettings, TurnLossOptions, ImitationOptions):
    """Options of :class:`~torchrl_llm.objectives.LLMSFTLoss` and
    :class:`~torchrl_llm.objectives.ImitationWeights`."""

    stock = objectives.LLMSFTLoss
    harmless: ClassVar[Mapping[str, Any]] = {"kl_coeff": 0}
