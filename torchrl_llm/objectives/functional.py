"""The maths of turn-level reinforcement learning: pure functions on tensors.

Everything here is vectorised, keeps no state, draws no random number and accumulates in float32 or wider. ``B``
conversations, ``T`` turns, ``L`` tokens. ``turn_ids [B, L]`` is -1 wherever a token is not an action, and the action
mask is always ``turn_ids >= 0``. Entries off a mask are never read: they may hold anything, NaN included.

Reading and writing TensorDicts is the business of :mod:`torchrl_llm.objectives.advantages` and
:mod:`torchrl_llm.objectives.policy`; no TensorDict appears here.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

ValueReduction = Literal["first", "mean", "last"]
RatioLevel = Literal["token", "turn", "sequence"]
RatioReduction = Literal["sum", "mean"]
WeightKind = Literal["token", "turn", "sequence", "constant"]
KLKind = Literal["k1", "k2", "k3"]
Baseline = Literal["mean", "leave_one_out"]
Scale = Literal["std", "none"]
Partial = Literal["error", "allow"]

SPREAD_TOLERANCE = 1e-6
"""Numbers whose standard deviation is at most this times ``max(1, |mean|)`` count as equal."""


def check_choice(name: str, value: object, choices: Any) -> None:
    """Raise ``ValueError`` unless ``value`` is one of the ``Literal`` type ``choices``.

    Examples:
        >>> check_choice("ratio_level", "word", RatioLevel)
        Traceback (most recent call last):
        ValueError: ratio_level is 'word'; expected one of 'token', 'turn', 'sequence'.
    """
    if value not in get_args(choices):
        raise ValueError(f"{name} is {value!r}; expected one of {', '.join(map(repr, get_args(choices)))}.")


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _masked(x: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, _wide(x), 0.0)


def _check_shapes(**tensors: Tensor | None) -> None:
    shapes = {name: tuple(x.shape) for name, x in tensors.items() if x is not None}
    if len(set(shapes.values())) > 1:
        given = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ValueError(f"Expected tensors of one shape; got {given}.")


def _all_sum(x: Tensor, process_group: dist.ProcessGroup | None) -> Tensor:
    if process_group is None:
        return x
    x = x.detach().clone()
    dist.all_reduce(x, group=process_group)
    return x


# ---------------------------------------------------------------------------------------------------------------------
# Between tokens and turns
# ---------------------------------------------------------------------------------------------------------------------


def count_turns(turn_ids: Tensor) -> int:
    """The smallest ``num_turns`` that holds every id of ``turn_ids [B, L]``, and at least 1.

    Examples:
        >>> count_turns(torch.tensor([[-1, 0, 0, -1, 2]]))
        3
    """
    return max(1, int(turn_ids.max()) + 1) if turn_ids.numel() else 1


def _check_turn_ids(turn_ids: Tensor, num_turns: int) -> None:
    if turn_ids.numel() and int(turn_ids.max()) >= num_turns:
        raise ValueError(
            f"turn_ids holds turn {int(turn_ids.max())}, but num_turns is {num_turns}; turns count from 0."
        )


def turn_sum(x: Tensor, turn_ids: Tensor, num_turns: int) -> Tensor:
    """Sum over each turn's action tokens.

    Args:
        x: ``[B, L]``.
        turn_ids: ``[B, L]`` int64, -1 off actions.
        num_turns: ``T``.

    Returns:
        ``[B, T]``, float32 or wider; 0 where a turn has no token.

    Examples:
        >>> turn_sum(torch.tensor([[9.0, 1.0, 2.0, 9.0, 5.0]]), torch.tensor([[-1, 0, 0, -1, 2]]), 3)
        tensor([[3., 0., 5.]])
    """
    _check_shapes(x=x, turn_ids=turn_ids)
    _check_turn_ids(turn_ids, num_turns)
    x = _masked(x, turn_ids >= 0)
    return x.new_zeros(x.shape[0], num_turns).scatter_add(1, turn_ids.clamp_min(0), x)


def turn_lengths(turn_ids: Tensor, num_turns: int) -> Tensor:
    """Number of action tokens of each turn, ``[B, T]`` float32; a turn was *acted* where this is positive.

    Examples:
        >>> turn_lengths(torch.tensor([[-1, 0, 0, -1, 2]]), 3)
        tensor([[2., 0., 1.]])
    """
    return turn_sum(torch.ones_like(turn_ids, dtype=torch.float32), turn_ids, num_turns)


def turn_mean(x: Tensor, turn_ids: Tensor, num_turns: int) -> Tensor:
    """Mean over each turn's action tokens, ``[B, T]``; 0 where a turn has no token. Arguments as :func:`turn_sum`.

    Examples:
        >>> turn_mean(torch.tensor([[9.0, 1.0, 2.0, 9.0, 5.0]]), torch.tensor([[-1, 0, 0, -1, 2]]), 3)
        tensor([[1.5000, 0.0000, 5.0000]])
    """
    return turn_sum(x, turn_ids, num_turns) / turn_lengths(turn_ids, num_turns).clamp_min(1.0)


def _edge_positions(turn_ids: Tensor, num_turns: int, edge: Literal["first", "last"]) -> Tensor:
    """``[B, T]`` int64 position of each turn's first or last token; meaningless (but in range) without a token."""
    _check_turn_ids(turn_ids, num_turns)
    rows, length = turn_ids.shape
    position = torch.arange(length, device=turn_ids.device).expand(rows, length)
    # Tokens that are not actions go to a column of their own, which is dropped.
    slot = torch.where(turn_ids >= 0, turn_ids, num_turns)
    reduce, start = ("amin", max(length - 1, 0)) if edge == "first" else ("amax", 0)
    out = turn_ids.new_full((rows, num_turns + 1), start)
    return out.scatter_reduce(1, slot, position, reduce)[:, :num_turns]


