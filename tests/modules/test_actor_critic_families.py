"""load_actor_critic on mixtures of experts and multimodal models."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig
from places import device
from tiny_actor_critic import make_rows, outputs, perturb
from transformers import AutoModelForCausalLM, Gemma3Config, MixtralConfig, MixtralForCausalLM

from torchrl_llm.modules import TokenScorer, load_actor_critic
from torchrl_llm.modules.adapters import enable_gradient_checkpointing


def make_mixture() -> MixtralForCausalLM:
    config = MixtralConfig(
        vocab_size=264, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=4,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return MixtralForCausalLM(config).eval().to(device())


class TestMixtureOfExperts:
    """``all-linear`` adapts the experts' stacked parameters too, by one PEFT layer inside
    another."""

    @pytest.fixture
    def models(self):
        lora = LoraConfig(r=2, target_modules="all-linear")
        models = load_actor_critic(make_mixture(), lora=lora, critic=True, reference=True)
        perturb(models)
        return models

    def test_the_reference_is_the_base(self, models):
        expected = TokenScorer(make_mixture())(make_rows())["log_prob"]
        assert not torch.allclose(models.actor(make_rows())["log_prob"], expected, atol=1e-2)
        assert torch.equal(models.reference(make_rows())["log_prob"], expected)

    @pytest.mark.parametrize("checkpointing", [False, True])
    def test_actor_and_critic_have_their_own_gradients(self, models, checkpointing):
        if checkpointing:
            enable_gradient_checkpointing(models.model)
        actor, critic = models.actor_parameters(), models.critic_parameters()
        log_prob, values = models.actor(make_rows())["log_prob"], models.critic(make_rows())
        (values["state_value"].sum() + values["bootstrap_value"].sum()).backward()
        assert all(parameter.grad is None for parameter in actor)
        assert all(parameter.grad is not None for parameter in critic)
        found = [parameter.grad.clone() for parameter in critic]
        log_prob.sum().backward()
        assert all(parameter.grad is not None for parameter in actor)
        assert all(torch.equal(parameter.grad, grad) for parameter, grad in zip(critic, found, strict=True))

    def test_load_what_was_saved(self, models, tmp_path):
        models.save_pretrained(tmp_path)
        lora = LoraConfig(r=2, target_modules="all-linear")
        loaded = load_actor_critic(make_mixture(), lora=lora, critic=True, reference=True)
        loaded.load_pretrained(tmp_path)
        for one, other in zip(outputs(loaded), outputs(models), strict=True):
            assert torch.equal(one, other)


def gemma3() -> torch.nn.Module:
    """A multimodal model, as AutoModelForCausalLM loads it."""
    text = dict.fromkeys(("num_attention_heads", "num_key_value_heads", "num_hidden_layers"), 2)
    text |= {"vocab_size": 264, "hidden_size": 16, "intermediate_size": 32, "head_dim": 8}
    vision = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Gemma3Config(text_config=text, vision_config=vision | {"image_size": 28, "patch_size": 14})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config)


class TestMultimodal:
    @pytest.mark.parametrize(
        "lora",
        [
            LoraConfig(r=2, target_modules="all-linear"),
            LoraConfig(r=2, target_modules=["q_proj", "o_proj"]),
            LoraConfig(r=2, target_modules="all-linear", exclude_modules=["k_proj"]),
            LoraConfig(r=2, target_modules="all-linear", exclude_modules=r".*\.k_proj"),
        ],
        ids=["all", "list", "excluded-list", "excluded-pattern"],
    )
    def test_adapters_go_to_the_language_model_only(self, lora, tmp_path):
        models = load_actor_critic(gemma3(), lora=lora, critic=True)
        names = [name for name, p in models.model.named_parameters() if p.requires_grad]
        assert names
        assert all(".language_model.layers." in name for name in names)
        assert any("k_proj" in name for name in names) == (
            lora.target_modules == "all-linear" and not lora.exclude_modules
        )
        # Every one of them is reached by a loss.
        perturb(models)
        (models.actor(make_rows())["log_prob"].sum() + models.critic(make_rows())["state_value"].sum()).backward()
        assert all(p.grad is not None and p.grad.any() for p in models.actor_parameters() + models.critic_parameters())
        models.save_pretrained(tmp_path)
        fresh = load_actor_critic(gemma3(), lora=lora, critic=True)
        fresh.load_pretrained(tmp_path)
        assert outputs(fresh)[0].equal(outputs(models)[0])
