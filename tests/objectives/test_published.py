"""Numbers out of other projects' published tests, met by our functions.

Only numbers are quoted, with the test that holds them (where that writes a formula, its figure). Where a definition
differs from ours, the test says how and holds the figures of both. Sources, each at the commit where its numbers stand:

- rlax: google-deepmind/rlax 4c5d25b, ``rlax/_src/{multistep,vtrace}_test.py``
- Tianshou: thu-ml/tianshou f240205, ``test/base/test_returns.py``
- torchtune: pytorch/torchtune bd2a0fc, ``tests/torchtune/rlhf/test_rewards.py``, ``.../loss/test_ppo_loss.py``
- SkyRL: NovaSky-AI/SkyRL a956457, ``tests/backends/skyrl_train/utils/test_ppo_utils.py``,
  ``tests/train/algorithms/test_{losses,off_policy_correction}.py``
- NeMo RL: NVIDIA-NeMo/RL 7ea279a, ``tests/unit/algorithms/test_{loss_functions,ppo,grpo,utils,reward_functions}.py``
- verl: volcengine/verl b178a3c, ``tests/trainer/ppo/test_rollout_corr.py``
- tinker-cookbook: thinking-machines-lab/tinker-cookbook 1baf9d2, ``tinker_cookbook/rl/advantages_test.py``
- TRL: huggingface/trl f2cd577, ``tests/test_rewards.py``, ``tests/experimental/test_ppo_trainer.py``
- Open Instruct: allenai/open-instruct e6c3044, ``open_instruct/test_rl_utils.py``
"""

from __future__ import annotations

import math

import pytest
import torch
from conversations import DOUBLE, table_actor
from tensordict import TensorDict
from torch import Tensor

from torchrl_llm.objectives import TurnPolicyLoss
from torchrl_llm.objectives import functional as F

ANY = 7.5
"""Stands where a figure must not matter."""


def doubles(*numbers: list) -> Tensor | tuple[Tensor, ...]:
    made = tuple(torch.tensor(x, dtype=DOUBLE) for x in numbers)
    return made if len(made) > 1 else made[0]


def meets(actual: Tensor, published: list | float, digits: int) -> None:
    """Equal to the last of the ``digits`` decimals that were published, which some cut and others round."""
    torch.testing.assert_close(actual.to(DOUBLE), doubles(published), rtol=0, atol=10.0**-digits)


def all_of(x: Tensor) -> Tensor:
    return torch.ones_like(x, dtype=torch.bool)


