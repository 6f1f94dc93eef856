"""Runs parts one after the other, and writes what they found as JSON."""

import gc
import json
import platform
import time
import traceback
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

Part = Callable[[], dict[str, Any]]
"""A check or a measurement; returns its figures."""

PACKAGES = ("torch", "transformers", "peft", "accelerate", "tensordict", "torchrl", "triton", "vllm", "gem-llm")


class Skip(Exception):
    """A part cannot run here; the message says why."""


def run_parts(parts: Mapping[str, Part], head: Mapping[str, Any], output: Path, limit: float) -> int:
    """Run the parts, print a line each, and write all that is known to ``output`` after each.

    Args:
        parts: by name.
        head: what else the JSON has.
        limit: seconds after which no part is begun.

    Returns:
        The number of parts that failed.
    """
    began, found = time.perf_counter(), {}
    for name, part in parts.items():
        late = time.perf_counter() - began > limit
        found[name] = {"outcome": "skipped", "reason": f"{limit:.0f} s were over"} if late else attempt(part)
        told = found[name].get("reason", found[name].get("figures"))
        print(f"{found[name]['outcome']:8}{name}: {told}", flush=True)
        failed = sum(each["outcome"] == "failed" for each in found.values())
        write(output, {**head, "of": len(parts), "failed": failed, "results": found})
    return failed


def attempt(part: Part) -> dict[str, Any]:
    """What one part found: ``passed``, ``skipped`` or ``failed``, figures, a reason and the
    seconds."""
    start = time.perf_counter()
    try:
        found: dict[str, Any] = {"outcome": "passed", "figures": part()}
    except Skip as reason:
        found = {"outcome": "skipped", "reason": str(reason)}
    except Exception:  # noqa: BLE001 one that fails must not hide the others
        found = {"outcome": "failed", "reason": traceback.format_exc()}
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return found | {"seconds": round(time.perf_counter() - start, 1)}


def write(path: Path, result: Mapping[str, Any]) -> None:
    """Write JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")


def machine(device: str) -> dict[str, str]:
    """What it ran on."""
    found = {"python": platform.python_version(), "device": "cpu"}
    if device != "cpu":
        found |= {
            "device": torch.cuda.get_device_name(),
            "memory": f"{torch.cuda.get_device_properties(0).total_memory / 2**30:.1f} GiB",
            "cuda": str(torch.version.cuda),
            "cudnn": str(torch.backends.cudnn.version()),
        }
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def expect(figures: dict[str, Any], **bounds: float) -> dict[str, Any]:
    """The figures, if each is a number and at most its bound."""
    for name, bound in bounds.items():
        if not figures[name] <= bound:
            raise AssertionError(f"{name} is {figures[name]:.4g}; expected at most {bound}. All figures: {figures}")
    return figures
