"""What a search needs no Ray for: its settings, a trial as a run, its command line."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from small_searches import BASE, SPACE, small_search

from torchrl_llm.cli import main
from torchrl_llm.runs import ConfigError, RunSettings, build_run
from torchrl_llm.runs.config import INITIAL_WEIGHTS, SamplingConfig
from torchrl_llm.runs.settings import names_of
from torchrl_llm.tuning import TuningConfig, copy_run, put_back, report_best, summary, train_generation, tune
from torchrl_llm.tuning.results import TuningError, check_same, identity, table
from torchrl_llm.utils.optional import MissingExtraError

EXAMPLES = Path(__file__).parents[2] / "examples" / "configs"


class TestSpace:
    @pytest.mark.parametrize(
        ("space", "said"),
        [
            ({}, "space is empty"),
            ({"lr_actr": {"choice": [1e-3]}}, "no such setting. Did you mean 'lr_actor'"),
            ({"lr_actor": [1e-5, 1e-3]}, "space of lr_actor is [1e-05, 0.001]; expected {loguniform:"),
            ({"lr_actor": {"lognormal": [1e-5, 1e-3]}}, "expected {loguniform:"),
            ({"lr_actor": {"choice": []}}, "expected {loguniform:"),
            ({"lr_actor": {"uniform": [1e-3, 1e-5]}}, "the lower one first"),
            ({"lr_actor": {"uniform": [1e-5, 1e-4, 1e-3]}}, "the lower one first"),
            ({"lr_actor": {"loguniform": [0, 1e-3]}}, "bounds above 0"),
            ({"epochs": {"uniform": [1, 4]}}, "takes no fractions: use choice"),
            ({"gamma": {"uniform": [0.5, 1.5]}}, "gamma is 1.5; expected"),
            ({"clip_value": {"choice": [0.2]}}, "clip_value=0.2 does nothing with algo='LLMREINFORCE'"),
            ({"batch_size": {"choice": [8, 12]}}, "episodes=16 is not a multiple of batch_size=12"),
            ({"batch_size": {"choice": [4, 8]}, "minibatch_size": {"choice": [4, 8]}}, "does not divide batch_size=4"),
            ({"seed": {"choice": [1, 2]}}, "scores could not be compared"),
            ({"step_timeout": {"choice": [1.0, 60.0]}}, "scores could not be compared"),
            *(
                ({name: {"choice": [1, 2]}}, f"space names {name}, and evaluations sample by it too")
                for name in names_of(SamplingConfig)
            ),
            ({"max_steps": {"choice": [100, 200]}}, "all get the same episodes"),
            ({"lora_r": {"choice": [4, 8]}}, "which a resumed run cannot change"),
            ({"group_size": {"choice": [1, 2]}}, "which a resumed run cannot change"),
        ],
    )
    def test_refuses_in_a_sentence(self, tmp_path, space, said):
        with pytest.raises(ConfigError) as caught:
            small_search(tmp_path, space=space)
        assert said in str(caught.value)

    @pytest.mark.parametrize("scheduler", ["asha", "random"])
    def test_what_a_resume_cannot_change_is_for_trials_that_keep_it(self, tmp_path, scheduler):
        assert {"lora_r", "algo"} <= {*INITIAL_WEIGHTS}
        tuning = small_search(tmp_path, space={"lora_r": {"choice": [4, 8]}}, scheduler=scheduler)
        assert tuning.run_config(tmp_path, {"lora_r": 8}, 2, starts=True).weights.lora_r == 8

    @pytest.mark.parametrize(
        ("base", "said"),
        [
            ({"max_iterations": 3}, "base sets max_iterations"),
            ({"wandb": True}, "base sets wandb"),
            ({"evaluation_interval": 0}, "evaluation_interval=0"),
            ({"save_checkpoints": False}, "save_checkpoints=false"),
        ],
    )
    def test_refuses_a_base_that_a_trial_cannot_have(self, tmp_path, base, said):
        with pytest.raises(ConfigError, match=said):
            small_search(tmp_path, base=base)

    def test_a_population_has_two(self, tmp_path):
        with pytest.raises(ConfigError, match="trials=1 is not a population"):
            small_search(tmp_path, trials=1)
        small_search(tmp_path, trials=1, scheduler="random")

    def test_of_the_example_holds_its_base(self):
        tuning = TuningConfig.from_yaml(EXAMPLES / "tuning_tiny.yaml", trials=3)
        assert (tuning.base, tuning.trials) == (EXAMPLES / "tiny_reinforce_llm.yaml", 3)

    def test_a_resume_has_the_same_settings(self, tmp_path):
        before = json.loads(json.dumps(identity(small_search(tmp_path))))
        check_same(small_search(tmp_path, max_failures=7), before)
        with pytest.raises(ConfigError, match=r"trials was 2, is 3; kl_coeff was 0.0, is 0.1"):
            check_same(small_search(tmp_path, trials=3, base={"kl_coeff": 0.1}), before)


class TestTrial:
    @staticmethod
    def state(folder: Path) -> dict[str, bytes]:
        """The newest checkpoint's files, but for those with a folder's name or a clock's time in
        them."""
        root = (folder / "checkpoints" / "last").resolve()
        parts = ("actor", "components/optimizer", "components/collector", "components/rng")
        return {
            str(file.relative_to(root)): file.read_bytes()
            for part in parts
            for file in sorted((root / part).rglob("*"))
            if file.is_file()
        }

    @pytest.mark.extra
    def test_exploits_the_bytes_of_the_donor(self, tmp_path):
        tuning, donor, other, plain = (
            small_search(tmp_path, episodes=8),
            *(tmp_path / name for name in ("0", "1", "plain")),
        )
        settings = {"lr_actor": 1e-3, "epochs": 2}
        first = train_generation(tuning, donor, settings, 1)
        train_generation(tuning, other, {"lr_actor": 1e-2, "epochs": 1}, 1)
        assert self.state(donor) != self.state(other)
        copy_run(donor, tmp_path / "copy")
        copy_run(donor, plain)

        put_back(tmp_path / "copy", other)
        second = train_generation(tuning, other, settings, 2)
        # The donor continued as any run: torchrl-llm train --resume --max-iterations 2
        # --accept-changes '[max_iterations]'.
        resumed = {**BASE, **settings, "max_iterations": 2, "resume": True, "accept_changes": ["max_iterations"]}
        run = build_run(RunSettings.from_values(**resumed, output_dir=plain, progress=False))
        run.trainer.train()
        run.close()
        assert self.state(other) == self.state(plain)
        assert {"actor/model.safetensors"} < {*self.state(other)}

        # Both generations are the donor's data further on, and the exploited run says whose
        # settings trained it.
        assert (first["iterations"], second["iterations"], second["episodes"]) == (1, 2, 16)
        lines = [json.loads(line) for line in (other / "generations.jsonl").read_text().splitlines()]
        assert [(line["generation"], line["trial"]) for line in lines] == [(1, "0"), (2, "1")]

        put_back(tmp_path / "copy", other)
        train_generation(tuning, other, {"lr_actor": 1e-2, "epochs": 2}, 2)
        assert self.state(other) != self.state(plain), "the perturbed settings have no effect"

    def test_of_the_first_generation_replaces_what_was_killed_there(self, tmp_path):
        tuning, settings = small_search(tmp_path, episodes=8), {"lr_actor": 1e-3, "epochs": 1}
        once = train_generation(tuning, tmp_path / "0", settings, 1)
        assert train_generation(tuning, tmp_path / "0", settings, 1) == once
        assert len((tmp_path / "0" / "generations.jsonl").read_text().splitlines()) == 1

    def test_a_class_comes_with_its_defaults(self, tmp_path):
        """A perturbation to another estimator changes the defaults of its options too."""
        space = {"estimator": {"choice": ["ReBN", "GroupRelative"]}}
        tuning = small_search(tmp_path, episodes=8, space=space, base={"algo": "LLMREINFORCE", "group_size": 4})
        train_generation(tuning, tmp_path / "0", {"estimator": "ReBN"}, 1)
        assert train_generation(tuning, tmp_path / "0", {"estimator": "GroupRelative"}, 2)["iterations"] == 2

    def test_that_ends_too_early_says_so(self, tmp_path):
        tuning = small_search(tmp_path, base={"max_steps": 10})
        with pytest.raises(ConfigError, match=r"max_steps=10 turns played.*raise max_steps"):
            train_generation(tuning, tmp_path / "0", {}, 1)


class TestResults:
    """Of trials that died, as Ray Tune hands them over."""

    @staticmethod
    def result(folder: Path, name: str, error: str | None = None, **scores) -> SimpleNamespace:
        metrics = {"config": {"lr_actor": 1e-3}, "training_iteration": 2, **scores} if scores else None
        return SimpleNamespace(path=str(folder / name), metrics=metrics, error=error and RuntimeError(error))

    def test_a_trial_that_died_is_last_and_says_why(self, tmp_path):
        tuning = small_search(tmp_path)
        scores = {"success_low": 0.1, "success_high": 0.5, "reward": 0.3, "iterations": 2, "episodes": 16, "turns": 40}
        trials = summary(
            tuning,
            [
                self.result(
                    tmp_path,
                    "00000",
                    "Traceback (most recent call last):\nOutOfMemoryError: 3 GiB",
                    success=0.9,
                    **scores,
                ),
                self.result(tmp_path, "00001", success=0.25, **scores),
                self.result(tmp_path, "00002", "the node is gone"),
            ],
        )
        assert [each["trial"] for each in trials] == ["00001", "00000", "00002"]
        lines = table(trials).splitlines()
        assert "0.250" in lines[1]
        assert "failed: OutOfMemoryError: 3 GiB" in lines[2]
        assert "failed: the node is gone" in lines[3]

    def test_a_search_whose_trials_all_died_ends_in_a_sentence(self, tmp_path):
        tuning = small_search(tmp_path)
        trials = summary(tuning, [self.result(tmp_path, f"0000{number}", "no disk") for number in range(2)])
        with pytest.raises(TuningError, match=r"All 2 trials failed, the first with: no disk \(.*ray has the errors\)"):
            report_best(tuning, trials, lambda text: None)


class TestCommand:
    def test_pickles_of_a_folder_are_read_where_a_flag_says_so(self, tmp_path, capsys):
        tuning, ran = small_search(tmp_path), tmp_path / "ran"
        state = tuning.output_dir / "ray" / "search"
        state.mkdir(parents=True)
        (state / "tuner.pkl").write_bytes(b"cos\nmkdir\n(V%s\ntR." % str(ran).encode())
        (tuning.output_dir / "tuning.json").write_text(json.dumps(identity(tuning), default=str))
        with pytest.raises(
            ConfigError, match=r"from pickles there, which can run any code: if the folder is your own, add"
        ):
            tune(tuning, resume=True)
        given = ["--base", str(tuning.base), "--space", yaml.safe_dump(SPACE, default_flow_style=True), "--resume"]
        assert main(["tune", *given, "--episodes", "16", "--output-dir", str(tuning.output_dir)]) == 2
        assert "add --trust" in capsys.readouterr().err
        assert not ran.exists()

    def test_needs_the_extra(self, tmp_path, monkeypatch, capsys):
        monkeypatch.setitem(sys.modules, "ray.tune", None)
        with pytest.raises(MissingExtraError, match=r"Tuning needs 'ray': pip install 'torchrl-llm\[tune\]'"):
            tune(small_search(tmp_path))
        assert not (tmp_path / "search").exists()
        given = ["--base", str(tmp_path / "base.yaml"), "--space", yaml.safe_dump(SPACE, default_flow_style=True)]
        assert main(["tune", *given, "--episodes", "16", "--output-dir", str(tmp_path / "search")]) == 2
        assert "pip install 'torchrl-llm[tune]'" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("given", "said"),
        [
            ([], "give --config FILE, or --base and --space"),
            (["--trials", "none"], "--trials is 'none'; expected an integer, at least 1"),
            (["--trails", "3"], "--trails is not a setting. Did you mean '--trials'?"),
            (["--config", "none.yaml"], "'none.yaml' cannot be read"),
            (["--config", str(EXAMPLES / "tiny_ppo_llm.yaml")], "line 2: algo is not a setting"),
        ],
    )
    def test_refuses_in_a_line(self, given, said, capsys):
        try:
            code = main(["tune", *given])
        except SystemExit as ended:
            code = ended.code
        error = capsys.readouterr().err
        assert (code, error.count("\n")) == (2, 1)
        assert said in error
