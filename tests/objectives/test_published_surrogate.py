"""Losses, KL and weights out of other projects' tests, which published.py names, met by our
functions."""

from __future__ import annotations

import math

import pytest
import torch
from conversations import DOUBLE, table_actor
from published import doubles, meets
from tensordict import TensorDict
from torch import Tensor

from torchrl_llm import functional as F
from torchrl_llm.objectives import TurnPolicyLoss


def token_loss(log_prob: Tensor, old: Tensor, advantage: Tensor, ref: Tensor | None = None, **options) -> TensorDict:
    """The loss module's output where the actor's log-probs are given; every row is one turn of
    actions only."""
    rows = {
        "theta": log_prob,
        "sample_log_prob": old,
        "advantage": advantage,
        "turn_ids": torch.zeros(log_prob.shape, dtype=torch.int64),
    }
    rows |= {} if ref is None else {"ref_log_prob": ref}
    return TurnPolicyLoss(table_actor(), **options)(TensorDict(rows, [len(log_prob)]))


class TestObjectives:
    # NeMo RL's running example: ratios 0.5, 1, 1.5.
    ADVANTAGE = ((1.0, -1.0, 2.0),)
    LOG_PROB = ((-1.69315, -1.0, -0.59453),)
    # NeMo RL's and SkyRL's example for the dual clip and CISPO: ratios 0.5, 1, 10.
    STEEP = ([[1.0, -1.0, -4.0]], [[-1.69315, -1.0, -0.69741]], [[-1.0, -1.0, -3.0]])

    def example(self) -> tuple[Tensor, Tensor, Tensor]:
        advantage, log_prob = doubles(self.ADVANTAGE, self.LOG_PROB)
        return log_prob, torch.full_like(log_prob, -1.0), advantage

    def test_nemo_ppo_clip(self):
        """``test_clipped_pg_loss_ppo_clipping``: terms -0.5, 1, -2.4, loss -0.6333."""
        log_prob, old, advantage = self.example()
        meets(-F.clipped_objective(log_prob - old, advantage, 0.2, 0.2)[0], [[-0.5, 1.0, -2.4]], 4)
        meets(token_loss(log_prob, old, advantage)["loss_objective"], -0.6333, 4)

    def test_torchtune_ppo_clip(self):
        """``TestPPOLoss``: ratio e is clipped at 1.2, e^0.1 is not.

        For the ratio 1/e its test names 0.8 but compares with ``rtol=1e6``; the pessimistic bound
        is the smaller one, 1/e, whose gradient stays.
        """
        objective, clipped = F.clipped_objective(doubles([1.0, 0.1, -1.0]), torch.ones(3, dtype=DOUBLE), 0.2, 0.2)
        meets(objective, [1.2, math.exp(0.1), math.exp(-1.0)], 7)
        assert clipped.tolist() == [True, False, False]

    def test_dual_clip(self):
        """SkyRL's ``test_policy_loss_dual_clip`` (sum 12.5) and NeMo RL's
        ``test_clipped_pg_loss_dual_clip`` (mean 4.1667).

        Without the dual clip the last term is 40.
        """
        advantage, log_prob, old = doubles(*self.STEEP)
        terms = -F.clipped_objective(log_prob - old, advantage, 0.2, 0.2, dual_clip=3.0)[0]
        meets(terms, [[-0.5, 1.0, 12.0]], 4)
        meets(terms.sum(), 12.5, 4)
        meets(terms.mean(), 4.1667, 4)
        meets(-F.clipped_objective(log_prob - old, advantage, 0.2, 0.2)[0], [[-0.5, 1.0, 40.0]], 2)

    def test_skyrl_cispo(self):
        """``test_policy_loss_cispo``: clipped weights 0.8, 1, 1.2, loss -2.9930.

        Its term is weight x A x log-prob, ours weight x A x log-ratio: another number with the same
        gradient, from which theirs is had by a product with the log-probs.
        """
        advantage, log_prob, old = doubles(*self.STEEP)
        log_ratio = (log_prob - old).requires_grad_()
        F.cispo_objective(log_ratio, advantage, 0.2, 0.2)[0].sum().backward()
        meets(log_ratio.grad, [[0.8, -1.0, -4.8]], 4)
        meets(-(log_ratio.grad * log_prob).sum(), -2.9930, 4)

    def test_nemo_gspo(self):
        """``test_clipped_pg_loss_gspo{,_batch_size_2}``: ratios 0.9086 and 2.4697, losses -0.6057
        and -0.4912."""
        log_prob, old, advantage = self.example()
        ids = torch.zeros(2, 3, dtype=torch.int64)
        both = (log_prob.repeat(2, 1), torch.cat([old, 2 * old]), advantage.repeat(2, 1))
        ratio = F.pool_log_ratio(both[0] - both[1], ids, "sequence", "mean").exp()
        meets(ratio, [[0.9086] * 3, [2.4697] * 3], 4)
        options = {"ratio_level": "sequence", "unit_weight": "equal"}
        meets(token_loss(log_prob, old, advantage, **options)["loss_objective"], -0.6057, 4)
        meets(token_loss(*both, **options)["loss_objective"], -0.4912, 4)


