"""Episodes over workers on Ray: :class:`RayPlayer`.

Here lives which worker gets an episode and what becomes of those of a worker that is lost. Nothing is asked of Ray's object
store but to carry weights, so an episode is either with one worker or here.
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

from torchrl_llm.collectors._episode import Episode
from torchrl_llm.collectors._player import Deal, OnFault
from torchrl_llm.collectors._worker import Facts, Report, RolloutWorker, Task, portable
from torchrl_llm.envs.tasks import Tickets
from torchrl_llm.modules.engine import EngineError
from torchrl_llm.optional import running_ray

logger = logging.getLogger(__name__)

_PATIENCE = 0.5  # seconds; workers report at least so often, and new weights wait no longer for them
_SLICE = 0.2  # seconds; so long a round waits for a report
_AHEAD = 2  # tasks that a worker has at a time: the next one is there when it is through with one


class WorkerLostError(RuntimeError):
    """A rollout worker was lost again and again, or never came up; the message says why and what to do."""


class RolloutActor:
    """A process with a :class:`~torchrl_llm.collectors._worker.RolloutWorker`: what is an actor of Ray."""

    worker: RolloutWorker

    def open(self, **settings: Any) -> Facts:
        """Make the worker."""
        with _portable_errors():
            self.worker = RolloutWorker(**settings)
        return self.worker.facts()

    def play(self, task: Task, weights: Any = None) -> Report:
        """See :meth:`RolloutWorker.play`."""
        with _portable_errors():
            return self.worker.play(task, weights)

    def close(self) -> None:
        """Free what plays."""
        self.worker.close()


@contextmanager
def _portable_errors() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        sent = portable(error)
        if sent is error:
            raise
        raise sent from None


@dataclass(eq=False)
class _Worker:
    """A worker as it is seen from here.

    Attributes:
        index: its number.
        actor: Ray's handle.
        coming: answers its first call, once it is up; ``None`` afterwards.
        since: when what is waited for was asked.
        facts: what it is; ``None`` before it is up.
        held: by serial number, episodes that it has to play.
        fresh: serial numbers among them that it has not been told of.
        dropped: serial numbers that it need not play any further, and has not been told of.
        calls: tasks that it has not reported on.
        version: of the weights that it was given last.
        losses: how often it was lost since it finished an episode.
    """

    index: int
    actor: Any = None
    coming: Any = None
    since: float = 0.0
    facts: Facts | None = None
    held: dict[int, Episode] = field(default_factory=dict)
    fresh: list[int] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    calls: deque[Any] = field(default_factory=deque)
    version: int = -1
    losses: int = 0

    @property
    def load(self) -> float:
        """Episodes for each slot."""
        assert self.facts is not None
        return len(self.held) / self.facts.slots

    @property
    def name(self) -> str:
        """For messages."""
        where = "" if self.facts is None else f" (process {self.facts.pid} on {self.facts.host})"
        return f"rollout worker {self.index}{where}"


class RayPlayer:
    """Plays episodes on workers: each has a few more than it has slots, so that none of these waits for a message.

    A worker that dies, or does not report for ``timeout`` seconds, is replaced; its episodes are played by whoever is free
    next, from their start.

    Args:
        make_worker: the arguments of :class:`~torchrl_llm.collectors._worker.RolloutWorker`.
        num_workers: how many.
        options: of Ray's actors, such as ``{"num_cpus": 1, "num_gpus": 0.5}``.
        tickets: what is dealt from, now.
        weights: version and reference of the weights to play with, or ``None``.
        on_fault: see :class:`~torchrl_llm.collectors._player.SlotPlayer`.
        timeout: seconds without a report after which a worker counts as lost.
        start_timeout: seconds that workers may take to come up.
        max_losses: how often in a row a worker may be lost without having finished an episode.
    """

    def __init__(
        self,
        make_worker: Mapping[str, Any],
        *,
        num_workers: int,
        options: Mapping[str, Any],
        tickets: Callable[[], Tickets],
        weights: Callable[[], tuple[int, Any] | None],
        on_fault: OnFault,
        timeout: float,
        start_timeout: float,
        max_losses: int,
    ) -> None:
        self._ray = running_ray()
        self._actor_class = self._ray.remote(RolloutActor).options(max_restarts=0, max_task_retries=0, **options)
        self._make_worker, self._tickets, self._weights = make_worker, tickets, weights
        self._on_fault, self._timeout, self._start_timeout = on_fault, timeout, start_timeout
        self._max_losses = max_losses
        self._serials = count()
        self._waiting: deque[Episode] = deque()  # dealt, and with no worker
        self._home: tuple[int, _Worker] | None = None  # the group dealt last, and who plays it
        self.lost = 0
        self.canary_difference = math.nan
        self.workers = [_Worker(index) for index in range(num_workers)]
        try:
            self._start_all()
        except BaseException:
            self.close(0.0)
            raise

    @property
    def in_flight(self) -> int:
        """Episodes that are not finished."""
        return len(self._waiting) + sum(len(worker.held) for worker in self.workers)

    def round(self, deal: Deal) -> bool:
        """Deal to those that have room, and wait a little for reports."""
        self._deal(deal)
        for worker in self.workers:
            self._tell(worker)
        self._listen(_SLICE)
        return self.in_flight > 0

    def vacate(self, episode: Episode) -> None:
        """Tell who plays ``episode`` to play it no further."""
        if episode in self._waiting:
            self._waiting.remove(episode)
        for worker in self.workers:
            for serial in [serial for serial, held in worker.held.items() if held is episode]:
                del worker.held[serial]
                if serial in worker.fresh:
                    worker.fresh.remove(serial)
                else:
                    worker.dropped.append(serial)

    def clear(self) -> None:
        """Forget all episodes; what workers still report of them is not heard."""
        for episode in [*self._waiting, *(each for worker in self.workers for each in worker.held.values())]:
            self.vacate(episode)

    def wake(self) -> None:
        """Nothing: rounds are short."""

    def close(self, timeout: float) -> None:
        """Let the workers free what they have, for ``timeout`` seconds at most; then end them."""
        if self._ray.is_initialized():
            up = [worker.actor for worker in self.workers if worker.facts is not None]
            if up and timeout > 0:
                farewells = [actor.close.remote() for actor in up]
                self._ray.wait(farewells, num_returns=len(farewells), timeout=timeout)
            for worker in self.workers:
                self._end(worker)
        for worker in self.workers:
            worker.actor = worker.facts = worker.coming = None
            worker.calls.clear()

    # ------------------------------------------------------------------ dealing

    def _deal(self, deal: Deal) -> None:
        """Whole groups to whoever has least to do: their prompts are the same, so engines can share them."""
        up = [worker for worker in self.workers if worker.facts is not None and len(worker.calls) < _AHEAD]
        while up:
            idlest = min(up, key=lambda worker: worker.load)
            if not self._has_room(idlest):
                return
            episode = self._waiting.popleft() if self._waiting else deal()
            if episode is None:
                return
            group = episode.ticket.group_id
            if self._home is None or self._home[0] != group or self._home[1].facts is None:
                self._home = group, idlest
            worker, serial = self._home[1], next(self._serials)
            worker.held[serial] = episode
            worker.fresh.append(serial)

    @staticmethod
    def _has_room(worker: _Worker) -> bool:
        assert worker.facts is not None
        slots = worker.facts.slots
        return len(worker.held) < slots + max(1, slots // 4)

    def _tell(self, worker: _Worker) -> None:
        busy = worker.held or worker.dropped
        if worker.facts is None or len(worker.calls) >= _AHEAD or not busy:
            return
        current = self._weights()
        news = () if current is None or current[0] == worker.version else (current[1],)
        worker.version = worker.version if current is None else current[0]
        play = [(serial, worker.held[serial].index) for serial in worker.fresh]
        task = Task(self._tickets(), play, tuple(worker.dropped), _PATIENCE)
        if not worker.calls:
            worker.since = time.monotonic()
        worker.calls.append(worker.actor.play.remote(task, *news))
        worker.fresh, worker.dropped = [], []

    # ------------------------------------------------------------------ listening

    def _listen(self, seconds: float) -> None:
        refs = [ref for worker in self.workers for ref in (*worker.calls, worker.coming) if ref is not None]
        if refs:
            # A report that is there counts, wherever it lies: after a long pause nobody is lost who has answered.
            self._ray.wait(refs, num_returns=1, timeout=seconds, fetch_local=False)
            done = set(self._ray.wait(refs, num_returns=len(refs), timeout=0, fetch_local=False)[0])
            for worker in self.workers:
                self._hear(worker, done)
        now = time.monotonic()
        for worker in self.workers:
            if worker.calls and now - worker.since > self._timeout:
                self._lose(worker, TimeoutError(f"no report for {now - worker.since:.0f} s"))
            elif worker.coming is not None and now - worker.since > self._start_timeout:
                self._is_late(worker, now)

    def _hear(self, worker: _Worker, done: set[Any]) -> None:
        errors = self._ray.exceptions
        gone = (errors.RayActorError, errors.WorkerCrashedError, errors.OutOfMemoryError, errors.ObjectLostError)
        try:
            if worker.coming in done:
                worker.facts = self._ray.get(worker.coming)
                worker.coming = None
            while worker.calls and worker.calls[0] in done:
                report = self._ray.get(worker.calls.popleft())
                worker.since = time.monotonic()
                self._take(worker, report)
        except gone as error:
            self._lose(worker, error)
        except errors.RayTaskError as error:
            if not isinstance(error.cause, EngineError):
                raise _cause(error, worker.name) from error
            self._lose(worker, error.cause)

    def _take(self, worker: _Worker, report: Report) -> None:
        for serial, played in report.finished:
            if (episode := worker.held.pop(serial, None)) is not None:
                vars(episode).update(vars(played))
                worker.losses = 0
        if report.canary_difference is not None:
            self.canary_difference = report.canary_difference
        for _ in range(report.timeouts):
            self._on_fault(None, TimeoutError("An environment did not come back."))
        for serial, fault in report.failed:
            if (episode := worker.held.pop(serial, None)) is not None:
                self._on_fault(episode, fault)

    # ------------------------------------------------------------------ coming and going

    def _start(self, worker: _Worker) -> None:
        worker.actor = self._actor()
        worker.coming = worker.actor.open.remote(**self._make_worker)
        worker.since, worker.version = time.monotonic(), -1

    def _actor(self) -> Any:
        return self._actor_class.remote()

    def _end(self, worker: _Worker) -> None:
        with suppress(Exception):  # it may be gone already
            self._ray.kill(worker.actor)

    def _start_all(self) -> None:
        for worker in self.workers:
            self._start(worker)
        while any(worker.coming is not None for worker in self.workers):
            self._listen(_SLICE)

    def _lose(self, worker: _Worker, cause: BaseException) -> None:
        """Replace a worker; what it had to play is dealt first now."""
        self.lost += 1
        worker.losses += 1
        logger.warning("The %s was lost: %s. Its %d episodes are dealt again.", worker.name, cause, len(worker.held))
        self._end(worker)
        self._waiting.extendleft(sorted(worker.held.values(), key=lambda episode: -episode.index))
        worker.held, worker.fresh, worker.dropped, worker.facts = {}, [], [], None
        worker.calls.clear()
        if worker.losses > self._max_losses:
            self._give_up(worker, cause)
        self._start(worker)

    def _is_late(self, worker: _Worker, now: float) -> None:
        """The run begins with all workers, and goes on with those that it has."""
        late = f"not up after {now - worker.since:.0f} s"
        if self.lost == 0 or all(each.facts is None for each in self.workers):
            self._give_up(worker, TimeoutError(late))
        logger.warning("The %s that was to be replaced is %s. The others go on without it.", worker.name, late)
        worker.since = now

    def _give_up(self, worker: _Worker, cause: BaseException) -> None:
        up = sum(each.facts is not None for each in self.workers)
        raise WorkerLostError(
            f"The {worker.name} was lost {worker.losses} times without having finished an episode, or cannot be started "
            f"({cause}); {up} of {len(self.workers)} are up. Ray has {self._ray.available_resources()} to give. Ask for less "
            "by the workers' options, for fewer workers, or look at their logs (ray logs)."
        ) from cause


def _cause(error: Any, name: str) -> BaseException:
    """What a worker raised, with its name as a note."""
    cause: BaseException = error.cause if isinstance(getattr(error, "cause", None), BaseException) else error
    cause.add_note(f"It was raised in the {name}.")
    return cause
