"""What the folder of a run holds: whether a result belongs to the run's last start."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from torchrl_llm.runs.run_files import RunFiles


def write(folder: Path, *, result: dict, info: dict, iterations: int) -> RunFiles:
    """A run of this many iterations, whose result says that it was evaluated."""
    (folder / "rollouts").mkdir()
    for name in ("before", "iteration-000000000001", "after"):
        (folder / "rollouts" / f"{name}.safetensors").touch()
    files = {"result.json": {"success_after": 0.5} | result, "run.json": {"seed": 0} | info}
    for name, content in {**files, "evaluation_after.json": {"episodes": 1}}.items():
        (folder / name).write_text(json.dumps(content))
    lines = [f"{i},{8 * i}" for i in range(1, iterations + 1)]
    (folder / "metrics.csv").write_text("\n".join(["iteration,rollout/steps", *lines]) + "\n")
    files = RunFiles.of(folder)
    assert (len(files.history), files.problems) == (iterations, [])
    return files


class TestResult:
    @pytest.mark.parametrize(
        ("result", "info", "iterations"),
        [
            ({"started": "a", "iterations": 2}, {"started": "a"}, 2),
            # a metric was not written in time
            ({"started": "a", "iterations": 3}, {"started": "a"}, 2),
            ({"iterations": 2}, {"started": "a"}, 2),  # of 0.2.0, which did not say
            ({"started": "a", "iterations": 2}, {}, 2),
            ({}, {}, 2),
        ],
    )
    def test_of_the_last_start(self, tmp_path, result, info, iterations):
        files = write(tmp_path, result=result, info=info, iterations=iterations)
        assert files.result["success_after"] == 0.5
        assert files.after == {"episodes": 1}
        assert [path.stem for path in files.recordings] == ["before", "iteration-000000000001", "after"]

    @pytest.mark.parametrize(
        ("result", "info", "iterations"),
        [
            # resumed, and no iteration has ended
            ({"started": "a", "iterations": 2}, {"started": "b"}, 2),
            ({"started": "a", "iterations": 2}, {"started": "a"}, 3),
            ({"iterations": 2}, {"started": "b"}, 3),
        ],
    )
    def test_of_an_earlier_start(self, tmp_path, result, info, iterations):
        files = write(tmp_path, result=result, info=info, iterations=iterations)
        assert (files.result, files.after) == ({}, {})
        assert [path.stem for path in files.recordings] == ["before", "iteration-000000000001"]
