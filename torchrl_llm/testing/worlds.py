"""Two small worlds whose best success rate is known exactly: :class:`Coins` and
:class:`KeyAndDoor`.

They show that settings do not fit one game only. ``Coins`` pays on the way and hides nothing;
``KeyAndDoor`` pays at the end of eight to twelve turns and has to be remembered. Both speak GEM's
protocol, as :mod:`~torchrl_llm.testing.environments`, and their tasks can be listed, so that
dynamic programming finds the best success rate (:func:`coins_optimum`,
:func:`key_and_door_optimum`). An answer is one word; any other text is illegal, costs a turn and
pays -0.1, as GEM's format errors do.
"""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

from torchrl_llm.envs.columns import ExtraKinds
from torchrl_llm.envs.env_spec import EnvSpec
from torchrl_llm.envs.faults import UnknownEnvironmentError
from torchrl_llm.envs.registry import resolve_env
from torchrl_llm.testing.credit_worlds import CREDIT_WORLDS
from torchrl_llm.testing.tabular import ILLEGAL_REWARD, Step
from torchrl_llm.testing.take_away import TakeAway
from torchrl_llm.testing.thinking_worlds import Tally, tally_optimum

# ---------------------------------------- coins


class Line(NamedTuple):
    """A state of :class:`Coins`.

    Attributes:
        cell: where the player is, counted from 0 at the left end.
        worths: of the coin in each cell; 0: there is none.
        moves: moves that are left.
    """

    cell: int
    worths: tuple[int, ...]
    moves: int

    def after(self, response: str) -> tuple[Line, int]:
        """The next state, and the worth of the coin that was collected. A move beyond an end stays
        there.

        Examples:
            >>> Line(1, (3, 0, 2), moves=2).after("left")
            (Line(cell=0, worths=(0, 0, 2), moves=1), 3)
        """
        cell = min(max(self.cell + Coins.MOVES.get(response, 0), 0), len(self.worths) - 1)
        left = tuple(0 if i == cell else worth for i, worth in enumerate(self.worths))
        return Line(cell, left, self.moves - 1), self.worths[cell]

    @property
    def shown(self) -> str:
        """The state as a message, such as ``"3 me 2 moves 2"``."""
        if not self.moves:
            return "over"
        cells = ("me" if i == self.cell else str(worth) for i, worth in enumerate(self.worths))
        return " ".join([*cells, f"moves {self.moves}"])

    @classmethod
    def read(cls, message: str) -> Line:
        """The state that a message shows.

        Examples:
            >>> Line.read("3 me 2 moves 2")
            Line(cell=1, worths=(3, 0, 2), moves=2)
        """
        *cells, _, moves = message.split()
        return cls(cells.index("me"), tuple(0 if cell == "me" else int(cell) for cell in cells), int(moves))


@lru_cache(maxsize=2**16)
def most_worth(line: Line) -> int:
    """The most that the moves that are left can collect.

    Examples:
        >>> most_worth(Line(1, (3, 0, 2, 2), moves=3)), most_worth(Line(1, (3, 0, 2, 2), moves=4))
        (5, 7)
    """
    if line.moves == 0:
        return 0
    return max(worth + most_worth(after) for after, worth in map(line.after, Coins.MOVES))


