"""Metrics, their names, and the report of a run."""

from torchrl_llm.record.metrics import (
    LOSS_METRICS,
    METRICS,
    Timer,
    credit_metrics,
    named,
    rollout_metrics,
    success_interval,
    wilson_interval,
)

__all__ = [
    "LOSS_METRICS",
    "METRICS",
    "Timer",
    "credit_metrics",
    "named",
    "rollout_metrics",
    "success_interval",
    "wilson_interval",
]
