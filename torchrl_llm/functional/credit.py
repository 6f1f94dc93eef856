"""Advantages of turns and tokens with a critic, and the penalty on long responses."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_llm.functional._common import check_shapes, importance_ratio, masked, wide
from torchrl_llm.functional.edges import token_rewards
from torchrl_llm.functional.returns import reverse_scan, turn_inputs

__all__ = [
    "overlong_penalty",
    "token_gae",
    "turn_gae",
    "turn_vtrace",
]


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
    reward, bootstrap, acted, idle = turn_inputs(reward, mask, gamma, bootstrap, acted)
    value = masked(value, acted)
    delta = masked(reward + gamma * _next_values(reward, value, acted, idle, bootstrap) - value, acted)
    advantage = masked(reverse_scan(delta, torch.where(acted, gamma * lmbda, idle)), acted)
    return advantage, advantage + value


def _next_values(reward: Tensor, value: Tensor, acted: Tensor, idle: Tensor, bootstrap: Tensor) -> Tensor:
    """The value of the state after each turn, ``[B, T]``: the value of the next decision, plus the
    rewards in between."""
    ahead = reverse_scan(torch.where(acted, value, reward), torch.where(acted, 0.0, idle), bootstrap)
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
    reward, bootstrap, acted, idle = turn_inputs(reward, mask, gamma, bootstrap, acted)
    value, ratio = masked(value, acted), importance_ratio(masked(log_rho, acted))
    rho = ratio.clamp_max(rho_clip)

    def weighted_delta(values: Tensor) -> Tensor:
        return masked(rho * (reward + gamma * _next_values(reward, values, acted, idle, bootstrap) - value), acted)

    decay = torch.where(acted, gamma * ratio.clamp_max(c_clip), idle)
    target = value + masked(reverse_scan(weighted_delta(value), decay), acted)
    # With v for V in the next state, the delta is the advantage of section 4.2; its V_k stays the
    # critic's.
    return weighted_delta(target), target


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
    not cut credit; the reward lies where :func:`~torchrl_llm.functional.token_rewards` puts it.

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
