"""A lock that is handed over in order: :class:`FairLock`."""

from __future__ import annotations

import threading
from typing import Any

LOCK_TIMEOUT = 600.0  # seconds; an engine step or a weight update takes far less


class FairLock:
    """A reentrant lock that is handed over in the order in which it was asked for, or nearly so."""

    def __init__(self) -> None:
        self._lock, self._turnstile = threading.Lock(), threading.Lock()
        self._owner = self._depth = 0

    def __enter__(self) -> None:
        me = threading.get_ident()
        if self._owner != me:
            with self._turnstile:
                if not self._lock.acquire(timeout=LOCK_TIMEOUT):
                    raise TimeoutError(f"Another thread has held the vLLM engine for {LOCK_TIMEOUT:.0f} s.")
            self._owner = me
        self._depth += 1

    def __exit__(self, *_: Any) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = 0
            self._lock.release()
