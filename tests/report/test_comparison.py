"""Runs side by side: real runs, what is said of each, and what their settings differ in."""

import json
import re
import shutil
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
from small_runs import small_config
from torchrl.objectives.value import GAE

from torchrl_llm.cli import main
from torchrl_llm.metrics import Evaluation, paired_comparison
from torchrl_llm.objectives import LLMPPOLoss, LLMReinforceLoss, ReBN
from torchrl_llm.report import compare_runs, plot_runs
from torchrl_llm.report.run_report import RunReport, run_and_report
from torchrl_llm.runs import RunSettings
from torchrl_llm.runs.loss_settings import NO_ACTOR, NO_CRITIC
from torchrl_llm.runs.run import build_run
from torchrl_llm.runs.run_info import run_info
from torchrl_llm.runs.table import read_metrics
from torchrl_llm.testing.worlds import Coins
from torchrl_llm.trainers.callbacks import Callback


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Three short runs: two of LLMREINFORCE on the same tasks with other learning rates, one of
    GRPO with another seed."""
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
            assert line["trained on"] == f"{result['evaluation_task_overlap']:.0%}"

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
        assert {line.split(":")[0] for line in lines} == {"algo", "group_size", "lr_actor", "scale", "gamma"}

    def test_a_default_of_an_algorithm_is_the_number_it_stands_for(self, runs):
        assert "gamma: 0.9 (slow), 1 (grpo)" in compare_runs([runs / "slow", runs / "grpo"])

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
        assert line.split()[-3:-1] == ["0.500", "0.250"]

    def test_means_are_of_the_seeds_that_have_ended_each_once(self, runs, tmp_path):
        for name, seed, after in (("a", 1, 0.75), ("again", 1, 0.75), ("b", 2, 0.25), ("begun", 3, None)):
            folder = shutil.copytree(runs / "slow", tmp_path / name)
            for file, more in (("run.json", {"seed": seed}), ("result.json", {"success_after": after})):
                (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | more))
        text = compare_runs([tmp_path / name for name in ("begun", "a", "again", "b")])
        (line,) = text.split("\n\n")[1].splitlines()[1:]
        assert line.split()[:4] == ["all", "2", "of", "3"]
        assert line.split()[-3:-1] == ["0.500", "0.250"]

    def test_an_evaluation_of_an_earlier_end_is_not_compared(self, runs, tmp_path):
        """As after a resume that was interrupted: the result is new, and has no evaluation."""
        resumed = shutil.copytree(runs / "fast", tmp_path / "resumed")
        result = json.loads((resumed / "result.json").read_text())
        (resumed / "result.json").write_text(json.dumps(result | {"success_after": None}))
        assert list(cells(compare_runs([runs / "slow", resumed])).values())[1]["gained, lost"] == "-"

    @pytest.mark.extra
    def test_a_resumed_run_has_no_result_until_it_ends_again(self, tmp_path):
        """Its end of before may belong to another setting. It kept evaluation_after.json, also
        where it was interrupted."""
        config = small_config(tmp_path, save_checkpoints=True, max_iterations=1, record_interval=0)
        run_and_report(config, partial(build_run, config), say=lambda _: None)
        other = tmp_path / "other"
        shutil.copytree(config.output.output_dir, other)
        pair = [other, config.output.output_dir]
        assert cells(compare_runs(pair))["run"]["gained, lost"].startswith("0, 0 against other")
        config = config.replace(resume=True, max_iterations=2, accept_changes=["max_iterations"])
        run = build_run(config)
        run.begin()  # and is killed
        after = cells(compare_runs(pair))["run"]
        assert (after["after"], after["95 % interval"], after["gained, lost"]) == ("-", "-", "-")
        RunReport(lambda _: None).write(run, "interrupted by SIGINT")
        run.close()
        assert not (config.output.output_dir / "evaluation_after.json").exists()
        run_and_report(config, partial(build_run, config), say=lambda _: None)
        assert "against other" in cells(compare_runs(pair))["run"]["gained, lost"]

    def test_no_probability_is_zero(self, runs, tmp_path):
        folders = [shutil.copytree(runs / "slow", tmp_path / name) for name in ("never", "always")]
        for folder, outcome in zip(folders, "01", strict=True):
            file = folder / "evaluation_after.json"
            many = {"episodes": 1500, "outcomes": outcome * 1500, "beginnings": "0" * 8 * 1500}
            file.write_text(json.dumps(json.loads(file.read_text()) | many))
        assert cells(compare_runs(folders))["always"]["gained, lost"] == "1500, 0 against never (p < 1e-300)"

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

    def test_names_every_run(self, runs, tmp_path):
        """Also one whose name matplotlib would hide."""
        shutil.copytree(runs / "slow", tmp_path / "_slow")
        shutil.copytree(runs / "grpo", tmp_path / "grpo")
        plot_runs([tmp_path / "_slow", tmp_path / "grpo"], tmp_path / "runs.svg")
        text = (tmp_path / "runs.svg").read_text()
        assert "<!-- _slow -->" in text
        assert "<!-- grpo -->" in text


class TestCommand:
    def test_prints_and_draws(self, runs, tmp_path, capsys):
        assert main(["compare", str(runs / "slow"), str(runs / "fast"), "--plot", str(tmp_path / "runs.png")]) == 0
        assert "lr_actor: 0.0001 (slow), 0.02 (fast)" in capsys.readouterr().out
        assert (tmp_path / "runs.png").read_bytes().startswith(b"\x89PNG")

    def test_refuses_what_is_no_run(self, runs, tmp_path, capsys):
        assert main(["compare", str(runs / "slow"), str(tmp_path)]) == 2
        assert "holds nothing of a run" in capsys.readouterr().err


GROUPS = {"algo": "LLMREINFORCE", "estimator": "GroupRelative", "group_size": 4}


@dataclass(eq=False)
class Nothing(LLMReinforceLoss):
    """Teaches nothing."""

    scale_of_nothing: float = 1.0
    """An option of its own."""

    def objective(self, log_ratio, advantage):
        return 0.0 * log_ratio


def nothing(config, models):
    return Nothing(models.actor, scale_of_nothing=float(config.trainer.seed), **config.loss_options(Nothing))


def discounting(gamma, config, models):
    return LLMReinforceLoss(models.actor, **config.loss_options() | {"estimator": ReBN(gamma=gamma)})


class Silent(Callback):
    """Has an option."""

    def __init__(self, strength):
        self.strength = strength


def shown(**settings):
    return run_info(RunSettings.from_values(**settings))["settings"]


class TestSettings:
    def test_those_without_effect_are_left_out(self):
        settings = shown(algo="GRPO", group_size=4)
        assert not {"state", "fallback", "potential", "tree_depth", "lmbda", "tensor_parallel_size"} & settings.keys()
        state = {"credit": "state", "state": "floor", "baseline": "leave_one_out", "scale": "none"}
        assert shown(algo="GRPO", group_size=4, **state)["state"] == "floor"
        assert "kl_in" not in shown(algo="LLMREINFORCE", kl_coeff=0.0)
        # Neither an option that only the algorithm's own estimator has, nor a part of the run.
        assert not {"lmbda", "value_network"} & shown(algo="LLMPPO", estimator="GroupRelative", group_size=4).keys()

    @pytest.mark.parametrize(
        ("settings", "other"),
        [
            ({"collector": "async", "max_staleness": 1}, {"sampler_level": "turn"}),
            ({"collector": "async", "max_staleness": 1}, {"sampler_bounds": 8.0}),
            ({"collector": "async", "max_staleness": 1, "sampler_level": "turn"}, {"sampler_reduction": "mean"}),
            ({"granularity": "token"}, {"gamma": 0.9}),
            ({"kl_coeff": 0.02}, {"kl_coeff": 0.03}),
            ({"kl_kind": "k2"}, {"kl_kind": "k3"}),
            (GROUPS, {"gamma": 0.9}),
        ],
    )
    def test_those_with_an_effect_differ(self, settings, other):
        """Staleness sets a correction, and granularity and estimator the default of gamma."""
        one, two = shown(**settings), shown(**settings | other)
        (name,) = other
        assert {key for key in one.keys() & two.keys() if one[key] != two[key]} == {name}

    @pytest.mark.parametrize(
        ("settings", "same"),
        [
            ({"kl_coeff": 1.0}, {"kl_coeff": 1}),
            ({"lr_actor": 1.0}, {"lr_actor": 1}),
            ({"clip_epsilon": (0.2, 1.0)}, {"clip_epsilon": [0.2, 1]}),
            ({"env_options": {"a": 1, "b": [1.0]}}, {"env_options": {"b": [1], "a": 1}}),
            (GROUPS, GROUPS | {"gamma": 1.0}),
            ({}, {"max_tokens": 4096}),
            ({}, {"max_staleness": 0}),
            ({}, {"ray_worker_gpus": 0}),
        ],
    )
    def test_equal_ones_are_the_same_text(self, settings, same):
        assert shown(**settings) == shown(**same)

    def test_an_estimator_and_options_of_any_kind(self):
        """TorchRL's own have gamma as a tensor, and a loss of one's own may have arrays as
        options."""
        config, options = RunSettings(), {"lmbda": 1.0, "value_network": None}
        losses = [
            LLMPPOLoss(NO_ACTOR, NO_CRITIC).make_value_estimator(GAE(gamma=gamma, **options)) for gamma in (0.5, 0.75)
        ]
        one, two = (run_info(config, loss)["settings"] for loss in losses)
        assert (one["gamma"], two["gamma"]) == ("0.5", "0.75")
        assert one["estimator"].startswith("torchrl.objectives.value.advantages:GAE")
        losses[0].critic_coeff = np.ones(3)
        assert "critic_coeff" in run_info(config, losses[0])["settings"]

    @pytest.mark.parametrize(
        ("settings", "expected"),
        [
            (GROUPS | {"gamma": 0.9}, ["0.9", "1.0"]),
            ({"granularity": "token", "gamma": 0.99}, ["0.99", "1.0"]),
            ({"gamma": 0.9}, ["0.9", "0.99"]),
        ],
    )
    def test_the_default_is_that_of_the_estimator(self, settings, expected):
        assert run_info(RunSettings.from_values(**settings))["changed"]["gamma"] == expected

    def test_what_was_given_in_python_and_a_loss_with_other_options_are_settings(self, tmp_path):
        """They were pooled as seeds of one setting, for run.json had nothing of them."""
        parts = {
            "stock": {},
            "again": {},
            "loss": {"make_loss": nothing},
            "other loss": {"make_loss": nothing},
            "gamma": {"make_loss": partial(discounting, 0.5)},
            "coins": {"env": partial(Coins, cells=5)},
            "more coins": {"env": partial(Coins, cells=6)},
            "weak": {"callbacks": [Silent(0.1)]},
            "strong": {"callbacks": [Silent(0.2)]},
        }
        for seed, (name, each) in enumerate(parts.items()):
            config = small_config(tmp_path, seed=seed, output_dir=tmp_path / name, record_interval=0)
            run = build_run(config, **each)
            run.begin()
            run.close()
            (tmp_path / name / "result.json").write_text(
                json.dumps({"success_after": 0.5, "started": run.open_folder.info["started"]})
            )
        text = compare_runs([tmp_path / name for name in parts])
        (over_seeds,) = (part.splitlines() for part in text.split("\n\n") if part.startswith("over seeds"))
        (pooled,) = over_seeds[1:]
        assert pooled.split()[-6:] == ["2", "-", "-", "0.500", "0.500", "-"]  # stock and again
        differences = text.split("\n\n")[-1]
        assert re.search(
            r"^env: - .*, torchrl_llm.testing.worlds:Coins #\w+ \(coins\), .* \(more coins\)$", differences, re.M
        )
        assert (
            "scale_of_nothing: - (stock, again, gamma, coins, more coins, weak, strong), 2 (loss), 3 (other loss)"
            in differences
        )
        assert (
            "gamma: 0.9 (stock, again, loss, other loss, coins, more coins, weak, strong), 0.5 (gamma)" in differences
        )
        assert "callbacks: " in differences
