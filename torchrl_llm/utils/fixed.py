"""Attributes of two objects: :class:`Fixed`, which cannot be replaced, and :class:`Delegated`."""

from __future__ import annotations

from operator import attrgetter
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Fixed(Generic[T]):
    """A part that an object is made with. Other parts hold it too: one assigned later would be used
    by half of them.

    Args:
        instead: how to make the object with another one; default: the argument of its name.
        at: where the object has it, such as ``"updater.optimizer"``; default: where the first
            assignment puts it.

    Examples:
        >>> class Trainer:
        ...     loss = Fixed[str]()
        >>> trainer = Trainer()
        >>> trainer.loss = "mine"
        >>> trainer.loss
        'mine'
        >>> trainer.loss = "another"
        Traceback (most recent call last):
            ...
        AttributeError: Trainer.loss is read-only: other parts hold the one that the trainer was made with, and would go on with it. \
Make the trainer with yours: Trainer(loss=...).
    """

    def __init__(self, instead: str = "", at: str = "") -> None:
        self.instead, self.at = instead, at

    def __set_name__(self, owner: type, name: str) -> None:
        self.name, self.instead = name, self.instead or f"{owner.__name__}({name}=...)"

    def __get__(self, holder: Any, owner: type | None = None) -> T:
        found: Any = self if holder is None else attrgetter(self.at or f"_{self.name}")(holder)
        return found

    def __set__(self, holder: Any, value: T) -> None:
        if self.at or f"_{self.name}" in vars(holder):
            raise AttributeError(
                f"{type(holder).__name__}.{self.name} is read-only: other parts hold the one that the trainer was made with, and would "
                f"go on with it. Make the trainer with yours: {self.instead}."
            )
        setattr(holder, f"_{self.name}", value)


class Delegated(Generic[T]):
    """An attribute of a part, which the object that holds the part has too: read and set there.

    Args:
        at: where it is, such as ``"slots.names"``.

    Examples:
        >>> from types import SimpleNamespace
        >>> class Room(SimpleNamespace):
        ...     door = Delegated[str]("walls.door")
        >>> room = Room(walls=SimpleNamespace(door="shut"))
        >>> room.door = "open"
        >>> room.walls.door
        'open'
    """

    def __init__(self, at: str) -> None:
        self.at = at
        self._part, _, self._name = at.rpartition(".")

    def __get__(self, holder: Any, owner: type | None = None) -> T:
        found: Any = self if holder is None else attrgetter(self.at)(holder)
        return found

    def __set__(self, holder: Any, value: T) -> None:
        setattr(attrgetter(self._part)(holder), self._name, value)
