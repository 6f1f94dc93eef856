"""Search settings from Python: a population of small runs on GuessTheNumber, and what became of
each.

    pip install "torchrl-llm[tune]"
    python examples/tune.py --output-dir runs/tuning
    python examples/tune.py --output-dir runs/tuning --resume --trust

The settings of the search are in ``examples/configs/tuning_tiny.yaml``. ``torchrl-llm tune``
does the same, and takes each of them as a flag.
"""

import argparse
import json
from pathlib import Path

from torchrl_llm.tuning import TuningConfig, report_best, summary, tune

CONFIG = Path(__file__).parent / "configs" / "tuning_tiny.yaml"


def main(tuning: TuningConfig, *, resume: bool = False, trust: bool = False) -> dict:
    """Search, print the table, report the best trial; returns what ``tuning.json`` holds."""
    found = report_best(tuning, summary(tuning, tune(tuning, resume=resume, trust=trust)), print)
    lines = (tuning.output_dir / found["best"]["folder"] / "generations.jsonl").read_text().splitlines()
    print("\nthe best trial's weights were trained by")
    for line in map(json.loads, lines):
        print(
            f"  generation {line['generation']}, in trial {line['trial']}: {line['settings']}, win rate {line['success']:.3f}"
        )
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--resume", action="store_true", help="continue the search in this folder")
    parser.add_argument("--trust", action="store_true", help="the folder is your own: Ray Tune keeps pickles there")
    arguments = parser.parse_args()
    tuning = TuningConfig.from_yaml(CONFIG, output_dir=arguments.output_dir)
    main(tuning, resume=arguments.resume, trust=arguments.trust)
