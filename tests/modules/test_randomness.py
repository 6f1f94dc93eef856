"""No forward is random: dropout, layer drop and jitter are off, and checkpointing repeats what it
recomputes."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch
from peft import LoraConfig
from places import device
from tensordict import TensorDict
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from torchrl_llm.modules import load_actor_critic
from torchrl_llm.modules.checks import RandomForwardError, check_repeatable
from torchrl_llm.modules.lm import hidden_states
from torchrl_llm.testing.tiny import random_model
from torchrl_llm.testing.tokenizers import byte_tokenizer

WIDTH, HEADS, LAYERS, VOCABULARY = 16, 2, 2, 32
SIZES = {
    "vocab_size": VOCABULARY,
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "ffn_hidden_size"), WIDTH),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "decoder_ffn_dim", "moe_intermediate_size"), 2 * WIDTH),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), HEADS),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), HEADS),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length"), 64),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0),
    "head_dim": WIDTH // HEADS,
    "rotary_dim": 4,
    "attention_types": [[["global"], LAYERS]],
    "num_experts_per_tok": 2,
}
RANDOM = re.compile(r"drop|jitter")
TYPES = ["bigcode", "gpt2", "opt", "bloom", "falcon", "mixtral", "phimoe", "seed_oss"]


def random_config(model_type: str) -> Any:
    """A tiny configuration in which everything that can be random is."""
    config_type = CONFIG_MAPPING["gpt_bigcode" if model_type == "bigcode" else model_type]
    accepted = inspect.signature(config_type).parameters
    config = config_type(**{name: value for name, value in SIZES.items() if name in accepted})
    for name, value in list(vars(config).items()):
        if RANDOM.search(name) and (isinstance(value, float) or "jitter" in name):
            setattr(config, name, 0.3)
    return config


def random_lm(model_type: str) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(random_config(model_type), dtype=torch.float32)


def rows() -> TensorDict:
    tokens = torch.randint(1, VOCABULARY, (3, 12), generator=torch.Generator().manual_seed(0))
    turn_ids = torch.tensor([-1, -1, 0, 0, 0, -1, 1, 1, 1, -1, -1, -1]).repeat(3, 1)
    return TensorDict(
        tokens=tokens, attention_mask=torch.ones_like(tokens, dtype=torch.bool), turn_ids=turn_ids, batch_size=[3]
    ).to(device())


def gradients(model_type: str, *, checkpointing: bool, seed: int) -> list[torch.Tensor]:
    """Of a loss of actor and critic; the seed must not matter."""
    lora = LoraConfig(r=2, target_modules="all-linear", exclude_modules=".*(gate|router).*")
    models = load_actor_critic(random_lm(model_type), lora=lora, critic=True, gradient_checkpointing=checkpointing)
    with torch.no_grad():
        models.critic.value_head.weight.fill_(0.1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        loss = models.actor(rows())["log_prob"].sum() + models.critic(rows())["state_value"].sum()
        torch.manual_seed(seed + 1)
        loss.backward()
    trained = models.actor_parameters() + models.critic_parameters()
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]


@pytest.mark.parametrize("model_type", TYPES)
class TestEveryFamily:
    def test_checkpointing_recomputes_what_was_computed(self, model_type):
        plain, first, second = (
            gradients(model_type, checkpointing=on, seed=seed) for on, seed in ((False, 0), (True, 1), (True, 2))
        )
        assert any(x.any() for x in plain)
        for a, b, c in zip(plain, first, second, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(b, c, rtol=0.0, atol=0.0)

    def test_training_mode_is_not_random(self, model_type):
        if model_type == "phimoe":
            pytest.skip("routes at random in training mode, which only checkpointing needs, and not of its inside")
        model = load_actor_critic(random_lm(model_type)).model
        evaluated = model(input_ids=rows()["tokens"]).logits
        model.train()
        with torch.random.fork_rng(devices=[]):
            for seed in range(2):
                torch.manual_seed(seed)
                torch.testing.assert_close(model(input_ids=rows()["tokens"]).logits, evaluated, rtol=0.0, atol=1e-6)


class Noisy(GradientCheckpointingLayer):
    """A layer that is random where nobody looks for it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.attention_type = getattr(layer, "attention_type", "full_attention")

    def forward(self, hidden_states, *args, **kwargs):
        noise = torch.rand_like(hidden_states) if self.training else 0.0
        return self.layer(hidden_states + noise, *args, **kwargs)


class TestRefusal:
    def test_what_stays_random_is_refused(self):
        model = random_model(byte_tokenizer())
        model.model.layers[0] = Noisy(model.model.layers[0])
        load_actor_critic(model)
        with pytest.raises(RandomForwardError, match="gradient_checkpointing=False"):
            load_actor_critic(model, gradient_checkpointing=True)

    def test_generators_and_modes_stay(self):
        model = load_actor_critic(random_model(byte_tokenizer()), gradient_checkpointing=True).model
        before = torch.get_rng_state()
        check_repeatable(model)
        assert torch.get_rng_state().equal(before)
        assert hidden_states(model, torch.ones(1, 3, dtype=torch.int64, device=device())).requires_grad
        assert not any(module.training for module in model.modules())
