"""Episodes that a run keeps: which, with what, at no change of the run, and the same ones after a
resume."""

from __future__ import annotations

import os
import signal
from functools import partial
from typing import ClassVar

import numpy as np
import pytest
import torch
from instances import usual
from small_runs import small_config, weights

from torchrl_llm import keys
from torchrl_llm.report import run_and_report, write_report
from torchrl_llm.runs import Interrupted, RolloutRecorder, build_run
from torchrl_llm.runs.recording import read_recording
from torchrl_llm.trainers import Callback


class Copies(Callback):
    """The rows that each update learned from, by iteration."""

    def __init__(self):
        self.rows = {}

    def on_batch(self, trainer, rows, metrics):
        self.rows[trainer.iteration] = rows.clone()


class Stops(Callback):
    """A signal at the end of an iteration."""

    def __init__(self, iteration):
        self.iteration = iteration

    def on_iteration(self, trainer, metrics):
        if trainer.iteration == self.iteration:
            os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture(autouse=True, scope="module")
def _handler():
    """Python's own: a shell starts what runs in its background with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def recordings(config):
    return {path.stem: path for path in sorted((config.output.output_dir / "rollouts").glob("*.safetensors"))}


def names(*iterations):
    return [f"iteration-{iteration:012d}" for iteration in iterations]


@pytest.mark.extra
def test_first_last_and_every_few_are_kept_as_the_update_saw_them(tmp_path):
    copies = Copies()
    options = {"kl_coeff": 0.1, "epochs": 2, "minibatch_size": 4, "max_iterations": 5, "record_interval": 2}
    config = small_config(tmp_path, "LLMPPO", **options)
    build_run(config, callbacks=[copies]).trainer.train()
    found = recordings(config)
    assert list(found) == names(1, 2, 4, 5)
    for name, path in found.items():
        recording, rows = read_recording(path), copies.rows[int(name[10:]) - 1]
        arrays, width = recording.arrays, recording.arrays["tokens"].shape[1]
        places = [rows[keys.EPISODE_ID].tolist().index(episode) for episode in arrays["episode_id"].tolist()]
        for key in ("tokens", "turn_ids", "advantage", "sample_log_prob", "ref_log_prob"):
            assert np.array_equal(arrays[key], rows[key][places][:, :width].cpu().numpy()), key
        # Four rows a step; of both, a task's episodes are recorded, if not all.
        actions = (arrays["turn_ids"] >= 0) & (arrays["loss_weight"] > 0)
        assert np.array_equal(actions, arrays["turn_ids"] >= 0)
        assert 0 < arrays["loss_weight"].sum() <= 2.001
        assert np.abs(arrays["log_prob"] - arrays["sample_log_prob"])[actions].max() > 0
        assert (arrays["entropy"][actions] > 0).all()
        assert (recording.gamma, recording.missing, recording.interval) == (0.99, {}, 2)
        ids = rows[keys.TOKENS][places][rows[keys.ATTENTION_MASK][places]]
        assert set(recording.pieces) == set(ids.tolist())
    write_report(config.output.output_dir)
    pages = (config.output.output_dir / "episodes.md").read_text().split("# Episodes of iteration ")[1:]
    assert [page.partition(",")[0] for page in pages] == ["1", "2", "4", "5"]
    assert all(1 <= page.count("\n## Episode ") <= 4 for page in pages)


@pytest.mark.parametrize("algo", usual(["LLMPPO", "GRPO"]))
def test_no_number_of_a_run_changes(tmp_path, algo):
    found = []
    for interval in (0, 1):
        config = small_config(tmp_path / str(interval), algo, max_iterations=3, record_interval=interval, lr_actor=1e-3)
        run = build_run(config)
        history = run.trainer.train()
        numbers = [{name: value for name, value in each.items() if "time/" not in name} for each in history]
        found.append((repr(numbers), weights(run)))
        assert bool(recordings(config)) == bool(interval)
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])


def test_the_same_tasks_are_followed(tmp_path):
    config = small_config(tmp_path, max_iterations=3, batch_size=64, num_envs=32, record_interval=1, record_tasks=2)
    build_run(config).trainer.train()
    tasks = [set(read_recording(path).arrays["task_id"].tolist()) for path in recordings(config).values()]
    assert tasks[0] == tasks[1] == tasks[2]
    assert len(tasks[0]) == 2


class TestResume:
    options: ClassVar = {
        "max_iterations": 6,
        "save_checkpoints": True,
        "checkpoint_interval": 2,
        "record_interval": 2,
        "lr_actor": 1e-3,
    }

    @pytest.fixture(scope="class")
    def whole(self, tmp_path_factory):
        config = small_config(tmp_path_factory.mktemp("whole"), **self.options)
        build_run(config).trainer.train()
        return {name: path.read_bytes() for name, path in recordings(config).items()}

    @pytest.mark.parametrize("stop", usual([3, 1, 4]))
    def test_nothing_is_lost_or_doubled(self, tmp_path, whole, stop):
        config = small_config(tmp_path, **self.options)
        with pytest.raises(Interrupted):
            build_run(config, callbacks=[Stops(stop)]).trainer.train()
        assert list(recordings(config)) == names(*sorted({1, 2, stop} if stop > 1 else {1}))
        again = build_run(small_config(tmp_path, **self.options, resume=True))
        again.trainer.train()
        assert {name: path.read_bytes() for name, path in recordings(config).items()} == whole

    @pytest.mark.extra
    def test_an_iteration_whose_evaluation_failed_is_kept(self, tmp_path, whole):
        class Fails(Callback):
            def on_evaluation(self, trainer, metrics):
                raise RuntimeError("no")

        options = self.options | {"evaluation_interval": 4}
        with pytest.raises(RuntimeError, match="no"):
            build_run(small_config(tmp_path, **options), callbacks=[Fails()]).trainer.train()
        config = small_config(tmp_path, **options, resume=True)
        build_run(config).trainer.train()
        found = {name: read_recording(path) for name, path in recordings(config).items()}
        assert list(found) == list(whole)
        assert set(found[names(4)[0]].missing) == {"log_prob", "entropy", "clipped"}
        assert found[names(6)[0]].missing == {}

    @pytest.mark.extra
    def test_a_damaged_recording_does_not_stop_a_resume(self, tmp_path, caplog):
        config = small_config(tmp_path, **self.options | {"max_iterations": 3})
        build_run(config).trainer.train()
        recordings(config)[names(2)[0]].write_bytes(b"no")
        longer = self.options | {"resume": True, "accept_changes": ["max_iterations"]}
        build_run(small_config(tmp_path, **longer)).trainer.train()
        assert "is not a recording, or is damaged" in caplog.text
        assert names(6)[0] in recordings(config)

    @pytest.mark.extra
    def test_what_comes_after_the_checkpoint_is_written_again(self, tmp_path, whole):
        config = small_config(tmp_path, **self.options | {"max_iterations": 3})
        build_run(config).trainer.train()
        path = recordings(config)[names(2)[0]]
        # by a run that was killed later
        (path.parent / f"{names(4)[0]}.safetensors").write_bytes(path.read_bytes())
        longer = self.options | {"resume": True, "accept_changes": ["max_iterations"]}
        build_run(small_config(tmp_path, **longer)).trainer.train()
        found = {name: path.read_bytes() for name, path in recordings(config).items()}
        assert list(found) == list(whole)
        assert found[names(4)[0]] == whole[names(4)[0]]


def test_an_interrupted_run_keeps_its_last_iteration_and_says_what_it_lacks(tmp_path):
    config = small_config(tmp_path, max_iterations=9, record_interval=5)
    with pytest.raises(Interrupted):
        build_run(config, callbacks=[Stops(3)]).trainer.train()
    first, last = map(read_recording, recordings(config).values())
    assert (first.iteration, first.missing, last.iteration) == (1, {}, 3)
    assert last.missing["entropy"] == "the run ended before these rows were scored"
    assert "log_prob" in first.arrays
    assert "log_prob" not in last.arrays


class TestRunAndReport:
    def test_the_page_is_written_at_the_end(self, tmp_path):
        config = small_config(tmp_path, "LLMPPO", max_iterations=2, record_interval=1, seed=3)
        said = []
        run_and_report(config, partial(build_run, config), say=said.append)
        assert list(recordings(config)) == ["after", "before", *names(1, 2)]
        text = (config.output.output_dir / "report.html").read_text()
        assert "report.html, result.json" in said[-1]
        assert "max_iterations=2" in text
        assert "<code>seed</code>" in text
        assert text.count("<svg") > 5

    def test_also_after_ctrl_c(self, tmp_path):
        config = small_config(tmp_path, max_iterations=9, save_checkpoints=True)
        with pytest.raises(Interrupted):
            run_and_report(config, partial(build_run, config, callbacks=[Stops(2)]), say=lambda line: None)
        text = (config.output.output_dir / "report.html").read_text()
        assert "interrupted by SIGINT" in text
        assert "not evaluated" in text

    def test_a_report_that_fails_loses_nothing(self, tmp_path, caplog):
        class Blocks(Callback):
            """Makes a folder where the page is to be."""

            def on_end(self, trainer):
                (tmp_path / "run" / "report.html").mkdir()

        config = small_config(tmp_path, max_iterations=1)
        result = run_and_report(config, partial(build_run, config, callbacks=[Blocks()]), say=lambda line: None)
        assert result["iterations"] == 1
        assert (config.output.output_dir / "result.json").exists()
        assert "report.html or episodes.md could not be written" in caplog.text

    def test_a_new_run_moves_the_recordings_aside(self, tmp_path):
        config = small_config(tmp_path, max_iterations=1)
        build_run(config).trainer.train()
        build_run(small_config(tmp_path, max_iterations=2, overwrite=True)).trainer.train()
        assert list(recordings(config)) == names(1, 2)
        assert (config.output.output_dir / "previous-1" / "rollouts" / f"{names(1)[0]}.safetensors").exists()

    def test_a_run_that_is_kept_aside_keeps_its_recordings(self, tmp_path):
        saved = {"save_checkpoints": True, "checkpoint_interval": 1, "record_interval": 1, "keep_checkpoints": 9}
        config = small_config(tmp_path, max_iterations=3, **saved)
        build_run(config).trainer.train()
        first = sorted((config.output.output_dir / "checkpoints").glob("checkpoint-*"))[0]
        build_run(small_config(tmp_path, max_iterations=3, **saved, resume_from=first)).trainer.train()
        aside = config.output.output_dir / "previous-1" / "rollouts"
        assert sorted(path.stem for path in aside.glob("*.safetensors")) == names(1, 2, 3)

    def test_it_can_be_written_again_without_the_run(self, tmp_path):
        config = small_config(tmp_path, max_iterations=1)
        build_run(config).trainer.train()
        assert write_report(config.output.output_dir) == config.output.output_dir / "report.html"


def test_a_tracker_that_fails_does_not_end_the_run(tmp_path, caplog, monkeypatch):
    def gone(*args, **kwargs):
        raise ConnectionError("gone")

    monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter.add_text", gone)
    run = build_run(small_config(tmp_path, max_iterations=2, record_interval=1, log_episodes=1, tensorboard=True))
    assert len(run.trainer.train()) == 2
    assert "the episodes of iteration 1 did not reach every tracker" in caplog.text
    assert list(recordings(run.config)) == names(1, 2)


def test_one_recorder_serves_any_trainer(tmp_path):
    """It is a callback like any other."""
    config = small_config(tmp_path, max_iterations=1, record_interval=0)
    run = build_run(config)
    run.trainer.callbacks = (*run.trainer.callbacks, RolloutRecorder(tmp_path / "mine", run.tokenizer, tasks=1))
    run.trainer.train()
    assert [path.name for path in (tmp_path / "mine").iterdir()] == [f"{names(1)[0]}.safetensors"]
