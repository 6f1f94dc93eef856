"""A world in which a small model has to think before it answers, and needs none of its earlier
thoughts: :class:`Tally`.

It is for models whose chat template drops the thinking of earlier turns
(:func:`~torchrl_llm.testing.tokenizers.word_tokenizer` with ``thinks=True``).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import ClassVar

from torchrl_llm.envs.response import THINKING, split_thinking
from torchrl_llm.testing.tabular import ILLEGAL_REWARD, Step


class Tally:
    """Keep a digit that every message changes: the answer is the digit after all changes.

    The digit starts at 0, and continues from the player's last one, right or wrong. That answer
    stays in the history, so no earlier thought is needed. The changes are ``plus`` (1 more, and 0
    after 9), ``triple`` (the last digit of three times as much) and ``mirror`` (9 less the digit).
    With the digit before and after each of them written, ``<think> 0 1 3 6 7 </think> 7``, each
    token follows from the one before it and one change. Without, a model has to do all changes in
    one forward pass, and their order matters: who only counts them is right in 0.37 of the turns at
    best.

    A right answer pays ``1 / rounds``. An illegal answer, which is anything else than a digit
    behind the thinking, pays -0.1 and leaves the digit as it is. The episode ends after all rounds,
    and is a success if every answer was right.

    Args:
        rounds: messages of an episode. Default 4.
        changes: of a message. Default 4.

    Attributes:
        CHANGES: what each change makes of a digit.
        ANSWERS: the digits.
        WORDS: every word of messages and answers, for
            :func:`~torchrl_llm.testing.tokenizers.word_tokenizer`.

    Examples:
        >>> env = Tally(rounds=2)
        >>> env.reset(0)[0]
        'mirror mirror triple plus'
        >>> Tally.best_response(["mirror mirror triple plus"])
        '<think> 0 9 0 0 1 </think> 1'
        >>> env.step("1")[:3]
        ('triple triple mirror plus', 0.5, False)
        >>> Tally.best_response(["mirror mirror triple plus", "1", "triple triple mirror plus"])
        '<think> 1 3 9 0 1 </think> 1'
    """

    CHANGES: ClassVar[dict[str, Callable[[int], int]]] = {
        "plus": lambda digit: (digit + 1) % 10,
        "triple": lambda digit: 3 * digit % 10,
        "mirror": lambda digit: 9 - digit,
    }
    ANSWERS: ClassVar[tuple[str, ...]] = tuple(map(str, range(10)))
    WORDS: ClassVar[tuple[str, ...]] = (*ANSWERS, *CHANGES, "over")
    thread_safe = True

    def __init__(self, *, rounds: int = 4, changes: int = 4) -> None:
        if rounds < 1 or changes < 1:
            raise ValueError(f"rounds={rounds}, changes={changes}; expected at least 1 of each.")
        self.rounds, self.changes = rounds, changes
        self._task: list[list[str]] = []
        self._messages: list[list[str]] = []
        self._digit, self._right = 0, True

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, bool]]:
        """Start the task of ``seed``."""
        rng = random.Random(seed)
        self._task = [rng.choices([*self.CHANGES], k=self.changes) for _ in range(self.rounds)]
        self._messages = [*self._task]
        self._digit, self._right = 0, True
        return self._shown, {}

    @property
    def _shown(self) -> str:
        return " ".join(self._messages[0] if self._messages else ["over"])

    def step(self, action: str) -> Step:
        """Compare the answer with the digit after the changes."""
        if not self._messages:
            raise RuntimeError("There is no running game: reset first.")
        # The answer behind the thinking; a plain string has none.
        answer = str(getattr(action, "text", action)).strip()
        expected, reward = digits(self._digit, self._messages.pop(0))[-1], ILLEGAL_REWARD
        if answer in self.ANSWERS:
            self._digit = int(answer)
            reward = (self._digit == expected) / self.rounds
        self._right = self._right and reward > 0
        over = not self._messages
        return self._shown, reward, over, False, {"success": self._right} if over else {}

    def hidden_state(self) -> list[list[str]]:
        """The task of the last reset: the changes of all rounds, of which the first message shows
        the first."""
        return self._task

    @classmethod
    def best_response(cls, texts: Sequence[str]) -> str:
        """The right answer, behind the digits that lead to it.

        Args:
            texts: message, response, message, ..., message; responses with their thinking or
                without.
        """
        start, changes = cls.read(texts)
        return with_thought([start, *digits(start, changes)])

    @classmethod
    def read(cls, texts: Sequence[str]) -> tuple[int, list[str]]:
        """The digit so far, and the changes that follow.

        Args:
            texts: as of :meth:`best_response`.

        Examples:
            >>> Tally.read(["plus triple", "<think> 1 3 </think> 3", "plus plus", "?", "plus mirror"])
            (3, ['plus', 'mirror'])
        """
        answers = (split_thinking(text)[1].strip() for text in reversed(texts[1::2]))
        last = next((answer for answer in answers if answer in cls.ANSWERS), "0")
        return int(last), texts[-1].split()


def digits(start: int, changes: Sequence[str]) -> list[int]:
    """The digit after each change.

    Examples:
        >>> digits(9, ["plus", "mirror", "triple"])
        [0, 9, 7]
    """
    found = [start]
    for change in changes:
        found.append(Tally.CHANGES[change](found[-1]))
    return found[1:]


def with_thought(found: Sequence[int]) -> str:
    """A response that thinks of some digits and answers the last one.

    Examples:
        >>> with_thought([1, 3])
        '<think> 1 3 </think> 3'
    """
    opening, closing = THINKING
    return " ".join([opening, *map(str, found), closing, str(found[-1])])


def tally_optimum() -> float:
    """The share of episodes of :class:`Tally` that the best policy wins: all of them.

    What is right depends on the message and on the last digit answered, and both are shown.
    """
    return 1.0
