"""Isolation of text environments: random generators of their own (:class:`IsolatedEnv`) and threads
(:class:`Pool`).

An environment may draw from the global generators of ``random`` and ``numpy.random``. There is one
set of them in a process, so they are lent to one environment at a time, and restored. An
environment may hang: its thread is left behind, and the generators are revoked.
"""

from __future__ import annotations

import logging
import os
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
from numpy.random import mtrand

from torchrl_llm.envs import gem_catalog
from torchrl_llm.envs.env_reset import reset_env, takes_seed
from torchrl_llm.envs.env_spec import EnvSpec
from torchrl_llm.envs.faults import EnvironmentFault
from torchrl_llm.envs.tasks import Stream, TaskIdentity, task_of
from torchrl_llm.envs.text_env import TextEnv, TextStep, read_reset
from torchrl_llm.utils.interrupts import children_ignore_sigint

logger = logging.getLogger(__name__)

_WARN_AFTER = 60.0  # seconds between two warnings that an environment keeps the global generators
# seconds; after a call that makes others wait for longer, a hint names `thread_safe`
_LONG_CALL = 0.2
_hinted: set[str] = set()


# ---------------------------------------- the global generators


class _Loan:
    """The right of one thread to use the global generators; ``state`` is restored at its end."""

    def __init__(self, outer: _Loan | None, *, for_envs: bool) -> None:
        self.thread = threading.get_ident()
        self.outer, self.for_envs = outer, for_envs
        self.wanted = self.revoked = False
        self.state = random.getstate(), mtrand.get_bit_generator(), np.random.get_state()

    def restore(self) -> None:
        # The generator before its state: set_state writes into the generator that is global at the
        # moment.
        python, bits, numpy = self.state
        random.setstate(python)
        mtrand.set_bit_generator(bits)
        np.random.set_state(numpy)


_lending = threading.Condition()
_loan: _Loan | None = None


@contextmanager
def kept_global_rng(*, for_envs: bool = False) -> Iterator[_Loan]:
    """Leave the global generators of ``random`` and ``numpy.random`` as they were found.

    One thread of the process has them at a time; others wait here. The same thread may enter again.

    Args:
        for_envs: only :class:`IsolatedEnv` draws inside; then nothing is restored between one of
            them and the next. Default False.

    Examples:
        >>> state = random.getstate()
        >>> with kept_global_rng():
        ...     _ = random.random()
        >>> random.getstate() == state
        True
    """
    global _loan
    with _lending:
        while _loan is not None and _loan.thread != threading.get_ident():
            _loan.wanted = True
            if not _lending.wait(_WARN_AFTER):
                logger.warning("Waiting for the global random generators: an environment has kept them for long.")
        # Between environments nothing needs restoring: each begins by setting the generators.
        nested = for_envs and _loan is not None and _loan.for_envs
        if not nested:
            _loan = _Loan(_loan, for_envs=for_envs)
        loan = _loan
    assert loan is not None
    try:
        yield loan
    finally:
        with _lending:
            # A revoked loan restores nothing: the generators are in use by others.
            if not (nested or loan.revoked):
                loan.restore()
                _loan = loan.outer
                _lending.notify()


def _own_loan() -> _Loan | None:
    """The loan of this thread inside which only environments draw: entering it again, at each call,
    changes nothing."""
    loan = _loan
    return loan if loan is not None and loan.for_envs and loan.thread == threading.get_ident() else None


def revoke_global_rng(thread: int) -> bool:
    """Take the global generators from a thread that hangs, and restore them as it found them.

    Args:
        thread: its ``threading.get_ident()``.

    Returns:
        Whether the thread had them.
    """
    global _loan
    with _lending:
        if _loan is None or _loan.thread != thread:
            return False
        # To the outermost loan: its state is what the thread found.
        while _loan is not None:
            _loan.revoked, last, _loan = True, _loan, _loan.outer
        last.restore()
        _lending.notify_all()
    logger.warning(
        "An environment that hangs had the global generators of random and numpy.random; they were taken from it. If it "
        "ever continues, it draws from everyone's, and later episodes may not be reproducible."
    )
    return True


_spare: list[np.random.MT19937] = []
"""Generators of environments that are gone, for new ones. None is ever freed: numpy crashes if its
global generator is exchanged, and the old one freed, while another thread is in the middle of
reading it."""


def _new_generator(owner: object) -> np.random.MT19937:
    generator = _spare.pop() if _spare else np.random.MT19937(0)
    weakref.finalize(owner, _spare.append, generator).atexit = False
    return generator


# ---------------------------------------- one environment


