"""A model that the commands of a file share, trained by the command itself."""

from __future__ import annotations

import pytest
from command_runs import command

SMALL = (
    *("--model-path=tiny", "--dtype=float32", "--device=cpu", "--algo=LLMREINFORCE", "--lora-r=4", "--lr-actor=1e-2"),
    *("--env-name=game:GuessTheNumber-v0-easy", "--max-model-len=256", "--max-output-tokens=16", "--num-envs=8"),
    *("--batch-size=8", "--max-iterations=2", "--final-episodes=16", "--evaluation-episodes=8", "--kl-coeff=0.0"),
    "--evaluation-interval=1",
)
"""Two iterations of LoRA on the small model, in seconds."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a run, and what the command printed."""
    folder = tmp_path_factory.mktemp("run")
    done = command("train", *SMALL, "--output-dir=run", "--json", folder=folder)
    assert done.returncode == 0, done.stderr
    return folder / "run", done
