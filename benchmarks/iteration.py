"""How fast one training iteration is, against the raw limit of each phase and, on request, against
another library.

    OMP_NUM_THREADS=1 python benchmarks/iteration.py --algo LLMPPO
    OMP_NUM_THREADS=1 python benchmarks/iteration.py --algo LLMPPO --model-dir DIR \\
        --peer-cmd "COMMAND"

The work: a random Qwen2 of 0.66 M parameters, 16 conversations of GuessTheNumber in which any text
is a legal guess, 32 forced tokens a turn, LoRA of rank 16 on the attention's projections, two
epochs in one optimizer step each, KL to the reference, float32, one thread.

The raw limits, measured in the same process after each iteration, know nothing of environments,
credit or losses:

- rollout: ``model.generate`` of as many tokens for the same contexts, one batched call a turn;
- learn: forward and backward of the same rows as often as the algorithm trains on them (actor, and
  critic if there is one), the LM head on action positions only.

Prints one JSON object. ``--peer-cmd`` runs a command between our rounds and reads the last line of
its output that is a JSON object with ``rollout_tok_cpu_s``, ``learn_tok_cpu_s`` and
``peak_rss_mb``. Rates are tokens per CPU-second.
"""

import argparse
import json
import resource
import shlex
import statistics
import subprocess
import tempfile
import time
import zlib
from pathlib import Path

import gem
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from torchrl_llm import keys
from torchrl_llm.modules import use_adapter
from torchrl_llm.runs import RunSettings, build_run

TOKENS_PER_TURN = 32
ALONE = 2
"""Iterations before the first raw limit: warm-up, and what the peak memory is of."""


class AnyGuess:
    """GuessTheNumber in which any text is a legal guess, so that a random model plays several
    turns."""

    def __init__(self) -> None:
        self._env = gem.make("game:GuessTheNumber-v0-easy")

    def reset(self, seed: int):
        """Start a game."""
        return self._env.reset(seed=seed)

    def step(self, action: str):
        """Guess a number from 1 to 10 that depends on every character."""
        return self._env.step(f"\\boxed{{{1 + zlib.crc32(action.encode()) % 10}}}")


