"""How a loss and its estimator are joined: which estimator it is (:func:`estimator_of`), what the
loss gives to it (:func:`serve`), and the keys that both have (:func:`join_keys`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from torchrl.objectives.utils import ValueEstimators
from torchrl.objectives.value import ValueEstimatorBase

from torchrl_llm.keys import NestedKey
from torchrl_llm.objectives.estimators.base import TurnEstimator
from torchrl_llm.objectives.estimators.critic import TurnGAE
from torchrl_llm.utils.options import ConfigError, options_of


def estimator_of(loss: Any, value_type: Any, hyperparams: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The estimator that a loss is asked to make, as TorchRL's ``make_value_estimator`` takes it.

    Args:
        loss: a :class:`~torchrl_llm.objectives.TurnLoss`.
        value_type, hyperparams: what its ``make_value_estimator`` was given.

    Returns:
        An instance and nothing, or the class of another package and its ``hyperparams``.

    Raises:
        TypeError: there is none, and the loss has none of its own.
        NotImplementedError: it is a name of TorchRL's but ``GAE``.
        ValueError: an instance is given hyperparameters.
    """
    name = type(loss).__name__
    value_type = TurnGAE if value_type is ValueEstimators.GAE else value_type or loss.default_value_estimator
    if value_type is None:
        raise TypeError(
            f"{name} has no estimator of its own: give it estimator=..., or its class default_value_estimator."
        )
    if isinstance(value_type, ValueEstimators):
        raise NotImplementedError(f"{name} has no {value_type}: pass .GAE of these, or a class.")
    if isinstance(value_type, ValueEstimatorBase) and hyperparams:
        raise ValueError(f"An estimator instance takes no hyperparameters; got {sorted(hyperparams)}.")
    if isinstance(value_type, type) and issubclass(value_type, TurnEstimator):
        return value_type(**hyperparams), {}
    return value_type, dict(hyperparams)


def declared(estimator: ValueEstimatorBase) -> TurnEstimator | type[TurnEstimator]:
    """What an estimator declares of itself; one of another package declares nothing, so the
    defaults of :class:`~torchrl_llm.objectives.TurnEstimator` hold for it."""
    return estimator if isinstance(estimator, TurnEstimator) else TurnEstimator


def serve(loss: Any, estimator: ValueEstimatorBase) -> Callable[[], None]:
    """Give an estimator what its loss has for it: its critic, if the estimator has none, and the
    weight of the KL that it leaves to the rewards.

    Args:
        loss: a :class:`~torchrl_llm.objectives.TurnLoss`.
        estimator: a :class:`~torchrl_llm.objectives.TurnEstimator`, which gets no KL if it takes
            none; or one of another package, which gets nothing.

    Returns:
        What undoes it, for a loss that refuses the estimator.

    Raises:
        ConfigError: the estimator has another ``kl_coeff``, or serves a loss with another critic or
            ``kl_coeff``.
    """
    if not isinstance(estimator, TurnEstimator):
        return lambda: None
    name, critic = type(estimator).__name__, loss.critic_network
    penalty = loss.kl_coeff if loss.kl_in == "reward" else 0.0
    if estimator.serves is not None and not (estimator.serves[0] is critic and estimator.serves[1] == penalty):
        raise ConfigError(
            f"This {name} serves another loss, with a critic or a kl_coeff of its own: give each loss its own estimator."
        )
    takes_kl = penalty and "kl_coeff" in options_of(type(estimator))
    if takes_kl and estimator.kl_coeff not in (0, penalty):
        raise ConfigError(
            f"{name} has kl_coeff={estimator.kl_coeff}, and the loss leaves its KL to the reward with kl_coeff={penalty}: give it to "
            "one of them."
        )
    before = {name: getattr(estimator, name) for name in ("serves", "kl_coeff", "kl_fraction", "value_network")}
    # Into __dict__, as TorchRL has it: the loss owns the critic's parameters.
    given = {"serves": (critic, penalty), "kl_fraction": loss.kl_fraction}
    given |= {"value_network": critic} if before["value_network"] is None else {}
    given |= {"kl_coeff": penalty} if takes_kl else {}
    estimator.__dict__.update(given)
    return lambda: estimator.__dict__.update({name: before[name] for name in given})


def shared_keys(loss: Any, estimator: Any) -> set[str]:
    """Names of keys that a loss and its estimator both have; TorchRL's estimators have others
    too."""
    ours, theirs = ({field.name for field in fields(each.default_keys)} for each in (loss, estimator))
    return ours & theirs


def join_keys(loss: Any, estimator: Any) -> None:
    """Give a loss and its new estimator the same keys: those that were set on either.

    Raises:
        ValueError: one was set on both, and not the same.
    """
    usual = TurnEstimator if isinstance(estimator, TurnEstimator) else type(estimator)
    ours: dict[str, NestedKey] = {}
    theirs: dict[str, NestedKey] = {}
    for name in shared_keys(loss, estimator):
        own, other = getattr(loss.tensor_keys, name), getattr(estimator.tensor_keys, name)
        if other in (own, getattr(usual.default_keys, name)):
            theirs[name] = own
        elif own == getattr(loss.default_keys, name):
            ours[name] = other
        else:
            raise ValueError(
                f"{type(loss).__name__} has the key {own!r} as its {name}, and {type(estimator).__name__} {other!r}: set it on one of "
                "them."
            )
    estimator.set_keys(**theirs)
    loss.set_keys(**ours)
