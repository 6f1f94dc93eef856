"""How well updates of several optimizer steps keep ``target_kl``: on all of their rows, where the
guard measures a quarter of them.

    OMP_NUM_THREADS=1 python benchmarks/kl_guard.py --lr 5e-4
    OMP_NUM_THREADS=1 PYTHONPATH=/tmp/before python benchmarks/kl_guard.py --lr 5e-4

LLMREINFORCE on the tiny model, 48 episodes in four optimizer steps, three iterations for each of
``--seeds`` seeds. Prints one JSON object: quantiles of the KL as a share of the target, how many
updates were beyond it and were shortened, and scoring passes and CPU-seconds of an update.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch

from torchrl_llm import keys
from torchrl_llm.functional import kl_estimate
from torchrl_llm.runs import RunSettings, build_run

TARGET = 0.01


def make_config(folder: str, seed: int, lr: float) -> RunSettings:
    """The work described above, as settings."""
    return RunSettings.from_values(
        algo="LLMREINFORCE",
        model_path="tiny",
        dtype="float32",
        device="cpu",
        lora_r=0,
        kl_coeff=0.0,
        max_model_len=256,
        max_output_tokens=16,
        num_envs=48,
        batch_size=48,
        minibatch_size=12,
        lr_actor=lr,
        target_kl=TARGET,
        max_steps=10**6,
        evaluation_interval=0,
        save_checkpoints=False,
        progress=False,
        seed=seed,
        output_dir=Path(folder) / "run",
    )


def kl(actor, rows) -> float:
    """From the policy that sampled the rows to the present one, per action token."""
    with torch.no_grad():
        new = actor(rows.clone())[keys.LOG_PROB]
    return kl_estimate(rows[keys.SAMPLE_LOG_PROB], new, "k3")[rows[keys.TURN_IDS] >= 0].mean().item()


def updates(seed: int, lr: float, iterations: int = 3) -> list[dict[str, float]]:
    """What three updates of a run have done."""
    found, passes = [], []
    with tempfile.TemporaryDirectory() as folder:
        run = build_run(make_config(folder, seed, lr))
        run.models.actor.register_forward_hook(lambda *_: None if torch.is_grad_enabled() else passes.append(1))
        batches = iter(run.trainer.collector)
        for _ in range(iterations):
            rows = run.trainer.collect(batches)
            passes.clear()
            start = time.process_time()
            metrics = run.trainer.learn(rows)
            each = {"seconds": time.process_time() - start, "passes": len(passes)}
            found.append(each | {"share": metrics["optim/step_share"], "kl": kl(run.models.actor, rows) / TARGET})
        run.close()
    return found


def main() -> None:
    """Run all seeds, print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--seeds", type=int, default=24)
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = [each for seed in range(args.seeds) for each in updates(seed, args.lr)]
    tenths = statistics.quantiles([each["kl"] for each in found], n=10)
    result = {"updates": len(found), "median": tenths[4], "tenth": tenths[8], "most": max(each["kl"] for each in found)}
    result |= {name: statistics.mean(each[name] for each in found) for name in ("passes", "seconds")}
    beyond, shortened = (sum(each["kl"] > 1 for each in found), sum(each["share"] < 1 for each in found))
    print(json.dumps({"lr": args.lr, "beyond": beyond, "shortened": shortened} | result))


if __name__ == "__main__":
    main()
