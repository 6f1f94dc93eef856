"""What a run is, for its report: :func:`run_info`, the content of ``run.json``."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from torchrl_llm.objectives import TurnLoss
from torchrl_llm.runs.config import RunSettings
from torchrl_llm.runs.effective_settings import as_text, changed_settings, effective_settings
from torchrl_llm.runs.identity import environment


def run_info(
    config: RunSettings, loss: TurnLoss | None = None, given: Mapping[str, str] = MappingProxyType({})
) -> dict[str, Any]:
    """When and where a run was started (or resumed), with which versions, and its settings.

    Args:
        config: the settings.
        loss: the run's; default: the one of the settings.
        given: what it was given in Python
            (:func:`~torchrl_llm.runs.effective_settings.python_settings`); default nothing.

    Returns:
        What JSON has: ``"started"``, ``"title"``, ``"settings"`` (name -> value as text, of
        :func:`~torchrl_llm.runs.effective_settings.effective_settings` and ``given``),
        ``"changed"`` (those that are not the defaults: name -> value and default as text),
        ``"seed"``, ``"environment"`` (versions, threads, revision) and ``"machine"``.

    Examples:
        >>> run_info(RunSettings.from_values(seed=3, batch_size=8))["changed"]
        {'batch_size': ['8', '32'], 'seed': ['3', '0']}
    """
    names = config.env.env_name if isinstance(config.env.env_name, str) else ", ".join(config.env.env_name)
    values = {name: as_text(value) for name, value in effective_settings(config, loss).items()}
    return {
        "started": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "title": f"{config.algo} on {names}",
        "model": config.model.model_path,
        "seed": config.trainer.seed,
        "settings": {**values, **given},
        "changed": changed_settings(config, loss) | {name: [text, "None"] for name, text in given.items()},
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
