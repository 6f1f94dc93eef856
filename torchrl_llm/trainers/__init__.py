"""The training loop, written out, and what it needs: credit, updates, evaluation, callbacks,
processes.

It knows no folder and no settings of a run: :mod:`torchrl_llm.runs` makes a trainer from those.
"""

from torchrl_llm.metrics import Evaluation
from torchrl_llm.trainers.callbacks import Callback, HealthWatch, ProgressBar
from torchrl_llm.trainers.config import TrainerConfig
from torchrl_llm.trainers.distributed import Distributed
from torchrl_llm.trainers.evaluation import evaluate
from torchrl_llm.trainers.numerics import Numerics
from torchrl_llm.trainers.trainer import LLMTrainer

__all__ = [
    "Callback",
    "Distributed",
    "Evaluation",
    "HealthWatch",
    "LLMTrainer",
    "Numerics",
    "ProgressBar",
    "TrainerConfig",
    "evaluate",
]
