"""Tickets: which task and which group each episode gets, as a pure function of a counter.

An environment deals ticket 0, 1, 2, ...; the counter is all the state there is. This module draws no random numbers and
knows no environments.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal, NamedTuple, Self, get_args

import numpy as np

logger = logging.getLogger(__name__)

Stream = Literal["train", "eval", "test"]

STREAM_IDS = 2**40
"""Group and episode ids of the n-th stream start at ``n * STREAM_IDS``, so that they are unique over the run."""

SEED_IDS = 2**28
"""Ids that each stream of each seed has, where ids are named by the seed too."""

FLOOR = 0.05
"""Added to the learnability of every environment, which is at most 0.25: none is forgotten, and their rates stay known."""

MEMORY = 32
"""Episodes of an environment that its recent success rate looks back on."""


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
    (seed, stream, group); the streams share no seed. (Two seeds may name the same task all the same, where there are few:
    :class:`~torchrl_llm.envs.Task`.) Several workers
    share one stream without overlap: worker ``w`` of ``W`` deals the groups ``w, w + W, w + 2W, ...``.

    A mixture may be dealt by recent success: from the first :meth:`learn` on, environment ``e`` is drawn with
    ``weights[e] * (p (1 - p) + FLOOR)``, where ``p`` is its recent success rate. ``p (1 - p)`` is the learnability of a task
    (Rutherford et al., *No Regrets*, 2024, arXiv:2408.15099; for language models Foster et al., *Learning to Reason at
    the Frontier of Learnability*, 2025, arXiv:2502.12272): there is most to learn where half of the episodes are won, and
    nothing where all or none are. Who plays a group then depends on (seed, stream, group, success rates).

    Args:
        seed: names the run's tasks; >= 0.
        stream: ``"train"`` (default), ``"eval"`` (during a run) or ``"test"`` (before and after it).
        group_size: episodes that share a task; default 1.
        num_tasks: number of environments in the mixture; default 1.
        weights: how often each environment of the mixture is dealt, relative to each other; all > 0. Default none: in turn.
        worker: index of this worker; default 0.
        num_workers: number of workers that share the stream; default 1.
        success: recent success rate of each environment, in [0, 1], what :meth:`learn` has found; only for
            ``stream="train"``. Default none: nothing is adapted. It is progress, like the counter, and no setting: tickets that
            differ in nothing else are equal.
        ids_by_seed: group and episode ids are unique over seeds (modulo 2**32) too, ``SEED_IDS`` a seed and stream, so that
            environments that were given seeds of their own share none. Default False: ids count from the stream's first.

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
        >>> Tickets(num_tasks=3, success=(0.0, 0.5, 1.0)).shares
        (0.05, 0.3, 0.05)
    """

    seed: int = 0
    stream: Stream = "train"
    group_size: int = 1
    num_tasks: int = 1
    worker: int = 0
    num_workers: int = 1
    weights: tuple[float, ...] | None = None
    success: tuple[float, ...] | None = field(default=None, compare=False)
    ids_by_seed: bool = False

    def __post_init__(self) -> None:
        for name in ("weights", "success"):
            given = getattr(self, name)
            object.__setattr__(self, name, None if given is None else tuple(map(float, given)))
        weights, success = self.weights, self.success
        rates = success is None or (
            self.stream == "train" and len(success) == self.num_tasks and all(0 <= rate <= 1 for rate in success)
        )
        proper = weights is None or (len(weights) == self.num_tasks and all(0 < w < float("inf") for w in weights))
        checks = {
            "seed": (self.seed >= 0, "an integer >= 0"),
            "stream": (self.stream in get_args(Stream), f"one of {get_args(Stream)}"),
            "group_size": (self.group_size >= 1, ">= 1"),
            "num_tasks": (self.num_tasks >= 1, ">= 1"),
            "weights": (proper, f"None or {self.num_tasks} finite numbers > 0, one an environment"),
            "success": (
                rates,
                f"None or, for the stream 'train', {self.num_tasks} rates in [0, 1], one an environment",
            ),
            "worker": (0 <= self.worker < self.num_workers, f"in [0, num_workers={self.num_workers})"),
        }
        for name, (holds, expected) in checks.items():
            if not holds:
                raise ValueError(f"Tickets.{name} is {getattr(self, name)!r}; expected {expected}.")

    def __getitem__(self, index: int) -> Ticket:
        if index < 0:
            raise IndexError(f"Ticket {index} does not exist; tickets are counted from 0.")
        if self.ids_by_seed and index >= SEED_IDS // self.num_workers - self.group_size:
            raise IndexError(f"Ticket {index} would share its id with another stream's: a seed has {SEED_IDS} ids.")
        return _ticket(self, self.shares, index)

    @property
    def base(self) -> int:
        """The lowest group and episode id of the stream, all workers together."""
        stream = get_args(Stream).index(self.stream)
        # Bit 62 sets them apart from ids that count from the stream's first; 32 bits of the seed, 2 of the stream, 28 to count.
        return 2**62 + (self.seed % 2**32 * 4 + stream) * SEED_IDS if self.ids_by_seed else stream * STREAM_IDS

    @property
    def shares(self) -> tuple[float, ...] | None:
        """How often each environment is dealt, relative to each other; ``None``: in turn."""
        if self.success is None:
            return self.weights
        weights = self.weights or (1.0,) * self.num_tasks
        return tuple(weight * (rate * (1 - rate) + FLOOR) for weight, rate in zip(weights, self.success, strict=True))

    def learn(self, env_ids: Sequence[int], won: Sequence[bool]) -> Self:
        """The tickets after some episodes: the same, but for the success rates.

        A rate moves by ``1 / MEMORY`` of the way to 0 or 1 for every episode, from 0.5 at the start; episodes that are
        learnt from together count alike, whatever their order. No episode may be running: its ticket would be another.

        Args:
            env_ids: what each episode played, an index into the mixture.
            won: whether it was a success.

        Examples:
            >>> tickets = Tickets(num_tasks=2).learn([0] * 32, [True] * 32)
            >>> [round(rate, 2) for rate in tickets.success]
            [0.82, 0.5]
        """
        rates = list(self.success or (0.5,) * self.num_tasks)
        for env_id in set(env_ids):
            wins = [win for other, win in zip(env_ids, won, strict=True) if other == env_id]
            mean = sum(wins) / len(wins)
            rates[env_id] = mean + (rates[env_id] - mean) * (1 - 1 / MEMORY) ** len(wins)
        return replace(self, success=tuple(rates))


