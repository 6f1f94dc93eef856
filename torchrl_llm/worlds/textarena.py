"""Games of TextArena (https://github.com/LeonGuertler/TextArena) as environments: ids such as
``textarena:TicTacToe-v0``.

Games of two players are a :class:`~torchrl_llm.envs.Game`, for self-play; games of one are ordinary
environments. A message is what the game has shown a player since its last turn, in TextArena's
form, ``[GAME] ...`` and ``[Player 1] ...``; TextArena's own wrappers, which repeat the whole
history, are left out, but for those that complete actions.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from numbers import Real
from pathlib import Path
from typing import Any

from torchrl_llm.envs.env_spec import EnvSpec
from torchrl_llm.envs.faults import EnvironmentUnavailableError, UnknownEnvironmentError
from torchrl_llm.envs.games import Game
from torchrl_llm.envs.isolation import kept_global_rng
from torchrl_llm.utils.hints import nearest
from torchrl_llm.utils.optional import import_extra

__all__ = ["SoloGame", "TextArenaGame", "play_at_random", "resolve_textarena"]

_BOXED = re.compile(r"\\boxed\{([^{}]*)\}")
_CHOICES = re.compile(r"(?:Available Moves|available actions are): (.+)")
_PLAYERS = {"SinglePlayerState": 1, "TwoPlayerState": 2}
"""Players of a game, by the class of its state."""


def _textarena() -> Any:
    # Before random.seed() of its games: importing it draws nothing, its dependencies may.
    with kept_global_rng():
        return import_extra("textarena", extra="textarena", what="A game of textarena:")


def action_of(response: str) -> str:
    r"""The part of a response that is the move: what is in the last ``\boxed{}``, or all of it.

    Opponents are shown moves, so a player that reasons before it boxes a move keeps its reasons to
    itself.

    Examples:
        >>> action_of(r"The center is free. \boxed{[4]}"), action_of("[4]")
        ('[4]', '[4]')
    """
    boxed = _BOXED.findall(response)
    return boxed[-1] if boxed else response


class _Played:
    """An environment of TextArena.

    Args:
        name: its id there.
        players: how many it is played by.
        options: arguments of its class.

    Raises:
        EnvironmentUnavailableError: it cannot be made here; the message has TextArena's reason.
    """

    def __init__(self, name: str, players: int, options: dict[str, Any]) -> None:
        self._textarena, self.players = _textarena(), players
        self._name, self._options = name, options
        self.env = self._make()

    def _make(self) -> Any:
        try:
            return self._textarena.make(self._name, **self._options)
        # Whatever a game needs: a newer Python, words of NLTK, the key of a judge.
        except (Exception, SystemExit) as error:
            needs = "TextArena cannot make it here."
            raise EnvironmentUnavailableError(f"textarena:{self._name}", needs, error) from error

    def reset(self, seed: int | None) -> None:
        # A new one each time: some keep a part of the last game, such as the order of the deck
        # (Kuhn poker).
        self.env = self._make()
        self.env.reset(num_players=self.players, seed=seed)
        for name, order in _ORDERS.items():
            setattr(self.state, name, _in_order(getattr(self.state, name), order))

    def step(self, response: str) -> None:
        self.env.step(action_of(response))

    @property
    def state(self) -> Any:
        return self.env.state

    def observe(self, player: int) -> str:
        """What a player was shown since it was last asked, without its own moves."""
        messages, self.state.observations[player] = self.state.observations[player], []
        own = self._textarena.ObservationType.PLAYER_ACTION
        names = {**self.state.role_mapping, self._textarena.GAME_ID: "GAME"}
        return "\n".join(
            f"[{names.get(sender, f'Player {sender}')}] {text}"
            for sender, text, kind in messages
            if (sender, kind) != (player, own)
        )


_ORDERS: dict[str, tuple[str, ...]] = {
    "set_invalid_move": ("reward", "reason"),
    "add_observation": ("from_id", "message", "observation_type"),
}
"""Methods of TextArena's states, and an order in which some games give their arguments that is not
theirs (Countdown, Cryptarithm, Slitherlink)."""


def _in_order(method: Callable[..., Any], order: tuple[str, ...]) -> Callable[..., Any]:
    """A method that takes its arguments in the wrong order too: the number first, and a text behind
    it.

    Without it the reward of a move that is not allowed was text, and what a player read of it a
    number.
    """

    def called(*given: Any, **named: Any) -> Any:
        if len(given) == len(order) and isinstance(given[0], Real) and isinstance(given[1], str):
            return method(**dict(zip(order, given, strict=True)), **named)
        return method(*given, **named)

    return called


class TextArenaGame(Game):
    """A game of two players. A move that is not allowed may be corrected once, where TextArena says
    so; then it loses.

    Args:
        name: its id in TextArena.
        options: arguments of its class there, such as ``max_rounds`` of Kuhn poker.
    """

    num_players = 2

    def __init__(self, name: str, **options: Any) -> None:
        self._played = _Played(name, 2, options)
        self.seat: int | None = None
        self.rewards: Sequence[float] = ()

    def start(self, seed: int) -> None:
        """Start a game."""
        self._played.reset(seed)
        self._read()

    def move(self, text: str) -> None:
        """Make a move: the response, or what is in its last ``\\boxed{}``."""
        self._played.step(text)
        self._read()

    def observe(self, seat: int) -> str:
        """What a player was shown, without its own moves."""
        return self._played.observe(seat)

    def _read(self) -> None:
        state = self._played.state
        self.seat = None if state.done else state.current_player_id
        self.rewards = [float(state.rewards[seat]) for seat in range(2)] if state.done else ()


class SoloGame:
    """A game of one player as a text environment; its last reward decides about success.

    Args:
        name: its id in TextArena.
        options: arguments of its class there.
    """

    def __init__(self, name: str, **options: Any) -> None:
        self._played = _Played(name, 1, options)

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """Start a game."""
        self._played.reset(seed)
        return self._played.observe(0), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Make a move: the response, or what is in its last ``\\boxed{}``."""
        self._played.step(action)
        done = bool(self._played.state.done)
        reward = float(self._played.state.rewards[0]) if done else 0.0
        return self._played.observe(0), reward, done, False, {}


