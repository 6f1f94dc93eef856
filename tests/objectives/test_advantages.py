"""The estimators: which keys they read and write, their options, and their errors."""

from __future__ import annotations

import pytest
import torch
from conversations import DOUBLE, LAYOUT, Values, close, law, layouts, make_critic, make_rows, table_actor
from hypothesis import strategies as st
from tensordict import TensorDict

from torchrl_llm import functional as F
from torchrl_llm.objectives import GroupRelative, LLMGRPOLoss, NoCredit, ReBN, TurnEstimator, TurnGAE, TurnVTrace
from torchrl_llm.objectives.estimators.imitation import ImitationWeights


def rows_and_parts(seed: int = 0, layout=LAYOUT, **kwargs):
    rows = make_rows(layout, seed, **kwargs)
    mask, ids = rows["turn", "mask"], rows["turn_ids"]
    return rows, rows["turn", "reward"], mask, ids, mask & (F.turn_lengths(ids, mask.shape[1]) > 0)


class TestTurnGAE:
    @law(layouts(), st.sampled_from(["first", "mean", "last"]))
    def test_turns(self, case, reduction):
        layout, seed = case
        rows, reward, mask, ids, acted = rows_and_parts(seed, layout)
        value = F.turn_reduce(rows["state_value"], ids, mask.shape[1], reduction)
        bootstrap = torch.where(rows["turn", "truncated"].any(1), rows["bootstrap_value"], 0.0)
        advantage, target = F.turn_gae(reward, value, mask, 0.9, 0.8, bootstrap, acted=acted)
        out = TurnGAE(gamma=0.9, lmbda=0.8, value_reduction=reduction, whiten=False)(rows)
        close(out["turn", "advantage"], advantage)
        close(out["turn", "value_target"], target)
        close(out["turn", "value"], value)
        close(out["advantage"], F.turn_to_token(advantage, ids))
        close(out["value_target"], F.turn_to_token(target, ids))

    def test_tokens(self):
        rows, reward, mask, ids, _ = rows_and_parts()
        bootstrap = torch.where(rows["turn", "truncated"].any(1), rows["bootstrap_value"], 0.0)
        advantage, target = F.token_gae(reward, rows["state_value"], ids, mask, 1.0, 0.95, bootstrap)
        out = TurnGAE(granularity="token", whiten=False)(rows)
        close(out["advantage"], advantage)
        close(out["value_target"], target)
        close(out["turn", "advantage"], F.turn_first(advantage, ids, mask.shape[1]))

    def test_defaults_by_granularity(self):
        assert (TurnGAE().gamma, TurnGAE().lmbda, TurnGAE().granularity) == (0.99, 0.95, "turn")
        assert TurnGAE(granularity="token").gamma == 1.0
        assert TurnGAE(granularity="auto", single_turn=True).granularity == "token"
        assert TurnGAE(granularity="auto", single_turn=False).granularity == "turn"

    def test_auto_does_not_look_at_the_batch(self):
        rows, *_ = rows_and_parts(layout=[[(True, 1, 3)], [(True, 2, 2)]])
        out = TurnGAE(granularity="auto", single_turn=False, whiten=False)(rows.clone())
        close(out["advantage"], TurnGAE(granularity="turn", whiten=False)(rows)["advantage"])
        with pytest.raises(ValueError, match="needs single_turn"):
            TurnGAE(granularity="auto")

    @pytest.mark.parametrize("granularity", ["turn", "token"])
    def test_whitening_is_over_the_steps(self, granularity):
        rows, _, _, ids, acted = rows_and_parts()
        raw = TurnGAE(granularity=granularity, whiten=False)(rows.clone())
        out = TurnGAE(granularity=granularity)(rows)
        steps, key = (ids >= 0, "advantage") if granularity == "token" else (acted, ("turn", "advantage"))
        close(out[key], F.standardize(raw[key], steps))
        close(out[key][steps].mean(), 0.0)
        close(out[key][steps].std(), 1.0, atol=1e-7)
        close(out["value_target"], raw["value_target"])

    def test_only_truncation_bootstraps(self):
        rows, *_ = rows_and_parts()
        estimator = TurnGAE(whiten=False)
        ended = rows["turn", "terminated"] | rows["turn", "truncated"]
        assert rows["turn", "truncated"].any()
        assert rows["turn", "terminated"].any()
        changed = rows.clone().update({"bootstrap_value": rows["bootstrap_value"] + 1})
        moved = (estimator(rows.clone())["turn", "advantage"] != estimator(changed)["turn", "advantage"]).any(1)
        assert moved.tolist() == rows["turn", "truncated"].any(1).tolist()
        rows["turn", "terminated"] = ended  # GEM sets both at its turn limit: that is termination
        changed["turn", "terminated"] = ended
        close(estimator(rows)["advantage"], estimator(changed)["advantage"])

    def test_a_missing_bootstrap_is_an_error_only_where_it_is_needed(self):
        rows, *_ = rows_and_parts()
        del rows["bootstrap_value"]
        with pytest.raises(KeyError, match=r"bootstrap_value.*truncated"):
            TurnGAE()(rows)
        rows["turn", "terminated"] = rows["turn", "terminated"] | rows["turn", "truncated"]
        assert TurnGAE()(rows)["advantage"].isfinite().all()

    def test_an_unfinished_conversation_is_an_error(self):
        rows, *_ = rows_and_parts()
        for flag in ("terminated", "truncated"):
            rows["turn", flag][3] = False
        for estimator in (TurnGAE(), ReBN(), GroupRelative()):
            with pytest.raises(ValueError, match=r"Row\(s\) \[3\] end in a turn"):
                estimator(rows)

    @pytest.mark.parametrize("chunk", [None, 4])
    def test_the_critic_runs_once_without_a_graph_and_not_if_its_values_are_there(self, chunk):
        rows, *_ = rows_and_parts()
        critic, calls = make_critic(), []
        critic.module.register_forward_hook(lambda module, args, out: calls.append(len(args[0])))
        given = rows.clone()
        TurnGAE(critic)(given)
        assert calls == []
        del rows["state_value"], rows["bootstrap_value"]
        out = TurnGAE(critic, value_chunk_size=chunk, whiten=False)(rows)
        assert calls == ([6] if chunk is None else [4, 2])
        assert not out["state_value"].requires_grad
        expected = critic(rows.select(*critic.in_keys))
        close(out["state_value"], expected["state_value"].detach())
        close(out["bootstrap_value"], expected["bootstrap_value"].detach())

    def test_no_critic_and_no_values(self):
        rows, *_ = rows_and_parts()
        with pytest.raises(KeyError, match="has no critic"):
            TurnGAE()(rows.exclude("state_value"))

    def test_set_keys_and_dispatch(self):
        rows, *_ = rows_and_parts()
        expected = TurnGAE()(rows.clone())
        estimator = TurnGAE()
        estimator.set_keys(advantage=("deep", "advantage"), reward="score", value="v")
        moved = rows.rename_key_("state_value", "v").set("score", rows["turn", "reward"])
        close(estimator(moved)["deep", "advantage"], expected["advantage"])
        assert "score" in estimator.in_keys
        plain = TurnGAE()
        rows = rows_and_parts(layout=[[(True, 1, 2)]])[0]
        rows["turn", "terminated"], rows["turn", "truncated"] = rows["turn", "mask"], ~rows["turn", "mask"]
        out = plain(**{"_".join(k) if isinstance(k, tuple) else k: rows[k] for k in plain.in_keys})
        assert len(out) == len(plain.out_keys)
        close(out[0], plain(rows)["advantage"])

    def test_a_nan_off_the_mask_stays_there(self):
        rows, *_ = rows_and_parts()
        assert rows["turn", "reward"].isnan().any()
        out = TurnGAE()(rows)
        assert all(out[key].isfinite().all() for key in TurnGAE().out_keys)

    def test_wrong_options(self):
        with pytest.raises(ValueError, match="'first', 'mean', 'last'"):
            TurnGAE(value_reduction="final")
        with pytest.raises(ValueError, match="'turn', 'token', 'auto'"):
            TurnGAE(granularity="word")


