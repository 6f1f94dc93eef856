"""Weight syncs from the trained model to engines: :class:`EngineWeightSync` in this process,
:class:`RayWeightSync` on Ray."""

from torchrl_llm.modules.engine import WeightSyncError
from torchrl_llm.modules.merging import adapter_tensors, merged_tensors
from torchrl_llm.weight_update.parity_check import ParityCheck
from torchrl_llm.weight_update.snapshot import RayWeightSync, Snapshot, install
from torchrl_llm.weight_update.sync import (
    LOCAL_PARAMETERS,
    EngineWeightSync,
    ParameterGather,
    WeightSync,
    update_engine,
)

__all__ = [
    "LOCAL_PARAMETERS",
    "EngineWeightSync",
    "ParameterGather",
    "ParityCheck",
    "RayWeightSync",
    "Snapshot",
    "WeightSync",
    "WeightSyncError",
    "adapter_tensors",
    "install",
    "merged_tensors",
    "update_engine",
]
