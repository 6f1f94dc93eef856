"""The command ``torchrl-llm``, also ``python -m torchrl_llm``: :func:`main`.

Each command is a module of this package with two functions, ``add_arguments(parser)`` and
``run(arguments)``. It is imported when it is called, so that ``torchrl-llm --help`` does not import
PyTorch.
"""

from __future__ import annotations

import logging
import os
import select
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from importlib import import_module
from typing import Any

import torchrl_llm
from torchrl_llm.utils.arguments import COMMAND_LINE, ArgumentParser
from torchrl_llm.utils.hints import nearest
from torchrl_llm.utils.optional import import_extra
from torchrl_llm.utils.terminal import Formatter, printable_messages, say, show_traceback

__all__ = ["COMMANDS", "command_parser", "main"]

COMMANDS = {
    "train": "train a model: evaluate, train, evaluate, report",
    "warmup": "teach a model a game by demonstrations, before train: supervised fine-tuning on episodes",
    "tune": "search settings with a population, early stopping or random search, on Ray Tune",
    "eval": "evaluate a checkpoint in an environment",
    "play": "watch an episode turn by turn, or be the player or the environment",
    "chat": "talk to a checkpoint",
    "report": "write the HTML report of a run",
    "compare": "compare runs: outcomes, episodes gained and lost, settings that differ",
    "export": "write a checkpoint as an adapter or a merged model, with a model card",
    "migrate": "put a file of settings of version 0.2 into sections",
    "doctor": "say what is installed, and whether settings would run",
}
"""Each command, and what it does."""

_FAILED, _WRONG_INPUT, _INTERRUPTED, _NO_READER = 1, 2, 130, 141
"""Exit codes: the second is argparse's, the last two are 128 + the number of SIGINT and SIGPIPE."""

_NO_MEMORY = (
    "there is too little memory. For a run, a smaller max_tokens, num_envs or max_model_len takes less "
    "(torchrl-llm doctor --config FILE estimates it, docs/memory.md has the rest), and --resume goes on from its last "
    "checkpoint."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Of several processes of one launch (``accelerate launch``) only the first
    writes to standard output.

    Args:
        argv: the arguments; None takes the process's.

    Returns:
        The exit code: 0; 1 if it failed on the way; 2 for wrong input; 130 after Ctrl-C.

    Raises:
        SystemExit: from :mod:`argparse`, for ``--help`` and wrong arguments.
    """
    given = [*(sys.argv[1:] if argv is None else argv)]
    before = COMMAND_LINE.set(None if argv is None else ["torchrl-llm", *given])
    if argv is None:  # the process is this command's alone
        sys.excepthook = show_traceback
    try:
        return _main(given)
    finally:
        COMMAND_LINE.reset(before)


def _main(given: Sequence[str]) -> int:
    try:
        with _output_of_one_process():
            try:
                return _run(given[0], given[1:]) if given and given[0] in COMMANDS else _explain(given)
            finally:
                # Here, where a reader that has gone is noticed, and not when Python ends.
                sys.stdout.flush()
    except BrokenPipeError:
        if not _reader_has_gone():
            raise
        # Python flushes standard output once more at its end, which would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _NO_READER
    except KeyboardInterrupt:
        if sys.stderr.isatty():
            print(file=sys.stderr)  # the terminal has left its cursor behind ^C
        return _INTERRUPTED


@contextmanager
def _output_of_one_process() -> Iterator[None]:
    """Inside, standard output of a process that is not the first of its launch goes nowhere. Errors
    of each are shown."""
    # The launcher's variable: for --help nothing is imported that knows the processes.
    if os.environ.get("RANK", "0") == "0":
        yield
        return
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        yield


def command_parser(name: str) -> ArgumentParser:
    """The parser of a command.

    Args:
        name: one of :data:`COMMANDS`.
    """
    module = import_module(f"{__name__}.{name}")
    parser = ArgumentParser(prog=f"torchrl-llm {name}", description=module.__doc__)
    _add_arguments(parser, module)
    return parser


def _run(name: str, given: Sequence[str]) -> int:
    parser, module = command_parser(name), import_module(f"{__name__}.{name}")
    arguments = parser.read(given)
    handler = logging.StreamHandler()
    handler.setFormatter(Formatter("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    try:
        with printable_messages():
            return module.run(arguments)
    except Exception as error:
        code = _exit_code(error)
        # What this library did not foresee is shown as it is: a report of it needs the traceback.
        if code is None:
            raise
        if arguments.traceback:
            show_traceback(type(error), error, error.__traceback__)
        said = f"{_NO_MEMORY} {error}" if _is_out_of_memory(error) else str(error)
        say(f"{parser.prog}: error: {' '.join(said.split())}", stderr=True)
        return code


def _add_arguments(parser: ArgumentParser, module: Any) -> None:
    module.add_arguments(parser)
    parser.add_switch("--traceback", "show the whole traceback of an error")


def _exit_code(error: Exception) -> int | None:
    """The exit code for an error whose message is written for people; ``None``: it is another
    one."""
    package = type(error).__module__
    if _is_out_of_memory(error):
        return _FAILED
    # of the reader of the output, or of a process that has died
    if isinstance(error, BrokenPipeError):
        return None
    if package.startswith("torchrl.checkpoint"):
        return _WRONG_INPUT
    if isinstance(error, OSError):
        return _FAILED
    if package.partition(".")[0] != torchrl_llm.__name__:
        return None
    return _WRONG_INPUT if isinstance(error, ValueError | ImportError) else _FAILED


def _is_out_of_memory(error: Exception) -> bool:
    """Whether there was too little memory: for Python, a GPU, or PyTorch on a CPU, whose errors are
    plain ``RuntimeError``s."""
    no_memory = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return no_memory or (isinstance(error, RuntimeError) and "allocate memory" in str(error))


def _reader_has_gone() -> bool:
    """Whether what reads the output has ended. A process that dies, such as an engine, breaks a
    pipe of its own."""
    poll = select.poll()
    for file in (sys.stdout, sys.stderr):
        poll.register(file.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _explain(given: Sequence[str]) -> int:
    """Help, version and completions; the error for a command that there is not."""
    parser = ArgumentParser(prog="torchrl-llm", description=torchrl_llm.__doc__.partition("\n")[0], noun="command")
    parser.add_argument("--version", action="version", version=torchrl_llm.__version__)
    parser.add_argument("--print_completion", metavar="SHELL", help="print the completion of bash, zsh or tcsh")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    parts = {
        name: commands.add_parser(name, help=meaning, prog=f"torchrl-llm {name}") for name, meaning in COMMANDS.items()
    }
    if given and not given[0].startswith("-"):
        parser.error(f"{given[0]!r} is not a command.{nearest(given[0], [*COMMANDS])}")
    arguments = parser.read(given)
    if "print_completion" not in arguments:
        parser.print_help()
        return 0 if not given else _WRONG_INPUT
    try:
        shtab = import_extra("shtab", extra="cli", what="Completion")
    except ImportError as error:
        parser.error(str(error))
    if arguments.print_completion not in shtab.SUPPORTED_SHELLS:
        parser.error(f"--print_completion is {arguments.print_completion!r}; expected one of {shtab.SUPPORTED_SHELLS}.")
    for name, part in parts.items():
        _add_arguments(part, import_module(f"{__name__}.{name}"))
    print(shtab.complete(parser, arguments.print_completion))
    return 0