class TestReBN:
    @law(layouts())
    def test_definition(self, case):
        layout, seed = case
        rows, reward, mask, ids, acted = rows_and_parts(seed, layout)
        out = ReBN(gamma=0.7, ddof=0, eps=1e-3)(rows.clone())
        returns = F.turn_returns(reward, mask, 0.7, acted=acted)
        close(out["turn", "value_target"], returns)
        close(out["turn", "advantage"], F.standardize(returns, acted, 0, 1e-3))
        close(out["advantage"], F.turn_to_token(out["turn", "advantage"], ids))

    @pytest.mark.parametrize("old", ["old_log_prob", "sample_log_prob"])
    def test_the_kl_is_paid_turn_by_turn_out_of_the_reward(self, old):
        rows, reward, mask, ids, acted = rows_and_parts()
        if old == "sample_log_prob":
            del rows["old_log_prob"]
        paid = reward - 0.1 * F.turn_sum(rows[old] - rows["ref_log_prob"], ids, mask.shape[1])
        returns = F.turn_returns(paid, mask, 0.7, acted=acted)
        out = ReBN(gamma=0.7, kl_coeff=0.1)(rows)
        close(out["turn", "value_target"], returns)
        close(out["turn", "advantage"], F.standardize(returns, acted))

    @law(layouts())
    def test_tokens(self, case):
        """A token's return is its KL and the turn's reward at the turn's last token, and what
        follows; by the definition."""
        layout, seed = case
        rows, reward, mask, ids, _ = rows_and_parts(seed, layout)
        step = F.token_rewards(reward, ids, mask) - 0.1 * (rows["old_log_prob"] - rows["ref_log_prob"])
        expected = torch.zeros_like(step)
        for b, row in enumerate(ids.tolist()):
            after = 0.0
            for i in reversed([i for i, k in enumerate(row) if k >= 0]):
                after = expected[b, i] = step[b, i] + 0.7 * after
        options = {"gamma": 0.7, "granularity": "token", "kl_coeff": 0.1}
        out = ReBN(**options, normalize_over="none")(rows.clone())
        close(out["value_target"], expected)
        close(out["advantage"], expected)
        close(out["turn", "advantage"], F.turn_first(expected, ids, mask.shape[1]))
        plain = ReBN(gamma=0.7, granularity="token", normalize_over="none")(rows.clone())["advantage"]
        spread = plain[ids >= 0].std() if (ids >= 0).sum() > 1 else torch.zeros(())
        if spread > 1e-3:
            close(ReBN(gamma=0.7, granularity="token")(rows)["advantage"], F.standardize(plain, ids >= 0))

    def test_defaults_by_granularity(self):
        assert (ReBN().gamma, ReBN().granularity) == (0.9, "turn")
        assert (ReBN(granularity="token").gamma, ReBN(granularity="token", gamma=0.5).gamma) == (1.0, 0.5)
        assert ReBN(granularity="auto", single_turn=True).granularity == "token"
        assert ReBN(granularity="auto", single_turn=False).granularity == "turn"
        with pytest.raises(ValueError, match="needs single_turn"):
            ReBN(granularity="auto")
        with pytest.raises(ValueError, match='set granularity to "auto"'):
            ReBN(single_turn=True)

    def test_where_returns_do_not_differ_only_the_kl_is_left(self):
        rows, _, mask, ids, acted = rows_and_parts()
        rows["turn", "reward"] = torch.zeros_like(rows["turn", "reward"])
        out = ReBN(kl_coeff=1e-4)(rows.clone())
        kl = F.turn_sum(rows["old_log_prob"] - rows["ref_log_prob"], ids, mask.shape[1])
        kl = F.turn_returns(-1e-4 * kl, mask, 0.9, acted=acted)
        close(out["turn", "advantage"], torch.where(acted, kl - kl[acted].mean(), 0.0))
        assert (ReBN()(rows)["advantage"] == 0).all()

    def test_the_reference_is_asked_for(self):
        rows, *_ = rows_and_parts()
        with pytest.raises(KeyError, match=r"ref_log_prob.*kl_coeff=0"):
            ReBN(kl_coeff=0.1)(rows.exclude("ref_log_prob"))
        assert "ref_log_prob" in ReBN(kl_coeff=0.1).in_keys
        assert "ref_log_prob" not in ReBN().in_keys


