"""What is shown to people and what they type, in a terminal and in a pipe: :class:`Terminal`."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Generator
from contextlib import closing, suppress
from typing import Any

from torchrl_llm.optional import import_extra

with suppress(ImportError):  # not on every system
    import readline  # noqa: F401  input() has keys to edit the line then

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""Characters that steer a terminal or turn the direction of writing; a tab and a new line do no harm."""


def printable(text: str) -> str:
    r"""Text of a model or an environment with characters that would steer the terminal spelled out.

    Examples:
        >>> printable("a\x1b[2Jb\n")
        'a\\x1b[2Jb\n'
    """
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


class Terminal:
    """Standard output (or standard error) and standard input. Colors only where a terminal is, and without ``NO_COLOR``.

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
            sys.stdin.reconfigure(errors="replace")  # no tokenizer takes what is no text

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
        print(printable(text), file=sys.stderr, flush=True)

    def stream(self, pieces: Generator[str]) -> None:
        """Write pieces of a line as they come, and end it, also if they break off; the generator is closed then."""
        try:
            with closing(pieces):
                for piece in pieces:
                    self.show(piece, end="")
        finally:
            self.show("")

    def ask(self, prompt: str) -> str | None:
        """A line that is typed or read; ``None`` at the end of the input. The prompt is for somebody who types."""
        if self.interactive and sys.stdout.isatty():
            try:
                return input(prompt)
            except EOFError:
                self.show("")
                return None
        if self.interactive:  # input() would write the prompt to the file that the output goes to
            print(prompt, end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        return line.rstrip("\r\n") if line else None