class TestSamplerWeights:
    # NeMo RL's example, old log-probs -1: ratios 0.6065, 1.6487, 0.8187
    SAMPLE = ((-0.5, -1.5, -0.8),)

    def weights(self, old: list, sample: list, *args, **options) -> Tensor:
        old_log_prob, sample_log_prob = doubles(old, sample)
        return F.sampler_weights(
            old_log_prob, sample_log_prob, torch.zeros(old_log_prob.shape).long(), *args, **options
        )

    @pytest.mark.parametrize(
        ("level", "cap", "weights", "published"),
        [
            ("token", 1e9, [0.6065, 1.6487, 0.8187], -0.2065),
            ("token", 0.8, [0.6065, 0.8, 0.8], -0.4744),
            ("sequence", 1e9, [0.8187, 0.8187, 0.8187], -0.4959),
            ("sequence", 0.8, [0.8, 0.8, 0.8], -0.4846),
        ],
    )
    def test_nemo_truncated(self, level, cap, weights, published):
        """``test_clipped_pg_loss_on_policy_truncated_importance_sampling`` and those without a cap;
        token and sequence."""
        advantage, log_prob = doubles(TestObjectives.ADVANTAGE, TestObjectives.LOG_PROB)
        weight = self.weights([[-1.0] * 3], self.SAMPLE, "truncate", 0.0, cap, level)
        meets(weight, [weights], 4)
        ratio = F.pool_log_ratio(log_prob + 1.0, torch.zeros(1, 3).long(), level, "mean")
        meets(-(weight * F.clipped_objective(ratio, advantage, 0.2, 0.2)[0]).mean(), published, 4)

    @pytest.mark.parametrize(
        ("old", "sample", "mask", "level", "cap", "published"),
        [
            ([-1.0, -1.5, -0.5], [-1.5, -1.0, -1.5], [1, 1, 1], "token", 2.0, [1.6487, 0.6065, 2.0]),
            ([-1.0, -1.5, -0.5], [-1.5, -1.0, -1.5], [1, 1, 1], "sequence", 5.0, [2.7183] * 3),
            ([-1.0, -1.0, -1.0], [-2.0, -2.0, -2.0], [1, 1, 1], "sequence", 5.0, [5.0] * 3),
            ([-1.0, -1.5, -0.5], [-1.5, -1.0, -1.5], [1, 0, 1], "sequence", 10.0, [4.4817, 1.0, 4.4817]),
        ],
    )
    def test_skyrl_truncated(self, old, sample, mask, level, cap, published):
        """``test_compute_tis_ratio_*``; off actions ours is 1."""
        old_log_prob, sample_log_prob = doubles([old], [sample])
        ids = torch.tensor([mask]) - 1
        meets(F.sampler_weights(old_log_prob, sample_log_prob, ids, "truncate", 0.0, cap, level), [published], 4)

    def test_nemo_icepop(self):
        """``test_clipped_pg_loss_icepop_importance_sampling``: of 0.6065, 12.182, 0.8187 the bounds
        0.5 and 5 drop one."""
        weight = self.weights([[-1.0] * 3], [[-0.5, -3.5, -0.8]], "mask", 0.5, 5.0)
        meets(weight, [[0.6065, 0.0, 0.8187]], 4)
        free = self.weights([[-1.0] * 3], [[-0.5, -3.5, -0.8]], "mask", 0.0, 1e9)
        meets(free, [[0.6065, 12.182, 0.8187]], 3)

    def test_verl_mask(self):
        """``test_mask_mode``: ratios 0.368 and 1.649 within 0.5 and 2; the first is masked out of
        the loss.

        verl keeps the weight and clears the mask, ours is the product of the two.
        """
        weight = self.weights([[-2.0] * 5] * 2, [[-1.0] * 5, [-2.5] * 5], "mask", 0.5, 2.0)
        meets(weight, [[0.0] * 5, [1.649] * 5], 3)
        free = self.weights([[-2.0] * 5] * 2, [[-1.0] * 5, [-2.5] * 5], "mask", 0.0, 2.0)
        meets(free, [[0.368] * 5, [1.649] * 5], 3)

    @pytest.mark.parametrize(
        ("old", "sample", "reduction", "low", "high", "published"),
        [
            ([-1.0, -1.1, -1.0], [-1.1, -1.0, -1.0], "mean", 0.9, 1.1, 1.0),
            ([-1.0, -1.0, -1.0], [-1.5, -1.5, -1.5], "mean", 0.9, 1.1, 0.0),
            ([-1.0, -1.1, -1.2], [-1.2, -1.2, -1.2], "sum", 0.5, 2.0, 1.0),
            ([-1.0, -1.0, -1.0], [-2.0, -2.0, -2.0], "sum", 0.5, 2.0, 0.0),
        ],
    )
    def test_skyrl_sequence_rejection(self, old, sample, reduction, low, high, published):
        """``test_compute_sequence_mask_*``: geometric, geometric_rejects, product,
        product_rejects_by_seq_ratio."""
        weight = self.weights([old], [sample], "reject", low, high, "sequence", reduction)
        assert weight.tolist() == [[published] * 3]

    def test_nemo_sequence_mask(self):
        """``test_clipped_pg_loss_seq_mask_tis``: a geometric mean of 1.0005 within 0.999 and 1.002
        is kept.

        NeMo RL (and SkyRL's outlier mask) keeps or drops the sequence by its mean and weighs each
        token by its own ratio; ``"mask"`` gives all tokens of the sequence its one weight. The two
        are equal here, where the ratios are.
        """
        weight = self.weights([[-1.0] * 3], [[-1.0005] * 3], "mask", 0.999, 1.002, "sequence", "mean")
        meets(weight, [[1.0005] * 3], 4)


