"""Counts two walks through the package: of ``build_run(config)``, and of one reward.

    python tests/walks.py
    PYTHONPATH=/tmp/before python tests/walks.py

It prints what docs/design.md shows. The second command counts another tree, such as one that
``git archive COMMIT torchrl_llm | tar x -C /tmp/before`` has written.

Both walks are observed on a small run (:data:`SETTINGS`) with ``sys.setprofile``, which sees every
call and return of a Python function of the package.

**The walk of build_run** is the functions that are entered, and the files that they are in.

**The walk of a reward** begins where an environment's ``step`` has returned it and ends where the
loss reads the advantage made of it. The reward is a number that nothing else in the run equals
(:data:`REWARD`). Only one turn of the batch earns it and nothing is discounted, so that its return
is the same number; its normalized advantage is known (:data:`ADVANTAGE`) and followed as well.

- A *file* is passed when one of its functions receives the number, as an argument, or returns it:
  by itself or in a tuple, list, dict, record or TensorDict. What a method reads of its own object
  does not count. Functions that watch the reward, such as metrics and callbacks, do.
- A *form* is what holds the number: a float with the record, tuple or list around it; a tensor or
  array with its axes, whatever is around it. Each form that was not seen before is one change. An
  axis has the letter of its size: N slots, B episodes, T turns, and L for what is none of them.
"""

import os
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

import torchrl_llm

PACKAGE = f"{Path(torchrl_llm.__file__).parent}{os.sep}"
SLOTS, EPISODES, TURNS = 3, 6, 2
AXES = {1: "1", SLOTS: "N", EPISODES: "B", TURNS: "T"}
SETTINGS = {
    "algo": "LLMREINFORCE",
    "model_path": "tiny",
    "dtype": "float32",
    "device": "cpu",
    "max_model_len": 64,
    "max_output_tokens": 4,
    "num_envs": SLOTS,
    "batch_size": EPISODES,
    "lora_r": 0,
    "kl_coeff": 0.0,
    "gamma": 1.0,
    "max_iterations": 1,
    "evaluation_interval": 0,
    "save_checkpoints": False,
    "progress": False,
}
REWARD = 0.123456789
ADVANTAGE = (1 - 1 / (EPISODES * TURNS)) * (EPISODES * TURNS) ** 0.5
"""Of one return among zeros, less their mean and by their standard deviation."""
LARGEST = 10_000
"""Elements of tensors that are looked into, which leaves out weights and logits."""


class PaysOnce:
    """Episodes of two turns, of which the first turn of the first episode pays :data:`REWARD`."""

    paid = False

    def reset(self, seed: int | None = None) -> tuple[str, dict]:
        """Start an episode."""
        self.turn = 0
        return "Speak.", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        """Take any response."""
        self.turn += 1
        reward, PaysOnce.paid = 0.0 if PaysOnce.paid else REWARD, True
        return "Go on.", reward, self.turn == TURNS, False, {}


@dataclass
class Walk:
    """What was passed: the functions that were entered, and the forms seen in each file, both in
    order of first sight."""

    functions: dict[tuple[str, str], None] = field(default_factory=dict)
    forms: dict[str, dict[str, None]] = field(default_factory=dict)

    @property
    def changes(self) -> int:
        """Forms after the first."""
        return len({form for forms in self.forms.values() for form in forms}) - 1


def forms(value: Any, around: str = "", depth: int = 5) -> Iterator[str]:
    """The forms in which the number is in a value."""
    if isinstance(value, float | np.floating):
        if close(torch.tensor(float(value))):
            yield around + type(value).__name__
    elif isinstance(value, torch.Tensor | np.ndarray):
        # A reversed array has strides that tensors have not.
        array = np.ascontiguousarray(value) if isinstance(value, np.ndarray) else value
        tensor = torch.as_tensor(array).detach() if value.size else None
        weight = isinstance(value, torch.nn.Parameter)
        small = not weight and tensor is not None and tensor.is_floating_point() and tensor.numel() <= LARGEST
        if small and close(tensor):
            axes = ", ".join(AXES.get(size, "L") for size in tensor.shape)
            yield f"{type(value).__name__} [{axes}]"
    elif depth:
        around = around if isinstance(value, dict) else f"{type(value).__name__}: "
        for part in parts(value):
            yield from forms(part, around, depth - 1)


