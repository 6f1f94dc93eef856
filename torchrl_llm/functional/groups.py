"""Scores relative to the scores of other episodes: of the same group, or with the same label."""

from __future__ import annotations

from functools import partial as bind
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from torchrl_llm.functional._common import check_shapes, masked, wide
from torchrl_llm.functional.statistics import Statistics, batch_statistics, center, has_spread
from torchrl_llm.functional.units import mean_of_others
from torchrl_llm.utils.options import check_value

__all__ = ["Baseline", "Partial", "Scale", "group_relative", "leave_one_out"]

Baseline = Literal["mean", "leave_one_out"]
"""What a score is compared with, see :func:`group_relative`."""


Scale = Literal["std", "batch", "mean", "none"]
"""What centered scores are divided by."""


Partial = Literal["error", "allow"]
"""What happens to groups of another size."""


def check_groups(labels: Tensor, counts: Tensor, group_size: int | None) -> None:
    expected = int(counts.max()) if group_size is None else group_size
    wrong = counts != expected
    if bool(wrong.any()):
        named = ", ".join(f"{g} ({n})" for g, n in zip(labels[wrong].tolist(), counts[wrong].tolist(), strict=True))
        raise ValueError(
            f"Expected {expected} episodes in every group; got group (size) {named}. Pass whole groups, or "
            'partial="allow" if part of a group is meant.'
        )


@torch.no_grad()
def _group_statistics(x: Tensor, index: Tensor, size: Tensor, ddof: int) -> Statistics:
    """Statistics of each row's group, in the shape of ``x``."""
    zeros = x.new_zeros(len(size), *x.shape[1:])
    mean = zeros.index_add(0, index, x) / size
    square = zeros.index_add(0, index, (x - mean[index]).square())
    std = torch.where(size > ddof, square / (size - ddof).clamp_min(1.0), 0.0).sqrt()
    return mean[index], std[index], has_spread(mean, std)[index]


