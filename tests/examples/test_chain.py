"""From start to deployment: REINFORCE, PPO from its checkpoint with the actor as reference, a
merged model, played without us."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from torchrl_llm import keys
from torchrl_llm.runs import RunSettings, build_run, parse_settings

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "examples" / "configs"


def config_of(name: str, output: Path, *more: str) -> RunSettings:
    quick = [
        "--evaluation-interval=0",
        "--final-episodes=512",
        "--progress=false",
        "--lora-r=16",
        "--schedule=constant",
    ]
    return parse_settings([f"--config={CONFIGS / name}.yaml", f"--output-dir={output}", *quick, *more])


@pytest.mark.extra
def test_from_start_to_deployment(tmp_path):
    first = build_run(config_of("tiny_reinforce_llm", tmp_path / "first", "--lr-actor=2e-3", "--max-iterations=15"))
    before = first.final_evaluation()
    first.trainer.train()
    middle = first.final_evaluation()
    checkpoint = tmp_path / "first" / "checkpoints" / "last"

    flags = [f"--init-from={checkpoint}", "--init-reference", "--init-critic", "--kl-coeff=0.01"]
    config = config_of("tiny_ppo_llm", tmp_path / "second", "--lr-actor=1e-3", "--max-iterations=10", *flags)
    second = build_run(config)
    rows = second.final_evaluation().rows
    # it starts as what the first run ended as
    assert torch.equal(rows[keys.TOKENS], middle.rows[keys.TOKENS])
    with torch.no_grad():
        actor, reference = (
            part(rows.clone())[keys.LOG_PROB] for part in (second.models.actor, second.models.reference)
        )
    assert torch.equal(actor, reference)
    second.trainer.train()
    after = second.final_evaluation()
    assert after.success > before.success + 0.1
    assert second.trainer.history[-1]["policy/kl_reference"] > 1e-4

    second.models.export_merged(tmp_path / "merged", second.tokenizer)
    script = [sys.executable, "-X", "importtime", str(ROOT / "examples" / "play.py"), str(tmp_path / "merged")]
    played = subprocess.run([*script, "--episodes", "512"], capture_output=True, text=True, check=True)
    assert "torchrl_llm" not in played.stderr
    low, high = json.loads(played.stdout)["ci95"]
    assert low <= after.success_ci95[1]
    assert after.success_ci95[0] <= high
    assert low > before.success
