"""The progress bar: what it counts, how often it is drawn, what it is called."""

import re

from small_runs import small_config

from torchrl_llm.trainers import build_run


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
        assert all(state.startswith("LLMREINFORCE: ") for state in first)

        more = {"max_iterations": 3, "resume": True, "accept_changes": ["max_iterations"]}
        run, before = build_run(small_config(tmp_path, **settings, **more)), run.trainer.steps
        run.trainer.train()
        err = capsys.readouterr().err
        assert "resumed at iteration 2" in err
        states = drawn(err)
        assert re.search(rf"\| {before}/100000 \[00:00<\?", states[0])  # none of them played now
        assert f"| {run.trainer.steps}/100000 " in states[-1]
        assert "success=" in states[-1]
