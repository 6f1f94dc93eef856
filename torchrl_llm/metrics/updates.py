"""Metrics of an update: those of its optimizer steps, and what the first of them says of the
weights before it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_llm import keys
from torchrl_llm.metrics.rollouts import checked_metrics

SKIPPED = "optim/skipped_steps"


def update_metrics(
    steps: Sequence[Mapping[str, Tensor]],
    added: Sequence[Mapping[str, Tensor]],
    batch: TensorDictBase,
    mean: Callable[[Tensor], float],
) -> dict[str, float]:
    """The means over the steps, the number of steps that were skipped, and
    ``policy/log_prob_gap`` and ``policy/kl_reference_start`` of the weights before the update.

    Args:
        steps: metrics (scalars) of each step, by name.
        added: what callbacks added to those of a step.
        batch: ``[B]``, the rows of the update.
        mean: over the values of all ranks.

    Raises:
        ValueError: a callback took the name of a metric of training.
    """
    means = step_means(steps) | {SKIPPED: sum(metrics[SKIPPED].item() for metrics in steps)}
    means |= checked_metrics(step_means(added), source="callbacks") | _log_prob_gap(batch, steps[0], mean)
    # The mean over steps has what the update itself moved.
    start = steps[0].get("policy/kl_reference")
    return means if start is None else means | {"policy/kl_reference_start": start.item()}


def step_means(steps: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
    """The mean of each metric, over the steps that have it."""
    names = dict.fromkeys(name for step in steps for name in step)
    # One transfer from the device for a metric, and not one for each step.
    return {name: torch.stack([step[name] for step in steps if name in step]).mean().item() for name in names}


def _log_prob_gap(
    batch: TensorDictBase, first_step: Mapping[str, Tensor], mean: Callable[[Tensor], float]
) -> dict[str, float]:
    """The mean difference of the log-probs of scorer and sampler before the update; nothing for a
    loss without ratios."""
    name = "policy/log_prob_gap"
    if keys.OLD_LOG_PROB not in batch:
        # The ratio is to the sampler then, and before the first step the model is the one that
        # sampled.
        ratio = first_step.get("policy/log_ratio")
        return {} if ratio is None else {name: ratio.item()}
    if keys.SAMPLE_LOG_PROB not in batch:
        return {}
    gap = (batch[keys.OLD_LOG_PROB] - batch[keys.SAMPLE_LOG_PROB])[batch[keys.TURN_IDS] >= 0].abs()
    return {name: mean(gap)}
