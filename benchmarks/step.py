"""What a step of GRPO costs on questions that share a long prompt: generation, and the rest.

    OMP_NUM_THREADS=1 python benchmarks/step.py --model-dir DIR --prefix-repeats 3
    OMP_NUM_THREADS=1 python benchmarks/step.py --model-dir DIR --peer-cmd "COMMAND"
    OMP_NUM_THREADS=2 python benchmarks/step.py --model-dir DIR --dtype bfloat16 \\
        --mixed-precision bf16 --threads 2

Each step answers four questions eight times with ``--completion`` forced tokens, and trains on them
once: LoRA of rank 16 on the attention's projections, no reference, float32 unless asked for
otherwise. ``--peer-cmd`` runs before and after ours, and prints a line of JSON with
``generate_cpu_s``, ``rest_cpu_s`` and ``peak_rss_mb``; ratios above 1 are how many times as fast
ours is, and ``peak_rss_ratio`` is ours over theirs.

Prints one JSON object: medians over ``--steps``, CPU-seconds, seconds by the clock, and the most
memory that the process has held.
"""

import argparse
import json
import shlex
import statistics
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import learn
import torch
from episodes import cpu_seconds

from torchrl_llm.envs import PromptDatasetEnv
from torchrl_llm.runs import RunSettings, build_run

PREFIX = "You are a careful assistant that answers arithmetic questions. Think briefly, then give only the number. "
GROUP = 8


def reward_fn(completion: str, answer: str, question: str) -> float:
    """Anything that differs from one answer to another."""
    return float(len(completion) % 7)


def make_config(arguments: argparse.Namespace, folder: Path) -> RunSettings:
    """The work described above, as settings."""
    return RunSettings.from_values(
        algo="GRPO",
        model_path=arguments.model_dir,
        dtype=arguments.dtype,
        mixed_precision=arguments.mixed_precision,
        device="cpu",
        lora_r=16,
        lora_alpha=64,
        lora_targets=["q_proj", "k_proj", "v_proj", "o_proj"],
        batch_size=arguments.batch,
        num_envs=arguments.batch,
        group_size=GROUP,
        min_output_tokens=arguments.completion,
        max_output_tokens=arguments.completion,
        max_model_len=1024,
        kl_coeff=0.0,
        epochs=1,
        lr_actor=5e-6,
        max_steps=10**9,
        evaluation_interval=0,
        save_checkpoints=False,
        progress=False,
        output_dir=folder,
    )


def steps(arguments: argparse.Namespace) -> Iterator[dict[str, float]]:
    """Seconds of each step, after the first."""
    questions = [
        {"question": f"{PREFIX * arguments.prefix_repeats}What is {i % 97} plus {i % 89}?", "answer": ""}
        for i in range(4_000)
    ]
    splits = {"train": questions, "test": [{"question": "What is 100 plus 100?", "answer": ""}]}
    with tempfile.TemporaryDirectory() as folder:
        config = make_config(arguments, Path(folder))
        run = build_run(config, make_env=partial(PromptDatasetEnv, splits, reward_fn))
        batches, trainer, rows = iter(run.trainer.collector), run.trainer, []
        for number in range(1 + arguments.steps):
            began = time.perf_counter()
            seconds = {"generate_cpu_s": cpu_seconds(lambda: rows.append(trainer.collect(batches)))}
            generated = time.perf_counter()
            seconds["rest_cpu_s"] = cpu_seconds(lambda: trainer.learn(rows.pop()))
            seconds |= {"generate_s": generated - began, "rest_s": time.perf_counter() - generated}
            if number:
                yield seconds
        run.close()


def main() -> None:
    """Measure, between two runs of the peer if asked to, and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-dir", required=True)
    parser.add_argument("--prefix-repeats", type=int, default=3, help="of a sentence of about 20 tokens in each prompt")
    parser.add_argument("--batch", type=int, default=32, help="completions of a step")
    parser.add_argument("--completion", type=int, default=32, help="tokens of a completion")
    parser.add_argument("--steps", type=int, default=3, help="after the first")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of the base weights")
    parser.add_argument("--mixed-precision", choices=["no", "bf16"], default="no", help="of training")
    parser.add_argument("--threads", type=int, default=1, help="of PyTorch; give OMP_NUM_THREADS as many")
    parser.add_argument("--peer-cmd", help="command of another library")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    peer = [learn.run(shlex.split(arguments.peer_cmd))] if arguments.peer_cmd else []
    found = list(steps(arguments))
    result = {name: round(statistics.median(each[name] for each in found), 3) for name in found[0]}
    result["peak_rss_mb"] = learn.peak_mb()
    if peer:
        peer.append(learn.run(shlex.split(arguments.peer_cmd)))
        names = ("generate_cpu_s", "rest_cpu_s", "peak_rss_mb")
        theirs = {name: statistics.mean(each[name] for each in peer) for name in names}
        ours, other = (each["generate_cpu_s"] + each["rest_cpu_s"] for each in (result, theirs))
        result |= {f"peer_{name}": round(value, 3) for name, value in theirs.items()}
        result["step_ratio"] = round(other / ours, 2)
        for name in ("generate", "rest"):
            result[f"{name}_ratio"] = round(theirs[f"{name}_cpu_s"] / result[f"{name}_cpu_s"], 2)
        result["peak_rss_ratio"] = round(result["peak_rss_mb"] / theirs["peak_rss_mb"], 2)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
