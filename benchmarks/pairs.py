"""CPU-seconds of this checkout's package against another one's, in turns: what ``sampling.py`` and
``updates.py`` do."""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from report import machine


def compared(before: list[float], after: list[float]) -> dict[str, float | list[float]]:
    """Medians, and the ratio of pairs with its interval."""
    ratios = sorted(b / a for b, a in zip(before, after, strict=True))
    inner = ratios[1:-1] if len(ratios) > 2 else ratios
    return {
        "before_s": round(statistics.median(before), 5),
        "after_s": round(statistics.median(after), 5),
        "ratio": round(statistics.median(ratios), 3),
        "interval": [round(inner[0], 3), round(inner[-1], 3)],
    }


def in_process(script: str, checkout: Path, cases: list[str]) -> dict[str, float]:
    """What ``script --measure`` prints with a checkout's package."""
    command = [sys.executable, script, "--measure", "--cases", *cases]
    env = os.environ | {"PYTHONPATH": str(checkout)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main(script: str, doc: str | None, cases: Iterable[str], measure: Callable[[str], float]) -> None:
    """The command line of a script: print the seconds of each case, or of two checkouts."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="a checkout of the commit to compare with")
    parser.add_argument("--pairs", type=int, default=9, help="default 9")
    parser.add_argument("--cases", nargs="+", choices=[*cases], default=[*cases], help="default all")
    parser.add_argument("--measure", action="store_true", help="print the seconds of this package alone")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.measure or args.before is None:
        print(json.dumps({name: measure(name) for name in args.cases}))
        return
    sides = {"before": args.before.resolve(), "after": Path(script).resolve().parents[1]}
    found: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    for pair in range(args.pairs):
        for side in sorted(sides, reverse=bool(pair % 2)):
            found[side].append(in_process(script, sides[side], args.cases))
            print(side, found[side][-1], file=sys.stderr, flush=True)
    rounds = {name: [[each[name] for each in found[side]] for side in ("before", "after")] for name in args.cases}
    result = {name: compared(*seconds) for name, seconds in rounds.items()}
    print(json.dumps({"machine": machine(), "pairs": args.pairs} | result, indent=1))
