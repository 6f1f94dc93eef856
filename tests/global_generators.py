"""What the global generators of Python and NumPy give, for tests that nobody else draws from
them."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np


def draws(between: Callable[[], object]) -> list[float]:
    """Draws from the seeded generators, some before ``between()`` and some after.

    ``gauss`` and ``normal`` come in pairs, of which each generator keeps the second: that, too, is
    part of its state.
    """
    random.seed(3)
    np.random.seed(3)
    result = [random.gauss(0, 1), np.random.normal()]
    between()
    return [*result, random.gauss(0, 1), np.random.normal(), random.random(), np.random.rand()]
