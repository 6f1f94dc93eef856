"""The sweeps of the credit study: what must be exact is, and exact figures equal the figures of
drawn batches."""

from pathlib import Path

import pytest
import torch

from torchrl_llm.modules import TokenScorer
from torchrl_llm.objectives import LLMReinforceLoss, ReBN
from torchrl_llm.testing.enumerable import EnumerableMDP, tiny_lm

ROOT = Path(__file__).parents[2]


@pytest.fixture
def sweeps(load):
    """The module."""
    return load("credit_study.sweeps")


def by_cell(found) -> dict:
    return {(each["row"], each["column"]): each for each in found}


@pytest.mark.extra
def test_the_exact_noise_is_that_of_drawn_batches(sweeps):
    mdp, actor = EnumerableMDP(max_turns=None), TokenScorer(tiny_lm(0))
    rows, truth, scores = mdp.rows(actor), mdp.policy_gradient(actor), sweeps.token_scores(mdp, actor)
    loss = LLMReinforceLoss(actor, **sweeps.PLAIN, estimator=ReBN(gamma=1.0, normalize_over="none"))
    probability = mdp.log_probability(actor).detach().exp()
    exact = sweeps.exact_summary(sweeps._conversations(loss, rows, scores), probability, truth)
    index = sweeps.draw(mdp, actor, 2000, sweeps.BATCH, torch.Generator().manual_seed(1), 1)
    drawn = sweeps.summary(sweeps.gradients_of(loss, rows, scores, index, 1), truth)
    assert exact["cosine"] == pytest.approx(1.0, abs=1e-6)
    assert exact["noise"] == pytest.approx(drawn["noise"], rel=0.1)


def test_a_critic_is_exact_with_lambda_1_or_without_error(sweeps):
    cells = by_cell(sweeps.critics("unequal tasks", 0))
    for (lmbda, error), found in cells.items():
        unbiased = lmbda == "1" or error == "0"
        assert (found["cosine"] == pytest.approx(1.0, abs=1e-6)) == unbiased
    assert cells["0", "2"]["cosine"] < cells["0.95", "2"]["cosine"]


def test_only_the_whole_weight_of_a_conversation_is_exact(sweeps, monkeypatch):
    monkeypatch.setattr(sweeps, "UPDATES", (0, 4))
    names = ("none: as if on-policy", "weight of a turn, at most 2", "weight of a conversation, unbounded")
    monkeypatch.setattr(sweeps, "CORRECTIONS", {name: sweeps.CORRECTIONS[name] for name in names})
    cells = by_cell(sweeps.staleness("equal tasks", 0))
    for (correction, updates), found in cells.items():
        exact = updates == "0" or correction.endswith("unbounded")
        assert (found["cosine"] == pytest.approx(1.0, abs=1e-6)) == exact, correction
    assert cells[names[0], "0"]["kl"] == pytest.approx(0.0, abs=1e-12)
    assert cells[names[0], "4"]["kl"] > 0.1


@pytest.mark.extra
def test_trees_are_unbiased_and_pay_where_the_last_turn_decides(sweeps):
    cells = by_cell(sweeps.trees("", 0, 500))
    assert all(found["cosine"] == pytest.approx(1.0, abs=0.02) for found in cells.values())
    none, late = (cells[name, "the last"]["noise"] for name in ("8 episodes", "2 trees of 4, before the last turn"))
    assert late < 0.8 * none
    none, late = (cells[name, "the first"]["noise"] for name in ("8 episodes", "2 trees of 4, before the last turn"))
    assert late > 2.0 * none


def test_a_table_has_the_medians_over_the_policies(sweeps):
    results = [
        {
            "sweep": "groups",
            "game": "equal tasks",
            "policy": policy,
            "row": "a",
            "column": "2",
            "cosine": cosine,
            "noise": 2.0,
        }
        for policy, cosine in enumerate([0.5, 0.1, 0.9])
    ]
    assert sweeps.sweep_table(results, "groups", "equal tasks").splitlines() == [
        "|  | groups of 2 |",
        "|---|---|",
        "| a | 0.500, 2.00 |",
    ]
