"""Weight syncs: :func:`update_engine`, the schemes' base class, and :class:`EngineWeightSync` for
an engine in this process.

:mod:`torchrl_llm.modules.merging` makes tensors of weights, the engine loads them.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, NamedTuple

from torch import nn
from torchrl.weight_update import WeightSyncScheme

from torchrl_llm.modules.adapters import check_adapter
from torchrl_llm.modules.engine import InferenceEngine
from torchrl_llm.modules.lm import is_quantized
from torchrl_llm.modules.merging import MergedTensors, adapter_tensors, why_not_servable
from torchrl_llm.weight_update.parity_check import ParityCheck

logger = logging.getLogger(__name__)


class ParameterGather(NamedTuple):
    """How to read trained weights that are sharded over processes; all processes take part at the
    same time.

    Attributes:
        copying: entered while they are read; the argument says whether the frozen ones are read
            too.
        computing: entered while the trained model runs forwards.
    """

    copying: Callable[[bool], AbstractContextManager[None]]
    computing: Callable[[], AbstractContextManager[None]]


LOCAL_PARAMETERS = ParameterGather(lambda _: nullcontext(), nullcontext)
"""For weights that are all in this process."""


def update_engine(
    engine: InferenceEngine, version: int, *, load: Callable[[], None], check: Callable[[], float]
) -> float:
    """Load new weights into an engine, and check that it computes with them. Every sync of this
    package is one such call.

    Args:
        engine: refuses to sample until the update has succeeded. If ``load`` fails, turns in flight
            wait for the next update that succeeds; if ``check`` fails, they are cancelled, for they
            may have tokens of the wrong weights.
        version: of the tokens sampled with the new weights.
        load: calls ``engine.load``, once or several times.
        check: compares what the engine and the trained model compute.

    Returns:
        What ``check`` returns.
    """
    with engine.exclusive():
        with engine.updating(version):
            load()
        try:
            # After updating(): an engine that is paused for the update answers nothing.
            return check()
        except BaseException as error:
            engine.cancel()
            engine.invalidate(f"{error} Sync again before sampling.")
            raise


class WeightSync(WeightSyncScheme):
    """Base class of weight syncs: loads the weights of one trained model into engines, for trainers
    and TorchRL's collectors.

    A subclass implements :meth:`_sync`.

    Args:
        model, adapter, policy, parity_check: see :class:`EngineWeightSync`.

    Attributes:
        parameter_gather: how to read weights that are sharded over processes; a trainer that shards
            them sets it.
        parity_gap: of the last sync: largest difference of log-probs, in nats; NaN without a parity
            check, ``None`` before the first sync, or where engines elsewhere take the weights
            later.
        sleep_level: of :meth:`sleep`; 0: the engine does not sleep.
    """

    sleep_level: int = 0
    parity_gap: float | None = None

    def __init__(self, model: nn.Module, adapter: str | None, *, policy: InferenceEngine, parity_check: int) -> None:
        super().__init__()
        self.trained, self.adapter, self.policy, self.parity_check = model, adapter, policy, parity_check
        self.parameter_gather = LOCAL_PARAMETERS

    def send(self, weights: Any = None, worker_ids: Any = None) -> None:
        """Send the weights that the model has now.

        Args:
            weights: must be ``None``: the weights come from the model given to the constructor.
            worker_ids: not used: all engines get them.

        Raises:
            WeightSyncError: the engine's weights are unknown; the policy refuses to sample until a
                sync succeeds.
        """
        del worker_ids
        if weights is not None:
            raise ValueError(
                f"{type(self).__name__} sends the model that it was made with; it was given {type(weights).__name__}. Call "
                "update_policy_weights_() without arguments."
            )
        # Not TorchRL's own send(): its prepare_weights() silently merges a PEFT model.
        self._sync()

    # Collectors call send(), and torchrl.trainers.UpdateWeights(sender=) calls update_weights().
    __call__ = update_weights = send

    @abstractmethod
    def _sync(self) -> None:
        """One sync."""

    def sleep(self) -> None:
        """Raise: the engine is not in this process."""
        raise ValueError(f"{type(self).__name__} has no engine here that could sleep.")

    def asleep(self) -> AbstractContextManager[None]:
        """For the trainer's work between two rollouts with the same weights: inside, an engine that
        sleeps has given its memory."""
        return nullcontext()

    def close(self) -> None:
        """Nothing to free: the engine is the policy's."""

    def _ask_model(self, length: int) -> ParityCheck:
        """The parity check with the log-probs of the trained model."""
        temperature, n = self.policy.sampling.temperature, self.parity_check
        with self.parameter_gather.computing():
            return ParityCheck.of(self.trained, self.adapter, temperature=temperature, prompts=n, length=length)

    # TorchRL's interface of a scheme. There is no transport: the engine is in this process, or
    # weights go with the requests to workers. TorchRL's own public init_on_sender() calls the next
    # method; there is no public one to override.

    def _init_on_sender_impl(self, model_id: str = "policy", context: Any = None, **_: Any) -> None:
        self.model_id, self.context = model_id, context

    def create_transport(self, **_: Any) -> None:
        """There is no transport."""

    def connect(self, *, worker_idx: int | None = None, weights: Any = None) -> None:
        """Sync for the first time; a collector calls it when it is made."""
        del worker_idx
        self.send(weights)
        # As TorchRL's own connect() does; its schemes refuse to send before.
        self.synchronized_on_sender = True


