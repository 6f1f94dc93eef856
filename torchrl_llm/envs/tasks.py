"""The task of each episode: :class:`TaskSpec`, :class:`TaskSampler`, and what tells tasks apart,
:class:`TaskIdentity`.

A task is a pure function of a counter: an environment samples task 0, 1, 2, ..., and the counter is
all its state. Two seeds may give the same task (a game has only so many secrets, a data set so many
rows). Tasks are told apart by their hidden state or, where that is unknown, their first
observation. This module draws no random numbers and knows no environments.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from hashlib import blake2b
from typing import Any, Literal, NamedTuple, Self, get_args

import numpy as np

from torchrl_llm.utils.options import Checked, ConfigError, Count, Natural, Positive, Share

Stream = Literal["train", "eval", "test"]

STREAM_IDS = 2**40
"""Group and episode ids of the n-th stream start at ``n * STREAM_IDS``, so that they are unique
over the run."""

SEED_IDS = 2**28
"""Ids that each stream of each seed has, where ids are named by the seed too."""

FLOOR = 0.05
"""Added to the learnability of every environment, which is at most 0.25: none is forgotten, and
their rates stay known."""

MEMORY = 32
"""Episodes of an environment that its recent success rate looks back on."""


MOST_STAGES = 1000
"""Stages of a curriculum that a sampler keeps: many more than one task can be in flight for."""


class TaskSpec(NamedTuple):
    """The ids and the task of an episode.

    Attributes:
        episode_id: unique over the run.
        group_id: unique over the run; episodes of one group have the same task.
        env_id: index into the mixture of environments.
        seed: seed of the task, in ``[0, 2**32)``, the same for the whole group.
        options: what its environment is made with, names and values; see :class:`Stage`.
    """

    episode_id: int
    group_id: int
    env_id: int
    seed: int
    options: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A stage of a curriculum: how the groups from ``first_group`` on are sampled.

    Attributes:
        first_group: number of the stream's group with which it begins.
        weights: how often each environment of the mixture is sampled, relative to each other, >= 0
            and not all 0; ``None``: in turn.
        options: of each environment, keyword arguments that it is made with, plain data; empty:
            none of any.

    Raises:
        ConfigError: weights are negative, not finite, or all 0.
    """

    first_group: int = 0
    weights: tuple[float, ...] | None = None
    options: tuple[Mapping[str, Any], ...] = ()

    def __post_init__(self) -> None:
        # As they are after a checkpoint: sequences there are lists.
        weights = None if self.weights is None else tuple(map(float, self.weights))
        object.__setattr__(self, "weights", weights)
        object.__setattr__(self, "options", tuple(map(dict, self.options)))
        if weights is not None and not (all(0 <= w < math.inf for w in weights) and any(weights)):
            raise ConfigError(f"The weights of a curriculum are {weights}; expected numbers >= 0, not all of them 0.")


