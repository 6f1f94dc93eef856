"""A small game of two players whose best play is known, for tests, examples and benchmarks:
:class:`TakeAway`.

Its text is made of few words, so that a model with a vocabulary of words
(:func:`~torchrl_llm.testing.tokenizers.word_tokenizer`) learns it in a minute of one CPU core.
"""

from __future__ import annotations

import random
from itertools import pairwise

from torchrl_llm.envs.games import Game

MOST_TAKEN = 3
"""Counters that a move takes at most."""


class TakeAway(Game):
    """Two players take one to three counters from a heap in turn; who takes the last one wins.
    Anything else loses.

    Who leaves a multiple of four wins against any play (Bouton, *Nim, a game with a complete
    mathematical theory*, 1901), so the first player wins with a heap that is none.

    Args:
        smallest, largest: bounds of the heap, which is drawn by the seed. Default: 5 to 9.

    Examples:
        >>> game = TakeAway(smallest=6, largest=6)
        >>> game.start(0)
        >>> [game.observe(seat) for seat in (0, 1)], game.seat
        (['left 6', 'left 6'], 0)
        >>> for move in ("2", "1", "3"):
        ...     game.move(move)
        >>> game.seat, game.rewards, game.observe(1)
        (None, (1.0, -1.0), 'left 0')
    """

    WORDS = ("left", *map(str, range(10)))
    """All words of the game."""
    thread_safe = True

    num_players = 2

    def __init__(self, smallest: int = 5, largest: int = 9) -> None:
        self.smallest, self.largest = smallest, largest
        self.heap = 0
        self.seat: int | None = None
        self.rewards: tuple[float, ...] = ()

    def start(self, seed: int) -> None:
        """Draw the heap."""
        self.heap, self.seat, self.rewards = random.Random(seed).randint(self.smallest, self.largest), 0, ()

    def move(self, text: str) -> None:
        """Take counters."""
        assert self.seat is not None
        word, seat = text.strip(), self.seat
        if word.isdecimal() and 1 <= int(word) <= min(MOST_TAKEN, self.heap):
            self.heap -= int(word)
            self.seat = 1 - seat if self.heap else None
            winner = seat
        else:
            self.seat, winner = None, 1 - seat
        if self.seat is None:
            self.rewards = tuple(1.0 if player == winner else -1.0 for player in range(2))

    def observe(self, seat: int) -> str:
        """The heap."""
        return f"left {self.heap}"


def take_at_random(context: str, rng: random.Random) -> str:
    """Plays :class:`TakeAway` legally, at random.

    Examples:
        >>> sorted({take_at_random("left 2", random.Random(i)) for i in range(20)})
        ['1', '2']
    """
    return str(rng.randint(1, min(MOST_TAKEN, _heap(context))))


def take_well(context: str, rng: random.Random) -> str:
    """Plays :class:`TakeAway` as well as can be: leaves a multiple of four where it can, else any.

    Examples:
        >>> take_well("left 7", random.Random(0))
        '3'
    """
    return str(_heap(context) % (MOST_TAKEN + 1) or take_at_random(context, rng))


def _heap(context: str) -> int:
    words = context.replace("<", " <").replace(">", "> ").split()
    heaps = [number for word, number in pairwise(words) if word == "left" and number.isdecimal()]
    if not heaps or heaps[-1] == "0":
        raise ValueError(
            f"The player knows TakeAway, which says how many counters are left; it was shown {context[-120:]!r}."
        )
    return int(heaps[-1])
