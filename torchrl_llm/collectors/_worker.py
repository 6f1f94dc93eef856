"""An environment and its policy in another process: :class:`RolloutWorker`. It knows no Ray."""

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

from torchrl_llm.collectors._queue import Fault
from torchrl_llm.collectors._threads import ThreadExecutor
from torchrl_llm.envs.env import GEMEnv
from torchrl_llm.envs.tasks import TaskSampler
from torchrl_llm.envs.text_env import EnvironmentFault
from torchrl_llm.episode import Episode
from torchrl_llm.modules.policy import SamplingConfig, TurnPolicy
from torchrl_llm.stops import share_stop_ids

_MIN_CALL = 0.02  # seconds; episodes that end so close together are reported together


class WorkerRequest(NamedTuple):
    """What a worker shall do.

    Attributes:
        task_sampler: what indices mean from here on.
        play: serial numbers and task indices of further episodes to play.
        drop: serial numbers of episodes to stop playing.
        poll_interval: seconds after which it answers, whether an episode is over or not.
    """

    task_sampler: TaskSampler
    play: Sequence[tuple[int, int]]
    drop: Sequence[int]
    poll_interval: float


class WorkerResult(NamedTuple):
    """What happened at a worker since its last answer.

    Attributes:
        finished: serial numbers and episodes.
        failed: serial numbers and what their environments failed with.
        timeouts: environments that did not come back, of episodes that had been dropped.
        parity_gap: of the weights that came with the request, in nats; ``None`` without new weights.
    """

    finished: list[tuple[int, Episode]]
    failed: list[tuple[int, EnvironmentFault]]
    timeouts: int
    parity_gap: float | None


class WorkerInfo(NamedTuple):
    """How a worker was made, and where it runs.

    Attributes:
        slots: of its environment.
        group_size, max_model_len: of its environment.
        sampling: of its policy.
        exact: of its policy.
        host, pid: where it runs.
    """

    slots: int
    group_size: int
    max_model_len: int
    sampling: SamplingConfig
    exact: bool
    host: str
    pid: int


class RolloutWorker:
    """Plays the requested tasks, with the weights that come with the requests.

    Args:
        make_env: makes the environment.
        make_policy: makes the policy.
        install: puts the weights that come with a request into the policy; returns the parity check's difference in nats.
        greedy, num_threads, step_timeout: see :class:`~torchrl_llm.collectors._threads.ThreadExecutor`.
    """

    def __init__(
        self,
        make_env: Callable[[], GEMEnv],
        make_policy: Callable[[], TurnPolicy],
        *,
        install: Callable[[TurnPolicy, Any], float] | None,
        greedy: bool,
        num_threads: int | None,
        step_timeout: float,
    ) -> None:
        with _named("make_env"):
            self.env = make_env()
        with _named("make_policy"):
            self.policy = make_policy()
        share_stop_ids(self.env, self.policy)
        self._install = install
        self._executor = ThreadExecutor(
            self.env,
            self.policy,
            lambda: self._queue.popleft() if self._queue else None,
            greedy=greedy,
            num_threads=num_threads,
            step_timeout=step_timeout,
            on_fault=self._fail,
        )
        self._queue: deque[Episode] = deque()
        self._playing: dict[int, Episode] = {}
        self._failed: list[tuple[int, EnvironmentFault]] = []
        self._timeouts = 0

    def info(self) -> WorkerInfo:
        """How this worker was made."""
        env, policy = self.env, self.policy
        place = platform.node(), os.getpid()
        return WorkerInfo(
            env.batch_size[0], env.group_size, env.max_model_len, policy.sampling, policy.logprobs_match_trainer, *place
        )

    @torch.no_grad()
    def play(self, request: WorkerRequest, weights: Any = None) -> WorkerResult:
        """Play on, until an episode is over, ``request.poll_interval`` has passed, or there is nothing to play."""
        difference = self._install(self.policy, weights) if self._install and weights is not None else None
        self.env.task_sampler = request.task_sampler
        for serial in request.drop:
            self._drop(serial)
        for serial, index in request.play:
            self._playing[serial] = episode = Episode(index, *request.task_sampler[index][:3])
            self._queue.append(episode)
        began = time.monotonic()
        while self._playing:
            self._executor.step()
            seconds = time.monotonic() - began
            if seconds > request.poll_interval or (seconds > _MIN_CALL and (self._failed or self._over())):
                break
        return self._result(difference)

    def close(self) -> None:
        """Free environment and policy."""
        self._executor.close(5.0)
        self.policy.close()
        self.env.close(raise_if_closed=False)

    def _drop(self, serial: int) -> None:
        episode = self._playing.pop(serial, None)
        if episode is None:
            return
        if episode in self._queue:
            self._queue.remove(episode)
        else:
            self._executor.release(episode)

    def _fail(self, episode: Episode | None, fault: Fault) -> None:
        if episode is None or not isinstance(fault, EnvironmentFault):
            self._timeouts += 1
            return
        serial = next(serial for serial, each in self._playing.items() if each is episode)
        del self._playing[serial]
        cause = portable(fault.cause)
        same = cause is fault.cause
        self._failed.append((serial, fault if same else type(fault)(fault.name, fault.task_spec, fault.turn, cause)))

    def _over(self) -> list[tuple[int, Episode]]:
        return [(serial, episode) for serial, episode in self._playing.items() if episode.finished]

    def _result(self, difference: float | None) -> WorkerResult:
        finished = self._over()
        for serial, _ in finished:
            del self._playing[serial]
        failed, timeouts = self._failed, self._timeouts
        self._failed, self._timeouts = [], 0
        return WorkerResult(finished, failed, timeouts, difference)


def portable(error: BaseException) -> BaseException:
    """An exception, or one with its text if it could not be read in another process."""
    try:
        cloudpickle.loads(cloudpickle.dumps(error))
    except Exception:  # noqa: BLE001 (exceptions may do anything when they are copied)
        result = RuntimeError(f"{type(error).__name__}: {error}")
        for note in getattr(error, "__notes__", ()):
            result.add_note(note)
        return result
    return error


@contextmanager
def _named(part: str) -> Iterator[None]:
    """Note at every error what raised it."""
    try:
        yield
    except Exception as error:
        error.add_note(f"It was raised by {part}.")
        raise
