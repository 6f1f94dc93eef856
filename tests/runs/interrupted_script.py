"""``python interrupted_script.py MOMENT SCRIPT [ARGUMENT ...]``: a script that a signal finds at a
moment of its run.

The moment is ``PHASE:CALL:DELAY:SIGNAL:TO``: after DELAY seconds in the CALL-th call of PHASE,
SIGNAL is sent to TO: this process ("self", every rank at its own time), its launcher ("parent",
from the first rank) or all that the terminal would send it to ("group").
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
from importlib import import_module

PHASES = {
    "build": ("torchrl_llm.runs.build", "load_models"),
    "before": ("torchrl_llm.runs.run", "Run.final_evaluation"),
    "rollout": ("torchrl_llm.trainers.trainer", "LLMTrainer.collect"),
    "update": ("torchrl_llm.trainers.trainer", "LLMTrainer.update"),
    "evaluation": ("torchrl_llm.trainers.trainer", "LLMTrainer.evaluate"),
    "save": ("torchrl_llm.runs.checkpoint", "CheckpointStore.save"),
    "after": ("torchrl_llm.runs.run", "Run.final_evaluation"),
}
"""What is called then."""


def send(signum: int, to: str) -> None:
    """Send a signal to this process, its launcher or its group."""
    if to == "group":
        os.killpg(os.getpgid(0), signum)
    elif to == "self":
        os.kill(os.getpid(), signum)
    elif os.environ.get("RANK", "0") == "0":
        os.kill(os.getppid(), signum)


def interrupt(moment: str) -> None:
    """Have a signal sent at ``moment``."""
    phase, call, delay, name, to = moment.split(":")
    module, _, path = PHASES[phase][0], None, PHASES[phase][1]
    owner = import_module(module)
    *owners, method = path.split(".")
    for each in owners:
        owner = getattr(owner, each)
    function, left = getattr(owner, method), int(call)
    rank = int(os.environ.get("RANK", "0"))

    def found(*args, **kwargs):
        nonlocal left
        left -= 1
        if left == 0:
            later = float(delay) * (1 + rank)
            timer = threading.Timer(later, send, (signal.Signals[name], to))
            timer.start()
            result = function(*args, **kwargs)
            timer.join()  # the call may be faster than the delay, or the timer slower
            return result
        return function(*args, **kwargs)

    setattr(owner, method, found)


if __name__ == "__main__":
    if sys.argv[1] != "never":
        interrupt(sys.argv[1])
    sys.argv = sys.argv[2:]
    sys.path.insert(0, os.path.dirname(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")
