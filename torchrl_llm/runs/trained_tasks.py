"""The tasks that weights were trained on before a run: :func:`tasks_of_weights`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torchrl.checkpoint import Checkpoint

from torchrl_llm.envs import SeenTasks
from torchrl_llm.runs.states import read_states


def tasks_of_weights(path: str | Path) -> SeenTasks:
    """The tasks that weights in a folder were trained on, and the tasks of the runs before that
    they began with.

    Args:
        path: a checkpoint, or another folder with weights, which does not say.

    Returns:
        The tasks; they are incomplete where the folder does not say all of them.
    """
    path, state, seen = Path(path), dict[str, Any](), SeenTasks()
    if (path / "manifest.json").is_file() and "trainer" in Checkpoint.manifest(path)["components"]:
        state = read_states(path, "trainer")["trainer"]
    seen.load_state_dict(state)
    return seen
