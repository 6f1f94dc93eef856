"""Small text environments that make one property visible each, for tests and examples.

They speak GEM's protocol: ``reset(seed) -> (text, info)`` and ``step(text) -> (text, reward,
terminated, truncated, info)``.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import numpy as np

from torchrl_llm.envs.isolation import IsolatedEnv
from torchrl_llm.envs.registry import resolve_env
from torchrl_llm.envs.text_env import TextEnv
from torchrl_llm.testing.tabular import Outcome, Step

Fault = Literal["raise", "nan", "malformed"]


class StopOrGo:
    """An episode lasts until a response holds ``"stop"``; then the reward is 1.

    Examples:
        >>> env = StopOrGo()
        >>> _ = env.reset(0)
        >>> env.step("go on")[1:3], env.step("stop")[1:3]
        ((0.0, False), (1.0, True))
    """

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """Start an episode."""
        return "Say stop or go on.", {}

    def step(self, action: str) -> Step:
        """Stop or go on."""
        stop = "stop" in action
        return ("Stopped." if stop else "On we go.", float(stop), stop, False, {})


class Echo:
    """Repeats the response, for a number of turns; ``info`` can be chosen.

    Args:
        turns: the environment's own limit; at it ``terminated`` and ``truncated`` are both set, as
            in GEM. Default 3.
        info: returned with every message, such as ``{"suffix": "..."}``.

    Examples:
        >>> env = Echo(turns=1)
        >>> _ = env.reset(0)
        >>> env.step("ho")
        ('ho', 0.5, True, True, {})
    """

    def __init__(self, turns: int = 3, info: dict[str, Any] | None = None) -> None:
        self.turns = turns
        self.info = info or {}
        self.turn = 0

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """Start an episode."""
        self.turn = 0
        return "Speak.", dict(self.info)

    def step(self, action: str) -> Step:
        """Echo; reward 0.5."""
        self.turn += 1
        last = self.turn == self.turns
        return action, 0.5, last, last, dict(self.info)


class Dice:
    """Shows draws of the global generators at every step: its texts tell whether random numbers are
    isolated.

    ``reset`` takes no seed.

    Examples:
        >>> len(Dice().reset()[0].split())
        2
    """

    def __init__(self, turns: int = 3) -> None:
        self.turns = turns
        self.turn = 0

    def reset(self) -> tuple[str, dict[str, Any]]:
        """Start an episode."""
        self.turn = 0
        return self._draw(), {}

    def step(self, action: str) -> Step:
        """Draw again."""
        self.turn += 1
        return self._draw(), 0.0, self.turn == self.turns, False, {}

    @staticmethod
    def _draw() -> str:
        return f"{random.randrange(10**6)} {np.random.randint(10**6)}"


class Slow:
    """Another environment, that takes its time: every call sleeps first. Calls sleep in parallel.

    The environment inside has the global generators to itself while it is called.

    Args:
        factory: makes the environment inside; also a GEM id.
        mean: seconds that a call takes on average; default 0.03.
        sigma: deviation of the log of that time, which is normal; 0 (default) always takes
            ``mean``.
        seed: of the times. They are the same for the same seed, task seed and turn.

    Examples:
        >>> env = Slow(StopOrGo, mean=0.001, sigma=1.0)
        >>> env.reset(3)[0], env.step("stop")[1]
        ('Say stop or go on.', 1.0)
        >>> env.latency(3, 0) == Slow(Echo, mean=0.001, sigma=1.0).latency(3, 0)
        True
    """

    thread_safe = True

    def __init__(
        self, factory: str | Callable[[], TextEnv], *, mean: float = 0.03, sigma: float = 0.0, seed: int = 0
    ) -> None:
        if mean < 0 or sigma < 0:
            raise ValueError(f"mean is {mean} and sigma is {sigma}; expected both >= 0.")
        spec = resolve_env(factory)
        self.mean, self.sigma, self.seed = mean, sigma, seed
        self._game = IsolatedEnv(replace(spec, extras={}))
        self._task = self._turn = 0

    @property
    def unwrapped(self) -> Any:
        """The environment inside, which has the same tasks."""
        return self if self._game.env is None else getattr(self._game.env, "unwrapped", self._game.env)

    def latency(self, task: int, turn: int) -> float:
        """Seconds that a call takes: in turn ``turn`` of the episode with the seed ``task``; -1 is
        the reset."""
        normal = random.Random(f"{self.seed} {task} {turn}").gauss(0.0, 1.0)
        return self.mean * math.exp(self.sigma * normal - self.sigma**2 / 2)

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """Sleep, then reset."""
        self._task, self._turn = seed or 0, 0
        time.sleep(self.latency(self._task, -1))
        return self._game.reset(self._task), {}

    def step(self, action: str) -> Step:
        """Sleep, then step."""
        time.sleep(self.latency(self._task, self._turn))
        self._turn += 1
        step = self._game.step(action)
        info = {"use_tool": step.role == "tool", "success": step.success}
        return step.message, step.reward, step.terminated, step.truncated, info


class Faulty:
    """Fails in a chosen way in a chosen turn.

    Args:
        fault: ``"raise"`` raises ``RuntimeError``, ``"nan"`` returns a NaN reward, ``"malformed"``
            returns no step.
        turn: 0-based turn that fails; -1 is the reset (with ``"raise"`` or ``"malformed"``).
            Default 0.

    Examples:
        >>> Faulty("nan").step("")[1]
        nan
    """

    def __init__(self, fault: Fault, turn: int = 0) -> None:
        if fault not in get_args(Fault):
            raise ValueError(f"fault is {fault!r}; expected one of {get_args(Fault)}.")
        self.fault = fault
        self.at = turn
        self.turn = 0

    def reset(self, seed: int | None = None) -> Any:
        """Start an episode."""
        self.turn = 0
        if self.at == -1:
            return self._fail()
        return "Hello.", {}

    def step(self, action: str) -> Any:
        """Fail if it is time."""
        now, self.turn = self.turn, self.turn + 1
        return self._fail() if now == self.at else ("Go on.", 0.0, False, False, {})

    def _fail(self) -> Any:
        if self.fault == "raise":
            raise RuntimeError("the dice fell off the table")
        return ("Go on.", math.nan, False, False, {}) if self.fault == "nan" else None


class Bet(NamedTuple):
    """A state of :class:`EarlyDecision`.

    Attributes:
        turn: counted from 0.
        wanted: the thing that is right, where it is shown (in the first turn, by the weather);
            ``""``: it is not.
        packed: whether the first answer was right.
    """

    turn: int
    wanted: str
    packed: bool = False


class EarlyDecision:
    """The first of five turns decides what the fifth can earn; between them lies luck.

    Turn 1 shows the weather, and one of four things is right for it (:attr:`RIGHT`). Turns 2 to 4
    are bets: naming the thing that was drawn pays ``luck``, and nothing tells which one that is.
    Turn 5 shows a thing: naming it pays 1 if turn 1 was right too, and nothing otherwise. No
    feedback says whether a turn was right, and the game ends after turn 5. A response is one word;
    any other counts as wrong.

    So the first turn is judged by a reward four turns later, behind three that have nothing to do
    with it.

    Args:
        luck: what a bet pays. Default 0.5. At most below 1, which is the reward of success.

    Attributes:
        RIGHT: weather -> the thing that is right for it.
        WORDS: every word of messages and responses, for
            :func:`~torchrl_llm.testing.tokenizers.word_tokenizer`.
        optimal_return: of the best policy, which always wins: ``1 + 3/4 * luck``.
        random_return: of a policy that names one of the four things at random and wins one episode
            in 16: ``1/16 + 3/4 * luck``.
        ANSWERS, tasks: the things, and the states that an episode can start in, each as likely, for
            the exact values of :mod:`~torchrl_llm.testing.tabular`.

    Examples:
        >>> env = EarlyDecision()
        >>> message, _ = env.reset(0)
        >>> message, EarlyDecision.RIGHT[message.split()[1]]
        ('pack wind', 'scarf')
        >>> env.step("scarf")[0]
        'bet'
    """

    RIGHT: ClassVar[dict[str, str]] = {"sun": "hat", "rain": "coat", "snow": "boots", "wind": "scarf"}
    WORDS: ClassVar[tuple[str, ...]] = ("pack", *RIGHT, "bet", "show", *RIGHT.values(), "over")
    ANSWERS: ClassVar[tuple[str, ...]] = tuple(RIGHT.values())
    tasks: ClassVar[tuple[Bet, ...]] = tuple(Bet(0, thing) for thing in RIGHT.values())

    def __init__(self, *, luck: float = 0.5) -> None:
        if not 0 <= luck < 1:
            raise ValueError(
                f"luck is {luck}; expected a reward of at least 0 and below 1, which is the reward of success."
            )
        self.luck = luck
        self.optimal_return = 1 + 3 / 4 * luck
        self.random_return = 1 / 16 + 3 / 4 * luck
        self._wanted: list[str] = []
        self._right: list[bool] = []

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """Start the task of ``seed``."""
        rng = random.Random(seed)
        weather = rng.choice(list(self.RIGHT))
        things = list(self.RIGHT.values())
        self._wanted = [self.RIGHT[weather], *(rng.choice(things) for _ in range(4))]
        self._right = []
        return f"pack {weather}", {}

    def step(self, action: str) -> Step:
        """Name a thing."""
        turn = len(self._right)
        if turn >= len(self._wanted):
            raise RuntimeError("There is no running game: reset first.")
        self._right.append(action == self._wanted[turn])
        if turn == 4:
            return "over", float(self._right[0] and self._right[4]), True, False, {}
        reward = self.luck * self._right[turn] if turn > 0 else 0.0
        return "bet" if turn < 3 else f"show {self._wanted[4]}", reward, False, False, {}

    def outcomes(self, state: Bet, response: str) -> list[Outcome]:
        """All outcomes of an answer. What a bet wants is drawn as it is placed, and so is what the
        fifth turn shows."""
        turn, right = state.turn, response == state.wanted
        if turn == 4:
            won = state.packed and right
            return [Outcome(1.0, float(won), None, won)]
        shown = self.ANSWERS if turn == 3 else ("",)
        afters = [Bet(turn + 1, thing, right if turn == 0 else state.packed) for thing in shown]
        wins = 0.0 if turn == 0 or response not in self.ANSWERS else 1 / 4
        paid = ((wins, self.luck), (1 - wins, 0.0))
        return [Outcome(p / len(afters), reward, after) for p, reward in paid if p for after in afters]