class IsolatedEnv:
    """A text environment with generators of its own in place of the global ones.

    Several may be called from several threads, each from one at a time. Unless the environment is
    ``thread_safe`` (:class:`TextEnv`), a call waits until no other one runs.

    Args:
        source: makes the environment, at the first reset: its spec, or a function.
        rows: the stream whose rows it uses, of one of GEM's data sets
            (:func:`~torchrl_llm.envs.divide_rows`); default ``None``: all rows.
        options: keyword arguments of its factory, names and values; default none.

    Attributes:
        spec: of the environment.
        env: the environment; ``None`` before the first reset.
        task: what the last reset started; ``None`` before the first.
        message: the last message; empty before the first reset.
        busy_since: ``time.monotonic()`` when the running call reached the environment; ``None``: no
            call is there.

    Examples:
        >>> from torchrl_llm.testing.environments import StopOrGo
        >>> env = IsolatedEnv(StopOrGo)
        >>> env.reset(0), env.step("stop").reward
        ('Say stop or go on.', 1.0)
    """

    def __init__(
        self,
        source: EnvSpec | Callable[..., TextEnv],
        *,
        rows: Stream | None = None,
        options: tuple[tuple[str, Any], ...] = (),
    ) -> None:
        self.options = options
        self.busy_since: float | None = None
        self.task: TaskIdentity | None = None
        self.message = ""
        self.spec, self._rows = source if isinstance(source, EnvSpec) else EnvSpec("", source), rows
        self.env: TextEnv | None = None
        self._takes_seed = True
        self._thread_safe = False
        # numpy lets its generator be exchanged; Python's cannot be, so its state is copied at each
        # call.
        self._python: Any = None
        self._numpy = _new_generator(self)

    def reset(self, seed: int) -> str:
        """Start the task that ``seed`` names and return the first message."""
        env = self.env or self.make()
        # A reset draws from its task alone, a step continues where the last call left the
        # generators.
        with self._calling(seed):
            found, self._takes_seed = reset_env(env, seed if self._takes_seed else None, first=self.task is None)
            text, self.message = read_reset(found)
            # Asked for after each reset: a wrapper may make the environment inside only then.
            self.task = task_of(env, text, gem_catalog.hidden_reader(env))
        return self.message

    def step(self, action: str) -> TextStep:
        """Run one turn."""
        assert self.env is not None
        with self._calling():
            result = self.env.step(action)
        step = TextStep.read(result, self.spec.extras)
        self.message = step.message
        return step

    def make(self) -> TextEnv:
        """Make the environment."""
        # What it draws when it is made must not depend on the first task of its slot: hence the
        # seed 0.
        with self._calling(0), children_ignore_sigint():
            env = self.spec.make(**dict(self.options))
            gem_catalog.prepare(env, self.spec.name, self._rows)
        # a reset may have found that it takes none
        self._takes_seed = self._takes_seed and takes_seed(env)
        self._thread_safe = bool(getattr(env, "thread_safe", False))
        self.spec.check(env)
        self.env = env
        return env

    @contextmanager
    def _calling(self, seed: int | None = None) -> Iterator[None]:
        """Around a call of the environment: its generators are the global ones, from ``seed`` or
        from where they were."""
        isolated, process = not self._thread_safe, os.getpid()
        lent = _own_loan() if isolated else None
        with kept_global_rng(for_envs=True) if isolated and lent is None else nullcontext(lent) as loan:
            start = self.busy_since = time.monotonic()
            if isolated:
                self._swap_in(seed)
            try:
                yield
            finally:
                if os.getpid() != process:
                    # a child that the environment forked must not continue as a second run
                    os._exit(1)
                self.busy_since = None
                if loan is not None and loan.wanted and self.env is not None and time.monotonic() - start > _LONG_CALL:
                    self._hint()
            # Not after an error: the environment is dropped then, and its state with it.
            if isolated:
                self._python = random.getstate()

    def _swap_in(self, seed: int | None) -> None:
        mtrand.set_bit_generator(self._numpy)
        if seed is None:
            random.setstate(self._python)
        else:
            random.seed(seed)
            np.random.seed(seed)

    def _hint(self) -> None:
        if self.spec.name not in _hinted:
            _hinted.add(self.spec.name)
            logger.warning(
                "A call of the environment %r took more than %s s while others waited: environments that may draw from "
                "the global generators run one at a time. If it never does, set its attribute thread_safe = True.",
                self.spec.name,
                _LONG_CALL,
            )


# ---------------------------------------- threads

MAX_THREADS = 32
"""Threads for any number of slots, unless more are asked for."""
POLL_INTERVAL = 0.5
"""Seconds between two checks of calls that may hang, at most."""


class Call:
    """A call for a slot: running, or finished with a ``result`` or an ``error``.

    Attributes:
        submitted: ``time.monotonic()`` when it was made.
        seconds: from then on, in which a thread finished it; 0 without a thread.
    """

    def __init__(self, slot: int, function: Callable[[], Any]) -> None:
        self.slot, self._function = slot, function
        self.result: Any = None
        self.error: BaseException | None = None
        self.finished = self.abandoned = False
        self.thread = 0
        self.submitted, self.seconds = time.monotonic(), 0.0

    def run(self) -> None:
        """Call the function, in this thread."""
        self.thread = threading.get_ident()
        try:
            self.result = self._function()
        except BaseException as error:  # noqa: BLE001 (the caller raises it)
            self.error = error


