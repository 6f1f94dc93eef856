"""Ratios, clipped objectives, KL and weights of tokens against their definitions, and where float32
overflows."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from conversations import DOUBLE, LAYOUT, close, law, layouts, make_rows, tokens_of
from hypothesis import strategies as st
from torch import Tensor

from torchrl_llm import functional as F


class TestPoolLogRatio:
    @law(layouts(), st.sampled_from(["token", "turn", "sequence"]), st.sampled_from(["sum", "mean"]))
    def test_definition(self, case, level, reduction):
        layout, seed = case
        rows = make_rows(layout, seed)
        ids, x = rows["turn_ids"], rows["sample_log_prob"]
        actual = F.pool_log_ratio(x, ids, level, reduction)
        for b, i in itertools.product(*map(range, ids.shape)):
            members = [i] if level == "token" else tokens_of(ids, b, ids[b, i].item())
            if level == "sequence":
                members = [j for j, k in enumerate(ids[b].tolist()) if k >= 0]
            pooled = sum(x[b, j] for j in members) / (len(members) if reduction == "mean" and members else 1)
            close(actual[b, i], pooled if ids[b, i] >= 0 else 0.0)

    def test_gradients(self):
        rows = make_rows(LAYOUT)
        x = torch.where(rows["turn_ids"] >= 0, rows["sample_log_prob"], 0.0).requires_grad_()
        assert torch.autograd.gradcheck(lambda y: F.pool_log_ratio(y, rows["turn_ids"], "turn", "mean"), (x,))


class TestClippedObjective:
    @law(st.floats(-1.0, 1.0), st.floats(-2.0, 2.0), st.floats(0.0, 0.9), st.floats(0.0, 0.9))
    def test_definition_and_gradient(self, log_ratio, advantage, low, high):
        x = torch.tensor(log_ratio, dtype=DOUBLE, requires_grad=True)
        objective, clipped = F.clipped_objective(x, torch.tensor(advantage, dtype=DOUBLE), low, high)
        ratio = math.exp(log_ratio)
        close(objective.detach(), min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage))
        objective.backward()
        binds = advantage * (ratio - 1) > 0 and not 1 - low <= ratio <= 1 + high
        assert clipped.item() == binds
        if min(abs(ratio - 1 + low), abs(ratio - 1 - high)) > 1e-9:
            close(x.grad, 0.0 if binds else ratio * advantage)

    def test_the_two_bounds_are_not_swapped(self):
        objective, _ = F.clipped_objective(torch.tensor([2.0, 0.1]).log(), torch.tensor([1.0, -1.0]), 0.3, 0.5)
        close(objective, [1.5, -0.7], atol=1e-6)

    @law(*(st.floats(-2.0, 2.0) for _ in "ra"), st.floats(0.0, 0.9), st.floats(0.0, 0.9))
    def test_dual_clip_and_cispo(self, log_ratio, advantage, low, high):
        x, a = torch.tensor(log_ratio, dtype=DOUBLE, requires_grad=True), torch.tensor(advantage, dtype=DOUBLE)
        ratio, free = math.exp(log_ratio), F.clipped_objective(x, a, low, high)[0]
        dual, clipped = F.clipped_objective(x, a, low, high, dual_clip=2.0)
        close(dual, max(free.item(), 2.0 * advantage) if advantage < 0 else free.item())
        (gradient,) = torch.autograd.grad(dual, x)
        if clipped:
            close(gradient, 0.0)
        elif advantage and abs(ratio - 2.0) > 1e-9 and abs(ratio - 1 + low) > 1e-9 and abs(ratio - 1 - high) > 1e-9:
            close(gradient, ratio * advantage)
        weight = min(max(ratio, 1 - low), 1 + high)
        objective, bounded = F.cispo_objective(x, a, low, high)
        close(objective, weight * advantage * log_ratio)
        close(torch.autograd.grad(objective, x)[0], weight * advantage)
        assert bool(bounded) == (weight != ratio)

    def test_negative_bounds_are_refused(self):
        with pytest.raises(ValueError, match=r"clip_low=-0\.1"):
            F.clipped_objective(torch.zeros(1), torch.zeros(1), -0.1, 0.2)


EXTREME = st.one_of(st.floats(-1e3, 1e3), st.sampled_from([-1e3, -89.0, 0.0, 88.0, 89.0, 178.0, 1e3]))


LARGEST = float(torch.finfo(torch.float32).max) ** 0.25


class TestExtremeLogRatios:
    """``exp`` of a log-ratio overflows float32 at 88.7; what a clip, a mask or a 0 leaves out must
    not come back as NaN."""

    @staticmethod
    def gradient(function, log_ratio: float) -> float:
        x = torch.tensor(log_ratio, requires_grad=True)
        value = function(x)
        assert value.isfinite()
        (gradient,) = torch.autograd.grad(value, x)
        assert gradient.isfinite()
        return gradient.item()

    @law(EXTREME, st.sampled_from([-1.5, 0.0, 1.5]), st.sampled_from([None, 3.0]), examples=200)
    def test_clipped_objective(self, log_ratio, advantage, dual_clip):
        ratio = min(math.exp(min(log_ratio, 100.0)), LARGEST)
        binds = (advantage > 0 and ratio > 1.28) or (advantage < 0 and ratio < 0.8)
        binds |= dual_clip is not None and advantage < 0 and ratio > dual_clip
        a = torch.tensor(advantage)
        found = self.gradient(lambda x: F.clipped_objective(x, a, 0.2, 0.28, dual_clip)[0], log_ratio)
        assert found == pytest.approx(0.0 if binds else ratio * advantage, rel=1e-3)

    @law(EXTREME, st.sampled_from([-1.5, 0.0, 1.5]), st.sampled_from([0.28, 1e30]), examples=100)
    def test_cispo_objective(self, log_ratio, advantage, high):
        weight = min(max(min(math.exp(min(log_ratio, 100.0)), LARGEST), 0.8), 1 + high)
        found = self.gradient(lambda x: F.cispo_objective(x, torch.tensor(advantage), 0.2, high)[0], log_ratio)
        assert found == pytest.approx(weight * advantage, rel=1e-3)

    @law(EXTREME, st.sampled_from(["k1", "k2", "k3"]), examples=100)
    def test_kl_estimate(self, gap, kind):
        found = self.gradient(lambda x: F.kl_estimate(x, torch.tensor(0.0), kind), -gap)
        k3 = 1 - min(math.exp(min(gap, 100.0)), LARGEST)
        assert found == pytest.approx({"k1": 1.0, "k2": -gap, "k3": k3}[kind], rel=1e-3, abs=1e-6)

    @law(EXTREME, EXTREME, st.sampled_from([1.0, math.inf]), examples=100)
    def test_turn_vtrace(self, first, second, clip):
        log_rho = torch.tensor([[first, second]], requires_grad=True)
        reward, mask = torch.tensor([[0.0, 1.0]]), torch.ones(1, 2, dtype=torch.bool)
        both = F.turn_vtrace(reward, torch.zeros(1, 2), log_rho, mask, 1.0, rho_clip=clip, c_clip=clip)
        for x in (*both, *torch.autograd.grad(sum(x.sum() for x in both), log_rho)):
            assert x.isfinite().all()

    @law(EXTREME, EXTREME, st.sampled_from(["truncate", "mask", "reject"]), st.sampled_from([2.0, math.inf]))
    def test_sampler_weights(self, first, second, kind, high):
        old, sample = torch.tensor([[first, second, 0.0]]), torch.zeros(1, 3)
        for level in ("token", "sequence"):
            found = F.sampler_weights(old, sample, torch.tensor([[0, 0, -1]]), kind, 0.5, high, level)
            assert found.isfinite().all()
            assert found[0, -1] == 1.0

    @law(EXTREME)
    def test_effective_sample_size(self, log_ratio):
        """It does not know a common factor, nor what has no weight."""
        weight = torch.tensor([0.5, 0.5, 0.0])
        close(F.effective_sample_size(torch.tensor([log_ratio, log_ratio, 0.0]), weight), 1.0, atol=1e-6)
        close(F.effective_sample_size(torch.tensor([log_ratio, log_ratio - 200.0, 1e3]), weight), 0.5, atol=1e-6)
        assert F.effective_sample_size(torch.tensor([log_ratio]), torch.zeros(1)) == 0.0

    def test_what_float32_holds_is_untouched(self):
        x = torch.linspace(-100.0, 22.0, 1000)
        assert F.importance_ratio(x).equal(x.exp())
        assert F.importance_ratio(torch.tensor(100.0, dtype=DOUBLE)) == math.exp(100.0)


class TestSamplerWeights:
    @law(layouts(), *(st.sampled_from(x) for x in (["truncate", "mask", "reject"], ["token", "turn", "sequence"])))
    def test_definition(self, case, kind, level):
        rows = make_rows(*case)
        ids, gap = rows["turn_ids"], rows["old_log_prob"] - rows["sample_log_prob"]
        actual = F.sampler_weights(rows["old_log_prob"], rows["sample_log_prob"], ids, kind, 0.9, 1.1, level, "mean")
        for b, row in enumerate(ids.tolist()):
            for i, k in enumerate(row):
                unit = [j for j, m in enumerate(row) if m >= 0 and (level == "sequence" or m == k)]
                w = math.exp(sum(gap[b, j].item() for j in unit) / len(unit)) if k >= 0 and level != "token" else 1.0
                w = math.exp(gap[b, i].item()) if k >= 0 and level == "token" else w
                inside = (w if kind == "mask" else 1.0) if 0.9 <= w <= 1.1 else 0.0
                close(actual[b, i], (min(w, 1.1) if kind == "truncate" else inside) if k >= 0 else 1.0)

    def test_it_carries_no_gradient(self):
        old = torch.zeros(1, 1, requires_grad=True)
        assert not F.sampler_weights(
            old, torch.zeros(1, 1), torch.zeros(1, 1).long(), "truncate", 0.0, 2.0
        ).requires_grad


class TestKLEstimate:
    logits = torch.tensor([2.0, -1.0, 0.5], dtype=DOUBLE)
    ref = torch.tensor([-0.5, 1.0, 0.3], dtype=DOUBLE).log_softmax(0)

    def expect(self, kind: str) -> tuple[Tensor, Tensor]:
        """Expected value and expected gradient of the estimate under the policy, by enumeration."""
        logits = self.logits.clone().requires_grad_()
        log_prob = logits.log_softmax(0)
        estimate = F.kl_estimate(log_prob, self.ref, kind)
        (log_prob.exp().detach() * estimate).sum().backward()
        return (log_prob.exp() * estimate).sum().detach(), logits.grad

    def kl(self, reverse: bool) -> tuple[Tensor, Tensor]:
        """KL(policy || reference), or KL(reference || policy), with its gradient."""
        logits = self.logits.clone().requires_grad_()
        p, q = (x if reverse else y for x, y in ((logits.log_softmax(0), self.ref), (self.ref, logits.log_softmax(0))))
        kl = (p.exp() * (p - q)).sum()
        kl.backward()
        return kl.detach(), logits.grad

    def test_k1_and_k3_are_unbiased_for_the_policy_to_reference_direction(self):
        true, other = self.kl(reverse=True)[0], self.kl(reverse=False)[0]
        assert (true - other).abs() > 0.1
        close(self.expect("k1")[0], true)
        close(self.expect("k3")[0], true)
        swapped = (self.logits.softmax(0) * F.kl_estimate(self.ref, self.logits.log_softmax(0), "k3")).sum()
        assert (swapped - true).abs() > 0.1

    def test_expected_gradients(self):
        close(self.expect("k1")[1], torch.zeros(3))
        close(self.expect("k2")[1], self.kl(reverse=True)[1])
        close(self.expect("k3")[1], self.kl(reverse=False)[1])

    def test_values(self):
        log_prob, ref = torch.tensor([-1.0], dtype=DOUBLE), torch.tensor([-1.5], dtype=DOUBLE)
        close(F.kl_estimate(log_prob, ref, "k1"), [0.5])
        close(F.kl_estimate(log_prob, ref, "k2"), [0.125])
        close(F.kl_estimate(log_prob, ref, "k3"), [math.exp(-0.5) + 0.5 - 1])
        assert F.kl_estimate(log_prob, log_prob, "k3").item() == 0


class TestLossWeights:
    @law(layouts())
    def test_units_are_equal_and_the_whole_is_one(self, case):
        layout, seed = case
        ids = make_rows(layout, seed)["turn_ids"]
        action, turns = ids >= 0, len(layout[0])
        lengths = F.turn_lengths(ids, turns)
        for kind, sums in (("token", None), ("turn", lengths[lengths > 0]), ("sequence", action.sum(1)[action.any(1)])):
            weight = F.loss_weights(ids, kind)
            assert (weight[~action] == 0).all()
            if not action.any():
                continue
            close(weight.sum(), 1.0, atol=1e-6)
            per_unit = {
                "token": weight[action],
                "turn": F.turn_sum(weight, ids, turns)[lengths > 0],
                "sequence": weight.sum(1)[action.any(1)],
            }[kind]
            close(per_unit, torch.full_like(per_unit, 1 / len(per_unit)).double(), atol=1e-6)
            assert sums is None or len(per_unit) == len(sums)

    def test_constant(self):
        ids = torch.tensor([[0, 0, 1], [0, -1, -1], [-1, -1, -1]])
        close(F.loss_weights(ids, "constant", 10), torch.where(ids >= 0, 1 / 20, 0.0), atol=1e-8)

    @law(layouts(), st.sampled_from(["token", "turn", "sequence"]))
    def test_empty_rows_and_padding_change_nothing(self, case, kind):
        ids = make_rows(*case)["turn_ids"]
        padded = torch.nn.functional.pad(ids, (0, 3, 0, 2), value=-1)
        close(F.loss_weights(padded, kind)[: len(ids), : ids.shape[1]], F.loss_weights(ids, kind))

    @law(layouts(), st.sampled_from(["token", "turn", "sequence"]))
    def test_a_row_that_counts_twice_is_two_rows(self, case, kind):
        ids = make_rows(*case)["turn_ids"]
        times = torch.arange(len(ids)) % 3 + 1
        twice = F.loss_weights(ids.repeat_interleave(times, 0), kind)
        first = times.cumsum(0) - times
        close(F.loss_weights(ids, kind, row_weight=times), twice[first] * times.unsqueeze(1), atol=1e-6)

    def test_the_constant_stays_for_rows_that_count_less(self):
        ids = torch.tensor([[0, 0, 1], [0, -1, -1]])
        expected = torch.tensor([[0.025, 0.025, 0.025], [0.05, 0.0, 0.0]])
        close(F.loss_weights(ids, "constant", 10, row_weight=torch.tensor([0.5, 1.0])), expected, atol=1e-8)

    @pytest.mark.parametrize(("kind", "constant"), [("constant", None), ("constant", 0.0), ("token", 5.0)])
    def test_the_constant_is_asked_for(self, kind, constant):
        with pytest.raises(ValueError, match="takes a constant > 0"):
            F.loss_weights(torch.zeros(1, 1, dtype=torch.int64), kind, constant)
