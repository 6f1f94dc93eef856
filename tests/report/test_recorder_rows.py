"""Which rows a recorder keeps, of rows that are made up."""

from types import SimpleNamespace

import torch
from recorded_runs import made_rows

from torchrl_llm import keys
from torchrl_llm.collectors.stock import StockCollector
from torchrl_llm.runs import RolloutRecorder
from torchrl_llm.runs.recording import read_recording
from torchrl_llm.testing.tiny import load_tiny_tokenizer


class Run:
    """A run's recorder, without the run."""

    env_names, iteration, steps, unfinished = ("a",), 0, 0, None
    stop_reason, weight_sync = None, None
    loss = SimpleNamespace(value_estimator=None)
    distributed = SimpleNamespace(is_main=True, sharded=True)
    rollouts = StockCollector()

    def record(self, recorder, tasks):
        """An iteration whose batch has these tasks, two episodes each."""
        recorder.on_batch(self, self.rows(tasks), {})
        self.iteration += 1
        recorder.on_iteration(self, {})

    @staticmethod
    def rows(tasks):
        rows = made_rows(2 * len(tasks))
        rows[keys.TASK_ID] = torch.tensor(tasks).repeat_interleave(2)
        return rows

    @staticmethod
    def tasks(path):
        return set(read_recording(path).arrays["task_id"].tolist())


def test_tasks_of_the_evaluation_before_and_of_the_first_batch_are_followed(tmp_path):
    run, tokenizer = Run(), load_tiny_tokenizer()
    recorder = RolloutRecorder(tmp_path, tokenizer, interval=1, tasks=2)
    recorder.record_evaluation(run, run.rows([100, 101]), "before")
    run.record(recorder, [1, 2, 3, 4, 5, 6])
    run.record(recorder, [6, 5, 3, 4, 2, 1])
    # A resumed one follows the same.
    recorder = RolloutRecorder(tmp_path, tokenizer, interval=1, tasks=2)
    recorder.on_start(run)
    run.record(recorder, [4, 3, 2, 1, 6, 5])
    found = [run.tasks(path) for path in sorted(tmp_path.glob("iteration-*.safetensors"))]
    assert found == [{1, 2}] * 3


def test_a_third_of_a_batch_at_most_is_recorded(tmp_path):
    """Or one task, so that something is."""
    run, tokenizer = Run(), load_tiny_tokenizer()
    for tasks, recorded in ((6, 2), (5, 1), (1, 1)):
        recorder = RolloutRecorder(tmp_path / str(tasks), tokenizer, interval=1, tasks=4)
        run.record(recorder, [*range(tasks)])
        (path,) = (tmp_path / str(tasks)).glob("iteration-*.safetensors")
        assert len(run.tasks(path)) == recorded


def test_rows_that_keep_a_process_in_step_are_no_episodes(tmp_path):
    run = Run()
    recorder = RolloutRecorder(tmp_path, load_tiny_tokenizer(), interval=1)
    rows = run.rows([1, 2])
    rows[keys.TURN_MASK][:] = False
    recorder.on_batch(run, rows, {})
    run.iteration = 1
    recorder.on_iteration(run, {})
    assert not list(tmp_path.iterdir())


def test_entropy_of_the_old_weights_is_not_that_after_the_update(tmp_path):
    run = Run()
    recorder = RolloutRecorder(tmp_path, load_tiny_tokenizer(), interval=1)
    rows = run.rows([1, 2])
    rows[keys.ENTROPY] = torch.ones_like(rows[keys.SAMPLE_LOG_PROB])
    recorder.on_batch(run, rows, {})
    run.iteration = 1
    recorder.on_iteration(run, {})
    (path,) = tmp_path.glob("*.safetensors")
    recording = read_recording(path)
    assert "entropy" not in recording.arrays
    assert "sharded" in recording.missing["entropy"]


def test_a_full_disk_does_not_end_a_run(tmp_path, caplog):
    (tmp_path / "rollouts").write_text("in the way")  # a file, where the folder should be
    run = Run()
    recorder = RolloutRecorder(tmp_path / "rollouts", load_tiny_tokenizer(), interval=1)
    run.record(recorder, [1, 2])
    assert "could not be recorded" in caplog.text
