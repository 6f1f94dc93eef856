"""What version 0.1.0 collected and learned, and what the library collects and learns now.

The recording holds rows and metrics of short runs. Tokens, ids, rewards and turns have to be
identical, floats equal to rounding. ``RECORD=1`` writes the recording anew: only after a change
that is meant to change what runs do, which the CHANGELOG then says.
"""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import pytest
import torch

from torchrl_llm.runs import RunSettings, build_run

RECORDING = Path(__file__).parent / "recorded" / "runs.pt.gz"

COMMON = {
    "model_path": "tiny",
    "env_name": "game:GuessTheNumber-v0-easy",
    "num_envs": 4,
    "batch_size": 8,
    "max_iterations": 2,
    "max_output_tokens": 12,
    "evaluation_episodes": 4,
    "evaluation_interval": 2,
    "save_checkpoints": False,
    "progress": False,
    "seed": 11,
    "lr_actor": 1e-3,
}
RUNS = {
    "ppo": {"algo": "LLMPPO", "epochs": 2, "minibatch_size": 4, "max_tokens": 1024},
    "ppo-tokens": {"algo": "LLMPPO", "granularity": "token", "kl_in": "reward", "critic_trunk": "shared", "whiten": True},
    "reinforce-full": {"algo": "LLMREINFORCE", "lora_r": 0, "lr_actor": 1e-4},
    "grpo-groups": {"algo": "GRPO", "group_size": 4, "dynamic_sampling": 2, "temperature": 1.5},
    "gspo-async": {"algo": "GRPO", "group_size": 4, "ratio_level": "sequence", "collector": "async"},
    "cispo-stale": {"algo": "GRPO", "group_size": 4, "clipping": "cispo", "collector": "async", "max_staleness": 1, "env_threads": 0},
    "slide": {"algo": "LLMREINFORCE", "overflow": "slide", "max_model_len": 72},
    "truncate": {"algo": "LLMPPO", "max_model_len": 72, "temperature": 2.0},
    "mixture": {"algo": "GRPO", "group_size": 4, "env_name": ["game:GuessTheNumber-v0-easy", "game:FifteenPuzzle-v0-easy"], "max_turns": 4},
}  # fmt: skip


def run(settings: dict, output_dir: Path) -> tuple[list[dict], list[dict]]:
    """The rows that each update of a run learned from, and its metrics; the last of these are the
    norms of the weights."""
    found = build_run(RunSettings.from_values(output_dir=output_dir, **COMMON | settings))
    rows: list[dict] = []
    learn = found.trainer.learn
    found.trainer.learn = lambda batch, **options: rows.append(leaves(batch)) or learn(batch, **options)
    try:
        history = found.trainer.train()
        history.append(
            {name: p.double().norm().item() for name, p in found.models.model.named_parameters() if p.requires_grad}
        )
    finally:
        found.close()
    clock = ("time/", "seconds", "_per_second", "memory")
    return rows, [
        {name: value for name, value in each.items() if not any(word in name for word in clock)} for each in history
    ]


def leaves(batch) -> dict:
    """Compact copies, by flat names."""
    narrow = {torch.int64: torch.int32}
    flat = batch.cpu().flatten_keys(".")
    return {name: value.to(narrow.get(value.dtype, value.dtype)).clone() for name, value in flat.items()}


@pytest.fixture(scope="module")
def recording():
    with gzip.open(RECORDING) as file:
        return torch.load(file)


@pytest.mark.skipif("RECORD" not in os.environ, reason="writes the recording: RECORD=1")
def test_record(tmp_path):
    made = {name: run(settings, tmp_path / name) for name, settings in RUNS.items()}
    RECORDING.parent.mkdir(exist_ok=True)
    with gzip.open(RECORDING, "wb") as file:
        torch.save(made, file)


@pytest.mark.parametrize("name", RUNS)
def test_runs_are_those_of_before(name, recording, tmp_path):
    rows, history = run(RUNS[name], tmp_path)
    old_rows, old_history = recording[name]
    assert len(rows) == len(old_rows)
    for new, old in zip(rows, old_rows, strict=True):
        assert new.keys() == old.keys()
        for key, value in old.items():
            if value.is_floating_point():
                torch.testing.assert_close(
                    new[key], value, rtol=0, atol=1e-5, msg=lambda text, key=key: f"{key}: {text}"
                )
            else:
                assert new[key].equal(value), key
    for new_metrics, old_metrics in zip(history, old_history, strict=True):
        recorded = {name: new_metrics[name] for name in old_metrics}  # there are further ones since
        assert recorded == pytest.approx(old_metrics, rel=1e-3, abs=1e-4, nan_ok=True)
