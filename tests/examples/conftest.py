"""What tests of the benchmarks share."""

import importlib
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def load(monkeypatch):
    """Imports a module of the benchmarks by its name, and forgets it and what it imports of them
    after the test."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    yield importlib.import_module
    for name, module in [*sys.modules.items()]:
        if Path(getattr(module, "__file__", None) or "/").is_relative_to(BENCHMARKS):
            del sys.modules[name]