class EngineWeightSync(WeightSync):
    """Sends the weights of a trained model to an engine in this process, such as a
    :class:`~torchrl_llm.modules.VLLMPolicy`.

    Use it as ``Collector(..., weight_sync_schemes={"policy": scheme})`` with
    ``update_policy_weights_()``, as ``torchrl.trainers.UpdateWeights(sender=scheme, ...)``, or call
    it. Each call is one sync: the engine is paused, the weights are loaded, its prefix cache is
    emptied, it resumes under the next ``policy_version``, and a :class:`ParityCheck` compares it
    with the trained model. Turns in flight continue with the new weights; each of their tokens has
    the version it was sampled with.

    During a sync the policy refuses to sample, and after one that failed until another one
    succeeds. If the parity check fails, turns in flight are cancelled, for they may have tokens of
    the wrong weights.

    Methods, of :class:`~torchrl_llm.modules.VLLMPolicy`; other engines take ``"adapter"`` and
    ``"whole"``:

    - ``"adapter"``: the engine serves the LoRA adapter beside the base weights, and only the
      adapter is sent. The base weights are sent with the first sync and after one that failed, if
      they are not quantized.
    - ``"reload"``: all weights, LoRA merged, to an engine in this process.
    - ``"shared_memory"``: all weights, LoRA merged, to an engine in processes of its own on this
      host.
    - ``"nccl"``: all weights, LoRA merged, to an engine on other GPUs; see
      ``modules.vllm.NCCLTransfer``.
    - ``"ipc"``: all weights, LoRA merged, to an engine in a process of its own on the same GPU; see
      ``modules.vllm.IPCTransfer``.

    ``"auto"`` takes ``"nccl"`` or ``"ipc"`` where the engine has been made for it; else
    ``"adapter"`` where the engine can serve it, except on CPUs, where merged weights are served 2.6
    times as fast; else one of the other two.

    On a GPU that trainer and engine share, give ``sleep_level`` and call :meth:`sleep` before the
    trainer works: the engine gives its memory back, and the next sync wakes it, weights first, KV
    cache after.

    Args:
        model: the trained model: a causal language model of transformers, or a ``PeftModel`` around
            one.
        adapter: the trained LoRA adapter; ``None``: the model itself.
        policy: an engine with weights of its own.
        method: how to send, or ``"auto"``.
        parity_check: number of prompts to compare on; 0: no parity check.
        parity_tolerance: in nats; ``None``: 1e-3 for an engine in float32, else 0.1.
        sleep_level: of :meth:`sleep`: 1 keeps the engine's weights in the host's memory, 2 drops
            them (not with ``"adapter"``: the base weights would be lost); 0: :meth:`sleep` is
            refused.

    Attributes:
        method: the method taken.
        parity_gap: of the last sync: largest difference of log-probs, in nats; NaN without a parity
            check, ``None`` before the first sync.
        parameter_gather: how to read weights that are sharded over processes; a trainer that shards
            them sets it.

    Raises:
        ValueError: a method that the set-up does not allow.
        AdapterError: the model has no such adapter.
        WeightSyncError: a sync failed (from a call); the message names the step.

    Examples:
        >>> sync = EngineWeightSync(models.model, models.adapter, policy=policy)  # doctest: +SKIP
        >>> sync()  # doctest: +SKIP
        >>> sync.method  # doctest: +SKIP
        'reload'
    """

    def __init__(
        self,
        model: nn.Module,
        adapter: str | None = None,
        *,
        policy: InferenceEngine,
        method: str = "auto",
        parity_check: int = 2,
        parity_tolerance: float | None = None,
        sleep_level: Literal[0, 1, 2] = 0,
    ) -> None:
        super().__init__(model, adapter, policy=policy, parity_check=parity_check)
        check_adapter(model, adapter)
        unserved = why_not_servable(model, adapter) if adapter else None
        self.method, reason = policy.choose_method(method, adapter=adapter is not None, unserved=unserved)
        if self.method == "adapter" and (adapter is None or sleep_level == 2):
            dropped = "sleep_level=2 drops the base weights, which are not sent; use sleep_level=1"
            problem = "no adapter is trained; give adapter=" if adapter is None else dropped
            raise ValueError(f"EngineWeightSync(method={method!r}): {problem}.")
        logger.info("weight sync by %r: %s", self.method, reason)
        self.sleep_level, self.parity_tolerance = sleep_level, parity_tolerance
        self._base_known = False

    def _sync(self) -> None:
        version = self.policy.policy_version + 1
        self.parity_gap = update_engine(self.policy, version, load=self._load, check=self._check)
        self._base_known = True

    def _check(self) -> float:
        return self._ask_model(self.policy.check_length).check(self.policy, self.parity_tolerance)

    def _load(self) -> None:
        # After a failure the engine's base weights are unknown, so they are sent again.
        known, self._base_known = self._base_known, False
        model: Any = self.trained
        with self.parameter_gather.copying(self.method != "adapter" or not known):
            if self.method != "adapter":
                self.policy.load(MergedTensors(model, self.adapter), method=self.method)
                return
            if self.policy.loads_base and not known and not is_quantized(model):
                self.policy.load(MergedTensors(model), method=self.method)
            tensors = adapter_tensors(model, self.adapter or "")
            self.policy.load(tensors.items(), model.peft_config[self.adapter], method=self.method)

    def sleep(self) -> None:
        """Give the engine's GPU memory to the trainer until the next sync. No turn may be in
        flight."""
        if self.sleep_level == 0:
            raise ValueError("sleep() needs EngineWeightSync(sleep_level=1) or 2, and an engine made with sleep mode.")
        self.policy.sleep(self.sleep_level)

    @contextmanager
    def asleep(self) -> Iterator[None]:
        """See :meth:`WeightSync.asleep`. No turn may be in flight; the engine continues with the
        weights that it has."""
        if self.sleep_level == 0:
            yield
            return
        # Level 1 in any case: level 2 drops the weights, which only a sync brings back.
        self.policy.sleep(1)
        try:
            yield
        finally:
            self.policy.wake_up()
