"""Extras of text environments: the columns of a turn that they declare beside its reward.

An environment declares them, ``extras = {"regret": float, "state": str}``, and returns them in the
``info`` of each step. They describe the turn that the step ends: a state is the one in which the
response was given. Numbers become float32 tensors, texts a hash by which turns can be grouped. From
here on each is a :class:`~torchrl_llm.keys.TurnColumn`, as the reward is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from torchrl_llm.envs.tasks import digest
from torchrl_llm.keys import NestedKey, TurnColumn

ExtraKinds = Mapping[str, type[float] | type[str]]
"""The declaration of extras, by name: ``float`` for a number, ``str`` for a text."""

MOST_CHARACTERS = 4096
"""Characters of a text that are kept; its hash covers the whole text."""

_LARGEST = float(np.finfo(np.float32).max)


class Extras(NamedTuple):
    """The extras of a turn.

    Attributes:
        values: by name, a number (``float``) or the hash of a text (``int``, :func:`text_key`).
        texts: the texts by their hashes, each cut at :data:`MOST_CHARACTERS`.
    """

    values: dict[str, float]
    texts: dict[int, str]

    @classmethod
    def read(cls, info: Mapping[str, Any], kinds: ExtraKinds) -> Extras:
        """Check the declared extras in what a step returned.

        Raises:
            ValueError: one is missing, or a number that is infinite as a float32.
            TypeError: one is of another kind.

        Examples:
            >>> Extras.read({"regret": 1, "hint": "left"}, {"regret": float})
            Extras(values={'regret': 1.0}, texts={})
        """
        if missing := [name for name in kinds if name not in info]:
            raise ValueError(
                f"step() returned no info[{missing[0]!r}], which the environment declares in its extras; its info has "
                f"{sorted(info)}. Return it with every step; NaN says that a turn has no such number."
            )
        extras = cls({}, {})
        for name, kind in kinds.items():
            extras._add(name, info[name], kind)
        return extras

    def _add(self, name: str, value: Any, kind: type) -> None:
        if kind is str and isinstance(value, str):
            self.values[name] = key = text_key(value)
            self.texts[key] = value[:MOST_CHARACTERS]
            return
        number = None if kind is str else _number(value)
        if number is None:
            expected = "text" if kind is str else "a number"
            raise TypeError(
                f"step() returned the info[{name!r}] {value!r:.50}; expected {expected}, as its extras declare."
            )
        if abs(number) > _LARGEST:
            raise ValueError(
                f"step() returned the info[{name!r}] {number!r}; expected a finite number of at most {_LARGEST:.2g} (a float32), "
                "or NaN for none."
            )
        self.values[name] = number


NO_EXTRAS = Extras({}, {})


def _number(value: Any) -> float | None:
    """A number, or an array or tensor of one; ``None``: it is something else."""
    if isinstance(value, str) or not hasattr(value, "__float__"):
        return None
    try:
        return float(value)
    except OverflowError:  # an integer beyond float64
        return math.copysign(math.inf, value > 0 or -1)
    except (TypeError, ValueError, RuntimeError):  # several elements
        return None


def text_key(text: str) -> int:
    """The hash of a text: its 8-byte BLAKE2b as an int64, the same in every process and for every
    seed, and never 0.

    Two of a million different texts collide with a probability of 3e-8.

    Examples:
        >>> text_key("3 me 2 moves 2")
        -6687717244377335842
    """
    return int.from_bytes(digest(text), "little", signed=True) or 1


def check_kinds(kinds: Any, name: str) -> None:
    """Refuse a declaration that is not a mapping from names to ``float`` or ``str``.

    Raises:
        TypeError: the message names the environment.
    """
    named = isinstance(kinds, Mapping) and all(isinstance(each, str) and each for each in kinds)
    if not named or any(kind not in (float, str) for kind in kinds.values()):
        raise TypeError(
            f"The environment {name!r} declares the extras {kinds!r:.80}; expected a mapping from names to float (a number) "
            "or str (a text)."
        )


def merged_columns(declared: Iterable[tuple[str, Iterable[TurnColumn]]]) -> tuple[TurnColumn, ...]:
    """The columns of a mixture, from names and columns of its environments.

    Raises:
        TypeError: an extra is a number in one and a text in another.
    """
    merged: dict[NestedKey, TurnColumn] = {}
    for env, columns in declared:
        for column in columns:
            first = merged.setdefault(column.name, column)
            if first.kind is not column.kind:
                raise TypeError(
                    f"The extra {column.name[-1]!r} is {column.kind.__name__} in {env!r} and {first.kind.__name__} in another "
                    "environment of the mixture: give one of them another name."
                )
    return tuple(merged.values())
