"""Episodes over workers on Ray: :class:`RayExecutor`.

Assigns episodes to workers, and runs those of a lost worker again. Ray's object store carries nothing but weights, so an
episode is either with one worker or in this process.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from torchrl_llm.collectors._queue import EpisodeSource, RolloutExecutor
from torchrl_llm.collectors._worker import RolloutWorker, WorkerInfo, WorkerRequest, WorkerResult, portable
from torchrl_llm.envs.tasks import TaskSampler
from torchrl_llm.episode import Episode
from torchrl_llm.modules.engine import EngineError
from torchrl_llm.optional import running_ray

logger = logging.getLogger(__name__)

_WORKER_INTERVAL = 0.5  # seconds; workers answer at least so often, and new weights wait no longer for them
_WAIT = 0.2  # seconds; so long a step waits for an answer
_MAX_REQUESTS = 2  # that a worker has at a time: the next one is there when it has answered one


class WorkerLostError(RuntimeError):
    """A rollout worker was lost again and again, or did not start; the message says why and what to do."""


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
    """The actor of Ray: a process with a :class:`~torchrl_llm.collectors._worker.RolloutWorker`.

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


@dataclass(eq=False)
class _Worker:
    """The state of a worker in this process.

    Attributes:
        index: its number.
        actor: Ray's handle.
        starting: the call that starts it; ``None`` once it is up.
        since: when the oldest unanswered call was made.
        info: how it was made; ``None`` before it is up.
        held: by serial number, episodes that it runs.
        new: serial numbers among them that were not requested yet.
        dropped: serial numbers of episodes to cancel, not requested yet.
        calls: requests that it has not answered.
        version: of the weights that it was given last.
        losses: how often it was lost since it finished an episode.
    """

    index: int
    actor: Any = None
    starting: Any = None
    since: float = 0.0
    info: WorkerInfo | None = None
    held: dict[int, Episode] = field(default_factory=dict)
    new: list[int] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    calls: deque[Any] = field(default_factory=deque)
    version: int = -1
    losses: int = 0

    @property
    def slots(self) -> int:
        """Of its environment; 0 before it is up."""
        return 0 if self.info is None else self.info.slots

    @property
    def name(self) -> str:
        """For messages."""
        where = "" if self.info is None else f" (process {self.info.pid} on {self.info.host})"
        return f"rollout worker {self.index}{where}"


