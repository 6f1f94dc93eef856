"""States that turns share, and returns compared among the turns of a state."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from torchrl_llm.objectives.functional._common import check_shapes, label_totals, masked
from torchrl_llm.objectives.functional.statistics import Partial, check_groups
from torchrl_llm.objectives.functional.trees import mean_of_others
from torchrl_llm.objectives.functional.turns import edge_positions, turn_lengths
from torchrl_llm.options import check_value

__all__ = ["Alone", "observation_states", "prefix_states", "state_company", "state_relative"]

Alone = Literal["turn", "return"]
"""What a turn is compared with whose state no other episode of its group was in."""


def prefix_states(tokens: Tensor, turn_ids: Tensor, num_turns: int) -> Tensor:
    """Number the turns by all tokens before their first action token: equal numbers mean equal tokens, exactly.

    Args:
        tokens: ``[B, L]`` int64.
        turn_ids: ``[B, L]`` int64, -1 off actions.
        num_turns: ``T``.

    Returns:
        ``[B, T]`` int64, at least 0; meaningless where a turn has no action token.

    Examples:
        >>> tokens = torch.tensor([[5, 1, 8, 2], [5, 1, 8, 3], [5, 2, 8, 2]])
        >>> states = prefix_states(tokens, torch.tensor([[-1, 0, -1, 1]] * 3), 2)
        >>> [len(set(column)) for column in states.T.tolist()]
        [1, 2]
    """
    check_shapes(tokens=tokens, turn_ids=turn_ids)
    start = edge_positions(turn_ids, num_turns, "first")
    if not len(tokens):
        return start
    # In lexicographic order the rows with a prefix in common are neighbors: a prefix is numbered by how many pairs of
    # neighbors up to its row differ within its length.
    rows, place = tokens.unique(dim=0, return_inverse=True)
    first_difference = (rows[1:] != rows[:-1]).int().argmax(1)
    before = torch.arange(len(first_difference), device=tokens.device) < place.view(-1, 1, 1)
    number = (before & (first_difference < start.unsqueeze(-1))).sum(-1)
    return number * (tokens.shape[1] + 1) + start


def observation_states(tokens: Tensor, turn_ids: Tensor, num_turns: int) -> Tensor:
    """Number the turns by what lies between them and the action token before: the last observation, in its template.

    Args and returns as :func:`prefix_states`. The observation of a first turn is the whole prompt.

    Examples:
        >>> tokens = torch.tensor([[5, 1, 8, 2], [5, 2, 8, 3], [5, 2, 9, 2]])
        >>> states = observation_states(tokens, torch.tensor([[-1, 0, -1, 1]] * 3), 2)
        >>> [len(set(column)) for column in states.T.tolist()]
        [1, 2]
    """
    check_shapes(tokens=tokens, turn_ids=turn_ids)
    start = edge_positions(turn_ids, num_turns, "first")
    if not turn_ids.numel():
        return start
    position = torch.arange(tokens.shape[1], device=tokens.device)
    action_end = torch.where(turn_ids >= 0, position + 1, 0).cummax(1).values
    begin = torch.where(start > 0, action_end.gather(1, (start - 1).clamp_min(0)), 0)
    start = torch.where(turn_lengths(turn_ids, num_turns) > 0, start, begin)
    width = position[: max(1, int((start - begin).max()))]
    index = begin.unsqueeze(-1) + width
    text = tokens.gather(1, index.clamp_max(tokens.shape[1] - 1).flatten(1)).view_as(index)
    text = torch.where(index < start.unsqueeze(-1), text, -1)
    return text.flatten(0, 1).unique(dim=0, return_inverse=True)[1].view_as(start)


def state_relative(
    score: Tensor,
    state: Tensor,
    group_id: Tensor,
    acted: Tensor,
    alone: Alone = "turn",
    *,
    unit: Tensor | None = None,
    group_size: int | None = None,
    partial: Partial = "error",
) -> Tensor:
    """Score relative to the turns of the other episodes of the group that were in the same state.

    The baseline of a turn is a mean over turns of *other* episodes, whichever they are: given the state it does not depend
    on the turn's own action, so that no state, however coarse, biases the gradient. Groups of states that hold the
    episode itself, that give a turn without company no advantage, or that divide by a standard deviation (GiGPO, Feng et al., 2025,
    arXiv:2505.10978) do bias it.

    Args:
        score: ``[B, T]``, the return from each turn on.
        state: ``[B, T]`` int64, equal for turns in the same state.
        group_id: ``[B]`` int64.
        acted: ``[B, T]`` bool, the turns that were decided.
        alone: a turn whose state no other episode of the group was in is compared with the mean of the others at the same ``"turn"``
            (0 for an episode that is over by then), or keeps its ``"return"``.
        unit: ``[B, T]`` int64, :func:`tree_units` of rows of trees; ``None``: every episode is one.
        group_size, partial: see :func:`group_relative`.

    Returns:
        ``[B, T]``, float32 or wider; 0 where nothing was decided.

    Examples:
        >>> score, state = torch.tensor([[1.0, 0.0], [3.0, 4.0]]), torch.tensor([[7, 8], [7, 7]])
        >>> state_relative(score, state, torch.tensor([0, 0]), torch.ones(2, 2, dtype=torch.bool), "return")
        tensor([[-2.5000,  0.0000],
                [ 2.0000,  3.0000]])
    """
    check_shapes(score=score, state=state, acted=acted)
    check_value("alone", alone, Alone)
    check_value("partial", partial, Partial)
    if group_id.shape != score.shape[:1]:
        raise ValueError(
            f"Expected score [B, T] and group_id [B]; got {tuple(score.shape)} and {tuple(group_id.shape)}."
        )
    score = masked(score, acted)
    if not score.numel():
        return score
    labels, group, counts = group_id.unique(return_inverse=True, return_counts=True)
    if partial == "error":
        check_groups(labels, counts, group_size)
    unit = _episodes(state) if unit is None else unit
    others, company = _of_others(score, state, group, acted, unit)
    fallback = mean_of_others(score, group, unit) if alone == "turn" else torch.zeros_like(others)
    baseline = torch.where(company > 0, others / company.clamp_min(1), fallback)
    return masked(score - baseline.to(score.dtype), acted)


def state_company(state: Tensor, group_id: Tensor, acted: Tensor, unit: Tensor | None = None) -> Tensor:
    """How many turns of the other episodes of its group :func:`state_relative` compares each turn with.

    Args:
        state: ``[B, T]`` int64, equal for turns in the same state.
        group_id: ``[B]`` int64.
        acted: ``[B, T]`` bool, the turns that were decided.
        unit: see :func:`state_relative`.

    Returns:
        ``[B, T]`` int64; 0 for a turn that is alone in its state, and where nothing was decided.

    Examples:
        >>> state = torch.tensor([[7, 8], [7, 7]])
        >>> state_company(state, torch.tensor([0, 0]), torch.ones(2, 2, dtype=torch.bool))
        tensor([[2, 0],
                [1, 1]])
    """
    check_shapes(state=state, acted=acted)
    if not state.numel():
        return torch.zeros_like(state)
    unit = _episodes(state) if unit is None else unit
    group = group_id.unique(return_inverse=True)[1]
    return torch.where(acted, _of_others(acted.float(), state, group, acted, unit)[1], 0)


def _episodes(state: Tensor) -> Tensor:
    return torch.arange(len(state), device=state.device).view(-1, 1).expand_as(state)


def _of_others(score: Tensor, state: Tensor, group: Tensor, acted: Tensor, unit: Tensor) -> tuple[Tensor, Tensor]:
    """Sum and number, ``[B, T]``, of the scores of turns in the same state that do not depend on a turn's action."""
    # A turn without a decision is in a state of its own, so that it is no company.
    silent = torch.where(acted, -1, torch.arange(state.numel(), device=state.device).view_as(state))
    visit = torch.stack([group.view(-1, 1).expand_as(state), torch.where(acted, state, 0), silent], -1).flatten(0, 1)
    of_group = visit.unique(dim=0, return_inverse=True)[1].view_as(state)

    size = max(int(unit.max()) + 1, len(state))

    def within(label: Tensor) -> tuple[Tensor, Tensor]:
        return label_totals(score, (of_group * size + label).unique(return_inverse=True)[1])

    # On a turn before the branch all of its tree depends, also behind; on one from the branch on its own row, also the turns
    # before, whose returns hold what it earned.
    of_tree = unit == unit[:, :1]
    (total, number), tree, row = label_totals(score, of_group), within(unit[:, :1]), within(_episodes(state))
    ours, count = (torch.where(of_tree, *both) for both in zip(tree, row, strict=True))
    return total - ours, number - count
