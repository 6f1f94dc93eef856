"""Trained weights to those who play: :class:`VLLMWeightSync` to an engine, :class:`RayWeightSync` to workers."""

from torchrl_llm.weight_update.broadcast import Snapshot, install
from torchrl_llm.weight_update.canary import Canary
from torchrl_llm.weight_update.engine import NCCLTransfer
from torchrl_llm.weight_update.errors import WeightSyncError
from torchrl_llm.weight_update.ray_scheme import RayWeightSync
from torchrl_llm.weight_update.scheme import SyncFigures, VLLMWeightSync, choose_method
from torchrl_llm.weight_update.tensors import Access, adapter_tensors, merged_tensors

__all__ = [
    "Access",
    "Canary",
    "NCCLTransfer",
    "RayWeightSync",
    "Snapshot",
    "SyncFigures",
    "VLLMWeightSync",
    "WeightSyncError",
    "adapter_tensors",
    "choose_method",
    "install",
    "merged_tensors",
]