@dataclass(frozen=True, kw_only=True)
class TaskSampler(Checked):
    """An endless sequence of tasks; ``task_sampler[i]`` is the i-th.

    Groups are sampled one after the other, and the environments of a mixture in turn, a group each,
    or with probability proportional to ``weights``: which one a group gets depends on (seed,
    stream, group) alone. Seeds are a hash of (seed, stream, group); the streams share no seed. (Two
    seeds may still give the same task, see :class:`TaskIdentity`.) Several workers share one stream
    without overlap: worker ``w`` of ``W`` samples the groups ``w, w + W, w + 2W, ...``.

    A mixture may be sampled by recent success: from the first :meth:`learn` on, environment ``e``
    is sampled with ``weights[e] * (p (1 - p) + FLOOR)``, where ``p`` is its recent success rate.
    ``p (1 - p)`` is the learnability of a task (Rutherford et al., *No Regrets*, 2024,
    arXiv:2408.15099; for language models Foster et al., *Learning to Reason at the Frontier of
    Learnability*, 2025, arXiv:2502.12272): there is most to learn where half of the episodes are
    won, and nothing where all or none are. The environment of a group then depends on (seed,
    stream, group, success rates).

    Args:
        seed: determines the run's tasks; >= 0.
        stream: ``"train"`` (default), ``"eval"`` (during a run) or ``"test"`` (before and after
            it).
        group_size: episodes that share a task; default 1.
        mixture_size: number of environments in the mixture; default 1.
        weights: how often each environment of the mixture is sampled, relative to each other; all
            > 0. Default none: in turn.
        worker: index of this worker; default 0.
        num_workers: number of workers that share the stream; default 1.
        success: recent success rate of each environment, in [0, 1], updated by :meth:`learn`; only
            for ``stream="train"``. Default none: nothing is adapted. It is progress, like the
            counter, and no setting: samplers that differ in nothing else are equal.
        stages: of a curriculum, added by :meth:`with_stage`, in order; progress too. Default none.
        ids_by_seed: group and episode ids are unique over seeds (modulo 2**32) too, ``SEED_IDS`` a
            seed and stream, so that environments with different seeds share none. Default False:
            ids count from the stream's first.

    Examples:
        >>> task_sampler = TaskSampler(seed=3, group_size=2, mixture_size=2)
        >>> [task_sampler[i][:3] for i in range(4)]
        [(0, 0, 0), (1, 0, 0), (2, 1, 1), (3, 1, 1)]
        >>> task_sampler[0].seed == task_sampler[1].seed != task_sampler[2].seed
        True
        >>> TaskSampler(group_size=2, worker=1, num_workers=3)[2].group_id
        4
        >>> mixed = TaskSampler(mixture_size=2, weights=(3, 1))
        >>> sum(mixed[i].env_id for i in range(1000))
        214
        >>> TaskSampler(mixture_size=3, success=(0.0, 0.5, 1.0)).shares
        (0.05, 0.3, 0.05)
    """

    seed: Natural = 0
    stream: Stream = "train"
    group_size: Count = 1
    mixture_size: Count = 1
    worker: Natural = 0
    num_workers: Count = 1
    weights: tuple[Positive, ...] | None = None
    success: tuple[Share, ...] | None = field(default=None, compare=False)
    stages: tuple[Stage, ...] = field(default=(), compare=False)
    ids_by_seed: bool = False

    def __post_init__(self) -> None:
        # A checkpoint has them as plain data.
        stages = (each if isinstance(each, Stage) else Stage(**each) for each in self.stages)
        object.__setattr__(self, "stages", tuple(stages))
        for name in ("weights", "success"):
            given = getattr(self, name)
            if given is not None and len(given) != self.mixture_size:
                raise ConfigError(
                    f"TaskSampler.{name} is {given!r}; expected {self.mixture_size} numbers, one an environment."
                )
            # Equal settings must be equal objects, whether they come from Python, YAML or a saved
            # state.
            object.__setattr__(self, name, None if given is None else tuple(map(float, given)))
        if self.success is not None and self.stream != "train":
            raise ValueError(
                f"TaskSampler.success is for the stream 'train'; got it for {self.stream!r}: leave it out."
            )
        if self.worker >= self.num_workers:
            raise ValueError(
                f"TaskSampler.worker is {self.worker!r}; expected one in [0, num_workers={self.num_workers})."
            )

    def __getitem__(self, index: int) -> TaskSpec:
        if index < 0:
            raise IndexError(f"Task {index} does not exist; tasks are counted from 0.")
        if self.ids_by_seed and index >= SEED_IDS // self.num_workers - self.group_size:
            raise IndexError(f"Task {index} would share its id with another stream's: a seed has {SEED_IDS} ids.")
        stage = self.stage(self._group(index))
        task_spec = _task_spec(self, self._shares(stage.weights), index)
        options = tuple(stage.options[task_spec.env_id].items()) if stage.options else ()
        return task_spec._replace(options=options)

    def _group(self, index: int) -> int:
        return self.worker + index // self.group_size * self.num_workers

    def index_of(self, episode_id: int, group_id: int) -> int | None:
        """The index at which the tasks of this sampler have an episode; ``None``: it is of none of
        them.

        Examples:
            >>> TaskSampler(group_size=2, worker=1, num_workers=3).index_of(15, 7)
            5
        """
        group, member = divmod(episode_id - self.base, self.group_size)
        index = group // self.num_workers * self.group_size + member
        return index if index >= 0 and self[index][:2] == (episode_id, group_id) else None

    def stage(self, group: int) -> Stage:
        """The stage in which the stream's ``group``-th group is sampled."""
        place = bisect_right(self.stages, group, key=lambda stage: stage.first_group)
        return self.stages[place - 1] if place else Stage(weights=self.weights)

    @property
    def last_stage(self) -> Stage:
        """The stage of the newest groups."""
        return self.stages[-1] if self.stages else Stage(weights=self.weights)

    def with_stage(
        self, index: int, *, weights: Sequence[float] | None = None, options: Sequence[Mapping[str, Any]] | None = None
    ) -> Self:
        """The sampler whose tasks are others from ``index`` on, or from the next group on if that
        is within one.

        Tasks before it stay as they are, so that episodes may be running.

        Args:
            index: of a task.
            weights, options: of the :class:`Stage`; default: as they were.

        Raises:
            ConfigError: there is not one of them for each environment, or weights are not >= 0.

        Examples:
            >>> task_sampler = TaskSampler(mixture_size=2, group_size=2).with_stage(3, weights=(0, 1))
            >>> [task_sampler[i].env_id for i in range(8)]
            [0, 0, 1, 1, 1, 1, 1, 1]
        """
        for name, given in (("weights", weights), ("options", options)):
            if given is not None and len(given) != self.mixture_size:
                raise ConfigError(
                    f"The {name} of a curriculum are {given!r}; expected {self.mixture_size} of them, one an environment."
                )
        changes: dict[str, Any] = {"weights": weights, "options": options}
        changes = {name: given for name, given in changes.items() if given is not None}
        first = self._group(index + self.group_size - 1)
        last = self.last_stage
        earlier = [stage for stage in self.stages if stage.first_group < first]
        stage, same = replace(last, first_group=first, **changes), replace(last, first_group=first)
        return self if stage == same else replace(self, stages=(*earlier, stage)[-MOST_STAGES:])

    @property
    def base(self) -> int:
        """The lowest group and episode id of the stream, all workers together."""
        stream = get_args(Stream).index(self.stream)
        # Bit 62 sets them apart from ids that count from the stream's first; 32 bits of the seed, 2
        # of the stream, 28 to count.
        return 2**62 + (self.seed % 2**32 * 4 + stream) * SEED_IDS if self.ids_by_seed else stream * STREAM_IDS

    @property
    def shares(self) -> tuple[float, ...] | None:
        """How often each environment is sampled, relative to each other; ``None``: in turn."""
        return self._shares(self.last_stage.weights)

    def _shares(self, weights: tuple[float, ...] | None) -> tuple[float, ...] | None:
        if self.success is None:
            return weights
        weights = weights or (1.0,) * self.mixture_size
        return tuple(weight * (rate * (1 - rate) + FLOOR) for weight, rate in zip(weights, self.success, strict=True))

    def learn(self, env_ids: Sequence[int], won: Sequence[bool]) -> Self:
        """The sampler with success rates updated from some episodes.

        A rate moves by ``1 / MEMORY`` of the way to 0 or 1 for every episode, from 0.5 at the
        start; the episodes of one call count alike, whatever their order. No episode may be
        running: its task would change.

        Args:
            env_ids: the environment of each episode, an index into the mixture.
            won: whether it was a success.

        Examples:
            >>> task_sampler = TaskSampler(mixture_size=2).learn([0] * 32, [True] * 32)
            >>> [round(rate, 2) for rate in task_sampler.success]
            [0.82, 0.5]
        """
        rates = list(self.success or (0.5,) * self.mixture_size)
        # From the mean, in closed form: one after the other, the last episodes would count most.
        for env_id in set(env_ids):
            wins = [win for other, win in zip(env_ids, won, strict=True) if other == env_id]
            mean = sum(wins) / len(wins)
            rates[env_id] = mean + (rates[env_id] - mean) * (1 - 1 / MEMORY) ** len(wins)
        return replace(self, success=tuple(rates))


