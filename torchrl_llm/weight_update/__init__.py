"""Trained weights into the inference engine: :class:`VLLMWeightSync` and the functions under it."""

from torchrl_llm.weight_update.canary import Canary
from torchrl_llm.weight_update.engine import NCCLTransfer
from torchrl_llm.weight_update.errors import WeightSyncError
from torchrl_llm.weight_update.scheme import SyncFigures, VLLMWeightSync, choose_method
from torchrl_llm.weight_update.tensors import adapter_tensors, merged_tensors

__all__ = [
    "Canary",
    "NCCLTransfer",
    "SyncFigures",
    "VLLMWeightSync",
    "WeightSyncError",
    "adapter_tensors",
    "choose_method",
    "merged_tensors",
]