def play_at_random(context: str, rng: random.Random) -> str:
    """Plays games that list what may be done (tic-tac-toe, Kuhn poker, ...) at random, by the last
    list.

    Examples:
        >>> play_at_random("Available Moves: '[0]', '[7]'", random.Random(1))
        '[0]'
    """
    lists = _CHOICES.findall(context)
    choices = re.findall(r"\[[^\]]*\]", lists[-1]) if lists else []
    if not choices:
        raise ValueError(f'The player knows games that list "Available Moves: ..."; it was shown {context[-120:]!r}.')
    return rng.choice(choices)


def _number_of_players(env_id: str, entry_point: str) -> int | None:
    """1 or 2; ``None``: more, or a number that the game is not fixed to. The module is read, and
    only its package is imported.

    Raises:
        EnvironmentUnavailableError: its package cannot be imported, as those that need a newer
            Python (Klondike).
    """
    module = entry_point.partition(":")[0]
    try:
        found = find_spec(module)
    except ModuleNotFoundError:
        return None
    # of the package's own code, such as syntax that is newer than this Python
    except Exception as error:
        raise EnvironmentUnavailableError(env_id, "TextArena cannot make it here.", error) from error
    source = "" if found is None or found.origin is None else Path(found.origin).read_text(encoding="utf-8")
    states = {*re.findall(r"\b(\w+State)\(", source)}
    return _PLAYERS.get(states.pop()) if len(states) == 1 else None


def resolve_textarena(env_id: str) -> EnvSpec:
    """The game of an id, such as ``"textarena:TicTacToe-v0"``: the family that this package offers
    by an entry point.

    Raises:
        UnknownEnvironmentError: no game has this id, or it is for more than two players, or for any
            number of them.
        EnvironmentUnavailableError: the game cannot be imported; the message has TextArena's
            reason.
        MissingExtraError: TextArena is not installed.
    """
    _textarena()
    registry = import_extra("textarena.envs.registration", extra="textarena", what="A game of textarena:").ENV_REGISTRY
    name = env_id.removeprefix("textarena:")
    if name not in registry:
        known = [f"textarena:{each}" for each in registry]
        raise UnknownEnvironmentError(
            f"There is no game {env_id!r}; expected one of TextArena's ids, such as 'textarena:TicTacToe-v0'.{nearest(env_id, known)}"
        )
    players = _number_of_players(env_id, registry[name].entry_point)
    if players is None:
        raise UnknownEnvironmentError(
            f"{env_id!r} is not a game for just one or two players: expected one that is, such as 'textarena:TicTacToe-v0'."
        )
    make: Callable[..., Any] = SoloGame if players == 1 else TextArenaGame
    return EnvSpec(env_id, partial(make, name))
