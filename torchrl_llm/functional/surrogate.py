"""Policy objectives and the weights of tokens: ratios, clipping, KL, sampler corrections, loss
weights."""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from torchrl_llm.functional._common import all_sum, check_shapes, exponent, importance_ratio, masked, wide
from torchrl_llm.functional.turns import count_turns, turn_lengths, turn_mean, turn_sum, turn_to_token
from torchrl_llm.utils.options import check_value

__all__ = [
    "KLKind",
    "RatioLevel",
    "RatioReduction",
    "SamplerCorrection",
    "WeightKind",
    "cispo_objective",
    "clipped_objective",
    "importance_ratio",
    "kl_estimate",
    "loss_weights",
    "pool_log_ratio",
    "sampler_weights",
]

RatioLevel = Literal["token", "turn", "sequence"]
"""The unit that has one ratio."""
RatioReduction = Literal["sum", "mean"]
"""How the log-ratios of a unit's tokens are pooled."""
WeightKind = Literal["token", "turn", "sequence", "constant"]
"""What counts equally in a loss, see :func:`loss_weights`."""
KLKind = Literal["k1", "k2", "k3"]
"""An estimate of the KL, see :func:`kl_estimate`."""
SamplerCorrection = Literal["truncate", "mask", "reject"]
"""A correction for the sampler, see :func:`sampler_weights`."""


def pool_log_ratio(
    log_ratio: Tensor, turn_ids: Tensor, level: RatioLevel = "token", reduction: RatioReduction = "mean"
) -> Tensor:
    """Pool the log-ratio over the unit that is clipped as one, and give it to each of the unit's
    tokens.

    Args:
        log_ratio: ``[B, L]``, new minus old log-prob.
        turn_ids: ``[B, L]`` int64, -1 off actions.
        level: the unit: each token by itself, the turn, or the sequence (all action tokens of the
            row).
        reduction: ``"sum"`` gives the ratio of the unit's probabilities, ``"mean"`` its
            length-normalized (geometric mean) form, as in GSPO (Zheng et al., 2025,
            arXiv:2507.18071, eq. 7). Without effect at ``level="token"``.

    Returns:
        ``[B, L]``, float32 or wider; 0 off actions.

    Examples:
        >>> log_ratio, turn_ids = torch.tensor([[0.1, 0.3, 7.0, 0.5]]), torch.tensor([[0, 0, -1, 1]])
        >>> pool_log_ratio(log_ratio, turn_ids, "turn", "mean")
        tensor([[0.2000, 0.2000, 0.0000, 0.5000]])
        >>> pool_log_ratio(log_ratio, turn_ids, "sequence", "sum")
        tensor([[0.9000, 0.9000, 0.0000, 0.9000]])
    """
    check_value("level", level, RatioLevel)
    check_value("reduction", reduction, RatioReduction)
    check_shapes(log_ratio=log_ratio, turn_ids=turn_ids)
    if level == "token":
        return masked(log_ratio, turn_ids >= 0)
    unit_ids = turn_ids if level == "turn" else turn_ids.clamp_max(0)
    pool = turn_sum if reduction == "sum" else turn_mean
    return turn_to_token(pool(log_ratio, unit_ids, count_turns(unit_ids)), unit_ids)


def _check_clip(clip_low: float, clip_high: float) -> None:
    if clip_low < 0 or clip_high < 0:
        raise ValueError(f"Clip bounds are distances from 1 and >= 0; got clip_low={clip_low}, clip_high={clip_high}.")


