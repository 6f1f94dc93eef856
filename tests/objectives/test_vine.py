"""Credit from continuations, against its definition; that it is unbiased is in
test_exact_gradient.py."""

from __future__ import annotations

import math

import pytest
import torch
from conversations import DOUBLE, close, law, layouts, make_rows
from hypothesis import strategies as st
from torch import Tensor

from torchrl_llm import keys
from torchrl_llm.objectives import TurnVine
from torchrl_llm.utils.options import ConfigError

NAN = float("nan")


def valued(rows, seed: int, share: float = 0.5):
    """With values of a part of the turns, and numbers where nobody may read them."""
    generator = torch.Generator().manual_seed(seed)
    shape = rows[keys.TURN_MASK].shape
    value = torch.randn(shape, generator=generator, dtype=DOUBLE)
    hidden = torch.rand(shape, generator=generator) > share
    rows[keys.SAMPLED_VALUE] = value.masked_fill(hidden, NAN)
    return rows


def by_definition(rows, gamma: float) -> Tensor:
    """The advantage of each turn with a token, turn by turn, for ``lmbda=0``."""
    reward, mask, value = (rows[key].tolist() for key in (keys.TURN_REWARD, keys.TURN_MASK, keys.SAMPLED_VALUE))
    ids, group = rows[keys.TURN_IDS].tolist(), rows[keys.GROUP_ID].tolist()
    if 1 in [group.count(each) for each in group]:
        group = [0] * len(group)
    size, turns = len(reward), len(reward[0])

    def acted(i: int, k: int) -> bool:
        return mask[i][k] and k in ids[i]

    def to_go(i: int, k: int, until: int = turns) -> float:
        """Of the turns from k on, and of what the value there says of the rest."""
        if k == turns:
            return 0.0
        if k == until:
            return value[i][k]
        if not mask[i][k]:
            return to_go(i, k + 1, until)
        return reward[i][k] + gamma * to_go(i, k + 1, until)

    found = torch.zeros(size, turns, dtype=DOUBLE)
    for i in range(size):
        for k in range(turns):
            if not acted(i, k):
                continue
            if not math.isnan(value[i][k]):
                after = [t for t in range(k + 1, turns) if acted(i, t) and not math.isnan(value[i][t])]
                found[i, k] = to_go(i, k, after[0] if after else turns) - value[i][k]
            else:
                others = [to_go(j, k) if mask[j][k] else 0.0 for j in range(size) if j != i and group[j] == group[i]]
                found[i, k] = to_go(i, k) - sum(others) / len(others) if others else 0.0
    return found


class TestTurnVine:
    @law(layouts(), st.sampled_from([1.0, 0.7]), st.sampled_from([1, 2]))
    def test_against_the_definition(self, drawn, gamma, group_size):
        rows = valued(make_rows(*drawn, group_size), drawn[1])
        expected = by_definition(rows, gamma)
        out = TurnVine(gamma=gamma)(rows)
        close(out[keys.TURN_ADVANTAGE], expected)

    def test_lambda_takes_the_episodes_own_return(self):
        rows = make_rows([[(True, 1, 1), (True, 1, 1), (True, 1, 1)]])
        rows[keys.SAMPLED_VALUE] = torch.tensor([[0.5, 9.0, -7.0]], dtype=DOUBLE)
        returns = rows[keys.TURN_REWARD].flip(1).cumsum(1).flip(1)
        out = TurnVine(lmbda=1.0)(rows)
        close(out[keys.TURN_ADVANTAGE], returns - rows[keys.SAMPLED_VALUE])
        close(out[keys.TURN_VALUE_TARGET], returns)

    def test_a_kl_is_paid_by_what_follows_and_not_by_values(self):
        rows = valued(make_rows([[(True, 1, 2), (True, 1, 1)], [(True, 1, 1), (True, 0, 1)]]), 3)
        plain = TurnVine()(rows.clone())[keys.TURN_ADVANTAGE]
        gap = (rows[keys.SAMPLE_LOG_PROB] - rows[keys.REF_LOG_PROB]).nan_to_num(0.0)
        gap = torch.where(rows[keys.TURN_IDS] >= 0, gap, 0.0)
        paid = torch.stack([(gap * (rows[keys.TURN_IDS] >= k)).sum(1) for k in range(2)], 1)
        if keys.OLD_LOG_PROB in rows:
            del rows[keys.OLD_LOG_PROB]
        close(TurnVine(kl_coeff=0.3)(rows)[keys.TURN_ADVANTAGE], plain - 0.3 * paid)

    def test_rows_without_values(self):
        with pytest.raises(KeyError, match=r"sampled_value.*TurnCollector\(branches=Branches"):
            TurnVine()(make_rows([[(True, 1, 1)]]))

    def test_a_wrong_option(self):
        with pytest.raises(ConfigError, match="lmbda"):
            TurnVine(lmbda=2.0)
