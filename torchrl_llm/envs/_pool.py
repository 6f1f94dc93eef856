"""Daemon threads that call environments: :class:`Pool`.

The standard library's executor joins its threads when the interpreter exits, so one environment that hangs would hold up
the exit. These threads are left behind, and a call that does not come back can be given up.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from queue import Empty, SimpleQueue
from typing import Any

from torchrl_llm.envs.game import revoke_global_rng

MAX_THREADS = 32
"""Threads for any number of slots, unless more are asked for."""

LOOK = 0.5
"""Seconds between two looks at calls that may hang, at most."""


class Call:
    """A call for a slot: running, or finished with a ``result`` or an ``error``."""

    def __init__(self, slot: int, function: Callable[[], Any]) -> None:
        self.slot, self._function = slot, function
        self.result: Any = None
        self.error: BaseException | None = None
        self.finished = self.abandoned = False
        self.thread = 0

    def run(self) -> None:
        """Call the function, in this thread."""
        self.thread = threading.get_ident()
        try:
            self.result = self._function()
        except BaseException as error:  # noqa: BLE001 (whoever reads the result raises it)
            self.error = error


class Pool:
    """Up to ``num_threads`` daemon threads, started when they are needed. With 0, :meth:`submit` makes the call itself.

    Examples:
        >>> pool = Pool(2)
        >>> _ = pool.submit(7, lambda: "done")
        >>> [(call.slot, call.result) for call in pool.finished(5.0)]
        [(7, 'done')]
        >>> pool.close(5.0)
        []
    """

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self._lock = threading.Lock()
        self._queue: SimpleQueue[Call | None] = SimpleQueue()
        self._finished: SimpleQueue[Call | None] = SimpleQueue()
        self._threads = self._unfinished = 0
        self._started: list[threading.Thread] = []
        self._closed = False

    def submit(self, slot: int, function: Callable[[], Any]) -> Call:
        """Call ``function`` in a thread; :meth:`finished` returns the call."""
        call = Call(slot, function)
        if self._closed:
            raise RuntimeError("The pool was closed.")
        if self.num_threads == 0:
            call.run()
            call.finished = True
            self._finished.put(call)
            return call
        with self._lock:
            self._unfinished += 1
            self._start()
        self._queue.put(call)
        return call

    def finished(self, timeout: float) -> list[Call]:
        """The calls that finished since; waits up to ``timeout`` seconds for the first one, or until :meth:`wake`."""
        calls: list[Call] = []
        end = time.monotonic() + timeout
        try:
            call = self._finished.get(timeout=timeout) if timeout > 0 else self._finished.get_nowait()
            while True:
                if call is not None:
                    calls.append(call)
                elif time.monotonic() < end:
                    return calls
                call = self._finished.get_nowait()
        except Empty:
            return calls

    def wake(self) -> None:
        """End a wait in :meth:`finished`."""
        self._finished.put(None)

    def wait(self, calls: Mapping[int, Call], busy_since: Callable[[int], float | None], timeout: float | None) -> None:
        """Wait until all ``calls`` (slot -> call) are finished, or given up (see :meth:`give_up`)."""
        open_ = {slot: call for slot, call in calls.items() if not call.finished}
        while open_:
            for call in self.finished(LOOK if timeout is None else min(LOOK, timeout / 4)):
                if open_.get(call.slot) is call:
                    del open_[call.slot]
            if timeout is not None:
                for call in self.give_up(open_, busy_since, timeout):
                    del open_[call.slot]

    def give_up(
        self, calls: Mapping[int, Call], busy_since: Callable[[int], float | None], timeout: float
    ) -> list[Call]:
        """Abandon what takes too long; the global random generators are taken from its threads.

        Args:
            calls: by slot, calls that are not finished.
            busy_since: when the call of a slot reached the environment; ``None``: it waits for another one.
            timeout: seconds that a call may be with its environment.

        Returns:
            The calls given up, each with a ``TimeoutError`` as its ``error``.
        """
        now, given_up = time.monotonic(), []
        for slot, call in calls.items():
            since = busy_since(slot)
            if since is not None and now - since > timeout and self.abandon(call):
                revoke_global_rng(call.thread)
                call.error = TimeoutError(f"no answer within step_timeout={timeout} s")
                given_up.append(call)
        return given_up

    def abandon(self, call: Call) -> bool:
        """Give up a call; its thread takes no other. Returns False if the call has finished in the meantime."""
        with self._lock:
            if call.finished:
                return False
            call.abandoned = True
            self._threads -= 1
            self._unfinished -= 1
            self._started = [thread for thread in self._started if thread.ident != call.thread]
            self._start()
            return True

    def close(self, timeout: float) -> list[int]:
        """Let the threads end with the calls that they are in; those of abandoned calls do not count. Safe to call twice.

        Args:
            timeout: seconds to wait for them.

        Returns:
            The identifiers of the threads that are left behind.
        """
        self._closed = True
        for _ in range(self._threads):
            self._queue.put(None)
        end = time.monotonic() + timeout
        for thread in self._started:
            thread.join(max(0.0, end - time.monotonic()))
        return [thread.ident or 0 for thread in self._started if thread.is_alive()]

    def _start(self) -> None:
        if self._threads < min(self.num_threads, self._unfinished):
            self._threads += 1
            self._started = [thread for thread in self._started if thread.is_alive()]
            self._started.append(threading.Thread(target=self._work, name="torchrl_llm environment", daemon=True))
            self._started[-1].start()

    def _work(self) -> None:
        while (call := self._queue.get()) is not None:
            if self._closed:
                continue
            call.run()
            with self._lock:
                if call.abandoned:
                    return
                call.finished = True
                self._unfinished -= 1
            self._finished.put(call)
