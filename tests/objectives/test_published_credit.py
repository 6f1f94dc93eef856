"""Returns, advantages and penalties out of other projects' tests, which published.py names, met by
our functions."""

from __future__ import annotations

import pytest
import torch
from conversations import DOUBLE
from published import all_of, doubles, meets
from torch import Tensor

from torchrl_llm import functional as F

ANY = 7.5
"""Stands where a figure must not matter."""


def in_units(discount: list[float]) -> Tensor:
    """Units in which steps of unequal discounts are steps of discount 1, ``[1, T + 1]``; the last
    is the bootstrap's."""
    return torch.cat([torch.ones(1, 1, dtype=DOUBLE), doubles([discount]).cumprod(1)], 1)


class TestReturns:
    RLAX = (
        ([1.0, 0.0, -1.0, 0.0, 1.0], [0.5, 0.9, 1.0, 0.5, 0.8], [3.0, 1.0, 5.0, -5.0, 3.0]),
        ([0.5, 0.8, -0.7, 0.0, 2.1], [0.9, 0.5, 0.3, 0.8, 0.7], [-1.7, 1.2, 2.3, 2.2, 2.7]),
    )

    @pytest.mark.parametrize(
        ("case", "published"),
        zip(RLAX, ([1.315, 0.63, 0.7, 1.7, 3.4], [1.33592, 0.9288, 0.2576, 3.192, 3.99]), strict=True),
    )
    def test_rlax_discounted_returns(self, case, published):
        """``DiscountedReturnsTest``: a discount for each step, which ours takes as a change of
        units."""
        reward, next_value = doubles([case[0]], [case[2]])
        unit = in_units(case[1])
        actual = F.turn_returns(reward * unit[:, :-1], all_of(reward), 1.0, next_value[:, -1] * unit[:, -1])
        meets(actual / unit[:, :-1], [published], 6)

    @pytest.mark.parametrize(
        ("case", "published"),
        zip(
            RLAX,
            (
                [1.6460547, 0.72281253, 0.7375001, 0.6500001, 3.4],
                [0.7866317, 0.9913063, 0.1101501, 2.834, 3.99],
            ),
            strict=True,
        ),
    )
    def test_rlax_lambda_returns(self, case, published):
        """``LambdaReturnsTest``, lambda 0.75: the value target of GAE; the first value must not
        matter."""
        reward, next_value = doubles([case[0]], [case[2]])
        unit = in_units(case[1])
        value = torch.cat([torch.full((1, 1), ANY, dtype=DOUBLE), next_value[:, :-1]], 1) * unit[:, :-1]
        bootstrap = next_value[:, -1] * unit[:, -1]
        _, target = F.turn_gae(reward * unit[:, :-1], value, all_of(reward), 1.0, 0.75, bootstrap)
        meets(target / unit[:, :-1], [published], 6)

    @pytest.mark.parametrize(
        ("reward", "published"),
        [
            ([0.0], [0.0]),
            ([1.0, 2.0, 3.0], [1.23, 2.3, 3.0]),
            ([4.0, 5.0], [4.5, 5.0]),
            ([6.0, 7.0], [6.7, 7.0]),
            ([3.0, 4.0, 5.0], [3.45, 4.5, 5.0]),
        ],
    )
    def test_tianshou_episodic_returns(self, reward, published):
        """``test_episodic_returns``, gamma 0.1; its buffer holds several episodes, which are rows
        here."""
        rewards = doubles([reward])
        meets(F.turn_returns(rewards, all_of(rewards), 0.1), [published], 6)

    def test_skyrl_reinforce_plus_plus(self):
        """``test_compute_reinforce_plus_plus_outcome_advantage_{gamma,returns_and_masking}``.

        Theirs gives a return to the masked token too (3.0); ours is 0 where nothing was decided.
        """
        reward = doubles([[1.0, 2.0, 3.0]])
        meets(F.turn_returns(reward, all_of(reward), 0.5), [[2.75, 3.5, 3.0]], 6)
        meets(F.turn_returns(reward, torch.tensor([[True, True, False]]), 1.0), [[3.0, 2.0, 0.0]], 6)


