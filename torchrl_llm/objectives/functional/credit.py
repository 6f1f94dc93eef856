"""Returns, advantages, and their normalization over a batch or a group."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial as bind
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from torchrl_llm.objectives.functional._common import (
    all_sum,
    check_choice,
    check_shapes,
    importance_ratio,
    masked,
    wide,
)
from torchrl_llm.objectives.functional.turns import edge_positions, turn_lengths

Baseline = Literal["mean", "leave_one_out"]
Scale = Literal["std", "none"]
Partial = Literal["error", "allow"]

SPREAD_TOLERANCE = 1e-6
"""Numbers whose standard deviation is at most this times ``max(1, |mean|)`` count as equal."""


def _reverse_scan(x: Tensor, decay: Tensor, last: Tensor | None = None) -> Tensor:
    """``y_t = x_t + decay_t * y_{t+1}`` along the last dimension, with ``y_T = last``, in log2(T) steps.

    Recursive doubling (Hillis and Steele, 1986, "Data parallel algorithms").
    """
    if last is not None:
        x = torch.cat([x[:, :-1], x[:, -1:] + decay[:, -1:] * last.unsqueeze(-1)], -1)
    step = 1
    while step < x.shape[-1]:
        x = x + decay * pad(x[:, step:], (0, step))
        decay = decay * pad(decay[:, step:], (0, step))
        step *= 2
    return x


def _turn_inputs(
    reward: Tensor, mask: Tensor, bootstrap: Tensor | None, acted: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Sanitized reward ``[B, T]``, bootstrap ``[B]`` and acted ``[B, T]``."""
    check_shapes(reward=reward, mask=mask, acted=acted)
    reward = masked(reward, mask)
    bootstrap = reward.new_zeros(reward.shape[0]) if bootstrap is None else wide(bootstrap)
    return reward, bootstrap, mask if acted is None else mask & acted


def turn_returns(
    reward: Tensor, mask: Tensor, gamma: float, bootstrap: Tensor | None = None, *, acted: Tensor | None = None
) -> Tensor:
    """Discounted returns: ``G_k = r_k + gamma * G_{k+1}``, from every turn to the end of the episode.

    Args:
        reward: ``[B, T]``.
        mask: ``[B, T]`` bool, the turns that were played. A gap in it costs no discount.
        gamma: discount per turn.
        bootstrap: ``[B]``, what follows the last turn; 0 by default.
        acted: ``[B, T]`` bool, the turns with an action token; all of ``mask`` by default. A turn that was played
            without one counts as time and reward, but is no decision: it is folded into the one before.

    Returns:
        ``[B, T]``, float32 or wider; 0 where nothing was decided.

    Examples:
        >>> reward, mask = torch.tensor([[0.0, 5.0, 1.0]]), torch.tensor([[True, False, True]])
        >>> turn_returns(reward, mask, 0.5)
        tensor([[0.5000, 0.0000, 1.0000]])
    """
    reward, bootstrap, acted = _turn_inputs(reward, mask, bootstrap, acted)
    decay = torch.where(mask, gamma, torch.ones_like(reward))
    return masked(_reverse_scan(reward, decay, bootstrap), acted)


def episode_return(reward: Tensor, mask: Tensor, gamma: float = 1.0) -> Tensor:
    """The discounted return of each whole episode, seen from its first turn.

    Args:
        reward: ``[B, T]``.
        mask: ``[B, T]`` bool, the turns that were played. A gap in it costs no discount.
        gamma: discount per turn.

    Returns:
        ``[B]``, float32 or wider.

    Examples:
        >>> episode_return(torch.tensor([[1.0, 9.0, 1.0]]), torch.tensor([[True, False, True]]), gamma=0.5)
        tensor([1.5000])
    """
    check_shapes(reward=reward, mask=mask)
    reward = masked(reward, mask)
    return (reward * discount(mask, gamma).to(reward.dtype)).sum(1)


