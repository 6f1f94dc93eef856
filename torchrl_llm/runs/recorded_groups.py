"""How a recording is read: its episodes by task (:func:`groups_of`), and who wrote which tokens
(:func:`spans`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from torchrl_llm.runs.recording import Recording

CUT = -2
"""Stands for a turn in :func:`spans` where the context was cut."""


@dataclass(frozen=True)
class Group:
    """Episodes of one task in one recording: ``rows`` of it."""

    recording: Recording
    number: int
    """Of the recording, in the order of the run."""
    task: int
    rows: list[int]


def groups_of(recording: Recording, number: int) -> Iterator[Group]:
    """The groups of a recording, in order of appearance."""
    tasks = recording.tasks
    for each in dict.fromkeys(tasks):
        yield Group(recording, number, each, [row for row, own in enumerate(tasks) if own == each])


def spans(recording: Recording, row: int) -> list[list[int]]:
    """Who wrote an episode: ``[turn, tokens]`` in order, turn -1 for the environment and
    :data:`CUT` for a cut of the context."""
    mask, turn_ids = recording.arrays["attention_mask"][row], recording.arrays["turn_ids"][row]
    end = int(mask.nonzero()[0].max()) + 1 if mask.any() else 0
    codes = np.where(mask, turn_ids, CUT)[:end]
    starts = np.flatnonzero(np.diff(codes, prepend=-9))
    lengths = np.diff(np.append(starts, end))
    return [[int(codes[start]), int(length)] for start, length in zip(starts, lengths, strict=True)]
