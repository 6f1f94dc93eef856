"""Segments: what stands where in rows of several contexts."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchrl_llm import keys
from torchrl_llm.data import rows_from_episodes
from torchrl_llm.episode import Episode, Turn
from torchrl_llm.modules.segments import Segments

ROWS = st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=4), min_size=1, max_size=4)


def laid_out(rows):
    """The mask of rows of segments of the given lengths, and the ids of the segments' tokens,
    counted through."""
    width = max(sum(row) + len(row) - 1 for row in rows) + 1
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    ids, count = torch.full((len(rows), width), -1), 0
    for i, row in enumerate(rows):
        start = 0
        for length in row:
            mask[i, start : start + length] = True
            ids[i, start : start + length] = torch.arange(count, count + length)
            start, count = start + length + 1, count + length
    return mask, ids


class TestSegments:
    @given(rows=ROWS)
    def test_each_segment_is_a_row_of_its_own(self, rows):
        mask, ids = laid_out(rows)
        segments = Segments.find(mask)
        lengths = [length for row in rows for length in row]
        if len(lengths) == len(rows):
            assert segments is None
            return
        split = segments.split(ids, fill=-1)
        seen = [row[row >= 0].tolist() for row in split]
        assert [len(row) for row in seen] == lengths
        assert [i for row in seen for i in row] == list(range(sum(lengths)))
        assert (segments.split(mask).sum(-1) == torch.tensor(lengths)).all()
        assert torch.equal(segments.join(split, fill=-1), ids)
        ends = [sum(len(row) for row in rows[: i + 1]) - 1 for i in range(len(rows))]
        assert segments.last().tolist() == ends

    @given(rows=ROWS)
    def test_rows_of_episodes_hold_them_where_they_are_found(self, rows):
        mask, _ = laid_out(rows)
        nothing = np.zeros(0, np.int64)
        episodes = [
            Episode(-1, i, i, 0, contexts=[np.ones(length, np.int64) for length in row], truncated=True)
            for i, row in enumerate(rows)
        ]
        for episode in episodes:
            episode.add(Turn(0, 0, nothing, nothing, nothing))
            episode.rewards.append(0.0)
        found = rows_from_episodes(episodes)[keys.ATTENTION_MASK]
        assert torch.equal(found, mask[:, : found.shape[1]])
        assert not mask[:, found.shape[1] :].any()

    def test_gradients_pass(self):
        segments = Segments.find(torch.tensor([[1, 0, 1, 1]]).bool())
        values = torch.ones(2, 2, requires_grad=True)
        (segments.join(values) * torch.tensor([[1.0, 5.0, 2.0, 3.0]])).sum().backward()
        assert values.grad.tolist() == [[1, 0], [2, 3]]