def _turn_edge(x: Tensor, turn_ids: Tensor, num_turns: int, edge: Literal["first", "last"]) -> Tensor:
    _check_shapes(x=x, turn_ids=turn_ids)
    acted = turn_lengths(turn_ids, num_turns) > 0
    return _masked(x.gather(1, _edge_positions(turn_ids, num_turns, edge)), acted)


def turn_first(x: Tensor, turn_ids: Tensor, num_turns: int) -> Tensor:
    """The figure at each turn's first action token, ``[B, T]``; 0 without a token. Arguments as :func:`turn_sum`.

    On token-aligned values (index i is the value of the prefix before token i) this is the value of the state in which
    the turn was played.

    Examples:
        >>> turn_first(torch.tensor([[9.0, 1.0, 2.0, 9.0, 5.0]]), torch.tensor([[-1, 0, 0, -1, 2]]), 3)
        tensor([[1., 0., 5.]])
    """
    return _turn_edge(x, turn_ids, num_turns, "first")


def turn_last(x: Tensor, turn_ids: Tensor, num_turns: int) -> Tensor:
    """The figure at each turn's last action token, ``[B, T]``; 0 without a token. Arguments as :func:`turn_sum`.

    Examples:
        >>> turn_last(torch.tensor([[9.0, 1.0, 2.0, 9.0, 5.0]]), torch.tensor([[-1, 0, 0, -1, 2]]), 3)
        tensor([[2., 0., 5.]])
    """
    return _turn_edge(x, turn_ids, num_turns, "last")


def turn_reduce(x: Tensor, turn_ids: Tensor, num_turns: int, reduction: ValueReduction = "first") -> Tensor:
    """:func:`turn_first`, :func:`turn_mean` or :func:`turn_last`, by name.

    For values only ``"first"`` keeps the policy gradient unbiased: it is the value of what stood before the action.
    ``"mean"`` and ``"last"`` look at the action's own tokens.

    Examples:
        >>> turn_reduce(torch.tensor([[1.0, 3.0]]), torch.tensor([[0, 0]]), 1, reduction="mean")
        tensor([[2.]])
    """
    check_choice("value_reduction", reduction, ValueReduction)
    return {"first": turn_first, "mean": turn_mean, "last": turn_last}[reduction](x, turn_ids, num_turns)


