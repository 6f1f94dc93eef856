"""Several runs side by side: :func:`compare_runs` and :func:`plot_runs`.

They read the files of the runs' folders only, as the report of one run does.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from io import BytesIO
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

from torchrl_llm.metrics.paired import paired_statistics
from torchrl_llm.report.curves import as_metrics
from torchrl_llm.report.summary import seconds_of
from torchrl_llm.runs.outputs import percent
from torchrl_llm.runs.run_files import RunFiles
from torchrl_llm.utils.files import write_bytes
from torchrl_llm.utils.optional import import_extra
from torchrl_llm.utils.terminal import one_line

_OVER_SEEDS = ("over seeds", "runs", "training", "before", "after", "worst after", "trained on")
_NONE = "-"


def compare_runs(folders: Sequence[Path]) -> str:
    """A table of runs, one a line, one of the runs that differ in their seed alone, and the
    settings in which they differ.

    "training" is the win rate of the training batches, mean of the last tenth of the iterations;
    "before" and "after" come from the evaluations, the latter with its interval, the share of its
    episodes whose task was trained on ("-" where that is unknown) and the share of penalized turns;
    "seconds" is the wall clock of the iterations, and "turns" what was collected, turns
    that further rows repeat included; "gained, lost" compares the latter, episode by episode, with
    the evaluation of the first run above that was evaluated in the same games
    (:func:`~torchrl_llm.metrics.paired_comparison`, with McNemar's p).

    Args:
        folders: of the runs, at least one.

    Raises:
        FileNotFoundError: one of them is not a folder, or holds nothing of a run.
        ValueError: there is none.

    Examples:
        >>> print(compare_runs([Path("runs/ppo"), Path("runs/reinforce")]))  # doctest: +SKIP
        run        seed  turns  training  before  after   95 % interval  trained on  penalized  seconds                  gained, lost
        ppo           1  3,098     0.778   0.473  0.797  0.589 to 0.915        100%       0.1%    1,840                             -
        reinforce     1  2,816     0.771   0.473  0.766  0.543 to 0.900        100%       0.4%    1,452  14, 22 against ppo (p = 0.2)
        <BLANKLINE>
        algo: LLMPPO (ppo), LLMREINFORCE (reinforce)
        gamma: 0.99 (ppo), 0.9 (reinforce)
    """
    if not folders:
        raise ValueError("There are no runs to compare: give the output_dir of at least one.")
    runs = _named(folders)
    rows = [_cells(name, run, dict(islice(runs.items(), i))) for i, (name, run) in enumerate(runs.items())]
    lines = [tuple(rows[0]), *(tuple(row.values()) for row in rows)]
    problems = [f"{name}: {problem}" for name, run in runs.items() for problem in run.problems]
    parts = [_aligned(lines), _over_seeds(runs), "\n".join(_differences(runs)), "\n".join(problems)]
    return "\n\n".join(part for part in parts if part)


def _cells(name: str, run: RunFiles, earlier: Mapping[str, RunFiles]) -> dict[str, str]:
    result, last = run.result, run.history[-1] if run.history else {}
    interval = result.get("success_ci95")
    return {
        "run": name,
        "seed": _shown(run.info.get("seed", result.get("seed")), ""),
        "turns": _shown(last.get("rollout/steps"), ",.0f"),
        "training": _shown(_training(run), ".3f"),
        "before": _shown(_before(run), ".3f"),
        "after": _shown(result.get("success_after"), ".3f"),
        "95 % interval": f"{interval[0]:.3f} to {interval[1]:.3f}" if interval else _NONE,
        "trained on": percent(result.get("evaluation_task_overlap")),
        "penalized": _shown(result.get("penalized_after"), ".1%"),
        "seconds": _shown(sum(seconds_of(run.history).values()) if run.history else None, ",.0f"),
        "gained, lost": _paired(run, earlier),
    }


def _shown(value: Any, kind: str) -> str:
    return _NONE if value is None else f"{value:{kind}}"


def _paired(run: RunFiles, earlier: Mapping[str, RunFiles]) -> str:
    """The episodes that it gained and lost against the first run that was evaluated in the same
    games."""
    for name, other in earlier.items():
        with suppress(ValueError):  # other games
            found = paired_statistics(other.after, run.after)
            if found is not None:
                return f"{found.gained}, {found.lost} against {name} ({found.p})"
    return _NONE


def _settings(runs: Mapping[str, RunFiles]) -> dict[str, dict[str, str]]:
    """Run -> its settings but for the seed; without runs that do not say."""
    known = {name: run.info["settings"] for name, run in runs.items() if "settings" in run.info}
    return {
        name: {key: _number(str(value)) for key, value in each.items() if key != "seed"} for name, each in known.items()
    }


def _number(text: str) -> str:
    """A number as it is written today, where an earlier version wrote 1.0 for 1; other texts as
    they are."""
    with suppress(ValueError):
        return text.removesuffix(".0") if float(text).is_integer() else text
    return text


def _differing(runs: Mapping[str, RunFiles], known: Mapping[str, Mapping[str, str]]) -> list[str]:
    """The names of the settings that differ."""
    found = []
    for setting in sorted({each for settings in known.values() for each in settings}):
        values = {settings.get(setting) for settings in known.values()}
        given = any(setting in runs[name].info.get("changed", {}) for name in known)
        # That only one of two algorithms has an option says something where it was given.
        if len(values - {None}) > 1 or (given and len(values) > 1):
            found.append(setting)
    return found


def _differences(runs: Mapping[str, RunFiles]) -> list[str]:
    """A line for each setting that differs: its values, and the runs that have them. The seed is in
    the table."""
    known = _settings(runs)
    unknown = [name for name in runs if name not in known]
    lines = [f"settings that an earlier version did not write: {', '.join(unknown)}"] if unknown else []
    for setting in _differing(runs, known):
        owners: dict[str, list[str]] = {}
        for name, settings in known.items():
            owners.setdefault(settings.get(setting, _NONE), []).append(name)
        lines.append(f"{setting}: " + ", ".join(f"{value} ({', '.join(names)})" for value, names in owners.items()))
    return lines


def _over_seeds(runs: Mapping[str, RunFiles]) -> str:
    """A table of the runs that differ in nothing but their seed, where there are two or more: means
    of those that have ended, and the worst."""
    lines = [_OVER_SEEDS]
    for label, names in _groups(runs).items():
        seeds = _by_seed([runs[name] for name in names])
        ended = [run for run in seeds.values() if _has_ended(run)]
        if len(seeds) > 1:
            after = [run.result["success_after"] for run in ended]
            means = (_mean([_training(run) for run in ended]), _mean([_before(run) for run in ended]), _mean(after))
            count = str(len(seeds)) if len(ended) == len(seeds) else f"{len(ended)} of {len(seeds)}"
            shares = [run.result.get("evaluation_task_overlap", math.nan) for run in ended]
            share = percent(fmean(shares) if shares else None)
            lines.append((label, count, *means, _shown(min(after, default=None), ".3f"), share))
    return _aligned(lines) if len(lines) > 1 else ""


def _by_seed(runs: Sequence[RunFiles]) -> dict[Any, RunFiles]:
    """Seed -> its run; of several runs of a seed, which are the same run again, the first that has
    ended, or the first."""
    found: dict[Any, RunFiles] = {}
    for run in sorted(runs, key=_has_ended, reverse=True):  # stable in reverse too
        found.setdefault(run.info.get("seed"), run)
    return found


def _has_ended(run: RunFiles) -> bool:
    return run.result.get("success_after") is not None


def _groups(runs: Mapping[str, RunFiles]) -> dict[str, list[str]]:
    """What sets runs apart from others -> the runs that have it, which differ in their seed
    alone."""
    known = _settings(runs)
    differing = _differing(runs, known)
    groups: dict[str, list[str]] = {}
    for name, settings in known.items():
        label = ", ".join(f"{setting}={settings[setting]}" for setting in differing if setting in settings)
        groups.setdefault(label or "all", []).append(name)
    return groups


def _mean(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{fmean(known):.3f}" if known else _NONE


def _training(run: RunFiles) -> float | None:
    """The win rate of the training batches, mean of the last tenth of the iterations."""
    tail = run.history[-max(1, len(run.history) // 10) :]
    won = [metrics["rollout/success"] for metrics in tail if "rollout/success" in metrics]
    return fmean(won) if won else None


def _before(run: RunFiles) -> float | None:
    """The win rate before training; ``None`` also where it is of other games than that after it."""
    if run.result.get("same_games") is False:
        return None
    return run.before.get("success", run.result.get("success_before"))


def _aligned(lines: Sequence[tuple[str, ...]]) -> str:
    """Names to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) for line in lines)


