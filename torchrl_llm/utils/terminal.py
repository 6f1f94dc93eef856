"""Text for a terminal: :func:`say` prints it, :func:`printable` and :func:`one_line` spell out what
would steer the terminal.

What models, environments and files of strangers hold is shown as it is, and never acts: an escape
sequence would clear the screen or write to the clipboard, a change of direction would show another
file name, a new line would add a line to a table.
"""

from __future__ import annotations

import logging
import re
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

UNSEEN = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff"
    r"\U000e0000-\U000e007f]"
)
"""Characters that steer a terminal, turn the direction of writing, cannot be seen, or cannot be
written; a tab and a new line do no harm."""


def printable(text: str) -> str:
    r"""Text with characters that would steer the terminal spelled out.

    Examples:
        >>> printable("a\x1b[2Jb\n"), printable("\u202efdp.exe")
        ('a\\x1b[2Jb\n', '\\u202efdp.exe')
    """
    return UNSEEN.sub(lambda found: ascii(found[0])[1:-1], text)


def one_line(text: str) -> str:
    r"""Text as :func:`printable` gives it, on one line: for what stands in a table or a sentence.

    Examples:
        >>> one_line("run\nall passed")
        'run\\nall passed'
    """
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


def visible(text: str) -> str:
    """``text`` with characters that cannot be seen, or that change the direction of others, as
    their numbers.

    Examples:
        >>> visible("a\\u202eb\\n"), visible("\\x1b[2J")
        ('a⟨202E⟩b\\n', '⟨001B⟩[2J')
    """
    return UNSEEN.sub(lambda match: f"⟨{ord(match[0]):04X}⟩", text)


def say(text: object = "", *, stderr: bool = False, end: str = "\n") -> None:
    """Print :func:`printable` text, at once.

    Args:
        text: what is printed.
        stderr: to standard error. Default ``False``.
        end: stands behind it. Default a new line.
    """
    print(printable(str(text)), file=sys.stderr if stderr else sys.stdout, end=end, flush=True)


@contextmanager
def printable_messages() -> Iterator[None]:
    """Inside, records of :mod:`logging` and :mod:`warnings`, of this package and of others, are
    :func:`printable`."""
    make, show = logging.getLogRecordFactory(), warnings.formatwarning
    logging.setLogRecordFactory(_Record)
    warnings.formatwarning = lambda *given, **named: printable(show(*given, **named))
    try:
        yield
    finally:
        logging.setLogRecordFactory(make)
        warnings.formatwarning = show


class _Record(logging.LogRecord):
    def getMessage(self) -> str:
        """The message, with its arguments."""
        return printable(super().getMessage())


class Formatter(logging.Formatter):
    """Formats tracebacks too as :func:`printable` text."""

    def formatException(self, ei: Any) -> str:
        """The traceback of a record."""
        return printable(super().formatException(ei))


def show_traceback(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """Print the traceback of an error: what Python does with one that nobody catches
    (``sys.excepthook``)."""
    say("".join(traceback.format_exception(kind, error, trace)), stderr=True, end="")
