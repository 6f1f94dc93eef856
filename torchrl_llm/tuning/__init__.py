"""Searches over the settings of runs, on Ray Tune: populations (PBT), early stopping (ASHA), random
search."""

from torchrl_llm.tuning.results import TuningError, report_best, summary, table
from torchrl_llm.tuning.search import tune
from torchrl_llm.tuning.search_space import Dimension, TuningConfig
from torchrl_llm.tuning.trial import copy_run, put_back, train_generation

__all__ = [
    "Dimension",
    "TuningConfig",
    "TuningError",
    "copy_run",
    "put_back",
    "report_best",
    "summary",
    "table",
    "train_generation",
    "tune",
]
