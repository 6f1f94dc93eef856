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
        topics: flags that ``--help`` leaves to ``--help TOPIC``: name -> title, and a parser that
            has them.

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
        self.topics: dict[str, tuple[str, argparse.ArgumentParser]] = {}
        self.add_argument(
            "-h",
            "--help",
            action=_Help,
            nargs="?",
            metavar="TOPIC",
            help="show this, or what belongs to a topic, and exit",
        )

    def format_help(self) -> str:
        """The help, and the topics of which ``--help`` says more."""
        if not self.topics:
            plain = (
                super()
                .format_help()
                .replace("-h [TOPIC], --help [TOPIC]", "-h, --help")
                .replace("[-h [TOPIC]]", "[-h]")
            )
            return plain.replace("this, or what belongs to a topic, and", "this and")
        shown = [action for action in self._actions if self.topic_of(action.dest)]
        # A completion of the shell leaves out what has no help.
        said = [action.help for action in shown]
        for action in shown:
            action.help = argparse.SUPPRESS
        text = super().format_help()
        for action, help in zip(shown, said, strict=True):
            action.help = help
        width = max(map(len, self.topics))
        lines = [f"  {name:{width}}  {title}" for name, (title, _) in self.topics.items()]
        return "\n".join([text, f"{self.noun}s by topic (--help TOPIC lists them):", *lines, ""])

    def topic_of(self, name: str) -> str | None:
        """The topic that is called so, or that has a flag of this name."""
        if name in self.topics:
            return name
        return next(
            (topic for topic, (_, parser) in self.topics.items() if f"--{name}" in parser._option_string_actions), None
        )

    def error(self, message: str) -> NoReturn:
        """Exit with status 2 and the message alone: a usage may have a hundred lines."""
        lists = (
            f"--help lists every {self.noun}"
            if not self.topics
            else "--help lists the topics, --help TOPIC what belongs to one"
        )
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
    """``--help`` and ``--help TOPIC``."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        topic = parser.topic_of((values or "").lstrip("-").replace("-", "_"))
        if not parser.topics or values is None:
            parser.print_help()
        elif topic:
            parser.topics[topic][1].print_help()
        else:
            parser.error(f"{values!r} is no topic of --help.{nearest(values, [*parser.topics])}")
        parser.exit()


def _underscored(word: str) -> str:
    """``--max-steps=a-b`` -> ``--max_steps=a-b``."""
    flag, equals, value = word.partition("=")
    return f"--{flag[2:].replace('-', '_')}{equals}{value}" if flag.startswith("--") else word
