"""Returns and advantages of turns and tokens."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchrl_llm.functional._common import check_shapes, importance_ratio, masked, wide
from torchrl_llm.functional.turns import edge_positions, turn_lengths

__all__ = [
    "discount",
    "episode_return",
    "overlong_penalty",
    "token_gae",
    "token_rewards",
    "turn_gae",
    "turn_returns",
    "turn_vtrace",
]


def _reverse_scan(x: Tensor, decay: Tensor, last: Tensor | None = None) -> Tensor:
    """``y_t = x_t + decay_t * y_{t+1}`` along the last dimension, with ``y_T = last``, in log2(T)
    steps.

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
    reward: Tensor, mask: Tensor, gamma: float, bootstrap: Tensor | None, acted: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Reward ``[B, T]``, bootstrap ``[B]`` and acted ``[B, T]``, sanitized, and the discount of
    each turn ``[B, T]``.

    The discount of a turn is ``gamma`` if it was taken, and 1 in a gap of the mask.
    """
    check_shapes(reward=reward, mask=mask, acted=acted)
    reward = masked(reward, mask)
    bootstrap = reward.new_zeros(reward.shape[0]) if bootstrap is None else wide(bootstrap)
    return reward, bootstrap, mask if acted is None else mask & acted, torch.where(mask, gamma, torch.ones_like(reward))


def turn_returns(
    reward: Tensor, mask: Tensor, gamma: float, bootstrap: Tensor | None = None, *, acted: Tensor | None = None
) -> Tensor:
    """Discounted returns: ``G_k = r_k + gamma * G_{k+1}``, from every turn to the end of the
    episode.

    Args:
        reward: ``[B, T]``.
        mask: ``[B, T]`` bool, the turns that were taken. A gap in it costs no discount.
        gamma: discount per turn.
        bootstrap: ``[B]``, what follows the last turn; 0 by default.
        acted: ``[B, T]`` bool, the turns with an action token; all of ``mask`` by default. A turn
            without one counts as time and reward, but is no decision: it is folded into the one
            before.

    Returns:
        ``[B, T]``, float32 or wider; 0 where nothing was decided.

    Examples:
        >>> reward, mask = torch.tensor([[0.0, 5.0, 1.0]]), torch.tensor([[True, False, True]])
        >>> turn_returns(reward, mask, 0.5)
        tensor([[0.5000, 0.0000, 1.0000]])
    """
    reward, bootstrap, acted, decay = _turn_inputs(reward, mask, gamma, bootstrap, acted)
    return masked(_reverse_scan(reward, decay, bootstrap), acted)


def episode_return(reward: Tensor, mask: Tensor, gamma: float = 1.0) -> Tensor:
    """The discounted return of each whole episode, seen from its first turn.

    Args:
        reward: ``[B, T]``.
        mask: ``[B, T]`` bool, the turns that were taken. A gap in it costs no discount.
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
    """The discount of each step's reward, seen from the start: ``gamma`` to the number of steps
    before it.

    Args:
        mask: ``[B, T]`` bool, the turns (or action tokens) that were taken. A gap in it costs no
            discount.
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
    """Generalized advantage estimation with a turn as the step (Schulman et al., 2016,
    arXiv:1506.02438, eq. 16).

    ``delta_k = r_k + gamma * V_{k+1} - V_k``; ``A_k = delta_k + gamma * lmbda * A_{k+1}``;
    ``target_k = A_k + V_k``. A turn without an action token is folded into the decision before it,
    which then spans two steps of time: ``delta = r + gamma * r' + gamma^2 * V_next - V``, and the
    next advantage decays by ``gamma^2 * lmbda``. A reward before the first decision belongs to no
    action and is left out.

    Args:
        reward: ``[B, T]``.
        value: ``[B, T]``, the value of the state before each turn.
        mask: ``[B, T]`` bool, the turns that were taken. A gap in it costs no discount.
        gamma: discount per turn.
        lmbda: the trade-off of bias against variance, per decision.
        bootstrap: ``[B]``, the value of what follows the last turn; 0 by default (the episode
            terminated).
        acted: ``[B, T]`` bool, the turns with an action token; all of ``mask`` by default.

    Returns:
        advantage and value target, ``[B, T]`` each, float32 or wider; 0 where nothing was decided.

    Examples:
        >>> reward, value = torch.tensor([[0.0, 1.0]]), torch.tensor([[0.5, 0.5]])
        >>> turn_gae(reward, value, torch.ones(1, 2, dtype=torch.bool), gamma=1.0, lmbda=1.0)
        (tensor([[0.5000, 0.5000]]), tensor([[1., 1.]]))
    """
    check_shapes(reward=reward, value=value)
    reward, bootstrap, acted, idle = _turn_inputs(reward, mask, gamma, bootstrap, acted)
    value = masked(value, acted)
    delta = masked(reward + gamma * _next_values(reward, value, acted, idle, bootstrap) - value, acted)
    advantage = masked(_reverse_scan(delta, torch.where(acted, gamma * lmbda, idle)), acted)
    return advantage, advantage + value


def _next_values(reward: Tensor, value: Tensor, acted: Tensor, idle: Tensor, bootstrap: Tensor) -> Tensor:
    """The value of the state after each turn, ``[B, T]``: the value of the next decision, plus the
    rewards in between."""
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
    """V-trace with a turn as the step, for episodes of an older policy (Espeholt et al., 2018,
    arXiv:1802.01561).

    ``v_k = V_k + rho_k delta_k + gamma c_k (v_{k+1} - V_{k+1})``, with
    ``rho_k = min(rho_clip, ratio_k)``, ``c_k = min(c_clip, ratio_k)`` and
    ``delta_k = r_k + gamma V_{k+1} - V_k`` (eq. 1); the advantage is
    ``rho_k (r_k + gamma v_{k+1} - V_k)`` (sec. 4.2). On-policy, without clips, the target is the
    return.

    Args:
        reward: ``[B, T]``.
        value: ``[B, T]``, the value of the state before each turn.
        log_rho: ``[B, T]``, log of the turn's probability under the present policy over its
            probability under the sampling policy.
        mask: ``[B, T]`` bool, the turns that were taken. A gap in it costs no discount.
        gamma: discount per turn.
        bootstrap: ``[B]``, the value of what follows the last turn; 0 by default (the episode
            terminated).
        rho_clip: cap of the ratio in the advantage and in ``delta``; it decides which policy's
            value is learned.
        c_clip: cap of the ratio on the way back; it decides how fast.
        acted: ``[B, T]`` bool, the turns with an action token; all of ``mask`` by default.

    Returns:
        advantage and value target, ``[B, T]`` each, float32 or wider; 0 where nothing was decided.
        The advantage holds the ratio already.

    Examples:
        >>> reward, value = torch.tensor([[0.0, 1.0]]), torch.tensor([[0.5, 0.5]])
        >>> log_rho, mask = torch.tensor([[1.0, 0.5]]).log(), torch.ones(1, 2, dtype=torch.bool)
        >>> turn_vtrace(reward, value, log_rho, mask, gamma=1.0)
        (tensor([[0.2500, 0.2500]]), tensor([[0.7500, 0.7500]]))
    """
    check_shapes(reward=reward, value=value, log_rho=log_rho)
    reward, bootstrap, acted, idle = _turn_inputs(reward, mask, gamma, bootstrap, acted)
    value, ratio = masked(value, acted), importance_ratio(masked(log_rho, acted))
    rho = ratio.clamp_max(rho_clip)

    def weighted_delta(values: Tensor) -> Tensor:
        return masked(rho * (reward + gamma * _next_values(reward, values, acted, idle, bootstrap) - value), acted)

    decay = torch.where(acted, gamma * ratio.clamp_max(c_clip), idle)
    target = value + masked(_reverse_scan(weighted_delta(value), decay), acted)
    # With v for V in the next state, the delta is the advantage of section 4.2; its V_k stays the
    # critic's.
    return weighted_delta(target), target


def token_rewards(reward: Tensor, turn_ids: Tensor, mask: Tensor) -> Tensor:
    """Put each turn's reward on its last action token; without one, on the last action token before
    the turn.

    Args:
        reward: ``[B, T]``.
        turn_ids: ``[B, L]`` int64, -1 off actions.
        mask: ``[B, T]`` bool, the turns that were taken.

    Returns:
        ``[B, L]``, float32 or wider. A reward before the first action token belongs to no action
        and is left out.

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

    ``gamma`` and ``lmbda`` apply per action token. Prompt and feedback tokens cost nothing and do
    not cut credit; the reward lies where :func:`token_rewards` puts it.

    Args:
        reward: ``[B, T]``, per turn.
        value: ``[B, L]``, token-aligned: index i is the value of the prefix before token i.
        turn_ids: ``[B, L]`` int64, -1 off actions.
        mask: ``[B, T]`` bool, the turns that were taken.
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
    # The recursion is the same: prompts and feedback are gaps in the mask, which cost no discount.
    return turn_gae(rewards, value, turn_ids >= 0, gamma, lmbda, bootstrap)


def overlong_penalty(length: Tensor, max_length: int, buffer: int) -> Tensor:
    """Soft penalty on responses close to the length limit (DAPO, Yu et al., 2025, arXiv:2503.14476,
    eq. 13).

    0 up to ``max_length - buffer`` tokens, then falling linearly to -1 at ``max_length``, and -1
    beyond.

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
