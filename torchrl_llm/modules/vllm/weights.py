"""Loading named tensors into a ``vllm.LLM``: one function for each method.

:func:`load_adapter`, :func:`reload`, :func:`reload_shared` and :class:`WeightTransfer` change the
engine's weights and nothing else. They run inside :func:`paused`, so that no token is sampled half
way and nothing computed with the old weights is used again. :mod:`torchrl_llm.weight_update` calls
them, :mod:`torchrl_llm.modules.merging` makes the tensors.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from peft import LoraConfig
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from torchrl_llm.modules.engine import NamedTensors, WeightSyncError, sync_step
from torchrl_llm.modules.vllm.start import ALLOW_PICKLES, environment, is_in_process, release_memory

METHODS = ("adapter", "reload", "shared_memory", "nccl", "ipc")
TRANSFERS = ("nccl", "ipc")
"""Methods by vLLM's own transfer API, which an engine is made for."""
_ADAPTER_ID = 1
"""One id for all versions: turns in flight continue with the new tensors, and no old adapter stays
in the engine."""
_SHARED_MEMORY = Path("/dev/shm")
_loaded = count(1)  # adapters of this process


def choose_method(config: Any, *, in_process: bool, adapter: bool, unserved: str | None) -> tuple[str, str]:
    """The fastest of :data:`METHODS` that is correct, and why.

    Args:
        config: the engine's ``vllm_config``.
        in_process: whether the engine is in this process.
        adapter: whether a LoRA adapter is trained.
        unserved: what of its settings vLLM cannot serve; ``None``: nothing.
    """
    whole = "reload" if in_process else "shared_memory"
    place = "is in this process" if in_process else "has processes of its own"
    transfer = _transfer_of(config)
    if transfer in TRANSFERS:
        return transfer, "the engine has been made with a weight transfer configuration"
    if not adapter:
        return whole, f"the whole model is trained, and the engine {place}"
    if config.device_config.device_type == "cpu":
        # Measured on CPUs: an adapter is served 2.6 times slower, merging and reloading a small
        # model takes 20 ms.
        return whole, f"on CPUs merged weights are served faster than an adapter, and the engine {place}"
    if config.lora_config is None:
        return whole, f"the engine was made without LoRA, and {place}"
    if unserved:
        return whole, f"vLLM cannot serve an adapter with {unserved}, and the engine {place}"
    return "adapter", f"the engine serves LoRA adapters, and {place}"


@contextmanager
def paused(llm: Any, version: int, *, asleep: bool = False) -> Iterator[None]:
    """Pause an engine while its weights change. Cached keys and values of the old weights are
    dropped afterwards.

    Turns in flight keep the tokens that they have, stamped with the old version; their context is
    encoded again, and later tokens carry ``version``. After an error the engine stays paused, so
    that nothing is sampled from half-changed weights; it resumes at the end of the next ``paused``
    that succeeds.

    Args:
        llm: a ``vllm.LLM`` that no other thread uses meanwhile.
        version: the ``policy_version`` of tokens sampled from here on.
        asleep: the engine sleeps: its weights wake up before, its KV cache after the change, so
            that the two fit into memory beside what the trainer still holds.

    Raises:
        WeightSyncError: the engine cannot be paused or resumed, or its prefix cache was not
            emptied.
    """
    if asleep:
        with sync_step("waking the engine's weights"):
            wake(llm, ["weights"])
    with sync_step("pausing the engine"):
        # Level 0 pauses scheduling alone; by default ("abort") the turns in flight would be lost.
        llm.sleep(0, mode="keep")
    yield
    if asleep:
        with sync_step("waking the engine's KV cache"):
            wake(llm, ["kv_cache"])
    # vLLM keeps prefixes over a change of weights: 0.5 to 1.6 nats off.
    reset_prefix_cache(llm)
    with sync_step("resuming the engine"):
        # Before scheduling resumes, so that the first token carries the new version.
        llm.llm_engine.set_weight_version(str(version))
        llm.wake_up(["scheduling"])


def wake(llm: Any, tags: list[str] | None = None) -> None:
    """Wake an engine that sleeps, after PyTorch has given back the memory that it keeps for this
    process.

    PyTorch keeps what the update's activations took, for later tensors. The engine allocates from
    the driver, so it would find that memory taken. vLLM gives back what its own process keeps, and
    the engine may have another one.

    Args:
        llm: a ``vllm.LLM`` that sleeps.
        tags: of ``"weights"`` and ``"kv_cache"``, what wakes; ``None``: both.
    """
    release_memory()
    llm.wake_up(tags)


def reset_prefix_cache(llm: Any) -> None:
    """Drop all cached keys and values, also of turns in flight.

    Raises:
        WeightSyncError: the engine reports that it did not.
    """
    with sync_step("emptying the prefix cache"):
        # Without this argument vLLM does nothing while requests run, and returns False.
        if not llm.reset_prefix_cache(reset_running_requests=True):
            raise WeightSyncError(
                "The engine did not empty its prefix cache: contexts computed with the old weights would be used again."
            )


