"""The maths against its definitions, summed out naively in float64 on ragged conversations."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from conversations import DOUBLE, LAYOUT, law, layouts, make_rows
from hypothesis import strategies as st
from torch import Tensor
from torchrl.objectives.value.functional import generalized_advantage_estimate, reward2go

from torchrl_llm.objectives import functional as F

unit = st.floats(0.0, 1.0)


def close(actual: Tensor, expected: Tensor | list, atol: float = 1e-10) -> None:
    expected = torch.as_tensor(expected, dtype=DOUBLE)
    torch.testing.assert_close(actual.to(DOUBLE), expected, rtol=1e-10, atol=atol)


def turns_of(rows) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
    turn, ids = rows["turn"], rows["turn_ids"]
    return turn["reward"], turn["mask"], ids, F.turn_lengths(ids, turn["mask"].shape[1]) > 0, turn["mask"].shape[1]


def tokens_of(ids: Tensor, row: int, turn: int) -> list[int]:
    return [i for i, k in enumerate(ids[row].tolist()) if k == turn]


def decisions(reward, mask, acted, gamma, b):
    """Of row b, for each decision: its turn, what it earns until the next one, the discount up to it, and its turn."""
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


class TestNormalisation:
    @law(layouts(), st.integers(0, 1))
    def test_whitening(self, case, ddof):
        layout, seed = case
        reward, mask, *_ = turns_of(make_rows(layout, seed))
        x = reward[mask]
        actual = F.standardize(reward, mask, ddof=ddof)
        if len(x) > 1:
            close(actual[mask], (x - x.mean()) / (x.std(correction=ddof) + 1e-8))
        assert (actual[~mask] == 0).all()

    @pytest.mark.parametrize("level", [0.0, 0.1, -3.7e4])
    def test_noise_is_not_blown_up(self, level):
        x = torch.full((3, 5), level) + 1e-7 * abs(level) * torch.randn(
            3, 5, generator=torch.Generator().manual_seed(0)
        )
        mask = torch.ones_like(x, dtype=torch.bool)
        assert (F.standardize(x, mask) == 0).all()
        assert (F.group_relative(x[:, 0], torch.zeros(3)) == 0).all()

    def test_one_turn_gives_zero(self):
        assert F.standardize(torch.tensor([[3.0]]), torch.ones(1, 1, dtype=torch.bool)).item() == 0

    def test_eps(self):
        mask = torch.ones(1, 2, dtype=torch.bool)
        close(F.standardize(torch.tensor([[0.0, 2.0]]), mask, ddof=0, eps=1.0), [[-0.5, 0.5]])

    def test_the_penalty_is_scaled_with_the_returns_but_never_by_itself(self):
        mask, penalty = torch.ones(1, 2, dtype=torch.bool), torch.tensor([[-1e-3, -3e-3]])
        returns = torch.tensor([[0.0, 2.0]])
        both = returns + penalty
        close(F.standardize(returns, mask, penalty=penalty), (both - both.mean()) / both.std(), atol=1e-6)
        close(F.standardize(torch.full((1, 2), 0.7), mask, penalty=penalty), [[1e-3, -1e-3]], atol=1e-8)

    def test_statistics_are_constants_to_autograd(self):
        x, mask = torch.tensor([1.0, 3.0], requires_grad=True), torch.tensor([True, True])
        F.standardize(x, mask, ddof=0, eps=0.0).sum().backward()
        close(x.grad, [1.0, 1.0])


def _rank(rank: int, store: str, case: dict, out: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mine = {name: x[2 * rank : 2 * rank + 2 + rank] for name, x in case.items()}
    group = dist.group.WORLD
    torch.save(
        {
            "standardize": F.standardize(mine["x"], mine["mask"], process_group=group),
            "batch": F.group_relative(
                mine["x"], mine["group"], scale="batch", partial="allow", mask=mine["mask"], process_group=group
            ),
            **{k: F.loss_weights(mine["ids"], k, process_group=group) for k in ("token", "turn", "sequence")},
        },
        f"{out}.{rank}",
    )
    dist.destroy_process_group()


class TestProcessGroup:
    def test_two_ranks_agree_with_one(self, tmp_path):
        rows = make_rows(LAYOUT[:5])
        reward, mask, ids, *_ = turns_of(rows)
        case = {"x": torch.where(mask, reward, 0.0), "mask": mask, "ids": ids, "group": torch.tensor([0, 0, 1, 1, 1])}
        args = (str(tmp_path / "store"), case, str(tmp_path / "out"))
        mp.start_processes(_rank, args, nprocs=2, start_method="fork")
        parts = [torch.load(tmp_path / f"out.{rank}") for rank in range(2)]
        expected = {"standardize": F.standardize(reward, mask)}
        expected["batch"] = F.group_relative(case["x"], case["group"], scale="batch", partial="allow", mask=mask)
        expected |= {kind: F.loss_weights(ids, kind) for kind in ("token", "turn", "sequence")}
        for name, whole in expected.items():
            close(torch.cat([part[name] for part in parts]), whole)


class TestGroupRelative:
    @law(
        st.lists(st.integers(1, 4), min_size=1, max_size=4),
        st.sampled_from(["std", "batch", "none", "loo"]),
        st.randoms(),
    )
    def test_definition(self, sizes, variant, random):
        group_id = torch.tensor([10 * g for g, n in enumerate(sizes) for _ in range(n)])
        score = torch.tensor([random.choice([0.0, 1.0, 0.3]) for _ in group_id], dtype=DOUBLE)
        order = torch.tensor(random.sample(range(len(score)), len(score)))
        score, group_id = score[order], group_id[order]
        options = {"baseline": "leave_one_out", "scale": "none"} if variant == "loo" else {"scale": variant}
        actual = F.group_relative(score, group_id, **options, partial="allow")
        for i in range(len(score)):
            mine = score[group_id == group_id[i]]
            if len(mine) == 1 or mine.std() < 1e-9:
                expected = 0.0
            elif variant == "loo":
                expected = score[i] - (mine.sum() - score[i]) / (len(mine) - 1)
            else:
                spread = {"std": mine.std() + 1e-6, "batch": score.std() + 1e-6, "none": 1.0}
                expected = (score[i] - mine.mean()) / spread[variant]
            close(actual[i], expected)

    def test_ddof_and_eps(self):
        score, group = torch.tensor([0.0, 2.0]), torch.tensor([0, 0])
        close(F.group_relative(score, group, ddof=0, eps=0.0), [-1.0, 1.0])
        close(F.group_relative(score, group, ddof=0, eps=1.0), [-0.5, 0.5])

    def test_part_of_a_group_is_an_error_unless_meant(self):
        score, group = torch.arange(5.0), torch.tensor([3, 3, 8, 8, 8])
        with pytest.raises(ValueError, match=r"Expected 3 .* group \(size\) 3 \(2\)"):
            F.group_relative(score, group)
        with pytest.raises(ValueError, match=r"Expected 4 .* 3 \(2\), 8 \(3\)"):
            F.group_relative(score, group, group_size=4)
        assert F.group_relative(score, group, group_size=4, partial="allow").isfinite().all()
        with pytest.raises(ValueError, match="Expected 2"):
            F.group_relative(torch.arange(2.0), torch.arange(2), group_size=2)
        assert (F.group_relative(torch.arange(2.0), torch.arange(2)) == 0).all()

    def test_refusals(self):
        score, group = torch.arange(2.0), torch.zeros(2)
        for scale in ("std", "batch"):
            with pytest.raises(ValueError, match=rf"leave_one_out.*{scale}"):
                F.group_relative(score, group, "leave_one_out", scale)
        with pytest.raises(ValueError, match="scale is 'mad'"):
            F.group_relative(score, group, scale="mad")

    @law(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.randoms())
    def test_columns_are_compared_apart_and_a_penalty_is_never_blown_up(self, sizes, random):
        group_id = torch.tensor([g for g, n in enumerate(sizes) for _ in range(n)])
        noise = torch.Generator().manual_seed(random.randrange(10**6))
        score = torch.tensor([[random.choice([0.0, 1.0]) for _ in range(3)] for _ in group_id], dtype=DOUBLE)
        penalty = torch.randn(score.shape, dtype=DOUBLE, generator=noise)
        mask = torch.rand(score.shape, generator=noise) < 0.7
        mask[0, 0] = mask[-1, -1] = True
        whole = (score + penalty)[mask].std() if mask.sum() > 1 else torch.zeros(())
        for scale in ("std", "batch", "none"):
            both = F.group_relative(score, group_id, scale=scale, partial="allow", penalty=penalty, mask=mask)
            for k in range(3):
                for i, g in enumerate(group_id):
                    mine, paid = score[group_id == g, k], penalty[group_id == g, k]
                    if len(mine) == 1 or mine.std() < 1e-9:
                        expected = penalty[i, k] - paid.mean()
                    else:
                        total = mine + paid
                        expected = score[i, k] + penalty[i, k] - total.mean()
                        expected = expected / {"std": total.std() + 1e-6, "batch": whole + 1e-6, "none": 1.0}[scale]
                    close(both[i, k], expected)


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
    """``exp`` of a log-ratio overflows float32 at 88.7; what a clip, a mask or a 0 leaves out must not come back as NaN."""

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

    @pytest.mark.parametrize(("kind", "constant"), [("constant", None), ("constant", 0.0), ("token", 5.0)])
    def test_the_constant_is_asked_for(self, kind, constant):
        with pytest.raises(ValueError, match="takes a constant > 0"):
            F.loss_weights(torch.zeros(1, 1, dtype=torch.int64), kind, constant)


class TestFigures:
    def test_effective_sample_size(self):
        weight = torch.tensor([0.5, 0.5, 0.0], dtype=DOUBLE)
        ratio = torch.tensor([1.0, 3.0, torch.inf], dtype=DOUBLE)
        close(F.effective_sample_size(ratio.log(), weight), (0.5 + 1.5) ** 2 / (0.5 + 4.5))
        close(F.effective_sample_size(ratio.log() + 1000, weight), 0.8)
        assert F.effective_sample_size(ratio.log(), torch.zeros(3)).item() == 0

    def test_explained_variance(self):
        target, value = torch.randn(2, 50, dtype=DOUBLE, generator=torch.Generator().manual_seed(0))
        expected = 1 - (target - value).var() / target.var()
        close(F.explained_variance(value, target, torch.ones(50)), expected)
        assert F.explained_variance(value, torch.full((50,), 0.1, dtype=DOUBLE), torch.ones(50)).item() == 0
        doubled = F.explained_variance(value.repeat(2), target.repeat(2), torch.ones(100))
        close(F.explained_variance(value, target, torch.full((50,), 2.0)), doubled)
