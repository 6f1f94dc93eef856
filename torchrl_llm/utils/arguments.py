"""The command line's parser: errors in one line, flags with dashes or underscores, and the nearest
flag for a wrong one."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any, NoReturn

from torchrl_llm.utils.hints import nearest
from torchrl_llm.utils.terminal import printable

__all__ = ["COMMAND_LINE", "ArgumentParser"]

COMMAND_LINE: ContextVar[list[str] | None] = ContextVar("COMMAND_LINE", default=None)
"""The words of the command that runs, by which a run says how to go on with it; ``None``: those of
the process, ``sys.argv``."""


class ArgumentParser(argparse.ArgumentParser):
    """argparse's parser; ``--max-steps`` and ``--max_steps`` are the same flag, and a flag that is
    not given is not an attribute.

    Args:
        noun: what its flags are called in errors; default ``"flag"``.
        options: as of :class:`argparse.ArgumentParser`.

    Examples:
        >>> parser = ArgumentParser(prog="count")
        >>> _ = parser.add_argument("--max_steps", type=int)
        >>> parser.read(["--max-steps", "3"])
        Namespace(max_steps=3)
        >>> parser.read([])
        Namespace()
    """

    def __init__(self, *, noun: str = "flag", **options: Any) -> None:
        # No abbreviations: the next new flag could make one ambiguous.
        super().__init__(
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            argument_default=argparse.SUPPRESS,
            **options,
        )
        self.noun = noun

    def error(self, message: str) -> NoReturn:
        """Exit with status 2 and the message alone: a usage may have a hundred lines."""
        said = printable(f"{self.prog}: error: {message} (--help lists every {self.noun}.)")
        self.exit(2, f"{said}\n")

    def read(self, argv: Sequence[str] | None = None) -> argparse.Namespace:
        """Parse the arguments; of a wrong flag the error names the nearest one.

        Args:
            argv: the arguments; None takes the process's.

        Returns:
            What was given, and the defaults of other arguments where they are not
            ``argparse.SUPPRESS``. Exits with status 2 and one line if something is wrong.
        """
        given = sys.argv[1:] if argv is None else argv
        found, unknown = self.parse_known_args([_underscored(word) for word in given])
        if unknown:
            name = unknown[0].partition("=")[0]
            # argparse has no public list of the flags of a parser and its groups.
            flags = [*self._option_string_actions]
            if name.startswith("-"):
                self.error(f"{name} is not a {self.noun}.{nearest(name, flags)}")
            # Some commands are given settings as name=value.
            meant = nearest(f"--{name}", flags) if "=" in unknown[0] else ""
            self.error(f"{name!r} is one argument too many.{meant}")
        return found


def _underscored(word: str) -> str:
    """``--max-steps=a-b`` -> ``--max_steps=a-b``."""
    flag, equals, value = word.partition("=")
    return f"--{flag[2:].replace('-', '_')}{equals}{value}" if flag.startswith("--") else word