class RayExecutor(RolloutExecutor):
    """Runs episodes on workers: each has a few more than it has slots, so that no slot waits for a message.

    A worker that dies, or does not answer for ``timeout`` seconds, is replaced; its episodes are run from their start by the
    next worker with room.

    Args:
        queue: the episodes.
        make_worker: the arguments of :class:`~torchrl_llm.collectors._worker.RolloutWorker`.
        num_workers: how many.
        options: of Ray's actors, such as ``{"num_cpus": 1, "num_gpus": 0.5}``.
        task_sampler: returns the current tasks.
        weights: returns version and reference of the weights to sample with, or ``None``.
        timeout: seconds without an answer after which a worker counts as lost.
        start_timeout: seconds that workers may take to start.
        max_losses: how often in a row a worker may be lost without having finished an episode.
    """

    def __init__(
        self,
        queue: EpisodeSource,
        make_worker: Mapping[str, Any],
        *,
        num_workers: int,
        options: Mapping[str, Any],
        task_sampler: Callable[[], TaskSampler],
        weights: Callable[[], tuple[int, Any] | None],
        timeout: float,
        start_timeout: float,
        max_losses: int,
    ) -> None:
        self._ray = running_ray()
        # Ray must not restart or retry: a new actor has no worker, and an episode would run twice.
        self._actor_class = self._ray.remote(RolloutActor).options(max_restarts=0, max_task_retries=0, **options)
        self._queue, self._make_worker = queue, make_worker
        self._task_sampler, self._weights = task_sampler, weights
        self._timeout, self._start_timeout, self._max_losses = timeout, start_timeout, max_losses
        # Not episode ids: a task that runs again must not get the answer of its first run.
        self._serials = count()
        self._waiting: deque[Episode] = deque()  # sampled, and with no worker
        self._last_group: tuple[int, _Worker] | None = None  # the group sampled last, and its worker
        self.lost = 0
        self.parity_gap = math.nan
        self.workers = [_Worker(index) for index in range(num_workers)]
        try:
            for worker in self.workers:
                self._start(worker)
            while any(worker.starting is not None for worker in self.workers):
                self._collect_results(_WAIT)
        except BaseException:
            # Workers that are up would keep their resources.
            self.close(0.0)
            raise

    @property
    def in_flight(self) -> int:
        return len(self._waiting) + sum(len(worker.held) for worker in self.workers)

    def step(self) -> bool:
        self._assign()
        for worker in self.workers:
            self._send_request(worker)
        self._collect_results(_WAIT)
        return self.in_flight > 0

    def release(self, episode: Episode) -> None:
        if episode in self._waiting:
            self._waiting.remove(episode)
        for worker in self.workers:
            for serial in [serial for serial, held in worker.held.items() if held is episode]:
                del worker.held[serial]
                if serial in worker.new:
                    worker.new.remove(serial)
                else:
                    worker.dropped.append(serial)

    def clear(self) -> None:
        """Forget all episodes; results of them that still come are ignored."""
        for episode in [*self._waiting, *(each for worker in self.workers for each in worker.held.values())]:
            self.release(episode)

    def close(self, timeout: float) -> None:
        """Let the workers close environment and policy, for ``timeout`` seconds at most; then end their processes."""
        if self._ray.is_initialized():
            up = [worker.actor for worker in self.workers if worker.info is not None]
            if up and timeout > 0:
                # All at once: each may take up to the timeout.
                closed = [actor.close.remote() for actor in up]
                self._ray.wait(closed, num_returns=len(closed), timeout=timeout)
            for worker in self.workers:
                self._end(worker)
        for worker in self.workers:
            worker.actor = worker.info = worker.starting = None
            worker.calls.clear()

    # ------------------------------------------------------------------ requests

    def _assign(self) -> None:
        """Give whole groups to the worker with the least to do: their prompts are the same, so engines can share them."""
        up = [worker for worker in self.workers if worker.slots and len(worker.calls) < _MAX_REQUESTS]
        while up:
            idlest = min(up, key=lambda worker: len(worker.held) / worker.slots)
            # A quarter more than slots: a slot that is free takes the next episode without waiting for a message.
            if len(idlest.held) >= idlest.slots + max(1, idlest.slots // 4):
                return
            episode = self._waiting.popleft() if self._waiting else self._queue.next()
            if episode is None:
                return
            group = episode.group_id
            if self._last_group is None or self._last_group[0] != group or self._last_group[1].info is None:
                self._last_group = group, idlest
            worker, serial = self._last_group[1], next(self._serials)
            worker.held[serial] = episode
            worker.new.append(serial)

    def _send_request(self, worker: _Worker) -> None:
        busy = worker.held or worker.dropped
        if worker.info is None or len(worker.calls) >= _MAX_REQUESTS or not busy:
            return
        current = self._weights()
        weights = () if current is None or current[0] == worker.version else (current[1],)
        # When it is sent: requests are answered in order, so the worker has it before anything that comes later.
        worker.version = worker.version if current is None else current[0]
        start = [(serial, worker.held[serial].index) for serial in worker.new]
        request = WorkerRequest(self._task_sampler(), start, tuple(worker.dropped), _WORKER_INTERVAL)
        # The timeout is for the oldest request: a second one waits behind it.
        if not worker.calls:
            worker.since = time.monotonic()
        worker.calls.append(worker.actor.run.remote(request, *weights))
        worker.new, worker.dropped = [], []

    # ------------------------------------------------------------------ results

    def _collect_results(self, seconds: float) -> None:
        refs = [ref for worker in self.workers for ref in (*worker.calls, worker.starting) if ref is not None]
        if refs:
            # Read all answers before timeouts are checked: after a long pause no worker that has answered is lost.
            self._ray.wait(refs, num_returns=1, timeout=seconds, fetch_local=False)
            done = set(self._ray.wait(refs, num_returns=len(refs), timeout=0, fetch_local=False)[0])
            for worker in self.workers:
                self._read_answers(worker, done)
        now = time.monotonic()
        for worker in self.workers:
            if worker.calls and now - worker.since > self._timeout:
                self._lose(worker, TimeoutError(f"no answer for {now - worker.since:.0f} s"))
            elif worker.starting is not None and now - worker.since > self._start_timeout:
                self._handle_late_start(worker, now)

    def _read_answers(self, worker: _Worker, done: set[Any]) -> None:
        errors = self._ray.exceptions
        gone = (errors.RayActorError, errors.WorkerCrashedError, errors.OutOfMemoryError, errors.ObjectLostError)
        try:
            if worker.starting in done:
                worker.info = self._ray.get(worker.starting)
                worker.starting = None
            while worker.calls and worker.calls[0] in done:
                result = self._ray.get(worker.calls.popleft())
                worker.since = time.monotonic()
                self._record(worker, result)
        except gone as error:
            self._lose(worker, error)
        except errors.RayTaskError as error:
            cause: BaseException = error.cause if isinstance(error.cause, BaseException) else error
            if not isinstance(cause, EngineError):
                cause.add_note(f"It was raised in the {worker.name}.")
                raise cause from error
            # An engine that died does not come back in its process; a new worker starts another.
            self._lose(worker, cause)

    def _record(self, worker: _Worker, result: WorkerResult) -> None:
        for serial, finished in result.finished:
            # None: released here while the worker ran it.
            if (episode := worker.held.pop(serial, None)) is not None:
                # The queue has this object: it is filled, not replaced.
                vars(episode).update(vars(finished))
                worker.losses = 0
        if result.parity_gap is not None:
            self.parity_gap = result.parity_gap
        for _ in range(result.timeouts):
            self._queue.count_timeout()
        for serial, fault in result.failed:
            if (episode := worker.held.pop(serial, None)) is not None:
                self._queue.fail(episode, fault)

    # ------------------------------------------------------------------ starts and losses

    def _start(self, worker: _Worker) -> None:
        worker.actor = self._make_actor()
        worker.starting = worker.actor.open.remote(**self._make_worker)
        worker.since, worker.version = time.monotonic(), -1

    def _make_actor(self) -> Any:
        return self._actor_class.remote()

    def _end(self, worker: _Worker) -> None:
        with suppress(Exception):  # it may be gone already
            self._ray.kill(worker.actor)

    def _lose(self, worker: _Worker, cause: BaseException) -> None:
        """Replace a worker; its episodes are assigned again, before any other."""
        self.lost += 1
        worker.losses += 1
        logger.warning("The %s was lost: %s. Its %d episodes are run again.", worker.name, cause, len(worker.held))
        self._end(worker)
        # extendleft reverses: the lowest index comes first.
        self._waiting.extendleft(sorted(worker.held.values(), key=lambda episode: -episode.index))
        worker.held, worker.new, worker.dropped, worker.info = {}, [], [], None
        worker.calls.clear()
        if worker.losses > self._max_losses:
            self._give_up(worker, cause)
        self._start(worker)

    def _handle_late_start(self, worker: _Worker, now: float) -> None:
        """Give up if the first start is late or no worker is up; else continue with the others."""
        late = f"not up after {now - worker.since:.0f} s"
        if self.lost == 0 or all(each.info is None for each in self.workers):
            self._give_up(worker, TimeoutError(late))
        logger.warning("The %s that was to be replaced is %s. The others continue without it.", worker.name, late)
        worker.since = now

    def _give_up(self, worker: _Worker, cause: BaseException) -> None:
        up = sum(each.info is not None for each in self.workers)
        raise WorkerLostError(
            f"The {worker.name} was lost {worker.losses} times without having finished an episode, or cannot be started "
            f"({cause}); {up} of {len(self.workers)} are up. Ray has {self._ray.available_resources()} to give. Ask for less "
            "by the workers' options, for fewer workers, or look at their logs (ray logs)."
        ) from cause
