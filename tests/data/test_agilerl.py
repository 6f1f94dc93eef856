"""rows_from_agilerl: AgileRL's layout, one column shorter and shifted by one."""

from __future__ import annotations

import pytest
import torch
from rows_from_agilerl import rows_from_agilerl

from torchrl_llm import keys


def agilerl_episode(ids, spans, max_turns, rewards):
    """What ``TokenObservationWrapper.get_episode_data`` of AgileRL 2.9.1 returns for generations at
    ``spans``."""
    ids = torch.tensor([ids])
    mask = torch.zeros(1, ids.shape[1] - 1, dtype=torch.bool)
    turn_ids = torch.full_like(mask, -1, dtype=torch.int64)
    for turn, (start, end) in enumerate(spans):
        mask[0, start - 1 : end - 1] = True
        turn_ids[0, start - 1 : end - 1] = turn
    return ids, mask, turn_ids, torch.tensor(rewards + [0.0] * (max_turns - len(rewards)))


@pytest.fixture
def episodes():
    # feedback: 5 and 8
    one = agilerl_episode([1, 2, 3, 4, 5, 6, 7, 8], [(2, 4), (5, 7)], 3, [0.5, 1.0])
    two = agilerl_episode([9, 10, 11], [(1, 3)], 3, [-0.1])
    return [list(part) for part in zip(one, two, strict=True)]


class TestRowsFromAgilerl:
    def test_lists(self, episodes):
        ids, masks, turn_ids, rewards = episodes
        logps = [torch.tensor([-1.0, -2.0, -3.0, -4.0]), torch.tensor([-5.0, -6.0])]
        rows = rows_from_agilerl(ids, masks, rewards, turn_ids, sampling_logps=logps, group_size=2)
        assert rows[keys.TOKENS].tolist() == [[1, 2, 3, 4, 5, 6, 7, 8], [9, 10, 11, 0, 0, 0, 0, 0]]
        assert rows[keys.ATTENTION_MASK].sum(-1).tolist() == [8, 3]
        assert rows[keys.TURN_IDS].tolist() == [[-1, -1, 0, 0, -1, 1, 1, -1], [-1, 0, 0, -1, -1, -1, -1, -1]]
        assert rows[keys.SAMPLE_LOG_PROB].tolist() == [[0, 0, -1, -2, 0, -3, -4, 0], [0, -5, -6, 0, 0, 0, 0, 0]]
        assert rows[keys.POLICY_VERSION].max() == 0
        assert torch.equal(rows[keys.POLICY_VERSION] >= 0, rows[keys.TURN_IDS] >= 0)
        torch.testing.assert_close(rows[keys.TURN_REWARD], torch.tensor([[0.5, 1.0, 0.0], [-0.1, 0.0, 0.0]]))
        assert rows[keys.TURN_MASK].tolist() == [[True, True, False], [True, False, False]]
        assert rows[keys.TURN_TERMINATED].tolist() == [[False, True, False], [True, False, False]]
        assert not rows[keys.TURN_TRUNCATED].any()
        assert rows[keys.GROUP_ID].tolist() == [0, 0]
        assert rows[keys.EPISODE_ID].tolist() == [0, 1]

    def test_padded_tensors_end_with_the_last_action(self, episodes):
        pad = lambda x, value: torch.nn.functional.pad(x, (0, 8 - x.shape[1]), value=value)  # noqa: E731
        ids = torch.cat([pad(x, 2) for x in episodes[0]])  # the pad id is also an ordinary id
        masks, turn_ids = (
            torch.cat([torch.nn.functional.pad(x, (0, 7 - x.shape[1]), value=value) for x in part])
            for part, value in ((episodes[1], False), (episodes[2], -1))
        )
        rows = rows_from_agilerl(ids, masks, torch.stack(episodes[3]), turn_ids)
        assert rows[keys.TOKENS].tolist() == [[1, 2, 3, 4, 5, 6, 7, 0], [9, 10, 11, 0, 0, 0, 0, 0]]
        assert rows[keys.ATTENTION_MASK].sum(-1).tolist() == [7, 3]
        assert rows[keys.TURN_IDS][0].tolist() == [-1, -1, 0, 0, -1, 1, 1, -1]
        assert rows.get(keys.SAMPLE_LOG_PROB, None) is None

    def test_single_turn_with_groups(self):
        ids = [torch.tensor([[1, 2, 3], [1, 4, 5]]), torch.tensor([[6, 7]])]
        masks = [torch.tensor([[True, True], [True, False]]), torch.tensor([[True]])]
        rows = rows_from_agilerl(ids, masks, torch.tensor([1, 0, 1]))
        assert rows[keys.TURN_IDS].tolist() == [[-1, 0, 0], [-1, 0, -1], [-1, 0, -1]]
        assert rows[keys.TURN_REWARD].tolist() == [[1.0], [0.0], [1.0]]
        assert rows[keys.TURN_REWARD].dtype == torch.float32

    def test_the_action_mask_has_the_last_word(self, episodes):
        ids, masks, turn_ids, rewards = episodes
        masks[0][0, 2] = False
        rows = rows_from_agilerl(ids, masks, rewards, turn_ids)
        assert rows[keys.TURN_IDS][0].tolist() == [-1, -1, 0, -1, -1, 1, 1, -1]

    def test_errors(self, episodes):
        ids, masks, turn_ids, rewards = episodes
        with pytest.raises(ValueError, match="do not fit together"):
            rows_from_agilerl(ids, ids, rewards, turn_ids)
        with pytest.raises(ValueError, match=r"reward 1\.0 in turn 1.*of turn 0"):
            rows_from_agilerl(ids, masks, rewards)
        with pytest.raises(ValueError, match=r"holds \[1, 2\] numbers a row.*\[4, 2\]"):
            rows_from_agilerl(ids, masks, rewards, turn_ids, sampling_logps=[torch.zeros(1), torch.zeros(2)])
