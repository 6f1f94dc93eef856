"""LLMSFTLoss against plain cross-entropy and its definition, and the weights of what is
imitated."""

from __future__ import annotations

import math

import pytest
import torch
from conversations import DOUBLE, LAYOUT, close, law, layouts, make_rows, table_actor, tokens_of
from tensordict import TensorDict
from torch.nn.functional import cross_entropy

from torchrl_llm import keys
from torchrl_llm.modules import TokenScorer
from torchrl_llm.objectives import (
    GroupRelative,
    ImitationWeights,
    LLMSFTLoss,
    NoCredit,
    ReBN,
    TurnGAE,
    TurnPolicyLoss,
    TurnVine,
)
from torchrl_llm.testing.tiny import random_model
from torchrl_llm.testing.tokenizers import word_tokenizer
from torchrl_llm.utils.options import ConfigError, options_of


def weighted(rows: TensorDict) -> TensorDict:
    """The rows with loss weights of their own."""
    weight = torch.rand(rows["turn_ids"].shape, generator=torch.Generator().manual_seed(3), dtype=DOUBLE)
    return rows.set("loss_weight", weight)


def finished(ends: list[str], reward: list[list[float]], turn_ids: list[list[int]]) -> TensorDict:
    """Rows of as many turns as they have rewards, that end as said: "won", "lost" or
    "truncated"."""
    turns = max(map(len, reward))
    mask = torch.tensor([[k < len(row) for k in range(turns)] for row in reward])
    last = torch.tensor([[k == len(row) - 1 for k in range(turns)] for row in reward])

    def at_end(*kinds):
        return last & torch.tensor([[end in kinds] for end in ends])

    turn = {
        "reward": torch.tensor([row + [math.nan] * (turns - len(row)) for row in reward], dtype=DOUBLE),
        "mask": mask,
        "terminated": at_end("won", "lost"),
        "truncated": at_end("truncated"),
        "success": at_end("won"),
    }
    return TensorDict({"turn": turn, "turn_ids": torch.tensor(turn_ids)}, [len(ends)])


def weights_of(rows: TensorDict, **options) -> list[list[float]]:
    return ImitationWeights(**options)(rows)["turn", "advantage"].tolist()


