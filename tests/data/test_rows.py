"""rows_from_episodes: what a row takes, and what it refuses."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torchrl_llm import keys
from torchrl_llm.data import HistoryRewrittenError, TurnViewError, rows_from_episodes
from torchrl_llm.episode import Episode, Turn


def episode(number, prompt, turns, *, group=None, env_id=0):
    """An episode of ``turns``, (response, feedback) each."""
    made = Episode(-1, number, number if group is None else group, env_id, task_id=3)
    context = np.array(prompt)
    for response, feedback in turns:
        size = len(response)
        made.add(Turn(len(context), 0, np.array(response), np.full(size, -0.5), np.full(size, 2)))
        made.rewards.append(0.25)
        context = np.concatenate([context, response, feedback]).astype(np.int64)
    made.end(context, keys.StopReason.WON, terminated=True, truncated=False, success=True)
    return made


class Peak(TorchDispatchMode):
    """The largest number of bytes that tensors made inside held at a time."""

    def __init__(self):
        super().__init__()
        self.held, self.peak = {}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.held[storage.data_ptr()] = (
                    storage.nbytes(),
                    torch.multiprocessing.reductions.StorageWeakRef(storage),
                )
        self.held = {place: entry for place, entry in self.held.items() if not entry[1].expired()}
        self.peak = max(self.peak, sum(size for size, _ in self.held.values()))
        return result


class TestMemory:
    def test_rows_take_forty_bytes_a_token_and_building_them_three_times_that(self):
        """32 episodes of 32 turns and 8,192 tokens: their turn view is 130 MB."""
        size, turns, length = 32, 32, 8192
        response, feedback = [7] * 128, [5] * 128
        episodes = [episode(i, [], [(response, feedback)] * turns) for i in range(size)]
        assert episodes[0].length == length
        tokens = size * length
        tracemalloc.start()
        with Peak() as peak:
            rows = rows_from_episodes(episodes)
        outside = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert rows[keys.TOKENS].shape == (size, length)
        assert sum(value.nbytes for value in rows.values(True, True)) <= 40 * tokens
        assert peak.peak + outside <= 3 * 40 * tokens

    def test_an_episode_holds_every_token_once(self):
        made = episode(0, [1, 2], [([3, 4], [5]), ([6], [7, 8])])
        assert [context.tolist() for context in made.contexts] == [[1, 2, 3, 4, 5, 6, 7, 8]]
        assert sum(len(turn.tokens) for turn in made.turns) == 3


class TestRows:
    def test_episodes_of_different_lengths(self):
        rows = rows_from_episodes([episode(7, [1], [([3, 4], [5]), ([6], [])]), episode(8, [2], [([9], [1])])])
        assert rows[keys.TOKENS].tolist() == [[1, 3, 4, 5, 6], [2, 9, 1, 0, 0]]
        assert rows[keys.TURN_IDS].tolist() == [[-1, 0, 0, -1, 1], [-1, 0, -1, -1, -1]]
        assert rows[keys.POLICY_VERSION].tolist() == [[-1, 2, 2, -1, 2], [-1, 2, -1, -1, -1]]
        assert rows[keys.ATTENTION_MASK].sum(-1).tolist() == [5, 3]
        assert rows[keys.TURN_REWARD].tolist() == [[0.25, 0.25], [0.25, 0.0]]
        assert rows[keys.TURN_TERMINATED].tolist() == [[False, True], [True, False]]
        assert rows[keys.TURN_STOP_REASON].tolist() == [[0, 1], [1, 0]]
        assert rows[keys.TASK_ID].tolist() == [3, 3]
        dtypes = {name: value.dtype for name, value in rows.items(True, True)}
        assert dtypes == {name: keys.ROW_VIEW[name].dtype for name in dtypes}

    def test_segments_lie_one_column_apart(self):
        made = Episode(-1, 0, 0, 0)
        for start, segment, token in ((2, 0, 3), (1, 1, 4)):
            made.add(Turn(start, segment, np.array([token]), np.array([-1.0]), np.array([0])))
            made.rewards.append(0.0)
            if segment == 0:
                made.end_segment(np.array([1, 2]))
        made.end(np.array([1, 4, 9]), keys.StopReason.LOST, terminated=True, truncated=False, success=False)
        rows = rows_from_episodes([made])
        assert rows[keys.TOKENS].tolist() == [[1, 2, 3, 0, 1, 4, 9]]
        assert rows[keys.ATTENTION_MASK].int().tolist() == [[1, 1, 1, 0, 1, 1, 1]]
        assert rows[keys.TURN_IDS].tolist() == [[-1, -1, 0, -1, -1, 1, -1]]
        assert rows.get(keys.TASK_ID, None) is None

    def test_a_response_that_is_not_in_the_context(self):
        made = episode(5, [1], [([3], []), ([4], [])])
        made.contexts[0][2] = 9
        with pytest.raises(HistoryRewrittenError, match="Episode 5, turn 1"):
            rows_from_episodes([made])

    def test_what_does_not_fit(self):
        with pytest.raises(TurnViewError, match="max_model_len=3"):
            rows_from_episodes([episode(0, [1], [([3], [4, 5])])], max_model_len=3)

    def test_an_episode_that_is_there_twice(self):
        with pytest.raises(TurnViewError, match="more than once"):
            rows_from_episodes([episode(0, [1], [([3], [])])] * 2)
