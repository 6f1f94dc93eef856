"""Generation with a vLLM engine: :class:`VLLMPolicy`, and :func:`load_engine`, which starts one.
vLLM is imported when used."""

from torchrl_llm.modules.vllm.policy import VLLMPolicy
from torchrl_llm.modules.vllm.start import MissingVLLMError, import_vllm, load_engine
from torchrl_llm.modules.vllm.weights import IPCTransfer, NCCLTransfer, WeightTransfer

__all__ = [
    "IPCTransfer",
    "MissingVLLMError",
    "NCCLTransfer",
    "VLLMPolicy",
    "WeightTransfer",
    "import_vllm",
    "load_engine",
]
