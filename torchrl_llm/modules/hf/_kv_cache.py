"""Keys and values of the slots' contexts, kept between turns: :class:`SlotCache`.

Storage and bookkeeping only. :mod:`torchrl_llm.modules.hf._cached_model` decides which tokens are
computed under which mask.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import Cache

from torchrl_llm.modules.prefixes import Ints

_ALIGNMENT = 64  # columns are allocated in multiples of this


class SlotCache(Cache):
    """A transformers cache of ``[rows, heads, columns, dim]`` per layer: the token at position p of
    a row lies in column p.

    Rows are right-padded and of different lengths; a forward writes each new token to its own
    position (:meth:`aim`) and sees the columns up to the longest row, so the attention mask must
    hide what lies behind a token. Padding is written to the last column, which no token attends to.

    Rows are addressed by number; :meth:`arrange` brings the slots of a batch to rows 0, 1, ..., so
    that a batch is a view of the storage and not a copy.

    Attributes:
        slots: ``[rows]``, the slot that each row belongs to.
        tokens: ``[rows, columns]``, the ids whose keys and values are held.
        lengths: ``[rows]``, how many of them are valid.
    """

    def __init__(self) -> None:
        # transformers wants layers or a class of layers; the storage here is its own (`_layers`).
        super().__init__(layers=[])
        self.drop()

    def __reduce__(self) -> tuple[Any, ...]:
        # Copies start empty: the contents are of no use in another process or with copied weights.
        return SlotCache, ()

    def drop(self) -> None:
        """Drop all contents and free the memory."""
        self._layers: list[tuple[Tensor, Tensor]] = []
        self._first: SlotCache | None = None
        self.slots: Ints = np.zeros(0, np.int64)
        self.lengths: Ints = np.zeros(0, np.int64)
        self.tokens: Ints = np.zeros((0, 0), np.int64)

    # Bookkeeping, on the host.

    def arrange(self, slots: Ints, columns: int) -> None:
        """Bring ``slots`` ``[n]`` (distinct) to rows 0 to n - 1, with room for ``columns`` tokens
        each."""
        known = {slot: row for row, slot in enumerate(self.slots.tolist())}
        new = [slot for slot in slots.tolist() if slot not in known]
        # One column more than tokens: the last one takes what is written for padding.
        self._reserve(len(known) + len(new), columns + 1)
        self.slots[len(known) :] = new
        known.update({slot: len(known) + i for i, slot in enumerate(new)})
        first = [known.pop(slot) for slot in slots.tolist()]
        self.permute(np.array(first + list(known.values()), np.int64))

    def permute(self, source: Ints) -> None:
        """Row i becomes what row ``source[i]`` was; only rows that move are copied."""
        moved = np.flatnonzero(source != np.arange(len(source)))
        if not len(moved):
            return
        self.slots, self.lengths, self.tokens = self.slots[source], self.lengths[source], self.tokens[source]
        self.copy(source[moved], moved, self.tokens.shape[1])

    def copy(self, source: Ints, target: Ints, columns: int) -> None:
        """Copy the first ``columns`` columns of rows ``source`` ``[m]`` to rows ``target`` ``[m]``,
        keys and values only."""
        if not len(source):
            return
        # Layers of a device share their indices: each copy of them to a GPU waits for it.
        indices: dict[torch.device, tuple[Tensor, Tensor]] = {}
        for storage in chain.from_iterable(self._layers):
            if (device := storage.device) not in indices:
                indices[device] = torch.from_numpy(target).to(device), torch.from_numpy(source).to(device)
            (to, of), part = indices[device], storage[:, :, :columns]
            # `index_select` reads all rows before one is written, so rows may change places;
            # indexing would be slower.
            part.index_copy_(0, to, part.index_select(0, of))

    def _reserve(self, rows: int, columns: int) -> None:
        """Grow the storage to at least this size; contents are kept."""
        old_rows, old_columns = self.tokens.shape
        if rows <= old_rows and columns <= old_columns:
            return
        self._first = None
        if columns > old_columns:
            # By a quarter at least: contexts grow every turn, and growing copies the whole cache.
            columns = -(-max(columns, old_columns * 5 // 4) // _ALIGNMENT) * _ALIGNMENT
        new_rows, new_columns = max(rows - old_rows, 0), max(columns - old_columns, 0)
        self.tokens = np.pad(self.tokens, ((0, new_rows), (0, new_columns)))
        self.lengths, self.slots = np.pad(self.lengths, (0, new_rows)), np.pad(self.slots, (0, new_rows))
        for i, (keys, values) in enumerate(self._layers):
            self._layers[i] = self._allocate(keys), self._allocate(values)
            for new, old in zip(self._layers[i], (keys, values), strict=True):
                new[:old_rows, :, :old_columns] = old

    def _allocate(self, states: Tensor) -> Tensor:
        """Storage for keys or values like ``[n, heads, q, dim]``. Zeros, because masked values must
        still be finite."""
        rows, columns = self.tokens.shape
        return states.new_zeros(rows, states.shape[1], columns, states.shape[3])

    def first(self, rows: int) -> SlotCache:
        """The first ``rows`` rows as a cache of their own, whose keys and values are views of
        these: what a compiled step gets.

        It is the same one until the storage moves or another number is asked for. Its rows and
        columns are symbols of the graph.
        """
        if self._first is None or self._first._layers[0][0].shape[0] != rows:
            self._first = SlotCache()
            self._first._layers = [(keys[:rows], values[:rows]) for keys, values in self._layers]
            for storage in chain.from_iterable(self._first._layers):
                mark_sizes(storage, 0, 2)
        return self._first

    # What a model's forward calls.

    def aim(self, positions: Tensor, *, width: int, rows: Tensor | None = None) -> None:
        """Set the columns that the next forward writes and sees.

        Args:
            positions: ``[n, q]`` int64, the column of each new token; negative for padding, if q
                > 1.
            width: the columns that are seen.
            rows: ``[n]`` int64, the rows of the batch; ``None``: rows 0 to n - 1.
        """
        self._width, self._rows, self._num = width, rows, positions.shape[0]
        row = torch.arange(self._num, device=positions.device) if rows is None else rows
        self._row = row.view(-1, 1, 1)
        # Only prompts are padded; a step of one token is spared the operation.
        if positions.shape[1] > 1:
            positions = torch.where(positions < 0, self.tokens.shape[1] - 1, positions)
        self._column = positions.unsqueeze(1)
        # By number of heads, in which layers may differ: layers that agree share one index a
        # forward.
        self._indices: dict[int, Tensor] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store ``[n, heads, q, dim]`` keys and values where :meth:`aim` said and return the keys
        and values of the whole context.

        Returns:
            keys and values ``[n, heads, width, dim]``.
        """
        while len(self._layers) <= layer_idx:
            self._layers.append((self._allocate(key_states), self._allocate(value_states)))
        keys, values = self._layers[layer_idx]
        return self._write(keys, key_states), self._write(values, value_states)

    def _write(self, storage: Tensor, states: Tensor) -> Tensor:
        _, heads, columns, dim = storage.shape
        if (index := self._indices.get(heads)) is None:
            head = torch.arange(heads, device=storage.device).view(1, -1, 1)
            # Rows have tokens at different columns: one flat index writes them all in one
            # operation.
            index = ((self._row * heads + head) * columns + self._column).flatten()
            self._indices[heads] = index
        storage.view(-1, dim).index_copy_(0, index, states.reshape(-1, dim))
        if self._rows is None:
            return storage[: self._num, :, : self._width]
        return storage[:, :, : self._width].index_select(0, self._rows)


def mark_sizes(tensor: Tensor, *dims: int) -> None:
    """Let ``torch.compile`` take these sizes of a tensor for symbols, and the others for
    constants."""
    for dim, size in enumerate(tensor.shape):
        if dim not in dims:
            torch._dynamo.mark_static(tensor, dim)
        elif size > 1:  # PyTorch compiles for a size of 1 by itself
            torch._dynamo.mark_dynamic(tensor, dim)
