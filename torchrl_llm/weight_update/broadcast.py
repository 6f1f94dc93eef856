"""Trained weights for policies in other processes: :class:`Snapshot`, how it is taken and how it gets into a policy.

How it is carried is not known here; on Ray, :class:`~torchrl_llm.weight_update.RayWeightSync` does it.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import singledispatch
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from peft import LoraConfig
from torch import Tensor, nn

from torchrl_llm.modules import HFPolicy, VLLMPolicy
from torchrl_llm.modules.lm import causal_lm
from torchrl_llm.modules.weights import set_adapter_tensors
from torchrl_llm.weight_update import engine
from torchrl_llm.weight_update.canary import Canary
from torchrl_llm.weight_update.errors import WeightSyncError, part
from torchrl_llm.weight_update.tensors import adapter_tensors, merged_tensors


@dataclass(frozen=True)
class Snapshot:
    """Copies of trained weights, in the host's memory.

    Attributes:
        version: the ``policy_version`` of tokens sampled with them.
        tensors: those of the LoRA adapter under the names of its files, or those of the whole model, the adapter merged.
        lora: the adapter's settings; ``None``: the tensors are the whole model's.
        canary: what the trained model says.
    """

    version: int
    tensors: Mapping[str, Tensor]
    lora: LoraConfig | None
    canary: Canary

    @classmethod
    def of(
        cls, model: nn.Module, adapter: str | None = None, *, version: int, canary: Canary, merged: bool = False
    ) -> Snapshot:
        """Copy the weights of a model.

        Args:
            model: the trained model: a causal language model of transformers, or a ``PeftModel`` around one.
            adapter: the trained LoRA adapter; ``None``: the model itself.
            version: of the policy.
            canary: of the model as it is.
            merged: the whole model even if there is an adapter.

        Examples:
            >>> from torchrl_llm.testing.tiny import load_tiny_model
            >>> model = load_tiny_model()
            >>> snapshot = Snapshot.of(model, version=3, canary=Canary.of(model, None, temperature=1.0))
            >>> snapshot.version, snapshot.lora is None, len(snapshot.tensors) == len(model.state_dict())
            (3, True, True)
        """
        if adapter is None or merged:
            with part("copying the weights"), torch.no_grad():
                named = merged_tensors(model, adapter)
                tensors = {name: tensor.detach().to("cpu", copy=True) for name, tensor in named}
            return cls(version, tensors, None, canary)
        with part("copying the adapter"):
            tensors = {name: tensor.cpu() for name, tensor in adapter_tensors(model, adapter).items()}
        lora: Any = model.peft_config
        return cls(version, tensors, lora[adapter], canary)

    # As NumPy's bytes, tensors are pickled out of band: who reads them from shared memory need not copy them first.

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


@singledispatch
def install(policy: Any, snapshot: Snapshot) -> float:
    """Put a snapshot's weights into a policy; its next tokens carry the snapshot's version.

    Policies of other kinds are added with ``install.register``.

    Args:
        policy: an :class:`~torchrl_llm.modules.HFPolicy` with the same model, and LoRA settings if the snapshot is that of an
            adapter; or a :class:`~torchrl_llm.modules.VLLMPolicy`, which serves LoRA then.
        snapshot: the weights.

    Returns:
        The canary's difference, in nats.

    Raises:
        WeightSyncError: they do not fit, or the policy does not compute what the trained model does.
        TypeError: nothing is known of such a policy.

    Examples:
        >>> from torchrl_llm.testing.tiny import load_tiny_model, load_tiny_tokenizer
        >>> trained, theirs = load_tiny_model(), load_tiny_model()
        >>> _ = torch.nn.init.zeros_(trained.model.norm.weight)
        >>> policy = HFPolicy(theirs, load_tiny_tokenizer())
        >>> canary = Canary.of(trained, None, temperature=1.0)
        >>> install(policy, Snapshot.of(trained, version=7, canary=canary))
        0.0
        >>> policy.policy_version, theirs.model.norm.weight.any().item()
        (7, False)
    """
    raise TypeError(
        f"The policy is a {type(policy).__name__}; expected an HFPolicy or a VLLMPolicy, or one that install.register was told "
        "of."
    )


@install.register
def _(policy: HFPolicy, snapshot: Snapshot) -> float:
    with part("loading the weights"), torch.no_grad():
        if snapshot.lora is None:
            _check_plain(policy)
            causal_lm(policy.model).load_state_dict(dict(snapshot.tensors))
        else:
            if policy.adapter is None:
                raise WeightSyncError("The weights are those of a LoRA adapter, and the policy's model has none.")
            set_adapter_tensors(policy.model, policy.adapter, snapshot.tensors)
    policy.policy_version = snapshot.version - 1
    policy.weights_changed()
    return snapshot.canary.check(policy)


@install.register
def _(policy: VLLMPolicy, snapshot: Snapshot) -> float:
    with policy.exclusive():
        policy.invalidate("a weight sync began and did not end well. Sync again before sampling.")
        with engine.paused(policy.llm, snapshot.version):
            policy.lora_request = _load(policy, snapshot)
        policy.policy_version = snapshot.version - 1
        policy.weights_changed()
        policy.validate()
        try:
            return snapshot.canary.check(policy)
        except BaseException as error:
            policy.cancel()
            policy.invalidate(f"{error} Sync again before sampling.")
            raise


def _load(policy: VLLMPolicy, snapshot: Snapshot) -> Any:
    if snapshot.lora is None:
        reload = engine.reload if policy.in_process else engine.reload_shared
        reload(policy.llm, snapshot.tensors.items())
        return None
    load = engine.load_adapter if policy.in_process else engine.load_adapter_shared
    # The engine scales what it is given, in place.
    copies = {name: tensor.clone() for name, tensor in snapshot.tensors.items()}
    return load(policy.llm, copies, snapshot.lora, snapshot.version)


def _check_plain(policy: HFPolicy) -> None:
    if policy.adapter is not None:
        raise WeightSyncError(
            f"The weights are those of a whole model, and the policy plays with the adapter {policy.adapter!r} on one: make it "
            "with a model without LoRA."
        )
