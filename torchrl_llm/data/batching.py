"""Rows in batches that fit: :func:`minibatches` for optimizer steps, :func:`micro_batches` for memory, :func:`cat_rows`.

Losses are weighted sums (:func:`torchrl_llm.objectives.functional.loss_weights`), so how a batch is cut up never
changes a gradient; these functions only decide how much padding it costs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from torchrl_llm import keys


def minibatches(
    batch: TensorDictBase,
    size: int,
    *,
    generator: torch.Generator | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> list[TensorDictBase]:
    """Shuffle rows ``[B]`` and cut them into batches of at most ``size`` rows, one optimizer step each.

    Args:
        batch: rows of batch size ``[B]``.
        size: most rows of a batch, >= 1. Where it does not divide B, batches are of nearly equal size instead of one
            small remainder, whose step would count as much as the others.
        generator: of the permutation, on the CPU; ``None`` keeps the order.
        process_group: the rows of all ranks are one batch, in the order of ``"episode_id"``, and ``size`` counts all of them:
            whatever the number of ranks, the same rows share a step (if the generators are in the same state). Each rank
            gets its own of these rows, in equally many batches, some of which may be empty.

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


def _places(batch: TensorDictBase, process_group: dist.ProcessGroup) -> Tensor:
    """For each row of all ranks, in the order of their episodes, its place in ``batch``; -1: it is another rank's."""
    ids: list[list[int]] = [[] for _ in range(dist.get_world_size(process_group))]
    dist.all_gather_object(ids, batch[keys.EPISODE_ID].tolist(), group=process_group)
    rank = dist.get_rank(process_group)
    order = sorted((episode, owner, i) for owner, own in enumerate(ids) for i, episode in enumerate(own))
    return torch.tensor([i if owner == rank else -1 for _, owner, i in order], dtype=torch.int64)


def micro_batches(batch: TensorDictBase, max_tokens: int) -> list[TensorDictBase]:
    """Cut rows ``[B]`` into micro-batches of at most ``max_tokens`` tokens, padding included.

    Rows are sorted by length, the longest first, and each micro-batch is trimmed to its longest row. A row of more than
    ``max_tokens`` tokens gets a micro-batch of its own.

    Args:
        batch: rows of batch size ``[B]`` with ``"attention_mask"`` ``[B, L]``, right-padded; a row's gaps (:mod:`torchrl_llm.segments`) stay.
        max_tokens: bound on rows times longest row, >= 1.

    Returns:
        Micro-batches; the per-token keys (second dimension ``L``, outside of ``"turn"``) are ``[b, l]`` with l <= L.

    Examples:
        >>> from tensordict import TensorDict
        >>> mask = torch.tensor([[1, 1, 0, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 0, 0]]).bool()
        >>> rows = TensorDict(attention_mask=mask, episode_id=torch.arange(3), batch_size=[3])
        >>> [(part["episode_id"].tolist(), part["attention_mask"].shape[1]) for part in micro_batches(rows, 8)]
        [([1, 2], 4), ([0], 2)]
    """
    return [part for _, part in _packed(batch, max_tokens)]


_PADDING = {keys.TURN_IDS: -1, keys.POLICY_VERSION: -1}


def cat_rows(batches: Sequence[TensorDictBase]) -> TensorDictBase:
    """Put rows of different width together: ``[B1]``, ``[B2]``, ... become ``[B1 + B2 + ...]``, padded to the widest.

    Args:
        batches: rows with ``"attention_mask"`` ``[b, L]`` and the per-turn keys ``("turn", ...)`` ``[b, T]``; ``L`` and
            ``T`` may differ from batch to batch.

    Returns:
        Rows of the greatest ``L`` and ``T``; -1 pads ``"turn_ids"`` and ``"policy_version"``, 0 all else.

    Examples:
        >>> from tensordict import TensorDict
        >>> def row(n):
        ...     return TensorDict(attention_mask=torch.ones(1, n) > 0, turn_ids=torch.zeros(1, n).long(), batch_size=[1])
        >>> cat_rows([row(1), row(3)])["turn_ids"].tolist()
        [[0, -1, -1], [0, 0, 0]]
    """
    if not batches:
        raise ValueError("cat_rows needs at least one batch of rows; got none.")
    widths = [batch[keys.ATTENTION_MASK].shape[1] for batch in batches]
    turns = [batch[keys.TURN_MASK].shape[1] if keys.TURN_MASK in batch.keys(True) else 0 for batch in batches]
    return TensorDict.cat(
        [_widen(batch, width, max(widths), max(turns)) for batch, width in zip(batches, widths, strict=True)]
    )


