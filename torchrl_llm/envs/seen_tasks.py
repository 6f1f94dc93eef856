"""Which tasks training has used: :class:`SeenTasks`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


class SeenTasks:
    """The tasks of training so far, as hashes of eight bytes each.

    Memory is bounded: beyond ``limit`` tasks those with the lowest hashes are kept, and an overlap
    is taken from the tasks that fall among them, which is a sample of all.

    Args:
        limit: how many are kept; default 2**20 (8 MB).

    Attributes:
        complete: whether they are all. Episodes that are read, such as demonstrations, need not say
            their tasks.

    Examples:
        >>> seen = SeenTasks()
        >>> seen.add([3, 5, 3])
        >>> len(seen), seen.overlap([3, 4, 5, 6])
        (2, 0.5)
        >>> seen.complete = False
        >>> seen.overlap([3, 4, 5, 6])
        nan
    """

    def __init__(self, limit: int = 2**20) -> None:
        self.limit = limit
        self.tasks = np.empty(0, np.int64)
        self.complete = True

    def __len__(self) -> int:
        return len(self.tasks)

    def add(self, tasks: Any) -> None:
        """Remember ``tasks``, an array of int64."""
        # Hashes are uniform, so the lowest are a random sample.
        self.tasks = np.union1d(self.tasks, np.asarray(tasks, np.int64))[: self.limit]

    def include(self, other: SeenTasks) -> None:
        """Remember the tasks of another training too, with whose weights this one continues."""
        self.add(other.tasks)
        self.complete = self.complete and other.complete

    def overlap(self, tasks: Any) -> float:
        """Share of ``tasks`` (int64, repeats count) that training has used; NaN if that is not
        known."""
        if not self.complete:
            return float("nan")
        tasks = np.asarray(tasks, np.int64)
        if len(self) >= self.limit:
            tasks = tasks[tasks <= self.tasks[-1]]
        return float(np.isin(tasks, self.tasks).mean()) if len(tasks) else float("nan")

    def state_dict(self) -> dict[str, Any]:
        """What a trainer's state has of its tasks: ``"seen_tasks"``, int64, and
        ``"seen_tasks_complete"``."""
        return {"seen_tasks": torch.from_numpy(self.tasks.copy()), "seen_tasks_complete": self.complete}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the tasks from a trainer's state, also from one of an earlier version, which did
        not say whether they are all."""
        if "seen_tasks" in state_dict:
            self.tasks = state_dict["seen_tasks"].numpy()
        # It had none only where the rows did not say their tasks: every other run trains on some.
        self.complete = state_dict.get("seen_tasks_complete", bool(len(self)) or state_dict.get("iteration") == 0)
