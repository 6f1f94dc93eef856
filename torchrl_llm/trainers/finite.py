"""Numbers that must be finite: gradients before an optimizer step, weights and optimizer before
they are saved."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from torchrl_llm.trainers.base import TrainerBase

logger = logging.getLogger(__name__)

MAX_SKIPPED_STEPS = 5
"""Optimizer steps in a row whose gradient is not finite, after which a run ends."""


class NonFiniteGradientError(FloatingPointError):
    """Gradients stay NaN or infinite. Weights and optimizer are those of the last step that was
    taken."""


class NonFiniteWeightsError(FloatingPointError):
    """Weights, or the optimizer's state, are NaN or infinite; they are not saved."""


def all_finite(norms: Mapping[str, Tensor], device: torch.device) -> bool:
    """Whether all norms of a gradient are finite: with one wait for the device, and the same on all
    ranks.

    The norms are the same there: DDP has averaged the gradients, and with FSDP2 a norm is that of
    all shards.
    """
    return bool(torch.stack([norm.detach().isfinite().to(device) for norm in norms.values()]).all())


def skip_step(run: TrainerBase, norms: Mapping[str, Tensor]) -> None:
    """Account for an optimizer step that is not taken, because a norm of its gradient is not
    finite.

    In float16 a loss scale that is too high makes gradients infinite: it is lowered, as is normal
    in the first steps of a run. All other steps count, and :data:`MAX_SKIPPED_STEPS` in a row end
    the run.

    Args:
        run: the trainer, whose ``skipped_in_a_row`` counts.
        norms: of the gradient, by the name of their metric.

    Raises:
        NonFiniteGradientError: it is the last of so many in a row.
    """
    found = ", ".join(f"{name.rpartition('_')[2]} {norm.item():.3g}" for name, norm in norms.items())
    iteration = run.iteration + 1  # as in the table of metrics
    if (scale := lowered_loss_scale(run)) is not None:
        logger.info(
            "iteration %d: the loss scale is lowered to %g (norms of the gradient: %s)", iteration, scale, found
        )
        return
    run.skipped_in_a_row += 1
    logger.warning(
        "iteration %d: an optimizer step is skipped, because its gradient is not finite (norms: %s): weights and optimizer stay "
        "as they are",
        iteration,
        found,
    )
    if run.skipped_in_a_row >= MAX_SKIPPED_STEPS:
        raise NonFiniteGradientError(
            f"The gradients of {run.skipped_in_a_row} optimizer steps in a row were not finite (norms of the last: {found}), so the run "
            f"ends in iteration {iteration}. None of them was taken: the weights are finite. Look for the square root, the logarithm or "
            "a division by 0 in a loss of your own (torch.autograd.set_detect_anomaly(True) names the operation); with fp16, try "
            "bf16. resume=true continues from the last checkpoint."
        )


def lowered_loss_scale(run: TrainerBase) -> float | None:
    """The loss scale of float16 after it was lowered for a step that is skipped; ``None``: it
    cannot be the cause.

    Only a scale above 1 can: without any scale, smaller gradients are lost and not infinite.
    """
    scaler = run.accelerator.scaler
    if scaler is None:
        return None
    before = scaler.get_scale()
    # In place of scaler.step(), which would skip the step too, but takes one whose gradient is
    # finite and too large for a norm.
    scaler.update()
    after = scaler.get_scale()
    return after if 1.0 <= after < before else None


def not_finite(run: TrainerBase) -> list[str]:
    """What of the trained weights and the optimizer's state is not finite on any rank, in words;
    empty: all is finite."""
    parameters = [parameter for parameter in run.loss.parameters() if parameter.requires_grad]
    state = [value for values in run.optimizer.state.values() for value in values.values() if torch.is_tensor(value)]
    parts = {"weights": parameters, "optimizer": state}
    counts = {name: run.distributed.all_reduce_max(_count(tensors)) for name, tensors in parts.items()}
    return [f"{count} of {len(parts[name])} tensors of the {name}" for name, count in counts.items() if count]


@torch.no_grad()
def _count(tensors: Iterable[Tensor]) -> int:
    """How many of the tensors, of which this rank may have a shard, hold a number that is not
    finite."""
    own = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors)
    return sum(not bool(tensor.isfinite().all()) for tensor in own)


def check_finite(run: TrainerBase) -> None:
    """Refuse to save weights and an optimizer from which no run can continue.

    Raises:
        NonFiniteWeightsError: says how many tensors are not finite.
    """
    if wrong := not_finite(run):
        raise NonFiniteWeightsError(
            f"After iteration {run.iteration}, {' and '.join(wrong)} are NaN or infinite, so nothing is saved and the run ends; earlier "
            "checkpoints stay as they are. Gradients that are not finite take no step: a learning rate may be far too high, or "
            "something beside the optimizer writes to the weights. resume=true continues from the last checkpoint."
        )