def in_units(discount: list[float]) -> Tensor:
    """Units in which steps of unequal discounts are steps of discount 1, ``[1, T + 1]``; the last is the bootstrap's."""
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
        """``DiscountedReturnsTest``: a discount for each step, which ours takes as a change of units."""
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
        """``LambdaReturnsTest``, lambda 0.75: the value target of GAE; the first value must not matter."""
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
        """``test_episodic_returns``, gamma 0.1; its buffer holds several episodes, which are rows here."""
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
        """``test_episodic_returns`` with values, gamma 0.99, lambda 0.95: terminated, and truncated with bootstrap.

        It gives the value of what follows each step, so that of the first state is free.
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
        """``test_compute_gae_advantage_return_with_masking``: returns 6, 5, 3 and advantages 0.7071, 0.1768, -0.7071.

        Its mask restricts the statistics alone: the reward of the masked step still flows back. Ours says which steps
        there were, so the step counts for nothing; its figures come back if the mask is given to the whitening only,
        but for the masked step itself, which is 0 here.
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
        """``test_gae_carry_forward_interior_gap``: a gap that holds the value 999 is as if it were not there."""
        mask = torch.tensor([[True, True, False, True, True]])
        reward, value = doubles([[0.0, 0.0, 0.0, 0.0, 1.0]], [[0.1, 0.2, 999.0, 0.4, 0.5]])
        advantage, _ = F.turn_gae(reward, value, mask, 0.99, 0.95)
        expected, _ = F.turn_gae(reward[:, mask[0]], value[:, mask[0]], all_of(mask[:, mask[0]]), 0.99, 0.95)
        torch.testing.assert_close(advantage[:, mask[0]], expected, rtol=0, atol=1e-15)
        assert advantage[0, 2] == 0

    def test_torchtune_kl_in_the_reward(self):
        """``TestGetRewards.test_get_rewards_ppo``: -0.5 (log p - log ref) a token, the score on the last one.

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
        # behavior and target logits, actions, rewards, discounts, values, bootstrap; then the error and the advantage
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
        """``TestReinforcePPAdvantages.test_normalized`` divides by the population's deviation: that is ``ddof=0``."""
        score, group = doubles([1.0, 3.0, 5.0]), torch.zeros(3)
        meets(F.group_relative(score, group, ddof=0, eps=0.0), [-1.2247449, 0.0, 1.2247449], 7)
        meets(F.group_relative(score, group, eps=0.0), [-1.0, 0.0, 1.0], 7)

    @pytest.mark.parametrize(
        ("score", "published", "digits"),
        [([2.0, 2.0], [0.0, 0.0], 6), ([1.0, 3.0], [-0.7071, 0.7071], 4), ([1.0, 1.01], [-0.7071, 0.7071], 3)],
    )
    def test_nemo_sample_deviation(self, score, published, digits):
        """``test_grpo_advantage_estimator_{zero_std,small_nonzero_std}``: ``ddof=1``, and 0 without spread."""
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

        It goes on to the deviation of the others (0.7071, 1.4142, 0.7071). To divide a leave-one-out advantage by a
        deviation is refused here: it biases the gradient.
        """
        score, group = doubles([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]), torch.tensor([0, 0, 0, 1, 1, 1])
        actual = F.group_relative(score, group, "leave_one_out", "none")
        meets(score - actual, [2.5, 2.0, 1.5, 5.5, 5.0, 4.5], 6)
        with pytest.raises(ValueError, match="leave_one_out"):
            F.group_relative(score, group, "leave_one_out", "std")


class TestWhitening:
    def test_trl(self):
        """``TestCore.test_masked_whiten``: the middle two of 1, 2, 3, 4, by the sample's deviation, the square root of 1/2."""
        mask = torch.tensor([False, True, True, False])
        meets(F.standardize(doubles([1.0, 2.0, 3.0, 4.0]), mask), [0.0, -0.7071068, 0.7071068, 0.0], 7)


def token_loss(log_prob: Tensor, old: Tensor, advantage: Tensor, ref: Tensor | None = None, **options) -> TensorDict:
    """The loss module's output where the actor's log-probs are given; every row is one turn of actions only."""
    rows = {
        "theta": log_prob,
        "sample_log_prob": old,
        "advantage": advantage,
        "turn_ids": torch.zeros(log_prob.shape, dtype=torch.int64),
    }
    rows |= {} if ref is None else {"ref_log_prob": ref}
    return TurnPolicyLoss(table_actor(), **options)(TensorDict(rows, [len(log_prob)]))


