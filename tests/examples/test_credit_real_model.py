"""The question of the study asked of a real model: what is registered can run, and the tables are
those of the results."""

import json
from pathlib import Path

import numpy as np
import pytest

from torchrl_llm.runs import RunSettings

ROOT = Path(__file__).parents[2]


@pytest.fixture
def real_model(load):
    """The module."""
    return load("credit_study.real_model")


def made_up(real_model, won: dict[str, int]) -> dict[str, dict]:
    """Results in which each estimator wins so many of the ten games of every number (5 unless it is
    given), always the first ones."""
    names = [real_model.START, *real_model.registered.ESTIMATORS]
    return {
        name: {
            "estimator": name,
            "curve": [] if name == real_model.START else [0.4, 0.6],
            "outcomes": "".join("1" if game < won.get(name, 5) else "0" for _ in range(10) for game in range(10)),
            "numbers": [number for number in range(10) for _ in range(10)],
            "interval": [0.4, 0.6],
            "penalized": 0.01,
            "cpu_s": 1000.0,
        }
        for name in names
    }


def test_what_is_registered_can_run_and_is_the_studys(real_model, tmp_path):
    estimators = real_model.registered.ESTIMATORS
    for name, own in estimators.items():
        config = RunSettings.from_values(**real_model.settings(name), output_dir=tmp_path)
        assert (config.algo, config.trainer.max_steps, config.model.model_path) == (own["algo"], 1800, "smollm2")
        # over by the third batch
        assert config.trainer.warmup_fraction * config.trainer.max_steps < 2 * 48 * 4
        assert all(
            config.values()[option] == value
            for option, value in own.items()
            if option not in real_model.OWN.get(name, {})
        )
    assert {name for pair in real_model.PAIRS for name in pair} <= set(estimators)
    assert real_model.registration()["seed"] not in (
        0,
        1,
        2,
        1219835214,
        1581158074,
    )  # on which settings were chosen, or seen


def test_pairs_are_tested_by_number(real_model):
    """Two games more of every number: one of 1024 changes of sign is as far on either side; six
    pairs."""
    line = real_model.pair_table(made_up(real_model, {"GRPO per turn": 7, "PPO 1": 6})).splitlines()
    assert line[2] == "| GRPO per turn over GRPO | +0.200 | 0.002 | 0.012 | yes |"
    assert line[5] == "| GRPO per state over GRPO per turn | -0.200 | 0.002 | 0.012 | the other way |"
    assert line[3] == "| ReBN over GRPO | +0.000 | 1.000 | 1.000 | no |"
    # One number that is won and another that is lost are not a difference, however many games they
    # are.
    assert real_model.sign_flip_p(np.array([25.0, -25.0] + [0.0] * 8)) == 1.0


def test_results_of_another_registration_are_refused(real_model, tmp_path, monkeypatch):
    monkeypatch.setattr(real_model, "DATA", tmp_path / "data.json")
    results = {"registration": "0" * 16, "runs": list(made_up(real_model, {}).values())}
    (tmp_path / "results.json").write_text(json.dumps(results))
    with pytest.raises(SystemExit, match="another registration"):
        real_model.write_report(tmp_path, tmp_path / "page.md", tmp_path)


def test_report(real_model, tmp_path, monkeypatch):
    monkeypatch.setattr(real_model, "DATA", tmp_path / "data.json")
    results = {"registration": real_model.digest(), "runs": list(made_up(real_model, {"RLOO": 9}).values())}
    (tmp_path / "results.json").write_text(json.dumps(results))
    page = tmp_path / "page.md"
    page.write_text("".join(f"<!-- {name} -->\n\n| |\n|---|\n\n" for name in ("real model", "real model, pairs")))
    real_model.write_report(tmp_path, page, tmp_path)
    text = page.read_text()
    assert "| RLOO | 0.500 | 0.900 | 0.400 to 0.600 | 1.0% | 1,000 | 0.84 |" in text
    assert "| the start |  | 0.500 |" in text
    assert "| returns to go over RLOO | -0.400 | 0.002 | 0.012 | the other way |" in text
    assert (tmp_path / "smollm2.png").stat().st_size > 10_000
    assert json.loads((tmp_path / "data.json").read_text()) == results