def _widen(batch: TensorDictBase, width: int, widest: int, most_turns: int) -> TensorDictBase:
    out = batch.copy()
    for key, value in list(batch.items(include_nested=True, leaves_only=True)):
        if isinstance(key, tuple) and key[0] == keys.TURN:
            missing = most_turns - value.shape[1]
        else:
            missing = widest - width if _is_per_token(key, value, width) else 0
        if missing:
            fill = value.new_full((value.shape[0], missing, *value.shape[2:]), _PADDING.get(key, 0))
            out.set(key, torch.cat([value, fill], 1))
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
def apply_in_micro_batches(module: TensorDictModuleBase, batch: TensorDictBase, max_tokens: int) -> TensorDictBase:
    """Run a scorer or critic over rows ``[B]`` without a graph, in micro-batches, and write its ``out_keys``.

    Args:
        module: reads its ``in_keys`` from micro-batches ``[b, l]`` and writes its ``out_keys``: ``[b, l]`` or ``[b, ...]``.
        batch: rows of batch size ``[B]``; per-token results come back at its full width ``L``, 0 in the padding.
        max_tokens: see :func:`micro_batches`.

    Returns:
        ``batch``.
    """
    width = batch[keys.ATTENTION_MASK].shape[1]
    inputs = batch.select(*{keys.ATTENTION_MASK, *module.in_keys})
    for index, part in _packed(inputs, max_tokens):
        part = module(part)
        trimmed = part[keys.ATTENTION_MASK].shape[1]
        for key in module.out_keys:
            value = part[key]
            if _is_per_token(key, value, trimmed):
                value = torch.nn.functional.pad(value.movedim(1, -1), (0, width - trimmed)).movedim(-1, 1)
            if (
                batch.get(key, None) is None
                or batch[key].shape[1:] != value.shape[1:]
                or batch[key].dtype != value.dtype
            ):
                batch.set(key, value.new_zeros(batch.shape[0], *value.shape[1:]))
            batch[key][index] = value
    return batch


def _packed(batch: TensorDictBase, max_tokens: int) -> Iterator[tuple[Tensor, TensorDictBase]]:
    """The row indices and the rows of each micro-batch."""
    if max_tokens < 1:
        raise ValueError(f"max_tokens is {max_tokens}; expected at least 1.")
    mask = batch[keys.ATTENTION_MASK]
    ends = torch.where(mask.bool(), torch.arange(1, mask.shape[1] + 1, device=mask.device), 0).amax(-1)
    lengths, order = ends.sort(descending=True, stable=True)
    sizes, width = lengths.tolist(), mask.shape[1]
    start = 0
    while start < len(sizes):
        longest = max(1, sizes[start])
        end = min(len(sizes), start + max(1, max_tokens // longest))
        yield order[start:end], _trim(batch[order[start:end]], width, longest)
        start = end


def _trim(rows: TensorDictBase, width: int, longest: int) -> TensorDictBase:
    for key, value in list(rows.items(include_nested=True, leaves_only=True)):
        if _is_per_token(key, value, width):
            rows.set(key, value[:, :longest])
    return rows


def _is_per_token(key: keys.NestedKey, value: Tensor, width: int) -> bool:
    """Whether ``value`` is ``[b, width, ...]`` and not one of the ``[b, T]`` entries under ``"turn"``."""
    return value.ndim > 1 and value.shape[1] == width and not (isinstance(key, tuple) and key[0] == keys.TURN)