def turn_to_token(x: Tensor, turn_ids: Tensor) -> Tensor:
    """Give every action token the figure of its turn.

    Args:
        x: ``[B, T]``.
        turn_ids: ``[B, L]`` int64, -1 off actions.

    Returns:
        ``[B, L]``, float32 or wider; 0 where ``turn_ids < 0``.

    Examples:
        >>> turn_to_token(torch.tensor([[3.0, 7.0]]), torch.tensor([[-1, 0, 0, -1, 1]]))
        tensor([[0., 3., 3., 0., 7.]])
    """
    _check_turn_ids(turn_ids, x.shape[1])
    return _masked(x.gather(1, turn_ids.clamp_min(0)), turn_ids >= 0)


# ---------------------------------------------------------------------------------------------------------------------
# Returns and advantages
# ---------------------------------------------------------------------------------------------------------------------


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
    """Sanitised reward ``[B, T]``, bootstrap ``[B]`` and acted ``[B, T]``."""
    _check_shapes(reward=reward, mask=mask, acted=acted)
    reward = _masked(reward, mask)
    bootstrap = reward.new_zeros(reward.shape[0]) if bootstrap is None else _wide(bootstrap)
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
    return _masked(_reverse_scan(reward, decay, bootstrap), acted)


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
    _check_shapes(reward=reward, mask=mask)
    reward = _masked(reward, mask)
    played_before = (mask.cumsum(1) - mask.long()).to(reward.dtype)
    return (reward * gamma**played_before).sum(1)


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
    _check_shapes(reward=reward, value=value)
    reward, bootstrap, acted = _turn_inputs(reward, mask, bootstrap, acted)
    value = _masked(value, acted)
    idle = torch.where(mask, gamma, torch.ones_like(reward))  # what a turn without a decision costs
    ahead = _reverse_scan(torch.where(acted, value, reward), torch.where(acted, 0.0, idle), bootstrap)
    next_value = torch.cat([ahead[:, 1:], bootstrap.unsqueeze(-1).to(ahead.dtype)], -1)
    delta = _masked(reward + gamma * next_value - value, acted)
    advantage = _masked(_reverse_scan(delta, torch.where(acted, gamma * lmbda, idle)), acted)
    return advantage, advantage + value


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
    _check_shapes(reward=reward, mask=mask)
    num_turns = reward.shape[1]
    acted = turn_lengths(turn_ids, num_turns) > 0
    order = torch.arange(num_turns, device=reward.device).expand_as(acted)
    host = torch.where(acted, order, -1).cummax(1).values
    credit = _masked(reward, mask & (host >= 0))
    credit = torch.zeros_like(credit).scatter_add(1, host.clamp_min(0), credit)
    target = _edge_positions(turn_ids, num_turns, "last")
    return credit.new_zeros(turn_ids.shape).scatter_add(1, target, _masked(credit, acted))


