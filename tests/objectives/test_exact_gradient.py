"""The exact-gradient proof: what the losses climb on average, against the true policy gradient, to
1e-6.

The game is small enough to sum over every conversation and every batch
(:class:`~torchrl_llm.testing.enumerable.EnumerableMDP`); the language model, its scorer, the
critic, the estimators and the losses are the real ones. ``TestHolds`` is what is unbiased;
``BIASES`` (``biases.py``) is what is not, and by how much.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from biases import BIASES, kl_term
from exact_games import (
    CLIMB,
    CUT,
    KL,
    ONE,
    PAIR,
    PLAIN,
    STUDY,
    WALK,
    WHOLE,
    continued,
    graded,
    gradient_of_one,
    gradient_of_trees,
    noise,
    prefix_parity,
)
from instances import usual
from published_objectives import DPPO, GMPO, IPO, SAPO
from tensordict import TensorDict
from torch import Tensor

from torchrl_llm import functional as F
from torchrl_llm import keys
from torchrl_llm.modules import TokenScorer
from torchrl_llm.objectives import LLMPPOLoss, LLMReinforceLoss, ReBN, TurnGAE, TurnPolicyLoss, TurnVTrace
from torchrl_llm.testing.enumerable import (
    EnumerableMDP,
    batch_gradient,
    cosine,
    flat_gradient,
    make_dyadic,
    relative_error,
    tiny_lm,
)

EXACT = 1e-6
ROW = r"^\| (.+?) \| (-?\d\.\d{3}) \| (\d\.\d{3}) \| \d\.\d{3} \| .*/.* \|$"
"""A line of the table."""


def check(actual: Tensor, expected: Tensor) -> None:
    assert expected.norm() > 1e-3  # there is something to agree on
    assert relative_error(actual, expected) <= EXACT


def tree_rows() -> TensorDict:
    """With the values of a critic that knows nothing, and a potential."""
    rows = STUDY.rows(CLIMB, exact=False)
    rows[keys.turn_extra("phi")] = 3.0 * prefix_parity(rows).double()
    rows[keys.turn_extra("parity")] = prefix_parity(rows)
    return rows


class TestHolds:
    """Unbiased: the expected gradient is the true one."""

    @pytest.mark.parametrize("mdp", [CUT, WHOLE], ids=["cut", "whole"])
    @pytest.mark.parametrize("clipping", ["ppo", "cispo", "none"])
    def test_reinforce_without_normalization(self, mdp, clipping):
        check(mdp.expected_gradient(STUDY.reinforce(clipping=clipping)), STUDY.truth(mdp))

    @pytest.mark.parametrize("mdp", [CUT, WHOLE], ids=["cut", "whole"])
    def test_reinforce_per_token(self, mdp):
        check(mdp.expected_gradient(STUDY.reinforce(granularity="token")), STUDY.truth(mdp))

    def test_the_size_of_the_batch_does_not_matter(self):
        check(CUT.expected_gradient(STUDY.reinforce(), 2), STUDY.truth(CUT))

    @pytest.mark.parametrize("credit", ["episode", "turn"])
    @pytest.mark.parametrize(("mdp", "size"), [(CUT, 2), (WHOLE, 2), (ONE, 3)], ids=["cut-2", "whole-2", "one task-3"])
    def test_leave_one_out(self, mdp, size, credit):
        check(mdp.expected_gradient(STUDY.grpo(credit=credit), size, same_task=True), STUDY.truth(mdp))

    @pytest.mark.parametrize("fallback", ["turn", "return"])
    @pytest.mark.parametrize("state", ["prefix", "observation", "parity"])
    @pytest.mark.parametrize(
        ("mdp", "size"), [(CUT, 2), (WALK, 3), (WALK.uncut, 2)], ids=["cut-2", "walk-3", "longer walk-2"]
    )
    def test_states_of_other_episodes(self, mdp, size, state, fallback):
        """Whatever a state is: the parity of the tokens before a turn throws together what has
        nothing in common."""
        rows = mdp.rows(STUDY.actor)
        rows[keys.turn_extra("parity")] = prefix_parity(rows)
        policy_loss = STUDY.grpo(credit="state", state=state, fallback=fallback)
        check(mdp.expected_gradient(policy_loss, size, same_task=True, rows=rows), STUDY.truth(mdp))

    @pytest.mark.parametrize("credit", ["episode", "turn"])
    @pytest.mark.parametrize(("mdp", "size"), [(CUT, 2), (ONE, 3)], ids=["cut-2", "one task-3"])
    def test_the_group_mean_up_to_a_factor(self, mdp, size, credit):
        gradient = mdp.expected_gradient(STUDY.grpo(baseline="mean", credit=credit), size, same_task=True)
        check(gradient, (1 - 1 / size) * STUDY.truth(mdp))

    @pytest.mark.parametrize("size", [2, 3])
    def test_the_mean_as_scale_is_maximum_likelihood(self, size):
        """MaxRL: on outcomes of 0 and 1 the gradient of the tasks' mean of pass@1 + ... +
        pass@(size - 1) / (size - 1)."""
        chance = PAIR.log_probability(STUDY.actor).exp() * PAIR.returns()
        rate = PAIR.tasks * chance.view(PAIR.tasks, -1).sum(1)
        objective = sum((1 - (1 - rate) ** k) / k for k in range(1, size)).mean()
        policy_loss = STUDY.grpo(baseline="mean", scale="mean")
        check(PAIR.expected_gradient(policy_loss, size, same_task=True), flat_gradient(objective, STUDY.actor))

    @pytest.mark.parametrize("credit", ["episode", "turn", "state"])
    def test_components(self, credit):
        """The rewards and half the grades, each compared with the other episodes."""
        rows = graded(CUT, STUDY.actor)
        policy_loss = STUDY.grpo(credit=credit, components={"grade": 0.5})
        worth = CUT.returns() + 0.5 * rows[keys.turn_extra("grade")].sum(1)
        truth = CUT.policy_gradient(STUDY.actor, worth)
        check(CUT.expected_gradient(policy_loss, 2, same_task=True, rows=rows), truth)
        assert relative_error(STUDY.truth(CUT), truth) > 0.1

    @pytest.mark.parametrize(
        "name", ["reinforce", "reinforce, gamma 0.5", "reinforce per token", "grpo per turn", "grpo per state"]
    )
    def test_shaping_changes_nothing_on_average(self, name):
        """Whatever the potential is, it only looks at what came before the turn."""
        rows = CUT.rows(STUDY.actor)
        rows[keys.turn_extra("phi")] = 3.0 * prefix_parity(rows).double()
        shaped = {"potential": "phi"}
        policy_loss, size, gamma = {
            "reinforce": (STUDY.reinforce(**shaped), 1, 1.0),
            "reinforce, gamma 0.5": (STUDY.reinforce(gamma=0.5, discounted_objective=True, **shaped), 1, 0.5),
            "reinforce per token": (STUDY.reinforce(granularity="token", **shaped), 1, 1.0),
            "grpo per turn": (STUDY.grpo(credit="turn", **shaped), 2, 1.0),
            "grpo per state": (STUDY.grpo(credit="state", **shaped), 2, 1.0),
        }[name]
        check(CUT.expected_gradient(policy_loss, size, same_task=size > 1, rows=rows), STUDY.truth(CUT, gamma))

    @pytest.mark.parametrize("granularity", ["turn", "token"])
    def test_ppo_with_any_value(self, granularity):
        """At lambda = 1 the value is a baseline, and no baseline that looks at the state alone
        biases anything."""
        check(WHOLE.expected_gradient(STUDY.ppo(granularity=granularity)), STUDY.truth(WHOLE))

    def test_vtrace_on_the_policys_own_data(self):
        policy_loss = STUDY.ppo(clipping="none").make_value_estimator(TurnVTrace, gamma=1.0)
        rows = STUDY.rows(WHOLE, exact=False)
        rows[keys.OLD_LOG_PROB] = rows[keys.SAMPLE_LOG_PROB]
        check(WHOLE.expected_gradient(policy_loss, rows=rows), STUDY.truth(WHOLE))

    @pytest.mark.parametrize(("count", "lmbda"), [(1, 0.0), (1, 0.5), (1, 1.0), (2, 0.0), (None, 0.0)])
    def test_continuations(self, count, lmbda):
        game = continued(CUT if count == 1 else ONE, STUDY.actor, count)
        check(gradient_of_one(game, STUDY.vine(lmbda=lmbda)), STUDY.truth(CUT if count == 1 else ONE))

    @pytest.mark.parametrize("turn", usual([1, 0]))
    def test_continuations_of_one_turns_state(self, turn):
        """The others are compared with the other episode of the batch, whose group is the whole
        game here."""
        game = continued(ONE, STUDY.actor, 1, lambda k, _: k == turn)
        check(game.expected_gradient(STUDY.vine(), 2), STUDY.truth(ONE))

    @pytest.mark.parametrize("turns", [(1, 1), (1, 2)])
    @pytest.mark.parametrize(
        "name", ["state", "state, coarse", "turn", "episode", "turn, potential", "reinforce", "ppo"]
    )
    def test_trees(self, name, turns):
        """Groups of two trees of two episodes, over all that they can be, short ones included."""
        gradient, factor = gradient_of_trees(CLIMB, self.of_trees(name), tree_rows(), turns)
        check(factor * gradient, STUDY.truth(CLIMB))

    def of_trees(self, name: str) -> TurnPolicyLoss:
        if name == "ppo":
            return STUDY.ppo()
        if name == "reinforce":
            return STUDY.reinforce()
        credit, _, more = name.partition(", ")
        # The parity throws turns of one row together, some before its tree branches and some
        # behind.
        options = {"potential": {"potential": "phi"}, "coarse": {"state": "parity"}}.get(more, {})
        return STUDY.grpo(credit=credit, **options)

    @pytest.mark.parametrize(
        ("name", "forgotten"),
        [
            ("state", (keys.TURN_UNIT,)),
            ("turn", (keys.TURN_UNIT,)),
            ("episode", (keys.TURN_UNIT,)),
            ("reinforce", (keys.ROW_WEIGHT,)),
        ],
    )
    def test_trees_that_are_taken_for_single_episodes(self, name, forgotten):
        gradient, _ = gradient_of_trees(CLIMB, self.of_trees(name), tree_rows(), (1, 2), *forgotten)
        truth = STUDY.truth(CLIMB)
        along = gradient @ truth / truth.square().sum()
        assert relative_error(gradient / along, truth) > 0.005  # whatever the scale

    def test_the_noise_of_continuations(self):
        """It falls with their number, to the noise of the exact value: values that are not read, or
        in the wrong place, do not."""
        games = [continued(ONE, STUDY.actor, count) for count in (1, 2, None)]
        once, twice, exact = (noise(game, STUDY.vine(), game.rows()) for game in games)
        assert once - exact > 0.1
        assert twice - exact == pytest.approx((once - exact) / 2, rel=1e-6)
        assert exact < noise(ONE, STUDY.reinforce(), ONE.rows())
        # As a baseline alone: the episode's own return is one sample of what follows.
        assert noise(games[2], STUDY.vine(lmbda=1.0), games[2].rows()) > exact

    @pytest.mark.parametrize("granularity", ["turn", "token"])
    @pytest.mark.parametrize("lmbda", [0.0, 0.5, 0.95])
    def test_ppo_with_the_exact_value(self, lmbda, granularity):
        rows, policy_loss = STUDY.rows(WHOLE), STUDY.ppo(lmbda=lmbda, granularity=granularity)
        check(WHOLE.expected_gradient(policy_loss, rows=rows), STUDY.truth(WHOLE))
        # Any other value is biased below lambda = 1: the check can fail.
        assert relative_error(WHOLE.expected_gradient(policy_loss), STUDY.truth(WHOLE)) > 0.01

    @pytest.mark.parametrize("granularity", ["turn", "token"])
    @pytest.mark.parametrize("lmbda", [0.0, 0.5, 1.0])
    def test_truncation_with_the_exact_bootstrap(self, lmbda, granularity):
        """The truth is the gradient of the whole game, played by a frozen policy after the cut."""
        frozen = STUDY.truth(WHOLE, frozen_from=CUT.max_turns)
        policy_loss = STUDY.ppo(lmbda=lmbda, granularity=granularity)
        check(CUT.expected_gradient(policy_loss, rows=STUDY.rows(CUT)), frozen)
        # the rest of the game is worth something
        assert relative_error(STUDY.truth(CUT), frozen) > 0.1

    @pytest.mark.parametrize("granularity", ["turn", "token"])
    def test_truncation_with_any_bootstrap(self, granularity):
        """It counts as a final reward, held constant."""
        rows = STUDY.rows(CUT, exact=False)
        expected = CUT.policy_gradient(STUDY.actor, CUT.returns(bootstrap=rows[keys.BOOTSTRAP_VALUE]))
        check(CUT.expected_gradient(STUDY.ppo(granularity=granularity)), expected)
        assert relative_error(STUDY.truth(CUT), expected) > 0.1

    @pytest.mark.parametrize("gamma", [0.9, 0.5])
    def test_discount_with_any_value_and_bootstrap(self, gamma):
        rows = STUDY.rows(CUT, exact=False)
        expected = CUT.policy_gradient(STUDY.actor, CUT.returns(gamma, rows[keys.BOOTSTRAP_VALUE]))
        check(CUT.expected_gradient(STUDY.ppo(gamma=gamma, discounted_objective=True)), expected)

    @pytest.mark.parametrize("gamma", [0.9, 0.5])
    @pytest.mark.parametrize("lmbda", [0.0, 0.5, 1.0])
    def test_discount_with_the_exact_value(self, gamma, lmbda):
        policy_loss, rows = STUDY.ppo(gamma=gamma, lmbda=lmbda, discounted_objective=True), STUDY.rows(WHOLE, gamma)
        check(WHOLE.expected_gradient(policy_loss, rows=rows), STUDY.truth(WHOLE, gamma))

    @pytest.mark.parametrize("gamma", [0.9, 0.5])
    def test_discount_without_a_critic(self, gamma):
        check(
            WHOLE.expected_gradient(STUDY.reinforce(gamma=gamma, discounted_objective=True)), STUDY.truth(WHOLE, gamma)
        )
        check(CUT.expected_gradient(STUDY.grpo(gamma=gamma), 2, same_task=True), STUDY.truth(CUT, gamma))
        per_turn = STUDY.grpo(gamma=gamma, credit="turn", discounted_objective=True)
        check(CUT.expected_gradient(per_turn, 2, same_task=True), STUDY.truth(CUT, gamma))

    @pytest.mark.parametrize(
        "name", ["reinforce", "reinforce per token", "grpo", "grpo per turn", "ppo", "ppo per token"]
    )
    def test_kl_in_the_reward(self, name):
        """The objective is the return minus the KL of the whole conversation."""
        kl = {"kl_coeff": KL, "kl_in": "reward"}
        policy_loss, size, mdp = {
            "reinforce": (lambda: STUDY.reinforce(**kl), 1, WHOLE),
            "reinforce per token": (lambda: STUDY.reinforce(granularity="token", **kl), 1, WHOLE),
            "grpo": (lambda: STUDY.grpo(**kl), 2, CUT),
            "grpo per turn": (lambda: STUDY.grpo(credit="turn", **kl), 2, CUT),
            "ppo": (lambda: STUDY.ppo(**kl), 1, WHOLE),
            "ppo per token": (lambda: STUDY.ppo(granularity="token", **kl), 1, WHOLE),
        }[name]
        rows = STUDY.rows(mdp, exact=False)
        gradient = mdp.expected_gradient(policy_loss(), size, same_task=size > 1, rows=rows)
        check(gradient, STUDY.truth(mdp) - KL * STUDY.kl_gradient(mdp))
        assert relative_error(gradient, STUDY.truth(mdp)) > 0.05

    @pytest.mark.parametrize("kind", [SAPO, DPPO, IPO, GMPO])
    def test_published_objectives(self, kind):
        check(CUT.expected_gradient(STUDY.reinforce(kind)), STUDY.truth(CUT))

    @pytest.mark.parametrize("reduction", ["sum", "mean"])
    def test_pooled_ratios(self, reduction):
        """At ratio 1 a unit's gradient is the sum of its tokens', if they share the advantage."""
        options = {"ratio_reduction": reduction}
        by_turn = STUDY.ppo(ratio_level="turn", **options)
        check(WHOLE.expected_gradient(by_turn), STUDY.truth(WHOLE))
        by_sequence = STUDY.grpo(ratio_level="sequence", **options)
        check(CUT.expected_gradient(by_sequence, 2, same_task=True), STUDY.truth(CUT))

    @pytest.mark.parametrize("mdp", [CUT, WHOLE], ids=["cut", "whole"])
    def test_entropy_bonus(self, mdp):
        """The gradient of the entropy at visited states, the visits held fixed."""
        bonus = mdp.expected_gradient(STUDY.reinforce(entropy_coeff=1.0)) - mdp.expected_gradient(STUDY.reinforce())
        check(bonus, STUDY.at_visited_states(mdp, lambda policy, _: -(policy.exp() * policy).sum(-1)))


class TestPopulation:
    """Statistics over a batch that is the policy itself: the limit of large batches is unbiased up
    to a factor."""

    @pytest.fixture(scope="class")
    def dyadic(self):
        return TokenScorer(make_dyadic(tiny_lm(3)))

    @staticmethod
    def spread(mdp: EnumerableMDP, actor: TokenScorer, figure: Tensor) -> Tensor:
        """Standard deviation of ``figure [n, T]`` over the turns that the policy plays, silent ones
        left out."""
        rows = mdp.rows()
        spoken = torch.stack([(rows[keys.TURN_IDS] == k).any(1) for k in range(figure.shape[1])], 1)
        weight = mdp.log_probability(actor).exp().detach().unsqueeze(1) * spoken
        mean = (weight * figure).sum() / weight.sum()
        return ((weight * (figure - mean).square()).sum() / weight.sum()).sqrt()

    @staticmethod
    def to_go(mdp: EnumerableMDP) -> Tensor:
        return mdp.rows()[keys.TURN_REWARD].flip(1).cumsum(1).flip(1)

    @pytest.mark.parametrize("mdp", [CUT, WHOLE], ids=["cut", "whole"])
    def test_rebn(self, dyadic, mdp):
        policy_loss = LLMReinforceLoss(dyadic, kl_coeff=0.0, **PLAIN, estimator=ReBN(gamma=1.0))
        policy_loss.value_estimator.ddof = 0
        gradient = batch_gradient(policy_loss, mdp.population(dyadic, 512))
        expected = mdp.policy_gradient(dyadic) / self.spread(mdp, dyadic, self.to_go(mdp))
        check(gradient, expected)
        assert cosine(gradient, expected) >= 1 - 1e-9

    def test_whitening(self, dyadic):
        policy_loss = LLMPPOLoss(dyadic, STUDY.critic, kl_coeff=0.0, **PLAIN, estimator=TurnGAE(gamma=1.0, lmbda=1.0))
        rows = STUDY.critic(WHOLE.rows())
        value = F.turn_first(rows[keys.STATE_VALUE].detach(), rows[keys.TURN_IDS], 3)
        gradient = batch_gradient(policy_loss, WHOLE.population(dyadic, 512))
        turns = F.turn_lengths(WHOLE.population(dyadic, 512)[keys.TURN_IDS], 3).gt(0).sum()
        # ddof is 1
        spread = self.spread(WHOLE, dyadic, self.to_go(WHOLE) - value) * (turns / (turns - 1)).sqrt()
        check(gradient, WHOLE.policy_gradient(dyadic) / spread)
        assert cosine(gradient, WHOLE.policy_gradient(dyadic)) >= 1 - 1e-9


class TestMustNotHold:
    """Biased: by a measured amount, so that nobody takes it for exact."""

    @pytest.mark.parametrize(
        "name", [name if i == 0 else pytest.param(name, marks=pytest.mark.extra) for i, name in enumerate(BIASES)]
    )
    def test_measured_bias(self, name):
        bias = BIASES[name]
        gradient, expected = bias.measure(STUDY)
        assert relative_error(gradient, expected) > 0.01
        assert cosine(gradient, expected) == pytest.approx(bias.cosine, abs=1e-4)
        assert float(gradient.norm() / expected.norm()) == pytest.approx(bias.size, abs=1e-4)

    def test_the_documentation_shows_these_figures(self):
        page = (Path(__file__).parents[2] / "docs" / "credit.md").read_text()
        shown = {name: tuple(map(float, figures)) for name, *figures in re.findall(ROW, page, re.MULTILINE)}
        assert shown.keys() == BIASES.keys()
        for name, bias in BIASES.items():
            assert shown[name] == pytest.approx((bias.cosine, bias.size), abs=6e-4), name

    @pytest.mark.extra
    def test_states_valued_for_what_follows_them(self):
        """The last state of each episode alone: whether a turn has a baseline then depends on its
        own action."""
        game = continued(ONE.uncut, STUDY.actor, 1, lambda k, turns: k == turns - 1)
        error = relative_error(game.expected_gradient(STUDY.vine(), 2), STUDY.truth(ONE.uncut))
        assert error == pytest.approx(0.0535, abs=1e-3)

    def test_k2_in_the_loss_is_the_reverse_kl_of_tokens(self):
        """KL(policy || reference) at visited states; that more of them may be visited, it does not
        see."""
        gradient, _ = kl_term("k2")(STUDY)
        check(gradient, STUDY.at_visited_states(WHOLE, lambda p, q: (p.exp() * (p - q)).sum(-1)))

    def test_k3_in_the_loss_is_the_forward_kl_of_tokens(self):
        """KL(reference || policy) at visited states."""
        gradient, _ = kl_term("k3")(STUDY)
        check(gradient, STUDY.at_visited_states(WHOLE, lambda p, q: (q.exp() * (q - p)).sum(-1)))

    def test_k1_in_the_loss_is_nothing_and_refused(self):
        rows = STUDY.rows(WHOLE)
        estimate = F.kl_estimate(STUDY.actor(rows.clone())[keys.LOG_PROB], rows[keys.REF_LOG_PROB], "k1")
        chance = WHOLE.log_probability(STUDY.actor).exp().detach().unsqueeze(1)
        assert abs((chance * estimate).sum()) > 0.1  # its value is the KL ...
        # ... and its gradient is zero
        assert flat_gradient((chance * estimate).sum(), STUDY.actor).norm() < 1e-12
        with pytest.raises(ValueError, match="no gradient in expectation"):
            STUDY.reinforce(kl_coeff=KL, kl_in="loss", kl_kind="k1")
