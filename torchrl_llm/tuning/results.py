"""What a search has found: a table, ``tuning.json``, and the best trial with the report of any
run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torchrl_llm.report import run_and_report
from torchrl_llm.runs import RunSettings, build_run
from torchrl_llm.runs.outputs import write_json
from torchrl_llm.runs.settings_file import read_settings
from torchrl_llm.tuning.search_space import TuningConfig
from torchrl_llm.utils.options import ConfigError, options_of

FILE, TRIALS = "tuning.json", "trials"
"""The file of results in a search's ``output_dir``, and the folder with its runs there."""

_SCORES = ("success", "success_low", "success_high", "reward", "iterations", "episodes", "turns")


class TuningError(RuntimeError):
    """A search without a result."""


def summary(tuning: TuningConfig, grid: Any) -> list[dict[str, Any]]:
    """The trials of a search, the best by ``tuning.metric`` first, those that failed last.

    Args:
        tuning: what was searched.
        grid: Ray Tune's ``ResultGrid``.

    Returns:
        Of each trial its name, folder, present settings, number of generations, last evaluation,
        and error or ``None``.
    """
    trials = []
    for result in grid:
        metrics, name = result.metrics or {}, Path(result.path).name
        settings = {each: metrics.get("config", {}).get(each) for each in tuning.dimensions}
        scores = {each: metrics.get(each) for each in _SCORES}
        error = None if result.error is None else str(result.error).strip().splitlines()[-1]
        done = {"generations": metrics.get("training_iteration", 0), "finished": bool(metrics.get("done"))}
        told = {"trial": name, "folder": f"{TRIALS}/{name}", "settings": settings}
        trials.append({**told, **done, **scores, "error": error})
    return sorted(trials, key=lambda trial: (trial["error"] is not None, -(trial[tuning.metric] or 0), trial["trial"]))


def table(trials: Sequence[dict[str, Any]]) -> str:
    """A plain-text table of :func:`summary`, a trial a line.

    Examples:
        >>> print(table([{"trial": "00001", "generations": 4, "success": 0.5, "success_low": 0.4, "success_high": 0.6,
        ...               "reward": 0.75, "turns": 812, "settings": {"lr_actor": 0.0012345}, "error": None}]))
        trial  generations  win rate  95 % interval   return  turns  settings
        00001            4     0.500  [0.400, 0.600]   0.750    812  lr_actor=0.001234
    """
    lines = ["trial  generations  win rate  95 % interval   return  turns  settings"]
    for each in trials:
        start = f"{each['trial']:<5}  {each['generations']:11d}  "
        settings = " ".join(f"{name}={_short(value)}" for name, value in each["settings"].items())
        if each["success"] is None or each["error"] is not None:
            lines.append(f"{start}failed: {each['error']}  {settings}")
            continue
        interval = f"[{each['success_low']:.3f}, {each['success_high']:.3f}]"
        rest = f"{interval}  {each['reward']:6.3f}  {each['turns']:5d}  {settings}"
        lines.append(f"{start}{each['success']:8.3f}  {rest}")
    return "\n".join(lines)


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def report_best(tuning: TuningConfig, trials: Sequence[dict[str, Any]], say: Callable[[str], None]) -> dict[str, Any]:
    """Print the table, evaluate the best trial on tasks that nothing else uses, and write its
    report and ``tuning.json``.

    The trials were compared by the same evaluation, so the best one's score there is too high on
    average: it is the best of several. The evaluation of its report is on other tasks.

    Args:
        tuning: what was searched.
        trials: :func:`summary`.
        say: gets the lines for the terminal.

    Returns:
        The content of ``tuning.json``.

    Raises:
        TuningError: every trial failed.
    """
    say(f"\n{table(trials)}\n")
    best = trials[0]
    if best["error"] is not None:
        raise TuningError(
            f"All {len(trials)} trials failed, the first with: {best['error']} ({tuning.output_dir}/ray has the errors)."
        )
    folder = tuning.output_dir / best["folder"]
    given = dict(read_settings(folder / "config.yaml", RunSettings))
    # Another folder, if the search was moved.
    config = RunSettings.from_values(**{**given, "output_dir": folder, "resume": True})
    result = run_and_report(config, partial(build_run, config), say=say)
    final = {name: result[name] for name in ("success_after", "success_ci95", "reward_after")}
    found = {**identity(tuning), "trials": list(trials), "best": {**best, **final}}
    write_json(found, tuning.output_dir / FILE)
    say(f"best trial: {folder}")
    return found


def identity(tuning: TuningConfig) -> dict[str, Any]:
    """The settings of a search, as ``tuning.json`` has them from its start on."""
    kept = {name: value for name, value in vars(tuning).items() if name in options_of(TuningConfig)}
    plain = {name: str(value) if isinstance(value, Path) else value for name, value in kept.items()}
    return {"settings": plain, "base_settings": tuning.settings}


def check_same(tuning: TuningConfig, found: dict[str, Any]) -> None:
    """Refuse to resume a search with other settings than those in its ``tuning.json``.

    Raises:
        ConfigError: the message lists them.
    """
    present = identity(tuning)
    places = ("output_dir", "base", "max_failures")
    changes = [
        f"{name} was {found[part].get(name)!r}, is {present[part].get(name)!r}"
        for part in ("settings", "base_settings")
        for name in {**found[part], **present[part]}
        if found[part].get(name) != present[part].get(name) and name not in places
    ]
    if changes:
        raise ConfigError(
            f"The settings differ from those of the search in {tuning.output_dir}: {'; '.join(changes)}. Use the old ones, or "
            "choose another output_dir."
        )
