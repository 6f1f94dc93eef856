"""What the tests of searches share: a small base, and
``python small_searches.py FOLDER [FIELD=VALUE ...]``, which runs a search."""

from __future__ import annotations

import sys
from pathlib import Path

import yaml

from torchrl_llm.runs import RunSettings
from torchrl_llm.runs.settings_file import as_yaml
from torchrl_llm.tuning import TuningConfig
from torchrl_llm.utils.sections import in_sections

BASE = {
    "algo": "LLMREINFORCE",
    "model_path": "tiny",
    "dtype": "float32",
    "device": "cpu",
    "lora_r": 0,
    "env_name": "game:GuessTheNumber-v0-easy",
    "batch_size": 8,
    "num_envs": 8,
    "max_model_len": 256,
    "max_output_tokens": 16,
    "kl_coeff": 0.0,
    "lr_actor": 1e-3,
    "evaluation_interval": 100,
    "evaluation_episodes": 8,
    "final_episodes": 8,
    "record_interval": 0,
}
SPACE = {"lr_actor": {"loguniform": [1e-5, 1e-2]}, "epochs": {"choice": [1, 2]}}


def small_search(folder: Path, *, base=(), **changes) -> TuningConfig:
    """A search of two trials and two generations, of two iterations each."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "base.yaml").write_text(as_yaml(in_sections(RunSettings, {**BASE, **dict(base)})))
    given = {"space": SPACE, "trials": 2, "generations": 2, "episodes": 16, "output_dir": folder / "search"}
    return TuningConfig(base=folder / "base.yaml", **{**given, **changes})


if __name__ == "__main__":
    from torchrl_llm.tuning import report_best, summary, tune

    tuning = small_search(
        Path(sys.argv[1]), **{name: yaml.safe_load(v) for name, v in (a.split("=") for a in sys.argv[2:])}
    )
    report_best(tuning, summary(tuning, tune(tuning, resume=True, trust=True)), print)
