"""Metrics by name, computed from rows; evaluations and pairs of them; what says that a run goes
wrong."""

from torchrl_llm.metrics.evaluated import Evaluation
from torchrl_llm.metrics.paired import PairedComparison, mcnemar_p_value, paired_comparison
from torchrl_llm.metrics.rollouts import (
    LOSS_METRICS,
    METRICS,
    Timer,
    checked_metrics,
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
    "PairedComparison",
    "Timer",
    "checked_metrics",
    "credit_metrics",
    "mcnemar_p_value",
    "named",
    "paired_comparison",
    "rollout_metrics",
    "staleness",
    "success_interval",
    "throughput",
    "wilson_interval",
]
