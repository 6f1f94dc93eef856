"""Processes that tests start: forked from one that has imported everything, for an import takes
longer than most of the runs.

They are processes of their own all the same: with their own environment variables, output, session
and signals.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

PRELOAD = ["accelerate", "transformers", "peft", "torchrl_llm.report", "gem"]


class Done(NamedTuple):
    """A process that has ended, as ``subprocess.run`` reports it."""

    returncode: int
    stdout: str
    stderr: str


class Script:
    """A running script: ``python ARGUMENTS``, with ``environment`` added to the variables of this
    process.

    Args:
        arguments: the script and its arguments.
        environment: variables added to this process's.
        output: a path; what the process writes goes to it, with ".out" and ".err" added.
    """

    def __init__(
        self, arguments: Sequence[object], output: str | Path, environment: Mapping[str, str] | None = None
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self.output = output
        variables = dict(os.environ) | dict(environment or {})
        self._process = context.Process(
            target=_run, args=(list(map(str, arguments)), variables, str(output), os.getcwd())
        )
        self._process.start()

    def wait(self, timeout: float) -> Done | None:
        """The end of the process; ``None`` if it runs on after ``timeout`` seconds."""
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            return None
        return Done(code, *(Path(f"{self.output}.{kind}").read_text() for kind in ("out", "err")))

    def kill(self) -> None:
        """SIGKILL to the process and all of its session."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            self._process.kill()


def _run(arguments: list[str], variables: dict[str, str], output: str, folder: str) -> None:
    os.setsid()
    os.chdir(folder)
    for number, kind in ((1, "out"), (2, "err")):
        with open(f"{output}.{kind}", "wb") as file:
            os.dup2(file.fileno(), number)
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(variables)
    sys.argv = arguments
    sys.path.insert(0, str(Path(arguments[0]).parent))
    runpy.run_path(arguments[0], run_name="__main__")
