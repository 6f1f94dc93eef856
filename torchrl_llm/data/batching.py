"""Splitting and joining rows: :func:`minibatches` for optimizer steps, :func:`micro_batches` for
memory, :func:`cat_rows`.

Losses are weighted sums (:func:`torchrl_llm.functional.loss_weights`), so the split of a batch
never changes a gradient, only the amount of padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from torchrl_llm import keys
from torchrl_llm.envs.tasks import TaskSpec
from torchrl_llm.modules.prefixes import PrefixCost, SortedRows, pack_rows


def minibatches(
    batch: TensorDictBase,
    size: int,
    *,
    generator: torch.Generator | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> list[TensorDictBase]:
    """Shuffle rows ``[B]`` and cut them into batches of at most ``size`` rows, one optimizer step
    each.

    Args:
        batch: rows of batch size ``[B]``.
        size: most rows of a batch, >= 1. Where it does not divide B, batches are of nearly equal
            size instead of one small remainder, whose step would count as much as the others.
        generator: of the permutation, on the CPU; ``None`` keeps the order.
        process_group: the rows of all ranks are one batch, in the order of ``"episode_id"`` (where
            rows count as one, of the unit of their first turn first), and ``size`` counts all of
            them: whatever the number of ranks, the same rows share a step (if the generators are in
            the same state). Each rank gets its own of these rows, in equally many batches, some of
            which may be empty.

    Examples:
        >>> from tensordict import TensorDict
        >>> rows = TensorDict(episode_id=torch.arange(5), batch_size=[5])
        >>> [part["episode_id"].tolist() for part in minibatches(rows, 2)]
        [[0, 1], [2, 3], [4]]
    """
    if size < 1:
        raise ValueError(f"size is {size}; expected at least 1 row.")
    place = torch.arange(batch.shape[0]) if process_group is None else _places(batch, process_group)
    count = len(place)
    order = torch.arange(count) if generator is None else torch.randperm(count, generator=generator)
    parts = [place[part] for part in order.tensor_split(max(1, -(-count // size)))]
    return [batch[part[part >= 0].to(batch.device or "cpu")] for part in parts]


def spaced_rows(batch: TensorDictBase, step: int, process_group: dist.ProcessGroup | None = None) -> TensorDictBase:
    """Every ``step``-th row of a batch, from the first on.

    Args:
        batch: rows of batch size ``[B]``.
        step: >= 1.
        process_group: of the rows of all ranks, in the order that :func:`minibatches` has them in;
            each rank gets its own of these, which may be none.

    Examples:
        >>> from tensordict import TensorDict
        >>> spaced_rows(TensorDict(episode_id=torch.arange(5), batch_size=[5]), 2)["episode_id"].tolist()
        [0, 2, 4]
    """
    if process_group is None:
        return batch[::step]
    chosen = _places(batch, process_group)[::step]
    return batch[chosen[chosen >= 0].to(batch.device or "cpu")]


def _places(batch: TensorDictBase, process_group: dist.ProcessGroup) -> Tensor:
    """The index in ``batch`` of each row of all ranks, in the order of their episodes; -1: the row
    is on another rank."""
    ids: list[list[tuple[int, int]]] = [[] for _ in range(dist.get_world_size(process_group))]
    # As objects: ranks may have different numbers of rows, which all_gather() of tensors does not
    # take.
    episode = batch[keys.EPISODE_ID]
    # A unit stands where its first episode was sampled: the ids of continuations are hashes.
    unit = batch.get(keys.TURN_UNIT, episode.unsqueeze(1))[:, 0]
    own_ids = [*zip(unit.tolist(), episode.tolist(), strict=True)]
    dist.all_gather_object(ids, own_ids, group=process_group)
    rank = dist.get_rank(process_group)
    order = sorted((episode, owner, i) for owner, own in enumerate(ids) for i, episode in enumerate(own))
    return torch.tensor([i if owner == rank else -1 for _, owner, i in order], dtype=torch.int64)


def micro_batches(batch: TensorDictBase, max_tokens: int, cost: PrefixCost | None = None) -> list[TensorDictBase]:
    """Cut rows ``[B]`` into micro-batches of at most ``max_tokens`` tokens, padding included.

    Rows are sorted by length, the longest first, and each micro-batch is trimmed to its longest
    row. A row of more than ``max_tokens`` tokens gets a micro-batch of its own. With ``cost``, rows
    that share a prefix are put together where that saves computation, and what they share counts
    once; each may have as many tokens as the longest row and an eighth more, if that is more than
    ``max_tokens``.

    Args:
        batch: rows of batch size ``[B]`` with ``"attention_mask"`` ``[B, L]``, right-padded; a
            row's gaps (:mod:`torchrl_llm.modules.segments`) stay.
        max_tokens: bound on rows times longest row, >= 1; with ``cost`` on the tokens that are
            computed, and a 16th of rows times longest row.
        cost: of a model that computes shared prefixes once; ``None``: no model here does.

    Returns:
        Micro-batches; the per-token keys (:data:`torchrl_llm.keys.ROW_VIEW`) are ``[b, l]`` with l
        <= L.

    Raises:
        KeyError: a key of your own is not declared, see :func:`torchrl_llm.keys.declare_row_key`.

    Examples:
        >>> from tensordict import TensorDict
        >>> mask = torch.tensor([[1, 1, 0, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 0, 0]]).bool()
        >>> rows = TensorDict(attention_mask=mask, episode_id=torch.arange(3), batch_size=[3])
        >>> [(part["episode_id"].tolist(), part["attention_mask"].shape[1]) for part in micro_batches(rows, 8)]
        [([1, 2], 4), ([0], 2)]
    """
    return [part for _, part in _packed(batch, max_tokens, cost)]


def cat_rows(batches: Sequence[TensorDictBase]) -> TensorDictBase:
    """Concatenate rows of different width: ``[B1]``, ``[B2]``, ... become ``[B1 + B2 + ...]``,
    padded to the widest.

    Args:
        batches: rows with ``"attention_mask"`` ``[b, L]`` and, as a rule, ``("turn", "mask")``
            ``[b, T]``; ``L`` and ``T`` may differ from batch to batch.

    Returns:
        Rows of the greatest ``L`` and ``T``.

    Examples:
        >>> from tensordict import TensorDict
        >>> def row(n):
        ...     return TensorDict(attention_mask=torch.ones(1, n) > 0, turn_ids=torch.zeros(1, n).long(), batch_size=[1])
        >>> cat_rows([row(1), row(3)])["turn_ids"].tolist()
        [[0, -1, -1], [0, 0, 0]]
    """
    if not batches:
        raise ValueError("cat_rows needs at least one batch of rows; got none.")
    sizes = [row_sizes(batch) for batch in batches]
    width, num_turns = map(max, zip(*sizes, strict=True))
    return TensorDict.cat([pad_rows(batch, width, num_turns) for batch in batches])


def zero_weight_rows(rows: TensorDictBase) -> TensorDictBase:
    """A copy of rows without any action, and so without weight in any sum.

    A rank without data runs them, so that collectives stay in step.

    Args:
        rows: ``[B]``, with ``"turn_ids"`` and ``("turn", "mask")``.

    Examples:
        >>> from tensordict import TensorDict
        >>> turn = dict(mask=torch.tensor([[True]]), reward=torch.ones(1, 1))
        >>> empty = zero_weight_rows(TensorDict(turn=turn, turn_ids=torch.zeros(1, 3).long(), batch_size=[1]))
        >>> empty["turn_ids"].tolist(), empty["turn", "mask"].tolist(), empty["turn", "reward"].tolist()
        ([[-1, -1, -1]], [[False]], [[0.0]])
    """
    empty = rows.clone()
    empty[keys.TURN_IDS] = torch.full_like(empty[keys.TURN_IDS], -1)
    for key in (keys.TURN_MASK, keys.TURN_REWARD):
        empty[key] = torch.zeros_like(empty[key])
    return empty


def with_missing(collected: TensorDictBase, wanted: Sequence[TaskSpec], any_row: TensorDictBase) -> TensorDictBase:
    """Rows of all tasks ``wanted``; a task that failed at its reset has a row without a turn.

    Args:
        collected: ``[n]``, with the ids of their tasks.
        wanted: ``N`` tasks, n of them from ``collected``.
        any_row: ``[1]`` or more, whose keys and shapes the new rows have.

    Returns:
        ``[N]``: those collected, then the others.
    """
    known = set(collected[keys.EPISODE_ID].tolist())
    missing = [task_spec for task_spec in wanted if task_spec.episode_id not in known]
    if not missing:
        return collected
    empty = zero_weight_rows(any_row[[0] * len(missing)])
    for i, name in enumerate((keys.EPISODE_ID, keys.GROUP_ID, keys.ENV_ID)):
        empty[name] = torch.tensor([task_spec[i] for task_spec in missing], device=collected.device)
    # The task was never seen. A seed is as good as its id, because no other task has it.
    empty[keys.TASK_ID] = torch.tensor([task_spec.seed for task_spec in missing], device=collected.device)
    return cat_rows([collected, empty])


def row_sizes(rows: TensorDictBase) -> tuple[int, int]:
    """The width ``L`` of rows, and their number of turns ``T``; 0: they have no per-turn keys."""
    turns = rows.get(keys.TURN_MASK, None)
    return rows[keys.ATTENTION_MASK].shape[1], 0 if turns is None else turns.shape[1]


def pad_rows(rows: TensorDictBase, width: int, num_turns: int) -> TensorDictBase:
    """Rows ``[B]`` with the per-token keys padded to ``width`` and the per-turn keys to
    ``num_turns``."""
    own_width, own_turns = row_sizes(rows)
    missing = {"token": width - own_width, "turn": num_turns - own_turns}
    if not any(missing.values()):
        return rows
    # A shallow copy: the caller's rows keep their width.
    out = rows.copy()
    for key, value in list(rows.items(include_nested=True, leaves_only=True)):
        if size := missing.get(keys.row_axis(key, value.shape), 0):
            padding = value.new_full((value.shape[0], size, *value.shape[2:]), keys.row_fill(key))
            out.set(key, torch.cat([value, padding], 1))
    return out


def padding_share(parts: Sequence[TensorDictBase]) -> float:
    """The share of padding among all positions of some micro-batches, in [0, 1).

    Examples:
        >>> from tensordict import TensorDict
        >>> padding_share([TensorDict(attention_mask=torch.tensor([[True, True], [True, False]]), batch_size=[2])])
        0.25
    """
    masks = [part[keys.ATTENTION_MASK] for part in parts]
    valid = torch.stack([mask.sum() for mask in masks]).sum()
    return 1 - float(valid) / sum(mask.numel() for mask in masks)


@torch.no_grad()
def apply_in_micro_batches(
    module: TensorDictModuleBase, batch: TensorDictBase, max_tokens: int, cost: PrefixCost | None = None
) -> TensorDictBase:
    """Run a scorer or critic over rows ``[B]`` without a graph, in micro-batches, and write its
    ``out_keys``.

    Args:
        module: reads its ``in_keys`` from micro-batches ``[b, l]`` and writes its ``out_keys``:
            ``[b, l]`` or ``[b, ...]``.
        batch: rows of batch size ``[B]``; per-token results come back at its full width ``L``, 0 in
            the padding.
        max_tokens, cost: see :func:`micro_batches`.

    Returns:
        ``batch``.
    """
    width = batch[keys.ATTENTION_MASK].shape[1]
    # Only what is read is copied into micro-batches.
    inputs = batch.select(*{keys.ATTENTION_MASK, *module.in_keys})
    written: dict[keys.NestedKey, Tensor] = {}
    for index, part in _packed(inputs, max_tokens, cost):
        part = module(part)
        padding = width - part[keys.ATTENTION_MASK].shape[1]
        for key in module.out_keys:
            value = part[key]
            if keys.row_axis(key, value.shape) == "token":
                # pad() starts from the last dimension, and a result may have others after its
                # tokens.
                value = torch.nn.functional.pad(value.movedim(1, -1), (0, padding)).movedim(-1, 1)
            if key not in written:
                written[key] = value.new_zeros(batch.shape[0], *value.shape[1:])
            written[key][index] = value
    return batch.update(written)


def _packed(batch: TensorDictBase, max_tokens: int, cost: PrefixCost | None) -> Iterator[tuple[Tensor, TensorDictBase]]:
    """The row indices and the rows of each micro-batch."""
    if max_tokens < 1:
        raise ValueError(f"max_tokens is {max_tokens}; expected at least 1.")
    mask = batch[keys.ATTENTION_MASK]
    # The last valid column, not the number of valid ones: a row's segments have gaps between them.
    ends = torch.where(mask.bool(), torch.arange(1, mask.shape[1] + 1, device=mask.device), 0).amax(-1)
    # stable: rows of one length keep their order, so the cut is the same on every device.
    lengths, order = ends.sort(descending=True, stable=True)
    # A row without a token has length 0, and max_tokens is divided by it.
    sizes = lengths.clamp(min=1).tolist()
    parts = _by_length(sizes, max_tokens)
    if cost is not None and len(sizes) > 1 and sizes[0] <= cost.max_length:
        plain = sum(cost.rows(end - start, sizes[start]) for start, end in parts)
        rows = SortedRows.of(batch[keys.TOKENS].cpu().numpy(), ends.clamp(min=1).cpu().numpy())
        spans, price = pack_rows(rows, max_tokens, cost)
        if price < plain:
            parts, order = spans, torch.from_numpy(rows.order).to(order.device)
            lengths = ends[order]
    for start, end in parts:
        yield order[start:end], _trim(batch[order[start:end]], max(1, int(lengths[start:end].max())))


def _by_length(sizes: Sequence[int], max_tokens: int) -> list[tuple[int, int]]:
    """Spans of rows, the longest first, each of at most ``max_tokens`` tokens with padding."""
    spans, start = [], 0
    while start < len(sizes):
        end = min(len(sizes), start + max(1, max_tokens // sizes[start]))
        spans.append((start, end))
        start = end
    return spans


def _trim(rows: TensorDictBase, longest: int) -> TensorDictBase:
    # These rows are a copy already, indexed by a tensor: the batch keeps its width.
    for key, value in list(rows.items(include_nested=True, leaves_only=True)):
        if keys.row_axis(key, value.shape) == "token":
            rows.set(key, value[:, :longest])
    return rows
