"""Commands that tests run: processes of their own, in pipes or in a terminal, forked from one that
has imported everything.

An import takes longer than most of the commands (:mod:`processes`).
"""

from __future__ import annotations

import multiprocessing
import os
import pty
import select
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from processes import PRELOAD, Done
from waiting import LIMIT, wait_until

SMALL = (
    *("--model-path=tiny", "--dtype=float32", "--device=cpu", "--algo=LLMREINFORCE", "--lora-r=4", "--lr-actor=1e-2"),
    *("--env-name=game:GuessTheNumber-v0-easy", "--max-model-len=256", "--max-output-tokens=16", "--num-envs=8"),
    *("--batch-size=8", "--max-iterations=2", "--final-episodes=16", "--evaluation-episodes=8", "--kl-coeff=0.0"),
    "--evaluation-interval=1",
)
"""Two iterations of LoRA on the small model, in seconds."""


def command(*arguments: object, folder: Path, given: str = "", environment: dict[str, str] | None = None) -> Done:
    """``torchrl-llm ARGUMENTS`` to its end, with the text ``given`` on standard input.

    Args:
        folder: the working directory; what the command reads and writes is kept there too.
    """
    stdin, out, err = (folder / f".{kind}" for kind in ("in", "out", "err"))
    stdin.write_text(given)
    code = ended(start(arguments, [stdin, out, err], folder, environment or {}))
    return Done(code, out.read_text(), err.read_text())


def start(arguments, files, folder: Path, environment: dict[str, str], before: Callable[[], object] | None = None):
    """Start a command whose standard files are opened by name: files, pipes with a name, or a
    terminal.

    Args:
        before: called in its process first; it is pickled.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOAD, "rich.console"])
    variables = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    process = context.Process(
        target=_run, args=([*map(str, arguments)], variables | environment, [*map(str, files)], str(folder), before)
    )
    process.start()
    return process


def ended(process) -> int:
    """The exit code of a process, which must end in time."""
    process.join(LIMIT)
    if process.exitcode is None:
        os.killpg(process.pid, signal.SIGKILL)
        raise AssertionError(f"A command did not end within {LIMIT:.0f} s.")
    return process.exitcode


def _run(arguments, variables, files, folder, before) -> None:
    os.setsid()
    os.chdir(folder)
    for number, name in enumerate(files):
        how = os.O_WRONLY | os.O_CREAT | os.O_TRUNC if number else os.O_RDONLY
        if name.startswith("/dev/"):
            # A terminal that is opened by the leader of a session controls it, so that Ctrl-C comes
            # as a signal.
            how = os.O_RDWR
        os.dup2(os.open(name, how), number)
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(number, "r" if not number else "w") for number in range(3))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(variables)
    sys.argv = ["torchrl-llm", *arguments]
    from torchrl_llm.cli import main

    if before is not None:
        before()
    try:
        code = main()
    except SystemExit as ended:  # of argparse, or by a signal
        code = ended.code
    sys.stderr.flush()
    # Not by way of multiprocessing, which has standard files of its own. The command itself flushes
    # its output.
    os._exit(code)


class Terminal:
    """A command in a pseudo-terminal: what it shows, and keys. Standard output may go to the file
    ``out``."""

    def __init__(
        self, *arguments: object, folder: Path, environment: dict[str, str] | None = None, out: Path | None = None
    ) -> None:
        self.screen = ""
        self._main, self._side = pty.openpty()
        name = os.ttyname(self._side)
        files = [name, out or name, name]
        self.process = start(arguments, files, folder, {"TERM": "xterm-256color"} | (environment or {}))

    def read(self) -> None:
        """Take what has been written since, after a moment."""
        if select.select([self._main], [], [], 0.2)[0]:
            self.screen += os.read(self._main, 4096).decode(errors="replace").replace("\r\n", "\n")

    def wait_for(self, text: str, *, after: int = 0) -> int:
        """Wait until the screen shows ``text`` behind a place; returns the place behind it."""

        def shown():
            self.read()
            return text in self.screen[after:]

        wait_until(shown, f"{text!r} on the screen")
        return self.screen.index(text, after) + len(text)

    def type(self, keys: str) -> None:
        os.write(self._main, keys.encode())

    def end(self, again: str = "") -> int:
        """The exit code, once the command has ended by itself.

        Args:
            again: keys that are typed once more every two seconds. Python's ``input()`` answers a
                Ctrl-C that comes between its prompt and its wait for a key only at the next key.
        """

        def dead():
            self.process.join(2)  # and again, however long it takes
            if again and self.process.is_alive():
                self.type(again)
            return not self.process.is_alive()

        wait_until(dead, "the end of the command")
        code = ended(self.process)
        while select.select([self._main], [], [], 0)[0]:
            self.read()
        os.close(self._side)
        os.close(self._main)
        return code
