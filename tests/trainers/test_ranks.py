"""Training on several processes is the training of one: real processes, gloo."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from torchrl_llm import keys

SCRIPT = Path(__file__).with_name("ranks_run.py")
LIMIT = 240


def start(out, what, num_processes):
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", str(num_processes)]
    launch += ["--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no", "--main_process_port=0"]
    launch += ["--multi_gpu"] if num_processes > 1 else ["--cpu"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    command = [*launch, str(SCRIPT), str(out), what]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False)


def results(out, what, num_processes):
    done = start(out, what, num_processes)
    assert done.returncode == 0, done.stderr[-3000:]
    return [torch.load(f"{out}-{what}.{rank}.pt", weights_only=False) for rank in range(num_processes)]


def difference(a, b):
    return max(float((a[name] - b[name]).abs().max()) for name in a)


@pytest.mark.slow
class TestLaws:
    @pytest.fixture(scope="class")
    def both(self, tmp_path_factory):
        where = tmp_path_factory.mktemp("laws")
        return results(where / "one", "laws", 1)[0], results(where / "two", "laws", 2)

    @pytest.mark.parametrize("name", ["LLMREINFORCE", "LLMPPO", "GRPO", "LoRA"])
    def test_weights_after_three_iterations(self, both, name):
        one, two = both[0][name], [result[name] for result in both[1]]
        assert [result["ranks"] for result in (one, *two)] == [1, 2, 2]
        assert difference(two[0]["weights"], two[1]["weights"]) == 0
        assert difference(one["weights"], two[0]["weights"]) < 1e-9
        for mine, theirs in zip(one["history"], two[1]["history"], strict=True):
            same = {metric for metric in mine if not metric.startswith(("time/", "data/padding", "policy/ESS"))}
            for metric in same - {"critic/explained_variance", "critic/update_explained_variance"}:
                assert mine[metric] == pytest.approx(theirs[metric], rel=1e-5, abs=1e-6, nan_ok=True), metric

    def test_weights_moved(self, both):
        first, second = (both[0][name]["weights"] for name in ("LLMREINFORCE", "GRPO"))
        assert difference(first, second) > 1e-3

    @pytest.mark.parametrize("name", ["GRPO", "float32"])
    def test_the_ranks_play_the_tickets_of_one_process(self, both, name):
        one, two = both[0][name]["batches"], [result[name]["batches"] for result in both[1]]
        for rows in two:
            assert (rows[keys.GROUP_ID].unique(return_counts=True)[1] % 4 == 0).all()
        assert not set(two[0][keys.GROUP_ID].tolist()) & set(two[1][keys.GROUP_ID].tolist())
        said = [
            {
                int(row[keys.EPISODE_ID]): row[keys.TOKENS][row[keys.ATTENTION_MASK]].tolist()
                for rows in batches
                for row in rows
            }
            for batches in ([one], two)
        ]
        assert said[0] == said[1]

    def test_a_gradient_in_float32(self, both):
        one, two = both[0]["float32"], both[1][0]["float32"]
        assert one["history"][0]["optim/grad_norm_actor"] == pytest.approx(
            two["history"][0]["optim/grad_norm_actor"], rel=1e-5
        )

    def test_the_first_rank_writes(self, both):
        assert both[1][0]["GRPO"]["files"] == both[0]["GRPO"]["files"]


@pytest.mark.slow
class TestUneven:
    def test_ranks_with_nothing_to_learn_from_stay_in_step(self, tmp_path):
        first, second = results(tmp_path / "run", "uneven", 2)
        assert difference(first["weights"], second["weights"]) == 0
        assert 0 in first["spoken"] + second["spoken"]
        assert first["spoken"] != second["spoken"]


@pytest.mark.slow
class TestResume:
    def test_as_many_ranks_go_on_in_the_same_bytes(self, tmp_path):
        whole = results(tmp_path / "whole", "2", 2)[0]
        results(tmp_path / "parts", "1", 2)
        parts = results(tmp_path / "parts", "2", 2)[0]
        assert difference(whole["weights"], parts["weights"]) == 0

    def test_a_rank_that_dies_ends_the_run_with_an_error(self, tmp_path):
        began = time.monotonic()
        done = start(tmp_path / "run", "dies", 2)
        assert done.returncode != 0
        assert "SIGKILL" in done.stderr or "exitcode: -9" in done.stderr or "Signal 9" in done.stderr
        assert time.monotonic() - began < LIMIT / 2
        assert list((tmp_path / "run" / "checkpoints").glob("checkpoint-*"))
