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

    Attributes:
        sections: flags that ``--help`` leaves to ``--help SECTION``: name -> title, and a parser
            that has them.

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
            add_help=False,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            argument_default=argparse.SUPPRESS,
            **options,
        )
        self.noun = noun
        self.sections: dict[str, tuple[str, argparse.ArgumentParser]] = {}
        self._help = self.add_argument("-h", "--help", action=_Help, nargs=0, help="show this and exit")

    def add_switch(self, flag: str, meaning: str) -> None:
        """Add a flag without a value: ``False``, unless it is given."""
        self.add_argument(flag, action="store_true", default=False, help=meaning)

    def add_section(self, name: str, title: str, parser: argparse.ArgumentParser) -> None:
        """Leave flags to ``--help NAME``, which prints the help of a parser that has them."""
        self.sections[name] = (title, parser)
        self._help.nargs, self._help.metavar = "?", "SECTION"
        self._help.help = "show this, or a section, and exit"

    def format_help(self) -> str:
        """The help, and the sections of which ``--help`` says more."""
        if not self.sections:
            return super().format_help()
        hidden = [(action, action.help) for action in self._actions if self.section_of(action.dest)]
        # Not for good: a completion of the shell leaves out what has no help.
        for action, _ in hidden:
            action.help = argparse.SUPPRESS
        text = super().format_help()
        for action, said in hidden:
            action.help = said
        width = max(map(len, self.sections))
        lines = [f"  {name:{width}}  {title}" for name, (title, _) in self.sections.items()]
        return "\n".join([text, f"{self.noun}s by section (--help SECTION lists them):", *lines, ""])

    def section_of(self, name: str) -> str | None:
        """The section that is called so, or that has a flag of this name."""
        having = [own for own, (_, parser) in self.sections.items() if f"--{name}" in parser._option_string_actions]
        return name if name in self.sections else next(iter(having), None)

    def error(self, message: str) -> NoReturn:
        """Exit with status 2 and the message alone: a usage may have a hundred lines."""
        all_at_once, by_section = f"every {self.noun}", "the sections, --help SECTION what is in one"
        lists = f"--help lists {by_section if self.sections else all_at_once}"
        said = printable(f"{self.prog}: error: {message} ({lists}.)")
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


class _Help(argparse.Action):
    """``--help`` and ``--help SECTION``."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if not values:
            parser.print_help()
        elif section := parser.section_of(values.lstrip("-").replace("-", "_")):
            parser.sections[section][1].print_help()
        else:
            parser.error(f"{values!r} is no section of --help.{nearest(values, [*parser.sections])}")
        parser.exit()


def _underscored(word: str) -> str:
    """``--max-steps=a-b`` -> ``--max_steps=a-b``."""
    flag, equals, value = word.partition("=")
    return f"--{flag[2:].replace('-', '_')}{equals}{value}" if flag.startswith("--") else word