class TestGAE:
    @pytest.mark.parametrize(
        ("lmbda", "digits", "published"),
        [
            (1.0, 4, ([-1.45118, -4.4557, 2.5396, 0.5249, -0.49], [3.0, 2.0, 1.0, 0.0], [-4.9])),
            (0.7, 4, ([-0.676979, -5.248167, 2.4846, 0.6704, -0.49], [2.2899, 1.73, 1.0, 0.0], [-4.9])),
            (0.4, 3, ([0.56731, -6.042, 2.3431, 0.815, -0.49], [1.725, 1.46, 1.0, 0.0], [-4.9])),
        ],
    )
    def test_rlax(self, lmbda, digits, published):
        """``test_truncated_gae``; a discount of 0 in its second row ends an episode."""
        episodes = (
            (0.99, [0.0, 0.0, 1.0, 0.0, -0.5], [1.0, 4.0, -3.0, -2.0, -1.0], -1.0),
            (0.9, [0.0, 0.0, 0.0, 0.0], [-3.0, -2.0, -1.0, 0.0], 0.0),
            (0.9, [1.0], [5.0], -1.0),
        )
        for (gamma, *figures, last), advantage in zip(episodes, published, strict=True):
            reward, value, bootstrap = doubles([figures[0]], [figures[1]], [last])
            actual, _ = F.turn_gae(reward, value, all_of(reward), gamma, lmbda, bootstrap)
            meets(actual, [advantage], digits)

    TIANSHOU = (
        ([101.0, 102.0, 103.0, 200.0], [2.0, 3.0, 4.0, -1.0]),
        ([104.0, 105.0, 106.0, 201.0], [5.0, 6.0, 7.0, -2.0]),
        ([107.0, 108.0, 109.0, 202.0], [8.0, 9.0, 10.0, -3.0]),
    )

    @pytest.mark.parametrize(
        ("truncated", "published"),
        [
            (
                [False, False, False],
                [
                    [454.8344, 376.1143, 291.298, 200.0],
                    [464.5610, 383.1085, 295.387, 201.0],
                    [474.2876, 390.1027, 299.476, 202.0],
                ],
            ),
            (
                [True, True, False],
                [
                    [454.0109, 375.2386, 290.3669, 199.01],
                    [462.9138, 381.3571, 293.5248, 199.02],
                    [474.2876, 390.1027, 299.476, 202.0],
                ],
            ),
        ],
    )
    def test_tianshou(self, truncated, published):
        """``test_episodic_returns`` with values, gamma 0.99, lambda 0.95: terminated, and truncated
        with bootstrap.

        It gives the value of what follows each step, so the value of the first state is free.
        """
        reward, following = (doubles([row[i] for row in self.TIANSHOU]) for i in (0, 1))
        value = torch.cat([torch.full((3, 1), ANY, dtype=DOUBLE), following[:, :-1]], 1)
        bootstrap = torch.where(torch.tensor(truncated), following[:, -1], 0.0)
        _, target = F.turn_gae(reward, value, all_of(reward), 0.99, 0.95, bootstrap)
        meets(target, published, 4)

    @pytest.mark.parametrize(
        ("gamma", "lmbda", "published"),
        [(1.0, 1.0, [6.0, 5.0, 3.0]), (0.5, 1.0, [2.75, 3.5, 3.0]), (1.0, 0.5, [3.625, 4.25, 3.0])],
    )
    def test_skyrl(self, gamma, lmbda, published):
        """``test_compute_gae_advantage_return{,_gamma,_lam}``."""
        reward, value = doubles([[1.0, 2.0, 3.0]], [[0.5, 1.0, 1.5]])
        meets(F.turn_gae(reward, value, all_of(reward), gamma, lmbda)[1], [published], 6)

    def test_skyrl_masks_only_in_the_whitening(self):
        """``test_compute_gae_advantage_return_with_masking``: returns 6, 5, 3 and advantages
        0.7071, 0.1768, -0.7071.

        Its mask restricts the statistics alone: the reward of the masked step still flows back.
        Ours says which steps there were, so the step counts for nothing; its figures come back if
        the mask is given to the whitening only, but for the masked step itself, which is 0 here.
        """
        reward, value = doubles([[1.0, 2.0, 3.0]], [[0.5, 1.0, 1.5]])
        mask = torch.tensor([[True, False, True]])
        advantage, target = F.turn_gae(reward, value, all_of(reward), 1.0, 1.0)
        meets(target, [[6.0, 5.0, 3.0]], 6)
        meets(F.standardize(advantage, mask), [[0.7071, 0.0, -0.7071]], 4)
        meets(F.turn_gae(reward, value, mask, 1.0, 1.0)[1], [[4.0, 0.0, 3.0]], 6)

    def test_torchtune(self):
        """``TestEstimateAdvantages.test_estimate_returns``: 0.9^3 0.95^2, 0.9^2 0.95, 0.9, 1."""
        reward = value = doubles([[0.0, 0.0, 0.0, 1.0]])
        meets(F.turn_gae(reward, value, all_of(reward), 0.9, 0.95)[1], [[0.6579225, 0.7695, 0.9, 1.0]], 7)

    def test_nemo_one_step(self):
        """``test_gae_gamma_lambda_zero``: lambda 0 is the one-step error."""
        reward, value = doubles([[0.0, 0.0, 5.0]], [[1.0, 2.0, 3.0]])
        meets(F.turn_gae(reward, value, all_of(reward), 1.0, 0.0)[0], [[1.0, 1.0, 2.0]], 6)

    def test_nemo_gap(self):
        """``test_gae_carry_forward_interior_gap``: a gap that holds the value 999 is as if it were
        not there."""
        mask = torch.tensor([[True, True, False, True, True]])
        reward, value = doubles([[0.0, 0.0, 0.0, 0.0, 1.0]], [[0.1, 0.2, 999.0, 0.4, 0.5]])
        advantage, _ = F.turn_gae(reward, value, mask, 0.99, 0.95)
        expected, _ = F.turn_gae(reward[:, mask[0]], value[:, mask[0]], all_of(mask[:, mask[0]]), 0.99, 0.95)
        torch.testing.assert_close(advantage[:, mask[0]], expected, rtol=0, atol=1e-15)
        assert advantage[0, 2] == 0

    def test_torchtune_kl_in_the_reward(self):
        """``TestGetRewards.test_get_rewards_ppo``: -0.5 (log p - log ref) a token, the score on the
        last one.

        With gamma 0 the token's advantage over a value of 0 is its reward.
        """
        score = doubles([[1.0], [2.0], [3.0]])
        log_prob = doubles([[0.1, 0.2, 0.3], [0.4, 0.5, 0.6], [0.6, 0.7, 0.8]])
        ref = doubles([[0.2, 0.3, 0.4], [0.6, 0.7, 0.8], [0.9, 1.0, 1.1]])
        ids = torch.zeros(3, 3, dtype=torch.int64)
        penalty = -0.5 * F.kl_estimate(log_prob, ref, "k1")
        values = torch.zeros(3, 3, dtype=DOUBLE)
        actual, _ = F.token_gae(score, values, ids, all_of(score), 0.0, 0.0, penalty=penalty)
        meets(actual, [[0.05, 0.05, 1.05], [0.1, 0.1, 2.1], [0.15, 0.15, 3.15]], 7)


