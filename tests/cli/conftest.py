"""A model that the commands of a file share, trained by the command itself."""

from __future__ import annotations

import pytest
from command_runs import SMALL, command


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a run, and what the command printed."""
    folder = tmp_path_factory.mktemp("run")
    done = command("train", *SMALL, "--output-dir=run", "--json", folder=folder)
    assert done.returncode == 0, done.stderr
    return folder / "run", done