class TestKL:
    @pytest.mark.parametrize(
        ("kind", "published", "digits"),
        [("k1", [-1.0, 14.0, 29.0], 6), ("k2", [0.5, 98.0, 420.5], 6), ("k3", [0.7183, 13.0, 28.0], 4)],
    )
    def test_nemo(self, kind, published, digits):
        """``test_calculate_kl``, without its clamps: nothing is clamped silently here."""
        log_prob, ref = doubles([-1.0, -1.0, -1.0], [0.0, -15.0, -30.0])
        meets(F.kl_estimate(log_prob, ref, kind), published, digits)

    @pytest.mark.parametrize(("kind", "published"), [("k1", 0.1), ("k2", 0.005), ("k3", 0.0048374)])
    def test_skyrl(self, kind, published):
        """``test_compute_approx_kl``: log-probs 0.2, 0.3 and reference 0.1, 0.2."""
        meets(F.kl_estimate(*doubles([0.2, 0.3], [0.1, 0.2]), kind), [published] * 2, 7)

    def test_nemo_penalty(self):
        """``test_clipped_pg_loss_kl_penalty``: terms 0.368, 0, 0.718, coefficient 0.1, loss 0.0362.

        That is ours while the policy is still the one that sampled. Away from it (its old log-probs
        are 0) our term carries the ratio, so that samples of the old policy stand for samples of
        the new one.
        """
        log_prob, ref = doubles([[0.0, -1.0, -2.0]], [[-1.0, -1.0, -1.0]])
        meets(F.kl_estimate(log_prob, ref, "k3"), [[0.368, 0.0, 0.718]], 3)
        still, away = (
            token_loss(log_prob, old, torch.zeros_like(log_prob), ref, kl_coeff=0.1)["loss_kl"]
            for old in (log_prob, torch.zeros_like(log_prob))
        )
        meets(still, 0.0362, 4)
        meets(away, 0.0155, 4)

    def test_nemo_penalty_with_weights(self):
        """``test_clipped_pg_loss_on_policy_kl_importance_sampling``: new over sampler as weight,
        mean 0.060543.

        The same is had from our ratio (new over old) times our correction (old over sampler).
        """
        log_prob, ref, sample = doubles(TestObjectives.LOG_PROB, [[-1.0, -1.0, -1.0]], TestSamplerWeights.SAMPLE)
        estimate = F.kl_estimate(log_prob, ref, "k3")
        meets(estimate, [[0.3069, 0.0, 0.0721]], 4)
        out = token_loss(log_prob, sample, torch.zeros_like(log_prob), ref, kl_coeff=0.1)
        torch.testing.assert_close(out["loss_kl"], doubles(0.0060543), rtol=1e-3, atol=0)

    def test_nemo_gradient(self):
        """``test_calculate_kl_detaches_importance_sampling_when_input_clamped``: value 0.7182818,
        gradient -1.

        NeMo RL differentiates the weight too, which adds the estimate itself (the score-function
        term); ours is held constant, and the gradient is k3's: 1 - e.
        """
        log_prob = doubles([-1.0]).requires_grad_()
        estimate = F.kl_estimate(log_prob, doubles([0.0]), "k3")
        meets(estimate.detach(), [0.7182818], 7)
        estimate.sum().backward()
        meets(log_prob.grad + estimate.detach(), [-1.0], 7)


