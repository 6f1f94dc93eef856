"""Text games of TextWorld (https://github.com/microsoft/TextWorld) as environments: ids such as
``textworld:coin_collector``.

A game is generated from the seed of its task, compiled, and played in this process. TextWorld's own
global generator is seeded for each game and left as it was found; importing TextWorld draws from
numpy's.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, NamedTuple, cast

from torchrl_llm.envs.columns import ExtraKinds
from torchrl_llm.envs.env_spec import EnvSpec
from torchrl_llm.envs.faults import UnknownEnvironmentError
from torchrl_llm.envs.isolation import IsolatedEnv, kept_global_rng
from torchrl_llm.utils.hints import nearest
from torchrl_llm.utils.optional import import_extra

__all__ = ["GAMES", "TextWorldGame", "demonstrations", "resolve_textworld"]

FORMAT_ERROR_REWARD = -0.1
"""Of a response without a command, which ends the episode: as in GEM's games."""

_BOXED = re.compile(r"\\boxed\{([^{}]*)\}")
_SYNONYMS = frozenset(["get", "x", "l", "i", "n", "e", "s", "w", "north", "east", "south", "west"])
_SEVERAL = re.compile(r"[.\n]|\bthen\b")
_MOST_CHARACTERS = 100  # of a command; the interpreter cuts it at 198 bytes
_CACHED_GAMES = 32  # of about 0.5 MB each: the members of a group play the same one


# ---------------------------------------- settings


class Setting(NamedTuple):
    """A setting of a game.

    Attributes:
        default: its value if none is given.
        allowed: the values that it may have; a range stands for its integers.

    Examples:
        >>> level = Setting(1, (range(1, 4), None))
        >>> level.allows(3), level.allows(True), str(level)
        (True, False, '1 to 3 or None')
    """

    default: Any
    allowed: tuple[Any, ...]

    def allows(self, value: Any) -> bool:
        """Whether the setting may have this value. ``True`` is not 1 here."""
        ranges = [each for each in self.allowed if isinstance(each, range)]
        if type(value) is int and any(value in each for each in ranges):
            return True
        return any(type(value) is type(each) and value == each for each in self.allowed)

    def __str__(self) -> str:
        shown = [f"{each[0]} to {each[-1]}" if isinstance(each, range) else repr(each) for each in self.allowed]
        return " or ".join(shown)


_FLAG = Setting(False, (False, True))
_COMMON = {"max_turns": Setting(50, (range(1, 10_001),)), "show_commands": _FLAG}

GAMES: dict[str, dict[str, Setting]] = {
    # TextWorld compiles up to 100 rooms; levels from 101 on have two rooms for each step of the
    # way, and from 201 on three.
    "coin_collector": {"level": Setting(1, (range(1, 101), range(101, 151), range(201, 234)))},
    "treasure_hunter": {"level": Setting(1, (range(1, 31),))},
    "simple": {
        "rewards": Setting("dense", ("dense", "balanced", "sparse")),
        "goal": Setting("detailed", ("detailed", "brief", "none")),
        "test": _FLAG,
    },
    "cooking": {
        "recipe": Setting(1, (range(1, 6),)),
        "take": Setting(0, (range(6),)),
        "go": Setting(1, (1, 6, 9, 12)),
        "open": _FLAG,
        "cook": _FLAG,
        "cut": _FLAG,
        "drop": _FLAG,
        "recipe_seed": Setting(0, (range(2**32),)),
        "split": Setting(None, (None, "train", "valid", "test")),
    },
    "custom": {
        "world_size": Setting(5, (range(1, 101),)),
        "nb_objects": Setting(10, (range(1, 101),)),
        "quest_length": Setting(5, (range(1, 31),)),
        "quest_breadth": Setting(1, (range(1, 6),)),
    },
}
"""The games by the names of their ids, with their settings, which have the names of TextWorld's
command ``tw-make``."""


