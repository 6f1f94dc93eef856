"""Searches on Ray Tune, whole, killed and continued. Needs the extra "tune"."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from small_searches import small_search
from waiting import LIMIT, wait_until

ray = pytest.importorskip("ray", reason="needs Ray Tune: run make test-tune")
pytest.importorskip("ray.tune", reason="needs Ray Tune: run make test-tune")
pytestmark = pytest.mark.tune

from torchrl_llm.runs import ConfigError  # noqa: E402
from torchrl_llm.tuning import report_best, summary, tune  # noqa: E402


def start(folder: Path, *given: str) -> subprocess.Popen:
    """A search in a process of its own, ``small_searches.py FOLDER FIELD=VALUE ...``."""
    script = str(Path(__file__).with_name("small_searches.py"))
    with (folder / "log").open("a") as log:
        return subprocess.Popen([sys.executable, script, str(folder), *given], stdout=log, stderr=log)


def whole(folder: Path, *given: str) -> dict:
    """A search to its end: the content of ``tuning.json``."""
    process = start(folder, *given)
    try:
        assert process.wait(LIMIT) == 0, (folder / "log").read_text()[-3000:]
    finally:
        process.kill()
    return json.loads((folder / "search" / "tuning.json").read_text())


def wait_for(ready: Callable[[], object], process: subprocess.Popen) -> None:
    def alive_and_ready():
        assert process.poll() is None, "the search ended before it was killed"
        return ready()

    wait_until(alive_and_ready, "the moment to kill the search")


def generations(folder: Path, trial: str) -> list[dict]:
    file = folder / "search" / "trials" / trial / "generations.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def numbers(folder: Path, *trials: str) -> dict[str, list[dict]]:
    return {trial: generations(folder, trial) for trial in trials}


@pytest.fixture(scope="module")
def random_search(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("random")
    whole(folder, "scheduler=random", "generations=3")
    return folder


class TestRandomSearch:
    def test_reports_the_best_as_an_ordinary_run(self, random_search):
        found = json.loads((random_search / "search" / "tuning.json").read_text())
        assert [each["generations"] for each in found["trials"]] == [3, 3]
        assert [each["iterations"] for each in found["trials"]] == [6, 6]
        assert found["trials"][0]["success"] >= found["trials"][1]["success"]
        best = random_search / "search" / found["best"]["folder"]
        result = json.loads((best / "result.json").read_text())
        assert found["best"]["success_after"] == result["success_after"]
        assert result["iterations"] == 6
        assert (best / "report.html").stat().st_size > 10_000
        assert found["best"]["success_ci95"][0] <= result["success_after"] <= found["best"]["success_ci95"][1]

    def test_draws_from_the_space(self, random_search):
        drawn = [lines[0]["settings"] for lines in numbers(random_search, "00000", "00001").values()]
        assert drawn[0] != drawn[1]
        assert all(1e-5 <= each["lr_actor"] <= 1e-2 and each["epochs"] in (1, 2) for each in drawn)

    def test_a_killed_trial_goes_on(self, random_search, tmp_path):
        process = start(tmp_path, "scheduler=random", "generations=3")
        try:
            wait_for(lambda: len(generations(tmp_path, "00000")) == 1, process)
            lock = tmp_path / "search" / "trials" / "00000" / "torchrl_llm.lock"
            os.kill(json.loads(lock.read_text())["pid"], signal.SIGKILL)
            assert process.wait(LIMIT) == 0, (tmp_path / "log").read_text()[-3000:]
        finally:
            process.kill()
        assert numbers(tmp_path, "00000", "00001") == numbers(random_search, "00000", "00001")
        errors = [*(tmp_path / "search" / "ray").rglob("error.txt")]
        assert errors, "no trial was killed"

    def test_a_killed_driver_goes_on(self, random_search, tmp_path):
        process = start(tmp_path, "scheduler=random", "generations=3")
        try:
            wait_for(lambda: len(generations(tmp_path, "00000")) == 2, process)
        finally:
            process.kill()
        process.wait(LIMIT)
        assert "best" not in json.loads((tmp_path / "search" / "tuning.json").read_text())
        found = whole(tmp_path, "scheduler=random", "generations=3")
        assert [each["generations"] for each in found["trials"]] == [3, 3]
        assert numbers(tmp_path, "00000", "00001") == numbers(random_search, "00000", "00001")

    def test_another_search_is_not_resumed(self, random_search):
        with pytest.raises(ConfigError, match="holds a search already: --resume --trust"):
            tune(small_search(random_search, scheduler="random", generations=3))
        with pytest.raises(ConfigError, match="generations was 3, is 4"):
            tune(small_search(random_search, scheduler="random", generations=4), resume=True, trust=True)


class TestPopulation:
    def test_copies_a_better_trial_and_goes_on_after_a_kill(self, tmp_path):
        """Four trials on two CPUs, in step; the driver is killed after two generations of three."""
        given = ("scheduler=pbt", "trials=4", "generations=4", "episodes=8")
        process = start(tmp_path, *given)
        names = ("00000", "00001", "00002", "00003")
        try:
            wait_for(lambda: all(len(lines) >= 2 for lines in numbers(tmp_path, *names).values()), process)
        finally:
            process.kill()
        process.wait(LIMIT)
        found = whole(tmp_path, *given)
        assert [each["generations"] for each in found["trials"]] == [4] * 4
        assert {each["iterations"] for each in found["trials"]} == {4}
        lineages = numbers(tmp_path, *names)
        assert [[line["generation"] for line in lines] for lines in lineages.values()] == [[1, 2, 3, 4]] * 4
        copied = [name for name, lines in lineages.items() if lines[0]["trial"] != name]
        assert copied, "no trial was copied"
        for lines in lineages.values():
            assert all(1e-5 <= line["settings"]["lr_actor"] <= 1e-2 for line in lines)


class TestHalving:
    def test_stops_the_worse_early_and_varies_what_a_resume_cannot(self, tmp_path):
        # A rate of 1 ruins the model in one step, so that its trial is worse than the others beyond
        # chance.
        space = {"lr_actor": {"choice": [1e-5, 1.0]}, "lora_r": {"choice": [2, 4]}}
        base = {"evaluation_episodes": 64}
        tuning = small_search(tmp_path, base=base, scheduler="asha", trials=6, generations=3, episodes=8, space=space)
        found = report_best(tuning, summary(tuning, tune(tuning)), lambda text: None)
        ended = [each["generations"] for each in found["trials"]]
        assert all(each["finished"] for each in found["trials"])
        assert max(ended) == 3 > min(ended), ended
        assert {each["settings"]["lr_actor"] for each in found["trials"] if each["generations"] < 3} == {1.0}
        assert {each["settings"]["lora_r"] for each in found["trials"]} <= {2, 4}


def test_a_trial_that_asks_for_too_much_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="asks for 512 CPUs, and Ray has"):
        tune(small_search(tmp_path, cpus_per_trial=512))
    assert not ray.is_initialized()