class TestLossWeights:
    """Means as weighted sums."""

    def mean(self, x: list, mask: list, *args) -> Tensor:
        ids = torch.tensor(mask) - 1
        return (F.loss_weights(ids, *args).double() * doubles(x)).sum()

    @pytest.mark.parametrize(
        ("x", "mask", "args", "published"),
        [
            ([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], [[1, 1, 0], [1, 1, 1]], ("token",), 3.6),
            ([[1.0, 2.0], [3.0, 4.0]], [[1, 1], [1, 0]], ("sequence",), 2.25),
            ([[2.0, 3.0], [9.0, 12.0]], [[1, 1], [1, 0]], ("constant", 10.0), 0.7),
        ],
    )
    def test_skyrl(self, x, mask, args, published):
        """``TestApplyLossReductionToAdvantagesMinibatch``: token_mean, sequence_mean,
        seq_mean_token_sum_norm."""
        meets(self.mean(x, mask, *args), published, 6)

    def test_skyrl_mean_of_micro_batches(self):
        """``test_token_mean_legacy``: 8.5, a mean of the micro-batches' means (4 and 13).

        It depends on how the batch is cut; ours is the mean over the batch, 64 / 7, however it is
        cut.
        """
        x = [[2.0, 4.0], [6.0, 8.0], [10.0, 12.0], [14.0, 16.0]]
        mask = [[1, 1], [1, 0], [1, 1], [1, 1]]
        meets(self.mean(x, mask, "token"), 64 / 7, 5)
        halves = [self.mean(x[part], mask[part], "token") for part in (slice(2), slice(2, 4))]
        meets(torch.stack(halves), [4.0, 13.0], 5)
        meets(torch.stack(halves).mean(), 8.5, 5)

    def test_open_instruct(self):
        """``TestMaskedMean``: 2.75 per sequence and 7/3 per token; with an empty row 0.75, where
        ours is 1.5.

        An empty row is a sequence of mean 0 to Open Instruct; here it counts for nothing, as
        padding must.
        """
        x = [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]
        meets(self.mean(x, [[1, 1, 0], [1, 0, 0]], "sequence"), 2.75, 6)
        meets(self.mean(x, [[1, 1, 0], [1, 0, 0]], "token"), 7 / 3, 6)
        meets(self.mean(x, [[1, 1, 0], [0, 0, 0]], "sequence"), 1.5, 6)
