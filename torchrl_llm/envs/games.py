"""Games of several players: :class:`Game`, the protocol, and :class:`SelfPlayEnv`, whose slots are
the seats.

Every seat has a conversation of its own and reads only what its player sees. The seats of a game
are one group: neighboring slots, and the episodes of one task. Who plays them is decided in
:mod:`torchrl_llm.collectors.self_play`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, NoReturn, Protocol, cast, runtime_checkable

from tensordict import TensorDictBase

from torchrl_llm.envs.columns import ExtraKinds
from torchrl_llm.envs.contexts import RequestingRule
from torchrl_llm.envs.env import GEMEnv
from torchrl_llm.envs.env_spec import EnvSpec
from torchrl_llm.envs.faults import EnvironmentUnavailableError
from torchrl_llm.envs.isolation import IsolatedEnv, kept_global_rng
from torchrl_llm.envs.registry import EnvSource, resolve_env
from torchrl_llm.envs.slots import Reply, SlotMachine
from torchrl_llm.utils.options import ConfigError, Count

__all__ = ["Game", "Seat", "SelfPlayEnv"]


@runtime_checkable
class Game(Protocol):
    """A game of several players who move one at a time. Derive from it, or have its attributes and
    methods.

    A game is a pure function of its seed and its moves. It may draw from the global generators of
    ``random`` and ``numpy.random``, which are its own during a call, or declare
    ``thread_safe = True`` (:class:`~torchrl_llm.envs.TextEnv`).

    Attributes:
        num_players: of the game, >= 2; they are counted from 0.
        seat: the player whose turn it is; ``None``: the game is over.
        rewards: of each player, once it is over. Who has most has won; equal ones are a draw.
    """

    num_players: int
    seat: int | None
    rewards: Sequence[float]

    def start(self, seed: int) -> None:
        """Start a game."""

    def move(self, text: str) -> None:
        """Make the move of the player whose turn it is, by the text of a whole response."""

    def observe(self, seat: int) -> str:
        """What a player learns by the last move, or by the start; called once for each player after
        each of them. "" is nothing."""

    def reset(self, seed: int | None = None) -> NoReturn:
        """Refuse to be played as an environment of one player."""
        cause = TypeError(f"{type(self).__name__} has {self.num_players} players")
        needs = 'It is a game of several players: play it in a SelfPlayEnv (of a run, with collector="self_play").'
        raise EnvironmentUnavailableError(type(self).__name__, needs, cause)


class _Calls:
    """A game in the form in which :class:`~torchrl_llm.envs.IsolatedEnv` calls it; collects what
    the players learn."""

    def __init__(self, make: Callable[..., Game]) -> None:
        self.game = make()
        self.thread_safe = bool(getattr(self.game, "thread_safe", False))
        self.seen: list[list[str]] = []

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        assert seed is not None
        self.seen = [[] for _ in range(self.game.num_players)]
        self.game.start(seed)
        return self._observed(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.game.move(action)
        return self._observed(), 0.0, False, False, {}

    def _observed(self) -> str:
        for seat, seen in enumerate(self.seen):
            seen.append(self.game.observe(seat))
        return ""


class Match:
    """A game that is played, with random generators of its own.

    Args:
        make: makes the game, when it is first started.
        name: for messages.

    Attributes:
        seed: of the running game.
        stopped: whether the game was given up before its end, because a seat has no room to go on.
    """

    def __init__(self, make: Callable[..., Game], name: str) -> None:
        self._env = IsolatedEnv(EnvSpec(name, partial(_Calls, make)))
        self.seed, self.stopped = 0, False

    @property
    def game(self) -> Game:
        return self._calls.game

    @property
    def _calls(self) -> _Calls:
        return cast(_Calls, self._env.env)

    @property
    def over(self) -> bool:
        """Whether the game was played to its end."""
        return self.game.seat is None

    def start(self, seed: int) -> None:
        self.seed, self.stopped = seed, False
        self._env.reset(seed)

    def move(self, text: str) -> None:
        self._env.step(text)

    def read(self, seat: int) -> str:
        """What a player has learned since it last read."""
        seen = self._calls.seen[seat]
        text = "\n".join(filter(None, seen))
        seen.clear()
        return text

    def outcome(self, seat: int) -> float:
        """1 for the only player with the highest reward, 0 for several with it, -1 for the others;
        NaN before the end."""
        if not self.over:
            return float("nan")
        own, others = self.game.rewards[seat], [r for i, r in enumerate(self.game.rewards) if i != seat]
        return float((own > max(others)) - (own < max(others)))


class Seat:
    """A seat in a match as a text environment. Its steps only read: the moves are made at the
    :class:`Match`.

    Extras of each turn: ``role``, "player 0" and so on, and ``outcome``: 1, 0 or -1 at the end of a
    game that was won, drawn or lost, else NaN.

    Args:
        make: makes the game.
        name: for messages.
        options: arguments of ``make``.

    Attributes:
        match, place: where it sits; at first alone in a match of its own.
    """

    extras: ClassVar[ExtraKinds] = {"role": str, "outcome": float}
    thread_safe = True  # the game has its own generators

    def __init__(self, make: Callable[..., Game], name: str, **options: Any) -> None:
        self.match, self.place = Match(partial(make, **options), name), 0

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """Read what the player has seen up to its first turn."""
        return self.match.read(self.place), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Read what has come of the player's move."""
        match, over = self.match, self.match.over
        outcome = match.outcome(self.place)
        info: dict[str, Any] = {"role": f"player {self.place}", "outcome": outcome}
        if over:
            info["success"] = outcome > 0
        reward = float(match.game.rewards[self.place]) if over else 0.0
        return match.read(self.place), reward, over, match.stopped and not over, info

    def hidden_state(self) -> tuple[int, int]:
        """The game's seed and the place: what others will do is hidden, so that no two games are
        one task."""
        return self.match.seed, self.place


