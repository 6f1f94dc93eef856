"""Random tiny Qwen2 models, rows and noise, which the tests of load_actor_critic and of its files
share."""

from __future__ import annotations

import torch
from places import device
from tensordict import TensorDict
from transformers import Qwen2Config, Qwen2ForCausalLM

LORA = {"r": 4, "target_modules": ["q_proj", "v_proj"]}


def make_model(seed: int = 0, **fields) -> Qwen2ForCausalLM:
    config = {
        "vocab_size": 264,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "eos_token_id": 2,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen2ForCausalLM(Qwen2Config(**(config | fields))).eval().to(device())


def make_rows() -> TensorDict:
    tokens = torch.randint(3, 200, (3, 12), generator=torch.Generator().manual_seed(0))
    turn_ids = torch.tensor([-1, -1, 0, 0, 0, -1, 1, 1, -1, -1, 2, -1]).repeat(3, 1)
    mask = torch.ones_like(tokens, dtype=torch.bool)
    return TensorDict(tokens=tokens, attention_mask=mask, turn_ids=turn_ids, batch_size=[3]).to(device())


def perturb(models, seed: int = 0) -> None:
    """Train for one step's worth of noise: every trainable parameter moves."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in models.actor_parameters() + models.critic_parameters():
            parameter.add_((torch.randn(parameter.shape, generator=generator) * 0.1).to(parameter.device))


def outputs(models) -> list[torch.Tensor]:
    rows = make_rows()
    found = [models.actor(rows.clone())["log_prob"]]
    if models.critic is not None:
        td = models.critic(rows.clone())
        found += [td["state_value"], td["bootstrap_value"]]
    return [x.detach() for x in found]
