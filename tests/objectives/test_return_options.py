"""Components, whitening, potentials and the mean as scale, of the estimators that compare returns,
against loops."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from conversations import DOUBLE, LAYOUT, close, law, layouts, make_rows, turns_of
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import Tensor

from torchrl_llm import functional as F
from torchrl_llm import keys
from torchrl_llm.objectives import GroupRelative, ReBN

GAMMA = 0.9
ADVANTAGE = ("turn", "advantage")


def extended(seed: int = 0, layout=LAYOUT, group_size: int = 3) -> TensorDict:
    """Rows with two numbers beside the reward, NaN off the mask and where the environment gave
    none."""
    rows = make_rows(layout, seed, group_size)
    mask = rows["turn", "mask"]
    noise = torch.Generator().manual_seed(seed + 2)
    for name in ("grade", "phi"):
        number = torch.randint(-2, 3, mask.shape, generator=noise).to(DOUBLE)
        rows[keys.turn_extra(name)] = number.where(mask & (torch.rand(mask.shape, generator=noise) < 0.8), torch.nan)
    return rows


def to_go(reward: Tensor, mask: Tensor) -> Tensor:
    """Discounted return from each turn on, ``[B, T]``, by the definition; a gap in the mask costs
    no discount."""
    out = torch.zeros_like(reward)
    for b, row in enumerate(mask.tolist()):
        after = 0.0
        for k in reversed(range(len(row))):
            if row[k]:
                out[b, k] = after = reward[b, k].nan_to_num() + GAMMA * after
    return out


def whole(reward: Tensor, mask: Tensor) -> Tensor:
    """The return of each episode, from the first turn that was taken on, ``[B]``."""
    first = mask.int().argmax(1, keepdim=True)
    return torch.where(mask.any(1), to_go(reward, mask).gather(1, first).squeeze(1), 0.0)


def compared(score: Tensor, group_id: Tensor, scale: str, baseline: str) -> Tensor:
    """Episodes ``[B]`` against their groups, by the definition."""
    out = torch.zeros_like(score)
    for i, label in enumerate(group_id.tolist()):
        mine = score[group_id == label]
        if len(mine) > 1 and mine.std() > 1e-9:
            others = (mine.sum() - score[i]) / (len(mine) - 1)
            out[i] = score[i] - (mine.mean() if baseline == "mean" else others)
            out[i] = out[i] / (mine.std() + 1e-6) if scale == "std" else out[i]
    return out


class TestComponents:
    @law(layouts(max_rows=6), st.sampled_from([("std", "mean"), ("none", "mean"), ("none", "leave_one_out")]))
    def test_each_reward_is_compared_by_itself(self, case, options):
        layout, seed = case
        rows = extended(seed, layout, 2)
        reward, mask, _, spoken, _ = turns_of(rows)
        scale, baseline = options
        settings = {"scale": scale, "baseline": baseline, "partial": "allow", "gamma": GAMMA}
        expected = torch.zeros(len(rows), dtype=DOUBLE)
        for weight, each in (
            (1.0, reward),
            (0.5, rows[keys.turn_extra("grade")]),
            (-2.0, rows[keys.turn_extra("phi")]),
        ):
            expected += weight * compared(whole(each, mask), rows["group_id"], scale, baseline)
        out = GroupRelative(components={"grade": 0.5, "phi": -2.0}, **settings)(rows)
        close(out[ADVANTAGE], torch.where(mask & spoken, expected.unsqueeze(1), 0.0), atol=1e-8)

    @pytest.mark.parametrize("credit", ["turn", "state"])
    def test_leave_one_out_is_linear(self, credit):
        options = {"credit": credit, "baseline": "leave_one_out", "scale": "none", "gamma": GAMMA}
        rows = extended()
        summed = rows.clone()
        summed["turn", "reward"] = rows["turn", "reward"] + 0.5 * rows[keys.turn_extra("grade")].nan_to_num()
        apart = GroupRelative(components={"grade": 0.5}, **options)(rows.clone())[ADVANTAGE]
        close(apart, GroupRelative(**options)(summed)[ADVANTAGE])
        assert (apart - GroupRelative(**options)(rows)[ADVANTAGE]).abs().max() > 1e-2

    def test_a_large_component_does_not_drown_the_others(self):
        """GDPO: where rewards are summed first, the smaller one hardly counts."""
        rows = extended()
        large, ordinary = rows.clone(), rows.clone()
        large[keys.turn_extra("grade")] = 1e3 * rows[keys.turn_extra("grade")]
        both = [GroupRelative(components={"grade": 1.0}, eps=0.0)(each)[ADVANTAGE] for each in (large, ordinary)]
        close(both[0], both[1])

    def test_a_kl_is_compared_by_itself_and_without_scale(self):
        rows = extended()
        options = {"components": {"grade": 1.0}}
        paid = GroupRelative(**options, kl_coeff=0.3)(rows.clone())[ADVANTAGE]
        without = GroupRelative(**options)(rows.clone())[ADVANTAGE]
        _, mask, ids, spoken, turns = turns_of(rows)
        kl = -0.3 * F.turn_sum(rows["old_log_prob"] - rows["ref_log_prob"], ids, turns)
        centered = compared(kl.where(mask, 0.0).sum(1), rows["group_id"], "none", "mean")
        close(paid - without, torch.where(mask & spoken, centered.unsqueeze(1), 0.0))

    def test_refusals(self):
        with pytest.raises(KeyError, match=r"components names 'shape', which is not an extra .*grade"):
            GroupRelative(components={"shape": 1.0})(extended())
        rows = extended()
        rows[keys.turn_extra("grade")] = torch.ones_like(rows["turn", "mask"], dtype=torch.int64)
        with pytest.raises(TypeError, match="a text; expected one that is declared as a number"):
            GroupRelative(components={"grade": 1.0})(rows)
        with pytest.raises(ValueError, match=r"components\['grade'\] is 'much'; expected a number"):
            GroupRelative(components={"grade": "much"})
        with pytest.raises(ValueError, match="components is"):
            GroupRelative(components=["grade"])


class TestWhitening:
    @pytest.mark.parametrize("credit", ["episode", "turn"])
    def test_over_what_was_compared(self, credit):
        rows, options = extended(), {"credit": credit, "scale": "none", "gamma": GAMMA}
        plain = GroupRelative(**options)(rows.clone())
        out = GroupRelative(**options, whiten=True)(rows)
        _, mask, _, spoken, _ = turns_of(rows)
        acted = mask & spoken
        chosen = torch.stack([plain[ADVANTAGE][b][row][0] for b, row in enumerate(acted)])
        each = chosen if credit == "episode" else plain[ADVANTAGE][acted]
        expected = torch.where(acted, (plain[ADVANTAGE] - each.mean()) / (each.std() + 1e-6), 0.0)
        close(out[ADVANTAGE], expected)
        assert (out[ADVANTAGE] - plain[ADVANTAGE]).abs().max() > 1e-2

    def test_a_kl_alone_is_never_blown_up(self):
        rows = extended()
        rows["turn", "reward"] = torch.ones_like(rows["turn", "reward"]) * 0
        unscaled = GroupRelative(scale="none", kl_coeff=1e-3)(rows.clone())[ADVANTAGE]
        out = GroupRelative(scale="none", kl_coeff=1e-3, whiten=True)(rows)[ADVANTAGE]
        assert 0 < out.abs().max() < 2 * unscaled.abs().max()

    def test_with_leave_one_out_it_is_refused(self):
        with pytest.raises(ValueError, match="whiten=True is biased"):
            GroupRelative(baseline="leave_one_out", scale="none", whiten=True)
        with pytest.raises(ValueError, match="is biased"):
            GroupRelative(credit="state", baseline="leave_one_out", scale="none", whiten=True)


class TestPotential:
    @law(layouts(), st.sampled_from([ReBN, GroupRelative]))
    def test_it_is_the_shaping_of_each_turn(self, case, kind):
        """gamma * phi(the next state) - phi(this one), and 0 after the end, added to the
        rewards."""
        layout, seed = case
        rows = extended(seed, layout, 1)
        mask, phi = rows["turn", "mask"], rows[keys.turn_extra("phi")].nan_to_num()
        shaped = rows.clone()
        reward = rows["turn", "reward"].clone()
        for b, row in enumerate(mask.tolist()):
            turns = [k for k, played in enumerate(row) if played]
            for k, after in zip(turns, [*turns, None][1:], strict=True):
                reward[b, k] += (0.0 if after is None else GAMMA * phi[b, after]) - phi[b, k]
        shaped["turn", "reward"] = reward
        free = {"normalize_over": "none"} if kind is ReBN else {"scale": "none", "credit": "turn"}
        # Groups of one compare nothing: the returns are what is looked at there.
        key = ADVANTAGE if kind is ReBN else ("turn", "value_target")
        close(kind(gamma=GAMMA, potential="phi", **free)(rows)[key], kind(gamma=GAMMA, **free)(shaped)[key])

    def test_tokens_have_the_potential_of_their_turn(self):
        rows, options = extended(), {"granularity": "token", "normalize_over": "none"}
        plain, shaped = ReBN(**options)(rows.clone()), ReBN(**options, potential="phi")(rows.clone())
        expected = F.turn_to_token(rows[keys.turn_extra("phi")].nan_to_num(), rows["turn_ids"])
        close(plain["advantage"] - shaped["advantage"], expected)

    @pytest.mark.parametrize("options", [{"credit": "turn"}, {"credit": "turn", "whiten": True}])
    def test_it_changes_advantages(self, options):
        plain, shaped = (GroupRelative(**options, **each)(extended())[ADVANTAGE] for each in ({}, {"potential": "phi"}))
        assert (plain - shaped).abs().max() > 1e-2

    def test_over_a_whole_episode_it_does_nothing_and_is_refused(self):
        with pytest.raises(ValueError, match="potential='phi' does nothing with credit='episode'"):
            GroupRelative(potential="phi")
        with pytest.raises(KeyError, match="potential names 'psi', which is not an extra"):
            ReBN(potential="psi")(extended())


class TestMeanAsScale:
    @law(st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=1, max_size=4))
    def test_definition(self, outcomes):
        score = torch.tensor(outcomes, dtype=DOUBLE)
        group = torch.arange(len(score)).repeat_interleave(3)
        actual = F.group_relative(score.flatten(), group, scale="mean").view(-1, 3)
        for row, mine in zip(actual, score, strict=True):
            rate = mine.mean()
            close(row, (mine - rate) / rate if rate > 0 else torch.zeros(3))

    def test_a_penalty_does_not_change_the_divisor(self):
        score, penalty = torch.tensor([0.0, 1.0, 1.0]), torch.tensor([-9.0, -9.0, -3.0])
        expected = (score + penalty - (score + penalty).mean()) / score.mean()
        close(F.group_relative(score, torch.zeros(3), scale="mean", penalty=penalty), expected, atol=1e-5)

    def test_refusals(self):
        with pytest.raises(ValueError, match=r"at least 0, such as outcomes of 0 and 1, and one is -0\.5"):
            F.group_relative(torch.tensor([1.0, -0.5]), torch.zeros(2), scale="mean")
        with pytest.raises(ValueError, match="is for the outcomes of episodes"):
            GroupRelative(scale="mean", credit="turn")


def _rank(rank: int, store: str, rows: TensorDict, out: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=3)
    mine = rows[3 * rank : 3 * rank + 3]  # the last rank has none
    estimator = GroupRelative(components={"grade": 1.0}, whiten=True, process_group=dist.group.WORLD)
    torch.save(estimator(mine)["advantage"], f"{out}.{rank}")
    dist.destroy_process_group()


def test_ranks_whiten_together(tmp_path):
    rows = extended()
    mp.start_processes(_rank, (str(tmp_path / "store"), rows, str(tmp_path / "out")), nprocs=3, start_method="fork")
    parts = [torch.load(tmp_path / f"out.{rank}") for rank in range(3)]
    close(torch.cat(parts), GroupRelative(components={"grade": 1.0}, whiten=True)(rows)["advantage"])
