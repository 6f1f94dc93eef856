"""One text environment, apart from all others: its random generators (:class:`IsolatedEnv`) and its thread (:class:`Pool`).

An environment may draw from the global generators of ``random`` and ``numpy.random``. There is one set of them in a process,
so it is lent to one environment at a time, and put back. An environment may hang: its thread is left behind, and the
generators are taken from it.
"""

from __future__ import annotations

import inspect
import logging
import os
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
from numpy.random import mtrand

from torchrl_llm.envs import gem_catalog
from torchrl_llm.envs.tasks import Stream, TaskIdentity, task_of
from torchrl_llm.envs.text_env import TextEnv, TextStep, read_reset
from torchrl_llm.interrupts import children_ignore_sigint

logger = logging.getLogger(__name__)

_WARN_AFTER = 60.0  # seconds between two warnings that an environment keeps the global generators
_LONG_CALL = 0.2  # seconds; an environment that keeps others waiting for longer is told of `thread_safe`
_hinted: set[str] = set()


# ---------------------------------------------------------------------- who has the global generators


class _Loan:
    """One thread has the global generators, and may borrow them again; ``state`` is what to put back."""

    def __init__(self, outer: _Loan | None, *, for_envs: bool) -> None:
        self.thread = threading.get_ident()
        self.outer, self.for_envs = outer, for_envs
        self.wanted = self.revoked = False
        self.state = random.getstate(), mtrand.get_bit_generator(), np.random.get_state()

    def put_back(self) -> None:
        python, bits, numpy = self.state
        random.setstate(python)
        mtrand.set_bit_generator(bits)
        np.random.set_state(numpy)


_lending = threading.Condition()
_loan: _Loan | None = None


@contextmanager
def kept_global_rng(*, for_envs: bool = False) -> Iterator[None]:
    """Leave the global generators of ``random`` and ``numpy.random`` as they were found.

    One thread of the process has them at a time; others wait here. The same thread may enter again.

    Args:
        for_envs: only :class:`IsolatedEnv` draws inside; then nothing is put back between one of them and the next. Default
            False.

    Examples:
        >>> state = random.getstate()
        >>> with kept_global_rng():
        ...     _ = random.random()
        >>> random.getstate() == state
        True
    """
    loan = _borrow(for_envs=for_envs)
    try:
        yield
    finally:
        _give_back(loan)


def _borrow(*, for_envs: bool) -> _Loan:
    global _loan
    with _lending:
        while _loan is not None and _loan.thread != threading.get_ident():
            _loan.wanted = True
            if not _lending.wait(_WARN_AFTER):
                logger.warning("Waiting for the global random generators: an environment has kept them for long.")
        _loan = _Loan(_loan, for_envs=for_envs)
        return _loan


def _give_back(loan: _Loan) -> None:
    global _loan
    with _lending:
        if not loan.revoked:
            loan.put_back()
            _loan = loan.outer
            _lending.notify()


def revoke_global_rng(thread: int) -> bool:
    """Take the global generators from a thread that hangs, and put them back as it found them.

    Args:
        thread: its ``threading.get_ident()``.

    Returns:
        Whether the thread had them.
    """
    global _loan
    with _lending:
        if _loan is None or _loan.thread != thread:
            return False
        while _loan is not None:
            _loan.revoked, last, _loan = True, _loan, _loan.outer
        last.put_back()
        _lending.notify_all()
    logger.warning(
        "An environment that hangs had the global generators of random and numpy.random; they were taken from it. If it "
        "ever continues, it draws from everyone's, and later episodes may not be reproducible."
    )
    return True


_spare: list[np.random.MT19937] = []
"""Generators of environments that are gone, for new ones. None is ever freed: numpy crashes if its global generator is exchanged,
and the old one freed, while another thread is in the middle of reading it."""


def _new_generator(owner: object) -> np.random.MT19937:
    generator = _spare.pop() if _spare else np.random.MT19937(0)
    weakref.finalize(owner, _spare.append, generator).atexit = False
    return generator


# ---------------------------------------------------------------------- one environment


