"""Runs of every kind on a pretended GPU: no operation mixes devices, and what is trained has
changed there."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from pretended_runs import Rated, iterate, run_of
from transformers import AutoModelForCausalLM

from torchrl_llm import keys
from torchrl_llm.envs import GEMEnv, PromptDatasetEnv
from torchrl_llm.modules import prefix_attention
from torchrl_llm.testing.pretended_gpu import pretended_gpu
from torchrl_llm.testing.take_away import TakeAway

pytestmark = [
    pytest.mark.extra,
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device"),
]


def dataset(**options):
    """Questions, and a reward that depends on every character."""
    rows = [{"question": f"{i} + 1?", "answer": str(i + 1)} for i in range(16)]
    return PromptDatasetEnv(
        {"train": rows[:8], "test": rows[8:]}, lambda completion, *_: sum(map(ord, completion)) % 5, **options
    )


FULL = {"lora_r": 0, "dtype": "float32"}
TINY = {"model_path": "tiny", "env": None, "max_model_len": 256, "max_output_tokens": 16, "min_output_tokens": 0}
CASES = {
    "LLMPPO": {},
    "LLMPPO, float32": {"dtype": "float32"},
    "LLMPPO, all weights": FULL,
    "LLMPPO, all weights in mixed precision": {**FULL, "dtype": "bfloat16"},
    "LLMPPO, shared trunk": {**FULL, "critic_trunk": "shared"},
    "LLMPPO, LoRA on a shared trunk": {"critic_trunk": "shared"},
    "LLMPPO, advantages of tokens": {"granularity": "token", "whiten": True},
    "LLMREINFORCE": {"algo": "LLMREINFORCE"},
    "GRPO": {"algo": "GRPO", "group_size": 4},
    "GRPO, credit of states": {"algo": "GRPO", "group_size": 4, "credit": "state", "baseline": "leave_one_out", "scale": "none"},
    "SFT": {**TINY, "algo": "SFT", "demonstrations": "guess_by_half_the_hints"},
    "Vine": {"algo": "LLMREINFORCE", "estimator": "TurnVine", "branches": 2},
    "trees": {
        "algo": "GRPO", "group_size": 4, "tree_branches": 1, "tree_depth": 2, "baseline": "leave_one_out", "scale": "none",
        "credit": "state",
    },
    "async": {"collector": "async"},
    "async, dynamic sampling": {"algo": "GRPO", "group_size": 4, "collector": "async", "dynamic_sampling": 2},
    "self-play": {
        "collector": "self_play", "algo": "LLMREINFORCE", "estimator": "RoleRelative", "env": TakeAway, "gamma": 1.0,
        "kl_coeff": 0.0, "entropy_coeff": 0.01,
    },
    "questions": {"algo": "GRPO", "group_size": 4, "env": None, "make_env": dataset},
    "segments": {
        "overflow": "slide", "max_model_len": 120, "env": None, "make_env": partial(GEMEnv, Rated),
        "gradient_checkpointing": True,
    },
    "checkpointing": {"gradient_checkpointing": True, "group_size": 4},
    "checkpointing, all weights": {**FULL, "gradient_checkpointing": True, "group_size": 4},
    "prefixes that are not shared": {"share_prefixes": False, "group_size": 4},
    "minibatches and epochs": {"minibatch_size": 2, "epochs": 2, "max_tokens": 300},
    "guarded by a KL": {"target_kl": 1e-4, "epochs": 2, "minibatch_size": 2},
    "truncated sampling": {"top_k": 20, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.1, "temperature": 0.7},
    "correction for the sampler": {"sampler_correction": "truncate", "sampler_bounds": 2.0, "old_log_probs": "scorer"},
    "entropy": {"entropy_coeff": 0.01, "entropy_target": 1.0},
    "a KL in the reward": {"algo": "LLMREINFORCE", "kl_in": "reward", "kl_coeff": 0.1},
    "a reference that is refreshed": {"kl_coeff": 0.1, "refresh_reference": 1, "epochs": 2},
}  # fmt: skip


@pytest.fixture(autouse=True)
def shared(monkeypatch):
    """Prefixes of tiny models are shared, too, which a GPU computes faster alone."""
    monkeypatch.setitem(prefix_attention._STAGE_FLOPS, "cuda", prefix_attention._STAGE_FLOPS["cpu"])


@pytest.mark.parametrize("settings", CASES.values(), ids=CASES)
def test_an_iteration(tmp_path, settings):
    with pretended_gpu() as gpu:
        run = run_of(tmp_path, **settings)
        trained = run.models.actor_parameters() + run.models.critic_parameters()
        before = [parameter.detach().clone() for parameter in trained]
        iterate(run)
        changed = [bool((old != new).any()) for old, new in zip(before, trained, strict=True)]
        assert all(parameter.is_cuda for parameter in trained)
        run.close()
    assert not gpu.errors
    assert any(changed)  # of LoRA's matrices the first step changes one of two
    assert not [call for call in gpu.attention if call.kernel == "cudnn"]


def weights(run) -> list[torch.Tensor]:
    return [parameter.detach().cpu() for parameter in run.models.actor_parameters() + run.models.critic_parameters()]


def test_a_resumed_run_ends_where_the_whole_one_does(tmp_path):
    saved = {"save_checkpoints": True, "checkpoint_interval": 1, "evaluation_interval": 1, "evaluation_episodes": 4}
    with pretended_gpu() as gpu:
        whole = run_of(tmp_path, max_iterations=2, output_dir=tmp_path / "whole", **saved)
        whole.trainer.train()
        whole.close()
        first = run_of(tmp_path, max_iterations=1, output_dir=tmp_path / "parts", **saved)
        first.trainer.train()
        first.close()
        again = {"resume": True, "overwrite": False, "accept_changes": ["max_iterations"]}
        second = run_of(tmp_path, max_iterations=2, output_dir=tmp_path / "parts", **saved, **again)
        assert second.trainer.iteration == 1
        assert all(
            value.device.type == "cuda"
            for state in second.trainer.optimizer.state.values()
            for name, value in state.items()
            if name != "step"
        )
        second.trainer.train()
        second.close()
    assert not gpu.errors
    for one, other in zip(weights(whole), weights(second), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_a_run_of_the_gpu_computes_what_one_of_the_cpu_does(tmp_path):
    """Log-probs of the sampler, and gradients: Adam's first moments, since its steps make of
    rounding near zero a whole step."""

    def results():
        run = run_of(tmp_path, dtype="float32", group_size=4)
        rows = run.trainer.collect(iter(run.trainer.collector))
        run.trainer.learn(rows)
        run.close()
        moments = [state["exp_avg"].cpu() for state in run.trainer.optimizer.state.values()]
        return [rows[keys.SAMPLE_LOG_PROB].cpu(), *moments]

    with pretended_gpu():
        there = results()
    here = results()
    assert len(here) == len(there) > 4
    for one, other in zip(there, here, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5 * float(other.abs().max()))


def test_a_model_that_was_saved_there_loads_anywhere(tmp_path):
    with pretended_gpu() as gpu:
        run = run_of(tmp_path, save_checkpoints=True)
        run.trainer.train()
        run.models.export_merged(tmp_path / "merged")
        run.close()
    assert not gpu.errors
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert {parameter.device.type for parameter in loaded.parameters()} == {"cpu"}
    assert loaded(torch.ones(1, 4, dtype=torch.int64)).logits.isfinite().all()
