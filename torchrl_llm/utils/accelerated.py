"""What accelerate was told, checked and carried out: devices, accumulation, FSDP's settings; errors
for other processes."""

from __future__ import annotations

import pickle

import torch
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin, parse_flag_from_env
from torch import nn
from torch.distributed import fsdp

from torchrl_llm.utils.options import ConfigError


def place(accelerator: Accelerator, *modules: nn.Module) -> None:
    """Move ``modules`` to accelerate's device, in place: optimizers and policies keep their
    parameters.

    Raises:
        ConfigError: weights are elsewhere and are not to be moved: accelerate was made with
            ``device_placement=False``, or a ``device_map`` has spread them over devices; or there
            are none yet (PyTorch's meta device).

    Examples:
        >>> place(Accelerator(cpu=True), nn.Linear(2, 2, device="meta"))
        Traceback (most recent call last):
            ...
        torchrl_llm.utils.options.ConfigError: Weights are on meta, but the trainer's rows are on cpu. ...
    """
    device = device_of(accelerator)
    found = {each.device for module in modules for each in (*module.parameters(), *module.buffers())} - {device}
    fixed = not accelerator.device_placement or any(accelerator.verify_device_map(each) for each in modules)
    if found and (fixed or torch.device("meta") in found):
        raise ConfigError(
            f"Weights are on {' and '.join(sorted(map(str, found)))}, but the trainer's rows are on {device}. Load all models there "
            f'(load_actor_critic(device="{device}"), no device_map), or give the trainer an accelerator of their device: '
            "LLMTrainer(accelerator=Accelerator(cpu=True)) trains on the CPU."
        )
    for module in modules:
        module.to(device)


def device_of(accelerator: Accelerator) -> torch.device:
    """accelerate's device with its index: ``cuda:0`` where it says ``cuda``."""
    return torch.empty(0, device=accelerator.device).device


def check_accumulation(accelerator: Accelerator) -> None:
    """Refuse gradient accumulation: ``Accelerator.backward`` divides by its steps, and losses here
    are sums that add up.

    accelerate keeps the number for the whole process, so that any ``Accelerator`` made later
    changes it.

    Raises:
        ConfigError: the number is not 1.
    """
    steps = accelerator.gradient_accumulation_steps
    if steps != 1:
        raise ConfigError(
            f"accelerate has gradient_accumulation_steps={steps} (an argument, a plugin, or the environment variable "
            f"ACCELERATE_GRADIENT_ACCUMULATION_STEPS), which would divide every gradient by {steps}. Leave it at 1: "
            "minibatch_size says how many episodes an optimizer step has, and max_tokens how many tokens a backward pass."
        )


def picklable(error: Exception) -> Exception:
    """``error``, or, where another process could not read it, a ``RuntimeError`` with its text.

    Examples:
        >>> class Odd(Exception):
        ...     def __init__(self, code, why):
        ...         super().__init__(f"{code}: {why}")
        >>> picklable(Odd(7, "no room")), picklable(OSError("no room"))
        (RuntimeError('Odd: 7: no room'), OSError('no room'))
    """
    try:
        pickle.loads(pickle.dumps(error))
    # Any error: pickle runs the code of the error's class.
    except Exception:  # noqa: BLE001
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def check_plugin(plugin: FullyShardedDataParallelPlugin) -> None:
    """Refuse settings of accelerate that would be ignored or do harm.

    Raises:
        ConfigError: names the setting and what to use instead.
    """
    instead = {
        "version": (plugin.fsdp_version != 2, "2"),
        "offload_params": (isinstance(plugin.cpu_offload, fsdp.CPUOffloadPolicy), "false"),
        "cpu_ram_efficient_loading": (plugin.cpu_ram_efficient_loading, "false: every process reads the weights"),
        "activation_checkpointing": (plugin.activation_checkpointing, "false: the run has gradient_checkpointing"),
    }
    for name, (refused, expected) in instead.items():
        if refused:
            raise ConfigError(f"accelerate's fsdp_{name} is not supported as given; expected {expected}.")


def fsdp_plugin(accelerator: Accelerator) -> FullyShardedDataParallelPlugin | None:
    """accelerate's settings for FSDP, if it was started with any."""
    # accelerate sets the attribute on GPUs only
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is None and parse_flag_from_env("ACCELERATE_USE_FSDP"):
        plugin = FullyShardedDataParallelPlugin()
        if accelerator.mixed_precision != "no":
            plugin.set_mixed_precision(accelerator.mixed_precision)
    return plugin


def lowered_loss_scale(accelerator: Accelerator) -> float | None:
    """The loss scale of float16 after it was lowered for a step that is skipped; ``None``: it
    cannot be the cause.

    Only a scale above 1 can: without any scale, smaller gradients are lost and not infinite.
    """
    scaler = accelerator.scaler
    if scaler is None:
        return None
    before = scaler.get_scale()
    # In place of scaler.step(), which would skip the step too, but takes one whose gradient is
    # finite and too large for a norm.
    scaler.update()
    after = scaler.get_scale()
    return after if 1.0 <= after < before else None