def token_gae(
    reward: Tensor,
    value: Tensor,
    turn_ids: Tensor,
    mask: Tensor,
    gamma: float,
    lmbda: float,
    bootstrap: Tensor | None = None,
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

    Returns:
        advantage and value target, ``[B, L]`` each, float32 or wider; 0 off actions.

    Examples:
        >>> turn_ids, mask = torch.tensor([[-1, 0, 0, -1, 1]]), torch.ones(1, 2, dtype=torch.bool)
        >>> advantage, _ = token_gae(torch.tensor([[0.0, 1.0]]), torch.zeros(1, 5), turn_ids, mask, 1.0, 0.5)
        >>> advantage
        tensor([[0.0000, 0.2500, 0.5000, 0.0000, 1.0000]])
    """
    return turn_gae(token_rewards(reward, turn_ids, mask), value, turn_ids >= 0, gamma, lmbda, bootstrap)


# ---------------------------------------------------------------------------------------------------------------------
# Normalisation
# ---------------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def _mean_and_std(
    x: Tensor, mask: Tensor, ddof: int, process_group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, standard deviation and spread flag over ``mask``, all ranks of the group included."""
    x = _masked(x, mask)
    total, count = _all_sum(torch.stack([x.sum(), mask.sum().to(x.dtype)]), process_group)
    mean = total / count.clamp_min(1.0)
    square = _all_sum(_masked(x - mean, mask).square().sum(), process_group)
    std = torch.where(count > ddof, square / (count - ddof).clamp_min(1.0), 0.0).sqrt()
    return mean, std, std > SPREAD_TOLERANCE * mean.abs().clamp_min(1.0)


def masked_whiten(
    x: Tensor, mask: Tensor, ddof: int = 1, eps: float = 1e-8, process_group: dist.ProcessGroup | None = None
) -> Tensor:
    """``(x - mean) / (std + eps)`` over ``mask``.

    Numbers that are equal but for rounding (``std <= 1e-6 * max(1, |mean|)``) become 0: noise is never blown up to unit
    variance. Mean and standard deviation are constants to autograd.

    Args:
        x: any shape.
        mask: bool, the shape of ``x``.
        ddof: the variance divides by ``count - ddof``.
        eps: added to the standard deviation.
        process_group: take the statistics over all ranks of this group (``None``: of this process only).

    Returns:
        The shape of ``x``, float32 or wider; 0 off the mask.

    Examples:
        >>> masked_whiten(torch.tensor([1.0, 3.0, 99.0]), torch.tensor([True, True, False]), ddof=0)
        tensor([-1.,  1.,  0.])
    """
    return rebn(x, mask, ddof, eps, process_group)


def rebn(
    returns: Tensor,
    mask: Tensor,
    ddof: int = 1,
    eps: float = 1e-8,
    process_group: dist.ProcessGroup | None = None,
    *,
    penalty: Tensor | None = None,
) -> Tensor:
    """Return batch normalisation: ``A = (G - mean) / (std + eps)`` over all valid (conversation, turn) pairs.

    Args:
        returns: ``[B, T]``, the returns of the environment's rewards.
        mask: ``[B, T]`` bool, the turns that count.
        ddof: the variance divides by ``count - ddof``.
        eps: added to the standard deviation.
        process_group: take the statistics over all ranks of this group (``None``: of this process only).
        penalty: ``[B, T]``, added to the returns: those of a KL penalty in the reward. Whether there is a spread is
            judged on ``returns`` alone. Where they do not differ (``std <= 1e-6 * max(1, |mean|)``) they
            count for 0 and the penalty enters centred but unscaled.

    Returns:
        ``[B, T]`` advantages, float32 or wider; 0 off the mask. Mean and deviation are constants to autograd.

    Examples:
        >>> mask = torch.ones(1, 2, dtype=torch.bool)
        >>> rebn(torch.tensor([[1.0, 3.0]]), mask, ddof=0)
        tensor([[-1.,  1.]])
        >>> rebn(torch.tensor([[3.0, 3.0]]), mask, penalty=torch.tensor([[-0.25, -0.75]]))
        tensor([[ 0.2500, -0.2500]])
    """
    _check_shapes(returns=returns, mask=mask, penalty=penalty)
    _, _, spread = _mean_and_std(returns, mask, ddof, process_group)
    scored = torch.where(spread, _masked(returns, mask), 0.0)
    if penalty is not None:
        scored = scored + _masked(penalty, mask)
    mean, std, _ = _mean_and_std(scored, mask, ddof, process_group)
    return _masked((scored - mean) / torch.where(spread, std + eps, 1.0), mask)


def _check_groups(labels: Tensor, counts: Tensor, group_size: int | None) -> None:
    expected = int(counts.max()) if group_size is None else group_size
    wrong = counts != expected
    if bool(wrong.any()):
        named = ", ".join(f"{g} ({n})" for g, n in zip(labels[wrong].tolist(), counts[wrong].tolist(), strict=True))
        raise ValueError(
            f"Expected {expected} conversations in every group; got group (size) {named}. Pass whole groups, or "
            'partial="allow" if part of a group is meant.'
        )


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
) -> Tensor:
    """Score against the conversations of the same group (GRPO, Shao et al., 2024, arXiv:2402.03300, sec. 4.1.2).

    ``"leave_one_out"`` takes the mean of the others (RLOO, Ahmadian et al., 2024, arXiv:2402.14740); ``scale="none"``
    leaves out the division (Dr. GRPO, Liu et al., 2025, arXiv:2503.20783).

    Args:
        score: ``[B]``, the episode's return.
        group_id: ``[B]`` int64.
        baseline: what is subtracted: the group's mean or that of the others.
        scale: divide by the group's standard deviation, or not.
        ddof: the variance divides by ``size - ddof``.
        eps: added to the standard deviation.
        group_size: how many conversations a group has; ``None``: as many as the largest one in the batch.
        partial: ``"error"`` raises ``ValueError`` on a group of another size, ``"allow"`` takes what there is.

    Returns:
        ``[B]``, float32 or wider; 0 in a group of one and where a group's scores do not differ
        (``std <= 1e-6 * max(1, |mean|)``).

    Examples:
        >>> group_relative(torch.tensor([0.0, 1.0, 5.0, 5.0]), torch.tensor([4, 4, 9, 9]), scale="none")
        tensor([-0.5000,  0.5000,  0.0000,  0.0000])
    """
    _check_shapes(score=score, group_id=group_id)
    for name, value, choices in (
        ("baseline", baseline, Baseline),
        ("scale", scale, Scale),
        ("partial", partial, Partial),
    ):
        check_choice(name, value, choices)
    if baseline == "leave_one_out" and scale == "std":
        raise ValueError('baseline="leave_one_out" with scale="std" is biased; use scale="none", or baseline="mean".')
    score = _wide(score)
    if score.numel() == 0:
        return score
    labels, index, counts = group_id.unique(return_inverse=True, return_counts=True)
    if partial == "error":
        _check_groups(labels, counts, group_size)
    size = counts.to(score.dtype)
    with torch.no_grad():
        zeros = torch.zeros_like(size)
        mean = zeros.index_add(0, index, score) / size
        square = zeros.index_add(0, index, (score - mean[index]).square())
        std = torch.where(size > ddof, square / (size - ddof).clamp_min(1.0), 0.0).sqrt()
        spread = std > SPREAD_TOLERANCE * mean.abs().clamp_min(1.0)
    others = size / (size - 1).clamp_min(1.0) if baseline == "leave_one_out" else torch.ones_like(size)
    factor = others / (std + eps) if scale == "std" else others
    return torch.where(spread[index], (score - mean[index]) * factor[index], 0.0)


