"""A plugin for pytest: tests run on a pretended GPU (:mod:`torchrl_llm.testing.pretended_gpu`).

    pytest -p torchrl_llm.testing.pretended_gpu_plugin tests

A session has one pretended GPU. A test fails if an operation mixes devices in it, also where the
error was caught. Runs with ``device="cpu"`` get the GPU: tests ask for the CPU to be the same on
every machine, and the question here is what a GPU would do with them. At the end it says how many
tests launched kernels, and where most waits were.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest

from torchrl_llm.runs import RunSettings
from torchrl_llm.testing.pretended_gpu import DeviceError, PretendedGPU, pretended_gpu

_opened = ExitStack()
_gpu = pytest.StashKey[PretendedGPU]()
_waits: Counter[str] = Counter()
_tests: Counter[bool] = Counter()


def pytest_sessionstart(session: pytest.Session) -> None:
    """Pretend a GPU until the session ends."""
    check = RunSettings.__post_init__

    def check_on_any_device(config: RunSettings) -> None:
        check(config)
        if config.model.device == "cpu":
            config.model.device = None

    _opened.enter_context(mock.patch.object(RunSettings, "__post_init__", check_on_any_device))
    session.stash[_gpu] = _opened.enter_context(pretended_gpu())


def pytest_sessionfinish() -> None:
    """The end of the pretended GPU."""
    _opened.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Fail a test in which devices were mixed."""
    gpu = item.session.stash[_gpu]
    gpu.reset()
    try:
        result = yield
    finally:
        _tests[gpu.launches > 0] += 1
        _waits.update({f"{wait.what} at {wait.place}": number for wait, number in gpu.waits.items()})
    if gpu.errors:
        raise DeviceError("\n".join(gpu.errors))
    return result


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """What was seen, in the process that ran the tests."""
    if not _tests:
        return
    terminalreporter.section("pretended GPU")
    terminalreporter.write_line(f"{_tests[True]} tests launched kernels on it, {_tests[False]} did not; most waits:")
    for what, number in _waits.most_common(10):
        terminalreporter.write_line(f"{number:8} {what}")
