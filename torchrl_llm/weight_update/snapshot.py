"""Trained weights for engines in other processes: :class:`Snapshot`, and :func:`install`, which loads one into an engine.

The transport is another module's; on Ray, :class:`~torchrl_llm.weight_update.RayWeightSync` sends snapshots.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from peft import LoraConfig
from torch import Tensor, nn

from torchrl_llm.modules.engine import InferenceEngine, sync_step
from torchrl_llm.modules.merging import adapter_tensors, merged_tensors
from torchrl_llm.weight_update.parity_check import ParityCheck
from torchrl_llm.weight_update.sync import update_engine


@dataclass(frozen=True)
class Snapshot:
    """Copies of trained weights, in the host's memory.

    Attributes:
        version: the ``policy_version`` of tokens sampled with them.
        tensors: of the LoRA adapter under the names of its files, or of the whole model, the adapter merged.
        lora: the adapter's settings; ``None``: the tensors are the whole model's.
        parity_check: with the log-probs of the trained model.
    """

    version: int
    tensors: Mapping[str, Tensor]
    lora: LoraConfig | None
    parity_check: ParityCheck

    @classmethod
    def of(
        cls,
        model: nn.Module,
        adapter: str | None = None,
        *,
        version: int,
        parity_check: ParityCheck,
        merged: bool = False,
    ) -> Snapshot:
        """Copy the weights of a model.

        Args:
            model: the trained model: a causal language model of transformers, or a ``PeftModel`` around one.
            adapter: the trained LoRA adapter; ``None``: the model itself.
            version: of the policy.
            parity_check: of the model as it is.
            merged: the whole model even if there is an adapter.

        Examples:
            >>> from torchrl_llm.testing.tiny import load_tiny_model
            >>> model = load_tiny_model()
            >>> snapshot = Snapshot.of(model, version=3, parity_check=ParityCheck.of(model, None, temperature=1.0))
            >>> snapshot.version, snapshot.lora is None, len(snapshot.tensors) == len(model.state_dict())
            (3, True, True)
        """
        lora = None
        with sync_step("copying the weights"), torch.no_grad():
            if adapter is None or merged:
                named = merged_tensors(model, adapter)
            else:
                peft: Any = model
                named, lora = iter(adapter_tensors(model, adapter).items()), peft.peft_config[adapter]
            tensors = {name: tensor.detach().to("cpu", copy=True) for name, tensor in named}
        return cls(version, tensors, lora, parity_check)

    # As NumPy's bytes, tensors are pickled out of band: readers in shared memory need not copy them first.

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"tensors": {name: _as_bytes(tensor) for name, tensor in self.tensors.items()}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        tensors = {name: _as_tensor(*packed) for name, packed in state["tensors"].items()}
        vars(self).update(state | {"tensors": tensors})


def _as_bytes(tensor: Tensor) -> tuple[npt.NDArray[np.uint8], torch.dtype, torch.Size]:
    return tensor.contiguous().flatten().view(torch.uint8).numpy(), tensor.dtype, tensor.shape


def _as_tensor(data: npt.NDArray[np.uint8], dtype: torch.dtype, shape: torch.Size) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable")  # it is only read
        return torch.from_numpy(data).view(dtype).view(shape)


def install(policy: InferenceEngine, snapshot: Snapshot) -> float:
    """Load a snapshot's weights into an engine; its next tokens carry the snapshot's version.

    Args:
        policy: any engine with weights of its own: an :class:`~torchrl_llm.modules.HFPolicy` with the same model, and LoRA
            settings if the snapshot is that of an adapter; or a :class:`~torchrl_llm.modules.VLLMPolicy`, which serves LoRA then.
        snapshot: the weights.

    Returns:
        The parity check's difference, in nats.

    Raises:
        WeightSyncError: they do not fit, or the policy does not compute what the trained model does.
        TypeError: the policy takes no weights.

    Examples:
        >>> from torchrl_llm.modules import HFPolicy
        >>> from torchrl_llm.testing.tiny import load_tiny_model, load_tiny_tokenizer
        >>> trained, theirs = load_tiny_model(), load_tiny_model()
        >>> _ = torch.nn.init.zeros_(trained.model.norm.weight)
        >>> policy = HFPolicy(theirs, load_tiny_tokenizer())
        >>> parity_check = ParityCheck.of(trained, None, temperature=1.0)
        >>> install(policy, Snapshot.of(trained, version=7, parity_check=parity_check))
        0.0
        >>> policy.policy_version, theirs.model.norm.weight.any().item()
        (7, False)
    """
    return update_engine(
        policy,
        snapshot.version,
        load=lambda: policy.load(snapshot.tensors.items(), snapshot.lora),
        check=lambda: snapshot.parity_check.check(policy),
    )
