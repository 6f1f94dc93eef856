"""Generation in this process with a transformers model: :class:`HFPolicy`."""

from torchrl_llm.modules.hf._step import DecodeCompilationError
from torchrl_llm.modules.hf.policy import HFPolicy

__all__ = ["DecodeCompilationError", "HFPolicy"]
