"""CPU-seconds of the parts of a rollout in this process, before a change and after it: in turns, in
processes of their own.

    git worktree add /tmp/before COMMIT
    OMP_NUM_THREADS=1 python benchmarks/sampling.py --before /tmp/before --pairs 9
    OMP_NUM_THREADS=1 python benchmarks/sampling.py --before /tmp/before --pairs 9 \\
        --cases draw-64x65536 draw-64x152064

Prints one JSON object: for each case the medians of both sides, the median of the pairs' ratios
(before over after: above 1 is faster), and an interval, which holds all pairs but the lowest
and the highest.
"""

import time
from collections.abc import Callable

import numpy as np
import pairs
import torch
from tensordict import TensorDict
from transformers import Qwen2Config, Qwen2ForCausalLM

from torchrl_llm import keys
from torchrl_llm.envs import GEMEnv
from torchrl_llm.modules import HFPolicy, SamplingConfig
from torchrl_llm.modules.hf._kv_cache import SlotCache
from torchrl_llm.modules.sampling import draw
from torchrl_llm.testing.tiny import load_tiny_tokenizer

Work = Callable[[], object]


def drawing(rows: int, vocabulary: int) -> Work:
    """One token of each row, from logits that are there."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(rows, vocabulary, generator=generator) * 2
    uniform = torch.rand(rows, dtype=torch.float64, generator=generator)
    return lambda: draw(logits, uniform)


def turn(rows: int, tokens: int, **shape: int) -> Work:
    """A turn of ``rows`` slots, after a prompt of 20 tokens that they share, with a random
    Qwen2."""
    config = Qwen2Config(bos_token_id=None, eos_token_id=0, tie_word_embeddings=True, **shape)
    model = Qwen2ForCausalLM(config).eval()
    policy = HFPolicy(model, load_tiny_tokenizer(), SamplingConfig(max_output_tokens=tokens, stop_ids=()))
    prompts = {"prompt": torch.arange(20).repeat(rows, 1), "prompt_length": torch.full((rows, 1), 20)}
    column = torch.arange(rows).unsqueeze(1)
    batch = TensorDict({"tokens": prompts, keys.TURN: column * 0, keys.EPISODE_ID: column}, [rows])
    return lambda: policy(batch.clone())


def moving(layers: int, columns: int) -> Work:
    """Two rows of the cache change places, a hundred times: what a batch does when responses
    end."""
    cache, states = SlotCache(), torch.ones(16, 2, 1, 64)
    cache.arrange(np.arange(16), columns)
    cache.aim(torch.zeros(16, 1, dtype=torch.int64), width=1)
    for layer in range(layers):
        cache.update(states, states, layer)
    source, target = np.array([1, 0]), np.array([0, 1])
    return lambda: [cache.copy(source, target, columns) for _ in range(100)]


class Counts:
    """Ten turns of which each answers with a short text."""

    def reset(self, seed: int | None = None) -> tuple[str, dict]:
        """The first text."""
        self.turn = 0
        return "Count to ten.", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        """The next one."""
        self.turn += 1
        return f"That was {self.turn}.", 0.0, self.turn == 10, False, {}


def episodes(slots: int) -> Work:
    """Ten turns of every slot, with responses that are there: what an environment costs around the
    environment itself."""
    env = GEMEnv(Counts, tokenizer=load_tiny_tokenizer(), num_envs=slots, max_model_len=512, max_output_tokens=4)
    answer = torch.tensor([[5, 6, 7, env.formatter.end_of_turn_ids[0]]]).repeat(slots, 1)

    def play() -> None:
        now = env.reset()
        for _ in range(10):
            now[keys.RESPONSE], now[keys.RESPONSE_MASK] = answer, torch.ones_like(answer, dtype=torch.bool)
            _, now = env.step_and_maybe_reset(now)

    return play


SMOLLM2 = {
    "vocab_size": 49_152, "hidden_size": 576, "intermediate_size": 1_536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3,
}  # fmt: skip
SMALL = {
    "vocab_size": 2_048, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
CASES: dict[str, Callable[[], Work]] = {
    "draw-64x65536": lambda: drawing(64, 65_536),
    "draw-64x152064": lambda: drawing(64, 152_064),
    "turn-32x16-smollm2": lambda: turn(32, 16, **SMOLLM2),
    "turn-32x32-small": lambda: turn(32, 32, **SMALL),
    "move-24-layers-128": lambda: moving(24, 128),
    "episodes-32": lambda: episodes(32),
}


def measure(name: str, repeats: int = 3) -> float:
    """The least CPU-seconds of a case; the first run is not counted."""
    work = CASES[name]()
    work()
    seconds = []
    for _ in range(repeats):
        start = time.process_time()
        work()
        seconds.append(time.process_time() - start)
    return min(seconds)


if __name__ == "__main__":
    pairs.main(__file__, __doc__, CASES, measure)