class TestGroupRelative:
    @law(layouts(max_rows=6))
    def test_definition(self, case):
        layout, seed = case
        rows, reward, mask, ids, acted = rows_and_parts(seed, layout, group_size=2)
        score = F.episode_return(reward, mask, 0.5)
        expected = F.group_relative(score, rows["group_id"], partial="allow")
        out = GroupRelative(gamma=0.5, partial="allow")(rows)
        close(out["turn", "advantage"], torch.where(acted, expected[:, None], 0.0))
        close(out["advantage"], torch.where(ids >= 0, expected[:, None], 0.0))
        close(out["turn", "value_target"], torch.where(acted, score[:, None], 0.0))

    @pytest.mark.parametrize(
        "options",
        [
            {"scale": "none"},
            {"scale": "batch"},
            {"baseline": "leave_one_out", "scale": "none"},
            {"ddof": 0},
            {"eps": 1.0},
        ],
    )
    def test_options_reach_the_formula(self, options):
        rows, reward, mask, _, _ = rows_and_parts(group_size=3)
        expected = F.group_relative(F.episode_return(reward, mask), rows["group_id"], **options)
        actual = GroupRelative(**options)(rows.clone())["advantage"].sum(1) / (rows["turn_ids"] >= 0).sum(1)
        close(actual, expected)
        assert (actual - GroupRelative()(rows)["advantage"].amax(1)).abs().max() > 1e-3

    @law(layouts(max_rows=6), st.sampled_from(["std", "batch", "none"]))
    def test_turn_credit_compares_returns_from_there_on(self, case, scale):
        layout, seed = case
        rows, reward, mask, _, acted = rows_and_parts(seed, layout, group_size=2)
        out = GroupRelative(gamma=0.9, credit="turn", scale=scale, partial="allow")(rows)
        to_go = F.turn_returns(reward, mask, 0.9)
        for k in range(mask.shape[1]):
            expected = F.group_relative(to_go[:, k], rows["group_id"], scale=scale, partial="allow")
            if scale == "batch":
                everything = {"scale": "batch", "partial": "allow", "mask": acted}
                expected = F.group_relative(to_go, rows["group_id"], **everything)[:, k]
            close(out["turn", "advantage"][:, k], torch.where(acted[:, k], expected, 0.0))
        close(out["turn", "value_target"], torch.where(acted, to_go, 0.0))

    @pytest.mark.parametrize("credit", ["episode", "turn"])
    def test_a_kl_in_the_reward_is_scaled_with_the_returns_but_never_by_itself(self, credit):
        rows, reward, mask, ids, _ = rows_and_parts(group_size=3)
        options = {"credit": credit, "gamma": 0.9}
        kl = F.turn_sum(rows["old_log_prob"] - rows["ref_log_prob"], ids, mask.shape[1])
        plain = rows.clone()
        plain["turn", "reward"] = reward - 0.3 * kl
        paid = GroupRelative(**options, kl_coeff=0.3)(rows.clone())
        assert (paid["advantage"] - GroupRelative(**options)(rows.clone())["advantage"]).abs().max() > 1e-3
        close(paid["turn", "value_target"], GroupRelative(**options)(plain)["turn", "value_target"])
        if credit == "episode":  # by turns, one group has no spread in its last turn
            close(paid["advantage"], GroupRelative(**options)(plain)["advantage"])
        rows["turn", "reward"] = torch.zeros_like(reward)
        plain["turn", "reward"] = -0.3 * kl
        only = GroupRelative(**options, kl_coeff=0.3)(rows)
        unscaled = GroupRelative(**options, scale="none")(plain)
        close(only["advantage"], unscaled["advantage"])

    def test_part_of_a_group(self):
        rows, *_ = rows_and_parts(group_size=3)
        with pytest.raises(ValueError, match="Expected 3"):
            GroupRelative()(rows[:5])
        with pytest.raises(ValueError, match="Expected 4"):
            GroupRelative(group_size=4)(rows)
        assert GroupRelative(partial="allow")(rows[:5])["advantage"].isfinite().all()

    def test_wrong_options_fail_at_construction(self):
        with pytest.raises(ValueError, match="leave_one_out"):
            GroupRelative(baseline="leave_one_out")


