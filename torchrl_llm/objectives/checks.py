"""What a loss and its estimator ask of each other: whose options are whose (:func:`check_names`),
which go together (:func:`check_loss_options`, :func:`check_policy_options`,
:func:`check_estimator`), which rows and rewards are taken (:func:`check_without_sampler`,
:func:`wrong_penalty`); and what a loss of one's own must return (:func:`check_objective`,
:func:`check_terms`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from torchrl_llm.objectives.estimators.base import TurnEstimator
from torchrl_llm.objectives.estimators.imitation import ImitationWeights, NoCredit
from torchrl_llm.objectives.joining import declared
from torchrl_llm.utils.hints import nearest
from torchrl_llm.utils.options import brief, options_of


def check_names(loss: Any, options: Mapping[str, Any]) -> None:
    """Refuse options that a loss does not have.

    Args:
        loss: its class.
        options: keyword arguments for the loss, by name.

    Raises:
        TypeError: some are of the estimator that is given, or of the loss's own, and the message
            says what to write; or of other estimators, which are named; or nobody's, and the
            nearest is named.
    """
    own = options_of(loss).keys()
    chosen: Any = options.get("estimator") or loss.default_value_estimator
    chosen = chosen if isinstance(chosen, type) else type(chosen)
    known = options_of(chosen).keys() - own if issubclass(chosen, TurnEstimator) else ()
    if credit := [f"{name}={brief(value)}" for name, value in options.items() if name in known]:
        given = ", ".join(credit)
        raise TypeError(f"{given} is of the estimator: give {loss.__name__} estimator={chosen.__name__}({given}).")
    for name in sorted(options.keys() - own):
        others = [each.__name__ for each in _estimators(TurnEstimator) if name in options_of(each)]
        elsewhere = f", nor has its estimator, {chosen.__name__}; {' and '.join(others)} have it." if others else "."
        hint = "" if others else nearest(name, [*own, *sorted(known)])
        raise TypeError(f"{loss.__name__} has no option {name!r}{elsewhere}{hint}")


def _estimators(kind: Any) -> Iterator[Any]:
    """This library's subclasses of an estimator."""
    for each in kind.__subclasses__():
        if each.__module__.startswith("torchrl_llm.objectives."):
            yield each
        yield from _estimators(each)


def check_loss_options(loss: Any) -> None:
    """Refuse options of a :class:`~torchrl_llm.objectives.TurnLoss` that lack what they need.

    Raises:
        ValueError: there is no constant to weigh by, or no entropy to pay for.
    """
    if loss.weighting == "constant" and loss.weight_constant is None:
        raise ValueError('weighting="constant" takes a constant: set weight_constant, in tokens per episode.')
    written, entropy = loss.actor_network.out_keys, loss.tensor_keys.entropy
    if loss.entropy_coeff and entropy not in written:
        raise ValueError(
            f"entropy_coeff is {loss.entropy_coeff}, but the actor writes {list(written)}; "
            f"expected {entropy!r} among them (TokenScorer(..., entropy=True))."
        )


def check_policy_options(loss: Any) -> None:
    """Refuse options of a :class:`~torchrl_llm.objectives.TurnPolicyLoss` that contradict each
    other.

    Raises:
        ValueError: the KL has no gradient, or units are weighed twice.
    """
    if loss.kl_kind == "k1" and loss.kl_in == "loss":
        raise ValueError('kl_kind="k1" has no gradient in expectation; use "k2", "k3", or kl_in="reward".')
    if loss.unit_weight == "equal" and loss.weighting not in ("token", loss.ratio_level):
        raise ValueError(f'unit_weight="equal" weighs by {loss.ratio_level}; leave weighting={loss.weighting!r} out.')


def check_terms(name: str, terms: Any) -> dict[str, Tensor]:
    """What a loss's ``terms`` returned, with metrics detached, or an error that says what is wrong.

    Args:
        name: of the loss's class, for messages.
        terms: what it returned.

    Raises:
        TypeError: it is no mapping of tensors.
        ValueError: one is not a scalar, or none is to be minimized.
    """
    method = f"{name}.terms"
    if not isinstance(terms, Mapping) or not all(isinstance(each, Tensor) for each in terms.values()):
        raise TypeError(f"{method} returned {brief(terms)}; expected a dictionary of scalar tensors by name.")
    if wrong := [f"{key} {list(each.shape)}" for key, each in terms.items() if each.numel() != 1]:
        raise ValueError(f"{method} returned {', '.join(wrong)}; expected scalars, sums over tokens with loss_weight.")
    if not any(key.startswith("loss_") for key in terms):
        raise ValueError(
            f"{method} returned {', '.join(terms) or 'nothing'}; expected a name that starts with loss_, to be minimized."
        )
    return {key: each if key.startswith("loss_") else each.detach() for key, each in terms.items()}


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


def check_estimator(loss: Any) -> None:
    """Refuse an estimator that does not go with a policy loss.

    Args:
        loss: a :class:`~torchrl_llm.objectives.TurnPolicyLoss`.

    Raises:
        ValueError: the KL would be lost, nothing would be learned, or the ratio to the sampler
            would count twice.
    """
    name, says = type(loss.value_estimator).__name__, declared(loss.value_estimator)
    if loss.kl_coeff and loss.kl_in == "reward" and not says.kl_coeff:
        raise ValueError(
            f"{type(loss).__name__} leaves its KL (kl_coeff={loss.kl_coeff}) to the reward, but {name} takes none out "
            'of it: the KL would be lost. Use kl_in="loss", kl_coeff=0, or a TurnEstimator with a kl_coeff.'
        )
    # Not isinstance: a subclass may give credit of its own.
    none = getattr(type(loss.value_estimator), "estimate", None) is NoCredit.estimate
    if none and not (says.kl_coeff or loss.learns_without_credit):
        raise ValueError(
            f"{name} gives no credit for rewards, and {type(loss).__name__} has no KL and no entropy bonus (kl_coeff and "
            "entropy_coeff are 0): nothing would be learned. Give the KL a weight, or use another estimator."
        )
    if says.corrects_sampler and (loss.clipping != "none" or loss.sampler_correction):
        raise ValueError(
            f"The advantages of the estimator {name} hold the ratio to the sampler already: with clipping={loss.clipping!r} and "
            f'sampler_correction={loss.sampler_correction!r} it would count twice. Use clipping="none" and no correction.'
        )


def check_without_sampler(loss: Any, old_log_probs: str) -> None:
    """Refuse rows without the log-probs of the policy that sampled, where something compares with
    them.

    Args:
        loss: a :class:`~torchrl_llm.objectives.TurnLoss` that takes ratios.
        old_log_probs: the setting.

    Raises:
        KeyError: says what needs them, and what to do.
    """
    needs = None
    if old_log_probs == "sampler":
        needs = 'old_log_probs="sampler" takes ratios against them: set "auto", which scores the old ones'
    elif loss.corrects_sampler:
        needs = "sampler_correction corrects for them: leave it out"
    elif declared(loss.value_estimator).corrects_sampler:
        needs = f"{type(loss.value_estimator).__name__} corrects for them: choose another estimator"
    if needs is not None:
        name = loss.tensor_keys.sample_log_prob
        raise KeyError(f"The rows have no {name!r}, the log-probs of the policy that sampled, and {needs}.")


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
