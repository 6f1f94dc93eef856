"""EpisodeQueue: how old an episode may be, to the version."""

from itertools import count

import numpy as np
import pytest

from torchrl_llm.collectors._queue import EpisodeQueue
from torchrl_llm.episode import Episode, Turn
from torchrl_llm.keys import StopReason


def finished(index: int, version: int, group: int) -> Episode:
    """An episode of one turn, sampled with the weights of ``version``."""
    episode = Episode(index, index, group, 0, rewards=[0.0])
    episode.add(Turn(0, 0, np.array([1]), np.zeros(1), np.array([version])))
    episode.end(np.array([1]), StopReason.LOST, terminated=True, truncated=False, success=False)
    return episode


def queue_of(*episodes: Episode, group_size: int = 1) -> EpisodeQueue:
    rest = count(100)
    queue = EpisodeQueue(
        lambda: Episode(i := next(rest), i, i, 0),
        lambda episode: None,
        group_size=group_size,
        max_faults=0,
        keep_failed=False,
    )
    for episode in episodes:
        queue.add(episode)
    return queue


class TestAge:
    @pytest.mark.parametrize("max_staleness", [0, 1, 3])
    def test_one_of_the_oldest_version_that_may_be_is_delivered(self, max_staleness):
        queue = queue_of(finished(0, version=5, group=0))
        (episode,) = queue.pop_batch(1, 5 + max_staleness, max_staleness)
        assert (episode.episode_id, queue.dropped.total()) == (0, 0)

    @pytest.mark.parametrize("max_staleness", [0, 1, 3])
    def test_one_that_is_a_version_older_is_dropped(self, max_staleness):
        queue = queue_of(finished(0, version=5, group=0))
        assert queue.pop_batch(1, 6 + max_staleness, max_staleness) is None
        assert queue.dropped == {"stale": 1}

    def test_its_group_is_dropped_with_it(self):
        queue = queue_of(finished(0, 4, group=0), finished(1, 5, group=0), finished(2, 5, group=1), group_size=2)
        assert queue.pop_batch(1, 6, 1)[0].episode_id == 2
        assert queue.dropped == {"stale": 2}
