"""When a run ends, is evaluated and is saved: pure functions of the settings and of where the run is."""

from __future__ import annotations

from collections.abc import Mapping

from torchrl_llm.trainers.config import ConfigError, TrainerConfig


def is_due(interval: int, iteration: int) -> bool:
    """Whether something that happens every ``interval`` iterations (0: never) happens after this one.

    Examples:
        >>> is_due(5, 10), is_due(5, 11), is_due(0, 10)
        (True, False, False)
    """
    return interval > 0 and iteration % interval == 0


def limit_reached(config: TrainerConfig, *, steps: int, iteration: int, seconds: float) -> str | None:
    """Why a run ends after this iteration; ``None``: it continues."""
    if steps >= config.max_steps:
        return f"max_steps={config.max_steps} turns played"
    if config.max_iterations is not None and iteration >= config.max_iterations:
        return f"max_iterations={config.max_iterations}"
    if config.max_seconds is not None and seconds >= config.max_seconds:
        return f"max_seconds={config.max_seconds}"
    return None


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