def parts(value: Any) -> list[Any]:
    """What a container or record holds."""
    if isinstance(value, TensorDictBase):
        return [value.get(key) for key in value.keys(True, True)]
    if isinstance(value, dict):
        return [*value.values()]
    if isinstance(value, list | tuple):
        return [*value]
    if is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, each.name, None) for each in fields(value)]
    return []


def close(tensor: torch.Tensor) -> bool:
    """Whether an element is the reward or its advantage."""
    return any(((tensor.double() - number).abs() < 1e-6 * max(1, number)).any() for number in (REWARD, ADVANTAGE))


@contextmanager
def profiled(watch: Callable[[str, Any, str, Any], None]) -> Iterator[None]:
    """Call ``watch(file, frame, event, value)`` at calls and returns of the package, in all
    threads."""
    busy = threading.local()  # what is watched may call functions of the package, by properties

    def profile(frame: Any, event: str, value: Any) -> None:
        path = frame.f_code.co_filename
        if event in ("call", "return") and path.startswith(PACKAGE) and not getattr(busy, "now", False):
            busy.now = True
            try:
                watch(path.removeprefix(PACKAGE), frame, event, value)
            finally:
                busy.now = False

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def walks() -> tuple[Walk, Walk]:
    """The walk of ``build_run``, and of a reward."""
    runs = import_module("torchrl_llm.runs" if find_spec("torchrl_llm.runs") else "torchrl_llm.trainers")
    building, reward, ended = Walk(), Walk(), []
    PaysOnce.paid = False

    def enter(file: str, frame: Any, event: str, value: Any) -> None:
        building.functions[file, frame.f_code.co_qualname] = None

    def follow(file: str, frame: Any, event: str, value: Any) -> None:
        code, local = frame.f_code, frame.f_locals
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 0x0C)]
        values = [value] if event == "return" else [local[name] for name in names if name not in ("self", "cls")]
        seen = dict.fromkeys(form for each in values for form in forms(each)) if not ended else {}
        if seen:
            reward.functions[file, code.co_qualname] = None
            reward.forms.setdefault(file, {}).update(seen)
        # The first file that the loss itself is in ends the walk.
        if seen and file == "objectives/loss.py":
            ended.append(True)

    with tempfile.TemporaryDirectory() as folder:
        config = runs.RunSettings.from_values(**SETTINGS, output_dir=Path(folder) / "run")
        with profiled(enter):
            run = runs.build_run(config, env=PaysOnce)
        with profiled(follow):
            run.trainer.train()
    return building, reward


def picture(building: Walk, reward: Walk) -> str:
    """Both walks, as docs/design.md shows them."""
    folders = Counter(file.rpartition("/")[0] or "." for file in {file for file, _ in building.functions})
    lines = ["build_run:", *(f"  {name:22} {count:2} files" for name, count in sorted(folders.items())), "a reward:"]
    known: dict[str, None] = {}
    for file, seen in reward.forms.items():
        new = [form for form in seen if form not in known]
        known |= dict.fromkeys(new)
        lines.append(f"  {file:32} {'; '.join(new)}".rstrip())
    return "\n".join(lines)


def counts(building: Walk, reward: Walk) -> tuple[int, int, int, int]:
    """Files and functions of build_run; files and changes of form of a reward."""
    return len({file for file, _ in building.functions}), len(building.functions), len(reward.forms), reward.changes


if __name__ == "__main__":
    found = walks()
    print(picture(*found))
    print("build_run: {} files, {} functions; a reward: {} files, {} changes of form".format(*counts(*found)))
