"""When things happen in a run: its learning rates (:class:`LearningRateSchedule`), entropy target,
KL, evaluations, checkpoints and end."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from torchrl_llm.trainers.config import TrainerConfig
from torchrl_llm.utils.options import ConfigError

LOOK = 5
"""Iterations of a run below which nobody expects it to learn."""


class LearningRateSchedule:
    """Warm-up, then a cosine or a constant, over the turns of a run.

    PyTorch's schedulers count their own steps, but an iteration adds as many turns as its episodes
    have.

    Args:
        optimizer: the schedule scales its present rates.
        config: ``max_steps``, ``warmup_fraction``, ``schedule``, ``min_lr_fraction`` and
            ``lr_decay_fraction``.
        names: of the optimizer's groups (:func:`~torchrl_llm.objectives.steps.group_names`).
    """

    def __init__(self, optimizer: torch.optim.Optimizer, config: TrainerConfig, names: Sequence[str]) -> None:
        self.optimizer, self.config, self.names = optimizer, config, names
        # Kept here, because the rates in a checkpoint's optimizer belong to its last update,
        # scaled.
        self._rates = [group["lr"] for group in optimizer.param_groups]

    def set(self, before: int, after: int) -> None:
        """Set the rates of an update on the turns from ``before`` to ``after``."""
        factor = lr_factor(self.config, before, after)
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * factor

    def metrics(self) -> dict[str, float]:
        """The rates now."""
        return {f"optim/lr_{name}": g["lr"] for name, g in zip(self.names, self.optimizer.param_groups, strict=False)}


def lr_factor(config: TrainerConfig, before: int, after: int) -> float:
    """The share of the learning rates in an update on the turns from ``before`` to ``after``.

    The warm-up goes by the turns after them and the cosine by those before, so that no update has a
    rate of 0: neither the first nor the one that reaches ``max_steps``.

    Examples:
        >>> config = TrainerConfig(max_steps=100, lr_decay_fraction=0.5)
        >>> [round(lr_factor(config, turns, turns + 10), 2) for turns in (0, 50, 75, 100)]
        [1.0, 1.0, 0.5, 0.0]
    """
    began, ended = before / config.max_steps, after / config.max_steps
    if began < config.warmup_fraction:
        return min(1.0, ended / config.warmup_fraction)
    if config.schedule == "constant":
        return 1.0
    start = max(config.warmup_fraction, 1 - config.lr_decay_fraction)
    # 1e-12: with warmup_fraction=1 the cosine has no length, and turns beyond max_steps come here.
    rest = (min(1.0, max(start, began)) - start) / max(1e-12, 1 - start)
    return config.min_lr_fraction + (1 - config.min_lr_fraction) * 0.5 * (1 + math.cos(math.pi * rest))


def entropy_fraction(config: TrainerConfig, before: int) -> float:
    """The share of the loss's ``entropy_target`` in an update on turns after the first ``before``:
    a straight line over ``max_steps``.

    Examples:
        >>> [entropy_fraction(TrainerConfig(max_steps=100, min_entropy_fraction=0.5), turns) for turns in (0, 50, 100, 200)]
        [1.0, 0.75, 0.5, 0.5]
    """
    return 1 - (1 - config.min_entropy_fraction) * min(1.0, before / config.max_steps)


def kl_fraction(config: TrainerConfig, before: int) -> float:
    """The share of the loss's ``kl_coeff`` in an update on turns after the first ``before``.

    Examples:
        >>> [kl_fraction(TrainerConfig(max_steps=100, kl_decay_fraction=0.5), turns) for turns in (0, 25, 50, 100)]
        [1.0, 0.5, 0.0, 0.0]
    """
    if config.kl_decay_fraction is None:
        return 1.0
    return max(0.0, 1 - before / (config.kl_decay_fraction * config.max_steps))


def is_due(interval: int, iteration: int) -> bool:
    """Whether something that happens every ``interval`` iterations (0: never) happens after this
    one.

    Examples:
        >>> is_due(5, 10), is_due(5, 11), is_due(0, 10)
        (True, False, False)
    """
    return interval > 0 and iteration % interval == 0


def limit_reached(config: TrainerConfig, *, steps: int, iteration: int, seconds: float) -> str | None:
    """Why a run ends after this iteration; ``None``: it continues."""
    if steps >= config.max_steps:
        return f"max_steps={config.max_steps} turns played"
    others = ("max_iterations", config.max_iterations, iteration), ("max_seconds", config.max_seconds, seconds)
    reached = (f"{name}={limit}" for name, limit, now in others if limit is not None and now >= limit)
    return next(reached, None)


def run_share(config: TrainerConfig, *, steps: int, iteration: int, seconds: float) -> float:
    """The share of a run that is over, by the limit of :func:`limit_reached` that will end it first
    as it goes; at most 1.

    Examples:
        >>> config = TrainerConfig(max_steps=1000, max_iterations=10)
        >>> run_share(config, steps=100, iteration=2, seconds=5.0), run_share(config, steps=500, iteration=2, seconds=5.0)
        (0.2, 0.5)
    """
    limits = (steps, config.max_steps), (iteration, config.max_iterations), (seconds, config.max_seconds)
    return min(1.0, max(now / limit for now, limit in limits if limit is not None))


def endless_warm_up(config: TrainerConfig, steps: int) -> str | None:
    """What is wrong if ``max_iterations`` ends the run before half of the learning rates' warm-up;
    ``None``: it will not.

    A run of fewer than :data:`LOOK` iterations is a look at something else, and how many iterations
    ``max_seconds`` leaves is not known from the first.

    Args:
        config: of the run.
        steps: turns of its first iteration.

    Examples:
        >>> config = TrainerConfig(max_steps=100_000, max_iterations=20, warmup_fraction=0.1)
        >>> print(endless_warm_up(config, steps=150))
        the run will end after about 3,000 turns, with its learning rates at 0.3 of what they are to be: warmup_fraction=0.1 is a \
share of max_steps=100000 turns. Set max_steps to about the turns of the run.
        >>> endless_warm_up(config, steps=600)
    """
    warm_up, iterations = config.warmup_fraction * config.max_steps, config.max_iterations
    if iterations is None or iterations < LOOK or steps * iterations >= warm_up / 2:
        return None
    return (
        f"the run will end after about {steps * iterations:,} turns, with its learning rates at {steps * iterations / warm_up:.1g} of what they are to be: "
        f"warmup_fraction={config.warmup_fraction} is a share of max_steps={config.max_steps} turns. Set max_steps to about the turns of the run."
    )


def success_reached(config: TrainerConfig, metrics: Mapping[str, float]) -> str | None:
    """Why a run ends after an evaluation with these metrics; ``None``: it continues.

    Raises:
        ConfigError: ``stop_at_success`` is set, and the evaluator reports no success rate.
    """
    success, target = metrics.get("evaluation/success"), config.stop_at_success
    if target is None:
        return None
    if success is None:
        raise ConfigError(
            f'stop_at_success={target} needs "evaluation/success", and the evaluator returned {sorted(metrics)}: return '
            "it, or set stop_at_success to null."
        )
    return f"stop_at_success={target} reached: {success:.3f}" if success >= target else None
