"""Without an extra, what needs it ends in a sentence: the extras of Ray, the games and completion.
Others are tested with what they bring."""

from __future__ import annotations

import sys

import pytest

from torchrl_llm.cli import main
from torchrl_llm.envs import EnvironmentUnavailableError, resolve_env
from torchrl_llm.runs import RunSettings, build_run
from torchrl_llm.utils.optional import MissingExtraError


def test_rollouts_on_ray(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)  # what cannot be imported looks like this
    config = RunSettings.from_values(model_path="tiny", collector="ray", ray_workers=1, output_dir=tmp_path / "run")
    with pytest.raises(MissingExtraError, match=r"needs 'ray': pip install 'torchrl-llm\[ray\]'"):
        build_run(config)
    assert not (tmp_path / "run").exists()


def test_crosswords(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    for name in [name for name in sys.modules if name.startswith("gem.") and "crossword" in name.lower()]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(EnvironmentUnavailableError, match="It needs a package: pip install pandas"):
        resolve_env("game:Crosswords-v0-easy").make()


def test_completion(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "shtab", None)
    with pytest.raises(SystemExit) as ended:
        main(["--print_completion", "bash"])
    assert ended.value.code == 2
    assert "Completion needs 'shtab': pip install 'torchrl-llm[cli]'" in capsys.readouterr().err
