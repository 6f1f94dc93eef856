"""What one update costs on rows of a given shape: plain logits, this library without and with
shared prefixes, a peer.

    OMP_NUM_THREADS=1 python benchmarks/learn.py --model 135M --prompt 300 --response 60 --group 8
    OMP_NUM_THREADS=1 python benchmarks/learn.py --model 0.5B --prompt 0 --response 512 \\
        --frozen-head
    OMP_NUM_THREADS=1 python benchmarks/learn.py --random 200

Models have random weights in the shapes of real ones, in float32: neither time nor memory depends
on the weights. The rows are ``--groups`` prompts with ``--group`` responses each; the tokens of
responses are trained. An update is a forward, a weighted sum of log-probs (and of entropies, unless
``--no-entropy``) and a backward:

- by hand: the model's own logits of all tokens, ``log_softmax`` and ``gather``;
- rows: :class:`~torchrl_llm.modules.TokenScorer`, every row by itself;
- shared: the same, what rows share computed once.

Every measurement is a process of its own, and they take turns, ``--rounds`` times. Prints a
Markdown table: CPU-seconds of an update (median), how many times as fast as rows that is, the peak
of the memory above the loaded model, and the tokens that the backbone computed for each token of
the rows. ``--peer-cmd`` is run each round too, and prints a line of JSON with ``cpu_s`` and
``peak_mb``.

``--random N`` compares shared with rows on N random shapes instead, one process, in turns: the
distribution of the speed-up.
"""

import argparse
import json
import resource
import shlex
import statistics
import subprocess
import sys
import time
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from transformers import LlamaConfig, LlamaForCausalLM

from torchrl_llm.modules import TokenScorer, enable_prefix_sharing

MODELS = {
    "0.66M": (2_048, 128, 2, 4, 2, 384),
    "135M": (49_152, 576, 30, 9, 3, 1_536),
    "0.5B": (151_936, 896, 24, 14, 2, 4_864),
    "head": (151_936, 256, 2, 4, 4, 688),
}
"""Name -> vocabulary, hidden size, layers, heads, heads of keys and values, width of the MLP. Those
of a small model, SmolLM2-135M and Qwen2.5-0.5B; ``head`` is all vocabulary."""

VARIANTS = ("by hand", "rows", "shared")


def make_model(name: str, layers: int | None, vocabulary: int | None = None) -> LlamaForCausalLM:
    """A random model; ``layers``, ``vocabulary``: other numbers than the real one has."""
    size, hidden, depth, heads, kv_heads, width = MODELS[name]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary or size,
        hidden_size=hidden,
        num_hidden_layers=layers or depth,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=width,
        tie_word_embeddings=True,
        max_position_embeddings=8_192,
    )
    return LlamaForCausalLM(config).eval()


def make_rows(vocabulary: int, prompt: int, response: int, group: int, groups: int) -> TensorDict:
    """``groups`` prompts of ``prompt`` tokens with ``group`` responses each; a row begins with one
    token at least."""
    generator = torch.Generator().manual_seed(0)
    prompt = max(prompt, 1)
    prompts = torch.randint(vocabulary, (groups, prompt), generator=generator).repeat_interleave(group, 0)
    responses = torch.randint(vocabulary, (group * groups, response), generator=generator)
    tokens = torch.cat([prompts, responses], 1)
    turn_ids = torch.full_like(tokens, -1)
    turn_ids[:, prompt:] = 0
    rows = {"tokens": tokens, "attention_mask": torch.ones_like(tokens).bool(), "turn_ids": turn_ids}
    return TensorDict(rows, batch_size=[len(tokens)])


def by_hand(model: LlamaForCausalLM, rows: TensorDict, *, entropy: bool) -> torch.Tensor:
    """The loss from the logits of all tokens."""
    log_probs = model(input_ids=rows["tokens"], use_cache=False).logits[:, :-1].log_softmax(-1)
    weight = (rows["turn_ids"][:, 1:] >= 0).float()
    chosen = log_probs.gather(-1, rows["tokens"][:, 1:].unsqueeze(-1)).squeeze(-1)
    loss = -(weight * chosen).sum()
    return loss + 0.01 * (weight * (log_probs.exp() * log_probs).sum(-1)).sum() if entropy else loss


def scored(scorer: TokenScorer, rows: TensorDict) -> torch.Tensor:
    """The same loss from a scorer."""
    found = scorer.score(rows["tokens"], rows["attention_mask"], rows["turn_ids"])
    return -found[0].sum() - (0.01 * found[1].sum() if scorer.entropy else 0)


