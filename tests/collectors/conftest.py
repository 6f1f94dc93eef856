"""Fixtures of the tests of collectors: environments and policies of ``scripted_episodes``."""

from __future__ import annotations

from functools import partial

import pytest
from scripted_episodes import Streaming, async_collectors, make_env

from torchrl_llm.testing.policies import ScriptedPolicy


@pytest.fixture
def make(tokenizer):
    """Makes environments."""
    return partial(make_env, tokenizer=tokenizer)


@pytest.fixture
def says(tokenizer):
    """Makes policies that answer by a script."""
    return partial(ScriptedPolicy, tokenizer=tokenizer, max_output_tokens=16)


@pytest.fixture
def streams(tokenizer):
    """Makes policies that answer by a script, each when it likes."""
    return partial(Streaming, tokenizer=tokenizer, max_output_tokens=16)


@pytest.fixture
def collect():
    """Makes AsyncTurnCollectors, and shuts them down."""
    with async_collectors() as collect:
        yield collect
