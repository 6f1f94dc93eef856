"""LLMPPOLoss, LLMReinforceLoss and LLMGRPOLoss: the terms, estimators and defaults that each
adds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conversations import DOUBLE, LAYOUT, close, make_rows, table_actor, table_critic
from test_structure import code_lines

import torchrl_llm.objectives as package
from torchrl_llm import functional as F
from torchrl_llm.objectives import GroupRelative, LLMGRPOLoss, LLMPPOLoss, LLMReinforceLoss, ReBN, TurnGAE


class TestLLMPPOLoss:
    @pytest.mark.parametrize("granularity", ["turn", "token"])
    @pytest.mark.parametrize("clip_value", [None, 0.3])
    def test_the_critic_term(self, granularity, clip_value):
        rows = make_rows(LAYOUT)
        ids = rows["turn_ids"].tolist()
        loss = LLMPPOLoss(
            table_actor(),
            table_critic(),
            clip_value=clip_value,
            critic_coeff=0.7,
            estimator=TurnGAE(granularity=granularity, whiten=False),
        )
        rows = loss.value_estimator(rows)
        terms, clipped = [], []
        for b, row in enumerate(ids):
            for k in sorted(set(row) - {-1}):
                tokens = [i for i, turn in enumerate(row) if turn == k]
                for i in tokens if granularity == "token" else tokens[:1]:
                    v, old, target = (rows[key][b, i] for key in ("theta_value", "state_value", "value_target"))
                    near = v if clip_value is None else old + (v - old).clamp(-clip_value, clip_value)
                    terms.append(0.5 * max((v - target) ** 2, (near - target) ** 2))
                    clipped.append(float(clip_value is not None and abs(v - old) > clip_value))
        out = loss(rows)
        close(out["loss_critic"], 0.7 * sum(terms) / len(terms), atol=1e-6)
        close(out["value_clip_fraction"], sum(clipped) / len(clipped), atol=1e-6)

    @pytest.mark.parametrize("reduction", ["first", "mean", "last"])
    def test_the_value_is_pooled_as_in_the_estimator(self, reduction):
        rows = make_rows(LAYOUT)
        loss = LLMPPOLoss(table_actor(), table_critic(), clip_value=None, estimator=TurnGAE(value_reduction=reduction))
        loss.value_estimator(rows)
        turns = rows["turn", "mask"].shape[1]
        value = F.turn_reduce(rows["theta_value"], rows["turn_ids"], turns, reduction)
        acted = F.turn_lengths(rows["turn_ids"], turns) > 0
        error = (value - rows["turn", "value_target"]).square()
        out = loss(rows)
        close(out["loss_critic"], 0.25 * error[acted].mean(), atol=1e-6)
        expected = F.explained_variance(value, rows["turn", "value_target"], acted)
        close(out["explained_variance"], expected, atol=1e-6)

    def test_the_old_value_and_target_are_frozen(self):
        rows = make_rows(LAYOUT)
        loss = LLMPPOLoss(table_actor(), table_critic())
        loss.value_estimator(rows)
        for key in ("state_value", "value_target"):
            rows[key] = rows[key].nan_to_num().requires_grad_()
        theta = rows["theta_value"].clone().requires_grad_()
        loss(rows.set("theta_value", theta))["loss_critic"].backward()
        assert theta.grad.abs().sum() > 0
        assert rows["state_value"].grad is None
        assert rows["value_target"].grad is None

    def test_one_weight_without_the_other_is_an_error(self):
        rows = make_rows(LAYOUT)
        rows["loss_weight"] = F.loss_weights(rows["turn_ids"])
        with pytest.raises(KeyError, match=r"critic_weight.*write_loss_weights"):
            LLMPPOLoss(table_actor(), table_critic())(rows)

    def test_options_reach_the_estimator(self):
        loss = LLMPPOLoss(
            table_actor(),
            table_critic(),
            estimator=TurnGAE(gamma=0.5, lmbda=0.6, granularity="auto", single_turn=True, whiten=False),
        )
        estimator = loss.value_estimator
        assert isinstance(estimator, TurnGAE)
        assert (estimator.gamma, estimator.lmbda, estimator.granularity, estimator.whiten) == (0.5, 0.6, "token", False)
        assert estimator.value_network is loss.critic_network

    def test_defaults(self):
        loss = LLMPPOLoss(table_actor(), table_critic())
        assert (loss.kl_coeff, loss.kl_kind, loss.kl_in, loss.critic_coeff, loss.clip_value) == (
            0.01,
            "k3",
            "loss",
            0.5,
            0.2,
        )
        assert (loss.ratio_level, loss.weighting, loss.clip_low, loss.clip_high) == ("token", "token", 0.2, 0.2)
        assert (loss.value_estimator.gamma, loss.value_estimator.lmbda) == (0.99, 0.95)
        with pytest.raises(ValueError, match="clip_value"):
            LLMPPOLoss(table_actor(), table_critic(), clip_value=-0.1)


class TestLLMReinforceLoss:
    def test_the_kl_is_in_the_reward_and_not_in_the_loss(self):
        loss = LLMReinforceLoss(table_actor(), kl_coeff=0.3, estimator=ReBN(gamma=0.5))
        assert isinstance(loss.value_estimator, ReBN)
        assert (loss.value_estimator.gamma, loss.value_estimator.kl_coeff) == (0.5, 0.3)
        out = loss(make_rows(LAYOUT))
        assert "loss_kl" not in out
        assert "kl" in out
        in_loss = LLMReinforceLoss(table_actor(), kl_coeff=0.3, kl_in="loss", estimator=ReBN(normalize_over="none"))
        assert "loss_kl" in in_loss(make_rows(LAYOUT))
        assert (in_loss.value_estimator.kl_coeff, in_loss.value_estimator.normalize_over) == (0.0, "none")
        assert LLMReinforceLoss(table_actor()).value_estimator.gamma == 0.9


class TestLLMGRPOLoss:
    def test_options_reach_the_estimator(self):
        options = {"baseline": "leave_one_out", "scale": "none", "group_size": 3, "partial": "allow"}
        estimator = LLMGRPOLoss(
            table_actor(), estimator=GroupRelative(gamma=0.5, credit="turn", **options)
        ).value_estimator
        assert isinstance(estimator, GroupRelative)
        assert (estimator.gamma, estimator.credit) == (0.5, "turn")
        assert {name: estimator.options[name] for name in options} == options

    def test_gspo_is_the_sequence_mean_of_one_clipped_term_per_conversation(self):
        rows = make_rows(LAYOUT)
        ids = rows["turn_ids"]
        rows["advantage"] = torch.arange(6.0, dtype=DOUBLE)[:, None].expand(ids.shape) - 2.5
        action = ids >= 0
        log_ratio = torch.where(action, rows["theta"] - rows["old_log_prob"], 0.0).sum(1) / action.sum(1)
        objective, _ = F.clipped_objective(log_ratio, rows["advantage"][:, 0], 0.2, 0.2)
        out = LLMGRPOLoss(table_actor(), ratio_level="sequence", unit_weight="equal")(rows)
        close(out["loss_objective"], -objective.mean(), atol=1e-6)


def test_the_three_files_are_thin():
    folder = Path(package.__file__).parent
    assert all(len(code_lines((folder / f"{name}.py").read_text())) <= 75 for name in ("ppo", "reinforce", "grpo"))