# ---------------------------------------------------------------------------------------------------------------------
# The loss
# ---------------------------------------------------------------------------------------------------------------------


def pool_log_ratio(
    log_ratio: Tensor, turn_ids: Tensor, level: RatioLevel = "token", reduction: RatioReduction = "mean"
) -> Tensor:
    """Pool the log-ratio over the unit that is clipped as one, and give it to each of the unit's tokens.

    Args:
        log_ratio: ``[B, L]``, new minus old log-prob.
        turn_ids: ``[B, L]`` int64, -1 off actions.
        level: the unit: each token by itself, the turn, or the sequence (all action tokens of the row).
        reduction: ``"sum"`` gives the ratio of the unit's probabilities, ``"mean"`` its length-normalised (geometric
            mean) form, as in GSPO (Zheng et al., 2025, arXiv:2507.18071, eq. 7). Without effect at ``level="token"``.

    Returns:
        ``[B, L]``, float32 or wider; 0 off actions.

    Examples:
        >>> log_ratio, turn_ids = torch.tensor([[0.1, 0.3, 7.0, 0.5]]), torch.tensor([[0, 0, -1, 1]])
        >>> pool_log_ratio(log_ratio, turn_ids, "turn", "mean")
        tensor([[0.2000, 0.2000, 0.0000, 0.5000]])
        >>> pool_log_ratio(log_ratio, turn_ids, "sequence", "sum")
        tensor([[0.9000, 0.9000, 0.0000, 0.9000]])
    """
    check_choice("level", level, RatioLevel)
    check_choice("reduction", reduction, RatioReduction)
    _check_shapes(log_ratio=log_ratio, turn_ids=turn_ids)
    if level == "token":
        return _masked(log_ratio, turn_ids >= 0)
    unit_ids = turn_ids if level == "turn" else turn_ids.clamp_max(0)
    pool = turn_sum if reduction == "sum" else turn_mean
    return turn_to_token(pool(log_ratio, unit_ids, count_turns(unit_ids)), unit_ids)


