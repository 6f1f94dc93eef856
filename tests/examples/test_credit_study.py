"""The program of the credit study: what is registered is what runs, once, and what is reported."""

import importlib
import json
import subprocess
from functools import partial
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest

from torchrl_llm.runs import RunSettings

ROOT = Path(__file__).parents[2]


@pytest.fixture
def study(load):
    """The modules of the study."""
    return {name: load(f"credit_study.{name}") for name in ("registered", "runs", "statistics", "page")}


def git(folder: Path, *words: str) -> None:
    identity = ["-c", "user.name=x", "-c", "user.email=x@example.com"]
    subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True)


def made_up(registered, score) -> dict:
    """Results of all runs: ``score(name, world, i)`` of the i-th seed."""
    found = registered.registration()

    def run(name: str, world: str, seed: int, value: float, chosen: dict) -> dict:
        key = {"estimator": name, "world": world, "seed": seed, "score": value, "curve": [value - 0.1, value]}
        return {**key, **chosen, "cpu_s": 10.0, "registration": registered.digest()}

    cells = [(name, world) for name in registered.ESTIMATORS for world in registered.WORLDS]
    runs = [
        run(*cell, seed, score(*cell, i), registered.GRID[0]) for cell in cells for i, seed in enumerate(found["seeds"])
    ]
    tuning = [
        run(*cell, seed, 0.0, each) for cell in cells for seed in found["tuning_seeds"] for each in registered.GRID
    ]
    return {"registration": registered.digest(), "tuning": tuning, "runs": runs}


class TestRegistration:
    def test_every_estimator_is_a_valid_run_in_every_world(self, study):
        registered = study["registered"]
        for options in registered.ESTIMATORS.values():
            for world, settings in registered.WORLDS.items():
                RunSettings.from_values(
                    **registered.COMMON | options | registered.GRID[0], env_name=f"world:{world}", env_options=settings
                )
        named = {name for _, _, pairs in registered.COMPARED.values() for pair in pairs for name in pair}
        assert named <= set(registered.ESTIMATORS)
        assert {world for world, _, _ in registered.COMPARED.values()} == set(registered.WORLDS)
        assert set(registered.COMPARED) < set(registered.HYPOTHESES)

    def test_seeds_are_drawn_and_those_of_tuning_are_others(self, study):
        found = study["registered"].registration()
        assert found["seeds"] == importlib.import_module("learning").drawn_seeds(study["registered"].DRAW, 10)
        assert len({*found["seeds"], *found["tuning_seeds"]}) == 12

    def test_is_written_once(self, study, tmp_path, monkeypatch):
        registered, path = study["registered"], tmp_path / "data" / "registration.json"
        registered.register(path)
        registered.register(path)
        digest = registered.digest()
        monkeypatch.setitem(registered.COMMON, "batch_size", 32)
        assert registered.digest() != digest
        with pytest.raises(SystemExit, match="holds another registration"):
            registered.register(path)

    def test_nothing_runs_before_it_is_committed(self, study, tmp_path, monkeypatch):
        registered, runs, path = study["registered"], study["runs"], tmp_path / "registration.json"
        git(tmp_path, "init", "-q")
        with pytest.raises(SystemExit, match="is missing"):
            runs.committed(path)
        registered.register(path)
        with pytest.raises(SystemExit, match="is not committed"):
            runs.committed(path)
        git(tmp_path, "add", path.name)
        git(tmp_path, "commit", "-qm", "registered")
        runs.committed(path)
        monkeypatch.setattr(registered, "DRAW", "another")
        with pytest.raises(SystemExit, match="registered with other settings"):
            runs.committed(path)
        path.write_text(registered.text())
        with pytest.raises(SystemExit, match="is not committed"):
            runs.committed(path)


