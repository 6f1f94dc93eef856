"""Scripted players of games, to imitate: what ``demonstrations`` of a run may name.

A player is a function ``(context, rng) -> text``: it reads the conversation as the model does, and takes all chance from ``rng``.
None of them is the best that can be played: reinforcement learning is to have something left to teach.
"""

from __future__ import annotations

import random
import re

_RANGE = re.compile(r"number between (\d+) and (\d+)")
_GUESS = re.compile(r"you guessed (\d+)")
_HINT = re.compile(r"you guessed (\d+), and the target number is (higher|lower) than")


def guess_at_random(context: str, rng: random.Random) -> str:
    """Plays GEM's GuessTheNumber legally: any number that was not guessed yet; hints are not read.

    Examples:
        >>> guess_at_random("Guess the number between 1 and 2. At turn 1, you guessed 2, and so on", random.Random(0))
        '\\\\boxed{1}'
    """
    return _guess(context, rng, reads=0.0)


def guess_by_half_the_hints(context: str, rng: random.Random) -> str:
    """Plays GEM's GuessTheNumber: any number that was not guessed yet and fits the hints, of which every other one is read.

    Examples:
        >>> seen = "Guess the number between 1 and 3. At turn 1, you guessed 2, and the target number is lower than 2."
        >>> sorted({guess_by_half_the_hints(seen, random.Random(i)) for i in range(20)})
        ['\\\\boxed{1}', '\\\\boxed{3}']
    """
    return _guess(context, rng, reads=0.5)


def guess_by_hints(context: str, rng: random.Random) -> str:
    """Plays GEM's GuessTheNumber: any number that was not guessed yet and fits all hints.

    Examples:
        >>> guess_by_hints("the number between 1 and 3. you guessed 2, and the target number is lower than 2.", random.Random(0))
        '\\\\boxed{1}'
    """
    return _guess(context, rng, reads=1.0)


def _guess(context: str, rng: random.Random, reads: float) -> str:
    found = _RANGE.search(context)
    if found is None:
        raise ValueError(
            f'The player knows GuessTheNumber, whose rules say "number between"; it was shown {context[:120]!r}.'
        )
    low, high = int(found[1]), int(found[2])
    for number, hint in _HINT.findall(context):
        if rng.random() < reads:
            low, high = (max(low, int(number) + 1), high) if hint == "higher" else (low, min(high, int(number) - 1))
    guessed = {int(number) for number in _GUESS.findall(context)}
    left = [number for number in range(low, high + 1) if number not in guessed]
    return f"\\boxed{{{rng.choice(left)}}}"
