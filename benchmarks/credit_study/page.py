"""Tables, plots and raw data of the study: :func:`write_report`."""

import json
from pathlib import Path
from statistics import fmean
from typing import Any, get_args

import numpy as np
from matplotlib.figure import Figure
from report import fill

from credit_study import registered
from credit_study.statistics import Scores, flat_iqm, improvement, interval, overall

DATA = registered.PATH.with_name("credit.json")

Results = list[dict[str, Any]]

COLORS = ["#000000", "#0072b2", "#d55e00", "#e69f00", "#009e73", "#56b4e9", "#cc79a7", "#7f3c8d"]
"""Of the estimators, in their order."""


def scores_of(runs: Results, name: str, worlds: list[str], measure: registered.Measure) -> Scores:
    """``[worlds, seeds]``."""

    def figure(run: dict[str, Any]) -> float:
        return fmean(run["curve"]) if measure == "training" else run["score"]

    return np.array(
        [[figure(run) for run in runs if (run["estimator"], run["world"]) == (name, world)] for world in worlds]
    )


def cell(scores: Scores) -> str:
    """Interquartile mean and its interval."""
    low, high = interval(flat_iqm, scores)
    return f"{overall(scores):.2f} ({low:.2f} to {high:.2f})"


def world_table(runs: Results, measure: registered.Measure) -> str:
    """One line an estimator: every world, and all together."""
    worlds = list(registered.WORLDS)
    lines = [f"| | {' | '.join(worlds)} | all |", "|---|" + "---|" * (len(worlds) + 1)]
    for name in registered.ESTIMATORS:
        cells = [cell(scores_of(runs, name, [world], measure)) for world in worlds]
        lines.append(f"| {name} | {' | '.join(cells)} | {cell(scores_of(runs, name, worlds, measure))} |")
    return "\n".join(lines)


def hypothesis_table(runs: Results) -> str:
    """One line a pair: the probability of improvement by both measures, and what the one that
    judges says."""
    lines = [
        "| hypothesis | pair | training: P(improvement) | final: P(improvement) | judged by | differs |",
        "|---|---|---|---|---|---|",
    ]
    for hypothesis, (world, judge, pairs) in registered.COMPARED.items():
        for better, worse in pairs:
            found = {each: compare(runs, world, better, worse, each) for each in get_args(registered.Measure)}
            cells = [f"{value:.2f} ({low:.2f} to {high:.2f})" for value, low, high in found.values()]
            _, low, high = found[judge]
            verdict = "yes" if low > 0.5 else "the other way" if high < 0.5 else "no"
            lines.append(f"| {hypothesis} | {better} over {worse} | {' | '.join(cells)} | {judge} | {verdict} |")
    return "\n".join(lines)


def compare(
    runs: Results, world: str, better: str, worse: str, measure: registered.Measure
) -> tuple[float, float, float]:
    """Probability of improvement, and its interval."""
    both = [scores_of(runs, name, [world], measure) for name in (better, worse)]
    return float(improvement(*both)), *interval(improvement, *both)


def tuning_table(runs: Results) -> str:
    """The setting that each estimator took in each world."""
    worlds = list(registered.WORLDS)
    lines = [f"| | {' | '.join(worlds)} | CPU-s of a run |", "|---|" + "---|" * (len(worlds) + 1)]
    for name in registered.ESTIMATORS:
        own = [run for run in runs if run["estimator"] == name]
        taken = [next(run for run in own if run["world"] == world) for world in worlds]
        cells = [f"lr {run['lr_actor']:g}, entropy {run['entropy_coeff']:g}" for run in taken]
        lines.append(f"| {name} | {' | '.join(cells)} | {fmean(run['cpu_s'] for run in own):.0f} |")
    return "\n".join(lines)


def plot_curves(runs: Results, path: Path) -> None:
    """Score of training batches: interquartile mean over seeds, one panel a world."""
    figure = Figure(figsize=(10.5, 6.5), layout="constrained")
    axes = figure.subplots(2, 2, sharex=True)
    for world, axis in zip(registered.WORLDS, axes.flat, strict=True):
        for name, color in zip(registered.ESTIMATORS, COLORS, strict=True):
            curves = np.array([r["curve"] for r in runs if (r["estimator"], r["world"]) == (name, world)])
            ordered = np.sort(curves, axis=0)
            quarter = len(ordered) // 4
            middle = ordered[quarter : len(ordered) - quarter].mean(0)
            smooth = np.convolve(middle, np.ones(5) / 5, mode="valid")
            axis.plot(np.arange(len(smooth)) + 5, smooth, color=color, label=name, linewidth=1.4)
        axis.set(title=world, ylim=(-0.3, 1.05))
        axis.grid(alpha=0.3)
    for axis in axes[1]:
        axis.set_xlabel("iteration")
    figure.supylabel("score of training batches (mean of the last 5)")
    figure.legend(*axes.flat[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, dpi=85)


def check(found: dict[str, Any]) -> None:
    """Refuse to report what was not registered, or is not complete.

    Raises:
        SystemExit: runs of another registration, or runs that are missing.
    """
    if found["registration"] != registered.digest():
        raise SystemExit("These results are of another registration: check out the commit that registered them.")
    study, wanted = registered.registration(), set()
    for name in registered.ESTIMATORS:
        wanted |= {(name, world, seed) for world in registered.WORLDS for seed in study["seeds"]}
    missing = wanted - {(run["estimator"], run["world"], run["seed"]) for run in found["runs"]}
    if missing:
        raise SystemExit(
            f"{len(missing)} of {len(wanted)} runs are missing, such as {min(missing)}: run the study first."
        )


def write_report(root: Path, page: Path, plots: Path) -> None:
    """Write the raw data, the tables of the page and the plot. Without results in ``root``, from
    the raw data in the repository."""
    source = root / "results.json"
    found = json.loads((source if source.exists() else DATA).read_text())
    check(found)
    DATA.write_text(json.dumps(found, separators=(",", ":")) + "\n")
    runs = found["runs"]
    plot_curves(runs, plots / "study.png")
    fill(page, "study, final", world_table(runs, "final"))
    fill(page, "study, training", world_table(runs, "training"))
    fill(page, "study, hypotheses", hypothesis_table(runs))
    fill(page, "study, tuning", tuning_table(runs))
    total = sum(run["cpu_s"] for run in [*runs, *found["tuning"]])
    print(f"{len(runs)} runs and {len(found['tuning'])} of tuning took {total / 3600:.2f} CPU-hours.")