class TestRuns:
    def test_the_setting_of_the_highest_score_over_training(self, study):
        registered, runs = study["registered"], study["runs"]
        tuning = made_up(registered, lambda *_: 0.0)["tuning"]
        assert set(runs.choose(tuning)["GRPO", "stairs"].items()) == set(registered.GRID[0].items())
        for run in tuning:
            best = (run["estimator"], run["world"]) == ("GRPO", "stairs") and registered.GRID[2].items() <= run.items()
            run["curve"], run["score"] = (
                ([0.0, 0.5], 0.0) if best else ([0.1, 0.1], 1.0)
            )  # the final score does not count
        assert runs.choose(tuning)["GRPO", "stairs"] == registered.GRID[2]
        assert runs.choose(tuning)["GRPO", "delayed-reward"] == registered.GRID[0]

    def test_runs_of_different_settings_have_different_folders(self, study):
        runs = study["runs"]
        keys = runs.tuning_keys()
        assert len({runs.folder_of(Path(), *key) for key in keys}) == len(keys) == 8 * 4 * 4 * 2

    def test_one_run(self, study, tmp_path, monkeypatch):
        """In this process; then it is there and is not run again, unless it is of another
        registration."""
        registered, runs = study["registered"], study["runs"]
        for name, value in {"num_envs": 8, "batch_size": 8, "final_episodes": 16}.items():
            monkeypatch.setitem(registered.COMMON, name, value)
        key = ("GRPO per state", "truncation-trap", 3, registered.GRID[0], 2)
        output = runs.folder_of(tmp_path, *key)
        output.mkdir(parents=True)
        runs.train(*key, output)
        result = runs.start(key, tmp_path)
        assert (result["iterations"], result["episodes"], len(result["curve"])) == (2, 16, 2)
        assert result["score"] <= 1.0
        monkeypatch.setitem(registered.COMMON, "batch_size", 16)
        with pytest.raises(SystemExit, match="a run of another registration"):
            runs.start(key, tmp_path)

    @pytest.mark.extra
    def test_runs_in_other_processes(self, study, tmp_path):
        """A process that made another run before makes the same one: nothing of it is left."""
        registered, runs = study["registered"], study["runs"]
        first, second = (("PPO 1", world, 3, registered.GRID[0], 2) for world in ("stairs", "delayed-reward"))
        both = runs.run_all(partial(runs.start, root=tmp_path / "one"), [first, second], 1, runs.line)
        assert [result["world"] for result in both] == ["stairs", "delayed-reward"]
        (alone,) = runs.run_all(partial(runs.start, root=tmp_path / "alone"), [second], 2, runs.line)
        assert alone | {"cpu_s": 0} == both[1] | {"cpu_s": 0}

    def test_a_run_that_fails_twice_is_said(self, study, tmp_path, monkeypatch):
        runs, key = study["runs"], ("GRPO", "stairs", 3, {"lr_actor": 1.0}, 1)
        failures = iter(["first", "second"])

        def train(*_):
            raise ValueError(next(failures))

        monkeypatch.setattr(runs, "train", train)
        with pytest.raises(RuntimeError, match=r"failed twice: see log.txt"):
            runs.start(key, tmp_path)
        assert "ValueError: first" in (runs.folder_of(tmp_path, *key) / "log.txt").read_text()
        assert next(failures, None) is None


class TestStatistics:
    def test_probability_of_improvement_is_that_of_all_pairs(self, study):
        generator = np.random.default_rng(0)
        better, worse = (generator.integers(0, 4, (3, 5)).astype(float) for _ in range(2))
        pairs = [[(x > y) + (x == y) / 2 for x in b for y in w] for b, w in zip(better, worse, strict=True)]
        assert study["statistics"].improvement(better, worse) == pytest.approx(fmean(map(fmean, pairs)))

    def test_the_bootstrap_is_stratified(self, study):
        """Worlds of constant scores: whichever seeds are drawn, the interval is the figure."""
        statistics = study["statistics"]
        scores = np.repeat([[0.0], [1.0], [0.5], [0.7]], 6, axis=1)
        assert statistics.interval(statistics.flat_iqm, scores, samples=100) == pytest.approx(
            [statistics.overall(scores)] * 2
        )

    def test_the_interval_covers(self, study):
        """Of the mean-like statistic of 200 experiments about 95 of 100 intervals hold the
        truth."""
        statistics, generator = study["statistics"], np.random.default_rng(1)
        held = []
        for _ in range(200):
            low, high = statistics.interval(statistics.flat_iqm, generator.normal(size=(2, 20)), samples=300)
            held.append(low <= 0 <= high)
        assert 0.88 <= fmean(held) <= 0.99


class TestPage:
    MARKERS = ("final", "training", "hypotheses", "tuning")

    def test_tables_and_raw_data(self, study, tmp_path, monkeypatch):
        registered, page = study["registered"], study["page"]
        monkeypatch.setattr(page, "DATA", tmp_path / "credit.json")
        monkeypatch.setattr(page, "interval", partial(page.interval, samples=200))
        score = {"GRPO": 0.25, "GRPO per state": 0.75}
        results = made_up(registered, lambda name, world, i: score.get(name, 0.5))
        (tmp_path / "results.json").write_text(json.dumps(results))
        target = tmp_path / "page.md"
        target.write_text("".join(f"<!-- study, {marker} -->\n\nText.\n\n" for marker in self.MARKERS))
        page.write_report(tmp_path, target, tmp_path)
        text = target.read_text()
        assert "| GRPO | 0.25 (0.25 to 0.25) |" in text
        assert (
            "| H3 revisits | GRPO per state over GRPO | 1.00 (1.00 to 1.00) | 1.00 (1.00 to 1.00) | training | yes |"
            in text
        )
        assert (
            "| H2 distraction | returns to go over RLOO | 0.50 (0.50 to 0.50) | 0.50 (0.50 to 0.50) | training | no |"
            in text
        )
        assert (
            "| H4 truncation | PPO 0.95 over GRPO | 1.00 (1.00 to 1.00) | 1.00 (1.00 to 1.00) | final | yes |" in text
        )
        (tmp_path / "results.json").unlink()
        again = target.read_text()
        page.write_report(tmp_path, target, tmp_path)  # from the raw data in the repository
        assert target.read_text() == again

    def test_what_is_missing_or_not_registered_is_not_reported(self, study):
        registered, page = study["registered"], study["page"]
        results = made_up(registered, lambda *_: 0.0)
        page.check(results)
        with pytest.raises(SystemExit, match="1 of 320 runs are missing"):
            page.check(results | {"runs": results["runs"][1:]})
        with pytest.raises(SystemExit, match="another registration"):
            page.check(results | {"registration": "0"})
