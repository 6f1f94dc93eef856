"""Turns, returns and advantages against their definitions, summed out naively in float64 on ragged
conversations."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from conversations import DOUBLE, LAYOUT, close, law, layouts, make_rows, tokens_of, turns_of
from hypothesis import strategies as st
from torchrl.objectives.value.functional import generalized_advantage_estimate, reward2go

from torchrl_llm import functional as F

unit = st.floats(0.0, 1.0)


def decisions(reward, mask, acted, gamma, b):
    """Of row b, for each decision: its turn, what it earns until the next one, the discount up to
    it, and its turn."""
    played = [t for t in range(mask.shape[1]) if mask[b, t]]
    acts = [p for p, t in enumerate(played) if acted[b, t]]
    for p, after in itertools.pairwise([*acts, None]):
        end = len(played) if after is None else after
        earned = sum(gamma ** (q - p) * reward[b, played[q]] for q in range(p, end))
        yield played[p], earned, gamma ** (end - p), None if after is None else played[after]


def naive_gae(reward, value, mask, acted, gamma, lmbda, bootstrap):
    """The double sum: each decision spans the played turns up to the next decision."""
    advantage = torch.zeros(mask.shape, dtype=DOUBLE)
    for b in range(mask.shape[0]):
        turns, delta, decay = [], [], []
        for t, earned, span, after in decisions(reward, mask, acted, gamma, b):
            turns.append(t)
            delta.append(earned + span * (bootstrap[b] if after is None else value[b, after]) - value[b, t])
            decay.append(span * lmbda)
        for k, t in enumerate(turns):
            advantage[b, t] = sum(math.prod(decay[k:m]) * delta[m] for m in range(k, len(turns)))
    return advantage


def naive_vtrace(reward, value, log_rho, mask, acted, gamma, bootstrap, rho_clip, c_clip):
    """Espeholt et al., 2018, eq. 1, as the double sum it is."""
    advantage, target = torch.zeros(2, *mask.shape, dtype=DOUBLE)
    for b in range(mask.shape[0]):
        steps = list(decisions(reward, mask, acted, gamma, b))
        ratio = [log_rho[b, t].exp().item() for t, *_ in steps]
        rho, c = ([min(clip, r) for r in ratio] for clip in (rho_clip, c_clip))
        ahead = [bootstrap[b] if after is None else value[b, after] for *_, after in steps]
        delta = [rho[m] * (earned + span * ahead[m] - value[b, t]) for m, (t, earned, span, _) in enumerate(steps)]
        for k, (t, *_) in enumerate(steps):
            decays = [span * c[m] for m, (_, _, span, _) in enumerate(steps)]
            target[b, t] = value[b, t] + sum(math.prod(decays[k:m]) * delta[m] for m in range(k, len(steps)))
        for k, (t, earned, span, after) in enumerate(steps):
            following = bootstrap[b] if after is None else target[b, after]
            advantage[b, t] = rho[k] * (earned + span * following - value[b, t])
    return advantage, target


class TestTurnReductions:
    @law(layouts())
    def test_sum_mean_first_last(self, case):
        layout, seed = case
        rows = make_rows(layout, seed)
        ids, x, turns = rows["turn_ids"], rows["sample_log_prob"], len(layout[0])
        for b, t in itertools.product(range(len(layout)), range(turns)):
            held = [x[b, i] for i in tokens_of(ids, b, t)]
            expected = (sum(held), sum(held) / len(held), held[0], held[-1]) if held else (0.0,) * 4
            for reduce, figure in zip((F.turn_sum, F.turn_mean, F.turn_first, F.turn_last), expected, strict=True):
                close(reduce(x, ids, turns)[b, t], figure)

    @law(layouts())
    def test_turn_to_token_is_the_transpose_of_turn_sum(self, case):
        layout, seed = case
        rows = make_rows(layout, seed)
        ids, turns = rows["turn_ids"], len(layout[0])
        x = torch.randn(len(layout), turns, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed))
        y = torch.where(ids >= 0, rows["sample_log_prob"], 0.0)
        close((F.turn_to_token(x, ids) * y).sum(), (x * F.turn_sum(y, ids, turns)).sum())
        assert (F.turn_to_token(x, ids)[ids < 0] == 0).all()

    def test_gradients_reach_the_right_tokens_and_no_nan_comes_back(self):
        ids = torch.tensor([[-1, 0, 0, 0, -1]])
        for reduce, expected in (
            (F.turn_first, [[0, 1, 0, 0, 0]]),
            (F.turn_last, [[0, 0, 0, 1, 0]]),
            (F.turn_sum, [[0, 1, 1, 1, 0]]),
            (F.turn_mean, [[0, 1 / 3, 1 / 3, 1 / 3, 0]]),
        ):
            x = torch.tensor([[torch.nan, 1.0, 2.0, 3.0, torch.nan]], dtype=DOUBLE, requires_grad=True)
            reduce(x, ids, 2).sum().backward()
            close(x.grad, expected)

    def test_half_precision_is_summed_in_float32(self):
        ones, ids = torch.ones(1, 4096, dtype=torch.bfloat16), torch.zeros(1, 4096, dtype=torch.int64)
        assert F.turn_sum(ones, ids, 1).item() == 4096
        assert F.turn_sum(ones, ids, 1).dtype == torch.float32

    def test_wrong_input_is_named(self):
        ids = torch.tensor([[0, 3]])
        with pytest.raises(ValueError, match="turn 3, but num_turns is 2"):
            F.turn_sum(torch.ones(1, 2), ids, 2)
        with pytest.raises(ValueError, match=r"x \(1, 3\), turn_ids \(1, 2\)"):
            F.turn_sum(torch.ones(1, 3), ids, 4)
        with pytest.raises(ValueError, match="'median'; expected one of 'first', 'mean', 'last'"):
            F.turn_reduce(torch.ones(1, 2), ids, 4, "median")


class TestTurnReturns:
    @law(layouts(), unit, st.booleans())
    def test_definition(self, case, gamma, with_bootstrap):
        layout, seed = case
        rows = make_rows(layout, seed)
        reward, mask, _, acted, turns = turns_of(rows)
        bootstrap = rows["bootstrap_value"] if with_bootstrap else None
        actual = F.turn_returns(reward, mask, gamma, bootstrap, acted=acted)
        for b in range(len(layout)):
            played = [t for t in range(turns) if mask[b, t]]
            for t in range(turns):
                after = [reward[b, q] for q in played if q >= t]
                tail = gamma ** len(after) * bootstrap[b] if with_bootstrap else 0.0
                expected = sum(gamma**i * r for i, r in enumerate(after)) + tail if acted[b, t] and mask[b, t] else 0.0
                close(actual[b, t], expected)

    def test_equals_torchrl_reward2go(self):
        reward = torch.randn(5, 7, dtype=DOUBLE, generator=torch.Generator().manual_seed(0))
        lengths = torch.tensor([7, 1, 4, 2, 7])
        mask = torch.arange(7) < lengths[:, None]
        done = torch.arange(7) == 6
        expected = reward2go((reward * mask).T.contiguous(), done[:, None].expand(7, 5).contiguous(), 0.9)
        close(F.turn_returns(reward, mask, 0.9), torch.where(mask, expected.T, 0.0))

    @law(layouts(), unit)
    def test_episode_return_is_the_return_of_the_first_turn(self, case, gamma):
        layout, seed = case
        reward, mask, *_ = turns_of(make_rows(layout, seed))
        returns, first = F.turn_returns(reward, mask, gamma), mask.long().argmax(1, keepdim=True)
        close(F.episode_return(reward, mask, gamma), torch.where(mask.any(1), returns.gather(1, first)[:, 0], 0.0))


class TestTurnGAE:
    @law(layouts(), unit, unit)
    def test_definition(self, case, gamma, lmbda):
        layout, seed = case
        rows = make_rows(layout, seed)
        reward, mask, ids, acted, turns = turns_of(rows)
        value = F.turn_first(rows["state_value"], ids, turns)
        bootstrap = rows["bootstrap_value"]
        advantage, target = F.turn_gae(reward, value, mask, gamma, lmbda, bootstrap, acted=acted)
        close(advantage, naive_gae(reward, value, mask, acted, gamma, lmbda, bootstrap))
        close(target, torch.where(acted & mask, advantage + value, 0.0))

    # TorchRL multiplies its coefficients in float32: take those that it does not round.
    @law(st.lists(st.integers(1, 6), min_size=1, max_size=5), *(st.sampled_from([0.0, 0.5, 0.75, 1.0]) for _ in "gl"))
    def test_equals_torchrl_on_the_turn_axis(self, lengths, gamma, lmbda):
        generator = torch.Generator().manual_seed(len(lengths))
        reward, value = torch.randn(2, len(lengths), 6, dtype=DOUBLE, generator=generator)
        bootstrap = torch.randn(len(lengths), dtype=DOUBLE, generator=generator)
        mask = torch.arange(6) < torch.tensor(lengths)[:, None]
        done = torch.arange(6) == torch.tensor(lengths)[:, None] - 1
        truncated = done & (torch.arange(len(lengths)) % 2 == 0)[:, None]
        following = torch.where(done, bootstrap[:, None], value.roll(-1, 1))
        columns = (x[..., None] for x in (value, following, reward, done, done & ~truncated))
        expected, target = generalized_advantage_estimate(gamma, lmbda, *columns)
        last = torch.where(truncated.any(1), bootstrap, 0.0)
        actual = F.turn_gae(reward, value, mask, gamma, lmbda, last)
        close(actual[0], torch.where(mask, expected[..., 0], 0.0))
        close(actual[1], torch.where(mask, target[..., 0], 0.0))

    def test_folding_follows_the_formula(self):
        reward, value = torch.tensor([[1.0, 2.0, 4.0]], dtype=DOUBLE), torch.tensor([[0.5, 9.0, 3.0]], dtype=DOUBLE)
        mask, acted = torch.ones(1, 3, dtype=torch.bool), torch.tensor([[True, False, True]])
        gamma, lmbda = 0.9, 0.8
        last = 4.0 - 3.0
        folded = 1.0 + gamma * 2.0 + gamma**2 * 3.0 - 0.5
        advantage, _ = F.turn_gae(reward, value, mask, gamma, lmbda, acted=acted)
        close(advantage, [[folded + gamma**2 * lmbda * last, 0.0, last]])

    def test_a_gap_costs_no_discount_and_an_empty_row_gives_zero(self):
        reward, value = torch.tensor([[0.0, torch.nan, 1.0]]), torch.tensor([[0.0, torch.nan, 0.0]])
        mask = torch.tensor([[True, False, True]])
        close(F.turn_gae(reward, value, mask, 0.5, 1.0)[0], [[0.5, 0.0, 1.0]])
        close(F.turn_gae(reward, value, torch.zeros_like(mask), 0.5, 1.0, torch.ones(1))[0], [[0.0, 0.0, 0.0]])

    def test_gradients(self):
        rows = make_rows(LAYOUT)
        reward, mask, ids, acted, turns = turns_of(rows)
        value = F.turn_first(rows["state_value"], ids, turns)
        inputs = (torch.where(mask, reward, 0.0).requires_grad_(), value.requires_grad_())
        assert torch.autograd.gradcheck(lambda r, v: F.turn_gae(r, v, mask, 0.9, 0.8, acted=acted), inputs)


class TestTurnVTrace:
    @law(layouts(), unit, st.sampled_from([0.6, 1.0, 9.0]), st.sampled_from([0.5, 1.0, 9.0]))
    def test_definition(self, case, gamma, rho_clip, c_clip):
        layout, seed = case
        rows = make_rows(layout, seed)
        reward, mask, ids, acted, turns = turns_of(rows)
        value = F.turn_first(rows["state_value"], ids, turns)
        log_rho = F.turn_sum(rows["theta_value"], ids, turns) / 2
        bootstrap, clips = rows["bootstrap_value"], {"rho_clip": rho_clip, "c_clip": c_clip}
        advantage, target = F.turn_vtrace(reward, value, log_rho, mask, gamma, bootstrap, acted=acted, **clips)
        expected = naive_vtrace(reward, value, log_rho, mask, acted, gamma, bootstrap, rho_clip, c_clip)
        close(advantage, expected[0], atol=1e-9)
        close(target, expected[1], atol=1e-9)


class TestDiscount:
    @law(layouts(), unit)
    def test_definition(self, case, gamma):
        _, mask, *_ = turns_of(make_rows(*case))
        expected = [[gamma ** sum(row[:t]) if row[t] else 0.0 for t in range(len(row))] for row in mask.tolist()]
        close(F.discount(mask, gamma), expected)


class TestOverlongPenalty:
    def test_definition(self):
        length = torch.arange(0, 30, dtype=DOUBLE)
        expected = [0.0 if n <= 12 else max(-1.0, (12 - n) / 8) for n in range(30)]
        close(F.overlong_penalty(length, 20, 8), expected)
        assert (F.overlong_penalty(torch.tensor([3, 20, 25]), 20, 20)[1:] == -1).all()

    @pytest.mark.parametrize("buffer", [0, 21])
    def test_the_buffer_lies_within_the_limit(self, buffer):
        with pytest.raises(ValueError, match="expected 0 < buffer <= max_length"):
            F.overlong_penalty(torch.zeros(1), 20, buffer)


class TestTokenGAE:
    @law(layouts(), unit, unit)
    def test_definition(self, case, gamma, lmbda):
        layout, seed = case
        rows = make_rows(layout, seed)
        reward, mask, ids, _, turns = turns_of(rows)
        value, bootstrap = rows["state_value"], rows["bootstrap_value"]
        actual, target = F.token_gae(reward, value, ids, mask, gamma, lmbda, bootstrap)
        for b in range(len(layout)):
            steps = [i for i, k in enumerate(ids[b].tolist()) if k >= 0]
            earned = dict.fromkeys(steps, torch.zeros((), dtype=DOUBLE))
            for t in range(turns):
                before = [i for i in steps if ids[b, i] <= t]
                if mask[b, t] and before:
                    earned[before[-1]] = earned[before[-1]] + reward[b, t]
            following = [value[b, i] for i in steps[1:]] + [bootstrap[b]]
            delta = [earned[i] + gamma * v - value[b, i] for i, v in zip(steps, following, strict=False)]
            for n, i in enumerate(steps):
                close(actual[b, i], sum((gamma * lmbda) ** m * d for m, d in enumerate(delta[n:])))
                close(target[b, i], actual[b, i] + value[b, i])
        assert (actual[ids < 0] == 0).all()
        assert (target[ids < 0] == 0).all()

    def test_the_reward_counts_once_whatever_the_length(self):
        ids = torch.tensor([[0, 0, 0, 0, -1, 1, 1]])
        reward, mask = torch.tensor([[0.0, 1.0]]), torch.ones(1, 2, dtype=torch.bool)
        advantage, _ = F.token_gae(reward, torch.zeros(1, 7), ids, mask, 1.0, 1.0)
        close(advantage, (ids >= 0).double())
