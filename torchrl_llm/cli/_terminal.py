"""What is shown to people and what they type, in a terminal and in a pipe: :class:`Terminal`."""

from __future__ import annotations

import io
import sys
from collections.abc import Generator
from contextlib import closing, suppress
from typing import Any

from torchrl_llm.utils.optional import import_extra
from torchrl_llm.utils.terminal import printable, say

with suppress(ImportError):  # not on every system
    import readline  # noqa: F401  input() has keys to edit the line then


class Terminal:
    """Standard output (or standard error) and standard input. Colors only where a terminal is, and
    without ``NO_COLOR``.

    Args:
        command: for the error without the extra ``cli``.
        stderr: show on standard error.

    Raises:
        MissingExtraError: rich is not installed.
    """

    def __init__(self, command: str, *, stderr: bool = False) -> None:
        rich = import_extra("rich.console", extra="cli", what=f"torchrl-llm {command}")
        self._console: Any = rich.Console(stderr=stderr, highlight=False)
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="replace")  # no tokenizer takes what is not text

    @property
    def interactive(self) -> bool:
        """Whether somebody types and watches."""
        return sys.stdin.isatty() and self._console.is_terminal

    def show(self, text: str, *, style: str | None = None, end: str = "\n") -> None:
        """Write at once."""
        self._console.out(printable(text), style=style, end=end)
        self._console.file.flush()

    def complain(self, text: str) -> None:
        """Write a line to standard error, whatever the output goes to."""
        say(text, stderr=True)

    def stream(self, pieces: Generator[str]) -> None:
        """Write pieces of a line as they come, and end it, also if they break off; the generator is
        closed then."""
        try:
            with closing(pieces):
                for piece in pieces:
                    self.show(piece, end="")
        finally:
            self.show("")

    def ask(self, prompt: str) -> str | None:
        """A line that is typed or read; ``None`` at the end of the input. The prompt is for
        somebody who types."""
        if self.interactive and sys.stdout.isatty():
            try:
                return input(prompt)
            except EOFError:
                self.show("")
                return None
        if self.interactive:  # input() would write the prompt to the file that the output goes to
            say(prompt, stderr=True, end="")
        line = sys.stdin.readline()
        return line.rstrip("\r\n") if line else None
