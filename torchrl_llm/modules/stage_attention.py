"""Attention of one stage of shared prefixes: its mask, and the copies of keys and values that it
reads, in bounded pieces.

:mod:`torchrl_llm.modules.prefix_attention` calls it in every layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

_MASK = 2**23
"""Most elements of a mask: 32 MiB in float32. A stage of more is computed in blocks of queries,
whose masks are parts of one."""
_LEAST_BLOCK = 64
"""Queries of a block, at least: each block is a call of the attention kernel."""
_ALIGNMENT = 16
"""Memory-efficient attention copies masks for every layer whose rows do not begin at a multiple of
8 elements."""
_COPIED = 16_384
"""Tokens whose keys and values are copied at a time: as many as here, or as the tree has."""


class StageMask(NamedTuple):
    """The additive mask of a stage, the same for all its prefixes and all layers.

    A token sees its own column and those before, as far as a window reaches. All blocks of queries
    have the same mask but for the columns before it, so the mask of each is a part of the last
    one's.

    Attributes:
        values: ``[block * groups, columns]``, the values of the last block of queries.
        start: the first column of the stage.
        width: its columns.
        block: queries, without their heads, in a call.
        groups: heads of each key; the heads of a query follow one another.
    """

    values: Tensor
    start: int
    width: int
    block: int
    groups: int

    @classmethod
    def of(
        cls, start: int, width: int, *, groups: int, window: int | None, dtype: torch.dtype, device: torch.device
    ) -> StageMask:
        """The mask of the stage from column ``start`` on; ``window``: the columns that a token
        sees, ``None`` for all."""
        block = _block(width, groups * (start + width))
        last = start + (width - 1) // block * block  # the column of the last block's first query
        columns = torch.arange(last + block, device=device)
        behind = torch.arange(last, last + block, device=device)[:, None] - columns
        hidden = (behind < 0) | (behind >= (window or len(columns)))
        values = torch.zeros(block, -(-len(columns) // _ALIGNMENT) * _ALIGNMENT, dtype=dtype, device=device)
        values[:, : len(columns)].masked_fill_(hidden, -torch.inf)
        return cls(values.repeat_interleave(groups, 0), start, width, block, groups)

    def blocks(self) -> Iterator[tuple[slice, int, Tensor]]:
        """Of each block of queries: its rows among ``width * groups``, the columns that it sees,
        and its mask."""
        last = (self.width - 1) // self.block * self.block
        for first in range(0, self.width, self.block):
            size = min(self.block, self.width - first)
            seen, rows = self.start + first + size, slice(first * self.groups, (first + size) * self.groups)
            yield rows, seen, self.values[: size * self.groups, last - first : last - first + seen]


def _block(width: int, row: int) -> int:
    """How many of ``width`` queries are in a call, where the mask of each has ``row`` elements."""
    fit = _MASK // row
    return width if width <= fit else min(width, max(_LEAST_BLOCK, fit // _ALIGNMENT * _ALIGNMENT))


class Copied(NamedTuple):
    """A part of a copy of keys or values, which autograd keeps instead of the part itself.

    Attributes:
        source: ``[T, heads, D]`` of all tokens.
        chosen: the tokens that were copied.
        like: dtype, size, stride and offset of the part.
    """

    source: Tensor
    chosen: Tensor
    like: tuple[torch.dtype, torch.Size, tuple[int, ...], Any]

    def again(self) -> Tensor:
        """The part, copied from the source again."""
        dtype, *place = self.like
        return self.source.index_select(0, self.chosen).to(dtype).as_strided(*place)


def masked_attention(
    query: Tensor,
    sources: tuple[Tensor, Tensor],
    index: Tensor | None,
    mask: StageMask,
    *,
    scaling: float | None,
    recomputed: bool,
) -> Tensor:
    """Attention of the queries ``[nodes, width, heads, groups, D]`` of a stage's prefixes.

    Keys and values of each prefix are copied from the keys and values of all tokens, some prefixes
    at a time. For a backward they are not kept but copied again: only one layer's are in memory
    then, and what a forward takes follows from its distinct tokens.

    Args:
        query: in the dtype to compute in.
        sources: keys and values ``[T, heads, D]`` of all tokens; or of the stage's own, where
            ``index`` is ``None``.
        index: ``[nodes * end]`` the tokens of each prefix in ``sources``.
        mask: of the stage.
        scaling: of the products; ``None``: one over the root of D.
        recomputed: the layer is checkpointed, which keeps nothing anyway.

    Returns:
        ``[nodes * width, heads * groups, D]``.
    """
    nodes, end = len(query), mask.start + mask.width
    # The heads of a group are further queries of their key, which need not be repeated for them.
    query = query.transpose(1, 2).flatten(2, 3)
    count = nodes if index is None else max(1, max(_COPIED, len(sources[0])) // end)
    parts = []
    for first in range(0, nodes, count):
        part = query[first : first + count]
        if index is None:
            out = _attend(part, sources, mask, scaling)
        else:
            chosen = index[first * end : (first + count) * end]
            copies = tuple(source.index_select(0, chosen).to(query.dtype) for source in sources)
            with nullcontext() if recomputed else _kept_as_sources(copies, sources, chosen):
                out = _attend(part, copies, mask, scaling)
        parts.append(out)
    out = _cat(parts).unflatten(2, (mask.width, mask.groups)).transpose(1, 2)
    return out.reshape(nodes * mask.width, query.shape[1] * mask.groups, -1)


def _attend(query: Tensor, sources: tuple[Tensor, ...], mask: StageMask, scaling: float | None) -> Tensor:
    """``[n, heads, width * groups, D]`` of queries of that shape, and of keys and values
    ``[n * end, heads, D]``."""
    k, v = (x.to(query.dtype).view(len(query), -1, *x.shape[1:]).transpose(1, 2) for x in sources)
    parts = [
        F.scaled_dot_product_attention(query[:, :, rows], k[:, :, :seen], v[:, :, :seen], attn_mask=part, scale=scaling)
        for rows, seen, part in mask.blocks()
    ]
    return _cat(parts, dim=2)


def _cat(parts: list[Tensor], dim: int = 0) -> Tensor:
    """Concatenated; a single part is not copied."""
    return torch.cat(parts, dim) if len(parts) > 1 else parts[0]


def _kept_as_sources(copies: tuple[Tensor, ...], sources: tuple[Tensor, ...], index: Tensor) -> saved_tensors_hooks:
    """Inside, autograd keeps :class:`Copied` for parts of ``copies`` that a backward needs."""
    pairs = zip(copies, sources, strict=True)
    known = {copy.untyped_storage().data_ptr(): source.detach() for copy, source in pairs}

    def pack(x: Tensor) -> Tensor | Copied:
        source = known.get(x.untyped_storage().data_ptr())
        return x if source is None else Copied(source, index, (x.dtype, x.shape, x.stride(), x.storage_offset()))

    return saved_tensors_hooks(pack, lambda kept: kept.again() if isinstance(kept, Copied) else kept)