class TestObjectives:
    # NeMo RL's running example: ratios 0.5, 1, 1.5.
    ADVANTAGE = ((1.0, -1.0, 2.0),)
    LOG_PROB = ((-1.69315, -1.0, -0.59453),)
    # NeMo RL's and SkyRL's example for the dual clip and CISPO: ratios 0.5, 1, 10.
    STEEP = ([[1.0, -1.0, -4.0]], [[-1.69315, -1.0, -0.69741]], [[-1.0, -1.0, -3.0]])

    def example(self) -> tuple[Tensor, Tensor, Tensor]:
        advantage, log_prob = doubles(self.ADVANTAGE, self.LOG_PROB)
        return log_prob, torch.full_like(log_prob, -1.0), advantage

    def test_nemo_ppo_clip(self):
        """``test_clipped_pg_loss_ppo_clipping``: terms -0.5, 1, -2.4, loss -0.6333."""
        log_prob, old, advantage = self.example()
        meets(-F.clipped_objective(log_prob - old, advantage, 0.2, 0.2)[0], [[-0.5, 1.0, -2.4]], 4)
        meets(token_loss(log_prob, old, advantage)["loss_objective"], -0.6333, 4)

    def test_torchtune_ppo_clip(self):
        """``TestPPOLoss``: ratio e is clipped at 1.2, e^0.1 is not.

        For the ratio 1/e its test names 0.8 but compares with ``rtol=1e6``; the pessimistic bound is the smaller
        one, 1/e, whose gradient stays.
        """
        objective, clipped = F.clipped_objective(doubles([1.0, 0.1, -1.0]), torch.ones(3, dtype=DOUBLE), 0.2, 0.2)
        meets(objective, [1.2, math.exp(0.1), math.exp(-1.0)], 7)
        assert clipped.tolist() == [True, False, False]

    def test_dual_clip(self):
        """SkyRL's ``test_policy_loss_dual_clip`` (sum 12.5) and NeMo RL's ``test_clipped_pg_loss_dual_clip`` (mean 4.1667).

        Without the dual clip the last term is 40.
        """
        advantage, log_prob, old = doubles(*self.STEEP)
        terms = -F.clipped_objective(log_prob - old, advantage, 0.2, 0.2, dual_clip=3.0)[0]
        meets(terms, [[-0.5, 1.0, 12.0]], 4)
        meets(terms.sum(), 12.5, 4)
        meets(terms.mean(), 4.1667, 4)
        meets(-F.clipped_objective(log_prob - old, advantage, 0.2, 0.2)[0], [[-0.5, 1.0, 40.0]], 2)

    def test_skyrl_cispo(self):
        """``test_policy_loss_cispo``: clipped weights 0.8, 1, 1.2, loss -2.9930.

        Its term is weight x A x log-prob, ours weight x A x log-ratio: another number with the same gradient, from
        which theirs is had by a product with the log-probs.
        """
        advantage, log_prob, old = doubles(*self.STEEP)
        log_ratio = (log_prob - old).requires_grad_()
        F.cispo_objective(log_ratio, advantage, 0.2, 0.2)[0].sum().backward()
        meets(log_ratio.grad, [[0.8, -1.0, -4.8]], 4)
        meets(-(log_ratio.grad * log_prob).sum(), -2.9930, 4)

    def test_nemo_gspo(self):
        """``test_clipped_pg_loss_gspo{,_batch_size_2}``: ratios 0.9086 and 2.4697, losses -0.6057 and -0.4912."""
        log_prob, old, advantage = self.example()
        ids = torch.zeros(2, 3, dtype=torch.int64)
        both = (log_prob.repeat(2, 1), torch.cat([old, 2 * old]), advantage.repeat(2, 1))
        ratio = F.pool_log_ratio(both[0] - both[1], ids, "sequence", "mean").exp()
        meets(ratio, [[0.9086] * 3, [2.4697] * 3], 4)
        options = {"ratio_level": "sequence", "unit_weight": "equal"}
        meets(token_loss(log_prob, old, advantage, **options)["loss_objective"], -0.6057, 4)
        meets(token_loss(*both, **options)["loss_objective"], -0.4912, 4)


