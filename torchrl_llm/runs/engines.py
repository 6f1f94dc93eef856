"""The engine of a run, in this process or on a worker; of vLLM's which GPUs it takes, and which
share of their memory."""

from __future__ import annotations

from typing import Any

import torch

from torchrl_llm.modules import SamplingConfig, TurnPolicy, VLLMPolicy
from torchrl_llm.modules.vllm.weights import TRANSFERS
from torchrl_llm.runs.config import ConfigError, RunSettings
from torchrl_llm.runs.settings import CustomSettings, RayRollouts, VLLMSettings
from torchrl_llm.runs.sources import model_path
from torchrl_llm.trainers.distributed import Distributed
from torchrl_llm.utils.named import find_named, make_named

_SETTINGS = (
    *("seed", "max_model_len", "trust_remote_code"),
    *("tensor_parallel_size", "kv_cache_memory_bytes", "enforce_eager", "prefix_caching", "sleep_mode"),
)
"""Settings of vLLM's engine by its own names."""

_OWN_GPU, _TRAINERS_GPU = 0.9, 0.4
"""Shares of a GPU's memory: of an engine that has the GPU to itself, and of one beside the trainer,
which needs room for weights, gradients, optimizer and activations."""


def start_engine(
    config: RunSettings, tokenizer: Any, sampling: SamplingConfig, distributed: Distributed, device: torch.device
) -> TurnPolicy | None:
    """The engine of this process; ``None`` where there is none.

    It starts before the trainer's model is loaded: vLLM asks for its whole share at once, and
    measures on an empty GPU what it needs itself. With ``sleep_mode`` it sleeps until the first
    weight sync.

    Args:
        device: of model and training.

    Raises:
        ConfigError: several processes, each with an engine on several GPUs.
    """
    if not config.engine.owns_weights or config.collector == "ray":
        return None
    size = engine_size(config)
    if size > 1 and distributed.world_size > 1 and vllm_settings(config).weight_sync != "nccl":
        raise ConfigError(
            f"tensor_parallel_size is {size}, and each of {distributed.world_size} training processes has an engine, on its own GPU: "
            "expected 1, or one process, weight_sync='nccl' (engines on other GPUs), or collector='ray'."
        )
    engine = make_engine(config, tokenizer, sampling, device=device, processes=distributed.world_size)
    if config.engine.sleeps:
        engine.sleep(1)
    return engine


def vllm_settings(config: RunSettings) -> VLLMSettings:
    """The settings of vLLM of a run that samples with it."""
    if not isinstance(config.engine, VLLMSettings):
        raise TypeError(f"policy is {config.policy!r}; expected 'vllm'.")
    return config.engine


def engine_size(config: RunSettings) -> int:
    """The number of GPUs of an engine, as far as it is known."""
    return (isinstance(config.engine, VLLMSettings) and config.engine.tensor_parallel_size) or 1


def worker_gpus(config: RunSettings) -> float | None:
    """The GPUs of a worker on Ray."""
    return config.rollouts.ray_worker_gpus if isinstance(config.rollouts, RayRollouts) else None


def make_engine(
    config: RunSettings, tokenizer: Any, sampling: SamplingConfig, *, device: torch.device | None, processes: int = 1
) -> TurnPolicy:
    """An engine.

    Args:
        device: of the trainer, if it is in this process; ``None`` on a worker of Ray.
        processes: training processes.

    Raises:
        ConfigError: ``engine_class`` cannot be imported, or makes no policy with weights of its
            own.
    """
    if isinstance(config.engine, CustomSettings):
        return _custom_engine(config.engine, config, tokenizer, sampling)
    settings = vllm_settings(config)
    transfer: Any = settings.weight_sync if settings.weight_sync in TRANSFERS else None
    given = config.values()
    options = {name: value for name in _SETTINGS if (value := given[name]) is not None}
    return VLLMPolicy(
        model_path(config),
        tokenizer,
        sampling,
        dtype=settings.engine_dtype or config.model.dtype,
        # A slot has one turn in flight at most.
        max_num_seqs=config.slots,
        max_lora_rank=config.weights.lora_r if serves_adapter(config) else 0,
        multiprocess=bool(settings.engine_process or transfer),
        weight_transfer=transfer,
        gpu_memory_utilization=engine_share(config, device),
        device_ids=engine_gpus(config, device, processes),
        **options,
    )


