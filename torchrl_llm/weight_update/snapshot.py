"""Trained weights for engines in other processes: :class:`Snapshot`, and :func:`install`, which
loads one into an engine.

On Ray, :class:`RayWeightSync` sends snapshots. It is a TorchRL weight-sync scheme.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from peft import LoraConfig
from torch import Tensor, nn

from torchrl_llm.modules.engine import InferenceEngine, sync_step
from torchrl_llm.modules.merging import adapter_tensors, merged_tensors, why_not_servable
from torchrl_llm.utils.optional import running_ray
from torchrl_llm.weight_update.parity_check import ParityCheck
from torchrl_llm.weight_update.sync import WeightSync, update_engine


@dataclass(frozen=True)
class Snapshot:
    """Copies of trained weights, in the host's memory.

    Attributes:
        version: the ``policy_version`` of tokens sampled with them.
        tensors: of the LoRA adapter under the names of its files, or of the whole model, the
            adapter merged.
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
            model: the trained model: a causal language model of transformers, or a ``PeftModel``
                around one.
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
            # copy: on a CPU, to() returns the live weights, which the next update changes in place.
            tensors = {name: tensor.detach().to("cpu", copy=True) for name, tensor in named}
        return cls(version, tensors, lora, parity_check)

    # As NumPy's bytes, tensors are pickled out of band: readers in shared memory need not copy them
    # first.

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"tensors": {name: _as_bytes(tensor) for name, tensor in self.tensors.items()}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        tensors = {name: _as_tensor(*packed) for name, packed in state["tensors"].items()}
        vars(self).update(state | {"tensors": tensors})


def _as_bytes(tensor: Tensor) -> tuple[npt.NDArray[np.uint8], torch.dtype, torch.Size]:
    # As bytes, because NumPy has no bfloat16; flat, because a scalar has no view of another element
    # size.
    return tensor.contiguous().flatten().view(torch.uint8).numpy(), tensor.dtype, tensor.shape


def _as_tensor(data: npt.NDArray[np.uint8], dtype: torch.dtype, shape: torch.Size) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable")  # it is only read
        return torch.from_numpy(data).view(dtype).view(shape)


def install(policy: InferenceEngine, snapshot: Snapshot) -> float:
    """Load a snapshot's weights into an engine; its next tokens carry the snapshot's version.

    Args:
        policy: any engine with weights of its own: an :class:`~torchrl_llm.modules.HFPolicy` with
            the same model, and LoRA settings if the snapshot is of an adapter; or a
            :class:`~torchrl_llm.modules.VLLMPolicy`, which serves LoRA then.
        snapshot: the weights.

    Returns:
        The parity check's difference, in nats.

    Raises:
        WeightSyncError: they do not fit, or the policy does not compute what the trained model
            does.
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
    load = partial(policy.load, snapshot.tensors.items(), snapshot.lora)
    check = partial(snapshot.parity_check.check, policy)
    return update_engine(policy, snapshot.version, load=load, check=check)


class RayWeightSync(WeightSync):
    """Puts snapshots of the trained model into Ray's object store, once for all workers; each loads
    the newest with its next request.

    Use it as ``RayTurnCollector(..., weight_sync_schemes={"policy": scheme})`` with
    ``update_policy_weights_()``, or call it. Each call is one sync: later tokens carry the next
    ``policy_version``. What was sampled by then keeps its version.

    A LoRA adapter is sent without the base weights, which workers have from where the trainer has
    them. Each worker compares what it computes with what the trained model does on fixed prompts
    (:class:`~torchrl_llm.weight_update.ParityCheck`), and raises if another base or other weights
    are in use.

    Args:
        model: the trained model: a causal language model of transformers, or a ``PeftModel`` around
            one.
        adapter: the trained LoRA adapter; ``None``: the model itself.
        policy: the collector's policy here; its ``policy_version`` counts the syncs.
        merged: send the whole model, the adapter merged into it, for workers whose models have
            none. Default: where the adapter's settings (such as DoRA) cannot be served beside the
            base.
        parity_check: number of prompts to compare on; 0: no parity check.
        parity_length: their length in tokens; two blocks of an engine's prefix cache and one, where
            it has one. Default 33.

    Attributes:
        current: version and Ray's reference of the weights to sample with; ``None`` before the
            first sync.
        parameter_gather: how to read weights that are sharded over processes; a trainer that shards
            them sets it.

    Raises:
        ImportError: Ray is not installed (from a call).
        RuntimeError: Ray is not running (from a call).
        AdapterError: the model has no such adapter.

    Examples:
        >>> sync = RayWeightSync(models.model, models.adapter, policy=policy)  # doctest: +SKIP
        >>> collector = RayTurnCollector(..., weight_sync_schemes={"policy": sync})  # doctest: +SKIP
        >>> collector.update_policy_weights_()  # doctest: +SKIP
    """

    def __init__(
        self,
        model: nn.Module,
        adapter: str | None = None,
        *,
        policy: InferenceEngine,
        merged: bool | None = None,
        parity_check: int = 2,
        parity_length: int = 33,
    ) -> None:
        super().__init__(model, adapter, policy=policy, parity_check=parity_check)
        self.merged = bool(adapter and why_not_servable(model, adapter)) if merged is None else merged
        self.parity_length = parity_length
        self.current: tuple[int, Any] | None = None

    @property
    def lora(self) -> LoraConfig | None:
        """The settings of the adapter that is sent; ``None``: the whole model is, an adapter merged
        into it."""
        model: Any = self.trained
        return None if self.merged or self.adapter is None else model.peft_config[self.adapter]

    install = staticmethod(install)

    def _sync(self) -> None:
        # The version is raised last: a sync that fails makes none.
        self.publish(self.policy.policy_version + 1)
        self.policy.weights_changed()

    def publish(self, version: int) -> None:
        """Put the weights that the model has now into the object store, for tokens of ``version``;
        workers load them later."""
        ray = running_ray()
        # Before copying: while sharded weights are full tensors to be copied, no forward can run.
        check = self._ask_model(self.parity_length)
        merged = self.lora is None
        with self.parameter_gather.copying(merged):
            snapshot = Snapshot.of(self.trained, self.adapter, version=version, parity_check=check, merged=merged)
        self.current = version, ray.put(snapshot)

    def close(self) -> None:
        """Drop the reference, so that the object store can free the weights."""
        self.current = None

    def connect(self, *, worker_idx: int | None = None, weights: Any = None) -> None:
        """Publish the weights as they are; the version stays."""
        del worker_idx, weights
        self.publish(self.policy.policy_version)
        self.synchronized_on_sender = True
