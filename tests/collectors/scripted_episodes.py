"""What the tests of collectors share: environments and policies without a model, and what is read
from their batches."""

from __future__ import annotations

import random
import time
from contextlib import contextmanager

import numpy as np
import torch

from torchrl_llm import keys
from torchrl_llm.collectors import AsyncTurnCollector
from torchrl_llm.envs import GEMEnv
from torchrl_llm.modules.policy import TurnResponse
from torchrl_llm.testing.environments import StopOrGo
from torchrl_llm.testing.policies import ScriptedPolicy


def length(episode):
    """How many turns :func:`script` plays of an episode of StopOrGo."""
    return random.Random(episode).choice([1, 1, 2, 3, 6])


def script(episode, turn, context):
    return "stop" if turn == length(episode) - 1 else f"go on {episode}.{turn}"


def make_env(env=StopOrGo, **kwargs):
    return GEMEnv(env, **{"max_output_tokens": 16, **kwargs})


class Streaming(ScriptedPolicy):
    """Answers a request after 1 to ``delay`` polls, drawn by episode and turn; one version a token,
    as it is sampled."""

    owns_weights = True

    def __init__(self, *args, delay=5, seconds=0.0, **kwargs):
        super().__init__(*args, **kwargs)
        self.delay, self.seconds = delay, seconds
        self.running = {}
        self.joined = 0  # requests that came while others were half answered
        self.most = 0
        self.polls = 0

    def submit(self, request):
        assert request.slot not in self.running
        self.joined += any(versions for _, versions in self.running.values())
        self.running[request.slot] = request, []
        self.most = max(self.most, len(self.running))

    @property
    def pending(self):
        return len(self.running)

    def cancel(self, slots=None):
        for slot in list(self.running if slots is None else slots):
            self.running.pop(slot, None)

    def needs(self, request):
        return random.Random(f"{request.episode_id} {request.turn}").randint(1, self.delay)

    def poll(self):
        time.sleep(self.seconds)
        self.polls += 1
        answers = []
        for slot, (request, versions) in list(self.running.items()):
            versions.append(self.policy_version)
            if len(versions) < self.needs(request):
                continue
            del self.running[slot]
            (answer,) = self._answer([request], greedy=False)
            spread = np.array([versions[min(i, len(versions) - 1)] for i in range(len(answer.tokens))])
            answers.append(TurnResponse(slot, answer.tokens, answer.log_probs, spread))
        return answers


@contextmanager
def async_collectors():
    """Makes AsyncTurnCollectors, and shuts them down at the end."""
    made = []

    def collect(*args, **kwargs):
        made.append(AsyncTurnCollector(*args, **kwargs))
        return made[-1]

    try:
        yield collect
    finally:
        for collector in made:
            collector.shutdown(raise_on_error=False)


def episodes(batch):
    return batch["episode_id"].tolist()


def versions(batch):
    return batch[keys.POLICY_VERSION][batch[keys.TURN_IDS] >= 0]


def same(batch, other, *, atol=0.0):
    """Whether two batches are equal; their log-probs to ``atol``."""
    assert set(batch.keys(True, True)) == set(other.keys(True, True))
    assert batch.shape == other.shape
    for key in batch.keys(True, True):
        assert batch[key].dtype == other[key].dtype, key
        assert batch[key].shape == other[key].shape, key
        if key == keys.SAMPLE_LOG_PROB:
            torch.testing.assert_close(batch[key], other[key], rtol=0, atol=atol)
        else:
            assert batch[key].equal(other[key]), key
    return True