class IsolatedEnv:
    """A text environment with generators of its own in place of the global ones.

    Several may be called from several threads, each from one at a time. Unless the environment is ``thread_safe``
    (:class:`TextEnv`), a call waits until no other one runs.

    Args:
        factory: makes the environment; called at the first reset.
        name: of the environment, for messages.
        rows: whose rows it plays, of one of GEM's data sets (:func:`~torchrl_llm.envs.divide_rows`); default ``None``:
            all.

    Attributes:
        task: what the last reset started; ``None`` before the first.
        busy_since: ``time.monotonic()`` when the running call reached the environment; ``None``: no call is there.

    Examples:
        >>> from torchrl_llm.testing.environments import StopOrGo
        >>> env = IsolatedEnv(StopOrGo)
        >>> env.reset(0), env.step("stop").reward
        ('Say stop or go on.', 1.0)
    """

    def __init__(self, factory: Callable[[], TextEnv], name: str = "", *, rows: Stream | None = None) -> None:
        self.busy_since: float | None = None
        self.task: TaskIdentity | None = None
        self._factory, self._name, self._rows = factory, name, rows
        self._env: TextEnv | None = None
        self._takes_seed = True
        self._thread_safe = False
        self._python: Any = None
        self._numpy = _new_generator(self)

    @property
    def env(self) -> TextEnv | None:
        """The environment; ``None`` before the first reset."""
        return self._env

    def reset(self, seed: int) -> str:
        """Start the task that ``seed`` names and return the first message."""
        env = self._env or self._make()
        with self._calling(seed):
            text, message = read_reset(env.reset(seed=seed) if self._takes_seed else env.reset())
            # Asked for after each reset: a wrapper may make the environment inside only then.
            self.task = task_of(env, text, gem_catalog.hidden_reader(env))
        return message

    def step(self, action: str) -> TextStep:
        """Play one turn."""
        assert self._env is not None
        with self._calling():
            result = self._env.step(action)
        return TextStep.read(result)

    def _make(self) -> TextEnv:
        # What it draws when it is made must not depend on the first task of its slot: hence the seed 0.
        with self._calling(0), children_ignore_sigint():
            env = self._factory()
            gem_catalog.prepare(env, self._name, self._rows)
        self._takes_seed = "seed" in inspect.signature(env.reset).parameters
        self._thread_safe = bool(getattr(env, "thread_safe", False))
        self._env = env
        return env

    @contextmanager
    def _calling(self, seed: int | None = None) -> Iterator[None]:
        """Around a call of the environment: its generators are the global ones, from ``seed`` or from where they were."""
        isolated, process = not self._thread_safe, os.getpid()
        with self._generators() if isolated else nullcontext():
            self.busy_since = time.monotonic()
            if isolated:
                self._swap_in(seed)
            try:
                yield
            finally:
                if os.getpid() != process:
                    os._exit(1)  # a child that the environment forked; it must not play on as a second run
                self.busy_since = None
            if isolated:
                self._python = random.getstate()

    @contextmanager
    def _generators(self) -> Iterator[None]:
        current = _loan
        if current is not None and current.for_envs and current.thread == threading.get_ident():
            yield
            return
        loan = _borrow(for_envs=True)
        start = time.monotonic()
        try:
            yield
        finally:
            _give_back(loan)
            if loan.wanted and self._env is not None and time.monotonic() - start > _LONG_CALL:
                self._hint()

    def _swap_in(self, seed: int | None) -> None:
        mtrand.set_bit_generator(self._numpy)
        if seed is None:
            random.setstate(self._python)
        else:
            random.seed(seed)
            np.random.seed(seed)

    def _hint(self) -> None:
        if self._name not in _hinted:
            _hinted.add(self._name)
            logger.warning(
                "A call of the environment %r took more than %s s while others waited: environments that may draw from "
                "the global generators run one at a time. If it never does, set its attribute thread_safe = True.",
                self._name,
                _LONG_CALL,
            )


# ---------------------------------------------------------------------- its thread


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
        except BaseException as error:  # noqa: BLE001 (the caller raises it)
            self.error = error


class Pool:
    """Up to ``num_threads`` daemon threads, started when they are needed. With 0, :meth:`submit` makes the call itself.

    The standard library's executor joins its threads when the interpreter exits, so one environment that hangs would hold up
    the exit. These threads are left behind, and a call that does not come back can be given up.

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
