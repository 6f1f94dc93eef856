"""Trained weights to workers on Ray: :class:`RayWeightSync`, a TorchRL weight-sync scheme."""

from __future__ import annotations

import time
from typing import Any

from torch import nn

from torchrl_llm.modules.engine import InferenceEngine
from torchrl_llm.modules.merging import why_not_servable
from torchrl_llm.optional import running_ray
from torchrl_llm.weight_update.snapshot import Snapshot, install
from torchrl_llm.weight_update.sync import WeightSync


class RayWeightSync(WeightSync):
    """Puts snapshots of the trained model into Ray's object store, once for all workers; each loads the newest with its next
    request.

    Use it as ``RayTurnCollector(..., weight_sync_schemes={"policy": scheme})`` with ``update_policy_weights_()``, or call it.
    Each call is one sync: later tokens carry the next ``policy_version``. What was sampled by then keeps its version.

    A LoRA adapter is sent without the base weights, which workers have from where the trainer has them. Each worker compares
    what it computes with what the trained model does on fixed prompts (:class:`~torchrl_llm.weight_update.ParityCheck`), and raises if
    another base or other weights are in use.

    Args:
        model: the trained model: a causal language model of transformers, or a ``PeftModel`` around one.
        adapter: the trained LoRA adapter; ``None``: the model itself.
        policy: the collector's policy here; its ``policy_version`` counts the syncs.
        merged: send the whole model, the adapter merged into it, for workers whose models have none. Default: where the
            adapter's settings (such as DoRA) cannot be served beside the base.
        parity_check: number of prompts to compare on; 0: no parity check.
        parity_length: their length in tokens; two blocks of an engine's prefix cache and one, where it has one. Default 33.

    Attributes:
        current: version and Ray's reference of the weights to sample with; ``None`` before the first sync.
        seconds: the duration of the last sync.
        parameter_gather: how to read weights that are sharded over processes; a trainer that shards them sets it.

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
        self.seconds = 0.0

    install = staticmethod(install)

    def _sync(self) -> None:
        self.publish(self.policy.policy_version + 1)
        self.policy.weights_changed()

    def publish(self, version: int) -> None:
        """Put the weights that the model has now into the object store, for tokens of ``version``; workers load them later."""
        ray, start = running_ray(), time.perf_counter()
        parity_check = self._ask_model(self.parity_length)
        with self.parameter_gather.copying(self.merged or self.adapter is None):
            snapshot = Snapshot.of(
                self.trained, self.adapter, version=version, parity_check=parity_check, merged=self.merged
            )
        self.current = version, ray.put(snapshot)
        self.seconds = time.perf_counter() - start

    def close(self) -> None:
        """Drop the reference, so that the object store can free the weights."""
        self.current = None

    def connect(self, *, worker_idx: int | None = None, weights: Any = None) -> None:
        """Publish the weights as they are; the version stays."""
        del worker_idx, weights
        self.publish(self.policy.policy_version)
        self.synchronized_on_sender = True
