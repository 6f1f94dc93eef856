"""The learning curves of the page, as SVG: :func:`draw_curves`."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from importlib.util import find_spec
from io import StringIO
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class Panel:
    """One plot.

    Attributes:
        title: what it shows, with its unit.
        metrics: metric -> its label.
        held_out: the metric of evaluations, if they have it.
        low: the lower end of the vertical axis; ``None``: as the data have it.
        high: its upper end.
    """

    title: str
    metrics: Mapping[str, str]
    held_out: str | None = None
    low: float | None = None
    high: float | None = None


_READ = tomllib.loads((resources.files(__package__) / "panels.toml").read_text("utf-8"))

PANELS = tuple(Panel(**panel) for panel in _READ["panels"])
"""The plots of the page; one whose metrics a run lacks, or that are 0 throughout, is left out."""

_INKS = {"#010101": "--ink", "#020202": "--muted", "#030303": "--grid"}
_INKS |= {f"#0a0{number}0{number}": f"--c{number}" for number in range(1, 5)}
"""Colors in the drawing -> variables of the page, which differ between its light and its dark
scheme."""
_INK, _MUTED, _GRID, *_CYCLE = _INKS


def draw_curves(history: Sequence[Mapping[str, float]], before: Mapping[str, float]) -> list[tuple[str, str]]:
    """Title and SVG of each plot over the turns collected.

    Args:
        history: the metrics of each iteration.
        before: metrics of the evaluation before training, as ``evaluation/...``; empty without one.

    Returns:
        The plots; none without matplotlib, or without an iteration.
    """
    if find_spec("matplotlib") is None or not history:
        return []
    named = ((panel, (*panel.metrics, *([panel.held_out] if panel.held_out else []))) for panel in PANELS)
    shown = [panel for panel, names in named if any(metrics.get(name) for name in names for metrics in history)]
    return [(panel.title, _draw(panel, history, before)) for panel in shown]


def _draw(panel: Panel, history: Sequence[Mapping[str, float]], before: Mapping[str, float]) -> str:
    import matplotlib as mpl
    from matplotlib.figure import Figure  # not pyplot, which keeps every figure

    # Text stays text, in the page's font. The salt makes ids of clip paths the same each time, and
    # different between plots.
    style: Any = {"svg.fonttype": "none", "svg.hashsalt": panel.title, "font.size": 9, "path.simplify_threshold": 0.5}
    with mpl.rc_context(style):
        figure = Figure(figsize=(3.6, 2.0), layout="constrained")
        axes = figure.subplots()
        labels = _lines(axes, panel, history) + _held_out(axes, panel, history, before)
        _plain(axes, panel)
        if len(labels) > 1:
            axes.legend(loc="best", frameon=False, fontsize=8, labelcolor=_INK, handlelength=1.2, borderaxespad=0.1)
        out = StringIO()
        # No date and no version: the same run gives the same bytes.
        figure.savefig(
            out, format="svg", transparent=True, metadata={"Date": None, "Creator": None, "Format": None, "Type": None}
        )
    return _for_page(out.getvalue())


def _lines(axes: Axes, panel: Panel, history: Sequence[Mapping[str, float]]) -> list[str]:
    """Draw the metrics of training; where there are evaluations, they recede."""
    labels = []
    evaluated = panel.held_out is not None and any(panel.held_out in metrics for metrics in history)
    for (name, label), color in zip(panel.metrics.items(), _CYCLE, strict=False):
        points = [(metrics["rollout/steps"], metrics[name]) for metrics in history if name in metrics]
        if points:
            # A single point is not a line.
            marker = "o" if len(points) == 1 else None
            steps, values = zip(*points, strict=True)
            axes.plot(steps, values, color=_MUTED if evaluated else color, lw=1.1, marker=marker, ms=3, label=label)
            labels.append(label)
    return labels


def _held_out(
    axes: Axes, panel: Panel, history: Sequence[Mapping[str, float]], before: Mapping[str, float]
) -> list[str]:
    """Draw the evaluations, the one before training at 0 turns, with their interval where they have
    one."""
    name = panel.held_out
    found: list[Mapping[str, float]] = [{"rollout/steps": 0.0, **before}, *history]
    evaluated = [metrics for metrics in found if name in metrics]
    if name is None or not evaluated:
        return []
    steps = [metrics["rollout/steps"] for metrics in evaluated]
    axes.plot(steps, [metrics[name] for metrics in evaluated], "o-", color=_CYCLE[0], lw=1.3, ms=3, label="evaluation")
    if all(f"{name}_low" in metrics for metrics in evaluated):
        low, high = ([metrics[f"{name}_{end}"] for metrics in evaluated] for end in ("low", "high"))
        axes.fill_between(steps, low, high, color=_CYCLE[0], alpha=0.18, lw=0)
    return ["evaluation"]


def _plain(axes: Axes, panel: Panel) -> None:
    """Few lines: a faint grid, no frame."""
    axes.set_ylim(bottom=panel.low, top=panel.high)
    axes.set_xlim(left=0)
    axes.grid(axis="y", color=_GRID, lw=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_MUTED, length=0, labelsize=8)
    axes.locator_params(nbins=5)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1000:g}k" if value >= 1000 else f"{value:g}")
    for spine in axes.spines.values():
        spine.set_visible(False)


def _for_page(svg: str) -> str:
    """The ``<svg>`` alone, in the colors and the font of the page, without a size of its own."""
    svg = svg[svg.index("<svg") :]
    for color, variable in _INKS.items():
        svg = svg.replace(color, f"var({variable})")
    svg = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1", svg)
    return re.sub(r' (width|height)="[\d.]+pt"', "", svg, count=2)


def as_metrics(statistics: Mapping[str, Any]) -> dict[str, float]:
    """The content of ``evaluation_before.json`` under the names of metrics."""
    names = ("success", "reward", "turns", "penalized")
    values = {name: statistics[name] for name in names if statistics.get(name) is not None}
    if statistics.get("success_ci95"):
        values |= dict(zip(("success_low", "success_high"), statistics["success_ci95"], strict=True))
    return {f"evaluation/{name}": float(value) for name, value in values.items()}
