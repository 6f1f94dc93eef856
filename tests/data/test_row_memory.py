"""Rows take at most 40 bytes a token, and making them at most three times that."""

import subprocess
import sys

import numpy as np

from torchrl_llm import keys
from torchrl_llm.data import rows_from_episodes
from torchrl_llm.episode import Episode, Turn

BYTES_A_TOKEN = 40
"""Five columns of eight bytes would be more than there are."""


def long_episode(index: int, num_turns: int, length: int) -> Episode:
    """An episode of ``num_turns`` turns whose row has ``length`` tokens, half of them sampled."""
    episode = Episode(index, episode_id=index, group_id=index, env_id=0, task_id=index, rewards=[0.0] * num_turns)
    half = length // num_turns // 2
    context = np.arange(length)
    for turn in range(num_turns):
        start = (2 * turn + 1) * half
        tokens = context[start : start + half]
        episode.add(Turn(start, 0, tokens, np.zeros(half, np.float32), np.zeros(half, np.int64)))
    episode.end(context, keys.StopReason.LOST, terminated=True, truncated=False, success=False)
    return episode


def peak_of_rows(num_episodes: int) -> tuple[int, int]:
    """Bytes of the rows of long episodes, and the bytes by which making them raised this process's
    peak memory."""
    import resource  # POSIX only, as this test is

    episodes = [long_episode(i, num_turns=32, length=8_192) for i in range(num_episodes)]
    rows_from_episodes(episodes[:1])  # what is allocated once
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    rows = rows_from_episodes(episodes)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return sum(value.nbytes for value in rows.values(True, True)), (after - before) * 1_024


def test_rows_and_what_makes_them_fit_into_forty_bytes_a_token():
    # A process of its own: the peak of this one was set by the tests before.
    script = "from test_row_memory import peak_of_rows; print(*peak_of_rows(128))"
    here = __file__.rpartition("/")[0]
    done = subprocess.run([sys.executable, "-c", script], cwd=here, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    size, peak = map(int, done.stdout.split())
    tokens = 128 * 8_192
    assert 20 * tokens < size <= BYTES_A_TOKEN * tokens
    assert peak <= 3 * BYTES_A_TOKEN * tokens
