"""The files of runs that may be a stranger's, as ``compare`` reads them."""

import json

import pytest

from torchrl_llm.cli import main
from torchrl_llm.utils.terminal import UNSEEN

BAD = "x\x1b]0;owned\x07\x1b[2J\u202e\ud800\nall runs   passed"


def test_texts_of_strangers_neither_steer_the_terminal_nor_add_lines(tmp_path, capsys):
    for name, value in (("one", "tiny"), (f"two{BAD[:-20]}".replace("\ud800", ""), BAD)):
        (tmp_path / name).mkdir()
        info = {"seed": 1, "settings": {"model_path": value, f"{BAD}": value}, "changed": {"model_path": [value, "y"]}}
        (tmp_path / name / "run.json").write_text(json.dumps(info))
        (tmp_path / name / "metrics.csv").write_text(f"iteration,{BAD!r}\n{BAD!r}\n")
    assert main(["compare", *map(str, sorted(tmp_path.iterdir()))]) == 0
    out = capsys.readouterr().out
    assert not UNSEEN.search(out)
    assert "all runs   passed" in out
    assert not any(line.startswith("all runs") for line in out.splitlines())


@pytest.mark.parametrize("name", ["run.json", "result.json", "evaluation_before.json", "evaluation_after.json"])
def test_entries_of_another_kind_are_left_out_and_named(tmp_path, capsys, name):
    values = ("\x1b[2J", 10**400, float("nan"), [], {}, [1, 2, 3], {"a": 1}, True, {"versions": 3}, [[]])
    keys = ("seed", "settings", "changed", "environment", "machine", "success_after", "success_ci95", "paired")
    keys += (
        "success",
        "outcomes",
        "task_digest",
        "beginnings",
        "iterations",
        "wall_s",
        "peak_rss_mb",
        "title",
        "episodes",
    )
    (tmp_path / "run.json").write_text('{"seed": 1}')
    for number, value in enumerate(values):
        (tmp_path / name).write_text(json.dumps(dict.fromkeys(keys, value) | {"started": "now"}))
        assert main(["compare", str(tmp_path)]) == 0, value
        shown = capsys.readouterr().out
        assert not UNSEEN.search(shown)
        assert f"{name}: " in shown or number == 2
        assert main(["compare", str(tmp_path), str(tmp_path)]) == 0
