"""What is biased, and by how much: :data:`BIASES`, the table of docs/credit.md.

The figures are of one game and one policy: they show that a bias is there and how it acts, not how
large it is elsewhere.

``python tests/objectives/biases.py`` prints the table.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass

import torch
from exact_games import CUT, KL, LONG, ONE, PAIR, WALK, WHOLE, Study, graded, two_groups
from gigpo import GiGPO
from hgpo import HGPO
from mt_grpo import MTGRPO
from published_objectives import DPPO, GMPO, IPO, SAPO
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from torchrl_llm import functional as F
from torchrl_llm import keys
from torchrl_llm.objectives import LLMPPOLoss, LLMReinforceLoss, TurnPolicyLoss, total, write_loss_weights
from torchrl_llm.testing.enumerable import EnumerableMDP, cosine, flat_gradient, relative_error

Measure = Callable[[Study], tuple[Tensor, Tensor]]
"""The expected gradient and the true one."""


@dataclass(frozen=True)
class Bias:
    """What a choice makes of the gradient.

    Attributes:
        measure: the expected gradient and the true one.
        cosine: between them: 1 is the same direction.
        size: length of the expected gradient over the length of the true one.
    """

    measure: Measure
    cosine: float
    size: float


def reduced(reduction: str, *, exact: bool, mdp: EnumerableMDP = WHOLE) -> Measure:
    def measure(study: Study) -> tuple[Tensor, Tensor]:
        rows = study.rows(mdp, exact=exact)
        return mdp.expected_gradient(study.ppo(value_reduction=reduction), rows=rows), study.truth(mdp)

    return measure


def weighted(kind: str) -> Measure:
    options = {"weighting": kind, "weight_constant": None}
    return lambda study: (CUT.expected_gradient(study.reinforce(**options), 2), study.truth(CUT))


def normalized(size: int, loss: Callable[[Study], TurnPolicyLoss], mdp: EnumerableMDP = CUT, **draw: bool) -> Measure:
    def measure(study: Study) -> tuple[Tensor, Tensor]:
        policy_loss, rows = loss(study), study.rows(mdp)
        bootstrap = rows[keys.BOOTSTRAP_VALUE] if isinstance(policy_loss, LLMPPOLoss) else None
        expected = mdp.policy_gradient(study.actor, mdp.returns(bootstrap=bootstrap))
        return mdp.expected_gradient(policy_loss, size, rows=rows, **draw), expected

    return measure


def group_std(size: int, mdp: EnumerableMDP = CUT) -> Measure:
    return normalized(size, lambda study: study.grpo(baseline="mean", scale="std"), mdp, same_task=True)


def kl_term(kind: str) -> Measure:
    def measure(study: Study) -> tuple[Tensor, Tensor]:
        with_term = study.reinforce(kl_coeff=KL, kl_in="loss", kl_kind=kind)
        both = WHOLE.expected_gradient(with_term, rows=study.rows(WHOLE))
        return (WHOLE.expected_gradient(study.reinforce()) - both) / KL, study.kl_gradient(WHOLE)

    return measure


def discounted(gamma: float) -> Measure:
    return lambda study: (WHOLE.expected_gradient(study.reinforce(gamma=gamma)), study.truth(WHOLE, gamma))


def published(estimator: type, scale: str, mdp: EnumerableMDP = WALK, size: int = 3, factor: float = 1.0) -> Measure:
    def measure(study: Study) -> tuple[Tensor, Tensor]:
        policy_loss = study.grpo().make_value_estimator(estimator, baseline="mean", scale=scale)
        return mdp.expected_gradient(policy_loss, size, same_task=True), factor * study.truth(mdp)

    return measure


def gigpo(scale: str) -> Measure:
    """Against twice the true gradient, for the advantages of the episode and of the turn are
    added."""
    return published(GiGPO, scale, factor=2.0)


def over_two_groups(**options: object) -> Measure:
    """Of the rewards and, where they are components, the grades."""

    def measure(study: Study) -> tuple[Tensor, Tensor]:
        rows = graded(WALK, study.actor)
        worth = WALK.returns() + ("components" in options) * rows[keys.turn_extra("grade")].sum(1)
        gradient = two_groups(WALK, study.grpo(baseline="mean", **options), rows)
        return gradient, WALK.policy_gradient(study.actor, worth)

    return measure


def after_steps(kind: type[LLMReinforceLoss] = LLMReinforceLoss, **options: object) -> Measure:
    """Episodes of the policy, and the gradient further up along the true one, where tokens have
    moved by 0.05 nats (KL)."""

    def measure(study: Study) -> tuple[Tensor, Tensor]:
        rows, chance = study.rows(WHOLE), WHOLE.log_probability(study.actor).exp().detach()
        shares = chance.unsqueeze(1) * (rows[keys.TURN_IDS] >= 0)
        start, direction = parameters_to_vector(study.actor.parameters()).detach(), study.truth(WHOLE)
        moved, gap, steps = Study(0), 0.0, 0
        moved.actor = deepcopy(study.actor)
        while gap < 0.05:
            steps += 1
            with torch.no_grad():
                vector_to_parameters(start + 0.1 * steps * direction / direction.norm(), moved.actor.parameters())
                now = moved.actor(rows.clone())[keys.LOG_PROB]
            gap = float((shares * F.kl_estimate(rows[keys.SAMPLE_LOG_PROB], now)).sum() / shares.sum())
        policy_loss = moved.reinforce(kind, **options)
        batch = write_loss_weights(policy_loss.value_estimator(rows), policy_loss)
        batch[keys.LOSS_WEIGHT] = len(rows) * batch[keys.LOSS_WEIGHT].double() * chance.unsqueeze(1)
        return -flat_gradient(total(policy_loss(batch)), moved.actor), moved.truth(WHOLE)

    return measure


def maximum_likelihood(study: Study) -> tuple[Tensor, Tensor]:
    gradient = PAIR.expected_gradient(study.grpo(baseline="mean", scale="mean"), 3, same_task=True)
    return gradient, study.truth(PAIR)


BIASES = {
    "value `last`, perfect critic": Bias(reduced("last", exact=True), 0.9908, 0.8324),
    "value `mean`, perfect critic": Bias(reduced("mean", exact=True), 0.9981, 0.9141),
    "value `last`, random critic": Bias(reduced("last", exact=False), 0.9992, 1.0698),
    "value `mean`, random critic": Bias(reduced("mean", exact=False), 0.9998, 1.0347),
    "value `last`, perfect critic, turns of up to 4 tokens": Bias(
        reduced("last", exact=True, mdp=LONG), 0.9057, 0.2515
    ),
    "value `mean`, perfect critic, turns of up to 4 tokens": Bias(
        reduced("mean", exact=True, mdp=LONG), 0.9934, 0.5353
    ),
    "weights per token, batches of 2": Bias(weighted("token"), 0.9974, 0.4459),
    "weights per turn (divides by its length), batches of 2": Bias(weighted("turn"), 0.9962, 0.5129),
    "weights per sequence (divides by its length), batches of 2": Bias(weighted("sequence"), 0.9883, 0.4441),
    "group standard deviation, groups of 2, two tasks": Bias(group_std(2), 0.2837, 0.2709),
    "group standard deviation, groups of 3, two tasks": Bias(group_std(3), 0.2870, 0.4076),
    "group standard deviation, groups of 2, one task": Bias(group_std(2, ONE), 0.9996, 0.2404),
    "GiGPO without standard deviations, groups of 3, one task": Bias(gigpo("none"), 0.9999, 0.6219),
    "GiGPO, groups of 3, one task": Bias(gigpo("std"), 0.9996, 0.3688),
    "HGPO without standard deviations, groups of 3, one task": Bias(published(HGPO, "none"), 0.9997, 0.5745),
    "HGPO, groups of 3, one task": Bias(published(HGPO, "std"), 0.9991, 0.4418),
    "MT-GRPO, two turns, groups of 3, one task": Bias(published(MTGRPO, "std"), 0.9997, 0.5702),
    "MT-GRPO without standard deviations, three turns, groups of 2, one task": Bias(
        published(MTGRPO, "none", WALK.uncut, 2), 0.9999, 0.4644
    ),
    "MaxRL on outcomes, groups of 3, two tasks (against the success rate)": Bias(maximum_likelihood, 0.9981, 1.5222),
    "REINFORCE++ with its baseline, two groups of 2, one task": Bias(
        over_two_groups(scale="none", whiten=True), 0.9999, 0.3378
    ),
    "GDPO, two groups of 2, one task": Bias(
        over_two_groups(components={"grade": 1.0}, scale="std", whiten=True), 0.8063, 0.1464
    ),
    "REINFORCE++ (ReBN per token), batches of 2": Bias(
        normalized(2, lambda study: study.reinforce(normalize_over="batch", granularity="token")), 0.9018, 0.4837
    ),
    "ReBN, batches of 2": Bias(normalized(2, lambda study: study.reinforce(normalize_over="batch")), 0.8344, 0.4376),
    "ReBN, batches of 3": Bias(normalized(3, lambda study: study.reinforce(normalize_over="batch")), 0.8875, 0.5028),
    "whitening, batches of 2": Bias(normalized(2, lambda study: study.ppo(whiten=True)), 0.9501, 0.4140),
    "whitening, batches of 3": Bias(normalized(3, lambda study: study.ppo(whiten=True)), 0.9735, 0.5037),
    "0.05 nats later, no clip": Bias(after_steps(clipping="none"), 0.9858, 0.6305),
    "0.05 nats later, PPO's clip (0.2)": Bias(after_steps(), -0.6867, 0.4708),
    "0.05 nats later, CISPO (1.0, 0.28)": Bias(after_steps(clipping="cispo", clip_epsilon=(1.0, 0.28)), 0.9827, 0.5977),
    "0.05 nats later, SAPO (1.0, 1.05)": Bias(after_steps(SAPO), 0.9853, 0.6045),
    "0.05 nats later, DPPO's mask (0.2)": Bias(after_steps(DPPO), 0.0839, 0.2425),
    "0.05 nats later, IPO's mask (0.2)": Bias(after_steps(IPO), 0.6314, 0.2270),
    "0.05 nats later, GMPO (0.4)": Bias(after_steps(GMPO), -0.4700, 0.4052),
    "KL k2 in the loss (against the KL of conversations)": Bias(kl_term("k2"), 0.9983, 0.8898),
    "KL k3 in the loss (against the KL of conversations)": Bias(kl_term("k3"), 0.9982, 0.7902),
    "discount 0.9 without its factor per turn": Bias(discounted(0.9), 0.9997, 1.0819),
    "discount 0.5 without its factor per turn": Bias(discounted(0.5), 0.9798, 1.5921),
}


def bias_table(policies: int = 8) -> str:
    """The measured biases as a table in Markdown: of the policy of the tests, and the range over
    several policies."""
    lines = [
        f"| choice | cosine | size | relative error | cosine, {policies} policies: least / median / most |",
        "|---|---|---|---|---|",
    ]
    studies = [Study(seed) for seed in range(policies)]
    for name, bias in BIASES.items():
        pairs = [bias.measure(study) for study in studies]
        cosines = torch.tensor([cosine(*pair) for pair in pairs])
        gradient, expected = pairs[0]
        size, error = gradient.norm() / expected.norm(), relative_error(gradient, expected)
        spread = " / ".join(f"{x:.3f}" for x in (cosines.amin(), cosines.median(), cosines.amax()))
        lines.append(f"| {name} | {cosines[0]:.3f} | {size:.3f} | {error:.3f} | {spread} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(bias_table() + "\n")
