"""Instances of a law: one, or a few, are in ``make test``, the others in ``make test-all``."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def usual(values: Iterable[Any], kept: int | Collection[Any] = 1) -> list[Any]:
    """Parameters of a test: those that ``make test`` leaves out are marked ``extra``.

    Args:
        values: of the parameters.
        kept: how many of them, from the first, are tried in ``make test``, or which.
    """
    values = list(values)
    few = values[:kept] if isinstance(kept, int) else kept
    return [value if value in few else _extra(value) for value in values]


def _extra(value: Any) -> Any:
    several = value if isinstance(value, tuple) else (value,)
    return pytest.param(*several, marks=pytest.mark.extra)
