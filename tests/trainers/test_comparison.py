"""Runs side by side: real runs, what is said of each, and what their settings differ in."""

import json
import re
import shutil

import pytest
from small_runs import small_config

from torchrl_llm.cli import main
from torchrl_llm.record import Evaluation, paired_comparison
from torchrl_llm.record.table import read_metrics
from torchrl_llm.report import compare_runs, plot_runs
from torchrl_llm.trainers import RunConfig
from torchrl_llm.trainers.report import run_and_report
from torchrl_llm.trainers.run import build_run
from torchrl_llm.trainers.run_info import run_info


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Three short runs: two of LLMREINFORCE on the same tasks with other learning rates, one of GRPO with another seed."""
    root = tmp_path_factory.mktemp("runs")
    settings = {"max_iterations": 2, "final_episodes": 32}
    for name, more in {
        "slow": {"lr_actor": 1e-4},
        "fast": {"lr_actor": 2e-2},
        "grpo": {"algo": "GRPO", "group_size": 4, "scale": "batch", "seed": 5},
    }.items():
        config = small_config(root, **settings | more | {"output_dir": root / name})
        run_and_report(config, lambda config=config: build_run(config), say=lambda _: None)
    return root


def cells(text: str) -> dict[str, dict[str, str]]:
    """The table: run -> column -> cell."""
    header, *lines = text.split("\n\n")[0].splitlines()
    names = re.split(r"\s{2,}", header)
    return {line.split()[0]: dict(zip(names, re.split(r"\s{2,}", line), strict=True)) for line in lines}


class TestCompareRuns:
    def test_table_has_the_results_of_each(self, runs):
        table = cells(compare_runs([runs / "slow", runs / "fast", runs / "grpo"]))
        assert list(table) == ["slow", "fast", "grpo"]
        for name, line in table.items():
            result = json.loads((runs / name / "result.json").read_text())
            assert line["before"] == f"{result['success_before']:.3f}"
            assert line["after"] == f"{result['success_after']:.3f}"
            assert line["seed"] == str(result["seed"])
            low, high = result["success_ci95"]
            assert line["95 % interval"] == f"{low:.3f} to {high:.3f}"

    def test_evaluations_are_paired_where_they_are_of_the_same_tasks(self, runs):
        table = cells(compare_runs([runs / "slow", runs / "fast", runs / "grpo"]))
        both = [
            Evaluation(**json.loads((runs / name / "evaluation_after.json").read_text())) for name in ("slow", "fast")
        ]
        found = paired_comparison(*both)
        assert found.gained + found.lost > 0
        assert table["fast"]["gained, lost"].startswith(f"{found.gained}, {found.lost} against slow")
        history = read_metrics(runs / "slow" / "metrics.csv")
        spent = sum(
            each[f"time/{phase}_s"]
            for each in history
            for phase in ("rollout", "score", "update", "evaluation")
            if f"time/{phase}_s" in each
        )
        assert table["slow"]["seconds"] == f"{spent:,.0f}"
        assert table["slow"]["gained, lost"] == table["grpo"]["gained, lost"] == "-"

    def test_settings_that_differ(self, runs):
        text = compare_runs([runs / "slow", runs / "fast", runs / "grpo"])
        lines = text.split("\n\n")[1].splitlines()
        assert "algo: LLMREINFORCE (slow, fast), GRPO (grpo)" in lines
        assert "scale: - (slow, fast), batch (grpo)" in lines
        assert any(line.startswith("lr_actor: 0.0001 (slow), 0.02 (fast)") for line in lines)
        # Neither the seed nor a folder, and nothing that only one algorithm has and nobody gave.
        assert {line.split(":")[0] for line in lines} == {"algo", "group_size", "lr_actor", "scale", "gamma", "kl_in"}

    def test_a_default_of_an_algorithm_is_the_number_it_stands_for(self, runs):
        assert "gamma: 0.9 (slow), 1.0 (grpo)" in compare_runs([runs / "slow", runs / "grpo"])

    def test_runs_of_earlier_versions_and_unfinished_ones(self, runs, tmp_path):
        old = shutil.copytree(runs / "slow", tmp_path / "old")
        (old / "evaluation_after.json").unlink()
        info = json.loads((old / "run.json").read_text())
        del info["settings"]
        (old / "run.json").write_text(json.dumps(info))
        unfinished = shutil.copytree(runs / "fast", tmp_path / "unfinished")
        for name in ("result.json", "evaluation_after.json"):
            (unfinished / name).unlink()
        text = compare_runs([old, unfinished])
        assert "settings that an earlier version did not write: old" in text
        assert cells(text)["unfinished"]["after"] == cells(text)["old"]["gained, lost"] == "-"

    def test_runs_that_differ_in_their_seed_alone_are_taken_together(self, runs, tmp_path):
        for name, seed, after in (("first", 7, 0.25), ("second", 8, 0.75)):
            folder = shutil.copytree(runs / "slow", tmp_path / name)
            for file, more in (("run.json", {"seed": seed}), ("result.json", {"success_after": after})):
                (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | more))
        shutil.copytree(runs / "fast", tmp_path / "fast")
        text = compare_runs([tmp_path / name for name in ("first", "second", "fast")])
        (header, *lines) = text.split("\n\n")[1].splitlines()
        (line,) = lines  # of "fast" there is one run
        assert header.split()[:2] == ["over", "seeds"]
        assert line.startswith("lr_actor=0.0001  ")
        assert line.split()[1] == "2"
        assert line.split()[-2:] == ["0.500", "0.250"]

    def test_an_evaluation_of_another_version_or_damaged(self, runs, tmp_path):
        other = shutil.copytree(runs / "fast", tmp_path / "other")
        file = other / "evaluation_after.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"newer": 1}))
        assert "against" in list(cells(compare_runs([runs / "slow", other])).values())[1]["gained, lost"]
        for damaged in ('{"episodes": 1}', '{"episodes": 1', "[]"):
            file.write_text(damaged)
            assert list(cells(compare_runs([runs / "slow", other])).values())[1]["gained, lost"] == "-"
        file.write_text('{"episodes": 1')
        assert "evaluation_after.json could not be read" in compare_runs([runs / "slow", other])

    def test_a_run_is_shown_once(self, runs):
        assert len(cells(compare_runs([runs / "slow", runs / "slow"]))) == 1


class TestPlot:
    def test_is_of_the_format_that_its_name_says(self, runs, tmp_path):
        plot_runs([runs / "slow", runs / "grpo"], tmp_path / "runs.svg")
        text = (tmp_path / "runs.svg").read_text()
        assert "<svg" in text
        with pytest.raises(ValueError, match=r"runs\.xyz'; expected a file that ends in one of"):
            plot_runs([runs / "slow"], tmp_path / "runs.xyz")


class TestCommand:
    def test_prints_and_draws(self, runs, tmp_path, capsys):
        assert main(["compare", str(runs / "slow"), str(runs / "fast"), "--plot", str(tmp_path / "runs.png")]) == 0
        assert "lr_actor: 0.0001 (slow), 0.02 (fast)" in capsys.readouterr().out
        assert (tmp_path / "runs.png").read_bytes().startswith(b"\x89PNG")

    def test_refuses_what_is_no_run(self, runs, tmp_path, capsys):
        assert main(["compare", str(runs / "slow"), str(tmp_path)]) == 2
        assert "holds nothing of a run" in capsys.readouterr().err


class TestSettings:
    def test_those_without_effect_are_left_out(self):
        shown = run_info(RunConfig(algo="GRPO", group_size=4))["settings"]
        assert not {"state", "alone", "potential", "tree_depth", "lmbda", "tensor_parallel_size"} & shown.keys()
        state = {"credit": "state", "state": "floor", "baseline": "leave_one_out", "scale": "none"}
        assert run_info(RunConfig(algo="GRPO", group_size=4, **state))["settings"]["state"] == "floor"
