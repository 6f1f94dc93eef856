"""Checks of the ids of a batch: each episode occurs once, and the episodes of a group share a
task."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_llm.functional._common import check_shapes

__all__ = ["episode_fault", "group_fault"]


def episode_fault(episode_id: Tensor) -> str | None:
    """The fault in the episode ids of a batch; ``None`` if there is none.

    Args:
        episode_id: ``[B]`` int64.

    Examples:
        >>> episode_fault(torch.tensor([3, 4])) is None
        True
        >>> episode_fault(torch.tensor([3, 4, 3]))[:45]
        'Episode(s) [3] are in the batch more than onc'
    """
    labels, counts = episode_id.unique(return_counts=True)
    if bool((counts == 1).all()):
        return None
    return (
        f"Episode(s) {_few(labels[counts > 1])} are in the batch more than once: their credit would count twice. Environments "
        "that run side by side need ids of their own: give each its worker= and num_workers=, and pass each batch once."
    )


def group_fault(
    group_id: Tensor, env_id: Tensor | None = None, tokens: Tensor | None = None, turn_ids: Tensor | None = None
) -> str | None:
    """The fault in the groups of a batch, as far as it can be seen; ``None`` if there is none.

    The episodes of a group share a task, so that they come from one environment and begin with the
    same context.

    Args:
        group_id: ``[B]`` int64.
        env_id: ``[B]`` int64; ``None``: not compared.
        tokens: ``[B, L]`` int64, compared up to the first response; ``None``: not compared.
        turn_ids: ``[B, L]`` int64, -1 off actions; goes with ``tokens``.

    Examples:
        >>> tokens, turn_ids = torch.tensor([[5, 6], [5, 7], [4, 7]]), torch.tensor([[-1, 0]] * 3)
        >>> group_fault(torch.tensor([1, 1, 2]), tokens=tokens, turn_ids=turn_ids) is None
        True
        >>> group_fault(torch.tensor([1, 2, 2]), tokens=tokens, turn_ids=turn_ids)[:51]
        'Group(s) [2] hold episodes of different tasks: they'
    """
    if group_id.numel() == 0:
        return None
    first = _first_of_group(group_id)
    differs = torch.zeros_like(group_id, dtype=torch.bool)
    if env_id is not None:
        check_shapes(group_id=group_id, env_id=env_id)
        differs = env_id != env_id[first]
    if tokens is not None and turn_ids is not None:
        check_shapes(tokens=tokens, turn_ids=turn_ids)
        differs = differs | _begins_differently(tokens, turn_ids, first)
    if not bool(differs.any()):
        return None
    return (
        f"Group(s) {_few(group_id[differs].unique())} hold episodes of different tasks: they come from different "
        "environments, or their first contexts differ, and would be compared all the same. Environments that run side "
        "by side need ids of their own (worker= and num_workers=), and reset(seed) must give the same task for the same seed."
    )


def _first_of_group(group_id: Tensor) -> Tensor:
    """The index of the first member of each row's group, ``[B]``."""
    labels, group = group_id.unique(return_inverse=True)
    index = torch.arange(len(group_id), device=group_id.device)
    return torch.full_like(labels, len(group_id)).scatter_reduce(0, group, index, "amin")[group]


def _begins_differently(tokens: Tensor, turn_ids: Tensor, first: Tensor) -> Tensor:
    """Whether a row's first context differs from the first context of the ``first`` row of its
    group, ``[B]``."""
    columns = torch.arange(turn_ids.shape[1], device=turn_ids.device)
    begin = torch.where(turn_ids == 0, columns, turn_ids.shape[1]).amin(1)
    responded = begin < turn_ids.shape[1]
    differs = ((tokens != tokens[first]) & (columns < begin.unsqueeze(1))).any(1) | (begin != begin[first])
    # Of a row without a response it is not known where its first context ends.
    return differs & responded & responded[first]


def _few(ids: Tensor) -> str:
    listed = ", ".join(map(str, ids[:5].tolist()))
    return f"[{listed}{', ...' if len(ids) > 5 else ''}]"
