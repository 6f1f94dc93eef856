"""CPU-seconds of a sampled token with ``compile_decode`` and without, in turns, in one process.

    OMP_NUM_THREADS=1 python benchmarks/decode.py --pairs 11
    OMP_NUM_THREADS=1 python benchmarks/decode.py --pairs 11 --layers 6 --hidden 256 --rows 8 \\
        --tokens 128

Prints one JSON object: CPU-seconds of each side's first turn, with the compiler in it, the medians
for a token of all rows, the median of the pairs' ratios (without over with: above 1 is faster), and
an interval, which holds all pairs but the lowest and the highest.
"""

import argparse
import json
import statistics
import time

import torch
from pairs import compared
from report import machine
from tensordict import TensorDict
from transformers import Qwen2Config, Qwen2ForCausalLM

from torchrl_llm import keys
from torchrl_llm.modules import HFPolicy, SamplingConfig
from torchrl_llm.testing.tiny import load_tiny_tokenizer


def turn_of(policy: HFPolicy, rows: int) -> float:
    """CPU-seconds of a turn of ``rows`` slots, after a prompt of 20 tokens that they share."""
    prompts = {"prompt": torch.arange(20).repeat(rows, 1), "prompt_length": torch.full((rows, 1), 20)}
    column = torch.arange(rows).unsqueeze(1)
    batch = TensorDict({"tokens": prompts, keys.TURN: column * 0, keys.EPISODE_ID: column}, [rows])
    start = time.process_time()
    policy(batch)
    return time.process_time() - start


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=11, help="pairs of turns; default 11")
    parser.add_argument("--layers", type=int, default=2, help="layers of the model; default 2")
    parser.add_argument("--hidden", type=int, default=64, help="its width; default 64")
    parser.add_argument("--rows", type=int, default=32, help="slots of a batch; default 32")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of a response; default 64")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=2_048, hidden_size=args.hidden, intermediate_size=2 * args.hidden, num_hidden_layers=args.layers,
        num_attention_heads=4, num_key_value_heads=2, bos_token_id=None, eos_token_id=0,
    )  # fmt: skip
    model, tokenizer = Qwen2ForCausalLM(config).eval(), load_tiny_tokenizer()
    sampling = SamplingConfig(max_output_tokens=args.tokens, stop_ids=())
    sides = {each: HFPolicy(model, tokenizer, sampling, compile_decode=each == "with") for each in ("without", "with")}
    first = {side: turn_of(policy, args.rows) for side, policy in sides.items()}
    found: dict[str, list[float]] = {side: [] for side in sides}
    for pair in range(args.pairs):
        for side in sorted(sides, reverse=bool(pair % 2)):
            found[side].append(turn_of(sides[side], args.rows))
    result = compared(found["without"], found["with"])
    a_token = {side: statistics.median(found[side]) / args.tokens for side in sides}
    figures = {"first_turn_s": first, "token_s": a_token, "ratio": result["ratio"], "interval": result["interval"]}
    print(json.dumps({"machine": machine(), **vars(args), **figures}, indent=1))


if __name__ == "__main__":
    main()
