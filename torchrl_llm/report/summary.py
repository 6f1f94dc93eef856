"""The tables of the page's summary: what was trained, what came out, what it cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torchrl_llm.metrics.health import HealthRules
from torchrl_llm.metrics.paired import OTHER_GAMES, PairedComparison
from torchrl_llm.runs.outputs import percent
from torchrl_llm.runs.run_files import RunFiles

Rows = list[tuple[str, ...]]


def outcome(files: RunFiles) -> list[tuple[str, tuple[str, str], tuple[str, str]]]:
    """Win rate, trained share of the tasks, return, turns, penalized turns: name, and number and
    interval before and after.

    The share stands below the win rate, for a rate on tasks that were trained on says nothing of
    others.
    """
    before, result = files.before, files.result
    earlier = before.get("success_ci95") or result.get("success_before_ci95")
    intervals = {"success": (earlier, result.get("success_ci95"))}
    rows = []
    for name, title in (("success", "win rate"), ("reward", "return"), ("turns", "turns")):
        values = before.get(name, result.get(f"{name}_before")), result.get(f"{name}_after")
        first, last = map(_with_interval, values, intervals.get(name, (None, None)))
        rows.append((title, first, last))
    trained = before.get("task_overlap"), result.get("evaluation_task_overlap")
    known, later = ((percent(share), "") for share in trained)
    rows.insert(1, ("tasks trained on", known, later))
    shares = before.get("penalized", result.get("penalized_before")), result.get("penalized_after")
    if shares != (None, None):
        earlier_share, later_share = ("-" if share is None else f"{share:.1%}" for share in shares)
        rows.append(("penalized turns", (earlier_share, ""), (later_share, "")))
    return rows


def paired(files: RunFiles) -> str:
    """The paired comparison of the evaluations as a sentence, or that they are of different games;
    empty without one."""
    if files.result.get("same_games") is False:
        return OTHER_GAMES
    found = files.result.get("paired")
    return f"Episode by episode: {PairedComparison(**found)}." if found else ""


def _with_interval(value: float | None, interval: Sequence[float] | None) -> tuple[str, str]:
    if value is None:
        return "not evaluated", ""
    return f"{value:.3f}", f"[{interval[0]:.3f}, {interval[1]:.3f}]" if interval else ""


def headline(files: RunFiles) -> dict[str, str]:
    """The few numbers at the top: name -> value."""
    history, result = files.history, files.result
    last = history[-1] if history else {}
    # Continuations cost turns that no row has, and rows that count as one repeat turns that were
    # sampled once.
    further = last.get("data/continued_turns", 0.0) - last.get("data/replayed_turns", 0.0)
    shown = {
        "iterations": f"{len(history):,}" if history else "",
        "episodes": _count(last.get("rollout/episodes")),
        "turns": _count(last.get("rollout/steps")),
        "turns sampled": _count(last["rollout/steps"] + further) if further else "",
        "tokens": _count(_sum(history, "data/tokens")),
        "wall clock": _seconds(result.get("wall_s")),
        "CPU time": _seconds(result.get("cpu_s")),
        "peak memory": f"{result['peak_rss_mb']:,} MB" if result.get("peak_rss_mb") else "",
    }
    return {name: value for name, value in shown.items() if value}


def seconds_of(history: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Phase -> seconds of wall clock, over all iterations."""
    return {phase: _sum(history, f"time/{phase}_s") for phase in ("rollout", "score", "update", "sync", "evaluation")}


def costs(files: RunFiles) -> Rows:
    """Phase, seconds of wall clock, share of them."""
    seconds = seconds_of(files.history)
    total = sum(seconds.values())
    return [(phase, f"{value:,.1f} s", f"{value / total:.0%}") for phase, value in seconds.items() if value]


def warnings(history: Sequence[Mapping[str, float]], *, teacher: bool = False) -> Rows:
    """Iteration and text of the health warnings that the run's metrics give rise to; ``teacher``:
    the KL is to one."""
    rules = HealthRules(teacher=teacher)
    known = [(number, metrics) for number, metrics in enumerate(history, 1) if "rollout/success" in metrics]
    return [(str(number), problem) for number, metrics in known for problem in rules.problems(metrics)]


def about(files: RunFiles) -> dict[str, Rows]:
    """Name -> value: the settings that are not the defaults, versions, machine."""
    info = files.info
    environment: Mapping[str, Any] = info.get("environment", {})
    versions: Rows = [(name, str(version)) for name, version in environment.get("versions", {}).items()]
    if environment.get("git_revision"):
        versions.append(("revision", str(environment["git_revision"])[:12]))
    if "threads" in environment:
        versions.append(("threads", str(environment["threads"])))
    machine: Rows = [(name, str(value)) for name, value in info.get("machine", {}).items()]
    changed: Rows = [(name, str(value), str(default)) for name, (value, default) in info.get("changed", {}).items()]
    return {"changed": changed, "versions": versions, "machine": machine}


def _sum(history: Sequence[Mapping[str, float]], name: str) -> float:
    return sum(metrics.get(name, 0.0) for metrics in history)


def _count(value: float | None) -> str:
    return f"{value:,.0f}" if value else ""


def _seconds(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.0f} s" if value < 600 else f"{value / 60:.0f} min" if value < 7200 else f"{value / 3600:.1f} h"
