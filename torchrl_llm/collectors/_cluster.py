"""Processes that run workers: :class:`Cluster`, and Ray's, :class:`RayCluster`."""

from __future__ import annotations

import time
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol

from torchrl_llm.collectors._worker import RolloutWorker, WorkerInfo, WorkerRequest, WorkerResult, portable
from torchrl_llm.utils.optional import running_ray


class ProcessLostError(RuntimeError):
    """A process is gone, and with it the answer to a call."""


class Cluster(Protocol):
    """Processes, calls of what runs in them, and their clock. A call is answered once, and calls of
    a process in order."""

    def make_process(self) -> Any:
        """A process with a :class:`RolloutActor`; it may still be starting."""

    def call(self, process: Any, method: str, *args: Any, **kwargs: Any) -> Hashable:
        """Call a method of the actor in ``process``."""

    def answered(self, calls: Sequence[Hashable], timeout: float) -> Collection[Hashable]:
        """The ``calls`` that are answered; if there are none, wait up to ``timeout`` seconds
        for one."""

    def answer(self, call: Hashable) -> Any:
        """What a call that is answered returned, or raised.

        Raises:
            ProcessLostError: the process is gone.
        """

    def close(self, processes: Sequence[Any], timeout: float) -> None:
        """Let the actors in ``processes`` free what they have, all at once, for ``timeout`` seconds
        at most."""

    def end(self, process: Any) -> None:
        """End a process, whatever it does."""

    def resources(self) -> Mapping[str, float]:
        """What further processes may take; for messages."""

    def time(self) -> float:
        """Seconds, of a clock that never goes back."""


@contextmanager
def _portable_errors() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        sent = portable(error)
        if sent is error:
            raise
        raise sent from None


class RolloutActor:
    """What runs in a process: a :class:`~torchrl_llm.collectors._worker.RolloutWorker`.

    The worker is not made in ``__init__``, because Ray does not return the exceptions of that.
    """

    worker: RolloutWorker

    @_portable_errors()
    def open(self, **settings: Any) -> WorkerInfo:
        """Make the worker."""
        self.worker = RolloutWorker(**settings)
        return self.worker.info()

    @_portable_errors()
    def run(self, request: WorkerRequest, weights: Any = None) -> WorkerResult:
        """See :meth:`RolloutWorker.run`."""
        return self.worker.run(request, weights)

    def close(self) -> None:
        """Free environment and policy."""
        self.worker.close()


class RayCluster(Cluster):
    """Actors of Ray.

    Args:
        options: of the actors, such as ``{"num_cpus": 1, "num_gpus": 0.5}``.
    """

    time = staticmethod(time.monotonic)

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._ray = running_ray()
        # Ray must not restart or retry: a new actor has no worker, and an episode would run twice.
        self._actor_class = self._ray.remote(RolloutActor).options(max_restarts=0, max_task_retries=0, **options)

    def make_process(self) -> Any:
        return self._actor_class.remote()

    def call(self, process: Any, method: str, *args: Any, **kwargs: Any) -> Hashable:
        call: Hashable = getattr(process, method).remote(*args, **kwargs)
        return call

    def answered(self, calls: Sequence[Hashable], timeout: float) -> Collection[Hashable]:
        self._ray.wait(calls, num_returns=1, timeout=timeout, fetch_local=False)
        return set(self._ray.wait(calls, num_returns=len(calls), timeout=0, fetch_local=False)[0])

    def answer(self, call: Hashable) -> Any:
        errors = self._ray.exceptions
        try:
            return self._ray.get(call)
        except (
            errors.RayActorError,
            errors.WorkerCrashedError,
            errors.OutOfMemoryError,
            errors.ObjectLostError,
        ) as error:
            raise ProcessLostError(str(error)) from error
        except errors.RayTaskError as error:
            # What was raised there, if it could be sent.
            raise (error.cause if isinstance(error.cause, BaseException) else error) from error

    def close(self, processes: Sequence[Any], timeout: float) -> None:
        # Calls would start a Ray that has been shut down again.
        if self._ray.is_initialized() and processes and timeout > 0:
            closed = [process.close.remote() for process in processes]
            self._ray.wait(closed, num_returns=len(closed), timeout=timeout)

    def end(self, process: Any) -> None:
        if self._ray.is_initialized():
            with suppress(Exception):  # it may be gone already
                self._ray.kill(process)

    def resources(self) -> Mapping[str, float]:
        available: Mapping[str, float] = self._ray.available_resources()
        return available
