"""A third engine, from outside the package: it plays lockstep, in threads and on Ray, and is synced
in each."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from third_engine import Deaf, make_engine, make_env
from trained import make_models, play, train

from torchrl_llm import keys
from torchrl_llm.collectors import AsyncTurnCollector, RayTurnCollector, TurnCollector
from torchrl_llm.modules import EngineError, TokenScorer
from torchrl_llm.runs import ConfigError, RunSettings, build_run
from torchrl_llm.testing.tiny import load_tiny_model, tiny_model_path
from torchrl_llm.weight_update import EngineWeightSync, RayWeightSync, WeightSyncError, merged_tensors

RUN = {
    "model_path": "tiny",
    "algo": "LLMREINFORCE",
    "lora_r": 2,
    "lr_actor": 1e-2,
    "kl_coeff": 0.0,
    "device": "cpu",
    "batch_size": 8,
    "num_envs": 4,
    "max_model_len": 128,
    "max_output_tokens": 8,
    "max_iterations": 2,
    "evaluation_interval": 0,
    "save_checkpoints": False,
    "progress": False,
}


def lockstep(models, engine):
    sync = EngineWeightSync(models.model, models.adapter, policy=engine)
    return TurnCollector(make_env(), engine, batch_size=8, weight_sync_schemes={"policy": sync})


def threads(models, engine):
    sync = EngineWeightSync(models.model, models.adapter, policy=engine)
    schemes = {"policy": sync}
    return AsyncTurnCollector(make_env(), engine, batch_size=8, max_staleness=1, weight_sync_schemes=schemes)


def on_ray(models, engine, make_policy=make_engine):
    schemes = {"policy": RayWeightSync(models.model, models.adapter, policy=engine, merged=True)}
    return RayTurnCollector(
        make_env, engine, make_policy=make_policy, num_workers=1, batch_size=8, weight_sync_schemes=schemes,
        max_staleness=1, worker_options={"num_cpus": 0},
    )  # fmt: skip


@pytest.fixture
def cluster():
    ray = pytest.importorskip("ray", reason="needs Ray: run make test-scale")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))
        ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False)
        yield
        ray.shutdown()


def scorer_of(models):
    """The trained model as it is now, on its own."""
    model = load_tiny_model()
    model.load_state_dict({name: tensor.clone() for name, tensor in merged_tensors(models.model, models.adapter)})
    return TokenScorer(model, models.actor.sampling)


class TestThirdEngine:
    def collect(self, make_collector, batches):
        models, engine = make_models(tiny_model_path()), make_engine()
        collector, scorers, seen = make_collector(models, engine), {}, set()
        try:
            for _ in range(batches):
                scorers[engine.policy_version] = scorer_of(models)
                rows = collector.rollout()
                actions = rows[keys.TURN_IDS] >= 0
                for version in rows[keys.POLICY_VERSION][actions].unique().tolist():
                    with torch.no_grad():
                        scored = scorers[version](rows.clone())[keys.LOG_PROB]
                    sampled = actions & (rows[keys.POLICY_VERSION] == version)
                    assert (scored - rows[keys.SAMPLE_LOG_PROB])[sampled].abs().max() <= 1e-5
                    seen.add((engine.policy_version, version))
                train(models, len(scorers))
                collector.update_policy_weights_()
        finally:
            collector.shutdown()
        return seen

    def test_lockstep(self):
        assert self.collect(lockstep, 3) == {(1, 1), (2, 2), (3, 3)}

    def test_threads(self):
        seen = self.collect(threads, 4)
        assert all(now - 1 <= version <= now for now, version in seen)
        assert len(seen) > 4, "no batch has tokens of two versions"

    @pytest.mark.ray
    def test_on_ray(self, cluster):
        seen = self.collect(on_ray, 3)
        assert all(now - 1 <= version <= now for now, version in seen)
        assert len({version for _, version in seen}) > 1

    def test_weights_that_did_not_arrive_are_found_and_nothing_is_sampled(self):
        models, engine = make_models(tiny_model_path()), make_engine(Deaf)
        train(models)
        with pytest.raises(WeightSyncError, match="parity check found"):
            EngineWeightSync(models.model, models.adapter, policy=engine)()
        with pytest.raises(EngineError, match=r"Deaf cannot be used: .*parity check found.*Sync again"):
            play(engine)

    @pytest.mark.ray
    def test_weights_that_did_not_arrive_are_found_on_ray(self, cluster):
        models = make_models(tiny_model_path())
        train(models)
        collector = on_ray(models, make_engine(), partial(make_engine, Deaf))
        with pytest.raises(WeightSyncError, match="parity check found"):
            collector.rollout()

    def run(self, tmp_path, **settings):
        """A run whose settings file names the engine."""
        (tmp_path / "run.yaml").write_text("policy: custom\nengine: {engine_class: third_engine:load}\n")
        config = RunSettings.from_yaml(tmp_path / "run.yaml")
        return build_run(config.replace(output_dir=tmp_path / "run", **RUN | settings))

    @pytest.mark.parametrize("collector", ["turn", "async"])
    def test_in_a_run(self, tmp_path, collector):
        run = self.run(tmp_path, collector=collector)
        assert type(run.policy).__name__ == "ThirdEngine"
        history = run.trainer.train()
        assert [metrics["policy/version"] for metrics in history] == [1, 2]
        # What it samples with is what is trained: it got the weights of the first update.
        assert all(metrics["policy/log_prob_gap"] < 1e-5 for metrics in history)
        model = dict(merged_tensors(run.models.model, run.models.adapter))
        start = load_tiny_model().state_dict()
        assert any(not model[name].equal(start[name]) for name in start if name in model)

    @pytest.mark.ray
    def test_in_a_run_on_ray(self, tmp_path, cluster):
        run = self.run(tmp_path, collector="ray", ray_workers=1, ray_worker_cpus=0.0)
        assert len(run.trainer.train()) == 2
        run.close()

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ({"engine_class": None}, 'policy="custom" needs engine_class'),
            ({"engine_class": "third_engine:NoSuch"}, "engine_class names 'third_engine:NoSuch', which cannot be imported"),
            ({"engine_class": "third_engine:dict_of"}, "engine_class='third_engine:dict_of' made a dict; expected a TurnPolicy"),
        ],
    )  # fmt: skip
    def test_what_is_no_engine_is_refused(self, tmp_path, options, said):
        with pytest.raises(ConfigError, match=said):
            self.run(tmp_path, **options)

    def test_weights_that_did_not_arrive_end_the_run(self, tmp_path):
        with pytest.raises(WeightSyncError, match="parity check found"):
            self.run(tmp_path, engine_options={"kind": "Deaf"}).trainer.train()

    def test_a_method_that_it_does_not_have_is_named(self):
        models = make_models(tiny_model_path())
        with pytest.raises(ValueError, match=r"method='reload': expected 'auto' or one of \('adapter', 'whole'\)"):
            EngineWeightSync(models.model, models.adapter, policy=make_engine(), method="reload")


HERE = Path(__file__).parent

EDITS = {
    "runs/config.py": {
        "from torchrl_llm import objectives\n": "from third_settings import ThirdSettings\nfrom torchrl_llm import objectives\n",
        "engine: HFSettings | VLLMSettings | CustomSettings": "engine: HFSettings | VLLMSettings | CustomSettings | ThirdSettings",
    },
    "runs/__init__.py": {
        "from torchrl_llm.modules import": "from third_settings import ThirdSettings\nfrom torchrl_llm.modules import",
    },
}
"""The existing files of the package that settings of an engine edit: the union of the engines, and
what exports them."""


@pytest.mark.extra
def test_with_settings_of_its_own_it_edits_two_files(tmp_path):
    """A copy of the package is edited, and another process runs with it."""
    package = shutil.copytree(HERE.parents[1] / "torchrl_llm", tmp_path / "torchrl_llm")
    for path, lines in EDITS.items():
        text = (package / path).read_text()
        assert all(text.count(line) == 1 for line in lines)
        for line, edited in lines.items():
            text = text.replace(line, edited)
        (package / path).write_text(text)
    settings = {**RUN, "policy": "third", "output_dir": str(tmp_path / "run")}
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(HERE)])}
    command = [sys.executable, HERE / "third_run.py", json.dumps(settings)]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    assert Path(seen["package"]) == package
    assert seen["versions"] == [1, 2]
    assert seen["policy"] == "ThirdEngine"
    assert max(seen["gaps"]) < 1e-5
    assert seen["saved"] == "ThirdSettings(third_kind='ThirdEngine')"
    assert seen["described"]["enum"] == ["ThirdEngine", "Deaf"]
    assert seen["refused"] == "a third engine plays alone."
    assert seen["free"] == 2**30 - 2**18
    assert seen["findings"]["engine"] == "a third engine samples, in this process"
    assert seen["findings"]["no-such-package"].startswith("not installed; the settings need it")
    assert seen["findings"]["third_kind"] == "it is a ThirdEngine"
    assert "take more GPUs (third_gpus)" in seen["findings"]["engine's memory"]
    assert "third_share=0.00024" in seen["findings"]["engine's memory"]
