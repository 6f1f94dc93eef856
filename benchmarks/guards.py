"""What the guards that were tried do to a run: LLMREINFORCE on drawn seeds, each guard instead of
``target_kl``.

    OMP_NUM_THREADS=1 python benchmarks/guards.py --seeds 8 --jobs 2
    OMP_NUM_THREADS=1 python benchmarks/guards.py --guard amsgrad --seeds 8

The runs are the same as of ``learning.py --seeds N --algo LLMREINFORCE`` but for the guard. The
last four are not in the library: they are what a user would write to try them, an optimizer option,
a hook of the optimizer, an estimator. Writes the runs and ``summary.md`` to ``--output-dir``.
Finished runs are not repeated.
"""

import argparse
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import learning
import numpy as np
import torch
from torch import Tensor

from torchrl_llm import functional as F
from torchrl_llm.objectives import ReBN, TurnLoss
from torchrl_llm.report import run_and_report
from torchrl_llm.runs import Run, RunSettings, build_run

FLOOR = 0.3
"""Smallest standard deviation that returns are divided by; of a game that pays 0 or 1, half won, it
is 0.5."""
SPIKE = 1.5
"""A gradient is shortened to so many times the running mean of the norms before it."""
DECAY = 0.9
"""Of that running mean, a step."""


class FlooredReBN(ReBN):
    """Return batch normalization whose standard deviation is at least :data:`FLOOR`."""

    def compare(self, tensordict: Any, score: Tensor, penalty: Tensor, acted: Tensor) -> Tensor:
        std = (score + penalty)[acted].std()
        standardized = F.standardize(score, acted, self.ddof, self.eps, self.process_group, penalty=penalty)
        return standardized * (std / FLOOR).clamp_max(1.0)


def set_option(**options: Any) -> Callable[[Run], None]:
    """Set options of AdamW, which reads them at each step."""

    def change(run: Run) -> None:
        for group in run.trainer.optimizer.param_groups:
            group.update(options)

    return change


def bound_spikes(run: Run) -> None:
    """Shorten a gradient that is much longer than those before it."""
    mean = None

    def shorten(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        nonlocal mean
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        norm = torch.nn.utils.clip_grad_norm_(parameters, float("inf") if mean is None else SPIKE * mean).item()
        # The bounded norm: else one spike would allow the next.
        norm = norm if mean is None else min(norm, SPIKE * mean)
        mean = norm if mean is None else DECAY * mean + (1 - DECAY) * norm

    # accelerate's wrapper takes none
    run.trainer.optimizer.optimizer.register_step_pre_hook(shorten)


SETTINGS = {
    "none": [],
    "target_kl": ["--target-kl=0.01"],
    "clip_advantage": ["--clip-advantage=3"],
    "one_epoch": ["--epochs=1"],
    "minibatches": ["--minibatch-size=64"],
    "beta2": ["--adam-beta2=0.95"],
    "floor": [],
    "epsilon": [],
    "amsgrad": [],
    "spikes": [],
}
"""The settings of each guard."""
CHANGES = {"epsilon": set_option(eps=1e-3), "amsgrad": set_option(amsgrad=True), "spikes": bound_spikes}
"""What a guard changes in a run that is built."""


def make_floored_loss(config: RunSettings, models: Any) -> TurnLoss:
    """The algorithm's loss with :class:`FlooredReBN`."""
    loss = config.make_loss(models.actor)
    return loss.make_value_estimator(FlooredReBN, gamma=loss.value_estimator.gamma)


def train_one(guard: str, seed: int, folder: Path) -> None:
    """Train with one guard and one seed."""
    common = ["--progress=false", "--checkpoint-interval=0", "--final-episodes=2048", "--overwrite=true"]
    overrides = [*common, "--target-kl=null", *SETTINGS[guard]]
    config = learning.settings("LLMREINFORCE", "guess", seed, folder, overrides)

    def build() -> Run:
        run = build_run(config, make_loss=make_floored_loss if guard == "floor" else None)
        CHANGES.get(guard, lambda _: None)(run)
        return run

    run_and_report(config, build)


def train_all(guards: list[str], seeds: list[int], output: Path, jobs: int) -> None:
    """Train with all guards and seeds, in processes of their own, and write the table."""

    def train(key: tuple[str, int]) -> dict:
        guard, seed = key
        folder = output / f"{guard}-{seed}"
        if not learning.is_finished(folder):
            folder.parent.mkdir(parents=True, exist_ok=True)
            with open(folder.parent / f"{folder.name}.log", "w") as log:
                command = [sys.executable, __file__, "--guard", guard, "--seed", str(seed), "--output-dir", str(output)]
                subprocess.run(command, stdout=log, stderr=log, check=True, timeout=learning.TIMEOUT)
        result = learning.read(folder)
        print(f"{guard} {seed}: {result['success_after']:.3f}", flush=True)
        return result

    with ThreadPoolExecutor(jobs) as pool:
        results = list(pool.map(train, [(guard, seed) for guard in guards for seed in seeds]))
    lines = ["| guard | seeds in order | worst | largest fall | CPU-seconds, median |", "|---|---|---|---|---|"]
    for i, guard in enumerate(guards):
        s = learning.summarize(results[i * len(seeds) : (i + 1) * len(seeds)])
        after = ", ".join(f"{win:.3f}" for win in s["after"])
        lines.append(f"| {guard} | {after} | {s['worst']:.3f} | {max(s['falls']):.2f} | {np.median(s['cpu_s']):.0f} |")
    (output / "summary.md").write_text("\n".join(lines) + "\n")
    print(*lines, sep="\n")


def main() -> None:
    """Train with one seed, or with many."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--guard", choices=list(SETTINGS), action="append", help="default: all")
    chosen = parser.add_mutually_exclusive_group(required=True)
    chosen.add_argument("--seeds", type=int, help="train with this many drawn seeds")
    chosen.add_argument("--seed", type=int, help="train with this one")
    parser.add_argument("--draw", default="final-2", help="the text that the seeds are drawn from")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--output-dir", type=Path, default=Path("runs/guards"))
    arguments = parser.parse_args()
    guards = arguments.guard or list(SETTINGS)
    if arguments.seed is None:
        seeds = learning.drawn_seeds(arguments.draw, arguments.seeds)
        train_all(guards, seeds, arguments.output_dir, arguments.jobs)
    else:
        for guard in guards:
            train_one(guard, arguments.seed, arguments.output_dir / f"{guard}-{arguments.seed}")


if __name__ == "__main__":
    main()
