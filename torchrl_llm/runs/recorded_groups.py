"""How a recording is read: its episodes by task (:func:`groups_of`), and who wrote which tokens
(:func:`spans`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

from torchrl_llm.runs.recording import Recording

Ints = npt.NDArray[np.int64]

CUT, SEEN = -2, -3
"""Stand for a turn in :func:`spans` where the context was cut, and for what the context behind it
has of those before."""


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
    """Who wrote an episode: ``[turn, tokens]`` in order, turn -1 for the environment, :data:`CUT`
    for a cut of the context, and :data:`SEEN` for what is there again behind it."""
    mask, turn_ids, tokens = (recording.arrays[name][row] for name in ("attention_mask", "turn_ids", "tokens"))
    end = int(mask.nonzero()[0].max()) + 1 if mask.any() else 0
    codes = np.where(mask, turn_ids, CUT)[:end]
    for start in np.flatnonzero((codes[1:] == -1) & (codes[:-1] == CUT)) + 1:
        last = codes[:start].max()
        said = tokens[:start][codes[:start] == last] if last >= 0 else tokens[:0]
        context = tokens[start:end][np.cumsum(codes[start:] != -1) == 0]
        codes[start : start + _end_of(said, context)] = SEEN
    starts = np.flatnonzero(np.diff(codes, prepend=-9))
    lengths = np.diff(np.append(starts, end))
    return [[int(codes[start]), int(length)] for start, length in zip(starts, lengths, strict=True)]


def _end_of(said: Ints, context: Ints) -> int:
    """Where the last response ends in a new context, which may lack its beginning (the thinking)
    and its last token; 0: it is not found. A message that repeats the end of the response is taken
    for it."""
    for response in (said, said[:-1]):
        for size in (8, 4, 2):
            if size <= min(len(response), len(context)):
                found = np.flatnonzero((sliding_window_view(context, size) == response[-size:]).all(1))
                if len(found):
                    return int(found[-1]) + size
    return 0
