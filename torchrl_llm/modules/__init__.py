"""What computes with a language model: policies, the scorer, the critic, and adapters."""

from torchrl_llm.modules.actor_critic import ActorCritic, load_actor_critic
from torchrl_llm.modules.adapters import AdapterError, LoraTargetError, enable_gradient_checkpointing, use_adapter
from torchrl_llm.modules.checks import (
    RandomForwardError,
    UnsupportedHeadError,
    UnsupportedModelError,
    VocabularyMismatchError,
    check_head,
    check_vocabulary,
)
from torchrl_llm.modules.critic import TurnCritic
from torchrl_llm.modules.engine import EngineError, InferenceEngine, TurnRequest, TurnResponse, WeightSyncError
from torchrl_llm.modules.hf import HFPolicy
from torchrl_llm.modules.lm import lm_logits
from torchrl_llm.modules.player import Player, PlayerError, PlayerPolicy
from torchrl_llm.modules.policy import Generation, TurnPolicy
from torchrl_llm.modules.positions import RowError
from torchrl_llm.modules.prefix_attention import PrefixSharing, enable_prefix_sharing
from torchrl_llm.modules.sampling import SamplingConfig
from torchrl_llm.modules.scorer import TokenScorer
from torchrl_llm.modules.vllm import MissingVLLMError, VLLMPolicy, load_engine
from torchrl_llm.modules.weights import WeightsError

__all__ = [
    "ActorCritic",
    "AdapterError",
    "EngineError",
    "Generation",
    "HFPolicy",
    "InferenceEngine",
    "LoraTargetError",
    "MissingVLLMError",
    "Player",
    "PlayerError",
    "PlayerPolicy",
    "PrefixSharing",
    "RandomForwardError",
    "RowError",
    "SamplingConfig",
    "TokenScorer",
    "TurnCritic",
    "TurnPolicy",
    "TurnRequest",
    "TurnResponse",
    "UnsupportedHeadError",
    "UnsupportedModelError",
    "VLLMPolicy",
    "VocabularyMismatchError",
    "WeightSyncError",
    "WeightsError",
    "check_head",
    "check_vocabulary",
    "enable_gradient_checkpointing",
    "enable_prefix_sharing",
    "lm_logits",
    "load_actor_critic",
    "load_engine",
    "use_adapter",
]
