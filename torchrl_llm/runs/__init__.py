"""A run: settings become a trainer with a folder, checkpoints, trackers and recorded episodes
(:func:`build_run`)."""

from torchrl_llm.runs.build import make_objective
from torchrl_llm.runs.checkpoint import CheckpointStore
from torchrl_llm.runs.checkpoint_files import verify
from torchrl_llm.runs.config import RunConfig
from torchrl_llm.runs.flags import parse_run_config, resume_command
from torchrl_llm.runs.opponents import Match, play_match
from torchrl_llm.runs.recorder import RolloutRecorder
from torchrl_llm.runs.run import Run, build_run
from torchrl_llm.utils.interrupts import Interrupted, catch_signals, interruptible
from torchrl_llm.utils.options import ConfigError

__all__ = [
    "CheckpointStore",
    "ConfigError",
    "Interrupted",
    "Match",
    "RolloutRecorder",
    "Run",
    "RunConfig",
    "build_run",
    "catch_signals",
    "interruptible",
    "make_objective",
    "parse_run_config",
    "play_match",
    "resume_command",
    "verify",
]
