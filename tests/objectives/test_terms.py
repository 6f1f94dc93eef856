"""What a loss of one's own does in ``terms``: it sees turn ids, entropy and both log-probs, and
needs no private method."""

from __future__ import annotations

import pytest
import torch
from conversations import LAYOUT, close, make_rows, table_actor

from torchrl_llm import functional as F
from torchrl_llm.objectives import GroupRelative, LLMGRPOLoss, total


class TokenGSPO(LLMGRPOLoss):
    """GSPO-token (Zheng et al., 2025, arXiv:2507.18071, eq. 13): the sequence's ratio, with each
    token's own gradient."""

    def terms(self, rows, scored):
        log_prob, advantage = scored["log_prob"], rows["advantage"]
        log_ratio = (log_prob - self.old_log_prob(rows)).detach()
        sequence = F.pool_log_ratio(log_ratio, rows["turn_ids"], "sequence", "mean")
        ratio = (sequence + log_prob - log_prob.detach()).exp()
        objective = F.clipped_objective(ratio.log(), advantage, self.clip_low, self.clip_high)[0]
        return super().terms(rows, scored) | {"loss_objective": -(rows["loss_weight"] * objective).sum()}


class Surprised(LLMGRPOLoss):
    """Only tokens of high entropy are trained (Wang et al., 2025, arXiv:2506.01939), and their
    share is told."""

    def terms(self, rows, scored):
        surprised = scored["entropy"] > 0.5
        weighted = rows.copy().set("loss_weight", rows["loss_weight"] * surprised)
        return super().terms(weighted, scored) | {"surprised": (rows["loss_weight"] * surprised).sum()}


def gradient(loss, rows):
    theta = rows["theta"].clone().requires_grad_()
    out = loss(rows.copy().set("theta", theta))
    total(out).backward()
    return out, theta.grad


def rows_with_advantage():
    rows = make_rows(LAYOUT)
    action = rows["turn_ids"] >= 0
    rows["advantage"] = torch.where(
        action, torch.linspace(-1, 1, action.numel()).view(action.shape).to(rows["theta"]), 0.0
    )
    return rows


def test_gspo_per_token():
    """With one advantage a sequence it has GSPO's gradient (ibid., eq. 17), and with several
    another."""
    options = {"kl_coeff": 0.0, "clip_epsilon": 0.2, "estimator": GroupRelative(partial="allow")}
    rows = rows_with_advantage()
    per_row = torch.where(rows["turn_ids"] >= 0, torch.linspace(-1, 1, len(rows))[:, None].to(rows["theta"]), 0.0)
    same = rows.clone().set("advantage", per_row)
    gspo = LLMGRPOLoss(table_actor(), ratio_level="sequence", weighting="sequence", **options)
    token = TokenGSPO(table_actor(), weighting="sequence", **options)
    close(gradient(token, same)[1], gradient(gspo, same)[1])
    assert (gradient(token, rows)[1] - gradient(gspo, rows)[1]).abs().max() > 1e-4


def test_tokens_of_high_entropy_alone():
    rows = rows_with_advantage()
    loss = Surprised(table_actor(), kl_coeff=0.0, estimator=GroupRelative(partial="allow"))
    out, grad = gradient(loss, rows)
    stock = gradient(LLMGRPOLoss(table_actor(), kl_coeff=0.0), rows)[1]
    entropy = table_actor()(rows.clone())["entropy"]
    chosen = (entropy > 0.5) & (rows["turn_ids"] >= 0)
    assert 0 < chosen.sum() < (rows["turn_ids"] >= 0).sum()
    close(grad, torch.where(chosen, stock, 0.0))
    close(out["surprised"], chosen.sum() / (rows["turn_ids"] >= 0).sum())


def returning(terms):
    class Own(LLMGRPOLoss):
        def terms(self, rows, scored):
            return terms(rows, scored)

    return Own(table_actor(), kl_coeff=0.0)


def test_metrics_are_detached_and_the_weight_is_there():
    rows = rows_with_advantage()
    rows["theta"].requires_grad_()
    loss = returning(lambda rows, scored: {"loss_own": scored["log_prob"].sum(), "seen": scored["log_prob"].sum()})
    out = loss(rows)
    assert out["loss_own"].requires_grad
    assert not out["seen"].requires_grad
    close(out["weight"].double(), torch.tensor(1.0).double())


@pytest.mark.parametrize(
    ("terms", "error", "message"),
    [
        (lambda rows, scored: None, TypeError, "Own.terms returned None; expected a dictionary"),
        (lambda rows, scored: {"loss_own": 1.0}, TypeError, "expected a dictionary of scalar tensors"),
        (lambda rows, scored: {"loss_own": scored["log_prob"]}, ValueError, r"Own.terms returned loss_own \["),
        (
            lambda rows, scored: {"own": scored["log_prob"].sum()},
            ValueError,
            "own; expected a name that starts with loss_",
        ),
    ],
)
def test_terms_that_no_loss_can_be_made_of(terms, error, message):
    with pytest.raises(error, match=message):
        returning(terms)(rows_with_advantage())
