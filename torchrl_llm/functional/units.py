"""Units, the rows that count as one at a turn: those of trees, and the mean of the others."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_llm.functional._common import check_shapes, joint_labels, label_totals

__all__ = ["mean_of_others", "tree_units"]


def tree_units(episode_id: Tensor, root_id: Tensor, apart_from: Tensor, num_turns: int) -> Tensor:
    """The units of rows of trees, episodes that were continued from a turn of the root.

    Before a tree branches its rows have the same actions: the return of one depends on the turn of
    another, and would bias its baseline. From there on they are sampled apart, and each row is a
    unit by itself. Where a tree did not branch, because its episode had ended, other episodes of
    the task were played instead; that there are some depends on the episode, so the tree stays one
    unit.

    Args:
        episode_id: ``[B]`` int64, at least 0.
        root_id: ``[B]`` int64, the ``episode_id`` of the root of each row's tree.
        apart_from: ``[B]`` int64, the turn from which the rows of a tree differ; -1: it did not
            branch.
        num_turns: T.

    Returns:
        ``[B, T]`` int64, see :data:`torchrl_llm.keys.TURN_UNIT`: the root's id, or
        ``-2 - episode_id`` for a row that is a unit by itself.

    Examples:
        >>> tree_units(torch.tensor([7, 8, 9]), torch.tensor([7, 7, 9]), torch.tensor([1, 1, -1]), 2)
        tensor([[  7,  -9],
                [  7, -10],
                [  9,   9]])
    """
    check_shapes(episode_id=episode_id, root_id=root_id, apart_from=apart_from)
    turn, begin = torch.arange(num_turns, device=root_id.device), apart_from.unsqueeze(1)
    return torch.where((turn >= begin) & (begin >= 0), (-2 - episode_id).unsqueeze(1), root_id.unsqueeze(1))


def mean_of_others(score: Tensor, group: Tensor, unit: Tensor) -> Tensor:
    """The mean over the rows of a group that are not of the same unit, column by column; 0 where
    there is none.

    Args:
        score: ``[B, T]``.
        group: ``[B]`` int64, small numbers.
        unit: ``[B, T]`` int64, see :data:`torchrl_llm.keys.TURN_UNIT`.

    Returns:
        ``[B, T]`` float64.

    Examples:
        >>> score = torch.tensor([[1.0], [3.0], [8.0]])
        >>> mean_of_others(score, torch.tensor([0, 0, 0]), torch.tensor([[0], [0], [1]]))
        tensor([[8.],
                [8.],
                [2.]], dtype=torch.float64)
    """
    check_shapes(score=score, unit=unit)
    column = torch.arange(score.shape[1], device=score.device).expand_as(unit)
    whole = group.view(-1, 1) * score.shape[1] + column
    own = joint_labels(whole, unit)
    (total, count), (ours, number) = (label_totals(score, each) for each in (whole, own))
    return (total - ours) / (count - number).clamp_min(1)
