"""Which rows are chosen, and what their length costs."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from torchrl_llm.data import cat_rows, nonzero_variance, overlong, penalize_overlong


def rows_of(ids, reward, *, mask=None, truncated=None, **more) -> TensorDict:
    ids, reward = torch.tensor(ids), torch.tensor(reward)
    mask = torch.ones_like(reward, dtype=torch.bool) if mask is None else torch.tensor(mask)
    cut = torch.zeros_like(mask) if truncated is None else torch.tensor(truncated)
    turn = {"reward": reward, "mask": mask, "truncated": cut, "terminated": ~cut}
    rows = {"turn_ids": ids, "attention_mask": ids >= -1, "turn": turn}
    return TensorDict(rows | {name: torch.tensor(x) for name, x in more.items()}, batch_size=[len(ids)])


class TestInformative:
    def test_whole_groups_in_which_some_token_has_an_advantage(self):
        advantage = [[0.0, 0.0], [0.0, -0.5], [0.0, 0.0], [0.0, 0.0], [1e-7, 0.0]]
        rows = rows_of([[0, 1]] * 5, [[1.0, 0.0]] * 5, advantage=advantage, group_id=[4, 4, 2, 2, 9])
        assert nonzero_variance(rows).tolist() == [True, True, False, False, False]

    def test_needs_credit(self):
        with pytest.raises(KeyError, match="Run the value estimator first"):
            nonzero_variance(rows_of([[0]], [[1.0]], group_id=[1]))


class TestOverlong:
    def test_truncated_or_with_a_full_response(self):
        ids = [[0, 0, -1, 1, -1, -1], [0, 0, 0, -1, 1, -1], [0, -1, 1, -1, -1, -1], [0, -1, 1, -1, -1, -1]]
        cut = [[False, False], [False, False], [False, True], [True, False]]
        mask = [[True, True], [True, True], [True, True], [False, True]]
        rows = rows_of(ids, [[0.0, 0.0]] * 4, mask=mask, truncated=cut)
        assert overlong(rows, 3).tolist() == [False, True, True, False]
        # over anyhow: no truncation
        rows["turn", "terminated"] = torch.ones_like(rows["turn", "terminated"])
        assert overlong(rows, 3).tolist() == [False, True, False, False]

    def test_the_penalty_is_of_the_turn_and_grows_with_its_length(self):
        rows = rows_of([[0, -1, 1, 1, 1, -1, 2, 2, 2, 2]], [[1.0, 1.0, 1.0, 7.0]], mask=[[True] * 3 + [False]])
        out = penalize_overlong(rows, 0.5, max_response_length=4, buffer=2)
        assert out is rows
        assert rows["turn", "reward"].tolist() == [[1.0, 0.75, 0.5, 7.0]]
        assert rows["turn", "reward"].dtype == torch.float32


class TestCatRows:
    def test_padding_is_that_of_rows(self):
        narrow = rows_of([[0]], [[1.0]], tokens=[[5]], policy_version=[[3]], sample_log_prob=[[-0.5]], group_id=[1])
        wide = rows_of([[-1, 0, 1]], [[1.0, 2.0]], tokens=[[5, 6, 7]], policy_version=[[-1, 3, 3]],
                       sample_log_prob=[[0.0, -0.5, -1.0]], group_id=[2])  # fmt: skip
        both = cat_rows([narrow, wide])
        assert both["turn_ids"].tolist() == [[0, -1, -1], [-1, 0, 1]]
        assert both["policy_version"].tolist() == [[3, -1, -1], [-1, 3, 3]]
        assert both["tokens"].tolist() == [[5, 0, 0], [5, 6, 7]]
        assert both["attention_mask"].tolist() == [[True, False, False], [True, True, True]]
        assert both["turn", "mask"].tolist() == [[True, False], [True, True]]
        assert both["turn", "reward"].tolist() == [[1.0, 0.0], [1.0, 2.0]]
        assert both["group_id"].tolist() == [1, 2]
        assert narrow["turn_ids"].shape == (1, 1)

    def test_a_width_equal_to_the_number_of_turns_is_no_matter(self):
        a = rows_of([[0, 1]], [[1.0, 2.0]], tokens=[[5, 6]])
        b = rows_of([[0, 1, 2, 3]], [[1.0, 2.0, 3.0]], tokens=[[5, 6, 7, 8]])
        both = cat_rows([a, b])
        assert both["turn", "reward"].shape == (2, 3)
        assert both["tokens"].shape == (2, 4)
