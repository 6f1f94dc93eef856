"""An environment and its policy in another process: :class:`RolloutWorker`. It does not know
Ray."""

from __future__ import annotations

import os
import platform
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import cloudpickle
import torch

from torchrl_llm.collectors.async_turn import ThreadExecutor
from torchrl_llm.envs.env import GEMEnv
from torchrl_llm.envs.faults import EnvironmentFault
from torchrl_llm.envs.tasks import TaskSampler
from torchrl_llm.episode import Episode
from torchrl_llm.modules.policy import SamplingConfig, TurnPolicy
from torchrl_llm.stops import share_stop_ids


class WorkerRequest(NamedTuple):
    """The next work of a worker.

    Attributes:
        task_sampler: what indices mean from here on.
        start: serial numbers and task indices of further episodes to run.
        cancel: serial numbers of episodes to stop.
        report_interval: seconds after which it answers if an episode has ended.
        poll_interval: seconds after which it answers in any case.
    """

    task_sampler: TaskSampler
    start: Sequence[tuple[int, int]]
    cancel: Sequence[int]
    report_interval: float
    poll_interval: float


class WorkerResult(NamedTuple):
    """What happened at a worker since its last answer.

    Attributes:
        finished: serial numbers and episodes.
        failed: serial numbers and what their environments failed with.
        timeouts: environments that did not answer in time, of episodes that had been cancelled.
        parity_gap: of the weights that came with the request, in nats; ``None`` without new
            weights.
    """

    finished: list[tuple[int, Episode]]
    failed: list[tuple[int, EnvironmentFault]]
    timeouts: int
    parity_gap: float | None


class WorkerInfo(NamedTuple):
    """How a worker was made, and where it runs.

    Attributes:
        slots, group_size, max_model_len: of its environment.
        sampling, logprobs_match_trainer: of its policy.
        host, pid: where it runs.
    """

    slots: int
    group_size: int
    max_model_len: int
    sampling: SamplingConfig
    logprobs_match_trainer: bool
    host: str
    pid: int


class RolloutWorker:
    """Runs the requested tasks, with the weights that come with the requests.

    Args:
        make_env: makes the environment.
        make_policy: makes the policy.
        install: loads the weights that come with a request into the policy; returns the parity
            check's difference in nats.
        executor_options: of the :class:`~torchrl_llm.collectors.async_turn.ThreadExecutor`.
    """

    def __init__(
        self,
        make_env: Callable[[], GEMEnv],
        make_policy: Callable[[], TurnPolicy],
        *,
        install: Callable[[TurnPolicy, Any], float] | None,
        **executor_options: Any,
    ) -> None:
        with _noted("make_env"):
            self.env = make_env()
        with _noted("make_policy"):
            self.policy = make_policy()
        share_stop_ids(self.env, self.policy)
        self._install = install
        self._executor = ThreadExecutor(self.env.slots, self.policy, self, **executor_options)
        self._waiting: deque[Episode] = deque()
        self._episodes: dict[int, Episode] = {}
        self._failed: list[tuple[int, EnvironmentFault]] = []
        self._timeouts = 0

    def info(self) -> WorkerInfo:
        """How this worker was made."""
        env, policy, place = self.env, self.policy, (platform.node(), os.getpid())
        return WorkerInfo(
            env.batch_size[0], env.group_size, env.max_model_len, policy.sampling, policy.logprobs_match_trainer, *place
        )

    @torch.no_grad()
    def run(self, request: WorkerRequest, weights: Any = None) -> WorkerResult:
        """Collect for the interval of the request, or until there is nothing to do."""
        # First: with max_staleness=0, what starts on the old weights would be dropped.
        parity_gap = self._install(self.policy, weights) if self._install and weights is not None else None
        self.env.task_sampler = request.task_sampler
        for serial in request.cancel:
            self._cancel(serial)
        for serial, index in request.start:
            self._episodes[serial] = episode = Episode(index, *request.task_sampler[index][:3])
            self._waiting.append(episode)
        began = time.monotonic()
        while len(finished := self._finished()) < len(self._episodes):
            seconds = time.monotonic() - began
            report = seconds > request.report_interval and (self._failed or finished)
            if report or seconds > request.poll_interval:
                break
            self._executor.step()
        for serial, _ in finished:
            del self._episodes[serial]
        result = WorkerResult(finished, self._failed, self._timeouts, parity_gap)
        self._failed, self._timeouts = [], 0
        return result

    def close(self) -> None:
        """Free environment and policy."""
        self._executor.close(5.0)
        self.policy.close()
        self.env.close(raise_if_closed=False)

    # ---------------------------------------- the executor's source of episodes

    def next(self) -> Episode | None:
        """The next requested episode."""
        return self._waiting.popleft() if self._waiting else None

    def fail(self, episode: Episode, fault: EnvironmentFault) -> None:
        """Report a failed episode with the next result."""
        serial = next(serial for serial, each in self._episodes.items() if each is episode)
        del self._episodes[serial]
        cause = portable(fault.cause)
        same = cause is fault.cause
        # A new fault, for the cause is part of how it is made and pickled.
        self._failed.append((serial, fault if same else type(fault)(fault.name, fault.task_spec, fault.turn, cause)))

    def count_timeout(self) -> None:
        """Report a late environment of a cancelled episode with the next result."""
        self._timeouts += 1

    def _cancel(self, serial: int) -> None:
        if (episode := self._episodes.pop(serial, None)) is None:
            return
        if episode in self._waiting:
            self._waiting.remove(episode)
        else:
            self._executor.release(episode)

    def _finished(self) -> list[tuple[int, Episode]]:
        return [(serial, episode) for serial, episode in self._episodes.items() if episode.finished]


def portable(error: BaseException) -> BaseException:
    """An exception, or one with its text if it could not be read in another process."""
    try:
        # Both ways: an exception with a constructor of its own may be written and not be read
        # again.
        cloudpickle.loads(cloudpickle.dumps(error))
    except Exception:  # noqa: BLE001 (exceptions may do anything when they are copied)
        result = RuntimeError(f"{type(error).__name__}: {error}")
        for note in getattr(error, "__notes__", ()):
            result.add_note(note)
        return result
    return error


@contextmanager
def _noted(part: str) -> Iterator[None]:
    """Note at every error what raised it."""
    try:
        yield
    except Exception as error:
        error.add_note(f"It was raised by {part}.")
        raise