class Coins:
    """Coins lie in a line of cells; a few moves collect those that are worth most together.

    A message shows the whole line, the player as ``me``, and the moves that are left. ``left`` and
    ``right`` move one cell and collect at once what lies there, which pays its worth as a share of
    the best plan's: the return of the best plan is 1. The episode ends when no move is left, and is
    a success if no plan had collected more. An illegal answer costs a move and 0.1.

    A player that always walks to the nearest coin wins 0.92 of the default tasks, and one that
    walks to the dearest coin 0.96. A plan that is best at a discount of 0.9 a turn is best without
    one too, so a discounted objective has the same optimum.

    Args:
        cells: length of the line. Default 7.
        moves: of an episode, at most 9. Default 5.
        worths: of the coins, each at most 9; each lies in a cell of its own, and none where the
            player starts. Default 1 and 2.

    Its extras are the ``state`` in which a move was made, as its message, and the ``regret`` of the
    move: how much less than the best one it can still return. The regrets of an episode sum to 1
    minus its return.

    Attributes:
        WORDS: every word of messages and answers, for
            :func:`~torchrl_llm.testing.tokenizers.word_tokenizer`.
        tasks: the states that an episode can start in, each as likely: any order of the coins, any
            start between the ends.

    Examples:
        >>> env = Coins()
        >>> env.reset(0)[0]
        '0 1 0 0 me 2 0 moves 5'
        >>> Coins.best_response(["0 1 0 0 me 2 0 moves 5"])
        'right'
        >>> env.step("right")[:4]
        ('0 1 0 0 0 me 0 moves 4', 0.6666666666666666, False, False)
        >>> len(env.tasks)
        150
    """

    MOVES: ClassVar[dict[str, int]] = {"left": -1, "right": 1}
    WORDS: ClassVar[tuple[str, ...]] = (*map(str, range(10)), "me", "moves", "left", "right", "over")
    extras: ClassVar[ExtraKinds] = {"regret": float, "state": str}
    thread_safe = True

    def __init__(self, *, cells: int = 7, moves: int = 5, worths: Sequence[int] = (1, 2)) -> None:
        if not (1 <= moves <= 9 and len(worths) < cells and all(1 <= worth <= 9 for worth in worths)):
            raise ValueError(
                f"cells={cells}, moves={moves}, worths={worths}; expected 1 to 9 moves and fewer coins than cells, each worth 1 to 9."
            )
        self.tasks = [task for task in _lines(cells, moves, worths) if most_worth(task)]
        self._line = Line(0, (), 0)
        self._best = self._missing = 0

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, bool]]:
        """Start the task of ``seed``."""
        self._line = random.Random(seed).choice(self.tasks)
        self._best = self._missing = most_worth(self._line)
        return self._line.shown, {}

    def step(self, action: str) -> Step:
        """Move and collect."""
        if not self._line.moves:
            raise RuntimeError("There is no running game: reset first.")
        response, before = action.strip(), self._line
        self._line, worth = before.after(response)
        self._missing -= worth
        reward = worth / self._best if response in self.MOVES else ILLEGAL_REWARD
        over = not self._line.moves
        regret = (most_worth(before) - most_worth(self._line)) / self._best - reward
        info = {"state": before.shown, "regret": regret} | ({"success": self._missing == 0} if over else {})
        return self._line.shown, reward, over, False, info

    @classmethod
    def best_response(cls, texts: Sequence[str]) -> str:
        """The first move of a best plan.

        Args:
            texts: message, response, message, ..., message; only the last one is read, which shows
                all.
        """
        line = Line.read(texts[-1])
        nexts = {move: line.after(move) for move in cls.MOVES}
        return max(nexts, key=lambda move: nexts[move][1] + most_worth(nexts[move][0]))


def _lines(cells: int, moves: int, worths: Sequence[int]) -> Iterable[Line]:
    """All tasks: starts between the ends, and the coins in every order in the other cells."""
    for start in range(1, cells - 1):
        for places in itertools.permutations([i for i in range(cells) if i != start], len(worths)):
            coins = dict(zip(places, worths, strict=True))
            yield Line(start, tuple(coins.get(i, 0) for i in range(cells)), moves)


@lru_cache(maxsize=2**18)
def _success(line: Line, missing: int) -> bool:
    """Whether the moves that are left can collect ``missing`` more."""
    if line.moves == 0:
        return missing <= 0
    return any(_success(after, missing - worth) for after, worth in map(line.after, Coins.MOVES))


def coins_optimum(world: Coins | None = None) -> float:
    """The share of episodes of :class:`Coins` that the best policy wins, in [0, 1], by dynamic
    programming over all tasks.

    It is 1, for nothing is hidden and nothing random happens.

    Args:
        world: whose tasks; default ``Coins()``.

    Examples:
        >>> coins_optimum()
        1.0
    """
    tasks = (world or Coins()).tasks
    return sum(_success(task, most_worth(task)) for task in tasks) / len(tasks)


# ---------------------------------------- key and door


