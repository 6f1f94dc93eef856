"""What a run is, for its report: :func:`run_info`, the content of ``run.json``."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from torchrl_llm.options import options_of
from torchrl_llm.trainers import settings
from torchrl_llm.trainers.checkpoint_parts import environment
from torchrl_llm.trainers.config import RunConfig, shown_default
from torchrl_llm.trainers.loss_settings import LOSSES
from torchrl_llm.trainers.settings import names_of


def run_info(config: RunConfig) -> dict[str, Any]:
    """When and where a run was started (or resumed), with which versions, and its settings.

    Returns:
        What JSON has: ``"started"``, ``"title"``, ``"settings"`` (name -> value as text, but for those of outputs and those that
        have no effect), ``"changed"`` (those that are not the defaults: name -> value and default as text),
        ``"seed"``, ``"environment"`` (versions, threads, revision) and ``"machine"``.

    Examples:
        >>> run_info(RunConfig(seed=3, batch_size=8))["changed"]
        {'batch_size': ['8', '32'], 'seed': ['3', '0']}
        >>> run_info(RunConfig(algo="GRPO", group_size=4))["settings"]["gamma"]
        '1.0'
    """
    options, outputs = options_of(RunConfig), names_of(settings.OutputConfig)
    values = {name: value for name, value in sorted(vars(config).items()) if name not in outputs}
    defaults = {name: shown_default(name, config.algo) for name in values}
    # The settings have None for an option of the loss that is not given.
    shown = {name: defaults[name] if value == options[name].default else str(value) for name, value in values.items()}
    changed = {name: [value, defaults[name]] for name, value in shown.items() if value != defaults[name]}
    rules = (*RunConfig.idle, *LOSSES[config.algo].idle)
    met = [rule for rule in rules if all(shown.get(key, "") in [*map(str, under)] for key, under in rule.under.items())]
    idle = {name for rule in met for name in rule.names}
    names = config.env_name if isinstance(config.env_name, str) else ", ".join(config.env_name)
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "title": f"{config.algo} on {names}",
        "model": config.model_path,
        "seed": config.seed,
        "settings": {name: value for name, value in shown.items() if value and name not in idle},
        "changed": changed,
        "environment": environment(),
        "machine": machine(),
    }


def machine() -> dict[str, str]:
    """The machine's system, processor, cores and GPUs as text, without its name."""
    found = {"system": platform.platform(), "Python": platform.python_version(), "processor": _processor()}
    found["cores"] = str(os.cpu_count())
    if torch.cuda.is_available():
        found["GPU"] = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    return found


def _processor() -> str:
    info = Path("/proc/cpuinfo")  # platform.processor() says nothing on most of Linux
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