def load_adapter(llm: Any, tensors: Mapping[str, Tensor], config: LoraConfig) -> Any:
    """Replace the LoRA adapter that an engine serves, through files in shared memory.

    vLLM reads adapters from a directory. Handing it the tensors of an engine in this process saves
    10 ms a sync, and takes vLLM's private functions.

    Args:
        llm: a ``vllm.LLM`` made with ``enable_lora=True``.
        tensors: as :func:`~torchrl_llm.modules.merging.adapter_tensors` gives them.
        config: the adapter's settings.

    Returns:
        The ``LoRARequest`` of later turns. Its name is new each time: the prefix cache goes by
        names.

    Raises:
        WeightSyncError: the engine does not serve such an adapter.
    """
    from vllm.lora.request import LoRARequest

    with sync_step("loading the adapter"):
        # Files also keep the live adapter safe: vLLM scales the lora_B that it is given in place.
        copies = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
        with shared_file(copies, "adapter_model.safetensors") as file:
            # load_inplace: otherwise vLLM keeps the adapter that it has under this id.
            request = LoRARequest(f"adapter-{next(_loaded)}", _ADAPTER_ID, str(file.parent), load_inplace=True)
            config.save_pretrained(str(file.parent))
            llm.llm_engine.add_lora(request)
    # Without load_inplace: every turn would read the files again, which are removed by now.
    return LoRARequest(request.lora_name, _ADAPTER_ID, request.lora_path)


# The whole model.


def reload(llm: Any, tensors: NamedTensors) -> None:
    """Replace all weights of an engine in this process.

    Args:
        llm: a ``vllm.LLM``; adapters that it serves are dropped.
        tensors: names and tensors in transformers' format, ``lm_head.weight`` included also where
            it is tied.

    Raises:
        WeightSyncError: also where ``tensors`` raises half way.
    """
    last = "the first tensor"

    def noted() -> Iterator[tuple[str, Tensor]]:
        nonlocal last
        for name, tensor in tensors:
            last = name
            yield name, tensor

    try:
        llm.collective_rpc(_drop_half_loaded)
        # Not model.load_weights, which fails on CPUs: weights are packed for the kernels when they
        # are first loaded.
        llm.collective_rpc("reload_weights", kwargs={"weights_iterator": noted()})
    except Exception as error:
        raise WeightSyncError(
            f"The weight sync failed in reloading the weights, at or after {last!r}: {type(error).__name__}: {error}"
        ) from error


