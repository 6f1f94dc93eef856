"""The losses as TorchRL's loss modules: keys, dispatch, value estimators, parameters."""

from __future__ import annotations

import copy
import itertools
from functools import partial

import pytest
import torch
from conversations import LAYOUT, close, make_actor, make_critic, make_rows, table_actor, table_critic
from loss_cases import ALGORITHMS, batch_for
from torchrl.objectives.utils import ValueEstimators
from torchrl.objectives.value import GAE

from torchrl_llm.objectives import (
    GroupRelative,
    ImitationWeights,
    LLMGRPOLoss,
    LLMPPOLoss,
    LLMReinforceLoss,
    NoCredit,
    ReBN,
    TurnGAE,
    TurnLoss,
    TurnVTrace,
    total,
    write_loss_weights,
)
from torchrl_llm.utils.options import ConfigError


def _with_keys(estimator, **names):
    estimator.set_keys(**names)
    return estimator


class TestTorchRL:
    @pytest.mark.parametrize("name", ALGORITHMS)
    def test_keys_and_dispatch(self, name):
        loss = ALGORITHMS[name]()
        rows = batch_for(loss)
        out = loss(rows)
        assert set(out.keys()) == set(loss.out_keys)
        assert out.batch_size == torch.Size([])
        if not loss.corrects_sampler:
            rows["sample_log_prob"] = rows["old_log_prob"]
            values = loss(**{key: rows[key] for key in loss.in_keys})
            assert len(values) == len(loss.out_keys)
            for key, value in zip(loss.out_keys, values, strict=True):
                close(value.detach(), out[key].detach())

    def test_set_keys_moves_loss_and_estimator_alike(self):
        loss = LLMPPOLoss(table_actor(), table_critic())
        rows = make_rows(LAYOUT)
        expected = loss(loss.value_estimator(rows.clone()))
        loss.set_keys(advantage=("x", "advantage"), value_target="target", turn_ids="turns", loss_weight=("w", "loss"))
        assert loss.value_estimator.tensor_keys.advantage == ("x", "advantage")
        moved = rows.exclude("advantage", "value_target").rename_key_("turn_ids", "turns")
        moved = write_loss_weights(loss.value_estimator(moved), loss)
        assert ("w", "loss") in moved.keys(True)
        for key, value in loss(moved).items():
            close(value, expected[key])
        with pytest.raises(ValueError, match="not an accepted tensordict key"):
            loss.set_keys(nonsense="x")

    def test_an_estimator_serves_one_loss(self):
        estimator, critic = TurnGAE(), table_critic()
        loss = LLMPPOLoss(table_actor(), critic, estimator=estimator)
        loss.make_value_estimator(estimator)
        twin = copy.deepcopy(loss)
        twin.make_value_estimator(twin.value_estimator)
        with pytest.raises(ConfigError, match="TurnGAE serves another loss"):
            LLMPPOLoss(table_actor(), table_critic(), estimator=estimator)
        with pytest.raises(ConfigError, match="TurnGAE serves another loss"):
            LLMPPOLoss(table_actor(), critic, estimator=estimator, kl_in="reward", kl_coeff=0.1)

    def test_keys_set_on_an_estimator_are_the_losss_too(self):
        # Without what shows that these groups play different tasks.
        rows = make_rows(LAYOUT, group_size=2).exclude("tokens", "env_id")
        rows["prompt_id"] = rows["group_id"].roll(1)
        make = partial(GroupRelative, scale="none", partial="allow")
        expected = _with_keys(make(), group_id="prompt_id")(rows.clone())["advantage"]
        assert (expected - make()(rows.clone())["advantage"]).abs().max() > 0.1
        estimator = _with_keys(make(), group_id="prompt_id", advantage="credit")
        loss = LLMGRPOLoss(table_actor(), estimator=estimator, kl_coeff=0.0)
        assert loss.tensor_keys.advantage == "credit"
        credited = loss.value_estimator(rows.clone())
        close(credited["credit"], expected)
        loss(credited)
        loss.set_keys(advantage="other")
        assert loss.value_estimator.tensor_keys.advantage == "other"
        with pytest.raises(
            ValueError, match="LLMGRPOLoss has the key 'other' as its advantage, and GroupRelative 'credit'"
        ):
            loss.make_value_estimator(_with_keys(GroupRelative(partial="allow"), advantage="credit"))
        assert loss.value_estimator is estimator

    def test_a_refused_estimator_leaves_loss_and_estimator_as_they_were(self):
        own = ReBN(kl_coeff=0.5)
        with pytest.raises(ConfigError, match="give it to one of them"):
            LLMReinforceLoss(table_actor(), estimator=own)
        assert LLMReinforceLoss(table_actor(), estimator=own, kl_coeff=0.0).value_estimator is own
        loss = LLMPPOLoss(table_actor(), table_critic(), kl_in="reward", kl_coeff=0.1)
        before, refused = loss.value_estimator, TurnVTrace()
        with pytest.raises(ValueError, match="count twice"):
            loss.make_value_estimator(refused)
        assert loss.value_estimator is before
        assert refused.value_network is None
        assert refused.kl_coeff == 0
        plain = LLMPPOLoss(table_actor(), table_critic(), clipping="none", estimator=refused)
        assert plain.value_estimator is refused

    def test_a_loss_made_of_the_base_alone(self):
        class Likely(TurnLoss):
            def terms(self, rows, scored):
                gain = (rows["loss_weight"] * rows["advantage"] * scored["log_prob"]).sum()
                return super().terms(rows, scored) | {"loss_objective": -gain}

        rows = make_rows(LAYOUT)
        with pytest.raises(TypeError, match="Likely has no estimator of its own: give it estimator="):
            Likely(table_actor())
        loss = Likely(table_actor(), estimator=ReBN())
        close(loss(loss.value_estimator(rows.clone()))["weight"], torch.tensor(1.0).to(rows["theta"]))

    def test_options_of_estimators_are_told_from_unknown_ones(self):
        with pytest.raises(
            TypeError, match=r"lmbda=0.5 is of the estimator: give LLMPPOLoss estimator=TurnGAE\(lmbda=0.5\)"
        ):
            LLMPPOLoss(table_actor(), table_critic(), lmbda=0.5)
        with pytest.raises(TypeError, match=r"no option 'lmbda', nor has its estimator, ReBN; TurnGAE.* have it"):
            LLMPPOLoss(table_actor(), table_critic(), estimator=ReBN(), lmbda=0.5)
        with pytest.raises(TypeError, match=r"no option 'granularity', nor has its estimator, GroupRelative; .*ReBN"):
            LLMGRPOLoss(table_actor(), granularity="token")
        with pytest.raises(TypeError, match=r"no option 'clip_epsilom'\. Did you mean 'clip_epsilon'"):
            LLMGRPOLoss(table_actor(), clip_epsilom=0.1)

    @pytest.mark.parametrize("kind", ["k2", "k3"])
    def test_a_share_of_the_kl_is_that_share_of_its_weight(self, kind):
        rows = make_rows(LAYOUT)
        whole, share = (LLMGRPOLoss(table_actor(), kl_coeff=kl_coeff, kl_kind=kind) for kl_coeff in (0.1, 0.4))
        assert share.kl_fraction == 1.0
        share.kl_fraction = 0.25
        for key, value in share(rows).items():
            close(value, whole(rows)[key])

    def test_the_share_of_the_kl_is_the_estimators_too(self):
        rows, loss = make_rows(LAYOUT), LLMReinforceLoss(table_actor(), kl_coeff=0.4)
        for share in (0.25, 0.0):
            loss.kl_fraction = share
            expected = ReBN(kl_coeff=0.4 * share)(rows.clone())["advantage"]
            close(loss.value_estimator(rows.clone())["advantage"], expected)
            close(loss.make_value_estimator().value_estimator(rows.clone())["advantage"], expected)

    def test_an_estimator_that_would_lose_the_kl_is_refused(self):
        loss = LLMReinforceLoss(table_actor(), kl_coeff=0.1)
        with pytest.raises(ValueError, match="the KL would be lost"):
            loss.make_value_estimator(GAE(gamma=0.9, lmbda=0.9, value_network=table_critic()))
        with pytest.raises(ValueError, match=r"ReBN has kl_coeff=0.2, and the loss leaves its KL .* kl_coeff=0.1"):
            loss.make_value_estimator(ReBN(kl_coeff=0.2))
        assert loss.make_value_estimator(ReBN()).value_estimator.kl_coeff == 0.1
        assert loss.make_value_estimator(GroupRelative).value_estimator.kl_coeff == 0.1
        LLMReinforceLoss(table_actor(), kl_coeff=0.0).make_value_estimator(ReBN())

    def test_weights_of_imitation_have_no_place_for_a_kl(self):
        with pytest.raises(ValueError, match="ImitationWeights takes none out of it: the KL would be lost"):
            LLMReinforceLoss(table_actor(), kl_coeff=0.1).make_value_estimator(ImitationWeights)
        with pytest.raises(TypeError, match="no option 'kl_coeff'"):
            ImitationWeights(kl_coeff=0.1)
        LLMReinforceLoss(table_actor(), kl_coeff=0.1, kl_in="loss").make_value_estimator(ImitationWeights)

    @pytest.mark.parametrize("name", ["ppo", "reinforce", "grpo"])
    def test_no_credit_needs_another_term(self, name):
        make = {
            "ppo": lambda **o: LLMPPOLoss(table_actor(), table_critic(), **o),
            "reinforce": lambda **o: LLMReinforceLoss(table_actor(), **o),
            "grpo": lambda **o: LLMGRPOLoss(table_actor(), **o),
        }[name]
        with pytest.raises(
            ValueError, match=r"NoCredit gives no credit for rewards, and LLM.* nothing would be learned"
        ):
            make(kl_coeff=0.0).make_value_estimator(NoCredit)
        for options in (
            {"kl_coeff": 0.1},
            {"kl_coeff": 0.1, "kl_in": "reward"},
            {"kl_coeff": 0.0, "entropy_coeff": 0.1},
        ):
            make(**options).make_value_estimator(NoCredit)

    def test_a_subclass_of_no_credit_may_give_some(self):
        class Own(NoCredit):
            def estimate(self, tensordict):
                return super().estimate(tensordict) | {"turn_advantage": tensordict["turn", "reward"]}

        assert isinstance(LLMReinforceLoss(table_actor(), kl_coeff=0.0).make_value_estimator(Own).value_estimator, Own)

    def test_a_loss_of_your_own_may_have_a_term_of_its_own(self):
        class Further(LLMReinforceLoss):
            def forward(self, tensordict):
                return super().forward(tensordict).set("loss_further", tensordict["theta"].sum())

        Further(table_actor(), kl_coeff=0.0).make_value_estimator(NoCredit)

    @pytest.mark.parametrize("kl_in", ["loss", "reward"])
    @pytest.mark.parametrize("loss", [LLMReinforceLoss, LLMGRPOLoss])
    def test_a_teacher_moves_the_actor_wherever_its_kl_is(self, loss, kl_in):
        rows = make_rows(LAYOUT, group_size=2)
        theta = rows["theta"].clone().requires_grad_()
        policy_loss = loss(table_actor(), kl_coeff=0.1, kl_in=kl_in).make_value_estimator(NoCredit)
        policy_loss.value_estimator(rows)
        total(policy_loss(rows.set("theta", theta))).backward()
        assert theta.grad.abs().max() > 1e-4

    def test_an_estimator_that_corrects_for_the_sampler_does_so_alone(self):
        corrected = {"clipping": "none", "sampler_correction": "truncate", "sampler_bounds": 2.0}
        for options in ({}, {"clipping": "cispo"}, corrected):
            with pytest.raises(ValueError, match="count twice"):
                LLMPPOLoss(table_actor(), table_critic(), **options).make_value_estimator(TurnVTrace)

    def test_make_value_estimator(self):
        loss = LLMPPOLoss(table_actor(), table_critic(), estimator=TurnGAE(lmbda=0.7))
        assert loss.value_estimator.lmbda == 0.7
        assert loss.make_value_estimator(TurnGAE, gamma=0.5) is loss
        assert (loss.value_estimator.gamma, loss.value_estimator.lmbda) == (0.5, 0.95)
        assert loss.value_estimator.value_network is loss.critic_network
        loss.make_value_estimator(ValueEstimators.GAE, lmbda=0.1)
        assert isinstance(loss.value_estimator, TurnGAE)
        assert loss.value_estimator.lmbda == 0.1
        own = ReBN(gamma=0.3)
        assert loss.make_value_estimator(own).value_estimator is own
        loss.make_value_estimator(GroupRelative, partial="allow")
        assert loss.value_estimator.options["partial"] == "allow"
        loss.make_value_estimator(GAE, gamma=0.9, lmbda=0.9, value_network=None)
        assert isinstance(loss.value_estimator, GAE)
        with pytest.raises(NotImplementedError, match="TD0"):
            loss.make_value_estimator(ValueEstimators.TD0)
        with pytest.raises(ValueError, match="takes no hyperparameters"):
            loss.make_value_estimator(own, gamma=0.2)

    def test_the_granularity_of_a_new_estimator_reaches_the_critic_term(self):
        rows = make_rows(LAYOUT)
        loss = LLMPPOLoss(table_actor(), table_critic())
        turn = loss(loss.value_estimator(rows.clone()))["loss_critic"]
        loss.make_value_estimator(TurnGAE, granularity="token", gamma=0.99)
        token = loss(loss.value_estimator(rows.clone()))["loss_critic"]
        same = LLMPPOLoss(table_actor(), table_critic(), estimator=TurnGAE(granularity="token", gamma=0.99))
        close(token, same(same.value_estimator(rows.clone()))["loss_critic"])
        assert (turn - token).abs() > 1e-4

    def test_plain_submodules(self):
        actor, critic = make_actor(), make_critic()
        loss = LLMPPOLoss(actor, critic)
        assert not loss.functional
        assert {id(p) for p in loss.parameters()} == {id(p) for m in (actor, critic) for p in m.parameters()}
        assert all(name.startswith(("actor_network.", "critic_network.")) for name in loss.state_dict())
        clone = copy.deepcopy(loss)
        clone.load_state_dict(loss.state_dict())

    @pytest.mark.parametrize("name", ["ppo", "reinforce", "grpo", "sft"])
    def test_a_step_down_the_loss_lowers_it(self, name):
        loss = ALGORITHMS[name]()
        rows = batch_for(loss)
        optimizer = torch.optim.SGD(loss.parameters(), lr=1e-5)
        before = total(loss(rows))
        before.backward()
        optimizer.step()
        assert total(loss(rows)) < before

    def test_an_estimator_without_a_critic_key_still_feeds_every_loss(self):
        for estimator, make in itertools.product((TurnGAE, ReBN, GroupRelative), (LLMReinforceLoss, LLMGRPOLoss)):
            loss = make(table_actor(), kl_coeff=0.0).make_value_estimator(estimator)
            rows = loss.value_estimator(make_rows(LAYOUT, group_size=3))
            assert loss(rows)["loss_objective"].isfinite()
