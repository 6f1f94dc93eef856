"""Whole runs that play with a vLLM engine. Needs vLLM."""

from __future__ import annotations

import pytest
import ranks_run
import torch
from small_runs import small_config, weights
from test_ranks import difference, results

from torchrl_llm import keys
from torchrl_llm.runs import build_run
from torchrl_llm.weight_update import WeightSyncError

pytest.importorskip("vllm", reason="needs vLLM: run make test-vllm")
pytestmark = pytest.mark.vllm

VLLM = {"policy": "vllm", "save_checkpoints": True, "checkpoint_interval": 1}


def play(config):
    """A run to its end: its history and its weights."""
    run = build_run(config)
    try:
        history = run.trainer.train()
        return history, weights(run)
    finally:
        run.close()


class TestRun:
    @pytest.mark.parametrize(
        "settings",
        [{}, {"lora_r": 4, "offload_base": True}, {"algo": "LLMPPO", "collector": "async"}],
        ids=["whole", "lora", "async"],
    )
    def test_each_update_reaches_the_engine(self, tmp_path, settings):
        history, _ = play(small_config(tmp_path, max_iterations=3, lr_actor=1e-3, **VLLM | settings))
        assert [row["policy/version"] for row in history] == [1, 2, 3]
        for row in history:
            assert row["policy/log_prob_gap"] <= 1e-5
            assert row["policy/parity_gap"] <= 1e-5
            assert row["data/staleness"] == 0

    def test_a_resumed_run_ends_in_the_same_bytes(self, tmp_path):
        settings = VLLM | {"lr_actor": 1e-3, "max_steps": 10_000}
        _, whole = play(small_config(tmp_path / "whole", max_iterations=4, **settings))
        play(small_config(tmp_path / "parts", max_iterations=2, **settings))
        more = {"resume": True, "accept_changes": ["max_iterations"]}
        _, parts = play(small_config(tmp_path / "parts", max_iterations=4, **settings | more))
        assert torch.equal(whole, parts)

    def test_playing_goes_on_during_updates(self, tmp_path):
        settings = {"collector": "async", "max_staleness": 1, "batch_size": 32, "lr_actor": 1e-3}
        history, _ = play(small_config(tmp_path, max_iterations=4, **VLLM | settings))
        assert history[0]["data/staleness"] == 0
        assert 0 < max(row["data/staleness"] for row in history) <= 1
        assert all(row["policy/parity_gap"] <= 1e-5 for row in history)

    def test_a_sync_that_does_not_take_ends_the_run(self, tmp_path):
        run = build_run(small_config(tmp_path, max_iterations=3, lr_actor=0.1, **VLLM))
        try:
            run.weight_sync._load = lambda *_, **__: None  # nothing is sent
            with pytest.raises(WeightSyncError, match="parity check"):
                run.trainer.train()
            assert run.trainer.iteration == 0
        finally:
            run.close()


class TestRay:
    @pytest.fixture(scope="class")
    def cluster(self):
        ray = pytest.importorskip("ray", reason="needs Ray: pip install 'torchrl-llm[ray]'")
        ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
        yield
        ray.shutdown()

    @pytest.mark.parametrize("weight_sync", [None, "adapter"], ids=["merged", "adapter"])
    def test_engines_on_workers_get_each_update(self, tmp_path, cluster, weight_sync):
        settings = VLLM | {
            "collector": "ray",
            "ray_workers": 1,
            "lora_r": 4,
            "lr_actor": 1e-3,
            "weight_sync": weight_sync,
        }
        history, _ = play(small_config(tmp_path, max_iterations=2, **settings))
        assert [row["policy/version"] for row in history] == [1, 2]
        assert all(row["policy/log_prob_gap"] <= 1e-5 for row in history)
        assert all(row["policy/parity_gap"] <= 1e-5 for row in history)


def said(*batches):
    """What was sampled, by episode."""
    rows = [row for each in batches for row in each]
    return {int(row[keys.EPISODE_ID]): row[keys.TOKENS][row[keys.ATTENTION_MASK]].tolist() for row in rows}


@pytest.mark.slow
class TestSeveral:
    """Two processes, each with an engine, sample and learn what one does."""

    @pytest.mark.parametrize("how", ["ddp", pytest.param("fsdp2", marks=pytest.mark.extra)])
    def test_they_train_as_one(self, tmp_path, how):
        first, second = (each[how.upper()] for each in results(tmp_path / "two", "laws", how.upper(), how=how))
        alone = ranks_run.train(tmp_path / "one", **ranks_run.VLLM[how.upper()])
        assert [each["ranks"] for each in (alone, first, second)] == [1, 2, 2]
        assert said(alone["batches"]) == said(first["batches"], second["batches"])
        assert difference(first["weights"], second["weights"]) == 0
        # A step of AdamW is 1e-3 at first, also where the gradient is little more than rounding.
        assert difference(alone["weights"], first["weights"]) <= 5e-4
        for name in ("optim/grad_norm_actor", "rollout/reward"):
            assert alone["history"][1][name] == pytest.approx(second["history"][1][name], rel=1e-3)
        for row in alone["history"] + first["history"] + second["history"]:
            assert max(row["policy/parity_gap"], row["policy/log_prob_gap"]) <= 1e-5