class TestTurnVTrace:
    @law(layouts(), st.sampled_from([0.7, 2.0]), st.sampled_from([0.8, 1.5]))
    def test_turns(self, case, rho_clip, c_clip):
        layout, seed = case
        rows, reward, mask, ids, acted = rows_and_parts(seed, layout)
        value = F.turn_first(rows["state_value"], ids, mask.shape[1])
        log_rho = F.turn_sum(rows["old_log_prob"] - rows["sample_log_prob"], ids, mask.shape[1])
        bootstrap = torch.where(rows["turn", "truncated"].any(1), rows["bootstrap_value"], 0.0)
        options = {"rho_clip": rho_clip, "c_clip": c_clip}
        advantage, target = F.turn_vtrace(reward, value, log_rho, mask, 0.9, bootstrap, acted=acted, **options)
        out = TurnVTrace(gamma=0.9, **options)(rows)
        close(out["turn", "advantage"], advantage)
        close(out["turn", "value_target"], target)
        close(out["advantage"], F.turn_to_token(advantage, ids))

    def test_on_policy_it_is_gae_without_lambda(self):
        rows, *_ = rows_and_parts()
        rows["old_log_prob"] = rows["sample_log_prob"]
        expected = TurnGAE(gamma=0.9, lmbda=1.0, whiten=False)(rows.clone())
        out = TurnVTrace(gamma=0.9)(rows)
        close(out["advantage"], expected["advantage"])
        close(out["value_target"], expected["value_target"])

    def test_the_old_log_prob_must_be_scored(self):
        rows, *_ = rows_and_parts()
        with pytest.raises(KeyError, match="start of the update"):
            TurnVTrace()(rows.exclude("old_log_prob"))


