"""Models that train, and how far an engine is from them."""

from __future__ import annotations

import torch
from peft import LoraConfig
from tensordict import TensorDict

from torchrl_llm.modules import SamplingConfig, load_actor_critic

LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]}


def make_models(path, lora=LORA, **options):
    lora = None if lora is None else LoraConfig(**lora)
    return load_actor_critic(path, lora=lora, dtype="float32", sampling=SamplingConfig(temperature=0.7), **options)


def train(models, seed: int = 0, scale: float = 0.05) -> None:
    """Move every trainable parameter of the actor, as an update would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in models.actor_parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator).to(parameter))


def play(policy, seed: int = 0):
    """One turn each of four episodes."""
    prompts = torch.randint(5, 100, (4, 70), generator=torch.Generator().manual_seed(seed))
    rows = torch.arange(4)
    lengths = torch.full((4,), 70)
    return prompts, policy.generate(prompts, lengths, torch.zeros_like(rows), rows, slots=rows, greedy=False)


def gap(policy, models, seed: int = 0) -> float:
    """The largest difference of the log-probs of sampled tokens between engine and trained
    model."""
    prompts, answer = play(policy, seed)
    return float((answer.log_probs - scores(models, prompts, answer)).abs().max())


def scores(models, prompts, answer):
    """The trained model's log-probs ``[n, A]`` of the tokens in ``answer``, 0 behind its end."""
    valid = torch.arange(answer.tokens.shape[1]) < answer.lengths[:, None]
    mask = torch.cat([torch.ones_like(prompts, dtype=torch.bool), valid], 1)
    turn_ids = torch.where(mask, 0, -1)
    turn_ids[:, : prompts.shape[1]] = -1
    tokens = torch.cat([prompts, answer.tokens], 1)
    rows = TensorDict(tokens=tokens, attention_mask=mask, turn_ids=turn_ids, batch_size=[len(tokens)])
    with torch.no_grad():
        return models.actor(rows)["log_prob"][:, prompts.shape[1] :]
