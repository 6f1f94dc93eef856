"""What more workers would gain: the collector, simulated (:mod:`torchrl_llm.testing.simulation`).

    python benchmarks/simulation.py
    python benchmarks/simulation.py --workers 1 8 64 --slots 128 --step 0.03 --turns 1 8 \\
        --tokens 100 600 --update 60 --staleness 1

Prints one line a number of workers: conversations and tokens per second, the share of the tokens
that the engines could have said if no slot had ever been free, how busy the collecting process was,
and the share of the conversations with tokens of older weights.
"""

import argparse
from dataclasses import asdict

from torchrl_llm.testing.simulation import Costs, simulate, uniform_lengths


def main() -> None:
    """Simulate and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 4, 16, 64, 256, 1024])
    parser.add_argument("--slots", type=int, default=8, help="of a worker")
    parser.add_argument("--per-slot", type=int, default=16, help="conversations of a batch for each slot")
    parser.add_argument("--turns", type=int, nargs=2, default=(1, 4))
    parser.add_argument("--tokens", type=int, nargs=2, default=(8, 16), help="of a response")
    parser.add_argument("--staleness", type=int, default=0)
    parser.add_argument("--update", type=float, default=0.0, help="seconds of an update after each batch")
    parser.add_argument("--batches", type=int, default=2)
    for name, value in asdict(Costs()).items():
        parser.add_argument(f"--{name}", type=float, default=value, help=f"default {value}")
    given = parser.parse_args()
    costs = Costs(**{name: getattr(given, name) for name in asdict(Costs())})
    lengths = uniform_lengths(tuple(given.turns), tuple(given.tokens))
    print(
        "| workers | conversations per s | tokens per s | of the engines | collecting process busy | of older weights |"
    )
    print("|---|---|---|---|---|---|")
    for workers in given.workers:
        run = simulate(
            costs, lengths, workers=workers, slots=given.slots, batch_size=given.per_slot * given.slots * workers,
            batches=given.batches, max_staleness=given.staleness, update=given.update,
        )  # fmt: skip
        print(
            f"| {workers} | {run.episodes / run.seconds:,.1f} | {run.tokens_per_s:,.0f} | {run.of_engines:.2f} | {run.busy:.2f} | "
            f"{run.stale:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
