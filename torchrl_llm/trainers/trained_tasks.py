"""The tasks that weights were trained on before a run: :func:`tasks_of_weights`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torchrl.checkpoint import Checkpoint

from torchrl_llm.envs import SeenTasks
from torchrl_llm.trainers.checkpoint_parts import read_states


def tasks_of_weights(path: str | Path) -> SeenTasks:
    """The tasks that weights in a folder were trained on, and those of the runs before that they began with.

    Args:
        path: a checkpoint, or another folder with weights, which does not say.

    Returns:
        The tasks; they are incomplete where the folder does not say all of them.
    """
    path, state, seen = Path(path), dict[str, Any](), SeenTasks()
    if (path / "manifest.json").is_file() and "trainer" in Checkpoint.manifest(path)["components"]:
        state = read_states(path, "trainer")["trainer"]
    read_state(seen, state)
    return seen


def state_of(seen: SeenTasks) -> dict[str, Any]:
    """What a trainer's state has of its tasks."""
    return {"seen_tasks": torch.from_numpy(seen.tasks.copy()), "seen_tasks_complete": seen.complete}


def read_state(seen: SeenTasks, state: dict[str, Any]) -> None:
    """Restore the tasks from a trainer's state, also from one of an earlier version, which did not say whether they are all."""
    if "seen_tasks" in state:
        seen.tasks = state["seen_tasks"].numpy()
    # It had none only where the rows did not say their tasks: every other run trains on some.
    seen.complete = state.get("seen_tasks_complete", bool(len(seen)) or state.get("iteration") == 0)