class Corridor(NamedTuple):
    """A state of :class:`KeyAndDoor`.

    Attributes:
        cells: length of the corridor; the key's place is at one end, and the door at the other.
        key: cell of the key's place, 0 or ``cells - 1``.
        cell: where the player is.
        turns: that are left.
        holds: whether the player has the key.
        opened: whether the door is open.
    """

    cells: int
    key: int
    cell: int
    turns: int
    holds: bool = False
    opened: bool = False

    @property
    def door(self) -> int:
        """Cell of the door."""
        return self.cells - 1 - self.key

    @property
    def needed(self) -> int:
        """Turns that the shortest way from here takes for a player without the key: to it, take, to
        the door, open."""
        return abs(self.cell - self.key) + 1 + self.cells - 1 + 1

    @property
    def over(self) -> bool:
        """Whether the episode has ended."""
        return self.opened or self.turns == 0

    @property
    def shown(self) -> str:
        """The message. The key's place looks the same with and without the key."""
        if self.over:
            return "over"
        return "key" if self.cell == self.key else "door" if self.cell == self.door else "hall"

    def after(self, response: str) -> Corridor:
        """The next state. What cannot be done here, and what is illegal, costs the turn and nothing
        else.

        Examples:
            >>> Corridor(3, key=0, cell=0, turns=5).after("take").after("right")
            Corridor(cells=3, key=0, cell=1, turns=3, holds=True, opened=False)
        """
        step = {"left": -1, "right": 1}.get(response, 0)
        return self._replace(
            cell=min(max(self.cell + step, 0), self.cells - 1),
            turns=self.turns - 1,
            holds=self.holds or (response == "take" and self.cell == self.key),
            opened=response == "open" and self.cell == self.door and self.holds,
        )


class KeyAndDoor:
    """Fetch the key at one end of a corridor, and open the door at the other with it.

    The first message says on which side the key is; every message says what is here: ``hall``,
    ``key`` or ``door``. No message says where in the corridor the player is, or whether it has the
    key: the key's place looks the same when the key is gone. So the player has to remember the
    side, and whether it took the key. The answers are ``left``, ``right``, ``take`` and ``open``.
    The only reward is 1 for the door that opens, which is a success. The episode ends there, or
    when the turns are used up: the shortest way takes 8 to 11, and ``slack`` more are allowed. An
    answer that does nothing here, such as ``take`` in the hall, costs its turn. An illegal answer
    costs its turn and 0.1. Its extra is the ``state`` in which an answer was given: the cell, and
    whether the player holds the key.

    Args:
        cells: length of the corridor. Default 6.
        slack: turns allowed beyond the shortest way. Default 1: every step the wrong way loses.
        told: whether the first message names the key's side. Default True.

    Attributes:
        WORDS: every word of messages and answers, for
            :func:`~torchrl_llm.testing.tokenizers.word_tokenizer`.
        tasks: the states that an episode can start in, each as likely: the key on either side, any
            start between the ends.

    Examples:
        >>> env = KeyAndDoor()
        >>> env.reset(0)[0], env.hidden_state().needed
        ('key right hall', 9)
        >>> [env.step(word)[0] for word in ("right", "right", "take", "left")]
        ['hall', 'key', 'key', 'hall']
        >>> KeyAndDoor.best_response(["key right hall", "right", "key", "take", "key"])
        'left'
    """

    ANSWERS: ClassVar[tuple[str, ...]] = ("left", "right", "take", "open")
    WORDS: ClassVar[tuple[str, ...]] = (*ANSWERS, "key", "door", "hall", "somewhere", "over")
    extras: ClassVar[ExtraKinds] = {"state": str}
    thread_safe = True

    def __init__(self, *, cells: int = 6, slack: int = 1, told: bool = True) -> None:
        if cells < 3 or slack < 0:
            raise ValueError(f"cells={cells}, slack={slack}; expected at least 3 cells and a slack of at least 0.")
        starts = (Corridor(cells, key, cell, 1) for key in (0, cells - 1) for cell in range(1, cells - 1))
        self.tasks = [start._replace(turns=start.needed + slack) for start in starts]
        self.told = told
        self._task = self._now = Corridor(cells, 0, 0, 0)

    def first_message(self, task: Corridor) -> str:
        """What ``reset`` shows of a task."""
        side = ("left" if task.key == 0 else "right") if self.told else "somewhere"
        return f"key {side} {task.shown}"

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, bool]]:
        """Start the task of ``seed``."""
        self._task = self._now = random.Random(seed).choice(self.tasks)
        return self.first_message(self._task), {}

    def step(self, action: str) -> Step:
        """Walk, take or open."""
        if self._now.over:
            raise RuntimeError("There is no running game: reset first.")
        response, before = action.strip(), self._now
        self._now = now = before.after(response)
        reward = float(now.opened) if response in self.ANSWERS else ILLEGAL_REWARD
        info = {"state": f"cell {before.cell}, {'key' if before.holds else 'no key'}"}
        return now.shown, reward, now.over, False, info | ({"success": now.opened} if now.over else {})

    def hidden_state(self) -> Corridor:
        """The task of the last reset: the first message hides the start and the turns."""
        return self._task

    @classmethod
    def best_response(cls, texts: Sequence[str]) -> str:
        """What a player that remembers answers next, if the first message told it the key's side.

        Args:
            texts: message, response, message, ..., message.
        """
        places = [message.split()[-1] for message in texts[::2]]
        holds = ("key", "take") in zip(places, texts[1::2], strict=False)
        return cls.answer(places[-1], side=texts[0].split()[1], holds=holds)

    @staticmethod
    def answer(place: str, *, side: str, holds: bool) -> str:
        """What is right at ``place`` if the key's place is at ``side`` and the player ``holds`` the
        key, or not.

        Examples:
            >>> KeyAndDoor.answer("hall", side="left", holds=True), KeyAndDoor.answer("key", side="left", holds=False)
            ('right', 'take')
        """
        if (place, holds) in (("key", False), ("door", True)):
            return "open" if holds else "take"
        return side if not holds else "right" if side == "left" else "left"


