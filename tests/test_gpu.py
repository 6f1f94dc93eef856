"""benchmarks/gpu.py on a CPU, with small shapes: what it checks passes, and what fails is reported."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("gpu_benchmark", ROOT / "benchmarks" / "gpu.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    path = list(sys.path)
    spec.loader.exec_module(module)
    yield module
    sys.path[:] = path
    del sys.modules[spec.name]


def report(script, tmp_path, what, only) -> tuple[int, dict]:
    flags = ["--device=cpu", "--tiny", f"--only={only}", f"--output={tmp_path / 'out.json'}"]
    failed = script.main([what, *flags])
    return failed, json.loads((tmp_path / "out.json").read_text())


class TestChecks:
    @pytest.mark.parametrize("only", ["sampler is scorer, float32", "gradient checkpointing", "mixed precision with"])
    def test_pass(self, script, tmp_path, only):
        failed, found = report(script, tmp_path, "test", only)
        assert failed == found["failed"] == 0
        assert [result["outcome"] for result in found["results"].values()] == ["passed"]
        assert found["machine"]["device"] == "cpu"

    def test_what_cannot_run_is_skipped_with_a_reason(self, script, tmp_path):
        failed, found = report(script, tmp_path, "test", "offloaded base")
        assert failed == 0
        assert found["results"]["offloaded base"]["outcome"] == "skipped"
        assert "CUDA" in found["results"]["offloaded base"]["reason"]

    def test_a_scorer_that_is_not_the_sampler_fails(self, script, tmp_path, monkeypatch):
        build_run = script.build_run

        def build_run_that_changes_weights_after_playing(*given, **more):
            run = build_run(*given, **more)
            collect = run.trainer.collect

            def collect_and_change(batches):
                rows = collect(batches)
                with torch.no_grad():
                    for weight in run.models.actor_parameters():
                        weight += 0.1 * torch.randn_like(weight)
                return rows

            run.trainer.collect = collect_and_change
            return run

        monkeypatch.setattr(script, "build_run", build_run_that_changes_weights_after_playing)
        failed, found = report(script, tmp_path, "test", "sampler is scorer, float32")
        assert failed == 1
        assert "expected at most 0.0001" in found["results"]["sampler is scorer, float32"]["reason"]


def test_speed_is_reported(script, tmp_path):
    failed, found = report(script, tmp_path, "bench", "Qwen2.5-0.5B, GRPO")
    assert failed == 0
    (figures,) = [result["figures"] for result in found["results"].values()]
    assert figures["rollout_tok_s"] > 0
    assert figures["learn_tok_s"] > 0
