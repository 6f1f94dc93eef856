"""Tickets: which task and which group each episode gets, as a pure function of a counter.

An environment deals ticket 0, 1, 2, ...; the counter is all the state there is. This module draws no random numbers and
knows no environments.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple, get_args

import numpy as np

Stream = Literal["train", "eval", "test"]

STREAM_IDS = 2**40
"""Group and episode ids of the n-th stream start at ``n * STREAM_IDS``, so that they are unique over the run."""


class Ticket(NamedTuple):
    """What an episode is.

    Attributes:
        episode_id: unique over the run.
        group_id: unique over the run; episodes of one group play the same task.
        env_id: index into the mixture of environments.
        seed: seed of the task, in ``[0, 2**32)``, the same for the whole group.
    """

    episode_id: int
    group_id: int
    env_id: int
    seed: int


@dataclass(frozen=True, kw_only=True)
class Tickets:
    """An endless sequence of tickets; ``tickets[i]`` is the i-th.

    Groups are dealt one after the other, and the environments of a mixture in turn, a group each, or drawn with
    ``weights``: which one a group plays depends on (seed, stream, group) alone. Seeds are a hash of
    (seed, stream, group); the streams share no seed, so evaluation never meets a task of training. Several workers
    share one stream without overlap: worker ``w`` of ``W`` deals the groups ``w, w + W, w + 2W, ...``.

    Args:
        seed: names the run's tasks; >= 0.
        stream: ``"train"`` (default), ``"eval"`` (during a run) or ``"test"`` (before and after it).
        group_size: episodes that share a task; default 1.
        num_tasks: number of environments in the mixture; default 1.
        weights: how often each environment of the mixture is dealt, relative to each other; all > 0. Default none: in turn.
        worker: index of this worker; default 0.
        num_workers: number of workers that share the stream; default 1.

    Examples:
        >>> tickets = Tickets(seed=3, group_size=2, num_tasks=2)
        >>> [tickets[i][:3] for i in range(4)]
        [(0, 0, 0), (1, 0, 0), (2, 1, 1), (3, 1, 1)]
        >>> tickets[0].seed == tickets[1].seed != tickets[2].seed
        True
        >>> Tickets(group_size=2, worker=1, num_workers=3)[2].group_id
        4
        >>> mixed = Tickets(num_tasks=2, weights=(3, 1))
        >>> sum(mixed[i].env_id for i in range(1000))
        214
    """

    seed: int = 0
    stream: Stream = "train"
    group_size: int = 1
    num_tasks: int = 1
    worker: int = 0
    num_workers: int = 1
    weights: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        weights = None if self.weights is None else tuple(map(float, self.weights))
        object.__setattr__(self, "weights", weights)
        proper = weights is None or (len(weights) == self.num_tasks and all(0 < w < float("inf") for w in weights))
        checks = {
            "seed": (self.seed >= 0, "an integer >= 0"),
            "stream": (self.stream in get_args(Stream), f"one of {get_args(Stream)}"),
            "group_size": (self.group_size >= 1, ">= 1"),
            "num_tasks": (self.num_tasks >= 1, ">= 1"),
            "weights": (proper, f"None or {self.num_tasks} finite numbers > 0, one an environment"),
            "worker": (0 <= self.worker < self.num_workers, f"in [0, num_workers={self.num_workers})"),
        }
        for name, (holds, expected) in checks.items():
            if not holds:
                raise ValueError(f"Tickets.{name} is {getattr(self, name)!r}; expected {expected}.")

    def __getitem__(self, index: int) -> Ticket:
        if index < 0:
            raise IndexError(f"Ticket {index} does not exist; tickets are counted from 0.")
        return _ticket(self, index)


@lru_cache(maxsize=4096)  # every ticket is asked for several times, and its seed is a hash
def _ticket(tickets: Tickets, index: int) -> Ticket:
    round_, member = divmod(index, tickets.group_size)
    group = tickets.worker + round_ * tickets.num_workers
    stream = get_args(Stream).index(tickets.stream)
    base = stream * STREAM_IDS
    drawn, chosen = map(int, np.random.SeedSequence(tickets.seed, spawn_key=(stream, group)).generate_state(2))
    # The lowest bits name the stream, so no task of one stream is ever met in another.
    seed = drawn & ~3 | stream
    env_id = group % tickets.num_tasks if tickets.weights is None else _pick(tickets.weights, chosen / 2**32)
    return Ticket(base + group * tickets.group_size + member, base + group, env_id, seed)


def _pick(weights: tuple[float, ...], share: float) -> int:
    """The index at which the running sum of the weights passes the share in ``[0, 1)`` of their sum."""
    sums = np.cumsum(weights)
    return int(np.searchsorted(sums, share * sums[-1], side="right"))