def clipped_objective(
    log_ratio: Tensor, advantage: Tensor, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> tuple[Tensor, Tensor]:
    """PPO's clipped objective, to be maximized (Schulman et al., 2017, arXiv:1707.06347, eq. 7).

    ``min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)``; unequal bounds as in DAPO (Yu
    et al., 2025, arXiv:2503.14476, eq. 10). With ``dual_clip`` at least ``dual_clip * A`` where
    ``A < 0`` (Ye et al., 2020, arXiv:1912.09729): a far too likely bad token is not pushed down
    without bound.

    Args:
        log_ratio: any shape, new minus old log-prob.
        advantage: the shape of ``log_ratio``.
        clip_low: how far the ratio may fall below 1, >= 0.
        clip_high: how far the ratio may rise above 1, >= 0.
        dual_clip: the largest ratio where ``A < 0``, > 1 + clip_high; ``None`` sets none.

    Returns:
        The objective, and a bool mask of where the clip binds, so that no gradient flows.

    Examples:
        >>> log_ratio = torch.tensor([1.5, 1.5, 0.5, 9.0]).log()
        >>> clipped_objective(log_ratio, torch.tensor([1.0, -1.0, -1.0, -1.0]), 0.2, 0.28, dual_clip=3.0)
        (tensor([ 1.2800, -1.5000, -0.8000, -3.0000]), tensor([ True, False,  True,  True]))
    """
    _check_clip(clip_low, clip_high)
    if dual_clip is not None and dual_clip <= 1 + clip_high:
        raise ValueError(f"dual_clip is {dual_clip}; expected a ratio > 1 + clip_high = {1 + clip_high}.")
    check_shapes(log_ratio=log_ratio, advantage=advantage)
    ratio = importance_ratio(log_ratio)
    objective = torch.minimum(ratio * advantage, ratio.clamp(1 - clip_low, 1 + clip_high) * advantage)
    clipped = ((advantage > 0) & (ratio > 1 + clip_high)) | ((advantage < 0) & (ratio < 1 - clip_low))
    if dual_clip is not None:
        objective = torch.where(advantage < 0, torch.maximum(objective, dual_clip * advantage), objective)
        clipped = clipped | ((advantage < 0) & (ratio > dual_clip))
    return objective, clipped


def cispo_objective(log_ratio: Tensor, advantage: Tensor, clip_low: float, clip_high: float) -> tuple[Tensor, Tensor]:
    """CISPO's objective, to be maximized: the weight is clipped, not the gradient (MiniMax, 2025,
    arXiv:2506.13585, eqs. 4, 5).

    ``stop_gradient(clip(ratio, 1 - clip_low, 1 + clip_high)) * A * log_ratio``: every token keeps
    its gradient.

    Args:
        log_ratio: any shape, new minus old log-prob.
        advantage: the shape of ``log_ratio``.
        clip_low: how far the weight may fall below 1, >= 0; 1 or more sets no lower bound.
        clip_high: how far the weight may rise above 1, >= 0.

    Returns:
        The objective, and a bool mask of where the weight is clipped. At ``log_ratio = 0`` the
        objective is 0 and its gradient the policy gradient's.

    Examples:
        >>> log_ratio = torch.tensor([2.0]).log().requires_grad_()
        >>> objective, clipped = cispo_objective(log_ratio, torch.tensor([1.0]), 0.2, 0.28)
        >>> torch.autograd.grad(objective.sum(), log_ratio)[0], clipped
        (tensor([1.2800]), tensor([True]))
    """
    _check_clip(clip_low, clip_high)
    check_shapes(log_ratio=log_ratio, advantage=advantage)
    log_ratio = wide(log_ratio)
    ratio = importance_ratio(log_ratio.detach())
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    return weight * advantage * log_ratio, weight != ratio


def sampler_weights(
    old_log_prob: Tensor,
    sample_log_prob: Tensor,
    turn_ids: Tensor,
    kind: SamplerCorrection,
    low: float,
    high: float,
    level: RatioLevel = "token",
    reduction: RatioReduction = "sum",
) -> Tensor:
    """Weights that correct for a sampler whose probabilities are not the trainer's: with
    ``w = old / sample``,

    - ``"truncate"``: ``min(w, high)`` (truncated importance sampling, Ionides, 2008; Yao et al.,
      2025);
    - ``"mask"``: ``w`` within ``[low, high]``, else 0 (masked importance sampling; per token
      IcePop, Ling Team, 2025, arXiv:2510.18855);
    - ``"reject"``: 1 within ``[low, high]``, else 0 (rejection without reweighing).

    Args:
        old_log_prob: ``[B, L]``, of the model at the start of the update.
        sample_log_prob: ``[B, L]``, of the engine that sampled.
        turn_ids: ``[B, L]`` int64, -1 off actions.
        kind: as above.
        low: lower bound, >= 0; ``"truncate"`` does not use it.
        high: upper bound, > low.
        level: the unit that has one weight, see :func:`pool_log_ratio`.
        reduction: pool a unit's log-ratios by ``"sum"`` (ratio of its probabilities) or ``"mean"``
            (geometric mean).

    Returns:
        ``[B, L]``, float32 or wider, without gradient; 1 off actions. Sums over weighted tokens are
        not divided by what is left: a token with weight 0 still counts in the loss weights, which
        do not depend on it.

    Examples:
        >>> old, sample = torch.tensor([[0.5, 0.5, 0.1]]).log(), torch.tensor([[0.5, 0.1, 0.5]]).log()
        >>> turn_ids = torch.tensor([[0, 0, 0]])
        >>> [sampler_weights(old, sample, turn_ids, kind, 0.5, 2.0)[0] for kind in ("truncate", "mask", "reject")]
        [tensor([1.0000, 2.0000, 0.2000]), tensor([1., 0., 0.]), tensor([1., 0., 0.])]
    """
    check_value("kind", kind, SamplerCorrection)
    if not 0 <= low < high:
        raise ValueError(f"Bounds of the sampler's weights are ({low}, {high}); expected 0 <= low < high.")
    gap = pool_log_ratio((old_log_prob - sample_log_prob).detach(), turn_ids, level, reduction)
    weight = importance_ratio(gap)
    if kind == "truncate":
        return weight.clamp_max(high)
    within = (weight >= low) & (weight <= high)
    kept = torch.where(within, weight if kind == "mask" else 1.0, torch.zeros_like(weight))
    return torch.where(turn_ids >= 0, kept, 1.0)


def kl_estimate(log_prob: Tensor, ref_log_prob: Tensor, kind: KLKind = "k3") -> Tensor:
    """Per-token estimate of ``KL(policy || reference)`` from tokens sampled from the policy.

    With ``d = ref_log_prob - log_prob``: k1 ``-d``, k2 ``d^2 / 2``, k3 ``exp(d) - d - 1``
    (Schulman, 2020, "Approximating KL divergence"). k1 and k3 are unbiased, k2 is not; swapping the
    arguments estimates something else.

    As a term of a loss they differ: the gradient of k1 is zero in expectation, k2 has the gradient
    of the reverse KL ``KL(policy || reference)``, k3 the gradient of the forward KL
    ``KL(reference || policy)``.

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
    check_value("kind", kind, KLKind)
    check_shapes(log_prob=log_prob, ref_log_prob=ref_log_prob)
    d = wide(ref_log_prob) - wide(log_prob)
    if kind == "k1":
        return -d
    # expm1: for a small d, exp(d) - 1 is mostly rounding.
    return d.square() / 2 if kind == "k2" else exponent(d).expm1() - d


def loss_weights(
    turn_ids: Tensor,
    kind: WeightKind = "token",
    constant: float | None = None,
    process_group: dist.ProcessGroup | None = None,
    row_weight: Tensor | None = None,
) -> Tensor:
    """The weight of each token in the loss's sum, once per optimizer batch.

    ``"token"``: ``1/N``, every token equal. ``"sequence"``: ``1/(B n_b)``, every episode equal.
    ``"turn"``: ``1/(K n_bk)``, every turn equal. ``"constant"``: ``1/(B C)``, a fixed divisor (Dr.
    GRPO, arXiv:2503.20783). ``N`` action tokens, ``K`` turns and ``B`` episodes that have any;
    empty rows count for nothing. All but the last sum to 1.

    Args:
        turn_ids: ``[B, L]`` int64 of the **whole** optimizer batch, -1 off actions. Micro-batches
            take slices of the result.
        kind: what counts equally.
        constant: ``C`` of ``kind="constant"`` in tokens per episode, > 0.
        process_group: count over all ranks of this group (``None``: this process only). The loss is
            then a sum over ranks.
        row_weight: ``[B]``, each row counts as so many, its tokens and turns too; with
            ``"constant"`` the divisor stays what it is. ``None``: as one.

    Returns:
        ``[B, L]`` float32; 0 off actions.

    Examples:
        >>> loss_weights(torch.tensor([[0, 0, -1, 1], [0, -1, -1, -1]]), "turn")
        tensor([[0.1667, 0.1667, 0.0000, 0.3333],
                [0.3333, 0.0000, 0.0000, 0.0000]])
    """
    check_value("kind", kind, WeightKind)
    if (kind == "constant") != (constant is not None) or (constant is not None and constant <= 0):
        raise ValueError(
            f'kind="constant", and no other, takes a constant > 0; got kind={kind!r}, constant={constant!r}.'
        )
    # All actions of a row as turn 0 make the episode the unit.
    unit_ids = turn_ids.clamp_max(0) if kind in ("sequence", "constant") else turn_ids
    action = turn_ids >= 0
    if kind == "token":
        sizes, units = action.to(torch.float32), action.sum(1)
    else:
        lengths = turn_lengths(unit_ids, count_turns(unit_ids))
        sizes, units = turn_to_token(lengths, unit_ids), (lengths > 0).sum(1)
    # Integers are added over ranks, so that the weights do not depend on how rows are distributed.
    count = units.sum() if row_weight is None or constant is not None else (units * row_weight.double()).sum()
    if constant is not None:
        sizes = torch.full_like(sizes, constant)
    divisor = sizes * all_sum(count, process_group).to(torch.float32)
    weight = torch.where(action, divisor.reciprocal(), 0.0)
    return weight if row_weight is None else weight * row_weight.to(torch.float32).unsqueeze(1)
