"""Rows of a tree: episodes that begin with the same turns, because they were continued from one of
them."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_llm.functional._common import check_shapes, joint_labels, label_totals

__all__ = ["mean_of_others", "tree_units"]


def tree_units(tree_id: Tensor, branch_turn: Tensor, num_turns: int) -> Tensor:
    """Which rows a turn must not be compared with: those with the same number in its column.

    Before a tree branches its rows have the same actions: the return of one depends on the turn of
    another, and would bias its baseline. From there on they are sampled apart, and each row is a
    unit by itself. Where a tree did not branch, because its episode had ended, other episodes of
    the task were played instead; that there are some depends on the episode, so the tree stays one
    unit.

    Args:
        tree_id: ``[B]`` int64, equal for the rows of a tree.
        branch_turn: ``[B]`` int64, the turn from which they differ; -1: the tree did not branch.
        num_turns: T.

    Returns:
        ``[B, T]`` int64, 0 to 2 B - 1.

    Examples:
        >>> tree_units(torch.tensor([7, 7, 9]), torch.tensor([1, 1, -1]), 2)
        tensor([[0, 3],
                [0, 4],
                [1, 1]])
    """
    check_shapes(tree_id=tree_id, branch_turn=branch_turn)
    tree = tree_id.unique(return_inverse=True)[1].view(-1, 1)
    row = torch.arange(len(tree_id), 2 * len(tree_id), device=tree_id.device).view(-1, 1)
    apart = torch.arange(num_turns, device=tree_id.device) >= branch_turn.view(-1, 1)
    return torch.where(apart & (branch_turn >= 0).view(-1, 1), row, tree)


def mean_of_others(score: Tensor, group: Tensor, unit: Tensor) -> Tensor:
    """The mean over the rows of a group that are not of the same unit, column by column; 0 where
    there is none.

    Args:
        score: ``[B, T]``.
        group: ``[B]`` int64, small numbers.
        unit: ``[B, T]`` int64, see :func:`tree_units`.

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
