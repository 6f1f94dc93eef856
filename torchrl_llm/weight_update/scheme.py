"""When and how trained weights are sent to a vLLM engine: :class:`VLLMWeightSync`, a TorchRL weight-sync scheme."""

from __future__ import annotations

import logging
import time
from typing import Any, Literal, NamedTuple, get_args

from torch import nn
from torchrl.weight_update import WeightSyncScheme

from torchrl_llm.modules.adapters import use_adapter
from torchrl_llm.modules.lm import causal_lm
from torchrl_llm.weight_update import engine
from torchrl_llm.weight_update.canary import Canary, canary_length
from torchrl_llm.weight_update.errors import WeightSyncError, part
from torchrl_llm.weight_update.tensors import AT_HAND, adapter_tensors, merged_tensors, why_not_servable

logger = logging.getLogger(__name__)

Method = Literal["adapter", "reload", "shared_memory", "nccl"]


class SyncFigures(NamedTuple):
    """What one weight sync did.

    Attributes:
        version: the policy's, of tokens sampled from here on.
        seconds: that it took, canary included.
        canary_seconds: of these, the canary's.
        canary_difference: largest difference of log-probs found, in nats; NaN without a canary.
    """

    version: int
    seconds: float
    canary_seconds: float
    canary_difference: float


class VLLMWeightSync(WeightSyncScheme):
    """Sends the weights of a trained model to the engine of a :class:`~torchrl_llm.modules.vllm.VLLMPolicy`.

    Use it as ``Collector(..., weight_sync_schemes={"policy": scheme})`` with ``update_policy_weights_()``, as
    ``torchrl.trainers.UpdateWeights(sender=scheme, ...)``, or call it. Each call is one sync: the engine is paused, the
    weights go in, its prefix cache is emptied, it goes on under the next ``policy_version``, and a :class:`Canary` compares it
    with the trained model. Turns in flight go on with the new weights; each of their tokens has the version it was sampled
    with.

    From the beginning of a sync to its end the policy refuses to play. If a sync fails, it goes on refusing until another
    one succeeds; if it is the canary that found the engine wrong, turns in flight are cancelled, for they may have tokens
    of the wrong weights.

    Methods:

    - ``"adapter"``: the engine serves the LoRA adapter beside the base weights, and only the adapter is sent. The base
      weights are sent with the first sync and after one that failed, if they are not quantized.
    - ``"reload"``: all weights, LoRA merged, to an engine in this process.
    - ``"shared_memory"``: all weights, LoRA merged, to an engine in processes of its own on this host.
    - ``"nccl"``: all weights, LoRA merged, to an engine on other GPUs; see :class:`~torchrl_llm.weight_update.NCCLTransfer`.

    ``"auto"`` takes ``"nccl"`` where the engine has been made for it; else ``"adapter"`` where the engine can serve it,
    except on CPUs, where merged weights are served 2.6 times as fast; else one of the other two.

    On a GPU that trainer and engine share, give ``sleep_level`` and call :meth:`sleep` before the trainer works: the engine
    gives its memory back, and the next sync wakes it, weights first, KV cache after.

    Args:
        model: the trained model: a causal language model of transformers, or a ``PeftModel`` around one.
        adapter: the trained LoRA adapter; ``None``: the model itself.
        policy: plays with the engine.
        method: how to send, or ``"auto"``.
        canary: number of prompts to compare on; 0: no canary.
        canary_tolerance: in nats; ``None``: 1e-3 for an engine in float32, else 0.1.
        sleep_level: of :meth:`sleep`: 1 keeps the engine's weights in the host's memory, 2 drops them (not with
            ``"adapter"``: the base weights would be lost); 0: :meth:`sleep` is refused.
        address: of this host, where ranks meet; for ``"nccl"`` only.

    Attributes:
        method: the method taken.
        figures: the :class:`SyncFigures` of the last sync, or ``None``.
        access: how to get at weights that are shared out over processes; a trainer that shares them out sets it.

    Raises:
        ValueError: a method that the set-up does not allow.
        AdapterError: the model has no such adapter.
        WeightSyncError: a sync failed (from a call); the message names the part.

    Examples:
        >>> sync = VLLMWeightSync(models.model, models.adapter, policy=policy)  # doctest: +SKIP
        >>> sync()  # doctest: +SKIP
        >>> sync.method  # doctest: +SKIP
        'reload'
    """

    def __init__(
        self,
        model: nn.Module,
        adapter: str | None = None,
        *,
        policy: Any,
        method: Method | Literal["auto"] = "auto",
        canary: int = 2,
        canary_tolerance: float | None = None,
        sleep_level: Literal[0, 1, 2] = 0,
        address: str = "127.0.0.1",
    ) -> None:
        super().__init__()
        self.trained, self.adapter, self.policy = model, adapter, policy
        with use_adapter(model, adapter):  # for its checks
            pass
        chosen, reason = choose_method(policy, model, adapter)
        self.method: Method = chosen if method == "auto" else method
        _check_method(self.method, policy, adapter, sleep_level)
        logger.info("weight sync by %r: %s", self.method, reason if method == "auto" else "as asked for")
        self.sleep_level, self.address = sleep_level, address
        self.figures: SyncFigures | None = None
        self.canary, self.canary_tolerance = canary, canary_tolerance
        self._transfer: engine.NCCLTransfer | None = None
        self._asleep = self._base_known = False
        self.access = AT_HAND

    def send(self, weights: Any = None, worker_ids: Any = None) -> None:
        """Bring the engine to the weights that the model has now.

        Args:
            weights: must be ``None``: the weights are those of the model given to the constructor.
            worker_ids: without meaning here: there is one engine.

        Raises:
            WeightSyncError: the engine's weights are unknown; the policy refuses to play until a sync succeeds.
        """
        del worker_ids
        if weights is not None:
            raise ValueError(
                f"VLLMWeightSync sends the model that it was made with; it was given {type(weights).__name__}. Call "
                "update_policy_weights_() without arguments."
            )
        policy, start = self.policy, time.perf_counter()
        with policy.exclusive():
            policy.invalidate("a weight sync began and did not end well. Sync again before sampling.")
            known, self._base_known = self._base_known, False
            with self.access.copying(self.method != "adapter" or not known):
                self._push(policy.policy_version + 1, send_base=not known)
            policy.weights_changed()
            pushed = time.perf_counter()
            difference = self._check()
            end, self._base_known = time.perf_counter(), True
        self.figures = SyncFigures(policy.policy_version, end - start, end - pushed, difference)

    __call__ = update_weights = send

    def sleep(self) -> None:
        """Give the engine's GPU memory to the trainer until the next sync. No turn may be in flight."""
        if self.sleep_level == 0:
            raise ValueError("sleep() needs VLLMWeightSync(sleep_level=1) or 2, and an engine made with sleep mode.")
        self.policy.sleep(self.sleep_level)
        self._asleep = True

    def close(self) -> None:
        """Leave the group of ranks of ``"nccl"``. The engine is the policy's."""
        if self._transfer is not None:
            self._transfer.close()
            self._transfer = None

    def _push(self, version: int, *, send_base: bool) -> None:
        llm = self.policy.llm
        if self._asleep:
            with part("waking the engine's weights"):
                llm.wake_up(["weights"])
        with engine.paused(llm, version):
            self.policy.lora_request = self._send_tensors(llm, version, send_base=send_base)
            if self._asleep:
                with part("waking the engine's KV cache"):
                    llm.wake_up(["kv_cache"])
        self._asleep = False

    def _send_tensors(self, llm: Any, version: int, *, send_base: bool) -> Any:
        model: Any = self.trained
        if self.method == "adapter":
            if send_base and not getattr(causal_lm(model), "is_quantized", False):
                self._send_all(llm, None)
            with part("copying the adapter"):
                tensors = adapter_tensors(model, self.adapter or "")
            load = engine.load_adapter if self.policy.in_process else engine.load_adapter_shared
            return load(llm, tensors, model.peft_config[self.adapter], version)
        if self.method == "nccl":
            if self._transfer is None:
                self._transfer = engine.NCCLTransfer(llm, lambda: merged_tensors(model, self.adapter), self.address)
            self._transfer.send()
        else:
            self._send_all(llm, self.adapter)
        return None

    def _send_all(self, llm: Any, adapter: str | None) -> None:
        reload = engine.reload if self.policy.in_process else engine.reload_shared
        reload(llm, merged_tensors(self.trained, adapter))

    def _check(self) -> float:
        policy = self.policy
        policy.validate()
        try:
            with self.access.computing():
                canary = Canary.of(
                    self.trained,
                    self.adapter,
                    temperature=policy.sampling.temperature,
                    prompts=self.canary,
                    length=canary_length(policy),
                )
            return canary.check(policy, self.canary_tolerance)
        except BaseException as error:
            policy.cancel()
            policy.invalidate(f"{error} Sync again before sampling.")
            raise

    # What TorchRL asks of a scheme: there is no transport and no receiver, the engine is at hand.

    def _init_on_sender_impl(self, model_id: str = "policy", context: Any = None, **_: Any) -> None:
        self.model_id = model_id
        self.context = context

    def create_transport(self, **_: Any) -> None:
        """None: the engine is at hand."""

    def connect(self, *, worker_idx: int | None = None, weights: Any = None) -> None:
        """The first sync, which a collector asks for when it is made."""
        del worker_idx
        self.send(weights)
        self.synchronized_on_sender = True


