"""RoleRelative: unbiased where two roles learn from each other, to 1e-6, and free of what a role
earns by the rules."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from torchrl_llm import keys
from torchrl_llm.modules import TokenScorer
from torchrl_llm.objectives import LLMReinforceLoss, ReBN, RoleRelative, total, write_loss_weights
from torchrl_llm.testing.enumerable import EnumerableMDP, Step, flat_gradient, relative_error, tiny_lm

ROLE = keys.turn_extra("role")


def rows_of(rewards, roles, env_id=None):
    """Rows of as many turns as each has rewards, one action token a turn."""
    width = max(map(len, rewards))
    mask = torch.tensor([[turn < len(each) for turn in range(width)] for each in rewards])
    last = torch.tensor([[turn == len(each) - 1 for turn in range(width)] for each in rewards])
    padded = torch.tensor([[*each, *[0.0] * (width - len(each))] for each in rewards], dtype=torch.float64)
    turn = {"reward": padded, "mask": mask, "terminated": last, "truncated": torch.zeros_like(last)}
    turn["extra"] = {"role": torch.tensor(roles).unsqueeze(1).expand(-1, width).clone()}
    turn_ids = torch.where(mask, torch.arange(width), -1)
    rows = TensorDict({"turn": turn, "turn_ids": turn_ids}, [len(rewards)])
    return rows if env_id is None else rows.set(keys.ENV_ID, torch.tensor(env_id))


def choose(task, said):
    """One letter, after a prompt that tells the role."""
    return Step(0.0, (), None) if said else Step(0.0, (task,), 1)


PAYOFF = torch.tensor([[0.5, -1.0, 2.0], [1.5, 0.0, -0.5], [-2.0, 1.0, 3.0]], dtype=torch.float64)
"""What the first player gets by both letters; the second gets as much less than 1, so that the
roles do not earn alike."""


class TestExact:
    """A game of two players that move at once: every batch of games is summed over."""

    mdp = EnumerableMDP(choose, tasks=2)
    actor = TokenScorer(tiny_lm(3))

    def games(self, size):
        """All batches of ``size`` games, ``[M, 2 * size]`` into the rows of the MDP, and their
        log-probabilities ``[M]``."""
        rows = self.mdp.rows(self.actor)
        rows_of_role = [(rows[keys.GROUP_ID] == role).nonzero().flatten().tolist() for role in (0, 1)]
        index = torch.tensor([*product(*(rows_of_role * size))])
        log_prob = self.actor(rows.clone())[keys.LOG_PROB].where(rows[keys.TURN_IDS] >= 0, 0.0).double().sum(1)
        return rows, index, log_prob

    def batch(self, rows, index):
        """One batch of games, with the rewards of the game."""
        batch = rows.exclude(keys.EPISODE_ID)[index]
        letters = batch[keys.TOKENS].where(batch[keys.TURN_IDS] >= 0, 0).sum(1).view(-1, 2)
        first = PAYOFF[letters[:, 0] % 3, letters[:, 1] % 3]
        batch[keys.TURN_REWARD] = torch.stack([first, 1 - first], 1).view(-1, 1)
        batch[ROLE] = batch[keys.GROUP_ID].unsqueeze(1) + 7
        return batch

    def truth(self):
        """The sum over seats of the gradient of what the seat earns, the other's policy held
        fixed."""
        rows, index, log_prob = self.games(1)
        gradient = 0.0
        for chosen in index:
            batch, chance = self.batch(rows, chosen), log_prob[chosen].sum().exp().detach()
            gradient = gradient + chance * (log_prob[chosen] * batch[keys.TURN_REWARD][:, 0]).sum()
        return flat_gradient(gradient, self.actor)

    @pytest.mark.parametrize(("size", "credit"), [(1, "episode"), (2, "episode"), (2, "turn")])
    def test_the_expected_gradient_is_that_of_self_play(self, size, credit):
        loss = LLMReinforceLoss(
            self.actor, kl_coeff=0.0, weighting="constant", weight_constant=1.0, estimator=ReBN(gamma=1.0)
        )
        loss.make_value_estimator(RoleRelative, credit=credit)
        rows, index, log_prob = self.games(size)
        batches = [write_loss_weights(loss.value_estimator(self.batch(rows, chosen)), loss) for chosen in index]
        everything = TensorDict.cat(batches)
        chance = log_prob[index].sum(1).exp().detach().repeat_interleave(2 * size).unsqueeze(1)
        everything[keys.LOSS_WEIGHT] = everything[keys.LOSS_WEIGHT].double() * chance
        # A constant weight divides by the rows; the truth is of one game.
        gradient = -2 * flat_gradient(total(loss(everything)), self.actor)
        expected = self.truth()
        assert expected.norm() > 1e-2
        assert relative_error(gradient, expected) <= 1e-6


class TestLaws:
    # In hundredths: returns that differ by less than a millionth count as equal, and have no
    # advantage.
    returns = st.lists(st.integers(-300, 300).map(lambda n: n / 100), min_size=1, max_size=3)

    @given(games=st.lists(st.tuples(returns, returns), min_size=2, max_size=5), shift=st.floats(-5, 5))
    @settings(max_examples=30)
    def test_what_a_role_earns_by_the_rules_is_taken_out(self, games, shift):
        """A constant for one role changes nothing, though it doubles or cancels all that a mean
        over both sees."""
        roles = [4, 9] * len(games)
        rewards = [each for game in games for each in game]
        handicap = [[*each[:-1], each[-1] + shift * (i % 2)] for i, each in enumerate(rewards)]
        plain, shifted = (RoleRelative()(rows_of(each, roles))[keys.TURN_ADVANTAGE] for each in (rewards, handicap))
        torch.testing.assert_close(plain, shifted)

    @given(games=st.lists(st.tuples(returns, returns), min_size=2, max_size=5), other=returns)
    @settings(max_examples=30)
    def test_the_baseline_does_not_depend_on_the_own_game(self, games, other):
        """Other rewards of the first game change its advantages by the difference of the returns,
        and nothing more."""
        roles = [4, 9] * len(games)
        changed = [(other, other), *games[1:]]
        before, after = (
            RoleRelative()(rows_of([each for game in batch for each in game], roles))[keys.TURN_ADVANTAGE][:2, 0]
            for batch in (games, changed)
        )
        gained = torch.tensor([sum(other) - sum(each) for each in games[0]], dtype=torch.float64)
        torch.testing.assert_close(after - before, gained)

    def test_it_is_the_mean_of_the_same_role_in_other_games(self):
        rows = rows_of([[1.0], [-1.0], [0.0, 3.0], [-3.0], [0.0], [0.0]], [4, 9] * 3)
        advantage = RoleRelative()(rows)[keys.TURN_ADVANTAGE]
        expected = torch.tensor([[-0.5, 0], [0.5, 0], [2.5, 2.5], [-2.5, 0], [-2.0, 0], [2.0, 0]])
        torch.testing.assert_close(advantage, expected.double())

    def test_turn_by_turn(self):
        rows = rows_of([[1.0, 2.0], [4.0]], [4, 4])
        advantage = RoleRelative(credit="turn", gamma=0.5)(rows)[keys.TURN_ADVANTAGE]
        assert advantage.tolist() == [[-2.0, 2.0], [2.0, 0.0]]

    def test_games_of_a_mixture_are_apart(self):
        rows = rows_of([[1.0], [3.0], [5.0]], [4, 4, 4], env_id=[0, 0, 1])
        assert RoleRelative()(rows)["advantage"].amax(1).tolist() == [-2.0, 2.0, 5.0]

    def test_a_seat_that_never_moved_counts_in_the_baseline_alone(self):
        rows = rows_of([[1.0], [3.0]], [4, 4])
        rows["turn_ids"][1] = -1
        assert RoleRelative()(rows)["advantage"].tolist() == [[-2.0], [0.0]]


class TestRefused:
    def test_rows_without_roles(self):
        rows = rows_of([[1.0]], [4])
        del rows[ROLE]
        with pytest.raises(KeyError, match="collect games with a SelfPlayCollector"):
            RoleRelative()(rows)

    def test_a_number_as_the_role(self):
        rows = rows_of([[1.0]], [4])
        rows[ROLE] = rows[ROLE].double()
        with pytest.raises(TypeError, match="is a number"):
            RoleRelative()(rows)

    def test_a_discounted_objective_of_whole_episodes(self):
        with pytest.raises(ValueError, match="discounted from the first turn on"):
            RoleRelative(gamma=0.9, discounted_objective=True)
