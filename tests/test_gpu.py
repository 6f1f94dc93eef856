"""benchmarks/gpu on a CPU, with small shapes: what it checks passes, what fails is reported, and
what is done is not done again."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from torchrl_llm.modules import SamplingConfig
from torchrl_llm.modules.vllm.start import check_sampling

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def gpu():
    """Modules of ``benchmarks.gpu``, by name; the checkout is where ``python -m`` would find it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        from benchmarks.gpu import __main__, arithmetic, capacity, checks, first_look, fits, place, report, speed

        yield {"main": __main__.main} | {
            module.__name__.rpartition(".")[2]: module
            for module in (arithmetic, capacity, checks, first_look, fits, place, report, speed)
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

    def test_settings_of_what_only_runs_on_a_gpu_are_valid(self, gpu, place, monkeypatch):
        """On the first GPU all parts with vLLM were refused for a setting that was missing."""

        class Valid(Exception):
            pass

        def only_check(self, name, **settings):
            self.config(name, **{key: value for key, value in settings.items() if key not in ("env", "make_env")})
            raise Valid

        monkeypatch.setattr(gpu["place"].Place, "run", only_check)
        for module in ("checks", "speed"):
            monkeypatch.setattr(gpu[module], "needs_vllm", lambda place: None)
        parts = gpu["checks"].checks(place) | gpu["speed"].measurements(place)
        wanted = {name: part for name, part in parts.items() if "vllm" in name.lower() or "4 bits" in name}
        assert len(wanted) == 7
        monkeypatch.setattr(gpu["checks"], "find_spec", lambda name: name)
        for part in wanted.values():
            with pytest.raises(Valid):
                part()

    def test_answers_end_by_few_ids_as_often_as_by_many(self, gpu):
        """By more than 128 ids, vLLM's engine on the first GPU died at its first request."""
        module, vocabulary = gpu["place"], 40_000
        ids = module.stop_ids(vocabulary)
        check_sampling(SamplingConfig(min_output_tokens=1, stop_ids=tuple(ids)), on_gpu=True)
        shape = module.SHAPES["Qwen2.5-0.5B"](vocab_size=vocabulary, num_hidden_layers=1)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(shape)
        module.make_stops_likely(model)
        tokens = torch.arange(3, 259).view(4, 64)
        with torch.no_grad():
            ends = model(tokens).logits.softmax(-1)[..., ids].sum(-1).mean()
        assert 0.5 / module.STOP < ends < 2 / module.STOP

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
        "only",
        [
            "decode: Qwen2.5-0.5B, 64 rows, LoRA",
            "attention: a decode",
            "memory: Qwen2.5-0.5B",
            "update: Qwen2.5-1.5B, kernels, shared",
        ],
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


def table_of(page: str, marker: str) -> str:
    """The table behind a comment of a page in docs."""
    return re.search(rf"<!-- {marker} -->\n\n((?:\|.*\n)+)", (ROOT / "docs" / page).read_text())[1].strip()


class TestTables:
    """What the pages say of memory and of layouts is computed, by the same functions."""

    @pytest.mark.extra
    @pytest.mark.slow
    def test_what_fits_is_the_estimate(self, gpu):
        assert table_of("gpu.md", "fits") == gpu["fits"].table(), "python -m benchmarks.gpu.fits prints it"

    @pytest.mark.extra
    @pytest.mark.slow
    def test_layouts_are_those_computed(self, gpu):
        """But for the simulated column, the last."""
        shown = [line.rsplit("|", 2)[0] + "|" for line in table_of("scaling.md", "capacity").splitlines()]
        script = gpu["capacity"]
        assert shown == script.table(script.layouts(), simulated=False).splitlines(), (
            "python -m benchmarks.gpu.capacity --simulate prints it"
        )

    @pytest.mark.extra
    def test_shapes_have_the_parameters_that_their_makers_state(self, gpu):
        stated = {"Qwen2.5-0.5B": 0.494, "Qwen2.5-1.5B": 1.54, "Qwen2.5-7B": 7.62, "Qwen2.5-32B": 32.8}
        found = {name: gpu["capacity"].model(name).weights / 2e9 for name in stated}
        assert found == pytest.approx(stated, rel=0.003)

    @pytest.mark.extra
    def test_layouts_divide_gpus_so_that_nothing_waits(self, gpu):
        script = gpu["capacity"]
        middle = script.model("Qwen2.5-7B")
        layout = script.layout(middle, 64, 4096, staleness=1)
        assert layout.engines + layout.learners == 64
        assert layout.rollout_s == pytest.approx(layout.update_s, rel=0.1)
        alone = script.layout(middle, 1, 256, staleness=0)
        assert alone.iteration_s > alone.rollout_s + alone.update_s
        # The same contexts as in the table of what fits.
        assert (
            alone.slots
            == gpu["fits"].estimate(gpu["fits"].Case("80 GB", "Qwen2.5-7B", gpu["fits"].asleep(0.7))).contexts
        )

    def test_operations_of_a_token(self, gpu):
        """Of products alone, counted by hand: 2 for each weight, 4 with a backward of LoRA."""
        config = gpu["place"].SHAPES["SmolLM2-135M"](**gpu["place"].SMALL)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        # Of a layer: queries and outputs 32 x 32, keys and values 32 x 16, the MLP's three 32 x 64.
        weights, head = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64), 512 * 32
        operations = gpu["arithmetic"].token_operations
        assert operations(model, context=0, acted=0.25) == 2 * (weights + head / 4)
        assert operations(model, context=100, acted=1.0, backward=2) == 4 * (weights + head) + 3 * 4 * 2 * 32 * 100
