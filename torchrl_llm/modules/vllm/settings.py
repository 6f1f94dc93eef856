"""The settings of a vLLM engine in a run: how it is made, on which GPUs, with which share of their
memory, and what contradicts them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from torchrl_llm.modules.engine_settings import EngineSettings
from torchrl_llm.modules.sampling import SamplingConfig
from torchrl_llm.modules.vllm.policy import VLLMPolicy
from torchrl_llm.modules.vllm.weights import TRANSFERS
from torchrl_llm.utils.options import ConfigError, Count, PositiveShare

_SETTINGS = (
    *("seed", "max_model_len", "trust_remote_code"),
    *("tensor_parallel_size", "kv_cache_memory_bytes", "enforce_eager", "prefix_caching", "sleep_mode"),
)
"""Settings of the engine by its own names."""

_OWN_GPU, _TRAINERS_GPU = 0.9, 0.4
"""Shares of a GPU's memory: of an engine that has the GPU to itself, and of one beside the trainer,
which needs room for weights, gradients, optimizer and activations."""


@dataclass(kw_only=True)
class VLLMSettings(EngineSettings):
    """An engine of vLLM, which gets the weights after every update. ``None`` takes the default of
    ``torchrl_llm.modules.load_engine``."""

    known_as = "vllm"
    description = "a vLLM engine"
    requires = ("vllm",)
    harmless: ClassVar[Mapping[str, Any]] = dict.fromkeys(("sleep_mode", "engine_process", "offload_base"), False)
    not_sharded: ClassVar[Mapping[str, Any]] = {
        "weight_sync": (TRANSFERS, "another, or DDP"),
        "offload_base": ((True,), "false, or DDP"),
    }
    memory_settings = ("gpu_memory_utilization", "tensor_parallel_size")

    engine_dtype: Literal["auto", "float32", "bfloat16", "float16"] | None = None
    """Of the engine's weights; None takes dtype."""
    tensor_parallel_size: Count | None = None
    """GPUs that share the engine's model. With several training processes each has its engine on
    its own GPU, and this is 1."""
    gpu_memory_utilization: PositiveShare | None = None
    """The engine's share of the memory of its GPUs; None takes 0.4 where the trainer is on the same
    GPU, else 0.9 (on a worker on Ray with a part of a GPU, that part of it)."""
    kv_cache_memory_bytes: Count | None = None
    """Size of the engine's KV cache."""
    enforce_eager: bool | None = None
    """No graph capture in the engine."""
    prefix_caching: bool | None = None
    """The engine keeps the keys and values of earlier turns."""
    engine_process: bool | None = None
    """Run the engine in a process of its own."""
    sleep_mode: bool | None = None
    """The engine gives its GPU memory to the trainer during updates."""
    offload_base: bool | None = None
    """The trainer keeps the frozen base weights of LoRA in the host's memory while the engine
    samples."""
    weight_sync: Literal["adapter", "reload", "shared_memory", "nccl", "ipc"] | None = None
    """How weights get into the engine: "adapter", "reload", "shared_memory", "nccl" (the engine on
    other GPUs) or "ipc" (on the same one; both in a process of its own); None takes the fastest of
    the first three that is correct."""

    def __post_init__(self) -> None:
        if self.weight_sync in ("nccl", "ipc") and self.engine_process is False:
            raise ConfigError(
                f"weight_sync={self.weight_sync!r} is to an engine in a process of its own, and engine_process=False: leave it out."
            )
        if self.weight_sync == "nccl" and self.sleep_mode:
            raise ConfigError(
                "weight_sync='nccl' has the engine on other GPUs, and sleep_mode gives it the trainer's in turns: choose one."
            )

    @property
    def sleeps(self) -> bool:
        return bool(self.sleep_mode)

    @property
    def num_gpus(self) -> int:
        return self.tensor_parallel_size or 1

    def sync_options(self) -> dict[str, Any]:
        # Level 1: level 2 drops the base weights, which a sync of the adapter does not bring back.
        return {"method": self.weight_sync or "auto", "sleep_level": 1 if self.sleeps else 0}

    def problems(self, config: Any) -> Iterator[str]:
        if config.collector == "self_play" and (self.offload_base or self.sleep_mode):
            yield (
                'offload_base and sleep_mode move weights away while the engine samples, and the opponent of collector="self_play" needs '
                "them: leave them out."
            )
        if config.rollouts.staleness and self.sleep_mode:
            yield f"max_staleness={config.rollouts.staleness} samples during updates, and sleep_mode stops the engine for them: choose one."
        if self.weight_sync == "adapter" and not config.weights.lora_r:
            yield "weight_sync='adapter' sends an adapter, and lora_r=0 has none: leave it out."
        if self.offload_base and not config.weights.lora_r:
            yield "offload_base moves the frozen base of LoRA, and lora_r=0 trains all weights: leave it out."
        if self.offload_base and config.model.quantization is not None:
            yield f"quantization={config.model.quantization!r} keeps a part of the base on the GPU, which offload_base would move: choose one."
        if self.offload_base and (config.collector == "ray" or self.weight_sync == "nccl"):
            elsewhere = "collector='ray'" if config.collector == "ray" else "weight_sync='nccl'"
            yield f"offload_base makes room for an engine on the trainer's GPU, and {elsewhere} has it on others: leave it out."
        yield from self._wrong_on_ray(config.rollouts.ray_worker_gpus) if config.collector == "ray" else ()

    def _wrong_on_ray(self, gpus: float | None) -> Iterator[str]:
        size = self.num_gpus
        # With one GPU for each engine, a part of it is what several workers share.
        if gpus and size > 1 and gpus < size:
            yield (
                f"tensor_parallel_size={size} spreads the engine of a worker over {size} GPUs, and ray_worker_gpus={gpus} gives it fewer: set "
                f"ray_worker_gpus to {size}."
            )
        if self.sleep_mode:
            yield "sleep_mode shares a GPU with the trainer, and the engines of collector='ray' have their own: leave it out."
        if self.weight_sync not in (None, "adapter"):
            yield f"weight_sync={self.weight_sync!r} needs the engine here, and collector='ray' has it elsewhere: leave it out."

    def make_policy(
        self, config: Any, path: str, tokenizer: Any, sampling: SamplingConfig, *, device: Any, processes: int = 1
    ) -> VLLMPolicy:
        if self.num_gpus > 1 and processes > 1 and self.weight_sync != "nccl":
            raise ConfigError(
                f"tensor_parallel_size is {self.num_gpus}, and each of {processes} training processes has an engine, on its own GPU: "
                "expected 1, or one process, weight_sync='nccl' (engines on other GPUs), or collector='ray'."
            )
        transfer: Any = self.weight_sync if self.weight_sync in TRANSFERS else None
        return VLLMPolicy(
            path,
            tokenizer,
            sampling,
            dtype=self.weights_dtype(config),
            # A slot has one turn in flight at most.
            max_num_seqs=config.slots,
            max_lora_rank=config.weights.lora_r if self.serves_adapter(config) else 0,
            multiprocess=bool(self.engine_process or transfer),
            weight_transfer=transfer,
            gpu_memory_utilization=self.share(config, device),
            device_ids=self.gpus(device, processes),
            **{name: value for name, value in config.values().items() if name in _SETTINGS and value is not None},
        )

    def offload(self, models: Any) -> Callable[[], AbstractContextManager[None]]:
        return models.offload_base if self.offload_base else super().offload(models)

    def serves_adapter(self, config: Any) -> bool:
        # On CPUs vLLM generates faster with merged weights; its kernels for adapters on GPUs know
        # no float32.
        on_gpu = config.rollouts.ray_worker_gpus if config.collector == "ray" else torch.cuda.is_available()
        wanted = self.weight_sync is None and on_gpu and self.weights_dtype(config) != "float32"
        return config.weights.lora_r > 0 and (self.weight_sync == "adapter" or bool(wanted))

    def weights_dtype(self, config: Any) -> str:
        return self.engine_dtype or config.model.dtype

    def memory(self, config: Any, device: torch.device, card: int | None = None) -> int:
        here = device.type == "cuda" and config.collector != "ray" and self.weight_sync != "nccl"
        return int(self.share(config, device) * (card or torch.cuda.mem_get_info(device)[1])) if here else 0

    def share(self, config: Any, device: torch.device | None) -> float:
        """The engine's share of the memory of each of its GPUs.

        A share that is given counts. Else it is 0.9, or 0.4 where the trainer is on the same GPU; a
        worker of Ray that asks for a part of a GPU takes that part of 0.9.

        Args:
            config: the settings of the run.
            device: of the trainer, if it is in this process; ``None`` on a worker of Ray.

        Examples:
            >>> from torchrl_llm.runs import RayRollouts, RunSettings
            >>> vllm, ray = VLLMSettings(), RunSettings(rollouts=RayRollouts(ray_worker_gpus=0.5))
            >>> vllm.share(RunSettings(), torch.device("cuda", 1)), vllm.share(RunSettings(), torch.device("cpu"))
            (0.4, 0.9)
            >>> vllm.share(ray, None)
            0.45
        """
        if self.gpu_memory_utilization is not None:
            return self.gpu_memory_utilization
        if device is None:
            return _OWN_GPU * min(1.0, config.values().get("ray_worker_gpus") or 1.0)
        return _TRAINERS_GPU if device.type == "cuda" and self.weight_sync != "nccl" else _OWN_GPU

    def gpus(self, device: torch.device | None, processes: int = 1) -> list[int] | None:
        """The GPUs of the engine, as PyTorch numbers them in this process; ``None`` leaves the
        choice to vLLM, which begins with 0.

        The first is the trainer's: each training process has its engine on its own GPU. With
        ``weight_sync="nccl"`` engines are on the GPUs after all trainers'.

        Args:
            device: of the trainer, if it is in this process; ``None`` on a worker of Ray, which
                shows it no other GPUs.
            processes: training processes, with ``"nccl"`` all on this host.

        Examples:
            >>> VLLMSettings().gpus(torch.device("cuda", 3))
            [3]
            >>> VLLMSettings(tensor_parallel_size=2).gpus(torch.device("cuda", 0))
            [0, 1]
            >>> VLLMSettings(weight_sync="nccl").gpus(torch.device("cuda", 1), processes=2)
            [3]
        """
        if device is None or device.type != "cuda":
            return None
        index, size = device.index or 0, self.num_gpus
        first = processes + index * size if self.weight_sync == "nccl" else index
        return [*range(first, first + size)]