@lru_cache(maxsize=2**18)
def most_opened(belief: tuple[Corridor, ...]) -> int:
    """In how many of some states the door opens under the best policy, which tells them apart by
    messages alone.

    Args:
        belief: the states, none of them over, each as likely, that the conversation so far allows.
    """
    if not belief:
        return 0
    # "" waits, as any illegal answer does.
    return max(_opened_by(response, belief) for response in ("", *KeyAndDoor.ANSWERS))


def _opened_by(response: str, belief: tuple[Corridor, ...]) -> int:
    """The same, if the next answer is ``response``."""
    by_message = defaultdict(list)
    for state in belief:
        after = state.after(response)
        by_message[after.shown].append(after)
    ended = by_message.pop("over", [])
    later = sum(most_opened(tuple(sorted(group))) for group in by_message.values())
    return later + sum(state.opened for state in ended)


def key_and_door_optimum(world: KeyAndDoor | None = None) -> float:
    """The share of episodes of :class:`KeyAndDoor` that the best policy wins, in [0, 1], by dynamic
    programming over beliefs.

    A belief is the set of states that the conversation so far allows. All tasks are as likely and
    an answer has one outcome in each state, so no approximation is made.

    Args:
        world: whose tasks, and whether the side is told; default ``KeyAndDoor()``.

    Examples:
        >>> key_and_door_optimum(), key_and_door_optimum(KeyAndDoor(told=False))
        (1.0, 0.5)
    """
    world = world or KeyAndDoor()
    beliefs = defaultdict(list)
    for task in world.tasks:
        beliefs[world.first_message(task)].append(task)
    return sum(most_opened(tuple(sorted(belief))) for belief in beliefs.values()) / len(world.tasks)


# ---------------------------------------- ids


WORLDS: dict[str, Any] = {"coins": Coins, "key-and-door": KeyAndDoor, "tally": Tally}
"""The worlds of this module and :class:`~torchrl_llm.testing.thinking_worlds.Tally` by the names of
their ids."""

OPTIMA: dict[str, Callable[[], float]] = {
    "coins": coins_optimum,
    "key-and-door": key_and_door_optimum,
    "tally": tally_optimum,
}
"""The functions of their best success rates."""


def resolve_world(env_id: str) -> EnvSpec:
    """The world of an id, such as ``"world:coins"``: the family that this package offers by an
    entry point.

    It also has :data:`~torchrl_llm.testing.credit_worlds.CREDIT_WORLDS`, and ``"world:take-away"``,
    a game of two players: :class:`~torchrl_llm.testing.take_away.TakeAway`.

    Raises:
        UnknownEnvironmentError: no world has this id.

    Examples:
        >>> resolve_world("world:key-and-door").make().reset(0)[0]
        'key right hall'
    """
    name, worlds = env_id.removeprefix("world:"), {**WORLDS, **CREDIT_WORLDS, "take-away": TakeAway}
    if name not in worlds:
        known = [f"world:{each}" for each in worlds]
        raise UnknownEnvironmentError(f"There is no world {env_id!r}; expected one of {known}.")
    return replace(resolve_env(worlds[name]), name=env_id)
