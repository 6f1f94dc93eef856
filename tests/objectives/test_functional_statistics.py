"""Statistics of a batch, of its groups and of all processes' batches against their definitions."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from conversations import DOUBLE, LAYOUT, close, law, layouts, make_rows, turns_of
from hypothesis import strategies as st

from torchrl_llm import functional as F
from torchrl_llm.episode import LARGEST_REWARD


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

    @pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
    def test_what_is_no_number_is_no_lack_of_spread(self, wrong):
        """Wherever it stands: it must not become an advantage of 0."""
        for at in range(3):
            x, mask = torch.zeros(4), torch.tensor([True, True, True, False])
            x[at] = wrong
            assert F.standardize(x, mask).tolist() == pytest.approx([torch.nan] * 3 + [0.0], nan_ok=True)
            assert not F.standardize(torch.zeros(4), mask, penalty=x)[:3].isfinite().any()
            assert not F.explained_variance(torch.zeros(4), x, mask.float()).isfinite()
            assert not F.explained_variance(x, torch.arange(4.0), mask.float()).isfinite()
        assert F.standardize(torch.tensor([wrong]), torch.tensor([True])).isnan().all()
        assert not F.effective_sample_size(torch.tensor([0.0, torch.nan]), torch.ones(2)).isfinite()

    @pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
    @pytest.mark.parametrize(
        ("baseline", "scale"),
        [*(("mean", scale) for scale in ("std", "batch", "mean", "none")), ("leave_one_out", "none")],
    )
    def test_a_group_with_what_is_no_number_has_no_advantages(self, scale, baseline, wrong):
        """The other groups have theirs, unless all are divided by one number."""
        group_id = torch.tensor([0, 0, 1, 1, 2])
        score = torch.tensor([1.0, wrong, 0.0, 1.0, wrong])
        found = F.group_relative(score, group_id, baseline, scale, partial="allow")
        known = torch.tensor([False, False, scale != "batch", scale != "batch", False])
        assert found[known].isfinite().all()
        assert found[known].any() == known.any()
        assert not found[~known].isfinite().any()

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


class TestLargestReward:
    """What an environment may pay at most is compared in float32 like any other number."""

    @pytest.mark.parametrize("size", [1.0, LARGEST_REWARD])
    def test_is_compared_like_1(self, size):
        returns = 1e3 * size * torch.tensor([1.0, -1.0]).repeat(2**15)  # of a thousand turns each
        expected = torch.tensor([1.0, -1.0]).repeat(2**15)
        normalized = F.standardize(returns, torch.ones_like(returns, dtype=torch.bool))
        relative = F.group_relative(returns, torch.zeros(2**16, dtype=torch.int64))
        for advantage in (normalized, relative):
            torch.testing.assert_close(advantage, expected, rtol=1e-3, atol=0)


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