ALL = {
    "turn": lambda **o: TurnGAE(**{"gamma": 0.9, "whiten": False} | o),
    "token": lambda **o: TurnGAE(**{"gamma": 0.9, "granularity": "token", "whiten": False} | o),
    "rebn": lambda **o: ReBN(**{"gamma": 0.9} | o),
    "returns": lambda **o: ReBN(**{"gamma": 0.9, "normalize_over": "none"} | o),
    "return token": lambda **o: ReBN(**{"gamma": 0.9, "granularity": "token", "normalize_over": "none"} | o),
    "episode": lambda **o: GroupRelative(**{"gamma": 0.9} | o),
    "group turn": lambda **o: GroupRelative(**{"gamma": 0.9, "credit": "turn"} | o),
    "vtrace": lambda **o: TurnVTrace(**{"gamma": 0.9} | o),
}


class TestNoCredit:
    @law(layouts())
    def test_only_the_kl_is_credited(self, case):
        """Each turn answers for its own KL and for the KL of later turns, more or less than a turn
        of the batch does."""
        layout, seed = case
        rows, reward, mask, ids, acted = rows_and_parts(seed, layout)
        kl = F.turn_sum(rows["old_log_prob"] - rows["ref_log_prob"], ids, mask.shape[1])
        paid = F.turn_returns(-0.3 * kl, mask, 0.7, acted=acted)
        out = NoCredit(gamma=0.7, kl_coeff=0.3)(rows.clone())
        mean = paid[acted].mean() if acted.any() else 0.0
        close(out["turn", "advantage"], torch.where(acted, paid - mean, 0.0))
        close(out["turn", "value_target"], F.turn_returns(reward, mask, 0.7, acted=acted) + paid)
        assert (NoCredit()(rows)["advantage"] == 0).all()

    @law(layouts())
    def test_it_is_return_batch_normalization_of_equal_rewards(self, case):
        layout, seed = case
        rows, reward, *_ = rows_and_parts(seed, layout)
        out = NoCredit(gamma=0.7, kl_coeff=0.3)(rows.clone())
        rows["turn", "reward"] = torch.zeros_like(reward)
        close(out["advantage"], ReBN(gamma=0.7, kl_coeff=0.3)(rows)["advantage"])


