"""Device and precision that a run trains with: :func:`make_accelerator`, :func:`make_numerics`."""

from __future__ import annotations

import os

import torch
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState, is_initialized

from torchrl_llm.modules.kernels import Numerics
from torchrl_llm.runs.config import ConfigError, RunSettings
from torchrl_llm.runs.sources import load_model_config

_AUTOCAST = {"bfloat16": "bf16", "float16": "fp16"}
"""A dtype's name in accelerate."""

_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"


def make_accelerator(config: RunSettings) -> Accelerator:
    """accelerate with the precision of ``config``, on its device.

    Raises:
        ConfigError: accelerate chose another device than ``config.model.device``; or its device has
            no such precision; or an earlier run of this process had another one.
    """
    device = choose_device(config)
    precision = mixed_precision(config, device)
    # accelerate takes it, computes in float32, and says that it is fp16
    if precision == "fp16" and device.type == "cpu":
        given = "dtype" if config.model.mixed_precision is None else "mixed_precision"
        raise ConfigError(
            f"{given}={getattr(config.model, given)!r} asks for mixed precision in float16, which accelerate does not have on a CPU: set "
            'mixed_precision to "bf16" or "no".'
        )
    # accelerate keeps the precision of a process's first Accelerator, and refuses another one with
    # a sentence of its own.
    if is_initialized() and AcceleratorState().mixed_precision != precision:
        raise ConfigError(
            f"The run computes with mixed_precision={precision!r} (dtype={config.model.dtype!r}), but an earlier run of this process with "
            f"{AcceleratorState().mixed_precision!r}, and accelerate keeps one for a process: start this run in another process, or "
            "give it that mixed_precision."
        )
    return Accelerator(mixed_precision=precision, cpu=config.model.device == "cpu")


def choose_device(config: RunSettings) -> torch.device:
    """The device that accelerate chooses in this process, for models that only sample too: no
    precision is fixed.

    Raises:
        ConfigError: it is another one than ``config.model.device``; or Apple's GPU (mps), which has
            no float64.
    """
    # accelerate takes no device, only the wish for the CPU.
    chosen = PartialState(cpu=config.model.device == "cpu").device
    if config.model.device is not None:
        try:
            wanted = torch.device(config.model.device)
        except RuntimeError as error:
            raise ConfigError(
                f"device is {config.model.device!r}: expected cpu or cuda, or leave it out. ({error})"
            ) from error
        _check_supported(wanted)
        if wanted.type == "cuda" and not torch.cuda.is_available():
            raise ConfigError(
                f"device is {config.model.device!r}, but PyTorch {torch.__version__} finds no GPU: leave device out to compute on a CPU; on a "
                "machine with a GPU, look at its driver, at CUDA_VISIBLE_DEVICES and at PyTorch's build (nvidia-smi, torch.version.cuda)."
            )
        if wanted.type != chosen.type or wanted.index not in (None, chosen.index):
            raise ConfigError(
                f"device is {config.model.device!r}, but accelerate chose {str(chosen)!r}, now or for an earlier run of this process, which has "
                "one device for all: leave device out, and say which GPU is meant with CUDA_VISIBLE_DEVICES; or start another process."
            )
    _check_supported(chosen)
    return chosen


def _check_supported(device: torch.device) -> None:
    # Noise, sums and norms are computed in float64, and PyTorch's errors about that name no
    # setting.
    if device.type == "mps":
        raise ConfigError(
            "The device is 'mps', Apple's GPU, which is not supported: it has no float64. Compute on the CPU (device: cpu, or --device cpu), "
            "or on a machine with a GPU of NVIDIA's."
        )


def make_numerics(config: RunSettings, device: torch.device) -> Numerics:
    """The numerics of a run's settings: on CUDA float32 products are of "high" precision, unless
    the settings say otherwise.

    Raises:
        ConfigError: ``deterministic`` on CUDA without the environment variable that cuBLAS needs
            for it; or in a run that samples during updates.
    """
    if config.model.deterministic and config.rollouts.staleness:
        raise ConfigError(
            f"deterministic=True with max_staleness={config.rollouts.staleness}, which samples during updates, so that no two runs are equal: "
            "leave one of them out."
        )
    on_gpu = device.type == "cuda"
    if config.model.deterministic and on_gpu and os.environ.get(_CUBLAS) not in (":4096:8", ":16:8"):
        raise ConfigError(
            f"deterministic=True on {device}: cuBLAS repeats its results only if {_CUBLAS} was set before CUDA was first used. Start "
            f"the run with {_CUBLAS}=:4096:8."
        )
    precision = config.model.float32_matmul_precision or ("high" if on_gpu else None)
    return Numerics(float32_matmul_precision=precision, deterministic=config.model.deterministic)


def mixed_precision(config: RunSettings, device: torch.device, checkpoint: torch.dtype | None = None) -> str:
    """The autocast of the forward passes of training, as accelerate names it.

    Where all weights train, they are kept in float32
    (:func:`~torchrl_llm.modules.load_actor_critic`), and ``config.model.dtype`` says in what they
    compute. Adapters on a base in bfloat16 are float32. Without autocast so are all their products,
    and the units of a GPU for bfloat16, which are many times as fast, stand idle.

    Args:
        config: the settings.
        device: of training.
        checkpoint: the dtype of the model's files; default: it is looked up if it matters.
    """
    if config.model.mixed_precision is not None:
        return str(config.model.mixed_precision)
    if config.weights.lora_r and device.type != "cuda":
        return "no"
    dtype: object = config.model.dtype
    if dtype == "auto" and config.model.quantization is not None:
        dtype = "bfloat16"  # what 4 bits are computed in
    elif dtype == "auto":
        dtype = checkpoint or load_model_config(config).dtype
    found = _AUTOCAST.get(str(dtype).removeprefix("torch."), "no")
    # float16 would need a gradient scaler.
    return "no" if config.weights.lora_r and found == "fp16" else found
