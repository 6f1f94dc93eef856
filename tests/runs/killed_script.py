"""``python killed_script.py FOLDER CASE ITERATIONS [MODULE:CLASS:METHOD:CALLS]``: a run that
SIGKILL may end.

It prints the digest of its weights and optimizer if it comes to its end. The signal comes instead
of the call of METHOD that follows CALLS others.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from pathlib import Path

from small_runs import small_config
from test_checkpoint import CASES, RUN, digest

from torchrl_llm.runs import build_run


def kill_at(place: str) -> None:
    """Have this process killed there."""
    module, name, method, calls = place.split(":")
    owner, left = getattr(importlib.import_module(module), name), int(calls)
    function = getattr(owner, method)

    def killed(*args, **kwargs):
        nonlocal left
        left -= 1
        return os.kill(os.getpid(), signal.SIGKILL) if left < 0 else function(*args, **kwargs)

    setattr(owner, method, killed)


if __name__ == "__main__":
    folder, case, iterations, *kill = sys.argv[1:]
    for place in kill:
        kill_at(place)
    algo, settings = CASES[int(case)]
    settings = RUN | settings | {"max_iterations": int(iterations), "resume": True}
    run = build_run(small_config(Path(folder), algo, **settings))
    run.trainer.train()
    sys.stdout.write(f"digest {digest(run)}\n")