class TestSamplerWeights:
    SAMPLE = ((-0.5, -1.5, -0.8),)  # NeMo RL's example, old log-probs -1: ratios 0.6065, 1.6487, 0.8187

    def weights(self, old: list, sample: list, *args, **options) -> Tensor:
        old_log_prob, sample_log_prob = doubles(old, sample)
        return F.sampler_weights(
            old_log_prob, sample_log_prob, torch.zeros(old_log_prob.shape).long(), *args, **options
        )

    @pytest.mark.parametrize(
        ("level", "cap", "weights", "published"),
        [
            ("token", 1e9, [0.6065, 1.6487, 0.8187], -0.2065),
            ("token", 0.8, [0.6065, 0.8, 0.8], -0.4744),
            ("sequence", 1e9, [0.8187, 0.8187, 0.8187], -0.4959),
            ("sequence", 0.8, [0.8, 0.8, 0.8], -0.4846),
        ],
    )
    def test_nemo_truncated(self, level, cap, weights, published):
        """``test_clipped_pg_loss_on_policy_truncated_importance_sampling`` and those without a cap; token and sequence."""
        advantage, log_prob = doubles(TestObjectives.ADVANTAGE, TestObjectives.LOG_PROB)
        weight = self.weights([[-1.0] * 3], self.SAMPLE, "truncate", 0.0, cap, level)
        meets(weight, [weights], 4)
        ratio = F.pool_log_ratio(log_prob + 1.0, torch.zeros(1, 3).long(), level, "mean")
        meets(-(weight * F.clipped_objective(ratio, advantage, 0.2, 0.2)[0]).mean(), published, 4)

    @pytest.mark.parametrize(
        ("old", "sample", "mask", "level", "cap", "published"),
        [
            ([-1.0, -1.5, -0.5], [-1.5, -1.0, -1.5], [1, 1, 1], "token", 2.0, [1.6487, 0.6065, 2.0]),
            ([-1.0, -1.5, -0.5], [-1.5, -1.0, -1.5], [1, 1, 1], "sequence", 5.0, [2.7183] * 3),
            ([-1.0, -1.0, -1.0], [-2.0, -2.0, -2.0], [1, 1, 1], "sequence", 5.0, [5.0] * 3),
            ([-1.0, -1.5, -0.5], [-1.5, -1.0, -1.5], [1, 0, 1], "sequence", 10.0, [4.4817, 1.0, 4.4817]),
        ],
    )
    def test_skyrl_truncated(self, old, sample, mask, level, cap, published):
        """``test_compute_tis_ratio_*``; off actions ours is 1."""
        old_log_prob, sample_log_prob = doubles([old], [sample])
        ids = torch.tensor([mask]) - 1
        meets(F.sampler_weights(old_log_prob, sample_log_prob, ids, "truncate", 0.0, cap, level), [published], 4)

    def test_nemo_icepop(self):
        """``test_clipped_pg_loss_icepop_importance_sampling``: of 0.6065, 12.182, 0.8187 the bounds 0.5 and 5 drop one."""
        weight = self.weights([[-1.0] * 3], [[-0.5, -3.5, -0.8]], "mask", 0.5, 5.0)
        meets(weight, [[0.6065, 0.0, 0.8187]], 4)
        free = self.weights([[-1.0] * 3], [[-0.5, -3.5, -0.8]], "mask", 0.0, 1e9)
        meets(free, [[0.6065, 12.182, 0.8187]], 3)

    def test_verl_mask(self):
        """``test_mask_mode``: ratios 0.368 and 1.649 within 0.5 and 2; the first is masked out of the loss.

        verl keeps the weight and clears the mask, ours is the product of the two.
        """
        weight = self.weights([[-2.0] * 5] * 2, [[-1.0] * 5, [-2.5] * 5], "mask", 0.5, 2.0)
        meets(weight, [[0.0] * 5, [1.649] * 5], 3)
        free = self.weights([[-2.0] * 5] * 2, [[-1.0] * 5, [-2.5] * 5], "mask", 0.0, 2.0)
        meets(free, [[0.368] * 5, [1.649] * 5], 3)

    @pytest.mark.parametrize(
        ("old", "sample", "reduction", "low", "high", "published"),
        [
            ([-1.0, -1.1, -1.0], [-1.1, -1.0, -1.0], "mean", 0.9, 1.1, 1.0),
            ([-1.0, -1.0, -1.0], [-1.5, -1.5, -1.5], "mean", 0.9, 1.1, 0.0),
            ([-1.0, -1.1, -1.2], [-1.2, -1.2, -1.2], "sum", 0.5, 2.0, 1.0),
            ([-1.0, -1.0, -1.0], [-2.0, -2.0, -2.0], "sum", 0.5, 2.0, 0.0),
        ],
    )
    def test_skyrl_sequence_rejection(self, old, sample, reduction, low, high, published):
        """``test_compute_sequence_mask_{geometric,geometric_rejects,product,product_rejects_by_seq_ratio}``."""
        weight = self.weights([old], [sample], "reject", low, high, "sequence", reduction)
        assert weight.tolist() == [[published] * 3]

    def test_nemo_sequence_mask(self):
        """``test_clipped_pg_loss_seq_mask_tis``: a geometric mean of 1.0005 within 0.999 and 1.002 is kept.

        NeMo RL (and SkyRL's outlier mask) keeps or drops the sequence by its mean and weighs each token by its own
        ratio; ``"mask"`` gives all tokens of the sequence its one weight. The two are equal here, where the ratios are.
        """
        weight = self.weights([[-1.0] * 3], [[-1.0005] * 3], "mask", 0.999, 1.002, "sequence", "mean")
        meets(weight, [[1.0005] * 3], 4)


