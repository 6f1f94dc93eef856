"""Small runs for the pretended GPU: models of any number of layers, episodes of a fixed number of
turns."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from torchrl_llm.runs import Run, RunSettings, build_run
from torchrl_llm.testing.tiny import random_model
from torchrl_llm.testing.tokenizers import byte_tokenizer

TURNS = 3


class Rated:
    """Three turns, each paid by what is said, so that there is a gradient whatever a model says."""

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """Start an episode with a number, so that contexts differ."""
        self.turn = 0
        return f"Say anything, {random.Random(seed).randrange(10**6)}.", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """A reward that depends on every character."""
        self.turn += 1
        return "Go on.", sum(map(ord, action)) % 7 / 7, self.turn == TURNS, False, {}


def model_of(folder: Path, *, layers: int = 2) -> str:
    """A folder with a random model of heads that every attention kernel takes, made once."""
    path = folder / f"model-{layers}"
    if not path.exists():
        tokenizer = byte_tokenizer()
        random_model(tokenizer, hidden=32, heads=2, layers=layers, max_length=512).save_pretrained(path)
        tokenizer.save_pretrained(path)
    return str(path)


def run_of(folder: Path, *, layers: int = 2, env: Any = Rated, **settings: Any) -> Run:
    """A run of a random model in bfloat16 with LoRA, on the device that accelerate chooses."""
    defaults: dict[str, Any] = {
        "algo": "LLMPPO", "dtype": "bfloat16", "lora_r": 4, "num_envs": 4, "batch_size": 4, "max_model_len": 512,
        "max_output_tokens": 6, "min_output_tokens": 6, "max_iterations": 1, "lr_actor": 1e-3, "evaluation_interval": 0,
        "final_episodes": 4, "save_checkpoints": False, "record_interval": 0, "progress": False, "overwrite": True,
    }  # fmt: skip
    played = {"make_env": settings.pop("make_env")} if "make_env" in settings else {} if env is None else {"env": env}
    given = defaults | {"model_path": model_of(folder, layers=layers), "output_dir": folder / "run"} | settings
    return build_run(RunSettings.from_values(**given), **played)


def iterate(run: Run) -> None:
    """Collect a batch and learn from it."""
    run.trainer.learn(run.trainer.collect(iter(run.trainer.collector)))