def clipped_objective(log_ratio: Tensor, advantage: Tensor, clip_low: float, clip_high: float) -> tuple[Tensor, Tensor]:
    """PPO's clipped objective, to be maximised (Schulman et al., 2017, arXiv:1707.06347, eq. 7).

    ``min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)``; unequal bounds as in DAPO (Yu et al., 2025,
    arXiv:2503.14476, eq. 10).

    Args:
        log_ratio: any shape, new minus old log-prob.
        advantage: the shape of ``log_ratio``.
        clip_low: how far the ratio may fall below 1, >= 0.
        clip_high: how far the ratio may rise above 1, >= 0.

    Returns:
        The objective, and a bool mask of where the clip binds, so that no gradient flows.

    Examples:
        >>> log_ratio = torch.tensor([1.5, 1.5, 0.5]).log()
        >>> clipped_objective(log_ratio, torch.tensor([1.0, -1.0, -1.0]), 0.2, 0.28)
        (tensor([ 1.2800, -1.5000, -0.8000]), tensor([ True, False,  True]))
    """
    if clip_low < 0 or clip_high < 0:
        raise ValueError(f"Clip bounds are distances from 1 and >= 0; got clip_low={clip_low}, clip_high={clip_high}.")
    _check_shapes(log_ratio=log_ratio, advantage=advantage)
    ratio = _wide(log_ratio).exp()
    objective = torch.minimum(ratio * advantage, ratio.clamp(1 - clip_low, 1 + clip_high) * advantage)
    clipped = ((advantage > 0) & (ratio > 1 + clip_high)) | ((advantage < 0) & (ratio < 1 - clip_low))
    return objective, clipped


def kl_estimate(log_prob: Tensor, ref_log_prob: Tensor, kind: KLKind = "k3") -> Tensor:
    """Per-token estimate of ``KL(policy || reference)`` from tokens sampled from the policy.

    With ``d = ref_log_prob - log_prob``: k1 ``-d``, k2 ``d^2 / 2``, k3 ``exp(d) - d - 1`` (Schulman, 2020,
    "Approximating KL divergence"). k1 and k3 are unbiased, k2 is not; swapping the arguments estimates something else.

    As a term of a loss they differ: the gradient of k1 is zero in expectation, k2's is that of the reverse KL
    ``KL(policy || reference)``, k3's that of the forward KL ``KL(reference || policy)``.

    Args:
        log_prob: any shape, of the policy that sampled the tokens.
        ref_log_prob: the shape of ``log_prob``, of the reference.
        kind: which estimate.

    Returns:
        The shape of ``log_prob``, float32 or wider.

    Examples:
        >>> log_prob, ref = torch.tensor([0.9, 0.1]).log(), torch.tensor([0.5, 0.5]).log()
        >>> [round((log_prob.exp() * kl_estimate(log_prob, ref, kind)).sum().item(), 4) for kind in ("k1", "k3")]
        [0.3681, 0.3681]
    """
    check_choice("kind", kind, KLKind)
    _check_shapes(log_prob=log_prob, ref_log_prob=ref_log_prob)
    d = _wide(ref_log_prob) - _wide(log_prob)
    if kind == "k1":
        return -d
    return d.square() / 2 if kind == "k2" else d.expm1() - d