def peak_mb() -> int:
    """The most memory that this process has held so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1_024


def measure(variant: str, arguments: argparse.Namespace) -> dict[str, float]:
    """CPU-seconds, memory and computed tokens of an update, in this process."""
    model = make_model(arguments.model, arguments.layers)
    if arguments.frozen_head:
        model.get_output_embeddings().weight.requires_grad_(False)
    shape = arguments.prompt, arguments.response, arguments.group, arguments.groups
    rows = make_rows(model.config.vocab_size, *shape)
    counts: list[int] = []
    model.get_input_embeddings().register_forward_hook(lambda module, args, out: counts.append(args[0].numel()))
    entropy = not arguments.no_entropy
    prefixes = enable_prefix_sharing(model) if variant == "shared" else None
    scorer = TokenScorer(model, entropy=entropy, prefixes=prefixes)
    seconds = []
    for _ in range(arguments.updates):
        before, start = peak_mb(), time.process_time()
        loss = by_hand(model, rows, entropy=entropy) if variant == "by hand" else scored(scorer, rows)
        loss.backward()
        seconds.append(time.process_time() - start)
        if len(seconds) == 1:  # gradients of the weights are part of it
            peak = peak_mb() - before
        model.zero_grad(set_to_none=True)
    return {"cpu_s": min(seconds), "peak_mb": peak, "computed": counts[-1] / rows["tokens"].numel()}


def run(command: list[str]) -> dict[str, float]:
    """The last line of a command's output, as JSON."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=3_600, check=False)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command)} failed: {done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def table(results: dict[str, list[dict[str, float]]]) -> str:
    """The medians of all rounds as Markdown."""
    base = statistics.median(each["cpu_s"] for each in results["rows"])
    lines = ["| | CPU-seconds | times as fast as rows | peak memory, MiB | tokens computed |", "|---|---|---|---|---|"]
    for name, rounds in results.items():
        median = {key: statistics.median(each[key] for each in rounds) for key in rounds[0]}
        computed = f"{median['computed']:.2f}" if "computed" in median else "-"
        lines.append(
            f"| {name} | {median['cpu_s']:.2f} | {base / median['cpu_s']:.2f} | {median['peak_mb']:,.0f} | {computed} |"
        )
    return "\n".join(lines)


def random_shapes(count: int, model_name: str, layers: int | None) -> str:
    """The speed-up of shared prefixes over rows on random shapes."""
    model, rng, ratios = make_model(model_name, layers), np.random.default_rng(0), []
    sharing = enable_prefix_sharing(model)
    scorer = TokenScorer(model)
    for _ in range(count):
        prompt, response = (int(rng.integers(1, 250)) for _ in range(2))
        group, groups = int(rng.integers(1, 9)), int(rng.integers(1, 5))
        rows = make_rows(model.config.vocab_size, prompt, response, group, groups)
        seconds: dict[Any, list[float]] = {None: [], sharing: []}
        for _ in range(3):
            for scorer.prefixes in seconds:
                start = time.process_time()
                scored(scorer, rows).backward()
                seconds[scorer.prefixes].append(time.process_time() - start)
        ratios.append(min(seconds[None]) / min(seconds[sharing]))
    low, median, high = np.quantile(ratios, [0.05, 0.5, 0.95])
    return f"{count} random shapes: 5th percentile {low:.2f}, median {median:.2f}, 95th percentile {high:.2f}"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(MODELS), default="135M")
    parser.add_argument("--layers", type=int, help="instead of the model's own number")
    parser.add_argument("--prompt", type=int, default=300)
    parser.add_argument("--response", type=int, default=60)
    parser.add_argument("--group", type=int, default=8, help="responses to a prompt")
    parser.add_argument("--groups", type=int, default=1, help="prompts")
    parser.add_argument(
        "--frozen-head", action="store_true", help="do not train the head (and the embedding tied to it)"
    )
    parser.add_argument("--no-entropy", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--updates", type=int, default=2, help="of a process; the fastest counts")
    parser.add_argument("--peer-cmd", help="command of another library, run each round")
    parser.add_argument("--random", type=int, help="compare on this many random shapes")
    parser.add_argument("--one", choices=VARIANTS, help="measure one variant, in this process")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.random:
        print(random_shapes(arguments.random, arguments.model, arguments.layers))
        return
    if arguments.one:
        print(json.dumps(measure(arguments.one, arguments)))
        return
    results: dict[str, list[dict[str, float]]] = {name: [] for name in VARIANTS}
    for _ in range(arguments.rounds):
        for name in VARIANTS:
            results[name].append(run([sys.executable, *sys.argv, "--one", name]))
        if arguments.peer_cmd:
            results.setdefault("peer", []).append(run(shlex.split(arguments.peer_cmd)))
    print(table(results))


if __name__ == "__main__":
    main()
