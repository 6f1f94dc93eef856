"""Rows that count as one at a turn, and estimators from outside the package that compare rows."""

from __future__ import annotations

import pytest
import torch
from exact_games import CLIMB, STUDY, gradient_of_trees
from tensordict import TensorDict
from torch import Tensor

from torchrl_llm import functional as F
from torchrl_llm import keys
from torchrl_llm.objectives import TurnEstimator
from torchrl_llm.testing.enumerable import relative_error


class AgainstRows(TurnEstimator):
    """The return from each turn on, less the mean of the other rows of its group."""

    def estimate(self, tensordict):
        mask = tensordict[keys.TURN_MASK]
        returns = F.turn_returns(tensordict[keys.TURN_REWARD], mask, self.gamma)
        group = tensordict[keys.GROUP_ID].unique(return_inverse=True)[1]
        relative = returns - F.mean_of_others(returns, group, self.units(tensordict))
        return {"turn_advantage": torch.where(mask, relative, 0.0), "turn_value_target": returns}

    def units(self, tensordict) -> Tensor:
        mask = tensordict[keys.TURN_MASK]
        return torch.arange(len(mask)).unsqueeze(1).expand_as(mask)


class AgainstUnits(AgainstRows):
    """Less the mean of the other units."""

    respects_units = True

    def units(self, tensordict):
        return tensordict[keys.TURN_UNIT]


class Mistaken(AgainstRows):
    """Says that it reads units."""

    respects_units = True


def gradient(kind: type[TurnEstimator], turns: tuple[int, int]) -> Tensor:
    policy_loss = STUDY.reinforce().make_value_estimator(kind)
    found, factor = gradient_of_trees(CLIMB, policy_loss, STUDY.rows(CLIMB), turns)
    return factor * found


class TestEstimatorsFromOutside:
    def test_one_that_does_not_read_units_is_refused(self):
        with pytest.raises(ValueError, match=r"count as one \(\('turn', 'unit'\)\).* AgainstRows does not know which"):
            gradient(AgainstRows, (1, 2))

    @pytest.mark.parametrize("turns", [(1, 1), (1, 2)])
    def test_one_that_reads_them_is_right(self, turns):
        assert relative_error(gradient(AgainstUnits, turns), STUDY.truth(CLIMB)) < 1e-6

    def test_one_that_is_mistaken_is_not(self):
        found, truth = gradient(Mistaken, (1, 2)), STUDY.truth(CLIMB)
        along = found @ truth / truth.square().sum()
        assert relative_error(found / along, truth) > 0.005  # whatever the scale

    def test_a_subclass_says_it_itself(self):
        class Louder(AgainstUnits):
            pass

        assert (AgainstUnits.respects_units, Louder.respects_units) == (True, False)

    def test_the_key_has_another_name(self):
        rows = TensorDict({"turn_ids": torch.zeros(1, 1).long(), "whose": torch.zeros(1, 1).long()}, [1])
        estimator = AgainstRows()
        estimator.set_keys(unit="whose")
        with pytest.raises(ValueError, match="count as one \\('whose'\\)"):
            estimator(rows)


class TestSharingOfSeveralLevels:
    """A group that comes apart twice: no tree of this package does."""

    unit = torch.tensor([[0, -20, -10], [0, -20, -11], [0, -12, -12], [0, -12, -12], [4, 4, 4], [5, -15, -15]])
    state = torch.tensor([[0, 1, 1], [0, 1, 0], [0, 0, 2], [0, 2, 1], [0, 1, 1], [0, 0, 0]])
    group = torch.tensor([7, 7, 7, 7, 7, 7])
    score = torch.randn(6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def others(self, i: int, k: int, *, same_turn: bool) -> list[float]:
        """Scores of the rows that do not depend on the action of row ``i`` at turn ``k``."""
        rows = [j for j in range(6) if self.unit[j, k] != self.unit[i, k]]
        return [
            float(self.score[j, t])
            for j in rows
            for t in range(3)
            if (t == k if same_turn else self.state[j, t] == self.state[i, k])
        ]

    def test_of_a_group(self):
        found = F.group_relative(self.score, self.group, "leave_one_out", "none", unit=self.unit)
        self.check(found, same_turn=True)

    def test_of_a_state(self):
        acted = torch.ones(6, 3, dtype=torch.bool)
        options = {"fallback": "return", "unit": self.unit}
        self.check(F.state_relative(self.score, self.state, self.group, acted, **options), same_turn=False)
        number = F.num_compared(self.state, self.group, acted, self.unit)
        assert number.tolist() == [[len(self.others(i, k, same_turn=False)) for k in range(3)] for i in range(6)]

    def check(self, found: Tensor, *, same_turn: bool) -> None:
        for i in range(6):
            for k in range(3):
                others = self.others(i, k, same_turn=same_turn)
                baseline = sum(others) / len(others) if others else 0.0
                assert float(found[i, k]) == pytest.approx(float(self.score[i, k]) - baseline, abs=1e-9)
