"""SIGINT and SIGTERM end a run so that it can be resumed: :func:`catch_signals`,
:func:`interruptible`, :class:`Interrupted`.

Within :func:`catch_signals` the first signal is a request. A call within :func:`interruptible` is
dropped at once; other code runs until the next such call. There every rank raises
:class:`Interrupted`, and callers save the run. A second signal ends the process at once.

:class:`~torchrl_llm.trainers.LLMTrainer` decides what is dropped and what is saved.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

import torch.distributed as dist

from torchrl_llm.utils.terminal import printable

# torchrl_llm.trainers exports the functions for scripts.
__all__ = ["Interrupted", "catch_signals", "children_ignore_sigint", "held", "interruptible", "run_begins"]

logger = logging.getLogger(__name__)
T = TypeVar("T")

SIGNALS = (signal.SIGINT, signal.SIGTERM)

# seconds. Launchers forward a signal that the terminal or scheduler has already sent to all
# processes.
_ECHO = 1.0


class Interrupted(SystemExit):
    """A signal has ended the run. If nobody catches it, the process ends with 128 + the signal's
    number, and no traceback.

    Args:
        signum: the signal: 130 is the exit code for SIGINT, 143 for SIGTERM.

    Attributes:
        state: where the run was, for the message; the trainer sets it.
        resumable: whether the run is saved; the trainer clears it.

    Examples:
        >>> interrupted = Interrupted(signal.SIGTERM)
        >>> str(interrupted), interrupted.code
        ('interrupted by SIGTERM', 143)
    """

    def __init__(self, signum: int) -> None:
        # A SystemExit passes the `except Exception` around evaluators and loggers. 128 + the number
        # is what a shell reports for a process that a signal ended.
        super().__init__(128 + signum)
        self.signum, self.state, self.resumable = signum, "", True

    @property
    def name(self) -> str:
        """The signal's name."""
        return signal.Signals(self.signum).name

    def __str__(self) -> str:
        return f"interrupted by {self.name}{self.state}"


class _Drop(KeyboardInterrupt):
    """Raised by the handler inside a droppable call; :func:`interruptible` catches it.

    A ``KeyboardInterrupt``, because all code between the two lets it pass, including Ray while it
    waits.
    """


class _Signals:
    """The handler of :data:`SIGNALS`: remembers the first, raises inside a droppable call, ends the
    process at a second."""

    def __init__(self) -> None:
        self.received = 0
        self.begun = self.drops = False
        self._since = 0.0
        self._old: dict[signal.Signals, Any] = {}

    def install(self) -> None:
        """Install the handler, except for signals that the process ignores (``nohup``)."""
        handlers = {signum: signal.getsignal(signum) for signum in SIGNALS}
        # None: a handler that C code installed, which Python cannot put back.
        self._old = {signum: old for signum, old in handlers.items() if old not in (None, signal.SIG_IGN)}
        for signum in self._old:
            signal.signal(signum, self._handle)

    def restore(self) -> None:
        """Restore the former handlers."""
        for signum, old in self._old.items():
            signal.signal(signum, old)

    def leave_to_parent(self) -> None:
        """In a forked child: the parent answers the terminal's SIGINT, and SIGTERM ends the
        child."""
        for signum in self._old:
            signal.signal(signum, signal.SIG_IGN if signum == signal.SIGINT else signal.SIG_DFL)

    def check(self) -> None:
        """Raise if a signal has come."""
        if self.received:
            raise _Drop

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.received:
            if now - self._since > _ECHO:
                # Without cleanup: an exception could be caught on the way, or wait for a process
                # that hangs.
                os._exit(128 + signum)
            return
        self.received, self._since = signum, now
        _say(f"{signal.Signals(signum).name}: ends as soon as what is written is whole; a second one ends it at once.")
        if self.drops:
            raise _Drop


_active: _Signals | None = None


