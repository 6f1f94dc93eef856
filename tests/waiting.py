"""How tests wait: for an event, never for a time. A limit is there for what hangs, and no machine
is slow enough to reach it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

LIMIT = 600.0
"""Seconds, of whatever a test waits for. pytest ends a test after three times as many."""


def wait_until(holds: Callable[[], object], what: str = "what the test waits for") -> None:
    """Return as soon as ``holds()`` is true."""
    end = time.monotonic() + LIMIT
    while not holds():
        assert time.monotonic() < end, f"{what} has not happened in {LIMIT:.0f} s"
        time.sleep(0.005)


def a_moment() -> None:
    """Time for other threads and processes to do what they must not do: too little of it hides a
    fault, and makes none."""
    time.sleep(0.05)


class Clock:
    """Stands where modules have ``time``: only sleeping takes any, of everything else as much as
    the machine needs.

    Attributes:
        now: seconds.
    """

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        """Now."""
        return self.now

    def sleep(self, seconds: float) -> None:
        """Let so many seconds go by, for everyone."""
        self.now += seconds


class Hang:
    """Call it to hang until :meth:`release`, as an environment that never answers.

    Attributes:
        threads: identifiers of the threads that hang in it now.
    """

    def __init__(self) -> None:
        self.threads: set[int] = set()
        self._released = threading.Event()

    def __call__(self) -> None:
        self.threads.add(threading.get_ident())
        try:
            assert self._released.wait(LIMIT)
        finally:
            self.threads.discard(threading.get_ident())

    def release(self) -> None:
        """Let every caller go, the later ones too."""
        self._released.set()
