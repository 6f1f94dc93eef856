"""Evaluation and checkpoints."""

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from torchrl_llm import keys
from torchrl_llm.modules import use_adapter
from torchrl_llm.testing.tiny import tiny_model_path
from torchrl_llm.trainers import RunConfig, build_run, evaluate


@pytest.fixture
def run(tmp_path):
    config = RunConfig(
        algo="LLMPPO",
        model_path="tiny",
        device="cpu",
        lora_r=4,
        max_model_len=256,
        max_output_tokens=16,
        num_envs=8,
        batch_size=8,
        kl_coeff=0.0,
        evaluation_interval=0,
        final_episodes=24,
        max_iterations=2,
        lr_actor=1e-2,
        output_dir=tmp_path,
        progress=False,
    )
    return build_run(config)


class TestEvaluate:
    def test_is_paired_and_apart_from_training(self, run):
        first, second = run.final_evaluation(), run.final_evaluation()
        assert torch.equal(first.rows[keys.TOKENS], second.rows[keys.TOKENS])
        assert first.episodes == 24 == len(first.rows[keys.EPISODE_ID].unique())
        wins = first.rows[keys.TURN_SUCCESS].any(-1).sum().item()
        assert first.success == wins / 24
        assert first.success_ci95[0] < first.success < first.success_ci95[1]
        seeds = [run.make_env(stream=s).tickets[i].seed for s in ("train", "eval", "test") for i in range(200)]
        assert len(set(seeds)) == 600

    def test_does_not_depend_on_the_number_of_slots(self, run):
        results = []
        for num_envs in (3, 24):
            run.config.num_envs = num_envs
            results.append(run.final_evaluation().rows)
        width = min(rows[keys.TOKENS].shape[1] for rows in results)
        assert torch.equal(*(rows[keys.TOKENS][:, :width] for rows in results))

    def test_greedy_takes_the_likeliest_token(self, run):
        env = run.make_env(stream="test")
        rows = evaluate(env, run.policy, 8, greedy=True).rows
        assert likeliest(run, rows).all()
        assert not likeliest(run, evaluate(env, run.policy, 8).rows).all()


def likeliest(run, rows):
    """Which action tokens have the highest logit of all tokens at their position."""
    with torch.no_grad(), use_adapter(run.models.model, "actor"):
        logits = run.models.model(rows[keys.TOKENS]).logits[:, :-1]
    return (logits.argmax(-1) == rows[keys.TOKENS][:, 1:])[rows[keys.TURN_IDS][:, 1:] >= 0]


class TestCheckpoints:
    def test_trained_adapter_loads_with_peft_alone(self, run):
        run.trainer.train()
        folder = run.config.output_dir / "checkpoints" / "last"
        assert {"actor", "critic", "tokenizer"} <= {p.name for p in folder.iterdir()}
        assert not list(folder.rglob("*.bin")) + list(folder.rglob("*.pt"))
        model = AutoModelForCausalLM.from_pretrained(tiny_model_path(), dtype=torch.float32)
        loaded = PeftModel.from_pretrained(model, folder / "actor").eval()
        tokens = torch.arange(20).unsqueeze(0) + 5
        with torch.no_grad():
            plain = AutoModelForCausalLM.from_pretrained(tiny_model_path(), dtype=torch.float32)(tokens).logits
            run.models.model.set_adapter("actor")
            ours = run.models.model(tokens).logits
            assert torch.allclose(loaded(tokens).logits, ours, atol=1e-6)
            assert not torch.allclose(plain, ours, atol=1e-3)
        head = load_file(folder / "critic" / "value_head.safetensors")
        assert all(torch.equal(head[k], v) for k, v in run.models.critic.value_head.state_dict().items())