def discount(mask: Tensor, gamma: float) -> Tensor:
    """What a reward of each step is worth at the start: ``gamma`` to the number of steps before it.

    Args:
        mask: ``[B, T]`` bool, the turns (or action tokens) that were played. A gap in it costs no discount.
        gamma: discount per step.

    Returns:
        ``[B, T]`` float64; 0 off the mask.

    Examples:
        >>> discount(torch.tensor([[True, False, True, True]]), 0.5)
        tensor([[1.0000, 0.0000, 0.5000, 0.2500]], dtype=torch.float64)
    """
    before = (mask.cumsum(1) - mask.long()).double()
    return torch.where(mask, gamma**before, 0.0)


def turn_gae(
    reward: Tensor,
    value: Tensor,
    mask: Tensor,
    gamma: float,
    lmbda: float,
    bootstrap: Tensor | None = None,
    *,
    acted: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation with a turn as the step (Schulman et al., 2016, arXiv:1506.02438, eq. 16).

    ``delta_k = r_k + gamma * V_{k+1} - V_k``; ``A_k = delta_k + gamma * lmbda * A_{k+1}``; ``target_k = A_k + V_k``.
    A turn that was played without an action token is folded into the decision before it, which then spans two steps of
    time: ``delta = r + gamma * r' + gamma^2 * V_next - V``, and the next advantage decays by ``gamma^2 * lmbda``.
    Before the first decision there is nothing to fold into: such a reward is nobody's credit.

    Args:
        reward: ``[B, T]``.
        value: ``[B, T]``, the value of the state in which each turn was played.
        mask: ``[B, T]`` bool, the turns that were played. A gap in it costs no discount.
        gamma: discount per turn.
        lmbda: the trade-off of bias against variance, per decision.
        bootstrap: ``[B]``, the value of what follows the last turn; 0 by default (the episode terminated).
        acted: ``[B, T]`` bool, the turns with an action token; all of ``mask`` by default.

    Returns:
        advantage and value target, ``[B, T]`` each, float32 or wider; 0 where nothing was decided.

    Examples:
        >>> reward, value = torch.tensor([[0.0, 1.0]]), torch.tensor([[0.5, 0.5]])
        >>> turn_gae(reward, value, torch.ones(1, 2, dtype=torch.bool), gamma=1.0, lmbda=1.0)
        (tensor([[0.5000, 0.5000]]), tensor([[1., 1.]]))
    """
    check_shapes(reward=reward, value=value)
    reward, bootstrap, acted = _turn_inputs(reward, mask, bootstrap, acted)
    value = masked(value, acted)
    idle = _idle_discount(reward, mask, gamma)
    delta = masked(reward + gamma * _next_values(reward, value, acted, idle, bootstrap) - value, acted)
    advantage = masked(_reverse_scan(delta, torch.where(acted, gamma * lmbda, idle)), acted)
    return advantage, advantage + value


def _idle_discount(reward: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """What a turn without a decision costs: the discount if it was played, nothing in a gap; ``[B, T]``."""
    return torch.where(mask, gamma, torch.ones_like(reward))


def _next_values(reward: Tensor, value: Tensor, acted: Tensor, idle: Tensor, bootstrap: Tensor) -> Tensor:
    """The value of what follows each turn, ``[B, T]``: that of the next decision, rewards in between included."""
    ahead = _reverse_scan(torch.where(acted, value, reward), torch.where(acted, 0.0, idle), bootstrap)
    return torch.cat([ahead[:, 1:], bootstrap.unsqueeze(-1).to(ahead.dtype)], -1)


def turn_vtrace(
    reward: Tensor,
    value: Tensor,
    log_rho: Tensor,
    mask: Tensor,
    gamma: float,
    bootstrap: Tensor | None = None,
    *,
    rho_clip: float = 1.0,
    c_clip: float = 1.0,
    acted: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """V-trace with a turn as the step, for conversations of an older policy (Espeholt et al., 2018, arXiv:1802.01561).

    ``v_k = V_k + rho_k delta_k + gamma c_k (v_{k+1} - V_{k+1})``, with ``rho_k = min(rho_clip, ratio_k)``,
    ``c_k = min(c_clip, ratio_k)`` and ``delta_k = r_k + gamma V_{k+1} - V_k`` (eq. 1); the advantage is
    ``rho_k (r_k + gamma v_{k+1} - V_k)`` (sec. 4.2). On-policy, without clips, the target is the return.

    Args:
        reward: ``[B, T]``.
        value: ``[B, T]``, the value of the state in which each turn was played.
        log_rho: ``[B, T]``, log of the turn's probability under the present policy over that under the one that played.
        mask: ``[B, T]`` bool, the turns that were played. A gap in it costs no discount.
        gamma: discount per turn.
        bootstrap: ``[B]``, the value of what follows the last turn; 0 by default (the episode terminated).
        rho_clip: cap of the ratio in the advantage and in ``delta``; it decides whose value is learned.
        c_clip: cap of the ratio on the way back; it decides how fast.
        acted: ``[B, T]`` bool, the turns with an action token; all of ``mask`` by default.

    Returns:
        advantage and value target, ``[B, T]`` each, float32 or wider; 0 where nothing was decided. The advantage holds
        the ratio already.

    Examples:
        >>> reward, value = torch.tensor([[0.0, 1.0]]), torch.tensor([[0.5, 0.5]])
        >>> log_rho, mask = torch.tensor([[1.0, 0.5]]).log(), torch.ones(1, 2, dtype=torch.bool)
        >>> turn_vtrace(reward, value, log_rho, mask, gamma=1.0)
        (tensor([[0.2500, 0.2500]]), tensor([[0.7500, 0.7500]]))
    """
    check_shapes(reward=reward, value=value, log_rho=log_rho)
    reward, bootstrap, acted = _turn_inputs(reward, mask, bootstrap, acted)
    value, ratio = masked(value, acted), importance_ratio(masked(log_rho, acted))
    idle, rho = _idle_discount(reward, mask, gamma), ratio.clamp_max(rho_clip)

    def surprise(values: Tensor) -> Tensor:
        return masked(rho * (reward + gamma * _next_values(reward, values, acted, idle, bootstrap) - value), acted)

    decay = torch.where(acted, gamma * ratio.clamp_max(c_clip), idle)
    target = value + masked(_reverse_scan(surprise(value), decay), acted)
    return surprise(target), target


def token_rewards(reward: Tensor, turn_ids: Tensor, mask: Tensor) -> Tensor:
    """Put each turn's reward on its last action token, and that of a turn without token on the last one before it.

    Args:
        reward: ``[B, T]``.
        turn_ids: ``[B, L]`` int64, -1 off actions.
        mask: ``[B, T]`` bool, the turns that were played.

    Returns:
        ``[B, L]``, float32 or wider. A reward before the first action token is nobody's credit and is left out.

    Examples:
        >>> token_rewards(torch.tensor([[1.0, 2.0]]), torch.tensor([[-1, 0, 0, -1, 1]]), torch.ones(1, 2) > 0)
        tensor([[0., 0., 1., 0., 2.]])
    """
    check_shapes(reward=reward, mask=mask)
    num_turns = reward.shape[1]
    acted = turn_lengths(turn_ids, num_turns) > 0
    order = torch.arange(num_turns, device=reward.device).expand_as(acted)
    host = torch.where(acted, order, -1).cummax(1).values
    credit = masked(reward, mask & (host >= 0))
    credit = torch.zeros_like(credit).scatter_add(1, host.clamp_min(0), credit)
    target = edge_positions(turn_ids, num_turns, "last")
    return credit.new_zeros(turn_ids.shape).scatter_add(1, target, masked(credit, acted))


def token_gae(
    reward: Tensor,
    value: Tensor,
    turn_ids: Tensor,
    mask: Tensor,
    gamma: float,
    lmbda: float,
    bootstrap: Tensor | None = None,
    *,
    penalty: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation with an action token as the step.

    ``gamma`` and ``lmbda`` apply per action token. Prompt and feedback tokens cost nothing and do not cut credit; the
    reward lies where :func:`token_rewards` puts it.

    Args:
        reward: ``[B, T]``, per turn.
        value: ``[B, L]``, token-aligned: index i is the value of the prefix before token i.
        turn_ids: ``[B, L]`` int64, -1 off actions.
        mask: ``[B, T]`` bool, the turns that were played.
        gamma: discount per action token.
        lmbda: the trade-off of bias against variance, per action token.
        bootstrap: ``[B]``, the value of what follows the last token; 0 by default.
        penalty: ``[B, L]``, added to the tokens' rewards: a KL penalty.

    Returns:
        advantage and value target, ``[B, L]`` each, float32 or wider; 0 off actions.

    Examples:
        >>> turn_ids, mask = torch.tensor([[-1, 0, 0, -1, 1]]), torch.ones(1, 2, dtype=torch.bool)
        >>> advantage, _ = token_gae(torch.tensor([[0.0, 1.0]]), torch.zeros(1, 5), turn_ids, mask, 1.0, 0.5)
        >>> advantage
        tensor([[0.0000, 0.2500, 0.5000, 0.0000, 1.0000]])
    """
    rewards = token_rewards(reward, turn_ids, mask)
    if penalty is not None:
        rewards = rewards + penalty
    return turn_gae(rewards, value, turn_ids >= 0, gamma, lmbda, bootstrap)


def overlong_penalty(length: Tensor, max_length: int, buffer: int) -> Tensor:
    """Soft punishment of responses that near the limit (DAPO, Yu et al., 2025, arXiv:2503.14476, eq. 13).

    0 up to ``max_length - buffer`` tokens, then falling linearly to -1 at ``max_length``, and -1 beyond.

    Args:
        length: any shape, tokens of each response.
        max_length: the limit, in tokens.
        buffer: over how many tokens before the limit the penalty grows, 0 < buffer <= max_length.

    Returns:
        The shape of ``length``, float32 or wider, in [-1, 0].

    Examples:
        >>> overlong_penalty(torch.tensor([10, 16, 20, 24]), max_length=20, buffer=8)
        tensor([ 0.0000, -0.5000, -1.0000, -1.0000])
    """
    if not 0 < buffer <= max_length:
        raise ValueError(f"buffer is {buffer} and max_length {max_length}; expected 0 < buffer <= max_length.")
    return ((max_length - buffer - wide(length)) / buffer).clamp(-1.0, 0.0) + 0.0


Statistics = tuple[Tensor, Tensor, Tensor]
"""Mean, standard deviation, and whether there is a spread at all; each broadcasts to what it is of."""


def _has_spread(mean: Tensor, std: Tensor) -> Tensor:
    return std > SPREAD_TOLERANCE * mean.abs().clamp_min(1.0)


@torch.no_grad()
def _batch_statistics(x: Tensor, mask: Tensor, ddof: int, process_group: dist.ProcessGroup | None) -> Statistics:
    """Statistics over ``mask``, all ranks of the group included."""
    x = masked(x, mask)
    total, count = all_sum(torch.stack([x.sum(), mask.sum().to(x.dtype)]), process_group)
    mean = total / count.clamp_min(1.0)
    square = all_sum(masked(x - mean, mask).square().sum(), process_group)
    std = torch.where(count > ddof, square / (count - ddof).clamp_min(1.0), 0.0).sqrt()
    return mean, std, _has_spread(mean, std)


def _center(score: Tensor, penalty: Tensor | None, statistics: Callable[[Tensor], Statistics]) -> Statistics:
    """``score + penalty`` without its mean, its standard deviation, and whether ``score`` alone has a spread.

    Without a spread the score counts for 0, so that rounding noise is never blown up to unit variance.
    """
    spread = statistics(score)[2]
    score = torch.where(spread, score, 0.0)
    if penalty is not None:
        score = score + wide(penalty)
    mean, std, _ = statistics(score)
    return score - mean, std, spread


def standardize(
    x: Tensor,
    mask: Tensor,
    ddof: int = 1,
    eps: float = 1e-8,
    process_group: dist.ProcessGroup | None = None,
    *,
    penalty: Tensor | None = None,
) -> Tensor:
    """``(x - mean) / (std + eps)`` over ``mask``: :func:`masked_whiten`, and :func:`rebn`, whose penalty it takes.

    Numbers that are equal but for rounding (``std <= 1e-6 * max(1, |mean|)``) become 0, and the penalty enters centered but
    unscaled. Mean and standard deviation are constants to autograd.

    Args:
        x: any shape.
        mask: bool, the shape of ``x``.
        ddof: the variance divides by ``count - ddof``.
        eps: added to the standard deviation.
        process_group: take the statistics over all ranks of this group (``None``: of this process only).
        penalty: the shape of ``x``, added to it. Whether there is a spread is judged on ``x`` alone.

    Returns:
        The shape of ``x``, float32 or wider; 0 off the mask.

    Examples:
        >>> standardize(torch.tensor([1.0, 3.0, 99.0]), torch.tensor([True, True, False]), ddof=0)
        tensor([-1.,  1.,  0.])
    """
    check_shapes(x=x, mask=mask, penalty=penalty)
    statistics = bind(_batch_statistics, mask=mask, ddof=ddof, process_group=process_group)
    penalty = None if penalty is None else masked(penalty, mask)
    centered, std, spread = _center(masked(x, mask), penalty, statistics)
    return masked(centered / torch.where(spread, std + eps, 1.0), mask)


def masked_whiten(
    x: Tensor, mask: Tensor, ddof: int = 1, eps: float = 1e-8, process_group: dist.ProcessGroup | None = None
) -> Tensor:
    """Advantages ``x`` with mean 0 and variance 1 over ``mask``, see :func:`standardize`.

    Examples:
        >>> masked_whiten(torch.tensor([1.0, 3.0, 99.0]), torch.tensor([True, True, False]), ddof=0)
        tensor([-1.,  1.,  0.])
    """
    return standardize(x, mask, ddof, eps, process_group)


def rebn(
    returns: Tensor,
    mask: Tensor,
    ddof: int = 1,
    eps: float = 1e-8,
    process_group: dist.ProcessGroup | None = None,
    *,
    penalty: Tensor | None = None,
) -> Tensor:
    """Return batch normalization: ``A = (G - mean) / (std + eps)`` over all valid (episode, turn) pairs.

    Args:
        returns: ``[B, T]``, the returns of the environment's rewards.
        mask: ``[B, T]`` bool, the turns that count.
        ddof, eps, process_group: see :func:`standardize`.
        penalty: ``[B, T]``, added to the returns: those of a KL penalty in the reward. Whether there is a spread is judged on
            ``returns`` alone. Where they do not differ they count for 0 and the penalty enters centered but unscaled.

    Returns:
        ``[B, T]`` advantages, float32 or wider; 0 off the mask. Mean and deviation are constants to autograd.

    Examples:
        >>> mask = torch.ones(1, 2, dtype=torch.bool)
        >>> rebn(torch.tensor([[1.0, 3.0]]), mask, ddof=0)
        tensor([[-1.,  1.]])
        >>> rebn(torch.tensor([[3.0, 3.0]]), mask, penalty=torch.tensor([[-0.25, -0.75]]))
        tensor([[ 0.2500, -0.2500]])
    """
    return standardize(returns, mask, ddof, eps, process_group, penalty=penalty)


def _check_groups(labels: Tensor, counts: Tensor, group_size: int | None) -> None:
    expected = int(counts.max()) if group_size is None else group_size
    wrong = counts != expected
    if bool(wrong.any()):
        named = ", ".join(f"{g} ({n})" for g, n in zip(labels[wrong].tolist(), counts[wrong].tolist(), strict=True))
        raise ValueError(
            f"Expected {expected} conversations in every group; got group (size) {named}. Pass whole groups, or "
            'partial="allow" if part of a group is meant.'
        )


@torch.no_grad()
def _group_statistics(x: Tensor, index: Tensor, size: Tensor, ddof: int) -> Statistics:
    """Statistics of each row's group, in the shape of ``x``."""
    zeros = x.new_zeros(len(size), *x.shape[1:])
    mean = zeros.index_add(0, index, x) / size
    square = zeros.index_add(0, index, (x - mean[index]).square())
    std = torch.where(size > ddof, square / (size - ddof).clamp_min(1.0), 0.0).sqrt()
    return mean[index], std[index], _has_spread(mean, std)[index]


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
) -> Tensor:
    """Score against the conversations of the same group (GRPO, Shao et al., 2024, arXiv:2402.03300, sec. 4.1.2).

    ``"leave_one_out"`` takes the mean of the others (RLOO, Ahmadian et al., 2024, arXiv:2402.14740); ``scale="none"``
    leaves out the division (Dr. GRPO, Liu et al., 2025, arXiv:2503.20783).

    Args:
        score: ``[B]``, the episode's return; or ``[B, T]``, compared column by column: the return from each turn on,
            0 for a conversation that is over by then.
        group_id: ``[B]`` int64.
        baseline: what is subtracted: the group's mean or that of the others.
        scale: divide by the group's standard deviation, or not.
        ddof: the variance divides by ``size - ddof``.
        eps: added to the standard deviation.
        group_size: how many conversations a group has; ``None``: as many as the largest one in the batch.
        partial: ``"error"`` raises ``ValueError`` on a group of another size, ``"allow"`` takes what there is.
        penalty: the shape of ``score``, added to it: that of a KL penalty in the reward. Whether there is a spread is
            judged on ``score`` alone. Where it has none it counts for 0 and the penalty enters centered but unscaled.

    Returns:
        The shape of ``score``, float32 or wider; without a penalty 0 in a group of one and where a group's scores do not
        differ (``std <= 1e-6 * max(1, |mean|)``).

    Examples:
        >>> group_relative(torch.tensor([0.0, 1.0, 5.0, 5.0]), torch.tensor([4, 4, 9, 9]), scale="none")
        tensor([-0.5000,  0.5000,  0.0000,  0.0000])
    """
    if score.shape[:1] != group_id.shape:
        raise ValueError(
            f"Expected score [B] or [B, T] and group_id [B]; got {tuple(score.shape)} and {tuple(group_id.shape)}."
        )
    check_shapes(score=score, penalty=penalty)
    for name, value, choices in (
        ("baseline", baseline, Baseline),
        ("scale", scale, Scale),
        ("partial", partial, Partial),
    ):
        check_choice(name, value, choices)
    if baseline == "leave_one_out" and scale == "std":
        raise ValueError('baseline="leave_one_out" with scale="std" is biased; use scale="none", or baseline="mean".')
    score = wide(score)
    if score.numel() == 0:
        return score
    labels, index, counts = group_id.unique(return_inverse=True, return_counts=True)
    if partial == "error":
        _check_groups(labels, counts, group_size)
    size = counts.to(score.dtype).view(-1, *[1] * (score.ndim - 1))
    centered, std, spread = _center(score, penalty, bind(_group_statistics, index=index, size=size, ddof=ddof))
    if baseline == "leave_one_out":
        return centered * (size / (size - 1).clamp_min(1.0))[index]
    return centered * torch.where(spread, std + eps, 1.0).reciprocal() if scale == "std" else centered
