"""Losses in the settings that matter, on tiny real models, and batches for them; tests of the
losses share them."""

from __future__ import annotations

import torch
from conversations import LAYOUT, make_actor, make_critic, make_rows
from tensordict import TensorDict

from torchrl_llm.objectives import (
    GroupRelative,
    ImitationWeights,
    LLMGRPOLoss,
    LLMPPOLoss,
    LLMReinforceLoss,
    LLMSFTLoss,
    ReBN,
    TurnGAE,
    TurnPolicyLoss,
    TurnVTrace,
)

ALGORITHMS = {
    "ppo": lambda: LLMPPOLoss(make_actor(), make_critic(), entropy_coeff=0.01),
    "ppo_token_granularity": lambda: LLMPPOLoss(
        make_actor(), make_critic(), clip_epsilon=(0.1, 0.3), estimator=TurnGAE(granularity="token")
    ),
    "ppo_turn_ratio": lambda: LLMPPOLoss(make_actor(), make_critic(), ratio_level="turn", unit_weight="equal"),
    "ppo_mean_value": lambda: LLMPPOLoss(
        make_actor(), make_critic(), weighting="sequence", estimator=TurnGAE(value_reduction="mean")
    ),
    "reinforce": lambda: LLMReinforceLoss(
        make_actor(), sampler_correction="truncate", sampler_bounds=2.0, entropy_coeff=0.01
    ),
    "reinforce_sum_ratio": lambda: LLMReinforceLoss(make_actor(), ratio_level="turn", ratio_reduction="sum"),
    "reinforce_token_granularity": lambda: LLMReinforceLoss(
        make_actor(), kl_coeff=0.1, estimator=ReBN(granularity="token")
    ),
    "grpo": lambda: LLMGRPOLoss(make_actor()),
    "gspo": lambda: LLMGRPOLoss(make_actor(), ratio_level="sequence", unit_weight="equal"),
    "cispo": lambda: LLMGRPOLoss(
        make_actor(), clipping="cispo", kl_in="reward", estimator=GroupRelative(credit="turn")
    ),
    "dual_clip": lambda: LLMReinforceLoss(
        make_actor(), dual_clip=1.3, kl_in="loss", estimator=ReBN(normalize_over="none")
    ),
    "icepop": lambda: LLMGRPOLoss(make_actor(), sampler_correction="mask", sampler_bounds=(0.9, 1.5)),
    "rejection": lambda: LLMPPOLoss(
        make_actor(),
        make_critic(),
        sampler_correction="reject",
        sampler_bounds=(0.8, 1.3),
        sampler_level="sequence",
        sampler_reduction="mean",
        kl_in="reward",
    ),
    "vtrace": lambda: LLMPPOLoss(make_actor(), make_critic(), clipping="none").make_value_estimator(TurnVTrace),
    "dr_grpo": lambda: LLMGRPOLoss(
        make_actor(), weighting="constant", weight_constant=8.0, kl_kind="k2", estimator=GroupRelative(scale="none")
    ),
    "sft": lambda: LLMSFTLoss(make_actor(), entropy_coeff=0.01, estimator=ImitationWeights(min_return=0.0)),
}


def batch_for(loss: TurnPolicyLoss, part: slice = slice(None)) -> TensorDict:
    """Six conversations (or part of them) with old log-probs near the model's, and the estimator's
    figures."""
    rows = make_rows(LAYOUT, group_size=3)
    with torch.no_grad():
        log_prob = loss.actor_network(rows.select(*loss.actor_network.in_keys))["log_prob"]
    for key, scale in (("sample_log_prob", 0.5), ("old_log_prob", 0.3), ("ref_log_prob", 0.2)):
        rows[key] = log_prob + scale * rows["theta_value"].nan_to_num()
    del rows["state_value"], rows["bootstrap_value"]
    rows = rows[part]
    loss.value_estimator(rows)
    if "state_value" in rows:  # a critic that has moved since, on both sides of its clip
        rows["state_value"] = rows["state_value"] + 0.3 * rows["theta"].nan_to_num()
    return rows
