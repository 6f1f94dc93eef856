"""Trained weights to workers on Ray: :class:`RayWeightSync`, a TorchRL weight-sync scheme."""

from __future__ import annotations

import time
from typing import Any

from torch import nn
from torchrl.weight_update import WeightSyncScheme

from torchrl_llm.modules.policy import TurnPolicy
from torchrl_llm.optional import running_ray
from torchrl_llm.weight_update.broadcast import Snapshot, install
from torchrl_llm.weight_update.canary import Canary
from torchrl_llm.weight_update.tensors import AT_HAND, why_not_servable


class RayWeightSync(WeightSyncScheme):
    """Puts snapshots of the trained model into Ray's object store, once for all workers; each takes the newest with its next task.

    Use it as ``RayTurnCollector(..., weight_sync_schemes={"policy": scheme})`` with ``update_policy_weights_()``, or call it.
    Each call is one sync: later tokens carry the next ``policy_version``. What was sampled by then keeps its version.

    A LoRA adapter is sent without the base weights, which workers have from where the trainer has them. Each worker compares
    what it computes with what the trained model does on fixed prompts (:class:`~torchrl_llm.weight_update.Canary`), and raises if
    another base or other weights are in use.

    Args:
        model: the trained model: a causal language model of transformers, or a ``PeftModel`` around one.
        adapter: the trained LoRA adapter; ``None``: the model itself.
        policy: the collector's policy here; its ``policy_version`` counts the syncs.
        merged: send the whole model, the adapter merged into it, for workers whose models have none. Default: where the
            adapter's settings (such as DoRA) cannot be served beside the base.
        canary: number of prompts to compare on; 0: no canary.
        canary_length: their length in tokens; two blocks of an engine's prefix cache and one, where it has one. Default 33.

    Attributes:
        current: version and Ray's reference of the weights to play with; ``None`` before the first sync.
        seconds: that the last sync took.
        access: how to get at weights that are shared out over processes; a trainer that shares them out sets it.

    Raises:
        ImportError: Ray is not installed (from a call).
        RuntimeError: Ray is not running (from a call).
        AdapterError: the model has no such adapter.

    Examples:
        >>> sync = RayWeightSync(models.model, models.adapter, policy=policy)  # doctest: +SKIP
        >>> collector = RayTurnCollector(..., weight_sync_schemes={"policy": sync})  # doctest: +SKIP
        >>> collector.update_policy_weights_()  # doctest: +SKIP
    """

    sleep_level = 0
    figures = None

    def __init__(
        self,
        model: nn.Module,
        adapter: str | None = None,
        *,
        policy: TurnPolicy,
        merged: bool | None = None,
        canary: int = 2,
        canary_length: int = 33,
    ) -> None:
        super().__init__()
        self.trained, self.adapter, self.policy = model, adapter, policy
        self.merged = bool(adapter and why_not_servable(model, adapter)) if merged is None else merged
        self.canary, self.canary_length = canary, canary_length
        self.current: tuple[int, Any] | None = None
        self.seconds = 0.0
        self.access = AT_HAND

    install = staticmethod(install)

    def send(self, weights: Any = None, worker_ids: Any = None) -> None:
        """Offer the weights that the model has now.

        Args:
            weights: must be ``None``: the weights are those of the model given to the constructor.
            worker_ids: without meaning here: all workers get them.
        """
        del worker_ids
        if weights is not None:
            raise ValueError(
                f"RayWeightSync sends the model that it was made with; it was given {type(weights).__name__}. Call "
                "update_policy_weights_() without arguments."
            )
        self.publish(self.policy.policy_version + 1)
        self.policy.weights_changed()

    __call__ = update_weights = send

    def publish(self, version: int) -> None:
        """Put the weights that the model has now into the object store, for tokens of ``version``; that is no update yet."""
        ray, start = running_ray(), time.perf_counter()
        with self.access.computing():
            canary = Canary.of(
                self.trained,
                self.adapter,
                temperature=self.policy.sampling.temperature,
                prompts=self.canary,
                length=self.canary_length,
            )
        with self.access.copying(self.merged or self.adapter is None):
            snapshot = Snapshot.of(self.trained, self.adapter, version=version, canary=canary, merged=self.merged)
        self.current = version, ray.put(snapshot)
        self.seconds = time.perf_counter() - start

    def close(self) -> None:
        """Let the object store forget the weights."""
        self.current = None

    # What TorchRL asks of a scheme: weights go with the collector's tasks, so there is no transport.

    def _init_on_sender_impl(self, model_id: str = "policy", context: Any = None, **_: Any) -> None:
        self.model_id = model_id
        self.context = context

    def create_transport(self, **_: Any) -> None:
        """None: weights go with the collector's tasks."""

    def connect(self, *, worker_idx: int | None = None, weights: Any = None) -> None:
        """Offer the weights as they are; that is no update, and the version stays."""
        del worker_idx, weights
        self.publish(self.policy.policy_version)
        self.synchronized_on_sender = True
