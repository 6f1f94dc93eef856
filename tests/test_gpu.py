"""benchmarks/gpu on a CPU, with small shapes: what it checks passes, what fails is reported, and
what is done is not done again."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def gpu():
    """Modules of ``benchmarks.gpu``, by name; the checkout is where ``python -m`` would find it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        from benchmarks.gpu import __main__, checks, first_look, fits, place, report, speed

        yield {"main": __main__.main} | {
            module.__name__.rpartition(".")[2]: module for module in (checks, first_look, fits, place, report, speed)
        }
        for name in [name for name in sys.modules if name.partition(".")[0] == "benchmarks"]:
            del sys.modules[name]


@pytest.fixture(scope="module")
def place(gpu, tmp_path_factory):
    return gpu["place"].Place(device="cpu", tiny=True, folder=tmp_path_factory.mktemp("models"))


def report(gpu, tmp_path, what, only) -> tuple[int, dict]:
    flags = ["--device=cpu", "--tiny", f"--only={only}", f"--output={tmp_path / 'out.json'}"]
    failed = gpu["main"]([what, *flags])
    return failed, json.loads((tmp_path / "out.json").read_text())


class TestChecks:
    @pytest.mark.parametrize(
        "only",
        [
            "sampler is scorer, bfloat16",
            pytest.param("sampler is scorer, float32", marks=pytest.mark.extra),
            pytest.param("gradient checkpointing", marks=pytest.mark.extra),
            pytest.param("gradient with shared", marks=[pytest.mark.extra, pytest.mark.slow]),
            pytest.param("mixed precision with", marks=pytest.mark.extra),
            pytest.param("masked attention has finite gradients", marks=pytest.mark.extra),
            pytest.param("losses of ten iterations, float32", marks=[pytest.mark.extra, pytest.mark.slow]),
        ],
    )
    def test_pass(self, gpu, tmp_path, only):
        failed, found = report(gpu, tmp_path, "test", only)
        assert failed == found["failed"] == 0
        assert {result["outcome"] for result in found["results"].values()} == {"passed"}
        assert found["machine"]["device"] == "cpu"

    def test_what_cannot_run_is_skipped_with_a_reason(self, gpu, tmp_path):
        failed, found = report(gpu, tmp_path, "test", "offloaded base")
        assert failed == 0
        assert found["results"]["offloaded base"]["outcome"] == "skipped"
        assert "CUDA" in found["results"]["offloaded base"]["reason"]

    def test_bfloat16_that_computes_in_float32_fails(self, gpu, place):
        with pytest.raises(AssertionError, match=r"products were computed in \{.*float32"):
            gpu["checks"].sampler_is_scorer(place, "bfloat16", 2e-2, mixed_precision="no")

    @pytest.mark.extra
    def test_a_scorer_that_is_not_the_sampler_fails(self, gpu, tmp_path, monkeypatch):
        build_run = gpu["place"].build_run

        def build_run_that_changes_weights_after_sampling(*given, **more):
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

        monkeypatch.setattr(gpu["place"], "build_run", build_run_that_changes_weights_after_sampling)
        failed, found = report(gpu, tmp_path, "test", "sampler is scorer, float32")
        assert failed == 1
        assert "expected at most 0.0001" in found["results"]["sampler is scorer, float32"]["reason"]


class TestMeasurements:
    @pytest.mark.extra
    def test_sharing_is_seen_in_what_is_computed(self, gpu, place):
        played = {"rows": 512}
        both = [gpu["speed"].update(place, "Qwen2.5-0.5B", played, share_prefixes=shared) for shared in (True, False)]
        shared, alone = both
        assert shared["tokens"] == alone["tokens"], "the same rows"
        assert shared["computed"] < 0.7 * alone["computed"]
        assert all(each["tflop_s"] > 0 and each["score_share"] + each["update_share"] < 1.01 for each in both)

    @pytest.mark.extra
    @pytest.mark.parametrize(
        "only", ["decode: Qwen2.5-0.5B, 64 rows, LoRA", "attention: a decode", "memory: Qwen2.5-0.5B"]
    )
    def test_is_reported(self, gpu, tmp_path, only):
        failed, found = report(gpu, tmp_path, "bench", only)
        assert failed == 0
        assert [result["outcome"] for result in found["results"].values()] == ["passed"]

    def test_what_was_found_is_kept_where_a_call_is_ended(self, gpu, tmp_path):
        path = tmp_path / "out.json"
        seen = []
        parts = {"first": lambda: {"figure": 1}, "second": lambda: seen.append(json.loads(path.read_text())) or {}}
        gpu["report"].run_parts(parts, {}, path, limit=60)
        assert seen[0]["results"]["first"]["figures"] == {"figure": 1}
        assert seen[0]["of"] == 2


class TestFirstLook:
    def test_every_call_has_parts(self, gpu, place):
        """And every measurement is in a call."""
        parts = {"test": gpu["checks"].checks(place), "bench": gpu["speed"].measurements(place)}
        from benchmarks.gpu import attention

        parts["test"] |= attention.checks(place)
        parts["bench"] |= attention.measurements(place)
        calls = gpu["first_look"].CALLS
        for call in calls:
            assert any(call.only in name for name in parts[call.what]), call
        for what, names in parts.items():
            for name in names:
                assert any(call.what == what and call.only in name for call in calls), name

    def test_names_the_wheels_that_are_missing(self, gpu, tmp_path, monkeypatch, capsys):
        monkeypatch.setitem(sys.modules, "torchrl", None)
        assert gpu["main"](["first-look", "--device=cpu", "--tiny", f"--output={tmp_path}"]) == 1
        told = capsys.readouterr().err
        assert "torchrl: ModuleNotFoundError" in told
        assert "tensordict torchrl hoptorch pyvers orjson importlib_metadata" in told
        assert "torchrl" in json.loads((tmp_path / "00-machine.json").read_text())["missing"]

    def test_starts_without_the_packages(self):
        """It imports none of them before it has said what is missing."""
        import subprocess

        blocked = "tensordict", "torchrl", "torch", "torchrl_llm"
        code = f"import sys; sys.modules.update(dict.fromkeys({blocked})); import benchmarks.gpu.first_look"
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)

    @pytest.mark.parametrize(
        ("found", "done"),
        [
            ({"failed": 0, "results": {"a": {"outcome": "skipped", "reason": "needs vLLM"}}}, True),
            ({"failed": 1, "results": {"a": {"outcome": "failed", "reason": "no"}}}, False),
            ({"failed": 0, "results": {"a": {"outcome": "skipped", "reason": "480 s were over"}}}, False),
            ({"failed": 0, "results": {}, "ended": "540 s were over"}, False),
            ({"failed": 0, "of": 2, "results": {"a": {"outcome": "passed"}}}, False),
        ],
    )
    def test_makes_a_call_again_unless_all_of_it_is_there(self, gpu, tmp_path, found, done):
        (tmp_path / "call.json").write_text(json.dumps(found))
        assert gpu["first_look"].is_done(tmp_path / "call.json") is done


@pytest.mark.extra
@pytest.mark.slow
def test_the_table_of_what_fits_is_the_estimate(gpu):
    page = (ROOT / "docs" / "gpu.md").read_text()
    shown = re.search(r"<!-- fits -->\n\n((?:\|.*\n)+)", page)[1].strip()
    assert shown == gpu["fits"].table(), "python -m benchmarks.gpu.fits prints it"