class TestLoss:
    @law(layouts(), examples=8)
    def test_it_is_the_weighted_negative_log_likelihood(self, case):
        rows = weighted(make_rows(*case))
        out = LLMSFTLoss(table_actor(), entropy_coeff=0.3)(rows)
        sums = dict.fromkeys(("loss_objective", "nll", "imitated", "weight", "entropy"), 0.0)
        for row, ids in enumerate(rows["turn_ids"].tolist()):
            for i in (i for i, turn in enumerate(ids) if turn >= 0):
                w, a, log_prob = (rows[key][row, i].item() for key in ("loss_weight", "advantage", "theta"))
                sums["loss_objective"] -= w * a * log_prob
                sums["nll"] -= w * log_prob
                sums["imitated"] += w * (a != 0)
                sums["weight"] += w
                sums["entropy"] += w * -log_prob / 2  # what table_actor writes
        for name, value in sums.items():
            close(out[name].detach(), value)
        close(out["loss_entropy"].detach(), -0.3 * sums["entropy"])

    def test_a_bounded_entropy_pays_up_to_the_bound(self):
        rows = make_rows(LAYOUT)
        entropy = -rows["theta"] / 2
        action = rows["turn_ids"] >= 0
        assert (entropy[action] > 0.4).any()
        assert (entropy[action] < 0.4).any()
        out = LLMSFTLoss(table_actor(), entropy_coeff=0.2, entropy_target=0.4)(rows)
        close(out["loss_entropy"], -0.2 * entropy[action].clamp(max=0.4).mean(), atol=1e-7)

    def test_the_gradient_is_that_of_cross_entropy_on_action_tokens(self, exact_norms):
        model = random_model(word_tokenizer(["a", "b", "c", "d", "e", "f"])).double()
        rows = make_rows(LAYOUT)
        loss = LLMSFTLoss(TokenScorer(model))
        assert (loss.value_estimator.imitate, loss.value_estimator.min_return) == ("all", None)
        out = loss(loss.value_estimator(rows.set(("turn", "success"), torch.zeros_like(rows["turn", "mask"]))))
        out["loss_objective"].backward()
        ours = [parameter.grad.clone() for parameter in model.parameters()]
        model.zero_grad()
        logits = model(rows["tokens"], attention_mask=rows["attention_mask"]).logits
        labels = torch.where(rows["turn_ids"] >= 0, rows["tokens"], -100)
        plain = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        plain.backward()
        close(out["nll"], plain.detach(), atol=1e-7)  # weights are float32
        assert max(grad.abs().max() for grad in ours) > 1e-3
        for mine, parameter in zip(ours, model.parameters(), strict=True):
            close(mine, parameter.grad, atol=1e-7)

    def test_the_log_probs_of_who_wrote_it_are_not_read(self):
        rows = make_rows(LAYOUT)
        unknown = rows.clone().set("sample_log_prob", torch.full_like(rows["sample_log_prob"], math.nan))
        del unknown["old_log_prob"], unknown["ref_log_prob"]
        found = []
        for given in (rows, unknown):
            given["theta"].requires_grad_(True)
            loss = LLMSFTLoss(table_actor(), entropy_coeff=0.1)
            out = loss(given)
            (out["loss_objective"] + out["loss_entropy"]).backward()
            assert keys.SAMPLE_LOG_PROB not in loss.in_keys
            assert set(out.keys()) == set(loss.out_keys)
            found.append((out.detach(), given["theta"].grad))
        for name, value in found[0][0].items():
            assert value.isfinite()
            assert torch.equal(value, found[1][0][name]), name
        assert torch.equal(*(grad[rows["turn_ids"] >= 0] for _, grad in found))

    @pytest.mark.parametrize("name", sorted({*options_of(TurnPolicyLoss)} - {*options_of(LLMSFTLoss)}))
    def test_what_compares_policies_is_no_option(self, name):
        with pytest.raises(TypeError, match=f"LLMSFTLoss has no option '{name}'"):
            LLMSFTLoss(table_actor(), **{name: 0.5})

    def test_what_is_left_are_options_of_one_policy(self):
        shared = {"weighting", "weight_constant", "entropy_coeff", "entropy_target"}
        assert {*options_of(LLMSFTLoss)} == {"actor", "critic", "estimator", *shared}
        assert {"imitate", "min_return", "gamma"} < {*options_of(ImitationWeights)}
        assert not {"kl_coeff", "discounted_objective", "clip_advantage"} & {*options_of(ImitationWeights)}

    @pytest.mark.parametrize(
        ("options", "match"),
        [
            ({"imitate": "wins"}, "imitate is 'wins'"),
            ({"min_return": "high"}, "min_return is 'high'"),
            ({"gamma": 1.5}, "gamma is 1.5"),
            ({"gamma": 0.5, "imitate": "success"}, r"gamma.*0\.5.*min_return"),
        ],
    )
    def test_wrong_options(self, options, match):
        with pytest.raises(ValueError, match=match):
            LLMSFTLoss(table_actor(), estimator=ImitationWeights(**options))

    @pytest.mark.parametrize(
        "chosen", [ReBN, GroupRelative, NoCredit, TurnGAE, TurnVine], ids=lambda each: each.__name__
    )
    def test_advantages_are_no_weights(self, chosen):
        with pytest.raises(
            ValueError, match=f"The estimator {chosen.__name__} writes advantages, and LLMSFTLoss takes weights"
        ):
            LLMSFTLoss(table_actor()).make_value_estimator(chosen)

    def test_its_options_are_its_estimators(self):
        loss = LLMSFTLoss(table_actor(), estimator=ImitationWeights(imitate="return", min_return=0.5, gamma=0.9))
        estimator = loss.value_estimator
        assert (estimator.imitate, estimator.min_return, estimator.gamma) == ("return", 0.5, 0.9)