class GameSlots(SlotMachine):
    """The slots of a :class:`SelfPlayEnv`: each is a seat, and neighboring seats share a match,
    which is found by any of its slots."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._matches: dict[int, Match] = {}

    def seats(self, slot: int) -> range:
        """The slots of the game that ``slot`` belongs to."""
        first = slot - slot % self.group_size
        return range(first, first + self.group_size)

    def start_match(self, first: int, index: int) -> None:
        """Start a game of the group whose first task is ``index``; its seats are opened when they
        have something to do.

        Raises:
            EnvironmentFault: the game raised.
            EnvironmentUnavailableError: it cannot be made.
        """
        task_spec = self.task_sampler[index]
        try:
            envs = [self._env(slot, task_spec) for slot in self.seats(first)]
            seats = [cast(Seat, env.env or env.make()) for env in envs]
            # The first seat's own match; those of the others are never made.
            match = self._matches[first] = seats[0].match
            for place, seat in enumerate(seats):
                seat.match, seat.place = match, place
            match.start(task_spec.seed)
        except EnvironmentUnavailableError:
            raise
        except (Exception, SystemExit) as error:
            raise self.fault(task_spec, -1, error) from error

    def move(self, slot: int, response: Sequence[int]) -> None:
        """Make a seat's move in its game.

        Raises:
            EnvironmentFault: the game raised.
        """
        state = self._slots[slot]
        try:
            self._matches[self.seats(slot)[0]].move(self.formatter.decode(response))
        except (Exception, SystemExit) as error:
            raise self.fault(state.task_spec, state.turn, error) from error

    def due(self, slot: int) -> list[int]:
        """The slots of a game that go on: that of the player whose turn it is, or all where the
        game has ended."""
        seats, match = self.seats(slot), self._matches[self.seats(slot)[0]]
        turn = match.game.seat
        return [*seats] if turn is None or match.stopped else [seats[turn]]

    def ended(self, slot: int) -> bool:
        """Whether a game is over, or was stopped."""
        match = self._matches[self.seats(slot)[0]]
        return match.over or match.stopped

    def stop(self, slot: int) -> None:
        """Give a game up, for a seat cannot go on."""
        self._matches[self.seats(slot)[0]].stopped = True

    def forgo(self, slot: int) -> Reply:
        """The end of an episode whose seat never got to move: a turn without a response, with the
        reward of the game."""
        state = self._slots[slot]
        step = state.envs[state.task_spec.env_id].step("")
        return Reply((), step, self._stop_reason(state, step))

    def renew(self, slot: int) -> None:
        """Abandon all seats of a slot's game: its state is unknown."""
        for each in self.seats(slot):
            super().renew(each)


