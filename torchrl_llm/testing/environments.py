"""Small text environments that make one property visible each, for tests and examples.

They speak GEM's protocol: ``reset(seed) -> (text, info)`` and ``step(text) -> (text, reward, terminated, truncated,
info)``.
"""

from __future__ import annotations

import math
import random
from typing import Any, Literal, get_args

import numpy as np

Step = tuple[str, float, bool, bool, dict[str, Any]]
Fault = Literal["raise", "nan", "malformed"]


class StopOrGo:
    """An episode lasts until the player says something that holds ``"stop"``; then the reward is 1.

    Examples:
        >>> game = StopOrGo()
        >>> _ = game.reset(0)
        >>> game.step("go on")[1:3], game.step("stop")[1:3]
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
    """Says back what it hears, for a number of turns; ``info`` can be chosen.

    Args:
        turns: the environment's own limit; at it ``terminated`` and ``truncated`` are both set, as in GEM. Default 3.
        info: returned with every message, such as ``{"suffix": "..."}``.

    Examples:
        >>> game = Echo(turns=1)
        >>> _ = game.reset(0)
        >>> game.step("ho")
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
    """Shows draws of the global generators at every step: its texts tell whether random numbers are isolated.

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


class Faulty:
    """Fails in a chosen way in a chosen turn.

    Args:
        fault: ``"raise"`` raises ``RuntimeError``, ``"nan"`` returns a NaN reward, ``"malformed"`` returns no step.
        turn: 0-based turn that fails; -1 is the reset (with ``"raise"`` or ``"malformed"``). Default 0.

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
