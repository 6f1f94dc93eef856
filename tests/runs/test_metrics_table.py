"""The table of a run's metrics: every iteration once, every metric under its name, whole after a
crash."""

import csv
import math

import pandas as pd
import pytest
from small_runs import small_config
from test_checkpoint import PowerCut, Stop

from torchrl_llm.runs import build_run
from torchrl_llm.runs.table import FILE, read_metrics, table_text
from torchrl_llm.runs.trackers import MetricsTable
from torchrl_llm.trainers import Callback

SAVED = {"save_checkpoints": True, "checkpoint_interval": 1}


class Remembers(Callback):
    """The file after each iteration."""

    def __init__(self, path):
        self.path, self.texts, self.inodes = path, [], []

    def on_iteration(self, trainer, metrics):
        self.texts.append(self.path.read_text())
        self.inodes.append(self.path.stat().st_ino)


def test_a_run_is_one_table_of_its_metrics(tmp_path):
    config = small_config(tmp_path, max_iterations=4, evaluation_interval=3)
    watch = Remembers(config.output.output_dir / FILE)
    history = build_run(config, callbacks=[watch]).trainer.train()
    table = pd.read_csv(watch.path, float_precision="round_trip")
    assert list(table.columns[:3]) == ["iteration", "rollout/steps", "rollout/episodes"]
    assert list(table["iteration"]) == [1, 2, 3, 4]
    assert set(table.columns[1:]) == {name for metrics in history for name in metrics}
    for row, metrics in zip(table.to_dict("records"), history, strict=True):
        for name in table.columns[1:]:
            value = metrics.get(name, math.nan)
            assert row[name] == value or (math.isnan(row[name]) and math.isnan(value)), name
    # The evaluation of the third iteration brings columns; before, rows are appended to the same
    # file.
    assert "evaluation/success" not in watch.texts[1]
    assert table["evaluation/success"].notna().tolist() == [False, False, True, True]
    assert watch.inodes[0] == watch.inodes[1] != watch.inodes[2] == watch.inodes[3]
    assert watch.texts[1].startswith(watch.texts[0])


@pytest.mark.extra
def test_a_resumed_run_has_each_iteration_once(tmp_path):
    with pytest.raises(PowerCut):
        build_run(small_config(tmp_path, max_iterations=4, **SAVED), callbacks=[Stop(3)]).trainer.train()
    path = tmp_path / "run" / FILE
    assert len(read_metrics(path)) == 3  # and two are saved
    with path.open("a") as file:
        file.write("4,1")
    assert len(read_metrics(path)) == 3
    run = build_run(small_config(tmp_path, max_iterations=4, resume=True, **SAVED))
    history = run.trainer.train()
    assert path.read_text() == table_text(history)
    assert [row[0] for row in csv.reader(path.open())] == ["iteration", "1", "2", "3", "4"]


def test_what_is_added_after_an_iteration_is_in_no_table_of_a_resumed_run_either(tmp_path):
    class AddsLate(Callback):
        def on_iteration(self, trainer, metrics):
            metrics["mine/late"] = 1.0

    config = small_config(tmp_path, max_iterations=1, **SAVED)
    build_run(config, callbacks=[AddsLate()]).trainer.train()
    longer = small_config(tmp_path, max_iterations=2, resume=True, accept_changes=["max_iterations"], **SAVED)
    history = build_run(longer, callbacks=[AddsLate()]).trainer.train()
    assert not any("mine/late" in metrics for metrics in history + read_metrics(tmp_path / "run" / FILE))


def test_a_run_without_an_iteration_has_no_table(tmp_path):
    path = tmp_path / FILE
    path.write_text("iteration\n")
    run = build_run(small_config(tmp_path))
    MetricsTable(path).on_start(run.trainer)
    assert not path.exists()
    run.close()


class TestReading:
    def test_what_was_written(self, tmp_path):
        history = [
            {"rollout/steps": 3.0, "evaluation/success/a, b": 1 / 3, "critic/explained_variance": math.nan},
            {"rollout/steps": 6.0, "my/infinite": math.inf},
        ]
        (tmp_path / FILE).write_text(table_text(history))
        assert str(read_metrics(tmp_path / FILE)) == str(history)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("step,value\n1,2\n", "begins with 'step,value'; expected a table of metrics"),
            ("", "begins with ''"),
            ("iteration,rollout/steps\n1\n", "shorter"),
            ("iteration,rollout/steps\n1,no\n", "'no'"),
        ],
    )
    def test_other_files_are_refused(self, tmp_path, text, message):
        (tmp_path / FILE).write_text(text)
        with pytest.raises(ValueError, match=message):
            read_metrics(tmp_path / FILE)
