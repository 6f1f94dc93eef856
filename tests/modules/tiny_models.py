"""Random tiny models of any family, which the tests of scorer, head and prefixes share."""

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

VOCABULARY = 48
TINY = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def make_model(dtype: torch.dtype = torch.float64, cls=Qwen2ForCausalLM, config=Qwen2Config, **fields):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = cls(config(**(TINY | fields))).to(dtype).eval()
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.data.mul_(4)  # logits that are far from uniform
    return model
