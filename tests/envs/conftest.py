"""Fixtures of the tests of environments: those of ``gem_episodes``."""

from __future__ import annotations

from functools import partial

import pytest
from gem_episodes import make_env, make_policy


@pytest.fixture
def make(tokenizer):
    """Makes environments."""
    return partial(make_env, tokenizer=tokenizer)


@pytest.fixture
def says(tokenizer):
    """Makes policies that answer by a script."""
    return partial(make_policy, tokenizer=tokenizer)