class TestKL:
    @pytest.mark.parametrize(
        ("kind", "published", "digits"),
        [("k1", [-1.0, 14.0, 29.0], 6), ("k2", [0.5, 98.0, 420.5], 6), ("k3", [0.7183, 13.0, 28.0], 4)],
    )
    def test_nemo(self, kind, published, digits):
        """``test_calculate_kl``, without its clamps: nothing is clamped silently here."""
        log_prob, ref = doubles([-1.0, -1.0, -1.0], [0.0, -15.0, -30.0])
        meets(F.kl_estimate(log_prob, ref, kind), published, digits)

    @pytest.mark.parametrize(("kind", "published"), [("k1", 0.1), ("k2", 0.005), ("k3", 0.0048374)])
    def test_skyrl(self, kind, published):
        """``test_compute_approx_kl``: log-probs 0.2, 0.3 and reference 0.1, 0.2."""
        meets(F.kl_estimate(*doubles([0.2, 0.3], [0.1, 0.2]), kind), [published] * 2, 7)

    def test_nemo_penalty(self):
        """``test_clipped_pg_loss_kl_penalty``: terms 0.368, 0, 0.718, coefficient 0.1, loss 0.0362.

        That is ours while the policy is still the one that sampled. Away from it (its old log-probs are 0) our term
        carries the ratio, so that samples of the old policy stand for those of the new one.
        """
        log_prob, ref = doubles([[0.0, -1.0, -2.0]], [[-1.0, -1.0, -1.0]])
        meets(F.kl_estimate(log_prob, ref, "k3"), [[0.368, 0.0, 0.718]], 3)
        still, away = (
            token_loss(log_prob, old, torch.zeros_like(log_prob), ref, kl_coeff=0.1)["loss_kl"]
            for old in (log_prob, torch.zeros_like(log_prob))
        )
        meets(still, 0.0362, 4)
        meets(away, 0.0155, 4)

    def test_nemo_penalty_with_weights(self):
        """``test_clipped_pg_loss_on_policy_kl_importance_sampling``: new over sampler as weight, mean 0.060543.

        The same is had from our ratio (new over old) times our correction (old over sampler).
        """
        log_prob, ref, sample = doubles(TestObjectives.LOG_PROB, [[-1.0, -1.0, -1.0]], TestSamplerWeights.SAMPLE)
        estimate = F.kl_estimate(log_prob, ref, "k3")
        meets(estimate, [[0.3069, 0.0, 0.0721]], 4)
        out = token_loss(log_prob, sample, torch.zeros_like(log_prob), ref, kl_coeff=0.1)
        torch.testing.assert_close(out["loss_kl"], doubles(0.0060543), rtol=1e-3, atol=0)

    def test_nemo_gradient(self):
        """``test_calculate_kl_detaches_importance_sampling_when_input_clamped``: value 0.7182818, gradient -1.

        NeMo RL differentiates the weight too, which adds the estimate itself (the score-function term); ours is held
        constant, and the gradient is that of k3: 1 - e.
        """
        log_prob = doubles([-1.0]).requires_grad_()
        estimate = F.kl_estimate(log_prob, doubles([0.0]), "k3")
        meets(estimate.detach(), [0.7182818], 7)
        estimate.sum().backward()
        meets(log_prob.grad + estimate.detach(), [-1.0], 7)


