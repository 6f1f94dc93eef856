"""What needs a GPU, on one: checks, speed, and what to look at first, with the packages that are
there.

    python -m benchmarks.gpu test --output runs/gpu/test.json
    python -m benchmarks.gpu bench --output runs/gpu/bench.json --only "update: Qwen2.5-0.5B"
    python -m benchmarks.gpu first-look --output runs/gpu/first-look
    # all code, on a CPU, with small shapes
    python -m benchmarks.gpu test --device cpu --tiny --output runs/gpu/test.json

Installs and downloads nothing: models have the shapes of SmolLM2-135M and Qwen2.5 and random
weights, and the tokenizer knows bytes. Needs torch >= 2.11, transformers, peft, accelerate,
tensordict and torchrl; what needs vLLM, GEM or pytest is skipped with a reason where it is missing.
Writes JSON after each part, so that a call which is ended leaves what it found; the exit status is
1 if a part failed.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from benchmarks.gpu import first_look, report


def main(arguments: list[str] | None = None) -> int:
    """Run what is asked for; returns the number of failures."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["test", "bench", "first-look"])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument(
        "--tiny", action="store_true", help="small shapes, to see that it runs; test runs bench's parts too"
    )
    parser.add_argument("--only", default="", help="what has this in its name; of first-look the call of this name")
    parser.add_argument(
        "--limit", type=float, help="seconds after which nothing more is begun; default 420, tiny: 3,600"
    )
    parser.add_argument("--output", type=Path, required=True, help="where the JSON goes; of first-look a folder")
    given = parser.parse_args(arguments)
    if given.what == "first-look":
        return first_look.run(given.output, device=given.device, tiny=given.tiny, only=given.only)
    missing = first_look.missing_packages()
    if missing:
        parser.error(first_look.how_to_install(missing))
    return measure(given, parser)


def measure(given: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Checks or speed; returns the number of failures."""
    # The first look says what is missing, and has to start without it.
    import torch

    from benchmarks.gpu import attention, checks, speed
    from benchmarks.gpu.place import Place

    if given.device != "cpu" and not torch.cuda.is_available():
        parser.error("no CUDA device is found; --device cpu --tiny runs the same on a CPU, with small shapes")
    with tempfile.TemporaryDirectory() as folder:
        place = Place(device=given.device, tiny=given.tiny, folder=Path(folder))
        parts = {}
        if given.what == "test":
            parts |= attention.checks(place) | checks.checks(place)
        if given.what == "bench" or given.tiny:
            parts |= attention.measurements(place) | speed.measurements(place)
        chosen = {name: part for name, part in parts.items() if given.only in name}
        if not chosen:
            parser.error(f"--only {given.only!r} is in none of these names: {', '.join(parts)}")
        head = {"what": given.what, "tiny": given.tiny, "machine": report.machine(given.device)}
        return report.run_parts(chosen, head, given.output, given.limit or (3_600 if given.tiny else 420))


if __name__ == "__main__":
    sys.exit(min(main(), 1))
