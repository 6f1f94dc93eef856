"""Fixtures and settings that several test modules share."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest
import torch
from exact_norms import exact_norms
from hypothesis import settings
from waiting import Clock, Hang

from torchrl_llm.collectors import _worker, async_turn
from torchrl_llm.envs import isolation
from torchrl_llm.testing import environments, policies
from torchrl_llm.testing.tokenizers import byte_tokenizer

# Tests fork, and a fork of a process with OpenMP's threads waits for ever; what they start inherits
# the variable.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)

# What tests start in other processes is imported too, to look for doctests.
_NEEDED = {
    "ray": "collectors/ray_*.py",
    "openenv": "worlds/openenv_world.py",
    "fastmcp": "worlds/mcp_world.py",
}
collect_ignore_glob = [pattern for package, pattern in _NEEDED.items() if not find_spec(package)]

# A busy machine is not a failure; pytest-timeout catches what hangs.
settings.register_profile("default_without_deadline", deadline=None)
settings.load_profile("default_without_deadline")


@pytest.fixture(scope="session")
def tokenizer():
    """A byte-level tokenizer with ChatML: one token a byte."""
    return byte_tokenizer()


@pytest.fixture
def clock(monkeypatch):
    """The time of those who wait for environments and engines, and of environments and engines that
    sleep."""
    clock = Clock()
    for module in (async_turn, _worker, isolation, environments, policies):
        monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
def hang(monkeypatch):
    """What a call hangs in until the test ends. Only calls in it are late: a busy machine makes
    others as slow as a short ``step_timeout``."""
    hang, abandon_late = Hang(), isolation.Pool.abandon_late

    def of_those_that_hang(pool, calls, busy_since, timeout):
        hanging = {slot: call for slot, call in calls.items() if call.thread in hang.threads}
        return abandon_late(pool, hanging, busy_since, timeout)

    monkeypatch.setattr(isolation.Pool, "abandon_late", of_those_that_hang)
    yield hang
    hang.release()


@pytest.fixture(name="exact_norms")
def _exact_norms():
    """Norms that keep float64."""
    with exact_norms():
        yield


def pytest_collection_modifyitems(items):
    # The representation of a set or of an object is another in every process, and pytest-xdist then
    # runs nothing at all.
    if odd := [item.nodeid for item in items if len(item.nodeid) > 220 or " at 0x" in item.nodeid]:
        raise pytest.UsageError(f"test names made of whole objects: expected short ids=..., got {odd[0][:220]}")