class TestSharedOptions:
    @pytest.mark.parametrize("name", ALL)
    def test_advantages_are_clipped_last(self, name):
        rows, *_ = rows_and_parts(group_size=3)
        free = ALL[name]()(rows.clone())["advantage"]
        bound = free.abs().max().item() / 2
        close(ALL[name](clip_advantage=bound)(rows)["advantage"], free.clamp(-bound, bound))

    @pytest.mark.parametrize("name", ALL)
    def test_the_discount_is_kept_by_steps(self, name):
        rows, _, mask, ids, _ = rows_and_parts(group_size=3)
        if name == "episode":
            with pytest.raises(ValueError, match='credit="turn"'):
                ALL[name](discounted_objective=True)
            return
        free = ALL[name]()(rows.clone())["advantage"]
        expected = free.clone()
        for b, row in enumerate(ids.tolist()):
            for i, k in enumerate(row):
                before = sum(j >= 0 for j in row[:i]) if "token" in name else int(mask[b, : max(k, 0)].sum())
                expected[b, i] *= 0.9**before
        close(ALL[name](discounted_objective=True)(rows.clone())["advantage"], expected)
        assert (free - expected).abs().max() > 1e-2
        with pytest.raises(ValueError, match=r"discounted_objective=True does nothing with gamma=1\.0"):
            ALL[name](discounted_objective=True, gamma=1.0)

    @pytest.mark.parametrize("name", ["turn", "returns", "vtrace"])
    def test_the_kl_is_taken_from_the_reward_turn_by_turn(self, name):
        rows, reward, mask, ids, _ = rows_and_parts()
        plain = rows.clone()
        kl = F.turn_sum(rows["old_log_prob"] - rows["ref_log_prob"], ids, mask.shape[1])
        plain["turn", "reward"] = reward - 0.3 * kl
        out = ALL[name](kl_coeff=0.3)(rows)
        close(out["advantage"], ALL[name]()(plain)["advantage"])
        close(out["value_target"], plain["value_target"])

    def test_the_kl_is_taken_token_by_token_at_token_granularity(self):
        rows, reward, mask, ids, _ = rows_and_parts()
        gap = torch.where(ids >= 0, rows["old_log_prob"] - rows["ref_log_prob"], 0.0)
        bootstrap = torch.where(rows["turn", "truncated"].any(1), rows["bootstrap_value"], 0.0)
        token_reward = F.token_rewards(reward, ids, mask) - 0.3 * gap
        expected, _ = F.turn_gae(token_reward, rows["state_value"], ids >= 0, 0.9, 0.95, bootstrap)
        close(ALL["token"](kl_coeff=0.3)(rows)["advantage"], expected)

    @pytest.mark.parametrize("name", ALL)
    def test_a_share_of_the_kl_is_that_share_of_its_weight(self, name):
        rows, whole, share = rows_and_parts()[0], ALL[name](kl_coeff=0.1), ALL[name](kl_coeff=0.3)
        assert share.kl_fraction == 1.0
        share.kl_fraction = 1 / 3
        close(share(rows.clone())["advantage"], whole(rows.clone())["advantage"])

    @pytest.mark.parametrize("name", ALL)
    def test_the_reference_is_read_only_if_there_is_a_kl(self, name):
        assert "ref_log_prob" in ALL[name](kl_coeff=0.1).in_keys
        assert "ref_log_prob" not in ALL[name]().in_keys

    def test_a_new_estimator_gets_the_kl_of_the_loss(self):
        class Plain(TurnEstimator):
            def __init__(self, *, gamma: float, **shared):
                super().__init__(**shared)
                self.gamma = gamma

            def estimate(self, tensordict):
                reward = torch.where(tensordict["turn", "mask"], tensordict["turn", "reward"], 0.0)
                return {"turn_advantage": reward, "turn_value_target": reward}

        loss = LLMGRPOLoss(
            table_actor(),
            kl_coeff=0.3,
            kl_in="reward",
        )
        estimator = loss.make_value_estimator(Plain, gamma=0.7, clip_advantage=0.4).value_estimator
        assert (estimator.gamma, estimator.clip_advantage, estimator.kl_coeff) == (0.7, 0.4, 0.3)
        rows, reward, mask, ids, _ = rows_and_parts()
        kl = F.turn_sum(rows["old_log_prob"] - rows["ref_log_prob"], ids, mask.shape[1])
        paid = torch.where(mask, reward - 0.3 * kl, 0.0)
        out = estimator(rows)
        close(out["turn", "value_target"], paid)
        close(out["turn", "advantage"], paid.clamp(-0.4, 0.4))
        close(out["advantage"], F.turn_to_token(paid.clamp(-0.4, 0.4), ids))
        # the batch keeps the environment's
        close(out["turn", "reward"].nan_to_num(), reward.nan_to_num())


