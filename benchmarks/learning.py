"""Does it learn? The shipped small model on GuessTheNumber-easy, before and after training, final weights.

    python benchmarks/learning.py --algo LLMPPO --seed 0

The settings are those of ``examples/configs/tiny_*.yaml``. The win rate is that of 512 sampled episodes at temperature
1 on tasks that are played once before and once after training, and used for nothing else: no evaluation stops the run
or selects weights. Writes ``result.json``, the learning curve and the conversations to ``--output-dir``.
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples"))

import multiturn  # noqa: E402

from torchrl_llm.trainers import parse_run_config  # noqa: E402

CONFIGS = {"LLMPPO": "tiny_ppo_llm", "LLMREINFORCE": "tiny_reinforce_llm", "GRPO": "tiny_grpo_multiturn"}


def main() -> None:
    """Train, and write ``result.json``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algo", choices=list(CONFIGS), required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output-dir", type=Path, help="default: runs/learning/ALGO-SEED")
    arguments, overrides = parser.parse_known_args()
    output = arguments.output_dir or Path("runs/learning") / f"{arguments.algo}-{arguments.seed}"
    config = parse_run_config(
        [
            f"--config={ROOT}/examples/configs/{CONFIGS[arguments.algo]}.yaml",
            f"--seed={arguments.seed}",
            f"--output-dir={output}",
            "--evaluation-interval=0",
            "--final-episodes=512",
            *overrides,
        ]
    )
    multiturn.main(config)


if __name__ == "__main__":
    main()
