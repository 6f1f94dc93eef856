"""What the simulation is told (:class:`~torchrl_llm.testing.simulation.Costs`): each cost is
measured alone, none from a throughput."""

import statistics
import time
from collections import deque
from typing import Any

import numpy as np
import ray

from torchrl_llm import keys
from torchrl_llm.collectors import AsyncTurnCollector
from torchrl_llm.collectors._cluster import RayCluster
from torchrl_llm.collectors._worker import WorkerRequest, WorkerResult
from torchrl_llm.envs import GEMEnv
from torchrl_llm.envs.tasks import TaskSampler
from torchrl_llm.episode import Episode, Turn
from torchrl_llm.testing.policies import SleepingPolicy
from torchrl_llm.testing.simulation import Costs

TIMEOUT = 60.0
"""Seconds that Ray may take to answer."""


class TimedPolicy(SleepingPolicy):
    """Counts its steps and their seconds."""

    steps, seconds = 0, 0.0

    def poll(self) -> Any:
        """Take a step."""
        start = time.perf_counter()
        result = super().poll()
        self.steps, self.seconds = self.steps + 1, self.seconds + time.perf_counter() - start
        return result


def step_and_turn(env: GEMEnv, policy: TimedPolicy, *, episodes: int) -> tuple[float, float]:
    """Seconds of an engine's step, and seconds a turn in which the engine waits, in a process that
    does nothing else.

    The engine sleeps as it does in a worker: behind one that does not sleep, a turn takes half as
    long, for nothing has left the caches and no thread has to be woken.
    """
    collector = AsyncTurnCollector(env, policy, batch_size=episodes)
    try:
        collector.rollout()
        policy.steps, policy.seconds, start = 0, 0.0, time.perf_counter()
        turns = int(collector.rollout()[keys.TURN_MASK].sum())
        return policy.seconds / policy.steps, (time.perf_counter() - start - policy.seconds) / turns
    finally:
        collector.shutdown()


class Echo:
    """Answers as a worker does, and is none: after two steps of an engine, with an episode."""

    def __init__(self, step_s: float) -> None:
        self._step_s, self._waits, self._answered = step_s, list[float](), 0.0
        turns = [Turn(0, 0, np.arange(12), np.zeros(12, np.float32), np.zeros(12, np.int64)) for _ in range(3)]
        self._episode = Episode(0, 0, 0, 0, turns=turns, rewards=[0.0] * 3, contexts=[np.arange(150)])

    def run(self, _: WorkerRequest) -> WorkerResult:
        """Note how long it was since the last answer."""
        self._waits.append(time.perf_counter() - self._answered)
        for _ in range(2):
            time.sleep(self._step_s)
        self._answered = time.perf_counter()
        return WorkerResult([(0, self._episode)], [], 0, None)

    def waits(self) -> list[float]:
        """Seconds between an answer and the next request, in order."""
        return self._waits


def request(step_s: float, *, messages: int = 150) -> float:
    """Seconds that a process of Ray takes from an answer to the next request, which is there."""
    echo = ray.remote(Echo).options(num_cpus=0).remote(step_s)
    cluster, message = RayCluster({}), WorkerRequest(TaskSampler(), [(0, 0)], (), 0.0, 0.0)
    calls = deque(cluster.call(echo, "run", message) for _ in range(2))
    for _ in range(messages):
        if not cluster.answered([calls[0]], TIMEOUT):
            raise TimeoutError(f"Ray has not answered a message for {TIMEOUT:.0f} s.")
        cluster.answer(calls.popleft())
        calls.append(cluster.call(echo, "run", message))
    waits: list[float] = ray.get(echo.waits.remote(), timeout=TIMEOUT)
    cluster.end(echo)
    return statistics.mean(waits[messages // 10 :])  # Ray's first messages take longer


def measured_costs(env: GEMEnv, policy: TimedPolicy, *, episodes: int) -> Costs:
    """The times of a worker; what the collecting process does has its defaults.

    Args:
        env: a worker's environment.
        policy: a worker's policy.
        episodes: how many an engine plays for it.
    """
    step, turn = step_and_turn(env, policy, episodes=episodes)
    return Costs(step=step, turn=turn, request=request(policy.seconds_per_step))