class TestEveryEstimator:
    @pytest.mark.parametrize("estimator", [make(kl_coeff=0.1) for make in ALL.values()], ids=list(ALL))
    def test_order_and_padding_change_nothing(self, estimator):
        rows, *_ = rows_and_parts(group_size=3)
        expected = estimator(rows.clone())["advantage"]
        order = torch.tensor([3, 0, 5, 1, 4, 2])
        close(estimator(rows[order].clone())["advantage"], expected[order])
        padded = TensorDict(
            {
                k: torch.nn.functional.pad(rows[k], (0, 4), value=fill)
                for k, fill in (("turn_ids", -1), ("state_value", 0))
            },
            [6],
        )
        for key in ("old_log_prob", "ref_log_prob", "sample_log_prob"):
            padded[key] = torch.nn.functional.pad(rows[key], (0, 4), value=7.0)
        padded["turn"] = TensorDict({k: torch.nn.functional.pad(v, (0, 2)) for k, v in rows["turn"].items()}, [6])
        padded.update(rows.select("bootstrap_value", "group_id"))
        close(estimator(padded)["advantage"][:, : expected.shape[1]], expected)

    @pytest.mark.parametrize("estimator", [make() for make in ALL.values()], ids=list(ALL))
    def test_an_episode_is_in_a_batch_once(self, estimator):
        rows, *_ = rows_and_parts(group_size=3)
        rows["episode_id"] = torch.arange(6)
        assert estimator(rows.clone())["advantage"].isfinite().all()
        rows["episode_id"][4] = 1
        with pytest.raises(ValueError, match=r"Episode\(s\) \[1\] are in the batch more than once"):
            estimator(rows)

    @pytest.mark.parametrize(("key", "at"), [("env_id", (4,)), ("tokens", (4, 0))])
    def test_a_group_is_one_task(self, key, at):
        rows, *_ = rows_and_parts(group_size=3)
        rows["env_id"] = torch.zeros(6, dtype=torch.int64)
        assert GroupRelative()(rows.clone())["advantage"].isfinite().all()
        rows[key][at] += 1
        with pytest.raises(ValueError, match=r"Group\(s\) \[1\] hold episodes of different tasks"):
            GroupRelative()(rows)
        ReBN()(rows)  # compares no groups

    def test_value_estimate_does_not_write(self):
        rows, *_ = rows_and_parts()
        before = set(rows.keys(True))
        target = TurnGAE().value_estimate(rows)
        assert set(rows.keys(True)) == before
        close(target, TurnGAE()(rows)["value_target"])

    def test_float32_stays_float32(self):
        rows, *_ = rows_and_parts()
        single = rows.apply(lambda x: x.float() if x.dtype == DOUBLE else x)
        for estimator in (TurnGAE(), ReBN(), GroupRelative()):
            out = estimator(single.clone())
            assert all(out[key].dtype == torch.float32 for key in estimator.out_keys)

    def test_the_critic_is_not_a_submodule(self):
        estimator = TurnGAE(make_critic())
        assert list(estimator.parameters()) == []
        assert isinstance(estimator.value_network.module, Values)