def _named(folders: Sequence[Path]) -> dict[str, RunFiles]:
    """The runs, each once, by their folder without what all folders have in common."""
    paths = list(dict.fromkeys(folder.resolve() for folder in folders))
    common = Path(os.path.commonpath([path.parent for path in paths]))
    return {one_line(str(path.relative_to(common))): RunFiles.of(path) for path in paths}


def plot_runs(folders: Sequence[Path], path: Path) -> None:
    """Draw the win rates of runs over the turns collected: training batches as faint lines,
    evaluations as points.

    Runs that differ in their seed alone share a color.

    Args:
        folders: of the runs.
        path: the file; its ending is the format, such as ``.png``, ``.svg`` or ``.pdf``.

    Raises:
        FileNotFoundError: one of the folders holds nothing of a run, or the folder of the plot is
            missing.
        ImportError: matplotlib is missing.
        ValueError: no run has anything to draw, or the format is not known.
    """
    figures = import_extra("matplotlib.figure", extra="report", what="The plot of several runs")
    if not path.absolute().parent.is_dir():
        raise FileNotFoundError(f"The plot is '{path}': there is no folder '{path.parent}'.")
    runs = _named(folders)
    figure = figures.Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    formats = axes.figure.canvas.get_supported_filetypes()
    kind = path.suffix.removeprefix(".")
    if kind not in formats:
        raise ValueError(f"The plot is '{path}'; expected a file that ends in one of {', '.join(sorted(formats))}.")
    if not any(run.history for run in runs.values()):
        raise ValueError("None of the runs has an iteration: there is nothing to draw.")
    labels = {name: label for label, names in _groups(runs).items() if len(names) > 1 for name in names}
    colors: dict[str, str] = {}
    for name, run in runs.items():
        color = colors.setdefault(labels.get(name, name), f"C{len(colors) % 10}")
        known = [each for each in run.history if "rollout/success" in each]
        training = [(each["rollout/steps"], each["rollout/success"]) for each in known]
        for points, style in ((training, {"lw": 1, "alpha": 0.5}), (_held_out(run), {"marker": "o", "ms": 4})):
            if points:
                axes.plot(*zip(*points, strict=True), color=color, **style)
    axes.set(xlabel="turns collected", ylabel="win rate", ylim=(0, 1.02))
    axes.set_title("training batches (lines) and evaluations (points)", fontsize="medium")
    axes.grid(alpha=0.3)
    handles = [axes.plot([], [], "o-", color=color, ms=4)[0] for color in colors.values()]
    # Labels of their own: matplotlib hides the labels of lines that begin with "_", as a folder
    # may.
    legend = figure.legend(handles, [*colors], loc="outside lower center", ncols=2, frameon=False)
    for text in legend.get_texts():
        text.set_parse_math(False)  # a name with dollar signs is not a formula
    drawn = BytesIO()
    figure.savefig(drawn, format=kind, dpi=130)
    write_bytes(path, drawn.getvalue())


def _held_out(run: RunFiles) -> list[tuple[float, float]]:
    """Turns and win rate of each evaluation, that before training at 0 turns and that after it at
    the last."""
    name = "evaluation/success"
    known = [{"rollout/steps": 0.0, **as_metrics(run.before)}, *run.history]
    found = [(each["rollout/steps"], each[name]) for each in known if name in each]
    after = run.result.get("success_after")
    if after is not None and run.history and name not in run.history[-1]:
        found.append((run.history[-1]["rollout/steps"], after))
    return found
