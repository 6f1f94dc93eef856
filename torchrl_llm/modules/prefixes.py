"""Which tokens the rows of a batch share, and how to lay them out without repetition:
:func:`plan_prefixes`.

The rows form a trie over token ids. It is cut at a few columns into stages; of each stage the
distinct prefixes that reach beyond its first column are a rectangle of tokens. Or, where that costs
less, each row is a piece behind what it shares with another one, and pieces that begin in one
column are a stage: a trunk that sheds a branch at every turn is not cut at each. Only ids are read
here: :mod:`torchrl_llm.modules.prefix_attention` runs a model over the result, and
:mod:`torchrl_llm.data.batching` chooses the rows that share a forward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_MOST_COLUMNS = 1024
"""Columns where rows may be cut: time and memory of the choice grow with their square."""
_MOST_ROWS = 16
"""Rows times the longest of them in one forward, at most this many times the bound: losses hold
every row, shared or not."""


@dataclass(frozen=True, kw_only=True)
class PrefixCost:
    """What the computation of a stage costs; the unit is one token in the model's linear layers.

    Attributes:
        stage: the calls of attention kernels that a stage needs.
        context: a token that another token attends to.
        key: a copy of the keys and values of one token.
        key_size: the memory of such a copy, as a share of a token's activations; 0 where it is not
            kept.
        max_length: rows of more tokens share nothing.
    """

    stage: float
    context: float
    key: float
    key_size: float = 0.0
    max_length: float = float("inf")

    def stages(self, nodes: Ints, start: Ints, end: int | Ints) -> Floats:
        """The cost of a stage of so many ``nodes`` from column ``start`` to ``end``,
        elementwise."""
        # What starts at column 0 copies nothing, and its kernel skips what is behind each token.
        seen, copied = np.where(start == 0, end / 2, end), np.where(start == 0, 0, end)
        return self.stage + nodes * ((end - start) * (1 + self.context * seen) + self.key * copied)

    def rows(self, count: int, longest: int) -> float:
        """The cost of plain rows, padded to the longest."""
        return float(self.stages(np.array(count), np.array(0), longest))


def first_equal(prompts: Ints, lengths: Ints) -> Ints:
    """``[n]``: the first row with the same prompt as each row."""
    seen: dict[bytes, int] = {}
    return np.array([seen.setdefault(prompts[i, : lengths[i]].tobytes(), i) for i in range(len(lengths))], np.int64)


def common_prefix(a: Ints, b: Ints, limit: Ints) -> Ints:
    """Length of the longest common prefix of each row of ``a`` and ``b``, at most ``limit``.

    Args:
        a, b: ``[n, L]`` or ``[1, L]`` ids.
        limit: ``[n]``, at most ``L``.

    Returns:
        ``[n]``.

    Examples:
        >>> common_prefix(np.array([[1, 2, 3]]), np.array([[1, 2, 4], [1, 2, 3]]), np.array([3, 1]))
        array([2, 1])
    """
    differs = (a != b) | (np.arange(a.shape[1]) >= limit[:, None])
    return np.where(differs.any(1), differs.argmax(1), a.shape[1])


class SortedRows(NamedTuple):
    """Rows in lexicographic order, in which rows of a common prefix are neighbors.

    Attributes:
        order: ``[B]`` the row at each place.
        tokens: ``[B, L]`` -1 behind the end.
        ends: ``[B]`` the tokens of each that count.
        shared: ``[B]`` the tokens that each shares with the next; 0 for the last.
    """

    order: Ints
    tokens: Ints
    ends: Ints
    shared: Ints

    @classmethod
    def of(cls, tokens: Ints, ends: Ints) -> SortedRows:
        """Sort ``tokens`` ``[B, L]``, of which the first ``ends`` ``[B]`` count."""
        columns = np.arange(tokens.shape[1])
        padded = np.where(columns < ends[:, None], tokens, -1)
        # Big-endian bytes are compared in memory's order, which is then the order of the ids. A row
        # comes before its extensions.
        text = np.add(padded, 1, out=np.empty(padded.shape, ">u4"), casting="unsafe")
        order = np.argsort(text.view(f"V{4 * tokens.shape[1]}").ravel(), kind="stable")
        padded, ends = padded[order], ends[order]
        shared = common_prefix(padded[1:], padded[:-1], np.minimum(ends[1:], ends[:-1]))
        return cls(order, padded, ends, np.append(shared, 0))

    def part(self, start: int, end: int) -> SortedRows:
        """The rows from place ``start`` to ``end``."""
        order, tokens, ends, shared = (x[start:end] for x in self)
        return SortedRows(order, tokens, ends, np.append(shared[:-1], 0))

    def leaves(self) -> tuple[SortedRows, Ints]:
        """Those that are no prefix of the next one; and ``[B]`` the row of which each is a prefix,
        or which it is."""
        kept = np.append(self.shared[:-1] < self.ends[:-1], True)
        leaves = SortedRows(*(x[kept] for x in self))
        return leaves, leaves.order[np.cumsum(kept) - kept]

    def reversed(self) -> SortedRows:
        """The last row first."""
        order, tokens, ends, shared = (x[::-1] for x in self)
        return SortedRows(order, tokens, ends, np.append(shared[1:], 0))


class Cuts(NamedTuple):
    """How sorted rows are cut into stages.

    Attributes:
        columns: ``0 = c_0 < ... < c_S``, the longest row's end.
        nodes: ``[S]`` distinct prefixes of each stage.
        cost: of the stages, see :class:`PrefixCost`.
        size: the memory of a forward, in tokens: padding included, and the keys that stages copy.
    """

    columns: Ints
    nodes: Ints
    cost: float
    size: float


def choose_cuts(ends: Ints, shared: Ints, cost: PrefixCost) -> Cuts:
    """The cuts of the least cost, by dynamic programming over the columns where rows fork or end.

    Of more than 1,024 such columns every second, third, ... is looked at.

    Args:
        ends, shared: ``[B]`` of :class:`SortedRows`.
        cost: what a stage costs.
    """
    longest = int(ends.max())
    columns = np.unique(np.concatenate([[0], shared, ends]))
    if len(columns) > _MOST_COLUMNS:
        # From the end: its last column is the longest row's end. The first stage begins at
        # column 0.
        columns = np.append(0, columns[:0:-1][:: -(-len(columns) // _MOST_COLUMNS)][::-1])
    # A row is a node of its own in stages that end beyond the tokens it shares with the next row.
    # One that is a prefix of the next row never is.
    fork = np.where(shared < ends, shared, longest)
    first, last = np.searchsorted(columns, fork, side="right"), np.searchsorted(columns, ends)
    count = len(columns)
    grid = np.zeros((count + 1, count + 1), np.int64)
    np.add.at(grid, (last, first), 1)
    # nodes[i, j]: the rows that end behind column i and fork before column j.
    nodes = grid[::-1].cumsum(0)[::-1].cumsum(1)[1:, :count]
    best, previous = np.zeros(count), np.zeros(count, np.int64)
    for j in range(1, count):
        total = best[:j] + cost.stages(nodes[:j, j], columns[:j], int(columns[j]))
        previous[j] = total.argmin()
        best[j] = total[previous[j]]
    cuts = [count - 1]
    while cuts[-1]:
        cuts.append(int(previous[cuts[-1]]))
    cuts.reverse()
    chosen, start, end = nodes[cuts[:-1], cuts[1:]], columns[cuts[:-1]], columns[cuts[1:]]
    size = chosen * (end - start + np.where(start > 0, end, 0) * cost.key_size)
    return Cuts(columns[cuts], chosen, float(best[-1]), float(size.sum()))


class Pieces(NamedTuple):
    """Sorted rows, each cut where it leaves the one before it. Those that begin in one column are a
    stage.

    Attributes:
        rows: none of them a prefix of another.
        stage: ``[B]`` the stage of each.
        columns: ``[S]`` the first column of each stage.
        ends: ``[S]`` the end of its longest row.
        cost, size: see :class:`Cuts`.
    """

    rows: SortedRows
    stage: Ints
    columns: Ints
    ends: Ints
    cost: float
    size: float

    @classmethod
    def of(cls, rows: SortedRows, cost: PrefixCost) -> Pieces:
        """Cut rows in this order."""
        starts = np.append(0, rows.shared[:-1])
        columns, stage, nodes = np.unique(starts, return_inverse=True, return_counts=True)
        ends = np.zeros_like(columns)
        np.maximum.at(ends, stage, rows.ends)
        size = nodes * (ends - columns + np.where(columns > 0, ends, 0) * cost.key_size)
        return cls(rows, stage, columns, ends, float(cost.stages(nodes, columns, ends).sum()), float(size.sum()))


class Stage(NamedTuple):
    """Distinct prefixes that reach beyond a column, from there on.

    Attributes:
        start: its first column.
        width: its columns; a prefix that ends earlier is padded.
        keys: ``[nodes, start + width]`` the place of every token of each prefix, from column 0 on.
    """

    start: int
    width: int
    keys: Ints


class PrefixPlan(NamedTuple):
    """The tokens of rows ``[B, L]`` without repetition.

    Attributes:
        tokens: ``[T]`` ids, stage by stage, prefix by prefix.
        positions: ``[T]`` the column of each.
        stages: in the order of their first columns.
        places: ``[B, L]`` where in ``tokens`` the tokens of each row are; 0 behind a row's end.
    """

    tokens: Ints
    positions: Ints
    stages: tuple[Stage, ...]
    places: Ints


def plan_prefixes(tokens: Ints, ends: Ints, cost: PrefixCost) -> PrefixPlan | None:
    """Lay out rows without repetition; ``None`` where plain rows, padded to the longest, cost no
    more, or are too long.

    Args:
        tokens: ``[B, L]`` ids.
        ends: ``[B]`` the tokens of each row that count, at least 1 and at most L.
        cost: decides where the rows are cut, and whether.

    Examples:
        >>> rows = np.array([[5, 6, 7], [5, 6, 8], [5, 6, 7]])
        >>> plan = plan_prefixes(rows, np.array([3, 3, 3]), PrefixCost(stage=0.1, context=0, key=0))
        >>> plan.tokens.tolist(), [(stage.start, len(stage.keys)) for stage in plan.stages]
        ([5, 6, 7, 8], [(0, 1), (2, 2)])
        >>> plan.places.tolist()
        [[0, 1, 2], [0, 1, 3], [0, 1, 2]]
    """
    if len(ends) < 2 or ends.max() > cost.max_length:
        return None
    rows = SortedRows.of(tokens, ends)
    cuts = choose_cuts(rows.ends, rows.shared, cost)
    leaves, leaf = rows.leaves()
    pieces = min((Pieces.of(each, cost) for each in (leaves, leaves.reversed())), key=lambda each: each.cost)
    if min(cuts.cost, pieces.cost) >= cost.rows(len(ends), int(cuts.columns[-1])):
        return None
    # The bound of a forward holds for the size of cuts.
    if pieces.cost < cuts.cost and pieces.size <= cuts.size:
        plan = _lay_out_pieces(pieces)
        places = np.zeros_like(rows.tokens)
        places[pieces.rows.order] = plan.places
        places[rows.order] = places[leaf]
        return plan._replace(places=places)
    return _lay_out(rows, cuts)


def _lay_out(rows: SortedRows, cuts: Cuts) -> PrefixPlan:
    places, parts, stages, used = np.zeros_like(rows.tokens), [], [], 0
    fork = np.where(rows.shared < rows.ends, rows.shared, cuts.columns[-1])
    for start, end in zip(cuts.columns[:-1].tolist(), cuts.columns[1:].tolist(), strict=True):
        alive = rows.ends > start
        last = alive & (fork < end)  # of the rows of a node the last, which is the longest
        node = np.cumsum(last) - last
        heads = np.flatnonzero(last)
        index = used + np.arange(len(heads) * (end - start)).reshape(len(heads), -1)
        places[alive, start:end] = index[node[alive]]
        stages.append(Stage(start, end - start, places[heads, :end]))
        # Any id will do as padding: what is computed there is never read.
        parts.append((rows.tokens[heads, start:end].clip(0), np.broadcast_to(np.arange(start, end), index.shape)))
        used += index.size
    back = np.empty_like(rows.order)
    back[rows.order] = np.arange(len(back))
    return PrefixPlan(*_joined(parts), tuple(stages), places[back])


def _lay_out_pieces(pieces: Pieces) -> PrefixPlan:
    """The plan of rows in the order of the pieces."""
    places, parts, stages, used = np.zeros_like(pieces.rows.tokens), [], [], 0
    members = [np.flatnonzero(pieces.stage == stage) for stage in range(len(pieces.columns))]
    spans = [*zip(pieces.columns.tolist(), pieces.ends.tolist(), members, strict=True)]
    for start, end, heads in spans:
        index = used + np.arange(len(heads) * (end - start)).reshape(len(heads), -1)
        places[heads, start:end] = index
        parts.append(
            (pieces.rows.tokens[heads, start:end].clip(0), np.broadcast_to(np.arange(start, end), index.shape))
        )
        used += index.size
    for i, start in enumerate(pieces.columns[pieces.stage].tolist()):
        places[i, :start] = places[i - 1, :start]
    stages = [Stage(start, end - start, places[heads, :end]) for start, end, heads in spans]
    return PrefixPlan(*_joined(parts), tuple(stages), places)


def _joined(parts: list[tuple[Ints, Ints]]) -> tuple[Ints, Ints]:
    """Ids and positions of all stages."""
    ids, positions = (np.concatenate([part[i].ravel() for part in parts]) for i in (0, 1))
    return ids, positions


def forward_bound(max_tokens: int, longest: int) -> int:
    """The most distinct tokens of one forward over rows that share, padding included.

    A row is not cut, and what a group shares may be nearly as long as its rows: a forward may hold
    the longest row of the batch and an eighth more, for what the others add. Else rows of about
    ``max_tokens`` tokens would each be computed by itself.

    Args:
        max_tokens: the bound that was asked for.
        longest: tokens of the longest row of the batch.

    Examples:
        >>> forward_bound(4096, 1000), forward_bound(4096, 4160)
        (4096, 4680)
    """
    return max(max_tokens, longest + longest // 8)


def pack_rows(rows: SortedRows, max_tokens: int, cost: PrefixCost) -> tuple[list[tuple[int, int]], float]:
    """Cut sorted rows into forwards of at most ``max_tokens`` tokens (``size`` of :class:`Cuts`)
    each, by :func:`forward_bound`.

    With all that rows share, they are at most 16 times that many positions.

    Returns:
        The first place of each forward and the one behind its last; and the cost of all.
    """
    bound = forward_bound(max_tokens, int(rows.ends.max()))
    # Tokens of the trie: a row's own are those that it does not share with the one before.
    own = np.cumsum(rows.ends - np.append(0, rows.shared[:-1]))
    spans, price, start, last = [], 0.0, 0, len(rows.ends)
    while start < len(rows.ends):
        before = own[start] - rows.ends[start]
        # As many rows as fit without padding, and not many more than last time; then fewer, until
        # padding and copied keys fit too.
        count = int(np.searchsorted(own, before + bound, side="right")) - start
        count = max(1, min(count, last + last // 2, len(rows.ends) - start))
        while True:
            part = rows.part(start, start + count)
            cuts = choose_cuts(part.ends, part.shared, cost)
            positions = count * int(part.ends.max()) / _MOST_ROWS
            if max(cuts.size, positions) <= bound or count == 1:
                break
            count = max(1, min(count - 1, int(count * bound / max(cuts.size, positions))))
        spans.append((start, start + count))
        price += cuts.cost
        start, last = start + count, count
    return spans, price