READERS = {
    "TurnGAE": (TurnGAE(), ("reward", "state_value", "bootstrap_value")),
    "tokens": (TurnGAE(granularity="token", whiten=False), ("reward", "state_value", "bootstrap_value")),
    "TurnVTrace": (TurnVTrace(), ("reward", "state_value", "bootstrap_value", "old_log_prob", "sample_log_prob")),
    "ReBN": (ReBN(kl_coeff=0.1), ("reward", "old_log_prob", "ref_log_prob")),
    "no normalization": (ReBN(normalize_over="none"), ("reward",)),
    "GroupRelative": (GroupRelative(kl_coeff=0.1), ("reward", "old_log_prob", "ref_log_prob")),
    "states": (GroupRelative(credit="state", baseline="leave_one_out", scale="none"), ("reward",)),
    "whitened": (GroupRelative(scale="none", whiten=True), ("reward",)),
    "imitation": (ImitationWeights(min_return=0.5), ("reward",)),
    "NoCredit": (NoCredit(), ("reward",)),
}


class TestWhatIsNoNumber:
    """Numbers that are NaN or infinite are refused by name: they pass neither as equal ones nor as
    an advantage."""

    @pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
    @pytest.mark.parametrize("name", READERS)
    def test_an_input_is_named(self, name, wrong):
        estimator, inputs = READERS[name]
        layout = [[(True, 1, 2), (True, 1, 1)]] * 4
        for read in inputs:
            rows = make_rows(layout, 0, group_size=2)
            rows["turn", "truncated"][2, -1], rows["turn", "terminated"][2, -1] = True, False
            rows["turn", "success"] = torch.ones_like(rows["turn", "mask"])
            key = ("turn", "reward") if read == "reward" else read
            at = {"reward": 1, "bootstrap_value": ()}.get(read, int((rows["turn_ids"][2] >= 0).nonzero()[0]))
            estimator(rows.clone())
            rows[key][2][at] = wrong
            with pytest.raises(ValueError, match="NaN or infinite") as raised:
                estimator(rows)
            assert f"{key!r} of row(s) [2] " in str(raised.value)
            assert not {"turn_value", ("turn", "advantage")} & set(rows.keys(True))

    def test_an_estimator_that_makes_it_is_named(self):
        class Logarithmic(TurnEstimator):
            def estimate(self, tensordict):
                reward, mask, *_ = self._turns(tensordict)
                found = torch.where(mask, reward * 0.0, 0.0).log()
                return {"turn_advantage": found, "turn_value_target": torch.zeros_like(found)}

        rows, *_ = rows_and_parts()
        with pytest.raises(ValueError, match=r"Logarithmic: 'advantage' of row\(s\) \[0, 1"):
            Logarithmic()(rows)