@contextmanager
def catch_signals(how_to_resume: str = "") -> Iterator[None]:
    """Inside, SIGINT and SIGTERM raise :class:`Interrupted` when the next :func:`interruptible`
    returns, or at the end.

    The outermost one counts: it writes one line about the end to standard error and restores the
    handlers. Outside the main thread, where Python delivers no signals, it does nothing.

    Args:
        how_to_resume: for that line: the command or setting that resumes the run, once it has begun
            (:func:`run_begins`).
    """
    global _active
    if _active is not None or threading.current_thread() is not threading.main_thread():
        yield
        return
    _active = signals = _Signals()
    signals.install()
    try:
        yield
        if signals.received:
            # The signal came where no interruptible() has met it.
            raise Interrupted(signals.received)
    except Interrupted as interrupted:
        resumable = signals.begun and interrupted.resumable
        _say(f"{interrupted}; " + (f"go on with: {how_to_resume}" if resumable else "start it again as it was started"))
        raise
    finally:
        signals.restore()
        _active = None


def run_begins() -> None:
    """From now on an interrupted run can be resumed; before, it has to be started again."""
    if _active is not None:
        _active.begun = True


def interruptible(function: Callable[[], T], all_reduce_max: Callable[[int], int] | None = None) -> T:
    """Call ``function``; a signal stops it at once, and after a signal it is not called.

    A function and not a context manager: a handler may raise between any two bytecodes, also while
    a context is left.

    Args:
        function: may be left at any point; its changes must not matter if it does not return. It
            must not call collectives of the ranks, because a single rank may leave it.
        all_reduce_max: the largest of a number over the ranks, which all call this and agree at its
            end whether any of them was to stop
            (:meth:`torchrl_llm.trainers.Distributed.all_reduce_max`). ``None``: this process alone;
            if there are others, signals wait.

    Returns:
        What ``function`` returns.

    Raises:
        Interrupted: a signal has come, to any of the ranks.

    Examples:
        >>> interruptible(lambda: 1 + 1)
        2
    """
    signals = _active
    here = threading.current_thread() is threading.main_thread()
    # One process of several that stopped by itself would leave the others waiting in a collective.
    if signals is None or not here or (all_reduce_max is None and _several()):
        return function()
    outer, result = signals.drops, None
    try:
        signals.drops = True
        if not signals.received:
            result = function()
        # Within the try, because the handler may raise up to this assignment.
        signals.drops = outer
    except BaseException as error:
        signals.drops = outer
        # Interrupted is of an inner call, at whose end the ranks agreed already.
        if not signals.received or isinstance(error, Interrupted):
            raise
        # an engine may fail because it got the signal of the terminal too
        if not isinstance(error, KeyboardInterrupt):
            logger.info("dropped with %s: %s", type(error).__name__, error)
    # A rank without the signal stops too: it would wait for the others in its next collective.
    signum = signals.received if all_reduce_max is None else all_reduce_max(signals.received)
    if signum:
        raise Interrupted(signum)
    return result  # type: ignore[return-value]


@contextmanager
def held() -> Iterator[Callable[[], None]]:
    """Inside, a signal waits for the next call of the function that is yielded, or for the end.

    For code that changes for a while what is saved after a signal, such as a policy that exchanges
    layers of the trained model.

    Yields:
        A function that raises if a signal has come; for places where leaving does no harm.
    """
    signals = _active
    if signals is None or not signals.drops or threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    signals.drops = False
    try:
        yield signals.check
    finally:
        signals.drops = True
    # After the finally, so that an error from inside is not replaced.
    signals.check()


@contextmanager
def children_ignore_sigint() -> Iterator[None]:
    """Inside, processes that this thread starts do not get the SIGINT that a terminal sends to all
    of them.

    A blocked signal stays blocked over ``fork`` and ``exec``, whatever handlers the new process
    installs.
    """
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _several() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _say(line: str) -> None:
    """Write a line to standard error, on rank 0. ``os.write``, because the signal may have come in
    the middle of a print."""
    # The launcher's variable: a signal may come before torch.distributed knows the ranks.
    if os.environ.get("RANK", "0") == "0":
        start = "\n" if os.isatty(2) else ""  # a progress bar may have left the cursor behind it
        os.write(2, f"{start}{printable(line)}\n".encode())


def _after_fork() -> None:
    global _active
    if _active is not None:
        _active.leave_to_parent()
        _active = None


# A fork inherits the handlers: at a terminal's Ctrl-C every child would act as if it were the run.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
