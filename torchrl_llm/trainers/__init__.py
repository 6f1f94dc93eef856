"""The training loop, written out, and what it needs: settings, evaluation, checkpoints, callbacks."""

from torchrl_llm.interrupts import Interrupted, catch_signals, interruptible
from torchrl_llm.options import ConfigError
from torchrl_llm.record import Evaluation
from torchrl_llm.trainers.build import make_objective
from torchrl_llm.trainers.callbacks import Callback, ProgressBar
from torchrl_llm.trainers.checkpoint import CheckpointStore
from torchrl_llm.trainers.checkpoint_files import verify
from torchrl_llm.trainers.cli import parse_run_config, resume_command
from torchrl_llm.trainers.config import RunConfig
from torchrl_llm.trainers.distributed import Distributed
from torchrl_llm.trainers.evaluation import evaluate
from torchrl_llm.trainers.health import HealthWatch
from torchrl_llm.trainers.numerics import Numerics
from torchrl_llm.trainers.opponents import Match, play_match
from torchrl_llm.trainers.recorder import RolloutRecorder
from torchrl_llm.trainers.report import run_and_report
from torchrl_llm.trainers.run import Run, build_run
from torchrl_llm.trainers.settings import TrainerConfig
from torchrl_llm.trainers.trainer import LLMTrainer

__all__ = [
    "Callback",
    "CheckpointStore",
    "ConfigError",
    "Distributed",
    "Evaluation",
    "HealthWatch",
    "Interrupted",
    "LLMTrainer",
    "Match",
    "Numerics",
    "ProgressBar",
    "RolloutRecorder",
    "Run",
    "RunConfig",
    "TrainerConfig",
    "build_run",
    "catch_signals",
    "evaluate",
    "interruptible",
    "make_objective",
    "parse_run_config",
    "play_match",
    "resume_command",
    "run_and_report",
    "verify",
]
