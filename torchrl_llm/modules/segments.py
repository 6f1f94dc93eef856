"""Rows of several segments: :class:`Segments`.

Where an environment drops the oldest turns to make room (``GEMEnv(overflow="slide")``), the policy
did not see one growing context. The row then holds the contexts one after the other, with one
column of padding between them: a gap in ``attention_mask`` starts a segment, which does not attend
to what stands before it in the row. One episode stays one row, so credit, groups and weights do not
change; models read the segments as rows of their own.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Segments(NamedTuple):
    """Where ``S`` segments stand in rows ``[B, L]``, in row-major order.

    Attributes:
        rows: ``[S]`` int64, the row of each segment.
        starts: ``[S]`` int64, the column of its first token.
        lengths: ``[S]`` int64 >= 1, its tokens.
        width: the largest of ``lengths``.
        shape: ``(B, L)``.

    Examples:
        >>> mask = torch.tensor([[1, 1, 0, 1, 0], [1, 1, 1, 0, 0]]).bool()
        >>> segments = Segments.find(mask)
        >>> segments.split(torch.arange(10).view(2, 5), fill=-1)
        tensor([[ 0,  1, -1],
                [ 3, -1, -1],
                [ 5,  6,  7]])
        >>> segments.join(torch.tensor([[0, 1, 9], [3, 9, 9], [5, 6, 7]]), fill=-1)
        tensor([[ 0,  1, -1,  3, -1],
                [ 5,  6,  7, -1, -1]])
        >>> segments.last().tolist()
        [1, 2]
    """

    rows: Tensor
    starts: Tensor
    lengths: Tensor
    width: int
    shape: torch.Size

    @classmethod
    def find(cls, attention_mask: Tensor) -> Segments | None:
        """The segments of rows by their mask ``[B, L]``; ``None`` if no row has more than one."""
        mask = attention_mask.bool()
        first = mask & ~torch.nn.functional.pad(mask[:, :-1], (1, 0))
        if not bool((first.sum(-1) > 1).any()):
            return None
        rows, starts = first.nonzero(as_tuple=True)
        lengths = (first.flatten().cumsum(0) - 1)[mask.flatten()].bincount(minlength=len(rows))
        return cls(rows, starts, lengths, int(lengths.max()), mask.shape)

    def split(self, values: Tensor, *, fill: float = 0) -> Tensor:
        """``[B, L]`` as ``[S, width]``: each segment a row of its own, right-padded with
        ``fill``."""
        column = torch.arange(self.width, device=values.device)
        index = (self.rows * self.shape[1] + self.starts).unsqueeze(-1) + column
        # The last segments may reach beyond the tensor; what they read there is filled below.
        index = index.clamp(max=values.numel() - 1)
        return values.flatten()[index].masked_fill(column >= self.lengths.unsqueeze(-1), fill)

    def join(self, values: Tensor, *, fill: float = 0) -> Tensor:
        """``[S, W]``, W >= ``width``, back as ``[B, L]``; ``fill`` between the segments and behind
        them."""
        column = torch.arange(values.shape[1], device=values.device)
        inside = column < self.lengths.unsqueeze(-1)
        index = (self.rows * self.shape[1] + self.starts).unsqueeze(-1) + column
        joined = values.new_full((self.shape.numel(),), fill)
        return joined.index_copy(0, index[inside], values[inside]).view(self.shape)

    def last(self) -> Tensor:
        """The last segment of each row: ``[B]`` int64. Every row has one."""
        # nonzero() lists the segments row by row, so rows is sorted.
        return torch.searchsorted(self.rows, torch.arange(self.shape[0], device=self.rows.device), right=True) - 1
