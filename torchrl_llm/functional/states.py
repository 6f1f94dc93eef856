"""States that turns share, and returns compared among the turns of a state."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from torchrl_llm.functional._common import check_shapes, joint_labels, label_totals, masked
from torchrl_llm.functional.edges import edge_positions
from torchrl_llm.functional.groups import Partial, check_groups
from torchrl_llm.functional.turns import turn_lengths
from torchrl_llm.functional.units import mean_of_others
from torchrl_llm.utils.options import check_value

__all__ = ["Fallback", "num_compared", "observation_states", "prefix_states", "state_relative"]

Fallback = Literal["turn", "return"]
"""What a turn is compared with whose state no other episode of its group was in."""


def prefix_states(tokens: Tensor, turn_ids: Tensor, num_turns: int) -> Tensor:
    """Number the turns by all tokens before their first action token: equal numbers mean equal
    tokens, exactly.

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
    # In lexicographic order the rows with a prefix in common are neighbors: a prefix is numbered by
    # the first of them.
    rows, place = tokens.unique(dim=0, return_inverse=True)
    first_difference = (rows[1:] != rows[:-1]).int().argmax(1)
    return _first_alike(first_difference, place, start) * (tokens.shape[1] + 1) + start


def _first_alike(shared: Tensor, place: Tensor, length: Tensor) -> Tensor:
    """The first of sorted rows that begins like another one.

    Args:
        shared: ``[n - 1]`` int64, tokens that each of ``n`` rows has in common with the next.
        place: ``[B]`` int64, rows.
        length: ``[B, T]`` int64, of their beginnings.

    Returns:
        ``[B, T]`` int64, places.
    """
    # The least of the next 2**j numbers from each on: B * T * log(n) look-ups, where comparing all
    # pairs takes B * T * n.
    least, width = [shared], 1
    while 2 * width <= len(shared):
        least.append(torch.minimum(least[-1][:-width], least[-1][width:]))
        width *= 2
    first = place.view(-1, 1).expand_as(length)
    for minima in reversed(least) if len(shared) else ():
        before = first - (len(shared) - len(minima) + 1)
        alike = (before >= 0) & (minima[before.clamp_min(0)] >= length)
        first = torch.where(alike, before, first)
    return first


def observation_states(tokens: Tensor, turn_ids: Tensor, num_turns: int) -> Tensor:
    """Number the turns by what lies between them and the action token before: the last observation,
    in its template.

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
    return _number_texts(tokens, begin, start - begin)


def _number_texts(tokens: Tensor, begin: Tensor, size: Tensor) -> Tensor:
    """Numbers ``[B, T]`` that are equal where texts are: ``size`` tokens of a row from ``begin``
    on, ``[B, T]`` each."""
    number, found, width = torch.zeros_like(begin), 0, 1
    row = torch.arange(len(tokens), device=tokens.device).view(-1, 1).expand_as(begin)
    longest = int(size.max())
    # Equal texts are equally long. So they are compared among texts of about their length: one
    # prompt is as long as many answers.
    while longest:
        chosen = (size <= width) & (size > width // 2)
        column = torch.arange(width, device=tokens.device)
        index = (begin[chosen].unsqueeze(1) + column).clamp_max(tokens.shape[1] - 1)
        text = torch.where(column < size[chosen].unsqueeze(1), tokens[row[chosen].unsqueeze(1), index], -1)
        if len(text):
            texts, place = text.unique(dim=0, return_inverse=True)
            number[chosen] = found + 1 + place
            found += len(texts)
        if width >= longest:
            break
        width *= 2
    return number


def state_relative(
    score: Tensor,
    state: Tensor,
    group_id: Tensor,
    acted: Tensor,
    fallback: Fallback = "turn",
    *,
    unit: Tensor | None = None,
    group_size: int | None = None,
    partial: Partial = "error",
) -> Tensor:
    """Score relative to the turns of the other episodes of the group that were in the same state.

    The baseline of a turn is a mean over turns of *other* episodes, whichever they are: given the
    state it does not depend on the turn's own action, so that no state, however coarse, biases the
    gradient. Groups of states that hold the episode itself, that give a turn that is alone in its
    state no advantage, or that divide by a standard deviation (GiGPO, Feng et al., 2025,
    arXiv:2505.10978) do bias it.

    Args:
        score: ``[B, T]``, the return from each turn on.
        state: ``[B, T]`` int64, equal for turns in the same state.
        group_id: ``[B]`` int64.
        acted: ``[B, T]`` bool, the turns that were decided.
        fallback: a turn whose state no other episode of the group was in is compared with the mean
            of the others at the same ``"turn"`` (0 for an episode that is over by then), or keeps
            its ``"return"``.
        unit: ``[B, T]`` int64, see :data:`torchrl_llm.keys.TURN_UNIT`; ``None``: every episode is
            one.
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
    check_value("fallback", fallback, Fallback)
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
    others, compared = _of_others(score, state, group, acted, unit)
    instead = mean_of_others(score, group, unit) if fallback == "turn" else torch.zeros_like(others)
    baseline = torch.where(compared > 0, others / compared.clamp_min(1), instead)
    return masked(score - baseline.to(score.dtype), acted)


def num_compared(state: Tensor, group_id: Tensor, acted: Tensor, unit: Tensor | None = None) -> Tensor:
    """How many turns of the other episodes of its group :func:`state_relative` compares each turn
    with.

    Args:
        state: ``[B, T]`` int64, equal for turns in the same state.
        group_id: ``[B]`` int64.
        acted: ``[B, T]`` bool, the turns that were decided.
        unit: see :func:`state_relative`.

    Returns:
        ``[B, T]`` int64; 0 for a turn that is alone in its state, and where nothing was decided.

    Examples:
        >>> state = torch.tensor([[7, 8], [7, 7]])
        >>> num_compared(state, torch.tensor([0, 0]), torch.ones(2, 2, dtype=torch.bool))
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
    """Sum and number, ``[B, T]``, of the scores of turns in the same state that do not depend on a
    turn's action."""
    # A turn without a decision is in a state of its own, so that no other is compared with it.
    silent = torch.where(acted, -1, torch.arange(state.numel(), device=state.device).view_as(state))
    of_group = joint_labels(torch.where(acted, state, 0), group.view(-1, 1), silent)
    total, number = label_totals(score, of_group)
    # All turns of a unit's rows depend on an action of the unit, also the turns before, whose
    # returns hold what it earned.
    member = joint_labels(unit, _episodes(state))
    place = torch.arange(state.numel(), device=state.device).view_as(state)
    found = place.new_zeros(int(member.max()) + 1).scatter(0, member.flatten(), place.flatten())
    row, of_unit = found // state.shape[1], unit.flatten()[found].unsqueeze(1)
    totals = label_totals(score[row], joint_labels(of_group[row], of_unit))
    ours, count = (each[member, place[0]] for each in totals)
    return total - ours, number - count
