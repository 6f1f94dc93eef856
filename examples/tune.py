"""Search settings from Python: a population of small runs on GuessTheNumber, and what became of each.

    pip install "torchrl-llm[tune]"
    python examples/tune.py --output-dir runs/tuning
    python examples/tune.py --output-dir runs/tuning --resume

It is ``torchrl-llm tune`` written out. The settings of the search are those of ``examples/configs/tiny_tuning.yaml``, and flags
change them: ``--scheduler asha``, ``--trials 8``.
"""

import json
import sys
from pathlib import Path

from torchrl_llm.cli import main as command
from torchrl_llm.tuning import TuningConfig, report_best, summary, tune

CONFIG = Path(__file__).parent / "configs" / "tiny_tuning.yaml"


def main(tuning: TuningConfig, *, resume: bool = False) -> dict:
    """Search, print the table, report the best trial; returns what ``tuning.json`` holds."""
    found = report_best(tuning, summary(tuning, tune(tuning, resume=resume)), print)
    lines = (tuning.output_dir / found["best"]["folder"] / "generations.jsonl").read_text().splitlines()
    print("\nthe best trial's weights were trained by")
    for line in map(json.loads, lines):
        print(f"  generation {line['generation']}, in trial {line['trial']}: {line['settings']}, win rate {line['success']:.3f}")
    return found


if __name__ == "__main__":
    raise SystemExit(command(["tune", "--config", str(CONFIG), *sys.argv[1:]]))
