"""The settings of the algorithms, which their losses declare: :class:`LossSettings`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from tensordict.nn import TensorDictModule
from torch import nn

from torchrl_llm import keys, objectives
from torchrl_llm.runs.settings import Algorithm
from torchrl_llm.utils.options import NonNegative, Option, meanings, options_class, options_of

LOSSES: dict[Algorithm, type[objectives.TurnLoss]] = {
    "LLMPPO": objectives.LLMPPOLoss,
    "LLMREINFORCE": objectives.LLMReinforceLoss,
    "GRPO": objectives.LLMGRPOLoss,
    "SFT": objectives.LLMSFTLoss,
}
"""The loss of each algorithm, which declares the algorithm's settings (:func:`loss_settings`)."""


NO_ACTOR = TensorDictModule(nn.Identity(), in_keys=[keys.TOKENS], out_keys=[keys.LOG_PROB, keys.ENTROPY])
NO_CRITIC = TensorDictModule(nn.Identity(), in_keys=[keys.TOKENS], out_keys=[keys.STATE_VALUE, keys.BOOTSTRAP_VALUE])
"""The keys of actor and critic, and no weights: what a loss asks of them when it is made."""

NO_SETTINGS = ("actor", "critic", "joint", "estimator", "single_turn", "partial", "process_group")
"""Parameters that the run decides."""

_OF_CLASSES = ("value_network", "value_chunk_size", "ddof", "eps")
"""Options of estimators that are for Python alone."""

_OTHER_HINTS: dict[str, Any] = {
    "kl_kind": Literal["k2", "k3"],  # as a loss "k1" has no gradient in expectation
    "clip_value": NonNegative,  # None is the loss's default here, so that 0 has to mean no bound
}
"""Annotations of settings that differ from the losses' own."""


def estimator_of(algo: Algorithm) -> type[objectives.TurnEstimator]:
    """The algorithm's own estimator."""
    return LOSSES[algo].default_value_estimator


@cache
def loss_settings(algo: Algorithm) -> Mapping[str, Option]:
    """The settings that the loss of ``algo`` and its estimator take, in the order of their
    declaration."""
    options = {**options_of(estimator_of(algo)), **options_of(LOSSES[algo])}
    return {name: option for name, option in options.items() if name not in (*NO_SETTINGS, *_OF_CLASSES)}


def _options_of_losses() -> Any:
    """The options that losses and estimators declare, all ``None``: the default that is declared
    there."""
    options: dict[str, Option] = {}
    meaning: dict[str, str] = {}
    for algo, loss in LOSSES.items():
        said = {**meanings(estimator_of(algo)), **meanings(loss)}
        for name, option in loss_settings(algo).items():
            # which RolloutSettings declares, for every algorithm
            if name not in options and name != "group_size":
                options[name] = Option(_OTHER_HINTS.get(name, option.hint) | None, None)
                takers = [other for other in LOSSES if name in loss_settings(other)]
                only = "" if len(takers) == len(LOSSES) else f" ({', '.join(takers)})"
                meaning[name] = f"{said[name].removesuffix('.')}{only}."
    return options_class("LossOptions", options, meaning, "The algorithm's loss and estimator.")


LossOptions: Any = _options_of_losses()


@dataclass(kw_only=True)
class LossSettings(LossOptions):
    """The algorithm's loss and estimator. The losses declare their options; ``None`` takes the
    default declared there."""

    estimator: str | None = None
    """The value estimator: a class of torchrl_llm.objectives, such as "TurnVTrace", or
    "package.module:Name", which gets those of these options that it has; None takes the algorithm's
    own."""

    def __post_init__(self) -> None:
        for name in ("clip_epsilon", "sampler_bounds"):
            # YAML has lists only, and settings that were saved must equal those that are read
            # again.
            if isinstance(value := getattr(self, name), list):
                setattr(self, name, tuple(value))


def only_of(algo: Algorithm) -> tuple[str, ...]:
    """The settings that no loss but the one of ``algo`` takes."""
    others = {name for other in LOSSES if other != algo for name in loss_settings(other)}
    return tuple(name for name in loss_settings(algo) if name not in {*others, "group_size"})


def missing_in(algo: Algorithm) -> tuple[str, ...]:
    """The settings that the losses of several others take, and the loss of ``algo`` does not."""
    own = {"group_size", *loss_settings(algo), *(name for other in LOSSES for name in only_of(other))}
    return tuple(dict.fromkeys(name for other in LOSSES for name in loss_settings(other) if name not in own))
