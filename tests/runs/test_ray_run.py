"""Whole runs with rollouts on Ray: the run of one process, faults and all."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import LIMIT

from torchrl_llm.runs import RunSettings, build_run
from torchrl_llm.trainers import Callback

pytestmark = pytest.mark.ray
ray = pytest.importorskip("ray", reason="needs Ray: run make test-scale")
ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "examples" / "configs"
COMMON = {
    "model_path": "tiny",
    "device": "cpu",
    "num_envs": 8,
    "batch_size": 32,
    "max_model_len": 256,
    "max_output_tokens": 16,
    "max_iterations": 3,
    "evaluation_interval": 2,
    "evaluation_episodes": 16,
    "lr_actor": 1e-3,
    "progress": False,
    "overwrite": True,
}


@pytest.fixture(scope="module", autouse=True)
def cluster():
    ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture
def play(tmp_path):
    def play(name, *, callbacks=(), **settings):
        run = build_run(RunSettings.from_values(**COMMON | settings, output_dir=tmp_path / name), callbacks=callbacks)
        try:
            history = run.trainer.train()
        finally:
            run.close()
        parameters = run.trainer.loss.named_parameters()
        return history, {name: value.detach().clone() for name, value in parameters if value.requires_grad}

    return play


def difference(a, b):
    return max(float((a[name] - b[name]).abs().max()) for name in a)


class Kill(Callback):
    """Kills a worker after an iteration."""

    def __init__(self, iteration):
        self.iteration = iteration

    def on_iteration(self, trainer, metrics):
        if trainer.iteration == self.iteration:
            os.kill(trainer.collector._executor.workers[0].info.pid, signal.SIGKILL)


LORA = {"algo": "LLMPPO", "lora_r": 4, "critic_warmup": 1}
GRPO = {"algo": "GRPO", "group_size": 4, "lora_r": 0, "kl_coeff": 0.01}


def agree(here, there):
    for mine, theirs in zip(here, there, strict=True):
        for name in ("rollout/reward", "rollout/steps", "rollout/success", "policy/version"):
            assert mine[name] == pytest.approx(theirs[name], abs=1e-6)
        assert theirs["policy/parity_gap"] < 1e-5
        assert theirs["policy/log_prob_gap"] < 1e-5


@pytest.mark.slow
class TestRun:
    def test_it_is_the_run_of_one_process_whoever_is_killed(self, play):
        (here, weights), (there, same) = (
            play("here", **GRPO),
            play("ray", callbacks=[Kill(1)], collector="ray", **GRPO),
        )
        agree(here, there)
        assert [row["data/lost_workers"] for row in there] == [0, 1, 1]
        assert difference(weights, same) < 1e-4

    def test_it_goes_on_where_it_stopped_with_another_number_of_workers(self, play):
        whole, weights = play("whole", **LORA)
        play("parts", collector="ray", **LORA | {"max_iterations": 2})
        more = {"resume": True, "overwrite": False, "ray_workers": 1, "accept_changes": ["max_iterations"]}
        history, same = play("parts", collector="ray", **LORA | more)
        agree(whole, history)
        assert difference(weights, same) < 1e-4

    def test_a_stale_run_trains_on_what_older_weights_played(self, play):
        history, _ = play("stale", collector="ray", ray_workers=1, max_staleness=1, **GRPO | {"max_iterations": 6})
        assert 0 < max(row["data/staleness"] for row in history) <= 1
        assert [row["rollout/episodes"] for row in history] == [32.0 * (i + 1) for i in range(6)]

    def test_weights_to_start_from_reach_the_workers(self, play, tmp_path):
        once = {**LORA, "max_iterations": 1}
        play("first", **once)
        start = {"init_from": tmp_path / "first" / "checkpoints" / "last", "merge_lora_configs": True, "lora_r": 8}
        here, _ = play("here", **once | start)
        there, _ = play("there", collector="ray", ray_workers=1, **once | start)
        agree(here, there)


@pytest.mark.slow
class TestExample:
    @pytest.mark.parametrize("config", [None, "accelerate_fsdp2.yaml"], ids=["one process", "two, sharded weights"])
    def test_it_runs_and_reports(self, tmp_path, config):
        launch = ["-m", "accelerate.commands.launch", "--config_file", str(CONFIGS / config)] if config else []
        command = [sys.executable, *launch, str(ROOT / "examples" / "multiturn_ray.py")]
        command += ["--config", str(CONFIGS / "tiny_reinforce_llm.yaml"), "--output-dir", str(tmp_path / "run")]
        command += ["--final-episodes", "16", "--evaluation-episodes", "16", "--ray-workers", "1", "--batch-size", "32"]
        command += ["--max-iterations", "2", "--lora-r", "4"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        result = json.loads((tmp_path / "run" / "result.json").read_text())
        assert (result["iterations"], result["episodes"]) == (2, 64)
        assert 0 <= result["success_after"] <= 1
