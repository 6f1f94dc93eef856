"""Rollouts in a background thread: :class:`BackgroundThread`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from torchrl_llm.episode import Episode

_POLL_INTERVAL = 1.0  # seconds; who waits for the thread must notice that it died

Step = Callable[[bool], tuple[list[Episode] | None, bool]]


class BackgroundThread:
    """Collects while the caller trains, and returns a batch when the caller waits for one.

    The exploration type is the caller's: executors that run here say with each request whether
    decoding is greedy.

    Args:
        step: one step of the executor; told whether a batch is wanted, it returns the batch if that
            is complete, and whether anything is in flight.
        wake: ends a wait in ``step``.
    """

    def __init__(self, step: Step, wake: Callable[[], None]) -> None:
        self._step, self._wake = step, wake
        self._change = threading.Condition()
        self._wanted = self._idle = self._stopping = False
        self._pauses = 0
        self._batch: list[Episode] | None = None
        self._error: BaseException | None = None
        self._last_step = time.monotonic()
        # A daemon, so that a policy that hangs does not hold up the end of the process.
        self._thread = threading.Thread(target=self._drive, name="torchrl_llm collector", daemon=True)
        self._thread.start()

    def fetch(self, timeout: float) -> list[Episode]:
        """The next batch. Raises what the thread raised."""
        with self._change:
            self._wanted = True
            self._wait_until(lambda: self._batch is not None, timeout)
            batch, self._batch = self._batch, None
        assert batch is not None
        return batch

    @contextmanager
    def paused(self, timeout: float) -> Iterator[None]:
        """Block until the thread is between two steps, and hold it there."""
        with self._change:
            # A count: pauses may be nested, such as a saved state within an evaluation.
            self._pauses += 1
        try:
            with self._change:
                self._wait_until(lambda: self._idle or not self._thread.is_alive(), timeout)
            yield
        finally:
            with self._change:
                self._pauses -= 1
                self._change.notify_all()

    def stop(self, timeout: float) -> bool:
        """Whether the thread ended within ``timeout`` seconds."""
        with self._change:
            self._stopping = True
            self._change.notify_all()
            self._wake()
        # Outside of the lock, which the thread needs in order to end.
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _wait_until(self, reached: Callable[[], bool], timeout: float) -> None:
        self._change.notify_all()
        # As well: the thread waits either for a change, or within a step for an environment.
        self._wake()
        while not reached():
            self._check(timeout)
            self._change.wait(_POLL_INTERVAL)

    def _check(self, timeout: float) -> None:
        if self._error is not None:
            raise self._error
        elapsed = time.monotonic() - self._last_step
        if not self._thread.is_alive() or elapsed > timeout:
            raise RuntimeError(f"The policy has not come back from a step for {elapsed:.0f} s. Is its engine alive?")

    def _drive(self) -> None:
        try:
            # Gradient mode belongs to the thread: the caller's does not count here. The exploration
            # type belongs to the process, and rollout() sets it: a context here would end after
            # rollout's, and restore the type that rollout had set.
            with torch.no_grad():
                while self._may_continue():
                    self._hand_over(*self._step(self._wanted))
        except BaseException as error:  # noqa: BLE001 (fetch raises it)
            with self._change:
                self._error = error
                self._change.notify_all()

    def _may_continue(self) -> bool:
        with self._change:
            while self._pauses and not self._stopping:
                self._idle = True
                self._change.notify_all()
                self._change.wait(_POLL_INTERVAL)
                # A pause is not a step that hangs, however long an evaluation takes.
                self._last_step = time.monotonic()
            self._idle = False
            self._last_step = time.monotonic()
            return not self._stopping

    def _hand_over(self, batch: list[Episode] | None, busy: bool) -> None:
        with self._change:
            if batch is not None:
                self._batch, self._wanted = batch, False
                self._change.notify_all()
            elif not (busy or self._wanted or self._pauses or self._stopping):
                self._change.wait(_POLL_INTERVAL)
