"""Rollouts on any number of workers, simulated: the queue and the executor of the package under a
virtual clock.

What collects is :class:`~torchrl_llm.collectors.RayTurnCollector`, as it is. Only what it runs on
is not there: processes, Ray and engines are replaced by :class:`SimulatedCluster`, on which nothing
takes time but what :class:`Costs` says, and all of it in virtual seconds. So 1,024 workers need one
process, and no throughput goes in that was measured: only an engine's step, how long episodes are,
and what a message and an episode cost the process that collects. What Ray takes to watch thousands
of calls at a time is not counted.

Examples:
    >>> lengths = uniform_lengths(turns=(1, 4), tokens=(8, 16))
    >>> run = simulate(Costs(), lengths, workers=4, slots=8, batch_size=256)
    >>> run.episodes, run.of_engines > 0.8
    (256, True)
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from torch import nn

from torchrl_llm.collectors import RayTurnCollector
from torchrl_llm.collectors._worker import WorkerInfo, WorkerRequest, WorkerResult
from torchrl_llm.envs import GEMEnv
from torchrl_llm.episode import Episode
from torchrl_llm.keys import StopReason
from torchrl_llm.modules.policy import TurnPolicy
from torchrl_llm.testing.environments import StopOrGo
from torchrl_llm.testing.policies import ScriptedPolicy
from torchrl_llm.testing.tokenizers import byte_tokenizer
from torchrl_llm.weight_update import RayWeightSync

Lengths = Callable[[int], list[int]]
"""By the index of a task: the tokens of each response."""


@dataclass(frozen=True)
class Costs:
    """What takes how long, in seconds.

    Attributes:
        step: an engine's step, which adds a token to each of its requests.
        turn: what the worker's process does for a turn while its engine waits.
        env: an environment's answer; environments answer side by side, and the engine's next step
            does not wait for them.
        install: a worker's loading of new weights.
        request: what the worker's process does between an answer and the next request while its
            engine waits.
        message: the way to a worker, and the way back.
        call: what the collecting process does for a message to a worker and its answer.
        episode: what it does for an episode: task, record, row.
    """

    step: float = 0.02
    turn: float = 0.0
    env: float = 0.0
    install: float = 0.0
    request: float = 0.0018
    message: float = 0.001
    call: float = 0.0013
    episode: float = 0.0003


def uniform_lengths(turns: tuple[int, int], tokens: tuple[int, int]) -> Lengths:
    """Numbers of turns and tokens that are drawn evenly from these ranges, ends included; an
    episode's are always the same.

    Examples:
        >>> uniform_lengths((1, 4), (8, 16))(0)
        [14, 8, 12, 16]
    """

    def lengths(index: int) -> list[int]:
        numbers = random.Random(index)
        return [numbers.randint(*tokens) for _ in range(numbers.randint(*turns))]

    return lengths


# ---------------------------------------- a worker


@dataclass
class _Running:
    """An episode in a slot: tokens left of its response, the tokens of later ones, and when it asks
    for the next."""

    serial: int
    episode: Episode
    left: int
    later: list[int]
    ready: float


class SimulatedWorker:
    """What :class:`~torchrl_llm.collectors._worker.RolloutWorker` does with an engine that batches
    continuously, event by event."""

    def __init__(self, slots: int, costs: Costs, lengths: Lengths) -> None:
        self.slots, self.costs, self.lengths = slots, costs, lengths
        self.free_at = 0.0
        self.version = 0
        self.waiting: deque[tuple[int, Episode]] = deque()
        self.running: list[_Running] = []
        self.finished: list[tuple[int, Episode]] = []

    def run(self, arrival: float, request: WorkerRequest, version: int | None = None) -> tuple[float, WorkerResult]:
        """When the request is answered, and what with."""
        began = now = max(self.free_at, arrival) + self.costs.request + (0.0 if version is None else self.costs.install)
        self.version = self.version if version is None else version
        self._cancel(request.cancel)
        for serial, index in request.start:
            self.waiting.append((serial, Episode(index, *request.task_sampler[index][:3])))
        report, end = began + request.report_interval, began + request.poll_interval
        while self.waiting or self.running:
            now = self._advance(now, report if self.finished and now <= report else end)
            if now > end or (now > report and self.finished):
                break
        self.free_at = now
        result = WorkerResult(self.finished, [], 0, None)
        self.finished = []
        return now, result

    def _cancel(self, serials: Collection[int]) -> None:
        self.waiting = deque(each for each in self.waiting if each[0] not in serials)
        self.running = [each for each in self.running if each.serial not in serials]

    def _advance(self, now: float, until: float) -> float:
        """Go on to the next thing that happens, or to the first step that ends after ``until``;
        returns the time."""
        while self.waiting and len(self.running) < self.slots:
            serial, episode = self.waiting.popleft()
            first, *later = self.lengths(episode.index)
            self.running.append(_Running(serial, episode, first, later, now + self.costs.env))
        asking = [each for each in self.running if each.ready <= now]
        others = min((each.ready for each in self.running if each.ready > now), default=math.inf)
        if not asking:  # it polls, and answers a request whose time is over
            return min(others, math.nextafter(until, math.inf))
        steps = max(1, min(*(each.left for each in asking), self._steps(others - now), self._steps(until - now) + 1))
        now += steps * self.costs.step
        for each in asking:
            if each.episode.oldest is None:
                each.episode.oldest = self.version
            each.left -= steps
            if each.left == 0:
                now += self.costs.turn
                self._answer(each, now)
        return now

    def _steps(self, seconds: float) -> int:
        return 2**31 if seconds == math.inf else math.ceil(seconds / self.costs.step)

    def _answer(self, running: _Running, now: float) -> None:
        """The environment answers a response."""
        if running.later:
            running.left, running.ready = running.later.pop(0), now + self.costs.env
            return
        running.episode.stop_reason, running.episode.terminated = StopReason.WON, True
        self.running.remove(running)
        self.finished.append((running.serial, running.episode))


# ---------------------------------------- the cluster


class SimulatedCluster:
    """Workers whose answers are known as soon as they are asked, and come when their time has come.

    Args:
        costs: what takes how long.
        slots: of each worker.
        lengths: of the responses.
        info: what each worker says of itself.

    Attributes:
        now: seconds of the virtual clock.
        busy: seconds of them in which the collecting process worked.
        deadline: no wait goes beyond it.
    """

    def __init__(self, costs: Costs, slots: int, lengths: Lengths, info: WorkerInfo) -> None:
        self.costs, self.slots, self.lengths, self.info = costs, slots, lengths, info
        self.now = self.busy = 0.0
        self.deadline = math.inf
        self._answers: dict[Hashable, tuple[float, Any]] = {}
        self._calls = count()

    def work(self, seconds: float) -> None:
        """The collecting process does something."""
        self.now += seconds
        self.busy += seconds

    def time(self) -> float:
        """Now."""
        return self.now

    def make_process(self) -> SimulatedWorker:
        """A worker."""
        return SimulatedWorker(self.slots, self.costs, self.lengths)

    def call(self, process: SimulatedWorker, method: str, *args: Any, **_: Any) -> Hashable:
        """Send a request."""
        if method == "open":
            answer: tuple[float, Any] = self.now, self.info
        else:
            self.work(self.costs.call)
            end, result = process.run(self.now + self.costs.message, *args)
            answer = end + self.costs.message, result
        self._answers[call := next(self._calls)] = answer
        return call

    def answered(self, calls: Sequence[Hashable], timeout: float) -> Collection[Hashable]:
        """Those that are there, after a wait for the first."""
        first = min(self._answers[call][0] for call in calls)
        self.now = max(self.now, min(first, self.now + timeout, self.deadline))
        return {call for call in calls if self._answers[call][0] <= self.now}

    def answer(self, call: Hashable) -> Any:
        """Read an answer."""
        _, result = self._answers.pop(call)
        if isinstance(result, WorkerResult):
            self.work(self.costs.episode * len(result.finished))
        return result

    def close(self, processes: Sequence[Any], timeout: float) -> None:
        """Nothing is there to be closed."""

    def end(self, process: Any) -> None:
        """Nothing is there to be ended."""

    def resources(self) -> Mapping[str, float]:
        """Any number."""
        return {"CPU": math.inf}


# ---------------------------------------- runs


class Versions(RayWeightSync):
    """Sends versions, for engines without weights.

    Args:
        policy: the collector's policy; its ``policy_version`` counts the syncs.

    Examples:
        >>> policy = ScriptedPolicy(lambda *_: "", tokenizer=byte_tokenizer())
        >>> versions = Versions(policy)
        >>> versions.publish(3)
        >>> versions.current
        (3, 3)
    """

    def __init__(self, policy: TurnPolicy) -> None:
        super().__init__(nn.Identity(), policy=policy, parity_check=0)

    def publish(self, version: int) -> None:
        """Offer the version alone."""
        self.current = version, version

    @staticmethod
    def install(policy: Any, version: Any) -> float:
        """Count later tokens as of the version; nothing is compared, so the parity check's
        difference is NaN."""
        policy.policy_version = version
        return math.nan


class SimulatedCollector(RayTurnCollector):
    """The collector on a :class:`SimulatedCluster`."""

    def __init__(self, costs: Costs, lengths: Lengths, *, slots: int, **kwargs: Any) -> None:
        env = GEMEnv(StopOrGo, tokenizer=byte_tokenizer(), num_envs=1, max_output_tokens=16, max_model_len=512)
        policy = ScriptedPolicy(lambda *_: "", tokenizer=byte_tokenizer(), max_output_tokens=16)
        info = WorkerInfo(slots, env.group_size, env.max_model_len, policy.sampling, True, "nowhere", 0)
        self.cluster = SimulatedCluster(costs, slots, lengths, info)
        schemes = {"policy": Versions(policy)}
        super().__init__(
            env,
            policy,
            make_env=lambda: env,
            make_policy=lambda: policy,
            background=False,
            weight_sync_schemes=schemes,
            **kwargs,
        )

    def _make_cluster(self, options: Mapping[str, Any]) -> SimulatedCluster:
        return self.cluster

    def update(self, seconds: float) -> None:
        """Train for so long, while a thread collects, as with ``background``; then there are new
        weights."""
        cluster = self.cluster
        cluster.deadline = cluster.now + seconds
        while cluster.now < cluster.deadline:
            if not self._step(wanted=False)[1]:
                cluster.now = cluster.deadline
        cluster.deadline = math.inf
        self.update_policy_weights_()

    def batch(self) -> list[Episode]:
        """A batch, without rows."""
        return self._next_batch()


@dataclass(frozen=True)
class Simulated:
    """What came of it.

    Attributes:
        episodes, tokens: delivered.
        seconds: virtual ones.
        of_engines: share of the tokens that the engines could have said.
        busy: share of the time in which the collecting process worked.
        stale: share of the episodes with a token of older weights than the newest.
    """

    episodes: int
    tokens: int
    seconds: float
    of_engines: float
    busy: float
    stale: float

    @property
    def tokens_per_s(self) -> float:
        """Tokens per virtual second."""
        return self.tokens / self.seconds


def simulate(
    costs: Costs,
    lengths: Lengths,
    *,
    workers: int,
    slots: int,
    batch_size: int,
    batches: int = 1,
    max_staleness: int = 0,
    update: float = 0.0,
) -> Simulated:
    """Collect ``batches`` batches, each after an update; one more, before them, is not counted."""
    collector = SimulatedCollector(
        costs, lengths, slots=slots, num_workers=workers, batch_size=batch_size, max_staleness=max_staleness
    )
    cluster = collector.cluster
    collector.batch()
    began, busy = cluster.now, cluster.busy
    episodes = tokens = stale = 0
    for _ in range(batches):
        if update:
            collector.update(update)
        batch = collector.batch()
        episodes += len(batch)
        tokens += sum(sum(lengths(episode.index)) for episode in batch)
        stale += sum(episode.is_stale(collector.policy.policy_version) for episode in batch)
    seconds = cluster.now - began
    possible = workers * slots * seconds / costs.step
    return Simulated(episodes, tokens, seconds, tokens / possible, (cluster.busy - busy) / seconds, stale / episodes)
