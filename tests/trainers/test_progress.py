"""The progress bar: what it counts, how often it is drawn, what it is called."""

import re

import pytest
from small_runs import small_config

from torchrl_llm.runs import build_run
from torchrl_llm.trainers import ProgressBar, TrainerConfig
from torchrl_llm.trainers.schedule import run_share


def drawn(text: str) -> list[str]:
    """The states of the bar, one for each time that it was drawn."""
    return [state for state in re.split("[\r\n]", text) if "turn" in state]


class TestProgressBar:
    def test_a_resumed_run_goes_on_where_it_was(self, tmp_path, capsys):
        settings = {"progress": True, "save_checkpoints": True, "checkpoint_interval": 1}
        run = build_run(small_config(tmp_path, **settings, max_iterations=2))
        run.trainer.train()
        first = drawn(capsys.readouterr().err)
        assert len(first) == 4  # at the start, after each iteration, at the end
        ends = [int(re.search(r"/(\d+) \[", state)[1]) for state in first]
        steps = [int(entry["rollout/steps"]) for entry in run.trainer.history]
        # where two iterations end, and not max_steps
        assert ends == [100_000, 2 * steps[0], steps[1], steps[1]]
        assert all(state.startswith("LLMREINFORCE: ") for state in first)

        more = {"max_iterations": 3, "resume": True, "accept_changes": ["max_iterations"]}
        run, before = build_run(small_config(tmp_path, **settings, **more)), run.trainer.steps
        run.trainer.train()
        err = capsys.readouterr().err
        assert "resumed at iteration 2" in err
        states = drawn(err)
        # None of them played now, and one iteration of three to come.
        assert re.search(rf"\| {before}/{round(before * 3 / 2)} \[00:00<\?", states[0])
        assert f"| {run.trainer.steps}/{run.trainer.steps} " in states[-1]
        assert "success=" in states[-1]

    def test_a_file_gets_a_line_now_and_then(self, tmp_path, capsys, monkeypatch):
        build_run(small_config(tmp_path / "often", progress=None, max_iterations=4)).trainer.train()
        # the others come within the interval
        (line,) = re.findall("iteration .*", capsys.readouterr().err)
        assert re.match(r"iteration 1, \d+ of \d+ turns: reward=\S+, success=\S+, kl_old", line.replace("policy/", ""))
        monkeypatch.setattr(ProgressBar, "line_interval", 0.0)
        build_run(small_config(tmp_path / "each", progress=None, max_iterations=4)).trainer.train()
        found = re.findall(r"iteration (\d+), (\d+) of (\d+)", capsys.readouterr().err)
        assert [int(number) for number, _, _ in found] == [1, 2, 3, 4]
        assert found[-1][1] == found[-1][2]

    @pytest.mark.parametrize(("progress", "shown"), [(None, False), (True, True), (False, False)])
    def test_is_for_somebody_who_watches_unless_it_is_asked_for(self, tmp_path, capsys, progress, shown):
        run = build_run(small_config(tmp_path, progress=progress, max_iterations=1))
        run.trainer.train()
        states = [state for state in drawn(capsys.readouterr().err) if not state.startswith("iteration")]
        assert bool(states) == shown

    def test_the_limit_that_comes_first_is_the_end(self):
        config = TrainerConfig(max_steps=1000, max_iterations=100, max_seconds=10.0)
        assert run_share(config, steps=10, iteration=1, seconds=5.0) == 0.5
        assert run_share(config, steps=10, iteration=20, seconds=1.0) == 0.2
        assert run_share(config, steps=1200, iteration=20, seconds=1.0) == 1.0
