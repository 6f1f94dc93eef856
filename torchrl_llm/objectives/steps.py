"""Optimizer steps: :func:`check_optimizer` before the first; :func:`clipped_step`, one by hand, as
the trainer takes it; :func:`report_skipped` for one that is not taken."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from torchrl_llm.objectives.base import TurnLoss
from torchrl_llm.utils.options import ConfigError

logger = logging.getLogger(__name__)

MAX_SKIPPED_STEPS = 5
"""Optimizer steps in a row whose gradient is not finite, after which a run ends."""


class NonFiniteGradientError(FloatingPointError):
    """Gradients stay NaN or infinite. Weights and optimizer are as after the last step that was
    taken."""


def own_parameters(loss: TurnLoss) -> list[nn.Parameter]:
    """The trainable parameters that a loss and its estimator have beside actor and critic."""
    networks = [network for network in (loss.actor_network, loss.critic_network) if network is not None]
    theirs = {id(parameter) for network in networks for parameter in network.parameters()}
    return [each for each in loss.parameters() if each.requires_grad and id(each) not in theirs]


def group_names(loss: TurnLoss) -> tuple[str, ...]:
    """The names of the parameter groups of an optimizer, by their place: ``"actor"``, ``"critic"``
    if there is one, and ``"loss"`` for parameters of its own."""
    critic = () if loss.critic_network is None else ("critic",)
    return ("actor", *critic, *(("loss",) if own_parameters(loss) else ()))


def clip_gradients(optimizer: torch.optim.Optimizer, max_norm: float) -> list[Tensor]:
    """Clip the gradient of each parameter group, so that actor and critic are clipped apart;
    returns the norms before.

    Args:
        optimizer: its gradients are changed in place.
        max_norm: largest 2-norm of a group.
    """
    return [torch.nn.utils.clip_grad_norm_(group["params"], max_norm) for group in optimizer.param_groups]


def drop_gradients(optimizer: torch.optim.Optimizer, names: Sequence[str], *, keep: str) -> None:
    """Drop the gradients of all parameter groups but one, so that only that one is stepped.

    Args:
        optimizer: its groups are ``names``, in this order; later ones may be missing.
        names: see :func:`group_names`.
        keep: the name of the group that is stepped.
    """
    for name, group in zip(names, optimizer.param_groups, strict=False):
        # None and not zeros, which AdamW would step with its moments and weight decay. A trunk that
        # actor and critic share is in the actor's group, and keeps still too.
        for parameter in group["params"] if name != keep else ():
            parameter.grad = None


def all_finite(norms: Sequence[Tensor]) -> bool:
    """Whether all norms of a gradient are finite: with one wait for the device, and the same on all
    ranks.

    The norms are the same there: DDP has averaged the gradients, and with FSDP2 a norm covers
    all shards.
    """
    return bool(torch.stack([norm.detach().isfinite().to(norms[0].device) for norm in norms]).all())


def report_skipped(norms: Mapping[str, Tensor], in_a_row: int, *, iteration: int, loss_scale: float | None) -> None:
    """Log an optimizer step that was not taken, because its gradient is not finite.

    Args:
        norms: of the gradient, by the name of their metric.
        in_a_row: steps that were skipped since the last one that was taken.
        iteration: of the run, from 0.
        loss_scale: of float16, which was lowered for it; ``None``: it is not the cause.

    Raises:
        NonFiniteGradientError: :data:`MAX_SKIPPED_STEPS` were skipped in a row, this one for
            another cause than the loss scale.
    """
    found = ", ".join(f"{name.rpartition('_')[2]} {norm.item():.3g}" for name, norm in norms.items())
    iteration += 1  # as in the table of metrics
    if loss_scale is not None:
        said = "iteration %d: the loss scale is lowered to %g (norms of the gradient: %s)"
        logger.info(said, iteration, loss_scale, found)
        return
    logger.warning(
        "iteration %d: an optimizer step is skipped, because its gradient is not finite (norms: %s): weights and optimizer stay "
        "as they are",
        iteration,
        found,
    )
    if in_a_row >= MAX_SKIPPED_STEPS:
        raise NonFiniteGradientError(
            f"The gradients of {in_a_row} optimizer steps in a row were not finite (norms of the last: {found}), so the "
            f"run ends in iteration {iteration}. None of them was taken: the weights are finite. Look for the square root, the "
            "logarithm or a division by 0 in a loss of your own (torch.autograd.set_detect_anomaly(True) names the operation); "
            "with fp16, try bf16. resume=true continues from the last checkpoint."
        )


def clipped_step(optimizer: torch.optim.Optimizer, max_norm: float) -> bool:
    """Clip the gradient of each parameter group, step, and set gradients to zero; NaN and infinite
    gradients take no step.

    One such step would make all weights NaN. It is left out with a warning: weights and the
    optimizer's state stay as they are.

    Args:
        optimizer: of one or more parameter groups.
        max_norm: largest 2-norm of a group; ``inf`` clips nothing.

    Returns:
        Whether the step was taken.

    Examples:
        >>> weight = torch.nn.Parameter(torch.ones(()))
        >>> optimizer = torch.optim.SGD([weight], lr=0.5)
        >>> (3 * weight).backward()
        >>> clipped_step(optimizer, max_norm=4.0), weight.item(), weight.grad
        (True, -0.5, None)
        >>> (weight * 0.0).sqrt().backward()
        >>> clipped_step(optimizer, max_norm=4.0), weight.item()
        (False, -0.5)
    """
    norms = clip_gradients(optimizer, max_norm)
    finite = all_finite(norms)
    if finite:
        optimizer.step()
    else:
        found = ", ".join(f"{norm.item():.3g}" for norm in norms)
        logger.warning("an optimizer step is left out, because its gradient is not finite (norms: %s)", found)
    optimizer.zero_grad(set_to_none=True)
    return finite


def check_optimizer(optimizer: torch.optim.Optimizer, loss: TurnLoss) -> None:
    """Refuse an optimizer whose parameters or groups do not belong to the loss, which would run
    without an error.

    Weights in half precision that it steps without a float32 copy are warned of.

    Args:
        optimizer: its groups are those of :func:`group_names`.
        loss: whose trainable parameters it is to have.

    Raises:
        ConfigError: says how many parameters are wrong or missing, and what to do.
    """
    _warn_of_half_weights(optimizer)
    groups, names = len(optimizer.param_groups), group_names(loss)
    if groups > len(names):
        raise ConfigError(
            f"The optimizer has {groups} groups of parameters; expected {' and '.join(f'one for the {name}' for name in names)}: "
            "gradients are clipped, and critic_warmup and target_kl hold the actor back, by group. Give each network's "
            "parameters as one group."
        )
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    trained = {id(parameter): name for name, parameter in loss.named_parameters() if parameter.requires_grad}
    idle = sorted(trained[each] for each in trained.keys() - stepped)
    if idle or stepped - trained.keys():
        listed = ", ".join(idle[:3]) + (", ..." if len(idle) > 3 else "")
        raise ConfigError(
            f"The optimizer steps {len(stepped - trained.keys())} parameters that are none of {type(loss).__name__}'s "
            f"trainable ones, and leaves out {len(idle)} that are{f' ({listed})' if idle else ''}. Make the loss of the networks "
            "whose parameters the optimizer has (build_run: models.actor and models.critic), give parameters of the loss's own "
            "as the last group, and set requires_grad_(False) on what is not to be trained."
        )


def _warn_of_half_weights(optimizer: torch.optim.Optimizer) -> None:
    """Warn if an optimizer of PyTorch's steps weights narrower than float32: rounding loses most of
    its steps."""
    kind, parameters = type(optimizer), [each for group in optimizer.param_groups for each in group["params"]]
    # Measured in bfloat16 with AdamW at 5e-6: 2 to 8 % of the entries change at all.
    narrow = {str(p.dtype) for p in parameters if p.is_floating_point() and torch.finfo(p.dtype).bits < 32}
    # Optimizers of other packages may keep float32 copies themselves.
    if narrow and kind.__module__.startswith("torch.optim"):
        logger.warning(
            "%s steps %s weights without a float32 copy: at usual learning rates rounding takes all but a few of its steps. "
            "load_actor_critic keeps float32 weights (the default, master_weights=True); mixed precision computes in half.",
            kind.__name__, " and ".join(sorted(narrow)),
        )  # fmt: skip
