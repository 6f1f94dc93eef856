"""Metrics: against hand-made rows and known intervals."""

import math

import pytest
import torch
from tensordict import TensorDict

from torchrl_llm.metrics import Timer, credit_metrics, rollout_metrics, wilson_interval


@pytest.fixture
def rows() -> TensorDict:
    """Two conversations: one won in the second turn, one cut in its first; the padding holds
    rubbish."""
    yes, no = True, False
    return TensorDict(
        tokens=torch.arange(12).view(2, 6),
        attention_mask=torch.tensor([[yes] * 6, [yes, yes, yes, no, no, no]]),
        turn_ids=torch.tensor([[-1, 0, 0, -1, 1, -1], [-1, 0, -1, -1, -1, -1]]),
        sample_log_prob=torch.full((2, 6), -1.0),
        advantage=torch.ones(2, 6),
        turn=TensorDict(
            reward=torch.tensor([[0.25, 1.0], [0.5, 99.0]]),
            mask=torch.tensor([[yes, yes], [yes, no]]),
            terminated=torch.tensor([[no, yes], [no, no]]),
            truncated=torch.tensor([[no, no], [yes, yes]]),
            success=torch.tensor([[no, yes], [no, yes]]),
            value=torch.tensor([[1.0, 2.0], [3.0, 99.0]]),
            value_target=torch.tensor([[2.0, 4.0], [6.0, -99.0]]),
            batch_size=[2],
        ),
        batch_size=[2],
    )


class TestRolloutMetrics:
    def test_counts_only_what_was_played(self, rows):
        assert rollout_metrics(rows) == {
            "rollout/reward": pytest.approx((1.25 + 0.5) / 2),
            "rollout/success": 0.5,
            "rollout/truncated": 0.5,
            "rollout/turns": 1.5,
            "rollout/penalized": 0.0,
            "rollout/response_length": pytest.approx(4 / 3),
            "data/tokens": 9.0,
            "data/action_share": pytest.approx(4 / 9),
        }

    def test_penalized_turns_are_those_with_a_negative_reward(self, rows):
        rows["turn", "reward"] = torch.tensor([[-0.1, 1.0], [0.0, -99.0]])
        assert rollout_metrics(rows)["rollout/penalized"] == pytest.approx(1 / 3)
        rows["turn", "mask"] = torch.zeros(2, 2, dtype=torch.bool)
        assert math.isnan(rollout_metrics(rows)["rollout/penalized"])


class TestCreditMetrics:
    def test_by_hand(self, rows):
        # Targets 2, 4, 6 have variance 8/3; the errors 1, 2, 3 have variance 2/3.
        figures = credit_metrics(rows)
        assert figures["critic/explained_variance"] == pytest.approx(0.75)
        assert figures["critic/value_return_correlation"] == pytest.approx(1.0)

    def test_undefined_is_nan(self, rows):
        rows["turn", "value_target"] = torch.ones(2, 2)
        rows["advantage"] = torch.zeros(2, 6)
        figures = credit_metrics(rows)
        undefined = ("critic/explained_variance", "critic/value_return_correlation", "credit/top_percent")
        assert all(math.isnan(figures[name]) for name in undefined)

    def test_the_entropy_of_what_no_policy_has_said_is_not_known(self, rows):
        rows["sample_log_prob"][0] = math.nan  # of a demonstration
        assert credit_metrics(rows)["policy/first_turn_entropy"] == 1.0
        rows["sample_log_prob"][1] = math.nan
        assert "policy/first_turn_entropy" not in credit_metrics(rows)

    def test_nothing_was_sampled(self, rows):
        rows["turn_ids"] = torch.full((2, 6), -1)
        figures = credit_metrics(rows)
        assert (figures["credit/largest"], figures["policy/first_turn_entropy"]) == (0, 0)
        assert math.isnan(figures["credit/top_percent"])

    def test_how_the_credit_is_spread(self):
        """Of 150 action tokens the hundredth is two: 3 and 2 of a sum of 3 + 2 + 148 / 4. What is
        no action does not count."""
        advantage = torch.full((2, 80), 0.25)
        advantage[0, 7], advantage[1, 8] = -3.0, 2.0
        turn_ids = torch.zeros(2, 80, dtype=torch.int64)
        turn_ids[:, :5], turn_ids[:, 40:] = -1, 1
        advantage[:, :5] = 9.0
        sampled = torch.where(turn_ids == 0, -0.1, -7.0)
        rows = TensorDict({"advantage": advantage, "turn_ids": turn_ids, "sample_log_prob": sampled}, batch_size=[2])
        assert credit_metrics(rows) == {
            "credit/largest": 3.0,
            "credit/top_percent": pytest.approx(5 / (5 + 148 / 4)),
            "policy/first_turn_entropy": pytest.approx(3.5),
        }

    def test_states(self):
        """Of five turns with a token three are valued; two are alone in their state, and the
        others were compared with 1, 1 and 4 turns."""
        turn_ids = torch.tensor([[-1, 0, 1, 2], [-1, 0, -1, 1]])
        nan = float("nan")
        turn = {
            "sampled_value": torch.tensor([[0.0, nan, 2.0], [nan, 3.0, 0.0]]),
            "num_compared": torch.tensor([[1, 0, 4], [1, 0, 7]]),
        }
        rows = {"advantage": turn_ids.float(), "turn_ids": turn_ids, "sample_log_prob": turn_ids.float(), "turn": turn}
        found = credit_metrics(TensorDict(rows, batch_size=[2]))
        assert found["credit/valued"] == pytest.approx(3 / 5)
        assert (found["credit/alone"], found["credit/num_compared"]) == (pytest.approx(2 / 5), 2.0)


class TestWilsonInterval:
    # Newcombe (1998), Statistics in Medicine 17, Table I: method 3 (Wilson, no continuity
    # correction).
    @pytest.mark.parametrize(
        ("successes", "trials", "low", "high"),
        [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
    )
    def test_published_values(self, successes, trials, low, high):
        assert wilson_interval(successes, trials) == pytest.approx((low, high), abs=6e-5)

    @pytest.mark.parametrize(("successes", "trials"), [(3, 2), (-1, 5), (0, 0)])
    def test_wrong_counts(self, successes, trials):
        with pytest.raises(ValueError, match="expected 0 <= successes"):
            wilson_interval(successes, trials)


class TestTimer:
    def test_adds_up_and_starts_anew(self):
        timer = Timer()
        for _ in range(2):
            with timer("a"):
                pass
        first = timer.read()
        assert set(first) == {"time/a_s"}
        assert first["time/a_s"] > 0
        assert timer.read() == {}
