"""Runs with credit from continuations (``estimator="TurnVine"``) learn what they cannot learn
without, or with wrong, values."""

from dataclasses import dataclass

import pytest
import torch
from tensordict import TensorDictBase

from torchrl_llm import keys
from torchrl_llm.objectives import TurnVine
from torchrl_llm.runs import RunSettings, build_run
from torchrl_llm.testing.credit_worlds import DelayedReward
from torchrl_llm.testing.tiny import random_model
from torchrl_llm.testing.tokenizers import word_tokenizer

SEED = 2975846167
"""The first of ``drawn_seeds("continued-runs-2", 6)`` (benchmarks/learning.py); the settings were
chosen on others."""
SETTINGS = {
    "algo": "LLMREINFORCE",
    "dtype": "float32",
    "device": "cpu",
    "lora_r": 0,
    "env_name": "world:delayed-reward",
    "env_options": {"delay": 2},
    "num_envs": 64,
    "batch_size": 64,
    "max_model_len": 64,
    "max_output_tokens": 1,
    "gamma": 1.0,
    "kl_coeff": 0.0,
    "entropy_coeff": 0.03,
    "lr_actor": 6e-3,
    "epochs": 2,
    "schedule": "constant",
    "max_iterations": 30,
    "max_steps": 10**9,
    "evaluation_interval": 0,
    "final_episodes": 256,
    "record_interval": 0,
    "save_checkpoints": False,
    "progress": False,
}


@dataclass(kw_only=True, eq=False, repr=False)
class OneTurnLate(TurnVine):
    """Takes the value of the state after each turn for the value of the state before it."""

    def estimate(self, tensordict: TensorDictBase) -> dict[str, torch.Tensor]:
        late = tensordict.clone()
        value = late[keys.SAMPLED_VALUE]
        late[keys.SAMPLED_VALUE] = torch.cat([value[:, 1:], torch.zeros_like(value[:, :1])], 1)
        return super().estimate(late)


def success(folder, seed: int = SEED, **settings) -> float:
    """Share of 256 held-out episodes that a run from random weights has won at its end."""
    tokenizer = word_tokenizer(DelayedReward.WORDS)
    random_model(tokenizer, seed=seed).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "tokenizer")
    paths = {"model_path": str(folder / "model"), "tokenizer_path": str(folder / "tokenizer")}
    run = build_run(
        RunSettings.from_values(**SETTINGS | settings | paths, seed=seed, output_dir=folder / "run", overwrite=True)
    )
    run.trainer.train()
    found = run.final_evaluation().success
    run.close()
    return found


@pytest.mark.parametrize("branch_share", [0.5, pytest.param(1.0, marks=pytest.mark.extra)])
@pytest.mark.extra
def test_learns_from_continuations_of_states(tmp_path, branch_share):
    """The first decision is paid two turns later, and there is no critic: from 0.06 to nearly all
    of the held-out episodes."""
    assert success(tmp_path, estimator="TurnVine", branches=2, branch_share=branch_share) > 0.9


@pytest.mark.slow
@pytest.mark.extra
def test_learns_nothing_from_the_values_of_other_states(tmp_path):
    """Which answers are legal is paid at once and learned; which of the four is right, only a value
    of the right state tells."""
    assert success(tmp_path, estimator=f"{__name__}:OneTurnLate", branches=2) < 0.4
