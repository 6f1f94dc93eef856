"""The tasks that weights were trained on before a run: :func:`tasks_of_weights`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torchrl.checkpoint import Checkpoint

from torchrl_llm.envs import SeenTasks
from torchrl_llm.trainers.checkpoint_parts import states_of


class _State:
    """Takes the saved state of a trainer."""

    def __init__(self) -> None:
        self.content: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return self.content

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.content = state_dict


def tasks_of_weights(path: str | Path) -> SeenTasks:
    """The tasks that weights in a folder were trained on, and those of the runs before that they began with.

    Args:
        path: a checkpoint, or another folder with weights, which does not say.

    Returns:
        The tasks; they are incomplete where the folder does not say all of them.
    """
    path, state = Path(path), _State()
    if (path / "manifest.json").is_file() and "trainer" in Checkpoint.manifest(path)["components"]:
        states_of(trainer=state).load(path)
    seen = SeenTasks()
    read_state(seen, state.content)
    return seen


def state_of(seen: SeenTasks) -> dict[str, Any]:
    """What a trainer's state has of its tasks."""
    return {"seen_tasks": torch.from_numpy(seen.tasks.copy()), "seen_tasks_complete": seen.complete}


def read_state(seen: SeenTasks, state: dict[str, Any]) -> None:
    """Restore the tasks from a trainer's state, also from one of an earlier version, which did not say whether they are all."""
    tasks = state["seen_tasks"].numpy() if "seen_tasks" in state else seen.tasks
    seen.tasks = tasks
    # It had none only where the rows did not say their tasks: every other run trains on some.
    seen.complete = state.get("seen_tasks_complete", bool(len(tasks)) or state.get("iteration") == 0)
