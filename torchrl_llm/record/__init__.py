"""Metrics, their names, and the report of a run."""

from torchrl_llm.record.evaluation import Evaluation
from torchrl_llm.record.metrics import (
    LOSS_METRICS,
    METRICS,
    Timer,
    credit_metrics,
    named,
    rollout_metrics,
    staleness,
    success_interval,
    throughput,
    wilson_interval,
)

__all__ = [
    "LOSS_METRICS",
    "METRICS",
    "Evaluation",
    "Timer",
    "credit_metrics",
    "named",
    "rollout_metrics",
    "staleness",
    "success_interval",
    "throughput",
    "wilson_interval",
]