@lru_cache(maxsize=4096)  # every task is read several times, and its seed is a hash
def _task_spec(task_sampler: TaskSampler, shares: tuple[float, ...] | None, index: int) -> TaskSpec:
    group, member = task_sampler._group(index), index % task_sampler.group_size
    stream = get_args(Stream).index(task_sampler.stream)
    # Two words: the seed does not depend on the mixture, nor on its weights.
    hashed, noise = map(int, np.random.SeedSequence(task_sampler.seed, spawn_key=(stream, group)).generate_state(2))
    # The lowest bits are the stream's, so that no two streams share a seed.
    seed = hashed & ~3 | stream
    env_id = group % task_sampler.mixture_size
    if shares is not None:  # inverse CDF
        sums = np.cumsum(shares)
        env_id = int(np.searchsorted(sums, noise / 2**32 * sums[-1], side="right"))
    base = task_sampler.base
    return TaskSpec(base + group * task_sampler.group_size + member, base + group, env_id, seed)


# ---------------------------------------- what tells tasks apart


class ChosenTasks:
    """A task sampler of chosen tasks, each a group of its own.

    Args:
        task_sampler: of all tasks.
        first: indices of the chosen tasks.
        others: indices of the tasks that replace those that failed at a reset.
    """

    group_size = 1

    def __init__(self, task_sampler: TaskSampler, first: Sequence[int], others: Sequence[int]) -> None:
        self.task_sampler, self.first, self.others = task_sampler, first, others

    def __getitem__(self, index: int) -> TaskSpec:
        late = index - len(self.first)
        return self.task_sampler[self.others[late] if late >= 0 else self.first[index]]


