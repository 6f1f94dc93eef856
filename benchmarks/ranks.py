"""What more training processes gain: each collects for itself, with a worker of its own on Ray.

    OMP_NUM_THREADS=1 python benchmarks/ranks.py --output runs/ranks.json

Real processes of ``torch.distributed`` (gloo), with the collector, the worker and the engine of
``scaling.py``. In an iteration each collects its share of the batch, 16 conversations a slot,
sleeps for an update, sums 1 MB of gradients with the others, and sends new weights. So they meet
once an iteration, as the trainer's do: ``on_policy``, and ``stale``, with
``max_staleness=1``.

Of each number of processes: tokens and conversations per second of all together, ``of_linear``
(over the rate of one process times their number), ``waiting`` (share of the time in which a process
waits for others), the milliseconds of CPU that a conversation takes in the process that collects it
and in its worker, and ``cpu``, their share of the machine's CPUs. Medians over the rounds.

Prints one JSON object.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from torchrl_llm.collectors import RayTurnCollector

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from report import machine  # noqa: E402
from scaling import Clock, Setting, make_collector, verdict  # noqa: E402

TIMEOUT = timedelta(seconds=300)
TARGET = 0.95  # of linear, with the most processes
STALENESS = {"on_policy": 0, "stale": 1}


@dataclass(frozen=True)
class Ranks:
    """What is the same for everyone: numbers of processes, iterations, conversations a slot,
    float32 gradients, rounds."""

    numbers: tuple[int, ...] = (1, 2, 4)
    iterations: int = 4
    per_slot: int = 16
    update_s: float = 0.2
    gradients: int = 2**18
    rounds: int = 3


def cpu_s(pid: int) -> float:
    """Seconds of CPU that a process has taken."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def iterate(collector: RayTurnCollector, setting: Ranks, iterations: int) -> dict[str, float]:
    """Train for so many iterations."""
    workers = [worker.info.pid for worker in collector._executor.workers]
    gradients, waiting, before, clock = torch.zeros(setting.gradients), 0.0, sum(map(cpu_s, workers)), Clock()
    for _ in range(iterations):
        clock.hear(collector.rollout())
        time.sleep(setting.update_s)
        start = time.perf_counter()
        dist.all_reduce(gradients)
        waiting += time.perf_counter() - start
        collector.update_policy_weights_()
    return asdict(clock.stop()) | {"waiting_s": waiting, "worker_cpu_s": sum(map(cpu_s, workers)) - before}


def train(rank: int, ranks: int, staleness: int, setting: Ranks, address: str, folder: str) -> None:
    """One training process; writes what it measured to ``folder``."""
    torch.set_num_threads(1)
    ray.init(address=address, log_to_driver=False)
    dist.init_process_group("gloo", f"file://{folder}/meet", TIMEOUT, ranks, rank)
    collector = make_collector(Setting(), 1, per_slot=setting.per_slot, max_staleness=staleness, rank=rank, ranks=ranks)
    try:
        iterate(collector, setting, 2)  # from then on as much is in flight as after each iteration
        Path(folder, f"{rank}.json").write_text(json.dumps(iterate(collector, setting, setting.iterations)))
        # A process that is gone before the others have finished the last exchange breaks it.
        dist.barrier()
    finally:
        collector.shutdown()
        dist.destroy_process_group()
        ray.shutdown()


def play(ranks: int, staleness: int, setting: Ranks, address: str) -> dict[str, float]:
    """One round of so many processes."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(train, (ranks, staleness, setting, address, folder), nprocs=ranks)
        runs = [json.loads(path.read_text()) for path in Path(folder).glob("*.json")]
    total = {name: sum(run[name] for run in runs) for name in runs[0]}
    wall_s, cpu = max(run["wall_s"] for run in runs), total["cpu_s"] + total["worker_cpu_s"]
    return {
        "tokens_per_s": total["tokens"] / wall_s,
        "episodes_per_s": total["episodes"] / wall_s,
        "waiting": total["waiting_s"] / total["wall_s"],
        "rank_cpu_ms": 1000 * total["cpu_s"] / total["episodes"],
        "worker_cpu_ms": 1000 * total["worker_cpu_s"] / total["episodes"],
        "cpu": cpu / wall_s / (os.cpu_count() or 1),
    }


def run(setting: Ranks, address: str) -> dict[str, Any]:
    """All rounds."""
    rounds: dict[tuple[str, int], list[dict[str, float]]] = {(w, n): [] for w in STALENESS for n in setting.numbers}
    for _ in range(setting.rounds):
        for (world, ranks), results in rounds.items():
            result = play(ranks, STALENESS[world], setting, address)
            one = rounds[world, 1][-1] if ranks > 1 else result
            results.append(result | {"of_linear": result["tokens_per_s"] / one["tokens_per_s"] / ranks})
            print(f"{world}, {ranks} processes: {results[-1]}", file=sys.stderr)
    worlds: dict[str, dict[str, Any]] = {world: {} for world in STALENESS}
    for (world, ranks), results in rounds.items():
        worlds[world][str(ranks)] = {
            name: round(statistics.median(each[name] for each in results), 3) for name in results[0]
        }
    most = str(max(setting.numbers))
    targets = {world: verdict(worlds[world][most]["of_linear"], TARGET) for world in STALENESS}
    return {"machine": f"{machine()}, Ray {ray.__version__}", **asdict(setting), "worlds": worlds, "targets": targets}


def main() -> None:
    """Measure and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=Ranks.rounds)
    parser.add_argument("--output", type=Path, help="write the JSON here too")
    arguments = parser.parse_args()
    os.environ.setdefault("RAY_worker_niceness", "0")  # as in scaling.py
    context = ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        results = run(Ranks(rounds=arguments.rounds), context.address_info["gcs_address"])
    finally:
        ray.shutdown()
    print(json.dumps(results, indent=2))
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
