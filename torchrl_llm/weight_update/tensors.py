"""How weight syncs get at trained weights: :class:`ParameterGather`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple


class ParameterGather(NamedTuple):
    """How to get at trained weights that are sharded over processes; all of them do it at the same time.

    Attributes:
        copying: entered around reading them, with whether the frozen ones are read too.
        computing: entered around forwards of the trained model.
    """

    copying: Callable[[bool], AbstractContextManager[None]]
    computing: Callable[[], AbstractContextManager[None]]


LOCAL_PARAMETERS = ParameterGather(lambda _: nullcontext(), nullcontext)
"""Of weights that are all in this process."""
