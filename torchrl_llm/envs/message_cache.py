"""The ids of messages that were rendered before, bounded by their size: :class:`MessageCache`."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

MAX_SIZE = 2**19
"""Tokens and characters that a cache keeps: about 20 MB, for an id takes 36 bytes in a tuple."""

_ENTRY = 16  # what an entry of a short message takes beside it, in the size of tokens


class MessageCache:
    """Calls a function of a message, or returns what it returned before. What was asked for longest
    ago is dropped first.

    Not ``functools.lru_cache``, which counts entries: environments that answer with pages, files or
    logs would fill gigabytes. It may be called from several threads.

    Args:
        render: returns the ids of a message; further arguments are hashable.
        max_size: tokens and characters that are kept; default :data:`MAX_SIZE`.

    Attributes:
        size: tokens and characters that are kept now.

    Examples:
        >>> cache = MessageCache(lambda message: tuple(message.encode()), max_size=100)
        >>> cache("ab"), cache.size
        ((97, 98), 20)
        >>> cache("a long message " * 9)[:2], len(cache), cache.size  # by itself larger than all
        ((97, 32), 1, 20)
    """

    def __init__(self, render: Callable[..., tuple[int, ...]], *, max_size: int = MAX_SIZE) -> None:
        self._render, self.max_size = render, max_size
        self.size = 0
        self._known: OrderedDict[tuple[Any, ...], tuple[int, ...]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._known)

    def __call__(self, message: str, *rest: Any) -> tuple[int, ...]:
        """The ids of ``message``."""
        key = message, *rest
        with self._lock:
            if (ids := self._known.get(key)) is not None:
                self._known.move_to_end(key)
                return ids
        # Without the lock: a long message must not hold up the other slots.
        ids = self._render(message, *rest)
        with self._lock:
            self._keep(key, ids)
        return ids

    def _keep(self, key: tuple[Any, ...], ids: tuple[int, ...]) -> None:
        # Known already if another thread rendered the same message; one larger than all would only
        # empty the cache.
        if key in self._known or self._size(key, ids) > self.max_size:
            return
        self._known[key] = ids
        self.size += self._size(key, ids)
        while self.size > self.max_size:
            self.size -= self._size(*self._known.popitem(last=False))

    @staticmethod
    def _size(key: tuple[Any, ...], ids: tuple[int, ...]) -> int:
        return len(ids) + len(key[0]) + _ENTRY
