"""The first hour with a GPU: what to run in which order, each call in a process of at most nine
minutes with a JSON of its own.

Imports nothing that a machine with a GPU may lack: the first call says what is missing.
"""

import importlib
import json
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

MOST = 540
"""Seconds of a call."""

WHEELS = ("tensordict", "torchrl", "hoptorch", "pyvers", "orjson", "importlib_metadata")
"""What a machine with PyTorch, transformers, peft and accelerate may lack: TorchRL and what it
needs."""

NEEDED = ("torch", "transformers", "peft", "accelerate", *WHEELS)


class Call(NamedTuple):
    """A call of the command line: its name, what is run, and which parts have ``only`` in their
    names."""

    name: str
    what: str
    only: str
    why: str


CALLS = (
    Call("attention-finite", "test", "finite", "a gradient of NaN would spoil all that follows"),
    Call("attention", "bench", "attention", "which kernels run, and what each new shape costs"),
    Call("sampler", "test", "sampler", "log-probs of sampler and scorer, in float32 and bfloat16"),
    Call("gradient", "test", "gradient", "gradients against the CPU's, with and without sharing"),
    Call("losses", "test", "losses", "ten iterations against the CPU's"),
    Call("test", "test", "", "all checks; checks of before are quick"),
    Call("iteration-small", "bench", "iteration: Qwen2.5-0.5B, hf", "where the time goes with HFPolicy"),
    Call("update-small", "bench", "update: Qwen2.5-0.5B", "updates: sharing, dtypes, contexts, chunks"),
    Call("decode", "bench", "decode", "a step of HFPolicy at 64 and 256 rows"),
    Call("vllm", "bench", "vllm", "whole iterations with vLLM, which the goals are about"),
    Call("memory-small", "bench", "memory: Qwen2.5-0.5B", "max_tokens against what is reserved"),
    Call("update-middle", "bench", "update: Qwen2.5-1.5B", "the same updates, of 1.5B"),
    Call("memory-middle", "bench", "memory: Qwen2.5-1.5B", "max_tokens, of 1.5B"),
    Call("memory-large", "bench", "memory: Qwen2.5-7B", "max_tokens, of 7B"),
    Call("update-large", "bench", "update: Qwen2.5-7B", "updates of 7B"),
)


def run(folder: Path, *, device: str, tiny: bool, only: str) -> int:
    """Look at the machine, then make the calls, or the one that is named ``only``; returns how many
    failed.

    A call whose JSON has all its parts and no failure is not made again.
    """
    missing = missing_packages()
    write(folder / "00-machine.json", look(missing))
    if missing:
        print(how_to_install(missing), file=sys.stderr)
        return 1
    names = [call.name for call in CALLS]
    if only and only not in names:
        print(f"there is no call {only!r}; expected one of {', '.join(names)}", file=sys.stderr)
        return 1
    failed = 0
    for number, call in enumerate(CALLS, 1):
        path = folder / f"{number:02}-{call.name}.json"
        if only not in ("", call.name) or (not only and is_done(path)):
            continue
        print(f"== {call.name}: {call.why}", flush=True)
        failed += not make(call, path, device=device, tiny=tiny)
    return failed


def make(call: Call, path: Path, *, device: str, tiny: bool, most: float = MOST) -> bool:
    """Make a call, ended after ``most`` seconds; what it had found by then is in its JSON. Returns
    whether all went well."""
    # A part that begins just before the limit has a minute.
    limits = ["--limit", str(max(1, most - 60)), "--device", device, *(["--tiny"] if tiny else [])]
    command = [sys.executable, "-m", "benchmarks.gpu", call.what, "--only", call.only, "--output", str(path), *limits]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parents[2], timeout=most, check=False)
    except subprocess.TimeoutExpired:
        print(f"{call.name}: ended after {most} s", file=sys.stderr)
        found = json.loads(path.read_text()) if path.exists() else {"results": {}, "failed": 0}
        write(path, found | {"ended": f"{most} s were over"})
        return False
    return done.returncode == 0


def is_done(path: Path) -> bool:
    """Whether a call's JSON has all its parts, and no failure."""
    if not path.exists():
        return False
    found = json.loads(path.read_text())
    late = any("s were over" in each.get("reason", "") for each in found["results"].values())
    whole = len(found["results"]) == found.get("of", len(found["results"]))
    return whole and not (found["failed"] or late or "ended" in found)


def missing_packages() -> dict[str, str]:
    """What cannot be imported, and why."""
    found = {}
    for name in NEEDED:
        try:
            importlib.import_module(name)
        except Exception as error:  # noqa: BLE001 a package may fail in any way where another one is missing
            found[name] = f"{type(error).__name__}: {error}"
    return found


def how_to_install(missing: dict[str, str]) -> str:
    """A sentence that says what is missing and how to bring it to a machine without a network."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    why = "\n".join(f"  {name}: {error}" for name, error in missing.items())
    wheels = f"mkdir -p wheels && pip download --no-deps --only-binary=:all: --python-version {python} --dest wheels"
    return (
        f"Cannot be imported:\n{why}\nWhere there is a network:\n  {wheels} {' '.join(WHEELS)}\nand on this machine:\n"
        "  pip install --no-index --no-deps wheels/*.whl\n"
        "(What an error names that is none of these, such as zipp or lazy_importer, belongs in the first command too.)"
    )


def look(missing: dict[str, str]) -> dict[str, Any]:
    """The machine: Python, GPUs and their driver, how they are connected, and what is missing."""
    commands = {
        "gpus": ["nvidia-smi", "--query-gpu=name,memory.total,memory.used,driver_version", "--format=csv"],
        "topology": ["nvidia-smi", "topo", "-m"],
        "room": ["df", "-h", "/dev/shm", "/tmp"],
        "packages": [sys.executable, "-m", "pip", "list", "--disable-pip-version-check", "--format=freeze"],
    }
    head = {"what": "machine", "time": time.strftime("%Y-%m-%d %H:%M:%S %Z"), "python": platform.python_version()}
    return head | {"missing": missing} | {name: output_of(command) for name, command in commands.items()}


def output_of(command: list[str]) -> list[str]:
    """The lines that a command prints; or why it did not run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [str(error)]
    return (done.stdout + done.stderr).splitlines()


def write(path: Path, result: dict[str, Any]) -> None:
    """Write JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")