def check_options(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """All options of a game: those that are given, and the defaults of the others.

    Args:
        name: of the game, a key of :data:`GAMES`.
        given: options by name.

    Raises:
        TypeError: the game has no such option.
        ValueError: a value is not allowed, or two of them exclude each other.

    Examples:
        >>> check_options("treasure_hunter", {"level": 3})
        {'max_turns': 50, 'show_commands': False, 'level': 3}
        >>> check_options("treasure_hunter", {"level": 31})
        Traceback (most recent call last):
        ValueError: level=31 of 'textworld:treasure_hunter'; expected 1 to 30.
    """
    known = _COMMON | GAMES[name]
    for option, value in given.items():
        if option not in known:
            raise TypeError(
                f"'textworld:{name}' has no option {option!r}; expected one of {[*known]}.{nearest(option, [*known])}"
            )
        if not known[option].allows(value):
            raise ValueError(f"{option}={value!r} of 'textworld:{name}'; expected {known[option]}.")
    options = {option: given.get(option, setting.default) for option, setting in known.items()}
    if name == "cooking" and options["take"] > options["recipe"]:
        raise ValueError(
            f"take={options['take']} with recipe={options['recipe']} of 'textworld:cooking': more ingredients to find than the recipe "
            "has; expected take to be at most recipe."
        )
    if name == "cooking" and options["recipe_seed"] and not options["take"]:
        raise ValueError(
            f"recipe_seed={options['recipe_seed']} of 'textworld:cooking' chooses among ingredients to find, and take is 0; expected "
            "take to be at least 1, or no recipe_seed."
        )
    return options


# ---------------------------------------- games


class Recipe(NamedTuple):
    """All that a game is made from.

    Attributes:
        name: of the game, a key of :data:`GAMES`.
        settings: names and values of :data:`GAMES`, all of them.
        seed: as in ``tw-make --seed``, from which TextWorld derives the seeds of map, objects,
            quest and texts; below 2**32.
    """

    name: str
    settings: tuple[tuple[str, Any], ...]
    seed: int


class CompiledGame(NamedTuple):
    """The two files of a game.

    Attributes:
        program: what the interpreter runs (``.z8``).
        data: what TextWorld knows of the game (``.json``).
    """

    program: bytes
    data: bytes


def _textworld() -> Any:
    import_extra("textworld.challenges", extra="textworld", what="An environment of textworld:")
    return import_extra("textworld", extra="textworld", what="An environment of textworld:")


@lru_cache(_CACHED_GAMES)
def compile_game(recipe: Recipe) -> CompiledGame:
    """Generate and compile a game, in 0.6 to 2.5 seconds. It depends on the recipe alone.

    Raises:
        MissingExtraError: TextWorld is not installed.
        textworld.generator.QuestGenerationError: this seed makes no game of these settings.
    """
    textworld = _textworld()
    options = textworld.GameOptions()
    options.seeds = recipe.seed
    with TemporaryDirectory(prefix="textworld-") as folder, _own_generator(textworld, recipe.seed):
        game = _generate(textworld, recipe.name, dict(recipe.settings), options)
        options.path, options.file_ext = f"{folder}/game", ".z8"
        path = Path(textworld.generator.compile_game(game, options))
        return CompiledGame(path.read_bytes(), path.with_suffix(".json").read_bytes())


def _generate(textworld: Any, name: str, settings: dict[str, Any], options: Any) -> Any:
    if name != "custom":
        _, make, _ = textworld.challenges.registration.CHALLENGES[f"tw-{name}"]
        return make(settings, options)
    options.nb_rooms, options.nb_objects = settings["world_size"], settings["nb_objects"]
    options.quest_length, options.quest_breadth = settings["quest_length"], settings["quest_breadth"]
    return textworld.generator.make_game(options)


@contextmanager
def _own_generator(textworld: Any, seed: int) -> Iterator[None]:
    """Seed TextWorld's global generator, which some games draw from beside their seeds, and leave
    it as it was found."""
    before = textworld.g_rng.seed
    textworld.g_rng.set_seed(seed)
    try:
        yield
    finally:
        textworld.g_rng.set_seed(before)


def _start(game: CompiledGame) -> tuple[Any, Any]:
    """TextWorld's environment of a game, and its first state. The files are read here and not
    again."""
    textworld = _textworld()
    names = ("feedback", "description", "inventory", "objective", "score", "max_score", "won", "lost", "facts", "verbs")
    infos = textworld.EnvInfos(**dict.fromkeys((*names, "admissible_commands", "policy_commands"), True))
    with TemporaryDirectory(prefix="textworld-") as folder:
        path = Path(
            folder, "tw-game.z8"
        )  # the interpreter knows TextWorld's games by "tw-" and else prints its status line
        path.write_bytes(game.program)
        path.with_suffix(".json").write_bytes(game.data)
        env = textworld.start(str(path), infos)
        env.seed(1)  # of the interpreter, whose default is the time
        return env, env.reset()


# ---------------------------------------- the environment


class TextWorldGame:
    """A game of TextWorld: read what the game prints, answer with a command in ``\\boxed{}``.

    The first message has the rules, the objective and the first room. A command costs a turn, also
    one that the game does not understand. The reward is the change of the game's score, divided by
    the highest possible score: a game that is won returns 1. The episode ends when the game is won
    or lost, or when the turns are used up. A response without a command ends it too, with the
    reward -0.1.

    A command begins with a verb of the game, which the first message lists, with a direction, or
    with ``get``, ``x``, ``l`` or ``i``. Others are not passed on: the interpreter would save files,
    restart or quit. Nor are several commands in one.

    Its extras describe the turn: ``location`` (the description), ``inventory`` and
    ``admissible_commands`` (one a line) are those in which the response was given; ``score`` is the
    game's after it, out of ``max_score``.

    Args:
        name: of the game, a key of :data:`GAMES`.
        max_turns: turns of an episode, 1 or more. Default 50.
        show_commands: whether messages list the admissible commands. Default False.
        settings: of the game; their defaults are in :data:`GAMES`.

    Raises:
        TypeError, ValueError: see :func:`check_options`.
    """

    extras: ClassVar[ExtraKinds] = {
        "location": str,
        "inventory": str,
        "admissible_commands": str,
        "score": float,
        "max_score": float,
    }

    def __init__(self, name: str, **options: Any) -> None:
        settings = check_options(name, options)
        self.max_turns = settings.pop("max_turns")
        self.show_commands = settings.pop("show_commands")
        self.turn = 0
        self._name, self._settings = name, tuple(settings.items())
        self._env: Any = None
        self._state: Any = None
        self._hidden: tuple[Any, ...] = ()

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """Start the game of ``seed``, an integer in [0, 2**32); ``None``: 0."""
        self.close()
        self.turn = 0
        self._env, self._state = _start(compile_game(Recipe(self._name, self._settings, seed or 0)))
        state = self._state
        self._hidden = state.objective, tuple(sorted(map(str, state.facts))), tuple(state.policy_commands)
        rules = (
            "You are playing a text game. Each turn you enter one command, and only the command inside \\boxed{} counts, for "
            f"example \\boxed{{look}}. You have {self.max_turns} turns. The game knows the verbs {', '.join(state.verbs)}."
        )
        return "\n\n".join(filter(None, (rules, state.objective, _tidy(state.description)))), self._suffix()

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Pass the last command in ``\\boxed{}`` on to the game.

        Raises:
            RuntimeError: no game runs.
        """
        if self._env is None or self._state.won or self._state.lost:
            raise RuntimeError("There is no running game: reset first.")
        self.turn += 1
        before, last = self._state, self.turn >= self.max_turns
        boxed = [command.strip() for command in _BOXED.findall(action)]
        if not (boxed and boxed[-1]):
            text = f"At turn {self.turn}, you did not provide a command in \\boxed{{}}."
            return text, FORMAT_ERROR_REWARD, True, last, self._info(before) | {"success": False}
        refusal = self._refusal(boxed[-1])
        if refusal is None:
            self._state, _, _ = self._env.step(boxed[-1])
        state = self._state
        text = refusal or _tidy(state.feedback)
        reward = (state.score - before.score) / state.max_score
        if state.won or state.lost:
            return text, reward, True, False, self._info(before) | {"success": bool(state.won)}
        if last:
            text += "\n\nYou have used all turns."
            return text, reward, True, True, self._info(before) | {"success": False}
        return text, reward, False, False, self._info(before) | self._suffix()

    def hidden_state(self) -> tuple[Any, ...]:
        """Of the last reset: the objective, the facts of the world and the walkthrough."""
        return self._hidden

    @property
    def admissible_commands(self) -> tuple[str, ...]:
        """The commands that do something now."""
        return tuple(self._state.admissible_commands)

    @property
    def walkthrough(self) -> tuple[str, ...]:
        """Commands that win the game from here, as TextWorld plans them; empty: it cannot be won
        any more."""
        return tuple(self._state.policy_commands)

    def close(self) -> None:
        """End the interpreter. Safe to call twice."""
        if self._env is not None:
            self._env.close()
        self._env = None

    def _refusal(self, command: str) -> str | None:
        """Why a command is not passed on to the game; ``None``: it is."""
        verb = command.lower().split()[0]
        if _SEVERAL.search(command.lower()):
            return f"{command!r} has several commands; enter one each turn."
        if verb not in _SYNONYMS and verb not in self._state.verbs:
            return f"The game does not know the verb {verb[:40]!r}."
        if len(command) > _MOST_CHARACTERS:
            return f"The command has {len(command)} characters; enter at most {_MOST_CHARACTERS}."
        return None

    def _info(self, before: Any) -> dict[str, Any]:
        """The extras of a turn that began in the state ``before``."""
        return {
            "location": _tidy(before.description),
            "inventory": _tidy(before.inventory),
            "admissible_commands": "\n".join(before.admissible_commands),
            "score": self._state.score,
            "max_score": self._state.max_score,
        }

    def _suffix(self) -> dict[str, str]:
        commands = f"Admissible commands: {', '.join(self._state.admissible_commands)}.\n" * self.show_commands
        return {"suffix": f"{commands}Enter your next command."}


def _tidy(text: str) -> str:
    """A text of the game without its closing question and its many empty lines."""
    text = text.partition("Would you like to RESTART")[0]
    return re.sub(r"\n{3,}", "\n\n", re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE)).strip()


# ---------------------------------------- demonstrations


def demonstrations(
    env_id: str, seeds: Iterable[int], *, skill: float = 1.0, **options: Any
) -> Iterator[dict[str, Any]]:
    """Episodes that follow the walkthrough, as the lines of a file of messages
    (:func:`~torchrl_llm.data.read_transcripts`).

    A player of :mod:`torchrl_llm.envs.players` reads what the model reads, and walkthroughs are
    hidden from that. So the episodes are written to a file, which the setting ``demonstrations``
    names.

    Args:
        env_id: such as ``"textworld:coin_collector"``.
        seeds: of the games, one an episode.
        skill: probability in [0, 1] of the walkthrough's next command; else a random admissible
            one, from the episode's seed. It is random too where the game cannot be won any more.
            Default 1.
        options: of the environment.

    Raises:
        ValueError: ``skill`` is outside [0, 1].
        UnknownEnvironmentError, TypeError, ValueError: see :func:`resolve_textworld` and
            :func:`check_options`.
    """
    if not 0 <= skill <= 1:
        raise ValueError(f"skill={skill}; expected a probability in [0, 1].")
    spec = resolve_textworld(env_id)
    for seed in seeds:
        game = cast(TextWorldGame, spec.make(**options))
        yield _demonstration(IsolatedEnv(replace(spec, make=lambda game=game: game)), game, seed, skill)
        game.close()


def _demonstration(env: IsolatedEnv, game: TextWorldGame, seed: int, skill: float) -> dict[str, Any]:
    rng, total = random.Random(f"demonstration {seed}"), 0.0
    messages = [{"role": "user", "content": env.reset(seed)}]
    while True:
        follow = rng.random() < skill and game.walkthrough
        command = game.walkthrough[0] if follow else rng.choice(game.admissible_commands)
        answer = f"\\boxed{{{command}}}"
        step = env.step(answer)
        total += step.reward
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": step.message}]
        if step.terminated:
            return {"messages": messages, "reward": total, "success": bool(step.success)}


# ---------------------------------------- ids


def resolve_textworld(env_id: str) -> EnvSpec:
    """The game of an id, such as ``"textworld:coin_collector"``: the family that this package
    offers by an entry point.

    Raises:
        UnknownEnvironmentError: no game has this id.
        MissingExtraError: TextWorld is not installed.

    Examples:
        >>> resolve_textworld("textworld:chess")
        Traceback (most recent call last):
        torchrl_llm.envs.faults.UnknownEnvironmentError: There is no game 'textworld:chess'; expected one of [...]. Did you mean ...?
    """
    name = env_id.removeprefix("textworld:")
    if name not in GAMES:
        known = [f"textworld:{each}" for each in GAMES]
        raise UnknownEnvironmentError(f"There is no game {env_id!r}; expected one of {known}.{nearest(env_id, known)}")
    # TextWorld seeds its own generator from numpy's when it is imported.
    with kept_global_rng():
        _textworld()
    return EnvSpec(
        env_id, partial(TextWorldGame, name), success_by="return", extras=TextWorldGame.extras, single_turn=False
    )
