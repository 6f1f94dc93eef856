"""A trial as a run's folder: trained for a generation, copied, and put back. Nothing here needs
Ray.

The folder is like any run's, with one more file: ``generations.jsonl`` has a line for each
generation, and is copied with the run. So it says, of a run that began as another trial's copy,
which settings trained its weights when.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchrl_llm.runs import CheckpointStore, build_run, verify
from torchrl_llm.runs.folder_lock import LOCK
from torchrl_llm.tuning.search_space import TuningConfig
from torchrl_llm.utils.files import write_text
from torchrl_llm.utils.options import ConfigError

GENERATIONS = "generations.jsonl"
"""The file of a trial's folder with a line for each generation."""

_SCORES = ("success", "success_low", "success_high", "reward")


def train_generation(
    tuning: TuningConfig, folder: Path, sampled: Mapping[str, Any], generation: int
) -> dict[str, float]:
    """Train the run in ``folder`` for ``tuning.episodes`` more episodes, evaluate and save it.

    Args:
        tuning: base settings and budget.
        folder: the run's, at the end of the generation before.
        sampled: setting -> value, in force from here on.
        generation: counts from 1; the first one starts a new run in place of whatever trial was
            there.

    Returns:
        The evaluation: ``success``, its 95 % interval ``success_low`` and ``success_high``, and
        ``reward``; and the run's counters ``iterations``, ``episodes`` and ``turns``.

    Raises:
        ConfigError: the settings do not go together, or the run ends before the generation does.
    """
    before = 0 if generation == 1 else verify(_newest(folder))["metadata"]["iteration"]
    iterations = before + tuning.iterations(sampled)
    run = build_run(tuning.run_config(folder, sampled, iterations, starts=generation == 1))
    try:
        history = run.trainer.train()
        if run.trainer.iteration < iterations:
            raise ConfigError(
                f"The run in {folder} has ended ({run.trainer.stop_reason}) before generation {generation} has: raise max_steps "
                "in base, or tune with fewer generations or episodes."
            )
        result = {name: history[-1][f"evaluation/{name}"] for name in _SCORES}
        result |= {"iterations": run.trainer.iteration, "episodes": run.trainer.episodes, "turns": run.trainer.steps}
    finally:
        run.close()
    _note(folder, {"generation": generation, "trial": folder.name, "settings": dict(sampled), **result})
    return result


def _note(folder: Path, line: Mapping[str, Any]) -> None:
    """Write the line of a generation, in place of the line of the same generation before the trial
    was killed."""
    file = folder / GENERATIONS
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    kept = [each for each in lines if json.loads(each)["generation"] < line["generation"]]
    write_text(file, "\n".join([*kept, json.dumps(line)]) + "\n")


def _newest(folder: Path) -> Path:
    newest = CheckpointStore(folder / "checkpoints", models=None).latest()
    if newest is None:
        raise ConfigError(f"{folder} holds no run with a checkpoint, and a trial continues from one.")
    return newest


def copy_run(folder: Path, place: Path) -> None:
    """Copy a run with its newest checkpoint, without the older ones, to ``place``, which must not
    exist."""
    newest = _newest(folder)

    def ignored(where: str, names: list[str]) -> list[str]:
        if Path(where) == newest.parent:
            return [name for name in names if name != newest.name]
        return [name for name in names if Path(where) == folder and (name == LOCK or name.startswith("previous-"))]

    shutil.copytree(folder, place, ignore=ignored)


def put_back(copy: Path, folder: Path) -> None:
    """Let a copy of a run take the place of the run in ``folder``: a trial's own, or, where it
    exploits another, that one's."""
    # Beside its place first: after a crash the folder has one run or none, and the copy is still
    # there.
    stage = folder.with_name(f".{folder.name}.stage")
    if stage.exists():
        shutil.rmtree(stage)
    shutil.copytree(copy, stage)
    if folder.exists():
        shutil.rmtree(folder)
    stage.rename(folder)
