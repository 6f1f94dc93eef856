"""A population against random search, from learning rates that are mostly wrong: the small model on
GuessTheNumber.

    python benchmarks/tune.py --output runs/tune --seeds 1 2 3

For each seed both searches draw the same four trials and play the same number of episodes; only the
population copies. The score is the best trial's win rate on tasks that no search has seen. A search
that has ended is not repeated. The results are OUTPUT/result.json and a table. Needs the extra
"tune"; about 20 minutes on two cores for three seeds.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import median
from typing import Any

from torchrl_llm.runs import RunSettings
from torchrl_llm.runs.settings_file import write_settings
from torchrl_llm.tuning import TuningConfig, report_best, summary, tune
from torchrl_llm.utils.files import write_text
from torchrl_llm.utils.sections import in_sections

ROOT = Path(__file__).resolve().parents[1]
# As examples/configs/tiny_reinforce_llm.yaml, but without what depends on how long a run is, and
# without the bound of the KL, which makes a learning rate that is far too high harmless.
CHANGES = {
    "batch_size": 32,
    "num_envs": 32,
    "schedule": "constant",
    "warmup_fraction": 0.0,
    "min_lr_fraction": 0.0,
    "kl_decay_fraction": None,
    "target_kl": None,
    "evaluation_interval": 1000,
    "evaluation_episodes": 128,
    "final_episodes": 512,
    "record_interval": 0,
}
SEARCH: dict[str, Any] = {
    "space": {"lr_actor": {"loguniform": [1e-6, 1e-1]}},
    "trials": 4,
    "generations": 4,
    "episodes": 256,
}


def search(output: Path, scheduler: str, seed: int) -> dict[str, Any]:
    """One search, or what it has found before."""
    folder = output / f"{scheduler}-{seed}"
    done = folder / "done.json"
    if done.exists():
        return json.loads(done.read_text())
    folder.mkdir(parents=True, exist_ok=True)
    given = RunSettings.from_yaml(ROOT / "examples" / "configs" / "tiny_reinforce_llm.yaml")
    values = given.replace(**CHANGES, seed=seed).as_json()
    # Without the settings that a search decides, and those about the start of a run.
    owned = (
        "output_dir",
        "max_iterations",
        "max_seconds",
        "stop_at_success",
        "resume",
        "resume_from",
        "accept_changes",
        "overwrite",
    )
    kept = {name: value for name, value in values.items() if name not in owned}
    write_settings(in_sections(RunSettings, kept), folder / "base.yaml")
    tuning = TuningConfig(
        base=folder / "base.yaml", output_dir=folder / "search", scheduler=scheduler, seed=seed, **SEARCH
    )
    start = time.perf_counter()
    found = report_best(tuning, summary(tuning, tune(tuning, resume=True, trust=True)), print)
    trials, best = found["trials"], found["best"]
    result = {
        "scheduler": scheduler,
        "seed": seed,
        "win_rate": best["success_after"],
        "ci95": best["success_ci95"],
        "selected_by": best["success"],
        "settings": best["settings"],
        "trials": [(each["success"], each["settings"]) for each in trials],
        "turns": sum(each["turns"] or 0 for each in trials),
        "failed": sum(each["error"] is not None for each in trials),
        "wall_s": round(time.perf_counter() - start, 1),
    }
    write_text(done, json.dumps(result, indent=2) + "\n")
    return result


def main() -> None:
    """Search with each seed by each scheduler, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/tune"))
    parser.add_argument("--seeds", type=int, nargs="+", required=True)
    arguments = parser.parse_args()
    results = [
        search(arguments.output.absolute(), name, seed) for seed in arguments.seeds for name in ("pbt", "random")
    ]
    medians = {
        name: median(each["win_rate"] for each in results if each["scheduler"] == name) for name in ("pbt", "random")
    }
    write_text(arguments.output / "result.json", json.dumps({"medians": medians, "searches": results}, indent=2) + "\n")
    print("\nscheduler  seed        win rate  95 % interval   lr_actor  turns")
    for each in results:
        low, high = each["ci95"]
        print(
            f"{each['scheduler']:<9}  {each['seed']:<10}  {each['win_rate']:8.3f}  [{low:.3f}, {high:.3f}]  "
            f"{each['settings']['lr_actor']:8.2e}  {each['turns']:5d}"
        )
    print(f"median: {medians}")


if __name__ == "__main__":
    main()
