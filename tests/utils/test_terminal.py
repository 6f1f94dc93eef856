"""Text of files and models never steers a terminal, whoever prints it."""

import logging
import warnings

import pytest

from torchrl_llm.utils import terminal
from torchrl_llm.utils.arguments import ArgumentParser
from torchrl_llm.utils.terminal import UNSEEN, one_line, printable, printable_messages, say

BAD = "\x1b]0;owned\x07\x1b[2J\u202efdp\u2066\u200b\x9b1m\r\ud800\U000e0041"


def test_what_steers_a_terminal_is_spelled_out():
    assert not UNSEEN.search(printable(BAD))
    assert printable(BAD).encode("utf-8").startswith(rb"\x1b]0;owned\x07\x1b[2J\u202efdp")
    assert printable("Émile\t😀\n") == "Émile\t😀\n"
    assert one_line("a\n\tb") == "a\\n\\tb"


@pytest.mark.parametrize("stderr", [False, True])
def test_said(capsys, stderr):
    say(BAD, stderr=stderr)
    shown = capsys.readouterr()
    assert (shown.err if stderr else shown.out) == printable(BAD) + "\n"


def test_messages_of_other_packages(capsys):
    handler = logging.StreamHandler()
    handler.setFormatter(terminal.Formatter("%(message)s"))
    other = logging.getLogger("another.package")
    other.addHandler(handler)
    try:
        with printable_messages():
            other.warning("a file says %s", BAD)
            # Not warnings.warn, which pytest catches.
            assert printable(BAD) in warnings.formatwarning(BAD, UserWarning, "file.py", 1)
            try:
                raise ValueError(BAD)
            except ValueError as error:
                other.exception("it fails")
                terminal.show_traceback(type(error), error, error.__traceback__)
    finally:
        other.removeHandler(handler)
    shown = capsys.readouterr().err
    assert shown.count(printable(BAD)) >= 3
    assert not UNSEEN.search(shown)


def test_errors_of_a_command_line(capsys):
    with pytest.raises(SystemExit):
        ArgumentParser(prog="x").error(BAD)
    assert printable(BAD) in capsys.readouterr().err