class Pool:
    """Up to ``num_threads`` daemon threads, started when they are needed. With 0, :meth:`submit`
    makes the call itself.

    The standard library's executor joins its threads when the interpreter exits, so one environment
    that hangs would hold up the exit. These threads are left behind, and a call that does not
    return can be abandoned.

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
        self._unfinished = 0
        self._threads: list[threading.Thread] = []
        self._closed = False

    def submit(self, slot: int, function: Callable[[], Any]) -> Call:
        """Call ``function`` in a thread; :meth:`finished` returns the call.

        Raises:
            BaseException: without threads, what ``function`` raises, unless it is an
                :class:`EnvironmentFault`: other slots must not be called first.
        """
        call = Call(slot, function)
        if self._closed:
            raise RuntimeError("The pool was closed.")
        if self.num_threads == 0:
            call.run()
            if call.error is not None and not isinstance(call.error, EnvironmentFault):
                raise call.error
            call.finished = True
            self._finished.put(call)
            return call
        with self._lock:
            self._unfinished += 1
            self._start()
        self._queue.put(call)
        return call

    def finished(self, timeout: float) -> list[Call]:
        """The calls that finished since; waits up to ``timeout`` seconds for the first one, or
        until :meth:`wake`."""
        calls = []
        with suppress(Empty):
            calls.append(self._finished.get(timeout > 0, timeout))
            while True:
                calls.append(self._finished.get_nowait())
        return [call for call in calls if call is not None]

    def wake(self) -> None:
        """End a wait in :meth:`finished`."""
        self._finished.put(None)

    def wait(self, calls: Mapping[int, Call], busy_since: Callable[[int], float | None], timeout: float | None) -> None:
        """Wait until all ``calls`` (slot -> call) are finished, or abandoned (see
        :meth:`abandon_late`)."""
        while running := {slot: call for slot, call in calls.items() if not (call.finished or call.abandoned)}:
            # A quarter of the limit, so that a late call is noticed before it has taken 1.25 times
            # as long.
            self.finished(POLL_INTERVAL if timeout is None else min(POLL_INTERVAL, timeout / 4))
            if timeout is not None:
                self.abandon_late(running, busy_since, timeout)
        # calls that finished before the loop looked are still in that queue, and would pile up
        self.finished(0.0)

    def abandon_late(
        self, calls: Mapping[int, Call], busy_since: Callable[[int], float | None], timeout: float
    ) -> list[Call]:
        """Abandon the calls that take too long; the global random generators are taken from their
        threads.

        Args:
            calls: by slot, calls that are not finished.
            busy_since: when the call of a slot reached the environment; ``None``: it waits for
                another one.
            timeout: seconds that a call may be with its environment.

        Returns:
            The abandoned calls, each with a ``TimeoutError`` as its ``error``.
        """
        now, late = time.monotonic(), []
        for slot, call in calls.items():
            since = busy_since(slot)
            # Abandoned before its generators are taken: a call that has just finished leaves its
            # thread to another one.
            if since is not None and now - since > timeout and self.abandon(call):
                revoke_global_rng(call.thread)
                call.error = TimeoutError(f"no answer within step_timeout={timeout} s")
                late.append(call)
        return late

    def abandon(self, call: Call) -> bool:
        """Abandon a call; its thread takes no other. Returns False if the call has finished in the
        meantime."""
        with self._lock:
            if call.finished:
                return False
            call.abandoned = True
            self._unfinished -= 1
            # The thread still runs, and counts no more: another one may start in its place.
            self._threads = [thread for thread in self._threads if thread.ident != call.thread]
            self._start()
            return True

    def close(self, timeout: float) -> list[int]:
        """Let the threads end with the calls that they are in; threads of abandoned calls do not
        count. Safe to call twice.

        Args:
            timeout: seconds to wait for them.

        Returns:
            The identifiers of the threads that are left behind.
        """
        self._closed = True
        for _ in self._threads:
            self._queue.put(None)
        end = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        return [thread.ident or 0 for thread in self._threads if thread.is_alive()]

    def _start(self) -> None:
        if len(self._threads) < min(self.num_threads, self._unfinished):
            self._threads.append(threading.Thread(target=self._work, name="torchrl_llm environment", daemon=True))
            self._threads[-1].start()

    def _work(self) -> None:
        while (call := self._queue.get()) is not None:
            # What is queued is not called any more; a None ends the thread.
            if self._closed:
                continue
            call.run()
            call.seconds = time.monotonic() - call.submitted
            with self._lock:
                # Its result is not reported: the slot has a new environment, or a new task, by now.
                if call.abandoned:
                    return
                call.finished = True
                self._unfinished -= 1
            self._finished.put(call)
