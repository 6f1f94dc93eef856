"""A run: settings become a trainer with a folder, checkpoints, trackers and recorded episodes
(:func:`build_run`)."""

from torchrl_llm.modules import SamplingConfig
from torchrl_llm.modules.engine_settings import CustomSettings, EngineSettings
from torchrl_llm.modules.hf.settings import HFSettings
from torchrl_llm.modules.vllm.settings import VLLMSettings
from torchrl_llm.runs.build import make_objective
from torchrl_llm.runs.checkpoint import CheckpointStore
from torchrl_llm.runs.checkpoint_files import verify
from torchrl_llm.runs.config import RunSettings
from torchrl_llm.runs.flags import parse_settings, resume_command
from torchrl_llm.runs.loss_settings import GRPO, LLMPPO, LLMREINFORCE, SFT, LossSettings
from torchrl_llm.runs.opponents import Match, play_match
from torchrl_llm.runs.recorder import RolloutRecorder
from torchrl_llm.runs.run import Run, build_run
from torchrl_llm.runs.settings import (
    AsyncRollouts,
    ChatSettings,
    EnvSettings,
    EvaluationSettings,
    ModelSettings,
    OptimSettings,
    OutputSettings,
    RayRollouts,
    RolloutSettings,
    SelfPlayRollouts,
    TurnRollouts,
    WeightsSettings,
)
from torchrl_llm.trainers import TrainerConfig
from torchrl_llm.utils.interrupts import Interrupted, catch_signals, interruptible
from torchrl_llm.utils.options import ConfigError

__all__ = [
    "GRPO",
    "LLMPPO",
    "LLMREINFORCE",
    "SFT",
    "AsyncRollouts",
    "ChatSettings",
    "CheckpointStore",
    "ConfigError",
    "CustomSettings",
    "EngineSettings",
    "EnvSettings",
    "EvaluationSettings",
    "HFSettings",
    "Interrupted",
    "LossSettings",
    "Match",
    "ModelSettings",
    "OptimSettings",
    "OutputSettings",
    "RayRollouts",
    "RolloutRecorder",
    "RolloutSettings",
    "Run",
    "RunSettings",
    "SamplingConfig",
    "SelfPlayRollouts",
    "TrainerConfig",
    "TurnRollouts",
    "VLLMSettings",
    "WeightsSettings",
    "build_run",
    "catch_signals",
    "interruptible",
    "make_objective",
    "parse_settings",
    "play_match",
    "resume_command",
    "verify",
]