def _drop_half_loaded(worker: Any) -> None:
    """Runs in the worker: after a reload that stopped half way, vLLM would mix its tensors with
    the ones of the next."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    for layer in worker.get_model().modules():
        info = get_layerwise_info(layer)
        if info.can_load():
            info.loaded_weights.clear()
            info.load_numel = 0


def reload_shared(llm: Any, tensors: NamedTensors) -> None:
    """:func:`reload` for an engine in processes of its own: through a file in shared memory,
    removed in any case.

    The host must have room for a copy of the weights. All are copied before the engine changes, so
    only weights that do not fit the engine can stop it half way; it must be restarted then.
    """
    with sync_step("reloading the weights through shared memory"):
        # Cloned: safetensors refuses tensors that share memory, such as a tied head and its
        # embedding.
        copies = shared_file({name: tensor.cpu().clone() for name, tensor in tensors}, "model.safetensors")
        # Not as arguments of an RPC: tensors sent to an engine in another process fail there, and
        # then end it.
        with copies as file:
            llm.collective_rpc("reload_weights", kwargs={"weights_path": str(file.parent)})


@contextmanager
def shared_file(tensors: dict[str, Tensor], name: str) -> Iterator[Path]:
    """The file ``name`` with ``tensors``, alone in a new directory that is removed after.

    It lies in shared memory, or, where that has no room (a container has 64 MiB by default), in the
    usual place for temporary files.

    Raises:
        WeightSyncError: neither has room.
    """
    with ExitStack() as directories:
        file = _write(tensors, name, directories)
        del tensors  # the engine reads the file: the host need not hold both
        yield file


def _write(tensors: dict[str, Tensor], name: str, directories: ExitStack) -> Path:
    size, found = sum(tensor.nbytes for tensor in tensors.values()), []
    for folder in filter(Path.is_dir, (_SHARED_MEMORY, Path(tempfile.gettempdir()))):
        free = shutil.disk_usage(folder).free
        found.append(f"{folder} has {_megabytes(free)} free")
        if free > size:
            path = directories.enter_context(tempfile.TemporaryDirectory(prefix="torchrl_llm-", dir=folder))
            file = Path(path) / name
            try:
                save_file(tensors, file)
                return file
            # Another process, such as another rank, may have taken the room meanwhile.
            except (OSError, SafetensorError) as error:
                found[-1] += f", but writing failed ({error})"
                file.unlink(missing_ok=True)
    raise WeightSyncError(
        f"The engine reads the weights from a file of {_megabytes(size)}, and there is no room for it: {'; '.join(found)}. Give the "
        "container more shared memory (docker run --shm-size=...), or set TMPDIR to a folder with room."
    )


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.0f} MB"


# From GPU to GPU.


class WeightTransfer:
    """All weights from this process's GPU to the engine's, by vLLM's own transfer API. Subclasses
    say how.

    Args:
        llm: a ``vllm.LLM``.
        info: of vLLM's trainer; its class tells vLLM the way.
    """

    def __init__(self, llm: Any, info: Any) -> None:
        from vllm.distributed.weight_transfer import WeightTransferTrainerFactory

        # One source for all sends: vLLM keeps the object that it is initialized with.
        self._source = _make_source()
        with sync_step("connecting to the engine's GPUs"):
            self._engine = WeightTransferTrainerFactory.trainer_init(info, client=_Client(llm), source=self._source)

    def send(self, tensors: NamedTensors) -> None:
        """Replace all weights of the engine by ``tensors``, which are on the GPU and read twice:
        names and shapes first."""
        self._source.tensors = tensors
        with sync_step("sending the weights to the engine's GPUs"):
            self._engine.send_weights()

    def close(self) -> None:
        """Part from the engine."""
        self._engine.shutdown()


class NCCLTransfer(WeightTransfer):
    """By NCCL, to an engine on other GPUs than this process's: NCCL knows a GPU once.

    The engine must have been made with ``weight_transfer="nccl"`` (:func:`load_engine`). This
    process is rank 0, the engine's workers come after it.

    Args:
        llm: a ``vllm.LLM``.
        address, port: where the ranks meet; a port of ``None`` is a free one.

    Raises:
        WeightSyncError: the engine has no such configuration, or the ranks do not meet.
    """

    def __init__(self, llm: Any, address: str, port: int | None = None) -> None:
        _check_transfer(llm, "nccl")
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo
        from vllm.utils.network_utils import get_open_port

        parallel = llm.llm_engine.vllm_config.parallel_config
        ranks = 1 + parallel.world_size * parallel.data_parallel_size
        super().__init__(llm, NCCLTrainerInitInfo(address, port or get_open_port(), ranks, rank=0))


class IPCTransfer(WeightTransfer):
    """By CUDA IPC, to an engine in a process of its own on this process's GPU, through a buffer
    that both have open.

    The buffer holds the largest of the weights. The engine must have been made with
    ``weight_transfer="ipc"`` (:func:`load_engine`).

    Args:
        llm: a ``vllm.LLM``.

    Raises:
        WeightSyncError: the engine has no such configuration, or is in this process.
    """

    def __init__(self, llm: Any) -> None:
        _check_transfer(llm, "ipc")
        if is_in_process(llm):
            raise WeightSyncError(
                "Weight sync by 'ipc' with an engine in this process, where CUDA opens no handle twice: make the engine with "
                "multiprocess=True, or use 'reload', which copies on the GPU."
            )
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

        super().__init__(llm, IPCTrainerInitInfo(packed=True, rank=0))

    def send(self, tensors: NamedTensors) -> None:
        """See :meth:`WeightTransfer.send`."""
        # vLLM's own size, 1 GiB, is less than the embeddings of a 7B model with 152 thousand ids,
        # which would be refused.
        self._engine.packed_buffer_size_bytes = max(tensor.nbytes for _, tensor in tensors)
        with environment(ALLOW_PICKLES):
            super().send(tensors)


def make_transfer(llm: Any, method: str, address: str) -> WeightTransfer:
    """Connect by one of :data:`TRANSFERS`; ``address`` is of this host."""
    return NCCLTransfer(llm, address) if method == "nccl" else IPCTransfer(llm)


def _transfer_of(config: Any) -> str:
    return config.weight_transfer_config.backend if config.weight_transfer_config is not None else "none"


def _check_transfer(llm: Any, wanted: str) -> None:
    """Raise unless the engine was made for this way."""
    backend = _transfer_of(llm.llm_engine.vllm_config)
    if backend != wanted:
        raise WeightSyncError(
            f"The engine's weight transfer backend is {backend!r}; expected {wanted!r}. Make the engine with "
            f"weight_transfer={wanted!r} (load_engine)."
        )


class _Client:
    """vLLM's ``VLLMWeightSyncClient`` for a ``vllm.LLM`` in this process."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self.start_weight_update, self.finish_weight_update = llm.start_weight_update, llm.finish_weight_update

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._llm.init_weight_transfer_engine({"init_info": init_info})

    def update_weights(self, update_info: Any) -> None:
        self._llm.update_weights({"update_info": update_info})


def _make_source() -> Any:
    """A ``WeightSource`` of its attribute ``tensors``. The class is made in a function: vLLM is
    imported only when used."""
    from vllm.distributed.weight_transfer import ParamMeta, WeightSource

    class Source(WeightSource):
        tensors: NamedTensors = ()

        def metadata(self) -> list[Any]:
            return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.tensors]

        def __iter__(self) -> Iterator[tuple[str, Tensor]]:
            return iter(self.tensors)

    return Source()
