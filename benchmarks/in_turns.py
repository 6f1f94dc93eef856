"""CPU-seconds of iterations of this checkout against another one's, one iteration each in turns.

    git worktree add /tmp/before efd5924
    OMP_NUM_THREADS=1 python benchmarks/in_turns.py --before /tmp/before --algo GRPO
    OMP_NUM_THREADS=1 python benchmarks/in_turns.py --before /tmp/before --vllm --pairs 30

Both processes stay alive and work alternately, so that what slows the machine down for more than a
second slows down both. Each does the work of its own ``iteration.py``; the conversations are the
same as long as the numbers are. ``--vllm``: instead, an iteration plays 96 tasks with each
contender of its own ``rollout.py``. Prints one JSON object: medians, and the ratio before / after of
pairs of neighbouring iterations, with the interval that holds the median of all such pairs in 95 of
100 cases (order statistics).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from math import comb
from pathlib import Path

from report import machine

WARM_UP = 2
"""Iterations of each process before those that count."""


def serve(algo: str, pairs: int) -> None:
    """Do an iteration for each line of the input, and print its CPU-seconds."""
    import iteration  # of the checkout whose process this is
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        iteration.make_model(Path(folder))
        config = iteration.make_config(algo, folder, pairs + WARM_UP)
        run = iteration.build_run(config, env=iteration.AnyGuess)
        batches = iter(run.trainer.collector)
        for _ in sys.stdin:
            phases = iteration.iterate(run, batches)[2]
            print(json.dumps(phases | {"iteration": sum(phases.values())}), flush=True)
        run.trainer.close()


def serve_rollouts() -> None:
    """Play with every contender for each line of the input, and print their CPU-seconds."""
    import rollout  # of the checkout whose process this is
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        work, clock = rollout.make_work("varied", Path(folder)), rollout.Clock()
        policies = work.make_policies(32)
        world = rollout.make_world("instant", work, policies, clock, slots=32, episodes=96)
        for _ in sys.stdin:
            seconds = {}
            for name, collector in world.collectors.items():
                for policy in policies:
                    policy.drop_cache()
                seconds[name] = rollout.measure(partial(rollout.play, collector), clock).cpu_s
            print(json.dumps(seconds), flush=True)
        for collector in world.collectors.values():
            collector.shutdown()
        policies[0].close()


class Side:
    """A process that works with a checkout when it is asked to."""

    def __init__(self, checkout: Path, options: list[str]) -> None:
        paths = os.pathsep.join([str(checkout / "benchmarks"), str(checkout)])
        self.process = subprocess.Popen(
            # -P: "iteration" is the checkout's, not the one beside this script
            [sys.executable, "-P", "-u", __file__, "--serve", *options],
            env=os.environ | {"PYTHONPATH": paths},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def iterate(self) -> dict[str, float]:
        """The CPU-seconds of an iteration, by name."""
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        # The package may print other lines.
        while not (line := self.process.stdout.readline()).startswith("{"):
            if not line:
                raise RuntimeError(f"{self.process.args} ended with {self.process.wait()}: run it by hand to see why.")
        return dict(json.loads(line))


def interval(ratios: list[float]) -> list[float]:
    """The two order statistics around the median with a coverage of at least 0.95, if there are
    enough."""
    ordered, number = sorted(ratios), len(ratios)
    beyond, skipped = 0.0, 0
    while 2 * (beyond := beyond + comb(number, skipped) / 2**number) <= 0.05:
        skipped += 1
    left = max(0, skipped - 1)
    return [round(ordered[left], 3), round(ordered[-1 - left], 3)]


def compared(before: list[float], after: list[float]) -> dict[str, float | list[float]]:
    """Medians, and the ratio of pairs with its interval."""
    ratios = [b / a for b, a in zip(before, after, strict=True)]
    medians = {"before_s": statistics.median(before), "after_s": statistics.median(after)}
    found = medians | {"ratio": statistics.median(ratios)}
    return {name: round(value, 4) for name, value in found.items()} | {"interval": interval(ratios)}


def main() -> None:
    """Measure both checkouts, or one when the other process asks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="a checkout of the commit to compare with")
    parser.add_argument("--algo", choices=["LLMPPO", "LLMREINFORCE", "GRPO"], default="LLMPPO")
    parser.add_argument("--vllm", action="store_true", help="rollouts, most of them with vLLM")
    parser.add_argument("--pairs", type=int, default=40, help="default 40")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        return serve_rollouts() if arguments.vllm else serve(arguments.algo, arguments.pairs)
    if arguments.before is None:
        parser.error("--before is missing")
    options = ["--algo", arguments.algo, "--pairs", str(arguments.pairs), *(["--vllm"] if arguments.vllm else [])]
    here = Path(__file__).resolve().parents[1]
    sides = {"before": Side(arguments.before.resolve(), options), "after": Side(here, options)}
    for side in sides.values():
        for _ in range(WARM_UP):
            side.iterate()
    found = {name: [] for name in sides}
    for pair in range(arguments.pairs):
        for name in sorted(sides, reverse=bool(pair % 2)):
            found[name].append(sides[name].iterate())
    for side in sides.values():
        side.process.communicate(timeout=60)
    work = "rollouts" if arguments.vllm else arguments.algo
    result = {"machine": machine(), "work": work, "pairs": arguments.pairs}
    for phase in found["before"][0]:
        result[phase] = compared(*([each[phase] for each in found[name]] for name in sides))
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
