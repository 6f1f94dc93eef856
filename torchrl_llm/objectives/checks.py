"""Which options are a loss's, and which its estimator's: :func:`check_names`; what a loss of one's
own must return: :func:`check_objective`; which estimators go with a policy
loss: :func:`check_estimator`; which rewards an estimator takes: :func:`wrong_penalty`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from torchrl_llm.objectives.estimators.base import TurnEstimator
from torchrl_llm.objectives.estimators.imitation import ImitationWeights, NoCredit
from torchrl_llm.utils.hints import nearest
from torchrl_llm.utils.options import brief, options_of


def check_names(loss: type, estimator: type[TurnEstimator], options: Mapping[str, Any]) -> None:
    """Refuse options that a loss does not have.

    Args:
        loss: its class.
        estimator: the class of its own estimator.
        options: keyword arguments for the loss, by name.

    Raises:
        TypeError: one is the estimator's, and the message says what to write; or nobody's, and the
            nearest of both is named.
    """
    own = options_of(loss).keys()
    theirs = options_of(estimator).keys() - own
    for name in options:
        if name not in own | theirs:
            raise TypeError(f"{loss.__name__} has no option {name!r}.{nearest(name, [*own, *sorted(theirs)])}")
    if credit := [f"{name}={brief(value)}" for name, value in options.items() if name in theirs]:
        given = ", ".join(credit)
        raise TypeError(f"{given} is of the estimator: give {loss.__name__} estimator={estimator.__name__}({given}).")


def check_objective(name: str, objective: Any, log_ratio: Tensor) -> Tensor:
    """The objective of each token, or an error that says what is wrong with it.

    Args:
        name: of the class that it is of, for messages.
        objective: what its method returned.
        log_ratio: ``[B, L]``, what the method was given.

    Raises:
        TypeError: it is not a tensor.
        ValueError: it has another shape or device than ``log_ratio``, or no gradient where that has
            one.
    """
    method = f"{name}.objective"
    if not isinstance(objective, Tensor):
        raise TypeError(
            f"{method} returned {objective!r}; expected a tensor of log_ratio's shape {list(log_ratio.shape)}."
        )
    if objective.shape != log_ratio.shape:
        raise ValueError(
            f"{method} returned the shape {list(objective.shape)}; expected that of log_ratio, {list(log_ratio.shape)}: one term a token, "
            "which the loss weighs and sums."
        )
    if objective.device != log_ratio.device:
        raise ValueError(
            f"{method} returned a tensor on {objective.device}; log_ratio is on {log_ratio.device}: make it there (device=log_ratio.device)."
        )
    if log_ratio.requires_grad and not objective.requires_grad:
        raise ValueError(
            f"{method} returned a tensor without a gradient ({objective.dtype}): expected one computed from log_ratio, neither detached nor "
            "rounded to whole numbers."
        )
    return objective


def check_estimator(loss: Any, declared: TurnEstimator | type[TurnEstimator]) -> None:
    """Refuse an estimator that does not go with a policy loss.

    Args:
        loss: a :class:`~torchrl_llm.objectives.TurnPolicyLoss`.
        declared: what its estimator declares.

    Raises:
        ValueError: the KL would be lost, nothing would be learned, or the ratio to the sampler
            would count twice.
    """
    name = type(loss.value_estimator).__name__
    if loss.kl_coeff and loss.kl_in == "reward" and not declared.kl_coeff:
        raise ValueError(
            f"{type(loss).__name__} leaves its KL (kl_coeff={loss.kl_coeff}) to the reward, but {name} takes none out "
            'of it: the KL would be lost. Use kl_in="loss", kl_coeff=0, or a TurnEstimator with a kl_coeff.'
        )
    # Not isinstance: a subclass may give credit of its own.
    none = getattr(type(loss.value_estimator), "estimate", None) is NoCredit.estimate
    if none and not (declared.kl_coeff or loss.learns_without_credit):
        raise ValueError(
            f"{name} gives no credit for rewards, and {type(loss).__name__} has no KL and no entropy bonus (kl_coeff and "
            "entropy_coeff are 0): nothing would be learned. Give the KL a weight, or use another estimator."
        )
    if declared.corrects_sampler and (loss.clipping != "none" or loss.sampler_correction):
        raise ValueError(
            f"The advantages of the estimator {name} hold the ratio to the sampler already: with clipping={loss.clipping!r} and "
            f'sampler_correction={loss.sampler_correction!r} it would count twice. Use clipping="none" and no correction.'
        )


def wrong_penalty(coeff: float, estimator: Any) -> Iterator[str]:
    """What is wrong with an ``overlong_penalty``, which makes rewards smaller, for an estimator,
    and what to do.

    Args:
        coeff: the setting.
        estimator: of the run.

    Examples:
        >>> from torchrl_llm.objectives import GroupRelative
        >>> next(wrong_penalty(0.5, GroupRelative(scale="mean")))
        'overlong_penalty=0.5 makes returns negative, which scale="mean" does not take: leave one of them out.'
    """
    if not coeff or not isinstance(estimator, TurnEstimator):
        return
    if not estimator.reads_rewards:
        yield (
            f"overlong_penalty={coeff} does nothing with {type(estimator).__name__}, which does not look at rewards here: leave it out, "
            'or choose another estimator (SFT: imitate="return" or min_return).'
        )
    elif (option := estimator.needs_nonnegative_rewards) is not None:
        other = " (or set min_return=0)" if isinstance(estimator, ImitationWeights) else ""
        yield (
            f"overlong_penalty={coeff} makes returns negative, which {option} does not take: leave one of them out{other}."
        )