class TaskIdentity(NamedTuple):
    """What tells a task apart from others.

    Attributes:
        task_id: a hash of the hidden state, or of the first observation, an int64.
        known: whether the hidden state is known; else tasks of the same first observation may
            differ.
    """

    task_id: int
    known: bool


def digest(text: str) -> bytes:
    """A hash of a text that is the same in every process, unlike ``hash``."""
    # surrogatepass: whether a message is Unicode text is decided where it is rendered.
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()


def task_of(env: Any, observation: str, read_hidden: Callable[[Any], Any] | None = None) -> TaskIdentity:
    """The identity of the task that an environment has just been reset to.

    Args:
        env: a text environment. Its method ``hidden_state()``, if it has one, returns everything
            that defines this task, as an object with a telling ``repr``, such as the secret and the
            rules; ``None``: the first observation shows all.
        observation: its first observation.
        read_hidden: reads the same from an environment without that method; default ``None``: it is
            not known.

    Examples:
        >>> class Coin:
        ...     def hidden_state(self):
        ...         return self.side
        >>> coin = Coin()
        >>> coin.side = "heads"
        >>> heads = task_of(coin, "Heads or tails?")
        >>> coin.side = "tails"
        >>> heads == task_of(coin, "Heads or tails?"), heads.known
        (False, True)
        >>> task_of(object(), "Heads or tails?").known
        False
    """
    inner = getattr(env, "unwrapped", env)
    own: Callable[[], Any] | None = getattr(env, "hidden_state", None)
    known = own is not None or read_hidden is not None
    state = own() if own is not None else None if read_hidden is None else read_hidden(inner)
    shown = observation if state is None else f"{type(inner).__name__} {state!r}"
    return TaskIdentity(int.from_bytes(digest(shown), "little", signed=True), known)


PARTS: dict[Stream, tuple[int, int]] = {"train": (0, 8), "eval": (8, 9), "test": (9, 10)}
"""Which tenths of the rows of a data set each stream has."""


def rows_of(questions: Sequence[Any], stream: Stream) -> list[int]:
    """The indices of the rows that ``stream`` has, by a hash of their questions.

    Examples:
        >>> len(rows_of(range(200), "train")), len(rows_of(range(200), "eval")), len(rows_of(range(200), "test"))
        (160, 20, 20)
    """
    names = [digest(str(question)) for question in questions]
    # Each question once: rows that repeat it must not be in two streams.
    order = sorted(set(names))
    if len(order) < 10:
        raise ValueError(
            f"its data set has {len(order)} different questions; expected at least 10, to divide them among training and "
            "evaluation. Pass divide=False to use all of them in every stream"
        )
    first, last = (len(order) * tenth // 10 for tenth in PARTS[stream])
    own = set(order[first:last])
    return [i for i, name in enumerate(names) if name in own]