@lru_cache(maxsize=4096)  # every ticket is asked for several times, and its seed is a hash
def _ticket(tickets: Tickets, shares: tuple[float, ...] | None, index: int) -> Ticket:
    round_, member = divmod(index, tickets.group_size)
    group = tickets.worker + round_ * tickets.num_workers
    stream = get_args(Stream).index(tickets.stream)
    drawn, chosen = map(int, np.random.SeedSequence(tickets.seed, spawn_key=(stream, group)).generate_state(2))
    # The lowest bits name the stream, so no seed of one stream is ever met in another.
    seed = drawn & ~3 | stream
    env_id = group % tickets.num_tasks if shares is None else _pick(shares, chosen / 2**32)
    return Ticket(tickets.base + group * tickets.group_size + member, tickets.base + group, env_id, seed)


def _pick(weights: tuple[float, ...], share: float) -> int:
    """The index at which the running sum of the weights passes the share in ``[0, 1)`` of their sum."""
    sums = np.cumsum(weights)
    return int(np.searchsorted(sums, share * sums[-1], side="right"))


def continued(old: Sequence[Mapping[str, Any]], new: Mapping[str, Any]) -> dict[str, Any]:
    """The state of an environment that continues a stream which another number of workers has dealt from.

    All new workers begin with the same round of groups, the first one behind every group dealt: no group is dealt twice,
    and a few groups may be left out.

    Args:
        old: the states of the earlier workers' environments (``GEMEnv.state_dict()``; of a transformed environment what is
            in ``"base"`` counts).
        new: the state of a new worker's fresh environment.

    Returns:
        The new state, with the first ticket to deal and the success rates of the first of ``old``.

    Examples:
        >>> tickets = {"group_size": 2, "worker": 0, "num_workers": 1, "success": None}
        >>> new = {"tickets": tickets | {"worker": 1, "num_workers": 2}, "num_dealt": 0}
        >>> continued([{"tickets": tickets, "num_dealt": 5}], new)["num_dealt"]
        4
    """
    if "base" in new:
        return {**new, "base": continued(old, new["base"])}
    dealt = [_innermost(state) for state in old]
    tickets = new["tickets"]
    workers = tickets["num_workers"]
    round_ = -(-max(map(_groups_dealt, dealt)) // workers)
    logger.warning(
        "%d processes go on with what %d began: from group %d, and not in the same bytes",
        workers, len(old), round_ * workers,
    )  # fmt: skip
    tickets = {**tickets, "success": dealt[0]["tickets"]["success"]}
    return {**new, "tickets": tickets, "num_dealt": round_ * tickets["group_size"]}


def _innermost(state: Mapping[str, Any]) -> Mapping[str, Any]:
    while "base" in state:
        state = state["base"]
    return state


def _groups_dealt(env: Mapping[str, Any]) -> int:
    """How many of all workers' groups come before the first one behind those that ``env`` has dealt."""
    tickets = env["tickets"]
    rounds = -(-env["num_dealt"] // tickets["group_size"])
    return max(0, tickets["worker"] + (rounds - 1) * tickets["num_workers"] + 1)