def loss_weights(
    turn_ids: Tensor,
    kind: WeightKind = "token",
    constant: float | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> Tensor:
    """The weight of each token in the loss's sum, once per optimizer batch.

    ``"token"``: ``1/N``, every token equal. ``"sequence"``: ``1/(B n_b)``, every conversation equal. ``"turn"``:
    ``1/(K n_bk)``, every turn equal. ``"constant"``: ``1/(B C)``, a fixed divisor (Dr. GRPO, arXiv:2503.20783). ``N``
    action tokens, ``K`` turns and ``B`` conversations that have any; empty rows count for nothing. All but the last
    sum to 1.

    Args:
        turn_ids: ``[B, L]`` int64 of the **whole** optimizer batch, -1 off actions. Micro-batches take slices of the
            result.
        kind: what counts equally.
        constant: ``C`` of ``kind="constant"`` in tokens per conversation, > 0.
        process_group: count over all ranks of this group (``None``: this process only). The loss is then a sum over
            ranks.

    Returns:
        ``[B, L]`` float32; 0 off actions.

    Examples:
        >>> loss_weights(torch.tensor([[0, 0, -1, 1], [0, -1, -1, -1]]), "turn")
        tensor([[0.1667, 0.1667, 0.0000, 0.3333],
                [0.3333, 0.0000, 0.0000, 0.0000]])
    """
    check_choice("kind", kind, WeightKind)
    if (kind == "constant") != (constant is not None) or (constant is not None and constant <= 0):
        raise ValueError(
            f'kind="constant", and no other, takes a constant > 0; got kind={kind!r}, constant={constant!r}.'
        )
    unit_ids = turn_ids.clamp_max(0) if kind in ("sequence", "constant") else turn_ids
    action = turn_ids >= 0
    if kind == "token":
        sizes, units = action.to(torch.float32), action.sum()
    else:
        lengths = turn_lengths(unit_ids, count_turns(unit_ids))
        sizes, units = turn_to_token(lengths, unit_ids), (lengths > 0).sum()
    if constant is not None:
        sizes = torch.full_like(sizes, constant)
    # Integers are added over ranks, so that the weights do not depend on how rows are dealt out.
    divisor = sizes * _all_sum(units, process_group).to(torch.float32)
    return torch.where(action, divisor.reciprocal(), 0.0)


# ---------------------------------------------------------------------------------------------------------------------
# Figures
# ---------------------------------------------------------------------------------------------------------------------


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean over ``mask`` (bool, the shape of ``x``), a scalar, float32 or wider; 0 where the mask is empty.

    Examples:
        >>> masked_mean(torch.tensor([1.0, 3.0, 99.0]), torch.tensor([True, True, False]))
        tensor(2.)
    """
    _check_shapes(x=x, mask=mask)
    return _masked(x, mask).sum() / mask.sum().clamp_min(1)


def effective_sample_size(log_ratio: Tensor, weight: Tensor) -> Tensor:
    """Share of the weighted sample that is effective: ``(sum w r)^2 / (sum w * sum w r^2)``, in (0, 1].

    Args:
        log_ratio: any shape; ``r = exp(log_ratio)``.
        weight: the shape of ``log_ratio``, >= 0.

    Returns:
        A scalar, float32 or wider; 0 where all weights are 0.

    Examples:
        >>> effective_sample_size(torch.zeros(4), torch.full((4,), 0.25))
        tensor(1.)
    """
    _check_shapes(log_ratio=log_ratio, weight=weight)
    counted = weight > 0
    log_ratio, weight = _masked(log_ratio, counted), _masked(weight, counted)
    # The common factor of the ratios cancels; taking it out first avoids overflow.
    ratio = (log_ratio - log_ratio.max()).exp() if log_ratio.numel() else log_ratio
    first, second = (weight * ratio).sum(), (weight * ratio.square()).sum()
    return torch.where(second > 0, first.square() / (weight.sum() * second), 0.0)


def explained_variance(value: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    """``1 - Var(target - value) / Var(target)`` under ``weight``; at most 1, and 0 for a value that tells nothing.

    Args:
        value: any shape, the predictions.
        target: the shape of ``value``.
        weight: the shape of ``value``, >= 0 (a mask will do).

    Returns:
        A scalar, float32 or wider; 0 where the target does not vary, for there is nothing to explain.

    Examples:
        >>> target = torch.tensor([0.0, 1.0, 2.0])
        >>> explained_variance(target + 5, target, torch.ones(3))
        tensor(1.)
        >>> explained_variance(torch.zeros(3), target, torch.ones(3))
        tensor(0.)
    """
    _check_shapes(value=value, target=target, weight=weight)
    counted = weight > 0
    weight = _masked(weight, counted)
    share = weight / torch.where(weight.sum() > 0, weight.sum(), 1.0)

    def moments(x: Tensor) -> tuple[Tensor, Tensor]:
        x = _masked(x, counted)
        mean = (share * x).sum()
        return mean, (share * (x - mean).square()).sum()

    mean, variance = moments(target)
    varies = variance.sqrt() > SPREAD_TOLERANCE * mean.abs().clamp_min(1.0)
    return torch.where(varies, 1 - moments(target - value)[1] / torch.where(varies, variance, 1.0), 0.0)
