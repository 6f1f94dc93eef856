"""How much memory one update takes, by model size, what is trained and the token budget of a
micro-batch.

    OMP_NUM_THREADS=1 python benchmarks/memory.py [135M] [360M]

Models have random weights in the shapes of real ones: memory does not depend on the weights. Each
figure is the peak of a process of its own on a CPU, in float32, less what it had before the model
was made: one optimizer step of LLMREINFORCE on four rows of 512 tokens, half of them sampled. The
allocator gives large blocks back at once (:data:`ALLOCATOR`), so that the figures are of what is in
use. Prints a Markdown table; behind each figure, in brackets, the library's estimate.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
from itertools import product

import torch
from peft import LoraConfig
from tensordict import TensorDict
from transformers import LlamaConfig, LlamaForCausalLM

from torchrl_llm.data import micro_batches
from torchrl_llm.modules import load_actor_critic
from torchrl_llm.objectives import LLMReinforceLoss
from torchrl_llm.runs import RunSettings
from torchrl_llm.runs.memory import empty_model, memory_estimate

SIZES = {"135M": (576, 30, 9, 3, 1_536), "360M": (960, 32, 15, 5, 2_560)}
"""Name -> hidden size, layers, heads, heads of keys and values, width of the MLP: as in
SmolLM2."""

BUDGETS = {"512": (512, False), "2,048": (2_048, False), "2,048, gradient_checkpointing": (2_048, True)}
"""Column -> ``max_tokens`` of a micro-batch, and whether activations are recomputed."""

ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "1000000", "MALLOC_TRIM_THRESHOLD_": "1000000"}
"""glibc keeps freed blocks otherwise, up to three times as much as is in use."""

ROWS, LENGTH = 4, 512


def make_config(size: str) -> LlamaConfig:
    hidden, layers, heads, kv_heads, width = SIZES[size]
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=49_152,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=width,
        tie_word_embeddings=True,
    )


def make_rows() -> TensorDict:
    tokens = torch.randint(49_152, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    turn_ids = torch.full((ROWS, LENGTH), -1)
    turn_ids[:, LENGTH // 2 :] = 0
    mask = turn_ids >= 0
    rows = {
        "tokens": tokens,
        "attention_mask": torch.ones_like(mask),
        "turn_ids": turn_ids,
        "sample_log_prob": torch.full((ROWS, LENGTH), -10.0),
        "advantage": mask.float(),
        "loss_weight": mask / mask.sum(),
    }
    return TensorDict(rows, batch_size=[ROWS])


def peak() -> int:
    """The highest memory of this process so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1_024


def measure(size: str, lora_r: int, budget: str) -> int:
    """MiB of one update above what the process had before the model."""
    max_tokens, checkpointing = BUDGETS[budget]
    before = peak()
    lora = LoraConfig(r=lora_r, target_modules="all-linear") if lora_r else None
    models = load_actor_critic(LlamaForCausalLM(make_config(size)), lora=lora, gradient_checkpointing=checkpointing)
    loss = LLMReinforceLoss(models.actor, kl_coeff=0.0)
    optimizer = torch.optim.AdamW([parameter for parameter in loss.parameters() if parameter.requires_grad])
    for part in micro_batches(make_rows(), max_tokens):
        loss(part)["loss_objective"].backward()
    optimizer.step()
    return peak() - before


def estimated(size: str, lora_r: int, budget: str) -> int:
    """MiB of the same update by the library's estimate."""
    max_tokens, checkpointing = BUDGETS[budget]
    with tempfile.TemporaryDirectory() as folder:
        make_config(size).save_pretrained(folder)
        config = RunSettings.from_values(
            model_path=folder, algo="LLMREINFORCE", policy="vllm", dtype="float32", lora_r=lora_r, kl_coeff=0.0,
            batch_size=ROWS, max_model_len=LENGTH, max_tokens=max_tokens, gradient_checkpointing=checkpointing,
        )  # fmt: skip
        return round(sum(memory_estimate(config, empty_model(config)).values()) / 2**20)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sizes", nargs="*", metavar="SIZE", help=f"of {', '.join(SIZES)}; default: all")
    parser.add_argument(
        "--one", nargs=3, metavar=("SIZE", "LORA_R", "BUDGET"), help="measure one case, in this process"
    )
    arguments = parser.parse_args()
    if arguments.one:
        size, lora_r, budget = arguments.one
        print(measure(size, int(lora_r), budget))
        return
    print(f"| model | trained | {' | '.join(f'max_tokens {budget}' for budget in BUDGETS)} |")
    print("|---|---|" + "---|" * len(BUDGETS))
    for size, lora_r in product(arguments.sizes or SIZES, (16, 0)):
        cells = []
        for budget in BUDGETS:
            command = [sys.executable, __file__, "--one", size, str(lora_r), budget]
            done = subprocess.run(
                command, capture_output=True, text=True, check=True, timeout=1_800, env=os.environ | ALLOCATOR
            )
            cells.append(f"{int(done.stdout.split()[-1]):,} ({estimated(size, lora_r, budget):,}) MiB")
        print(f"| {size} | {'LoRA, rank 16' if lora_r else 'all weights'} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
