"""HFPolicy over random tiny models of any family, which its tests share: prompts, and what it
answers to them."""

from __future__ import annotations

import torch
import transformers
from places import device
from tensordict import TensorDict
from tokenizers import Tokenizer, models
from torchrl.envs.utils import ExplorationType, set_exploration_type
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from torchrl_llm import keys
from torchrl_llm.modules.hf import HFPolicy
from torchrl_llm.modules.sampling import SamplingConfig

V, END = 61, 1
TINY = {
    "vocab_size": V,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": END,
    "pad_token_id": 0,
}
CONFIGS = {"Gemma3": "Gemma3TextConfig"}
FAMILIES = {
    "Qwen2": {},
    "Qwen2 sliding": {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    "Qwen3": {"head_dim": 8},
    "Llama": {"attention_bias": True},
    "Mistral": {"sliding_window": 6},
    "Gemma2": {"sliding_window": 6, "head_dim": 8, "attn_implementation": "eager", "final_logit_softcapping": 5.0},
    "Gemma3": {"sliding_window": 6, "head_dim": 8, "num_hidden_layers": 3, "sliding_window_pattern": 3},
    "Phi3": {"sliding_window": 6},
    "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256},
    "GPTNeoX": {"rotary_pct": 0.5},
    "Cohere": {"logit_scale": 0.5},
    "Granite": {"logits_scaling": 3.0},
    "Olmo2": {},
    "Mixtral": {"num_local_experts": 4, "sliding_window": None},
    "SmolLM3": {"no_rope_layers": [1, 0], "use_sliding_window": False},
    "OPT": {"ffn_dim": 48, "word_embed_proj_dim": 32},
}


def make_tokenizer(size=V, end="1"):
    vocabulary = {str(i): i for i in range(size)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="0")), eos_token=end
    )


def make_model(family="Qwen2", **fields):
    config = getattr(transformers, CONFIGS.get(family, f"{family}Config"))(**(TINY | fields))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=fields.get("attn_implementation", "sdpa"))
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.data.normal_(0, 0.35)  # far from uniform, and every context token counts
            elif "bias" in name:
                parameter.data.normal_(0, 0.1)
    return model.eval().to(device())


def make_policy(model=None, *, adapter=None, seed=0, check_every=None, bucket=None, compile_decode=False, **sampling):
    sampling = SamplingConfig(**{"max_output_tokens": 8, "stop_ids": ()} | sampling)
    options = {
        "adapter": adapter,
        "seed": seed,
        "check_every": check_every,
        "bucket": bucket,
        "compile_decode": compile_decode,
    }
    return HFPolicy(model or make_model(), make_tokenizer(), sampling, **options)


def random_rows(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, V, (n,), generator=generator).tolist() for n in lengths]


def batch_of(rows, *, turn=0, episodes=None):
    """A batch of prompts; an empty row is an idle slot."""
    lengths = torch.tensor([[len(row)] for row in rows])
    # padding that looks like any other token
    prompt = torch.full((len(rows), max(int(lengths.max()), 1)), 7)
    for i, row in enumerate(rows):
        prompt[i, : len(row)] = torch.tensor(row, dtype=torch.int64)
    return TensorDict(
        {
            keys.PROMPT: prompt,
            keys.PROMPT_LENGTH: lengths,
            keys.TURN: torch.full_like(lengths, turn),
            keys.EPISODE_ID: torch.tensor(episodes or list(range(len(rows)))).unsqueeze(-1),
        },
        batch_size=[len(rows)],
    )


def play(policy, rows, *, greedy=False, **options):
    """Responses as lists of ids, and their log-probs as tensors."""
    with set_exploration_type(ExplorationType.DETERMINISTIC if greedy else ExplorationType.RANDOM):
        out = policy(batch_of(rows, **options))
    mask = out[keys.RESPONSE_MASK]
    ids = [out[keys.RESPONSE][i][mask[i]].tolist() for i in range(len(rows))]
    return ids, [out[keys.RESPONSE_LOG_PROBS][i][mask[i]] for i in range(len(rows))]


def same(one, other):
    assert one[0] == other[0]
    for a, b in zip(one[1], other[1], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


def teacher_forced(model, row, response):
    """``[A, V]`` logits before each token of the response, from one plain forward."""
    with torch.no_grad():
        ids = torch.tensor([row + response], device=model.device)
        return model(input_ids=ids).logits[0, len(row) - 1 : -1].float().cpu()