def _custom_engine(
    settings: CustomSettings, config: RunSettings, tokenizer: Any, sampling: SamplingConfig
) -> TurnPolicy:
    name = str(settings.engine_class)
    make = find_named("engine_class", name, "a TurnPolicy, or a function that returns one")
    given = (model_path(config), tokenizer, sampling)
    engine = make_named("engine_class", name, make, *given, seed=config.trainer.seed, **settings.engine_options)
    if not (isinstance(engine, TurnPolicy) and engine.owns_weights):
        raise ConfigError(
            f"engine_class={name!r} made a {type(engine).__name__}; expected a TurnPolicy with owns_weights = True."
        )
    return engine


def engine_share(config: RunSettings, device: torch.device | None) -> float:
    """The engine's share of the memory of each of its GPUs.

    A share that is given counts. Else it is 0.9, or 0.4 where the trainer is on the same GPU; a
    worker of Ray that asks for a part of a GPU takes that part of 0.9.

    Args:
        device: of the trainer, if it is in this process; ``None`` on a worker of Ray.

    Examples:
        >>> config = RunSettings.from_values(policy="vllm")
        >>> engine_share(config, torch.device("cuda", 1)), engine_share(config, torch.device("cpu"))
        (0.4, 0.9)
        >>> engine_share(RunSettings.from_values(policy="vllm", collector="ray", ray_worker_gpus=0.5), None)
        0.45
    """
    settings = vllm_settings(config)
    if settings.gpu_memory_utilization is not None:
        return settings.gpu_memory_utilization
    if device is None:
        return _OWN_GPU * min(1.0, worker_gpus(config) or 1.0)
    return _TRAINERS_GPU if device.type == "cuda" and settings.weight_sync != "nccl" else _OWN_GPU


def engine_gpus(config: RunSettings, device: torch.device | None, processes: int = 1) -> list[int] | None:
    """The GPUs of the engine, as PyTorch numbers them in this process; ``None`` leaves the choice
    to vLLM, which begins with 0.

    The first is the trainer's: each training process has its engine on its own GPU. With
    ``weight_sync="nccl"`` engines are on the GPUs after all trainers'.

    Args:
        device: of the trainer, if it is in this process; ``None`` on a worker of Ray, which shows
            it no other GPUs.
        processes: training processes, with ``"nccl"`` all on this host.

    Examples:
        >>> engine_gpus(RunSettings.from_values(policy="vllm"), torch.device("cuda", 3))
        [3]
        >>> engine_gpus(RunSettings.from_values(policy="vllm", tensor_parallel_size=2), torch.device("cuda", 0))
        [0, 1]
        >>> engine_gpus(RunSettings.from_values(policy="vllm", weight_sync="nccl"), torch.device("cuda", 1), processes=2)
        [3]
    """
    if device is None or device.type != "cuda":
        return None
    settings = vllm_settings(config)
    first, size = device.index or 0, settings.tensor_parallel_size or 1
    if settings.weight_sync == "nccl":
        first = processes + first * size
    return [*range(first, first + size)]


def serves_adapter(config: RunSettings) -> bool:
    """Whether the engine serves the adapter beside the base model; one of one's own on a worker
    gets whole weights."""
    if isinstance(config.engine, CustomSettings):
        return False
    # On CPUs vLLM generates faster with merged weights; its kernels for adapters on GPUs know no
    # float32.
    settings = vllm_settings(config)
    on_gpu = bool(worker_gpus(config)) if config.collector == "ray" else torch.cuda.is_available()
    wanted = on_gpu and (settings.engine_dtype or config.model.dtype) != "float32"
    return config.weights.lora_r > 0 and (
        settings.weight_sync == "adapter" or (settings.weight_sync is None and wanted)
    )
