"""Early settling in miniature, and what a KL to the starting policy whose weight falls to 0 does
about it. Exact, without samples."""

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule

from torchrl_llm.objectives import LLMGRPOLoss

STEPS = 400
ANSWERS = 10
TURN_IDS = torch.tensor([[0, -1]] + [[0, 1]] * ANSWERS)
RETURN = torch.tensor([0.0, 0.3] + [-1.0] * (ANSWERS - 1))
"""The first row plays safe; the others take the better path, which is better only with the one
right answer of ten."""


class Policy(torch.nn.Module):
    """Tables of logits: safe or better, and the answer there."""

    def __init__(self):
        super().__init__()
        self.path, self.answer = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(ANSWERS))

    def forward(self, turn_ids):
        path, answer = self.path.log_softmax(0), self.answer.log_softmax(0)
        first = torch.cat([path[:1], path[1:].expand(ANSWERS)])
        return torch.stack([first, torch.cat([answer.new_zeros(1), answer])], 1)


def probability_of_the_better_path(**options) -> float:
    """At the end of training by the exact gradient: each row counts as often as the policy plays
    it."""
    fall, policy = options.pop("fall", None), Policy()
    loss = LLMGRPOLoss(
        TensorDictModule(policy, in_keys=["turn_ids"], out_keys=["log_prob"]), clipping="none", **options
    )
    optimizer = torch.optim.SGD(policy.parameters(), lr=1.0)
    start = policy(TURN_IDS).detach()
    for step in range(STEPS):
        if fall is not None:
            loss.kl_fraction = max(0.0, 1 - step / (fall * STEPS))
        log_prob = policy(TURN_IDS).detach()
        share = log_prob.sum(1).exp()
        rows = {
            "turn_ids": TURN_IDS,
            "sample_log_prob": log_prob,
            "ref_log_prob": start,
            "advantage": (RETURN - share @ RETURN)[:, None].expand(-1, 2),
            "loss_weight": share[:, None] * (TURN_IDS >= 0),
        }
        out = loss(TensorDict(rows, [len(TURN_IDS)]))
        optimizer.zero_grad()
        sum(value for name, value in out.items() if name.startswith("loss_")).backward()
        optimizer.step()
    return policy.path.softmax(0)[1].item()


def test_without_a_kl_the_better_path_is_lost_before_its_answer_is_learned():
    assert probability_of_the_better_path(kl_coeff=0.0) < 0.01


def test_a_kl_that_falls_keeps_it_and_lets_the_policy_choose_at_the_end():
    assert probability_of_the_better_path(kl_coeff=0.3, kl_kind="k2", fall=0.8) > 0.97


def test_a_constant_one_keeps_it_and_never_chooses():
    """Under it a token's best distribution is the start's times exp(value / kl_coeff), and both of
    its choices have a share."""
    kept = probability_of_the_better_path(kl_coeff=0.3, kl_kind="k2")
    answer = (RETURN[1:] / 0.3).softmax(0)
    assert kept == pytest.approx(torch.sigmoid(answer @ RETURN[1:] / 0.3).item(), abs=1e-3)
    assert 0.5 < kept < 0.7