class SelfPlayEnv(GEMEnv):
    """Games of several players; a slot is a seat. For
    :class:`~torchrl_llm.collectors.SelfPlayCollector`.

    The seats of a game are neighboring slots and a group of episodes, one for each player, in the
    order of the players. Each has its own context. What one of them may not do ends the game for
    all: where a context is full, or ``max_turns`` is reached, the episodes of the other seats end
    truncated too (``StopReason.ENV_TRUNCATED``), and nobody has won.

    Args:
        env: an id, a class that is a :class:`Game` or another function that makes one, an
            :class:`~torchrl_llm.envs.EnvSpec`, or a list of these, all with equally many players.
        group_size: the number of players; default ``None``: as the game says.
        num_envs: seats, a multiple of the players; default: those of one game.
        options: see :class:`~torchrl_llm.envs.GEMEnv`.

    Raises:
        ConfigError: an environment is not a game, or the players of the games differ from each
            other or from ``group_size``.

    Examples:
        >>> from torchrl_llm.testing.take_away import TakeAway
        >>> from torchrl_llm.testing.tokenizers import byte_tokenizer
        >>> SelfPlayEnv(TakeAway, tokenizer=byte_tokenizer(), num_envs=8).group_size
        2
    """

    machine = GameSlots
    slots: GameSlots

    def __init__(
        self,
        env: EnvSource | Sequence[EnvSource],
        *,
        group_size: Count | None = None,
        num_envs: Count | None = None,
        **options: Any,
    ) -> None:
        if isinstance(rule := options.get("context_rule"), RequestingRule):
            raise ConfigError(
                f"{type(self).__name__}: context_rule is {rule!r:.80}, which asks seats for more than their moves; expected one that does not, "
                "such as KeepLast(4)."
            )
        sources: Sequence[Any] = [env] if isinstance(env, str | EnvSpec) or callable(env) else env
        specs = [*map(resolve_env, sources)]
        players = {spec.name: _players(spec) for spec in specs}
        if len(found := {*players.values()}) != 1 or group_size not in (None, *found):
            raise ConfigError(
                f"The games have {players} players, and group_size is {group_size}; expected equal numbers, for the seats of a game "
                "are a group: leave group_size out, and play games of other numbers apart."
            )
        size = found.pop()
        seats = [
            replace(spec, make=partial(Seat, cast(Any, spec.make), spec.name), extras=Seat.extras) for spec in specs
        ]
        num_envs = size if num_envs is None else num_envs
        super().__init__(seats, group_size=size, num_envs=num_envs, **options)

    # ---------------------------------------- what needs a collector that knows of games

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        raise RuntimeError(
            f"{self.names[0]!r} is a game of {self.group_size} players, whose seats wait for each other: play it with a "
            'SelfPlayCollector (of a run, with collector="self_play").'
        )


def _players(spec: EnvSpec) -> int:
    """The number of players of a game, which is made for it."""
    with kept_global_rng():
        game: Any = spec.make()
    if isinstance(game, Game) and game.num_players > 1:
        return game.num_players
    raise ConfigError(
        f"{spec.name!r} made a {type(game).__name__}, which is not a game of several players: expected num_players > 1, seat, rewards, "
        'start, move and observe (torchrl_llm.envs.Game). Environments of one player have the collector "turn".'
    )