ROWS = {
    "ends": ["won", "lost", "truncated"],
    "reward": [[0.5, 0.0, 1.0], [0.25], [2.0, 4.0]],
    "turn_ids": [[-1, 0, 0, 1, -1, 2], [-1, 0, -1, -1, -1, -1], [-1, 0, -1, 1, 1, -1]],
}


class TestImitationWeights:
    @pytest.mark.parametrize(
        ("options", "expected"),
        [
            ({}, [[1, 1, 1], [1, 0, 0], [1, 1, 0]]),
            ({"imitate": "success"}, [[1, 1, 1], [0, 0, 0], [0, 0, 0]]),
            ({"imitate": "return"}, [[1.5, 1, 1], [0.25, 0, 0], [6, 4, 0]]),
            ({"imitate": "return", "gamma": 0.5}, [[0.75, 0.5, 1], [0.25, 0, 0], [4, 4, 0]]),
            ({"min_return": 1.0}, [[1, 1, 1], [0, 0, 0], [1, 1, 0]]),
            ({"min_return": 1.0, "gamma": 0.5}, [[0, 0, 1], [0, 0, 0], [1, 1, 0]]),
            ({"imitate": "success", "min_return": 1.25}, [[1, 0, 0], [0, 0, 0], [0, 0, 0]]),
            ({"imitate": "return", "min_return": 4.0}, [[0, 0, 0], [0, 0, 0], [6, 4, 0]]),
        ],
        ids=str,
    )
    def test_by_hand(self, options, expected):
        rows = finished(**ROWS)
        assert weights_of(rows, **options) == expected
        for row, weights in enumerate(expected):
            for turn, weight in enumerate(weights):
                places = tokens_of(rows["turn_ids"], row, turn)
                assert rows["advantage"][row, places].tolist() == [weight] * len(places)
        assert not rows["advantage"][rows["turn_ids"] < 0].any()

    def test_the_value_target_is_the_return(self):
        rows = ImitationWeights(imitate="success", gamma=0.5)(finished(**ROWS))
        assert rows["turn", "value_target"].tolist() == [[0.75, 0.5, 1], [0.25, 0, 0], [4, 4, 0]]

    @pytest.mark.parametrize(
        ("imitate", "expected"), [("all", [[1, 0, 1]]), ("success", [[1, 0, 1]]), ("return", [[1.75, 0, 1]])]
    )
    def test_a_turn_without_action_tokens_pays_the_one_before(self, imitate, expected):
        rows = finished(["won"], [[0.5, 0.25, 1.0]], [[-1, 0, 0, -1, 2]])
        assert weights_of(rows, imitate=imitate) == expected
        assert rows["advantage"].tolist() == [[0, expected[0][0], expected[0][0], 0, 1]]

    def test_an_episode_may_end_in_a_turn_without_action_tokens(self):
        rows = finished(["won", "lost"], [[0.0, 1.0], [0.0, 1.0]], [[-1, 0, 0], [-1, 0, -1]])
        assert weights_of(rows, imitate="success") == [[1, 0], [0, 0]]

    @pytest.mark.parametrize("gamma", [1.0, 0.5])
    def test_a_negative_return_is_no_weight(self, gamma):
        rows = finished(["won", "lost"], [[1.0, 1.0], [0.0, -0.5]], [[-1, 0, 1], [-1, 0, 1]])
        with pytest.raises(ConfigError, match=r'imitate="return" weighs by returns, and one is -0\.5: .*min_return'):
            ImitationWeights(imitate="return", gamma=gamma)(rows)
        assert weights_of(rows, imitate="return", gamma=gamma, min_return=0.0) == [[1 + gamma, 1], [0, 0]]

    def test_negative_rewards_whose_returns_are_not_are_weights(self):
        rows = finished(["won"], [[-0.5, 1.0]], [[-1, 0, 1]])
        assert weights_of(rows, imitate="return") == [[0.5, 1]]

    def test_an_episode_that_runs_is_refused(self):
        rows = finished(["running"], [[1.0]], [[-1, 0]])
        with pytest.raises(ValueError, match="neither terminated nor truncated"):
            ImitationWeights()(rows)
