"""Which task an episode plays, and whose rows are whose: :func:`task_of`, :func:`divide_rows`.

Two seeds may name the same task: a game has so many secrets, a data set so many rows. What tells two tasks apart is the first
observation or, where it is known, the hidden state. Everything that is known of GEM's environments for that stands here.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from torchrl_llm.envs.tickets import Stream


class Task(NamedTuple):
    """What names a task.

    Attributes:
        task_id: a hash of the hidden state, or of the first observation, an int64.
        known: whether the environment says what it hides; else tasks of the same first observation may differ.
    """

    task_id: int
    known: bool


def _generators(env: Any) -> Any:
    """The task lies in the generators: it is drawn in the first turn."""
    return random.getstate()


def _nothing(env: Any) -> None:
    """The first observation shows all."""


HIDDEN: dict[str, Callable[[Any], Any]] = {
    "CodeEnv": _nothing,
    "CrosswordsEnv": attrgetter("max_turns", "board", "solution"),
    "FifteenPuzzleEnv": attrgetter("max_turns", "board"),
    "Game2048Env": attrgetter("max_turns", "target_tile", "board"),
    "GuessTheNumberEnv": attrgetter("max_turns", "min_number", "max_number", "game_number"),
    "HangmanEnv": attrgetter("max_turns", "secret_word"),
    "MastermindEnv": attrgetter("max_turns", "num_numbers", "game_code"),
    "MathEnv": _nothing,
    "MinesweeperEnv": _generators,
    "QaEnv": _nothing,
    "ReasoningGymEnv": _nothing,
    "SokobanEnv": lambda env: (env.max_turns, env.room_fixed.tolist(), env.room_state.tolist()),
    "SudokuEnv": attrgetter("max_turns", "board"),
    "TowerofHanoiEnv": attrgetter("max_turns", "board"),
    "WordSearchEnv": attrgetter("max_turns", "game_board", "placed_words"),
    "WordleEnv": attrgetter("max_turns", "secret_word"),
}
"""By GEM's class, what a reset draws: all that makes it this task. The first observation may differ all the same, where it holds
an example that is drawn too, and it need not show the task."""


def gem_kinds(env: Any) -> set[str]:
    """The names of GEM's own classes that an environment is made of, without its wrappers."""
    bases = type(getattr(env, "unwrapped", env)).__mro__
    return {cls.__name__ for cls in bases if cls.__module__.startswith("gem.envs.")}


def task_of(env: Any, observation: str) -> Task:
    """The task that an environment has just been reset to.

    Args:
        env: a text environment. Its method ``hidden_state()``, if it has one, returns all that makes this task, as anything
            whose ``repr`` says it, such as the secret and the rules; ``None``: the first observation shows all.
        observation: its first observation.

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
    kinds = gem_kinds(env)
    hidden: Callable[[Any], Any] | None = next((HIDDEN[kind] for kind in HIDDEN if kind in kinds), None)
    own = getattr(env, "hidden_state", None)
    if own is not None:
        state = own()
    else:
        state = None if hidden is None else hidden(getattr(env, "unwrapped", env))
    shown = observation if state is None else f"{type(getattr(env, 'unwrapped', env)).__name__} {state!r}"
    digest = blake2b(shown.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return Task(int.from_bytes(digest, "little", signed=True), own is not None or hidden is not None)


# ---------------------------------------------------------------------- rows


PARTS: dict[Stream, tuple[int, int]] = {"train": (0, 8), "eval": (8, 9), "test": (9, 10)}
"""Which tenths of its rows each stream has."""


def divide_rows(env: Any, stream: Stream) -> None:
    """Leave one of GEM's data-backed environments, in place, the rows of ``stream``: no two streams share one.

    Eight tenths are for training, one for evaluations during a run, one for those before and after it. Rows of a data set
    with the same question are one; those of reasoning_gym are only counted, since to make all takes minutes. What is no such environment stays as it is.

    Args:
        env: a text environment; wrappers are seen through.
        stream: whose rows it shall play.

    Raises:
        ValueError: there are fewer than ten different questions.
    """
    kinds, gem_env = gem_kinds(env), getattr(env, "unwrapped", env)
    if "ReasoningGymEnv" in kinds:
        gem_env.ds = _View(gem_env.ds, rows_of(range(len(gem_env.ds)), stream))
    elif kinds & {"MathEnv", "QaEnv", "CodeEnv"}:
        gem_env.dataset = gem_env.dataset.select(rows_of(gem_env.dataset[gem_env.question_key], stream))


def rows_of(questions: Sequence[Any], stream: Stream) -> list[int]:
    """The indices of the rows that ``stream`` has, by a hash of their questions.

    Examples:
        >>> len(rows_of(range(200), "train")), len(rows_of(range(200), "eval")), len(rows_of(range(200), "test"))
        (160, 20, 20)
    """
    names = [blake2b(str(question).encode("utf-8", "surrogatepass"), digest_size=8).digest() for question in questions]
    order = sorted(set(names))
    if len(order) < 10:
        raise ValueError(
            f"its data set has {len(order)} different questions; expected at least 10, to divide them among training and "
            "evaluation. Pass divide=False to play all of them in every stream"
        )
    first, last = (len(order) * tenth // 10 for tenth in PARTS[stream])
    own = set(order[first:last])
    return [i for i, name in enumerate(names) if name in own]


class _View(Sequence[Any]):
    """Some rows of a sequence."""

    def __init__(self, rows: Any, indices: list[int]) -> None:
        self.rows, self.indices = rows, indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: Any) -> Any:
        return self.rows[self.indices[index]]

    def __iter__(self) -> Iterator[Any]:
        return (self.rows[i] for i in self.indices)


# ---------------------------------------------------------------------- what training has played


class SeenTasks:
    """The tasks that training has played, as hashes of eight bytes each.

    Memory is bounded: beyond ``limit`` tasks those with the lowest hashes are kept, and an overlap is that of the tasks that
    fall among them, which is a sample of all.

    Args:
        limit: how many are kept; default 2**20 (8 MB).

    Examples:
        >>> seen = SeenTasks()
        >>> seen.add([3, 5, 3])
        >>> len(seen), seen.overlap([3, 4, 5, 6])
        (2, 0.5)
    """

    def __init__(self, limit: int = 2**20) -> None:
        self.limit = limit
        self.tasks = np.empty(0, np.int64)

    def __len__(self) -> int:
        return len(self.tasks)

    def add(self, tasks: Any) -> None:
        """Remember ``tasks``, an array of int64."""
        self.tasks = np.union1d(self.tasks, np.asarray(tasks, np.int64))[: self.limit]

    def overlap(self, tasks: Any) -> float:
        """Share of ``tasks`` (int64, repeats count) that training has played; NaN if none of them can be judged."""
        tasks = np.asarray(tasks, np.int64)
        if len(self) >= self.limit:
            tasks = tasks[tasks <= self.tasks[-1]]
        return float(np.isin(tasks, self.tasks).mean()) if len(tasks) else float("nan")