def choose_method(policy: Any, model: Any, adapter: str | None) -> tuple[Method, str]:
    """The fastest method that is correct for this set-up, and why it is."""
    config = policy.llm.llm_engine.vllm_config
    whole: Method = "reload" if policy.in_process else "shared_memory"
    place = "is in this process" if policy.in_process else "has processes of its own"
    if getattr(config.weight_transfer_config, "backend", None) == "nccl":
        return "nccl", "the engine has been made with a weight transfer configuration"
    if adapter is None:
        return whole, f"the whole model is trained, and the engine {place}"
    if config.device_config.device_type == "cpu":
        return whole, f"on CPUs merged weights are served faster than an adapter, and the engine {place}"
    if config.lora_config is None:
        return whole, f"the engine was made without LoRA, and {place}"
    if reason := why_not_servable(model, adapter):
        return whole, f"vLLM cannot serve an adapter with {reason}, and the engine {place}"
    return "adapter", f"the engine serves LoRA adapters, and {place}"


def _check_method(method: str, policy: Any, adapter: str | None, sleep_level: int) -> None:
    problem = None
    if method not in get_args(Method):
        problem = f"expected 'auto' or one of {get_args(Method)}"
    elif method == "adapter" and adapter is None:
        problem = "no adapter is trained; give adapter="
    elif method == "adapter" and policy.llm.llm_engine.vllm_config.lora_config is None:
        problem = "the engine was made without LoRA; make it with enable_lora=True, or take another method"
    elif method == "adapter" and sleep_level == 2:
        problem = "sleep_level=2 drops the base weights, which are not sent; use sleep_level=1"
    elif method == "reload" and not policy.in_process:
        problem = "the engine has processes of its own; use 'shared_memory'"
    if problem:
        raise ValueError(f"VLLMWeightSync(method={method!r}): {problem}.")


__all__ = ["Method", "SyncFigures", "VLLMWeightSync", "WeightSyncError", "choose_method"]