def group_relative(
    score: Tensor,
    group_id: Tensor,
    baseline: Baseline = "mean",
    scale: Scale = "std",
    ddof: int = 1,
    eps: float = 1e-6,
    *,
    group_size: int | None = None,
    partial: Partial = "error",
    penalty: Tensor | None = None,
    mask: Tensor | None = None,
    unit: Tensor | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Score relative to the episodes of the same group (GRPO, Shao et al., 2024, arXiv:2402.03300,
    sec. 4.1.2).

    ``"leave_one_out"`` takes the mean of the others (RLOO, Ahmadian et al., 2024,
    arXiv:2402.14740); ``scale="none"`` leaves out the division (Dr. GRPO, Liu et al., 2025,
    arXiv:2503.20783); ``scale="batch"`` divides by the standard deviation of the whole batch (Liu
    et al., 2025, arXiv:2508.08221), so that a rare outcome does not weigh more than others where
    the rest of its group agrees. ``scale="mean"`` divides by the group's mean (MaxRL, Tajwar et
    al., 2026, arXiv:2602.02710, eq. 10): for scores of 0 and 1 in groups of ``n`` the expected
    gradient is the gradient of ``pass@1 + pass@2 / 2 + ... + pass@(n-1) / (n-1)``, which becomes
    the logarithm of the success rate as ``n`` grows.

    Args:
        score: ``[B]``, the episode's return; or ``[B, T]``, compared column by column: the return
            from each turn on, 0 for an episode that is over by then.
        group_id: ``[B]`` int64.
        baseline: subtract the group's mean, or the mean of the others.
        scale: divide by the standard deviation of the group's scores (``"std"``), or of all
            scores (``"batch"``), by the ``"mean"`` of the group's scores, which must not be
            negative, or not.
        ddof: the variance divides by ``size - ddof``.
        eps: added to the standard deviation (and not to the mean, which is not 0 where scores
            differ).
        group_size: how many episodes a group has; ``None``: as many as the largest one in the
            batch.
        partial: ``"error"`` raises ``ValueError`` on a group of another size, ``"allow"`` takes
            what there is.
        penalty: the shape of ``score``, added to it: the return of a KL penalty in the reward.
            Whether there is a spread is judged on ``score`` alone. Where it has none it counts for
            0 and the penalty enters centered but unscaled.
        mask: bool, the shape of ``score``: the scores of which ``"batch"`` takes the standard
            deviation; ``None``: all.
        unit: int64, the shape of ``score``, see :data:`torchrl_llm.keys.TURN_UNIT`:
            ``"leave_one_out"`` leaves out the unit, and needs another one in the group; ``None``:
            every episode is one.
        process_group: ``"batch"`` means the rows of all ranks of this group (``None``: of this
            process only).

    Returns:
        The shape of ``score``, float32 or wider; without a penalty 0 in a group of one and where a
        group's scores do not differ (``std <= 1e-6 * max(1, |mean|)``); NaN in a group of which a
        score is NaN or infinite (``"batch"``: everywhere).

    Raises:
        ValueError: options that do not go together, a part of a group, or
            ``scale="mean"`` with a negative score.

    Examples:
        >>> group_relative(torch.tensor([0.0, 1.0, 5.0, 5.0]), torch.tensor([4, 4, 9, 9]), scale="none")
        tensor([-0.5000,  0.5000,  0.0000,  0.0000])
        >>> group_relative(torch.tensor([0.0, 0.0, 0.0, 1.0]), torch.tensor([4, 4, 4, 4]), scale="mean")
        tensor([-1., -1., -1.,  3.])
    """
    if score.shape[:1] != group_id.shape:
        raise ValueError(
            f"Expected score [B] or [B, T] and group_id [B]; got {tuple(score.shape)} and {tuple(group_id.shape)}."
        )
    check_shapes(score=score, penalty=penalty, mask=mask, unit=unit)
    check_value("baseline", baseline, Baseline)
    check_value("scale", scale, Scale)
    check_value("partial", partial, Partial)
    if baseline == "leave_one_out" and scale != "none":
        raise ValueError(
            f'baseline="leave_one_out" with scale="{scale}" is biased; use scale="none", or baseline="mean".'
        )
    if unit is not None and baseline != "leave_one_out":
        raise ValueError(f'baseline="{baseline}" is biased where rows count as one (unit); use "leave_one_out".')
    score = wide(score)
    if scale == "batch":
        # Before a rank without rows returns, for which the others would wait.
        total = score if penalty is None else score + wide(penalty)
        counted = torch.ones_like(score, dtype=torch.bool) if mask is None else mask
        whole = batch_statistics(total, counted, ddof, process_group)[1]
    if score.numel() == 0:
        return score
    if scale == "mean" and bool((score < 0).any()):
        raise ValueError(
            f'scale="mean" divides by the mean of scores that are at least 0, such as outcomes of 0 and 1, and one is '
            f"{score.min():.3g}: pay no negative rewards, or use another scale."
        )
    labels, index, counts = group_id.unique(return_inverse=True, return_counts=True)
    if partial == "error":
        check_groups(labels, counts, group_size)
    if unit is not None:
        total = score if penalty is None else score + wide(penalty)
        columns = total.view(len(total), -1)
        return (columns - mean_of_others(columns, index, unit.view_as(columns))).view_as(total).to(total.dtype)
    size = counts.to(score.dtype).view(-1, *[1] * (score.ndim - 1))
    statistics = bind(_group_statistics, index=index, size=size, ddof=ddof)
    centered, std, spread = center(score, penalty, statistics)
    if baseline == "leave_one_out":
        # x - mean of the others = (x - mean) * n / (n - 1).
        return centered * (size / (size - 1).clamp_min(1.0))[index]
    if scale == "none":
        return centered
    # The mean is taken over the scores alone: a penalty may be of any sign.
    divisor = statistics(score)[0] if scale == "mean" else (std if scale == "std" else whole) + eps
    return centered / torch.where(spread, divisor, 1.0)


def leave_one_out(
    score: Tensor, label: Tensor, counted: Tensor, process_group: dist.ProcessGroup | None = None
) -> tuple[Tensor, Tensor]:
    """Score relative to the mean of the others with the same label, of a batch that several
    processes may share.

    What :func:`group_relative` with ``baseline="leave_one_out"`` is within groups, which no process
    cuts.

    Args:
        score: ``[B]``; or ``[B, T]``, compared column by column, 0 for an episode that is over by
            then. ``T`` may differ between processes.
        label: ``[B, n]`` int64, numbers that mean the same in every process.
        counted: ``[B]`` bool, the rows that others are compared with.
        process_group: compare with the rows of all ranks of this group (``None``: of this process
            only).

    Returns:
        The relative score, in the shape of ``score``, float32 or wider, 0 where there is no other;
        and how many others there are, ``[B]`` int64. Both are meaningless for rows that do not
        count.

    Examples:
        >>> label = torch.tensor([[0], [0], [0], [1]])
        >>> leave_one_out(torch.tensor([1.0, 3.0, 8.0, 5.0]), label, torch.ones(4, dtype=torch.bool))
        (tensor([-4.5000, -1.5000,  6.0000,  0.0000]), tensor([2, 2, 2, 0]))
    """
    labels, index = label.unique(dim=0, return_inverse=True)
    columns = masked(score if score.ndim == 2 else score.unsqueeze(1), counted.unsqueeze(1)).double()
    counts = counted.new_zeros(len(labels), dtype=torch.int64).index_add(0, index, counted.long())
    sums = columns.new_zeros(len(labels), columns.shape[1]).index_add(0, index, columns)
    if process_group is not None:
        sums, counts = _over_ranks(labels, sums, counts, process_group)
    others = counts[index] - 1
    mean = (sums[index] - columns) / others.clamp_min(1).unsqueeze(-1)
    relative = torch.where(others.unsqueeze(-1) > 0, columns - mean, 0.0)
    return relative.view_as(score).to(wide(score).dtype), others


def _over_ranks(
    labels: Tensor, sums: Tensor, counts: Tensor, process_group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Sums ``[n, T]`` and counts ``[n]`` of the labels of this rank, with what the same labels have
    on the others."""
    ranks: list[Any] = [None] * dist.get_world_size(process_group)
    # As objects: ranks have different labels, and episodes of different length.
    dist.all_gather_object(ranks, [x.cpu() for x in (labels, sums, counts)], group=process_group)
    width = max(each.shape[1] for _, each, _ in ranks)
    place = {label: i for i, label in enumerate(map(tuple, labels.tolist()))}
    total, number = sums.new_zeros(len(labels), width), torch.zeros_like(counts)
    for other_labels, other_sums, other_counts in ranks:
        for label, values, count in zip(map(tuple, other_labels.tolist()), other_sums, other_counts, strict=True):
            if (i := place.get(label)) is not None:
                total[i, : len(values)] += values.to(total.device)
                number[i] += int(count)
    return total[:, : sums.shape[1]], number
