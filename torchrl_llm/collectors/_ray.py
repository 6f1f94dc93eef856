"""Episodes over workers on Ray: :class:`RayExecutor`.

Assigns episodes to workers, and runs the episodes of a lost worker again. Ray's object store
carries nothing but weights, so an episode is either with one worker or in this process.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, field
from heapq import heapify, heapreplace
from itertools import count
from typing import Any

from torchrl_llm.collectors._cluster import Cluster, ProcessLostError
from torchrl_llm.collectors._queue import EpisodeSource, RolloutExecutor
from torchrl_llm.collectors._worker import WorkerInfo, WorkerRequest, WorkerResult
from torchrl_llm.envs.tasks import TaskSampler
from torchrl_llm.episode import Episode
from torchrl_llm.modules.engine import EngineError

logger = logging.getLogger(__name__)

# seconds; episodes of a worker that end so close together are reported together
_REPORT_INTERVAL = 0.02
# seconds; workers answer at least so often, and new weights wait for two answers at most
_WORKER_INTERVAL = 0.5
# Both grow with the number of workers: a message costs this process more than an episode does. So
# many seconds apart, messages take two fifths of its time.
_PER_WORKER = 0.003
_WAIT = 0.2  # seconds; so long a step waits for an answer
_MAX_REQUESTS = 2  # that a worker has at a time: the next one is there when it has answered one


class WorkerLostError(RuntimeError):
    """A rollout worker was lost again and again, or did not start; the message says why and what to
    do."""


@dataclass(eq=False)
class _Worker:
    """The state of a worker in this process.

    Attributes:
        index: its number.
        process: where it runs, the cluster's handle.
        starting: the call that starts it; ``None`` once it is up.
        since: when the oldest unanswered call was made.
        info: how it was made; ``None`` before it is up.
        held: by serial number, episodes that it runs.
        new: serial numbers among them that were not requested yet.
        dropped: serial numbers of episodes to cancel, not requested yet.
        calls: requests that it has not answered.
        reported: how many episodes its last answer had.
        version: of the weights that it was given last.
        losses: how often it was lost since it finished an episode.
    """

    index: int
    process: Any = None
    starting: Hashable | None = None
    since: float = 0.0
    info: WorkerInfo | None = None
    held: dict[int, Episode] = field(default_factory=dict)
    new: list[int] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    calls: deque[Hashable] = field(default_factory=deque)
    reported: int = 0
    version: int = -1
    losses: int = 0

    @property
    def slots(self) -> int:
        """Of its environment; 0 before it is up."""
        return 0 if self.info is None else self.info.slots

    @property
    def load(self) -> float:
        """Its episodes, over those that it should have, which are more than its slots: a free slot
        waits for no message.

        A quarter more, or twice as many as its last answer reported, if that is more.
        """
        return len(self.held) / (self.slots + max(1, self.slots // 4, 2 * self.reported))

    @property
    def name(self) -> str:
        """For messages."""
        where = "" if self.info is None else f" (process {self.info.pid} on {self.info.host})"
        return f"rollout worker {self.index}{where}"


class RayExecutor(RolloutExecutor):
    """Runs episodes on workers, each of which has a few more than it has slots.

    A worker that dies, or does not answer for ``timeout`` seconds, is replaced; its episodes are
    run from their start by the next worker with room.

    Args:
        queue: the episodes.
        make_worker: the arguments of :class:`~torchrl_llm.collectors._worker.RolloutWorker`.
        num_workers: how many.
        cluster: where they run.
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
        cluster: Cluster,
        task_sampler: Callable[[], TaskSampler],
        weights: Callable[[], tuple[int, Any] | None],
        timeout: float,
        start_timeout: float,
        max_losses: int,
    ) -> None:
        self._cluster, self._queue, self._make_worker = cluster, queue, make_worker
        self._task_sampler, self._weights = task_sampler, weights
        self._timeout, self._start_timeout, self._max_losses = timeout, start_timeout, max_losses
        # Not episode ids: a task that runs again must not get the answer of its first run.
        self._serials = count()
        self._waiting: deque[Episode] = deque()  # sampled, and with no worker
        # the group sampled last, and its worker
        self._last_group: tuple[int, _Worker] | None = None
        self.lost = 0
        self.parity_gap = math.nan
        self.workers = [_Worker(index) for index in range(num_workers)]
        # A worker that is healthy answers well within the timeout.
        least = min(num_workers * _PER_WORKER, timeout / 4)
        self._intervals = max(_REPORT_INTERVAL, least), max(_WORKER_INTERVAL, least)
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
        """Let the workers close environment and policy, for ``timeout`` seconds at most; then end
        their processes."""
        self._cluster.close([worker.process for worker in self.workers if worker.info is not None], timeout)
        for worker in self.workers:
            self._end(worker)
            worker.process = worker.info = worker.starting = None
            worker.calls.clear()

    # ---------------------------------------- requests

    def _assign(self) -> None:
        """Give whole groups to the worker with the least to do: their prompts are the same, so
        engines can share them."""
        up = [worker for worker in self.workers if worker.slots and len(worker.calls) < _MAX_REQUESTS]
        heap = [(worker.load, worker.index) for worker in up]
        heapify(heap)
        while heap and heap[0][0] < 1:
            load, idlest = heap[0][0], self.workers[heap[0][1]]
            # A group's worker gets more while others are the idlest.
            if load != idlest.load:
                heapreplace(heap, (idlest.load, idlest.index))
                continue
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
        # When it is sent: requests are answered in order, so the worker has it before anything that
        # comes later.
        worker.version = worker.version if current is None else current[0]
        start = [(serial, worker.held[serial].index) for serial in worker.new]
        request = WorkerRequest(self._task_sampler(), start, tuple(worker.dropped), *self._intervals)
        # The timeout is for the oldest request: a second one waits behind it.
        if not worker.calls:
            worker.since = self._cluster.time()
        worker.calls.append(self._cluster.call(worker.process, "run", request, *weights))
        worker.new, worker.dropped = [], []

    # ---------------------------------------- results

    def _collect_results(self, seconds: float) -> None:
        calls = [call for worker in self.workers for call in (*worker.calls, worker.starting) if call is not None]
        if calls:
            # Read all answers before timeouts are checked: after a long pause no worker that has
            # answered is lost.
            done = self._cluster.answered(calls, seconds)
            for worker in self.workers:
                self._read_answers(worker, done)
        now = self._cluster.time()
        for worker in self.workers:
            if worker.calls and now - worker.since > self._timeout:
                self._lose(worker, TimeoutError(f"no answer for {now - worker.since:.0f} s"))
            elif worker.starting is not None and now - worker.since > self._start_timeout:
                self._handle_late_start(worker, now)

    def _read_answers(self, worker: _Worker, done: Collection[Hashable]) -> None:
        if worker.starting in done and (info := self._answer(worker, worker.starting)) is not None:
            worker.info, worker.starting = info, None
        while worker.calls and worker.calls[0] in done:
            if (result := self._answer(worker, worker.calls.popleft())) is not None:
                worker.since = self._cluster.time()
                self._record(worker, result)

    def _answer(self, worker: _Worker, call: Hashable) -> Any:
        """What a worker answered; ``None``: it was lost, and is replaced."""
        try:
            return self._cluster.answer(call)
        # An engine that died does not come back in its process; a new worker starts another.
        except (ProcessLostError, EngineError) as error:
            self._lose(worker, error)
            return None
        except Exception as error:
            error.add_note(f"It was raised in the {worker.name}.")
            raise

    def _record(self, worker: _Worker, result: WorkerResult) -> None:
        worker.reported = len(result.finished)
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

    # ---------------------------------------- starts and losses

    def _start(self, worker: _Worker) -> None:
        worker.process = self._cluster.make_process()
        worker.starting = self._cluster.call(worker.process, "open", **self._make_worker)
        worker.since, worker.version = self._cluster.time(), -1

    def _end(self, worker: _Worker) -> None:
        if worker.process is not None:
            self._cluster.end(worker.process)

    def _lose(self, worker: _Worker, cause: BaseException) -> None:
        """Replace a worker; its episodes are assigned again, before any other."""
        self.lost += 1
        worker.losses += 1
        logger.warning("The %s was lost: %s. Its %d episodes are run again.", worker.name, cause, len(worker.held))
        self._end(worker)
        # extendleft reverses: the lowest index comes first.
        self._waiting.extendleft(sorted(worker.held.values(), key=lambda episode: -episode.index))
        worker.held, worker.new, worker.dropped, worker.reported = {}, [], [], 0
        worker.process = worker.info = None
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
            f"({cause}); {up} of {len(self.workers)} are up. Free are {self._cluster.resources()}. Ask for less "
            "by the workers' options, for fewer workers, or look at their logs (ray logs)."
        ) from cause
