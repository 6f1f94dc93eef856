"""The training loop, written out, and what it needs: credit, updates, evaluation, callbacks,
processes.

It knows no folder and no settings of a run: :mod:`torchrl_llm.runs` makes a trainer from those.
"""

from torchrl_llm.metrics import Evaluation
from torchrl_llm.modules.kernels import Numerics
from torchrl_llm.objectives import MAX_SKIPPED_STEPS, NonFiniteGradientError
from torchrl_llm.trainers.callbacks import Callback, HealthWatch, ProgressBar, RunStore
from torchrl_llm.trainers.config import TrainerConfig
from torchrl_llm.trainers.credit import Credit
from torchrl_llm.trainers.distributed import Distributed
from torchrl_llm.trainers.dynamic_sampling import DynamicSampling
from torchrl_llm.trainers.evaluation import evaluate
from torchrl_llm.trainers.trainer import LLMTrainer
from torchrl_llm.trainers.trust_region import TrustRegion
from torchrl_llm.trainers.update import Update

__all__ = [
    "MAX_SKIPPED_STEPS",
    "Callback",
    "Credit",
    "Distributed",
    "DynamicSampling",
    "Evaluation",
    "HealthWatch",
    "LLMTrainer",
    "NonFiniteGradientError",
    "Numerics",
    "ProgressBar",
    "RunStore",
    "TrainerConfig",
    "TrustRegion",
    "Update",
    "evaluate",
]