def make_model(path: Path, *, seed: int = 0) -> None:
    """Write a random Qwen2 (hidden 128, 2 layers) and a BPE tokenizer trained on the game's own
    texts."""
    game = AnyGuess()
    texts = []
    for episode in range(200):
        text, info = game.reset(seed=episode)
        done = False
        while not done:
            texts.append(text + info.get("suffix", ""))
            text, _, terminated, truncated, info = game.step(f"{episode} {len(texts)}")
            done = terminated or truncated
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=2048, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    config = Qwen2Config(
        vocab_size=2048,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


def make_config(algo: str, model_dir: str, iterations: int) -> RunSettings:
    """The work described above, as settings."""
    return RunSettings.from_values(
        algo=algo,
        model_path=model_dir,
        dtype="float32",
        device="cpu",
        lora_r=16,
        lora_alpha=64,
        lora_targets=["q_proj", "k_proj", "v_proj", "o_proj"],
        batch_size=16,
        num_envs=16,
        group_size=4 if algo == "GRPO" else 1,
        min_output_tokens=TOKENS_PER_TURN,
        max_output_tokens=TOKENS_PER_TURN,
        max_model_len=1024,
        epochs=2,
        max_tokens=2048,  # fits a CPU's caches
        kl_coeff=0.01,
        lr_actor=5e-6,
        max_steps=10**9,
        max_iterations=iterations,
        evaluation_interval=0,
        save_checkpoints=False,
        progress=False,
        output_dir=Path(tempfile.mkdtemp()),
    )


def cpu_seconds(work) -> float:
    """CPU-seconds that ``work()`` takes in this process."""
    start = time.process_time()
    work()
    return time.process_time() - start


def raw_rollout(run, rows) -> None:
    """``model.generate`` of the same number of tokens for the same contexts, one call a turn."""
    settings = GenerationConfig(
        do_sample=True,
        top_k=0,
        max_new_tokens=TOKENS_PER_TURN,
        min_new_tokens=TOKENS_PER_TURN,
        pad_token_id=run.tokenizer.pad_token_id,
        eos_token_id=run.tokenizer.eos_token_id,
    )
    tokens, turn_ids = rows[keys.TOKENS], rows[keys.TURN_IDS]
    for turn in range(int(turn_ids.max()) + 1):
        played = (turn_ids == turn).any(-1)
        starts = (turn_ids[played] == turn).int().argmax(-1).tolist()
        contexts = [{"input_ids": row[:start]} for row, start in zip(tokens[played], starts, strict=True)]
        batch = run.tokenizer.pad(contexts, padding_side="left", return_tensors="pt")
        with torch.inference_mode(), use_adapter(run.models.model, run.models.adapter):
            run.models.model.generate(**batch, generation_config=settings)


def raw_learn(run, rows, epochs: int) -> None:
    """Forward and backward of the rows, the LM head on action positions only."""
    lm = run.models.model.get_base_model()
    length = int(rows[keys.ATTENTION_MASK].sum(-1).max())
    tokens, actions = rows[keys.TOKENS][:, :length], rows[keys.TURN_IDS][:, :length] >= 0
    passes = ["actor", "critic"] if run.models.critic is not None else ["actor"]
    for adapter in passes * epochs:
        with use_adapter(run.models.model, adapter):
            hidden = lm.model(input_ids=tokens, use_cache=False).last_hidden_state[:, :-1][actions[:, 1:]]
        if adapter == "actor":
            targets = tokens[:, 1:][actions[:, 1:]]
            loss = torch.nn.functional.cross_entropy(lm.lm_head(hidden).float(), targets)
        else:
            loss = run.models.critic.value_head(hidden.float()).square().mean()
        loss.backward()
    run.trainer.optimizer.zero_grad()


def iterate(run, batches):
    """One iteration of ours: its rows, its metrics and the CPU-seconds of its phases."""
    trainer, kept = run.trainer, {}

    def rollout() -> None:
        kept["rows"] = trainer.collect(batches)

    def learn() -> None:
        kept["metrics"] = trainer.learn(kept["rows"])

    seconds = {"rollout": cpu_seconds(rollout), "learn": cpu_seconds(learn)}
    return kept["rows"], kept["metrics"], seconds


def measure(run, batches) -> dict[str, float]:
    """One iteration of ours and then the raw limits on the same conversations."""
    rows, metrics, seconds = iterate(run, batches)
    sampled, unique = int((rows[keys.TURN_IDS] >= 0).sum()), int(rows[keys.ATTENTION_MASK].sum())
    raw = {
        "rollout": cpu_seconds(lambda: raw_rollout(run, rows)),
        "learn": cpu_seconds(lambda: raw_learn(run, rows, run.trainer.config.epochs)),
    }
    return {
        "rollout_tok_cpu_s": sampled / seconds["rollout"],
        "learn_tok_cpu_s": unique / seconds["learn"],
        "cpu_s_per_iteration": seconds["rollout"] + seconds["learn"],
        "rollout_cpu_s": seconds["rollout"],
        "learn_cpu_s": seconds["learn"],
        "raw_rollout_tok_cpu_s": sampled / raw["rollout"],
        "raw_learn_tok_cpu_s": unique / raw["learn"],
        "rollout_of_raw": raw["rollout"] / seconds["rollout"],
        "learn_of_raw": raw["learn"] / seconds["learn"],
        "padding_share": metrics["data/padding_share"],
        "turns": float(rows[keys.TURN_MASK].sum() / rows.shape[0]),
        "row_tokens": unique / rows.shape[0],
    }


def peak_mb() -> int:
    """The most memory that this process has held, in MB."""
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def run_peer(command: str) -> dict[str, float]:
    """Run the other library and read its summary."""
    done = subprocess.run(shlex.split(command), capture_output=True, text=True, timeout=1200, check=False)
    for line in reversed(done.stdout.splitlines()):
        if line.startswith("{") and "rollout_tok_cpu_s" in line and "peak_rss_mb" in line:
            return json.loads(line)
    raise RuntimeError(f"no summary in the output of {command!r} (exit {done.returncode}): {done.stderr[-2000:]}")


def main() -> None:
    """Measure, interleave the peer if asked to, print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algo", choices=["LLMPPO", "LLMREINFORCE", "GRPO"], default="LLMPPO")
    parser.add_argument("--iterations", type=int, default=5, help="measured iterations, after the warm-up")
    parser.add_argument("--model-dir", help="a model to use instead of the one made here")
    parser.add_argument("--peer-cmd", help="command of the other library, run after every second iteration")
    parser.add_argument("--output", type=Path, help="write the JSON here too")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        if arguments.model_dir is None:
            make_model(Path(folder))
        config = make_config(arguments.algo, arguments.model_dir or folder, arguments.iterations + ALONE + 1)
        run = build_run(config, env=AnyGuess)
        batches = iter(run.trainer.collector)
        for _ in range(ALONE):
            iterate(run, batches)
        # read before the raw limits run: those hold whole batches, and the mark never falls
        peak = peak_mb()
        measure(run, batches)  # warm-up of the raw limits
        rounds, peer = [], []
        for iteration in range(arguments.iterations):
            rounds.append(measure(run, batches))
            if arguments.peer_cmd and iteration % 2 == 0:
                peer.append(run_peer(arguments.peer_cmd))
        run.trainer.close()
    result = {"algo": arguments.algo, "iterations": len(rounds), "threads": torch.get_num_threads()}
    result |= {name: round(statistics.median(r[name] for r in rounds), 4) for name in rounds[0]}
    result["peak_rss_mb"] = peak
    if peer:
        for name in ("rollout_tok_cpu_s", "learn_tok_cpu_s", "peak_rss_mb"):
            theirs = statistics.median(p[name] for p in peer)
            result[f"peer_{name}"] = round(theirs, 1)
            result[f"{name.removesuffix('_tok_cpu_s').removesuffix('_mb')}_ratio"] = round(result[name] / theirs, 3)
    print(json.dumps(result, indent=2))
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
