"""Fixtures of the tests of runs: a folder of a run that is over."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from run_folders import finished_run


@pytest.fixture(scope="session")
def finished(tmp_path_factory) -> Path:
    """It is copied, never changed: :func:`folder` is a test's own."""
    return finished_run(tmp_path_factory.mktemp("finished"))


@pytest.fixture
def folder(finished, tmp_path) -> Path:
    """A copy, in which ``last`` and ``best`` are links as they were."""
    return shutil.copytree(finished, tmp_path / "run", symlinks=True)
