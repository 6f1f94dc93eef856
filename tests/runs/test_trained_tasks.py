"""The share of evaluated tasks that was trained on: known, or said to be unknown; and beside every
win rate."""

import json
from functools import partial

import pytest
from small_runs import small_config

from torchrl_llm.report import run_and_report, write_report
from torchrl_llm.runs import build_run

# Ten secrets: every evaluation has tasks that were trained on, if anything was.
QUICK = {"save_checkpoints": True, "max_iterations": 1, "record_interval": 0, "batch_size": 32, "final_episodes": 16}


def overlap(config, train=False):
    """Before training, or after it."""
    run = build_run(config)
    try:
        if train:
            run.trainer.train()
        return run.final_evaluation().task_overlap
    finally:
        run.close()


@pytest.fixture(scope="module")
def warm(tmp_path_factory):
    """The checkpoint of a run."""
    folder = tmp_path_factory.mktemp("warm")
    assert overlap(small_config(folder, **QUICK | {"record_interval": 1}), train=True) >= 0.5
    return folder / "run" / "checkpoints" / "last"


class TestTrainedShare:
    @pytest.mark.extra
    def test_it_is_unknown_after_a_warm_start_from_transcripts_and_in_all_that_follows(self, tmp_path):
        """It was 0 %, though the conversations may be of the very tasks that are evaluated."""
        talk = [{"role": "user", "content": "Guess."}, {"role": "assistant", "content": "5"}]
        (tmp_path / "talks.jsonl").write_text(json.dumps({"messages": talk}))
        config = small_config(tmp_path, "SFT", **QUICK | {"demonstrations": str(tmp_path / "talks.jsonl")})
        assert overlap(config) == 0
        assert overlap(config, train=True) is None
        resumed = config.replace(resume=True)
        assert overlap(resumed) is None
        start = config.output.output_dir / "checkpoints" / "last"
        assert overlap(small_config(tmp_path, **QUICK | {"init_from": start, "output_dir": tmp_path / "next"})) is None

    def test_it_counts_what_weights_were_trained_on_before(self, tmp_path, warm):
        assert overlap(small_config(tmp_path, **QUICK)) == 0
        assert overlap(small_config(tmp_path, **QUICK | {"init_from": warm})) >= 0.5
        run = build_run(small_config(tmp_path, **QUICK))
        run.load_checkpoint(warm, load_optimizer=False)
        assert run.final_evaluation().task_overlap >= 0.5
        run.close()

    def test_recordings_say_their_tasks(self, tmp_path, warm):
        config = small_config(tmp_path, "SFT", **QUICK | {"demonstrations": str(warm.parents[1])})
        assert 0 < overlap(config, train=True) < 1  # four tasks are recorded

    def test_weights_that_do_not_say(self, tmp_path):
        run = build_run(small_config(tmp_path, **QUICK))
        run.models.save_pretrained(tmp_path / "weights")
        run.close()
        assert overlap(small_config(tmp_path, **QUICK | {"init_from": tmp_path / "weights"})) is None


class TestBesideTheWinRate:
    @pytest.mark.extra
    def test_in_the_report_and_on_the_console(self, tmp_path):
        config, said = small_config(tmp_path, **QUICK | {"evaluation_interval": 1}), []
        result = run_and_report(config, partial(build_run, config), say=said.append)
        share = f"{result['evaluation_task_overlap']:.0%}"
        assert said[0].endswith("trained on 0%")
        assert "trained on" in said[1]
        page = (config.output.output_dir / "report.html").read_text()
        assert "held-out" not in page.split("<script")[0]
        assert "tasks trained on" in page
        assert f"<td>{share} " in page


class TestEnded:
    def test_a_run_without_a_report_says_why_it_ended(self, tmp_path):
        config = small_config(tmp_path, **QUICK)
        run = build_run(config)
        run.begin()
        assert "it still runs, or was killed" in write_report(config.output.output_dir).read_text()
        run.trainer.train()
        run.close()
        page = write_report(config.output.output_dir).read_text()
        assert "max_iterations=1" in page
        assert "still runs" not in page
        again = build_run(config.replace(resume=True, max_iterations=2, accept_changes=["max_iterations"]))
        again.begin()
        assert "it still runs, or was killed" in write_report(config.output.output_dir).read_text()
        again.close()
