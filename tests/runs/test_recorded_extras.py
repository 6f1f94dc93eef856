"""Extras of an environment in a whole run: rows that the update sees, recordings, the page."""

from __future__ import annotations

import json
import re
import zlib
from base64 import b64decode
from functools import partial

import pytest
from small_runs import small_config

from torchrl_llm import keys
from torchrl_llm.report import run_and_report
from torchrl_llm.runs import build_run
from torchrl_llm.runs.recording import read_recording
from torchrl_llm.testing.worlds import Line, most_worth
from torchrl_llm.trainers import Callback


class Regrets(Callback):
    """The largest difference between an episode's regrets and 1 minus its return, by iteration."""

    def __init__(self):
        self.worst = []

    def on_batch(self, trainer, rows, metrics):
        regret, reward = rows[keys.turn_extra("regret")], rows[keys.TURN_REWARD]
        self.worst.append(float((regret.sum(-1) + reward.sum(-1) - 1).abs().max()))


@pytest.mark.parametrize("collector", ["turn", "async"])
@pytest.mark.extra
def test_they_reach_the_update_the_recordings_and_the_page(tmp_path, collector):
    regrets = Regrets()
    config = small_config(tmp_path, "GRPO", env_name="world:coins", collector=collector, max_iterations=2)
    run_and_report(config, partial(build_run, config, callbacks=[regrets]))
    assert len(regrets.worst) == 2
    assert max(regrets.worst) < 1e-5
    for name in ("before", "iteration-000000000001", "iteration-000000000002", "after"):
        recording = read_recording(config.output.output_dir / "rollouts" / f"{name}.safetensors")
        taken = recording.arrays["turn.mask"]
        assert set(recording.extras["state"][taken].tolist()) == set(recording.texts)
        # In the first turn the state is the task's, of which the best plan pays 1.
        for state, regret in zip(recording.extras["state"][:, 0], recording.extras["regret"], strict=True):
            line = Line.read(recording.texts[int(state)])
            assert line.moves == 5
            assert 0 <= regret[0] <= 1 / most_worth(line) * 2 + 0.1 + 1e-6
    page = (config.output.output_dir / "report.html").read_text()
    block = re.search(r'<script type="text/plain" id="index">(.*?)</script>', page)[1]
    index = json.loads(zlib.decompress(b64decode(block)))
    episode = index["groups"][0]["episodes"][0]
    assert len(episode["extras"]["regret"]) == len(episode["texts"]["state"]) == 5
    assert index["pieces"][episode["texts"]["state"][0]].endswith("moves 5")