class TestVTrace:
    """rlax, ``VTraceTest.test_vtrace_td_error_and_advantage``; a discount of 0 ends an episode."""

    EPISODES = (
        # behavior and target logits, actions, rewards, discounts, values, bootstrap; then the error
        # and the advantage
        ([[8.9, 0.7]], [[0.4, 0.5]], [0], [-1.3], [1.0], [2.1], 0.0, [-1.6155143], [-1.6155143]),
        (
            [[5.0, 1.0], [0.6, 0.1], [-0.9, -0.1]],
            [[9.2, 8.8], [0.7, 4.4], [7.9, 1.4]],
            [1, 0, 0],
            [-1.3, 2.3, 42.0],
            [0.89, 0.85, 0.99],
            [1.1, -3.1, 0.0],
            8.4,
            [-3.4973226, 1.8670533, 50.316002],
            [-3.4973226, 1.8670534, 50.316002],
        ),
        (
            [[0.3, -5.0], [1.0, -8.0], [0.3, 1.7], [4.7, 3.3]],
            [[1.0, 0.9], [1.0, -1.0], [-4.3, 8.7], [0.8, 0.3]],
            [1, 0, 0, 1],
            [1.3, 5.3, -3.3, -5.0],
            [0.88, 1.0, 0.83, 0.95],
            [3.1, 0.1, -1.1, 7.4],
            -1.2,
            [1.4662437, 3.6116405, -8.3327293e-5, -13.54],
            [1.4662433, 3.6116405, -8.3369283e-5, -13.54],
        ),
    )

    @pytest.mark.parametrize("episode", EPISODES)
    def test_rlax(self, episode):
        behavior, target, actions, *figures, last, error, advantage = episode
        reward, value = doubles([figures[0]], [figures[2]])
        unit = in_units(figures[1])
        action = torch.tensor(actions)[:, None]
        ratio = (doubles(target).log_softmax(-1) - doubles(behavior).log_softmax(-1)).gather(1, action).T
        step, bootstrap = unit[:, :-1], last * unit[:, -1]
        actual, learned = F.turn_vtrace(reward * step, value * step, ratio, all_of(reward), 1.0, bootstrap)
        # Published in float32.
        torch.testing.assert_close(learned / step - value, doubles([error]), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(actual / step, doubles([advantage]), rtol=1e-6, atol=1e-6)


class TestGroups:
    def test_tinker_cookbook_mean(self):
        """``TestGRPOAdvantages``: centred, not scaled."""
        score = doubles([1.0, 3.0, 5.0, 0.0, 4.0, 10.0, 20.0, 30.0, 2.0, 2.0, 2.0, 5.0])
        group = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 3, 3, 3, 4])
        actual = F.group_relative(score, group, scale="none", partial="allow")
        meets(actual, [-2.0, 0.0, 2.0, -2.0, 2.0, -10.0, 0.0, 10.0, 0.0, 0.0, 0.0, 0.0], 6)

    def test_tinker_cookbook_population_deviation(self):
        """``TestReinforcePPAdvantages.test_normalized`` divides by the population's deviation: that
        is ``ddof=0``."""
        score, group = doubles([1.0, 3.0, 5.0]), torch.zeros(3)
        meets(F.group_relative(score, group, ddof=0, eps=0.0), [-1.2247449, 0.0, 1.2247449], 7)
        meets(F.group_relative(score, group, eps=0.0), [-1.0, 0.0, 1.0], 7)

    @pytest.mark.parametrize(
        ("score", "published", "digits"),
        [([2.0, 2.0], [0.0, 0.0], 6), ([1.0, 3.0], [-0.7071, 0.7071], 4), ([1.0, 1.01], [-0.7071, 0.7071], 3)],
    )
    def test_nemo_sample_deviation(self, score, published, digits):
        """``test_grpo_advantage_estimator_{zero_std,small_nonzero_std}``: ``ddof=1``, and 0 without
        spread."""
        meets(F.group_relative(doubles(score), torch.zeros(2)), published, digits)

    def test_skyrl_without_deviation(self):
        """``test_compute_grpo_outcome_advantage_norm_std_false``."""
        score, group = doubles([6.0, 3.0, 9.0, 12.0]), torch.tensor([0, 0, 1, 1])
        meets(F.group_relative(score, group, scale="none"), [1.5, -1.5, -1.5, 1.5], 6)

    def test_skyrl_leave_one_out(self):
        """``test_compute_rloo_outcome_advantage_basic``, with a group of one."""
        score, group = doubles([6.0, 3.0, 9.0, 12.0, 1.0]), torch.tensor([0, 0, 1, 1, 2])
        actual = F.group_relative(score, group, "leave_one_out", "none", partial="allow")
        meets(actual, [3.0, -3.0, -3.0, 3.0, 0.0], 6)

    def test_nemo_leave_one_out(self):
        """``test_calculate_baseline_and_std_per_prompt_basic``: baselines 2.5, 2, 1.5, 5.5, 5, 4.5.

        It continues with the deviation of the others (0.7071, 1.4142, 0.7071). To divide a
        leave-one-out advantage by a deviation is refused here: it biases the gradient.
        """
        score, group = doubles([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]), torch.tensor([0, 0, 0, 1, 1, 1])
        actual = F.group_relative(score, group, "leave_one_out", "none")
        meets(score - actual, [2.5, 2.0, 1.5, 5.5, 5.0, 4.5], 6)
        with pytest.raises(ValueError, match="leave_one_out"):
            F.group_relative(score, group, "leave_one_out", "std")


class TestWhitening:
    def test_trl(self):
        """``TestCore.test_masked_whiten``: the middle two of 1, 2, 3, 4, by the sample's deviation,
        the square root of 1/2."""
        mask = torch.tensor([False, True, True, False])
        meets(F.standardize(doubles([1.0, 2.0, 3.0, 4.0]), mask), [0.0, -0.7071068, 0.7071068, 0.0], 7)


class TestOverlongPenalty:
    def test_trl(self):
        """``test_soft_overlong_punishment_*``: lengths 50, 110, 90 at limit 100, buffer 20."""
        meets(F.overlong_penalty(doubles([50.0, 110.0, 90.0]), 100, 20), [0.0, -1.0, -0.5], 6)

    def test_nemo_goes_on_beyond_the_limit(self):
        """``test_reward_shaping_preserves_unshaped_reward_overlong``: 0, -0.2, -0.5, -1.0 at limit
        25, buffer 5, factor 0.5.

        Beyond the limit (the last response) it keeps falling; ours stays at the factor, as in the
        paper.
        """
        actual = 0.5 * F.overlong_penalty(doubles([10.0, 22.0, 25.0, 30.0]), 25, 5)
        meets(actual, [0.0, -0.2, -0.5, -0.5], 6)