class TestLossWeights:
    """Means as weighted sums."""

    def mean(self, x: list, mask: list, *args) -> Tensor:
        ids = torch.tensor(mask) - 1
        return (F.loss_weights(ids, *args).double() * doubles(x)).sum()

    @pytest.mark.parametrize(
        ("x", "mask", "args", "published"),
        [
            ([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], [[1, 1, 0], [1, 1, 1]], ("token",), 3.6),
            ([[1.0, 2.0], [3.0, 4.0]], [[1, 1], [1, 0]], ("sequence",), 2.25),
            ([[2.0, 3.0], [9.0, 12.0]], [[1, 1], [1, 0]], ("constant", 10.0), 0.7),
        ],
    )
    def test_skyrl(self, x, mask, args, published):
        """``TestApplyLossReductionToAdvantagesMinibatch``: token_mean, sequence_mean, seq_mean_token_sum_norm."""
        meets(self.mean(x, mask, *args), published, 6)

    def test_skyrl_mean_of_micro_batches(self):
        """``test_token_mean_legacy``: 8.5, a mean of the micro-batches' means (4 and 13).

        It depends on how the batch is cut; ours is the mean over the batch, 64 / 7, however it is cut.
        """
        x = [[2.0, 4.0], [6.0, 8.0], [10.0, 12.0], [14.0, 16.0]]
        mask = [[1, 1], [1, 0], [1, 1], [1, 1]]
        meets(self.mean(x, mask, "token"), 64 / 7, 5)
        halves = [self.mean(x[part], mask[part], "token") for part in (slice(2), slice(2, 4))]
        meets(torch.stack(halves), [4.0, 13.0], 5)
        meets(torch.stack(halves).mean(), 8.5, 5)

    def test_open_instruct(self):
        """``TestMaskedMean``: 2.75 per sequence and 7/3 per token; with an empty row 0.75, where ours is 1.5.

        An empty row is a sequence of mean 0 to Open Instruct; here it counts for nothing, as padding must.
        """
        x = [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]
        meets(self.mean(x, [[1, 1, 0], [1, 0, 0]], "sequence"), 2.75, 6)
        meets(self.mean(x, [[1, 1, 0], [1, 0, 0]], "token"), 7 / 3, 6)
        meets(self.mean(x, [[1, 1, 0], [0, 0, 0]], "sequence"), 1.5, 6)


class TestOverlongPenalty:
    def test_trl(self):
        """``test_soft_overlong_punishment_*``: lengths 50, 110, 90 at limit 100, buffer 20."""
        meets(F.overlong_penalty(doubles([50.0, 110.0, 90.0]), 100, 20), [0.0, -1.0, -0.5], 6)

    def test_nemo_goes_on_beyond_the_limit(self):
        """``test_reward_shaping_preserves_unshaped_reward_overlong``: 0, -0.2, -0.5, -1.0 at limit 25, buffer 5, factor 0.5.

        Beyond the limit (the last response) it goes on falling; ours stays at the factor, as in the paper.
        """
        actual = 0.5 * F.overlong_penalty(doubles([10.0, 22.0, 25.0, 30.0]), 25, 5)
        meets(actual, [0.0, -0.2, -0.5, -0.5], 6)
