"""What products with the frozen weights in bfloat16 (``base_products``) save of an update with LoRA
on a CPU.

    OMP_NUM_THREADS=1 python benchmarks/base_products.py --pairs 7

One update of GRPO without its optimizer step: the loss and its gradient on groups of 8 rows that
share a prompt of 108 tokens and have answers of 60, in one micro-batch. The model has random
weights in the shapes of SmolLM2-135M, with LoRA of rank 16 on all linear layers, and is float32.
Both ways take turns in one process. Prints one JSON object: median CPU-seconds, the ratio of the
pairs (how many times as fast bfloat16 is: median, least and most but one), and the relative
difference of the gradients.
"""

import argparse
import json
import statistics
import sys

import torch
from episodes import cpu_seconds
from learn import make_model
from peft import LoraConfig
from tensordict import TensorDict

from torchrl_llm.modules import load_actor_critic
from torchrl_llm.objectives import LLMGRPOLoss, total, write_loss_weights

GROUP, PROMPT, ANSWER = 8, 108, 60


def make_rows(count: int) -> TensorDict:
    """Groups of rows with a prompt in common, answers of their own, and random advantages."""
    generator, length = torch.Generator().manual_seed(0), PROMPT + ANSWER
    tokens = torch.randint(49_152, (count, length), generator=generator)
    tokens[:, :PROMPT] = tokens[::GROUP, :PROMPT].repeat_interleave(GROUP, 0)
    turn_ids = torch.where(torch.arange(length) >= PROMPT, 0, -1).expand(count, -1).contiguous()
    actions = turn_ids >= 0
    rows = {
        "tokens": tokens,
        "attention_mask": torch.ones_like(actions),
        "turn_ids": turn_ids,
        "sample_log_prob": torch.zeros(count, length),
        "advantage": torch.randn(count, 1, generator=generator) * actions,
        "turn": {"mask": torch.ones(count, 1, dtype=torch.bool)},
    }
    return TensorDict(rows, batch_size=[count])


def make_losses() -> dict[str | None, LLMGRPOLoss]:
    """With all products in float32, and with the products of the base in bfloat16; adapters have
    the same random weights."""
    losses = {}
    for products in (None, "bfloat16"):
        torch.manual_seed(0)
        lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", init_lora_weights=False)
        models = load_actor_critic(make_model("135M", None), lora=lora, base_products=products)
        losses[products] = LLMGRPOLoss(models.actor, kl_coeff=0.0)
    return losses


def gradient(loss: LLMGRPOLoss) -> torch.Tensor:
    """The gradient that the last backward left, which is cleared."""
    found = torch.cat([p.grad.flatten() for p in loss.parameters() if p.grad is not None])
    loss.zero_grad()
    return found


def main() -> None:
    """Measure and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=7, help="after one that is not counted")
    parser.add_argument("--rows", type=int, default=16)
    arguments = parser.parse_args()
    losses = make_losses()
    rows = write_loss_weights(make_rows(arguments.rows), losses[None])
    # no ratio differs from 1 for the first, as in an update on its own policy
    with torch.no_grad():
        rows["sample_log_prob"] = losses[None].actor_network(rows.clone())["log_prob"]
    seconds: dict[str | None, list[float]] = {None: [], "bfloat16": []}
    for number in range(1 + arguments.pairs):
        found = {}
        for products, loss in losses.items():
            spent = cpu_seconds(lambda loss=loss: total(loss(rows.clone())).backward())
            found[products] = gradient(loss)
            if number:
                seconds[products].append(spent)
                print(products, round(spent, 2), file=sys.stderr, flush=True)
    ratios = sorted(wide / narrow for wide, narrow in zip(seconds[None], seconds["bfloat16"], strict=True))
    error = (found["bfloat16"] - found[None]).norm() / found[None].norm()
    result = {
        "float32_cpu_s": round(statistics.median(seconds[None]), 2),
        "bfloat16_cpu_s": round(statistics.median(seconds["bfloat16"]), 2),
        "ratio": round(statistics.median(ratios), 2),
        "ratio_but_one": [round(ratios[min(1, len(ratios) - 1)], 2), round(ratios[max(0, len(ratios) - 2)], 2)],
        "gradient_error": round(error.item(), 4),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
