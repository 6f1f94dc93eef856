"""Learning curves of the three algorithms on GuessTheNumber and on ``EarlyDecision``."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import torch
from matplotlib.figure import Figure

from torchrl_llm.runs import RunSettings, build_run
from torchrl_llm.runs.table import read_metrics
from torchrl_llm.testing.environments import EarlyDecision
from torchrl_llm.testing.tiny import random_model
from torchrl_llm.testing.tokenizers import word_tokenizer

ROOT = Path(__file__).resolve().parents[2]

ALGORITHMS: dict[str, dict[str, Any]] = {
    "LLMREINFORCE": {"algo": "LLMREINFORCE"},
    "LLMPPO": {"algo": "LLMPPO", "lmbda": 0.95},
    "GRPO": {"algo": "GRPO", "group_size": 8},
    "GRPO per turn": {"algo": "GRPO", "group_size": 8, "credit": "turn"},
}
"""What sets them apart on EarlyDecision. The last one tells what is the group's from what is the
credit's."""
COMPARED = {"guess": list(ALGORITHMS)[:3], "early": list(ALGORITHMS)}
TUNED = [{"lr_actor": lr, "entropy_coeff": entropy} for entropy in (0.01, 0.03) for lr in (1.5e-3, 3e-3, 6e-3)]
"""What each algorithm may choose from on EarlyDecision."""
TUNING_SEEDS = (100, 101)
EARLY = {
    "dtype": "float32",
    "device": "cpu",
    "lora_r": 0,
    "num_envs": 128,
    "batch_size": 128,
    "max_model_len": 64,
    "max_output_tokens": 1,
    "epochs": 2,
    "gamma": 1.0,
    "kl_coeff": 0.0,
    "schedule": "constant",
    "max_iterations": 200,
    "max_steps": 10**9,
    "evaluation_interval": 0,
    "final_episodes": 512,
    "save_checkpoints": False,
    "progress": False,
}
"""Settings that all algorithms have in common on EarlyDecision."""


def train_early(name: str, seed: int, chosen: dict[str, float], output: Path) -> None:
    """One run on EarlyDecision from random weights; writes ``result.json``."""
    started = time.process_time()
    tokenizer = word_tokenizer(EarlyDecision.WORDS)
    random_model(tokenizer, seed=seed).save_pretrained(output / "model")
    tokenizer.save_pretrained(output / "tokenizer")
    options = EARLY | ALGORITHMS[name] | chosen | {"seed": seed}
    paths = {"model_path": str(output / "model"), "tokenizer_path": str(output / "tokenizer"), "output_dir": output}
    run = build_run(RunSettings.from_values(**options, **paths), env=EarlyDecision)
    before = run.final_evaluation()
    run.trainer.train()
    after = run.final_evaluation()
    result = {
        "algo": name,
        "seed": seed,
        "env_name": "EarlyDecision",
        **chosen,
        "success_before": before.success,
        "success_after": after.success,
        "reward_before": before.reward,
        "reward_after": after.reward,
        "episodes": run.trainer.episodes,
        "iterations": run.trainer.iteration,
        "cpu_s": round(time.process_time() - started, 1),
    }
    (output / "result.json").write_text(json.dumps(result, indent=2) + "\n")


def train_guess(name: str, seed: int, output: Path) -> None:
    """One run on GuessTheNumber-easy, by ``benchmarks/learning.py``."""
    script = [sys.executable, str(ROOT / "benchmarks" / "learning.py"), "--progress=false"]
    subprocess.run([*script, f"--algo={name}", f"--seed={seed}", f"--output-dir={output}"], check=True)


def once(output: Path, train: Callable[[Path], None]) -> dict:
    """The result of a run, which is made only if it is not there."""
    path = output / "result.json"
    if not path.exists():
        train(output)
        result = json.loads(path.read_text())
        print(f"{output}: success {result['success_before']:.3f} -> {result['success_after']:.3f}", flush=True)
    return json.loads(path.read_text())


def tuned(name: str, folder: Path) -> dict[str, float]:
    """The settings of :data:`TUNED` with the highest success over all training batches, on the
    tuning seeds."""
    return max(TUNED, key=lambda chosen: tuning_score(name, chosen, folder))


def tuning_score(name: str, chosen: dict[str, float], folder: Path) -> float:
    """Mean success over all training batches of the tuning seeds."""
    scores = []
    for seed in TUNING_SEEDS:
        output = folder / "tuning" / "-".join([name, *(f"{value:g}" for value in chosen.values()), str(seed)])
        once(output, partial(train_early, name, seed, chosen))
        scores.append(fmean(success_curve(output)[1]))
    return fmean(scores)


def learn(env: str, seeds: list[int], folder: Path) -> None:
    """Every run of ``env`` that is not there yet."""
    for seed in seeds:
        for name in COMPARED[env]:
            output = folder / env / f"{name}-{seed}"
            if env == "guess":
                once(output, partial(train_guess, name, seed))
            else:
                once(output, partial(train_early, name, seed, tuned(name, folder)))


def success_curve(run: Path) -> tuple[list[float], list[float]]:
    """Games played and success rate of each training batch."""
    rows = read_metrics(run / "metrics.csv")
    if not rows:
        raise ValueError(
            f"{run / 'metrics.csv'} has no rows: expected the rows of a finished run; delete {run} to train it again"
        )
    games, wins = ([row[f"rollout/{name}"] for row in rows] for name in ("episodes", "success"))
    return games, wins


def smooth(curve: list[float], width: int = 5) -> list[float]:
    """Mean of the last ``width`` figures."""
    return [fmean(curve[max(0, i - width + 1) : i + 1]) for i in range(len(curve))]


TITLES = {"guess": "GuessTheNumber-easy", "early": "EarlyDecision"}
GOAL = 0.9
COLOURS = dict(zip(ALGORITHMS, ["#0072b2", "#d55e00", "#009e73", "#cc79a7"], strict=True))
T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""97.5 % quantiles of Student's t with 1, 2, ... degrees of freedom."""


def mean_interval(figures: list[float]) -> tuple[float, float]:
    """Mean over seeds and half the width of its 95 % interval (Student's t)."""
    return fmean(figures), T95[len(figures) - 2] * stdev(figures) / len(figures) ** 0.5


def runs_of(env: str, name: str, folder: Path) -> list[Path]:
    """The finished runs, by seed."""
    found = [path.parent for path in (folder / env).glob(f"{name}-*/result.json")]
    return sorted(found, key=lambda run: int(run.name.rsplit("-", 1)[1]))


def games_to_goal(run: Path) -> float | None:
    """Games until the mean success of five batches reaches :data:`GOAL`; ``None``: never."""
    games, wins = success_curve(run)
    return next((at for at, win in zip(games, smooth(wins), strict=True) if win >= GOAL), None)


def learning_table(env: str, folder: Path) -> str:
    """One line an algorithm."""
    runs = {name: runs_of(env, name, folder) for name in COMPARED[env]}
    common = min(success_curve(run)[0][-1] for each in runs.values() for run in each)
    lines = [
        f"| | after training | by seed | mean over {common:,.0f} games | games to {GOAL:.0%}: median (seeds) | CPU-s |",
        "|---|---|---|---|---|---|",
    ]
    for name, each in runs.items():
        results = [json.loads((run / "result.json").read_text()) for run in each]
        curves = [success_curve(run) for run in each]
        final, final_half = mean_interval([result["success_after"] for result in results])
        area, area_half = mean_interval(
            [fmean(win for at, win in zip(*curve, strict=True) if at <= common) for curve in curves]
        )
        reached = [at for at in map(games_to_goal, each) if at is not None]
        when = f"{median(reached):,.0f} ({len(reached)} of {len(each)})" if reached else f"never (0 of {len(each)})"
        seeds = ", ".join(f"{result['success_after']:.2f}" for result in results)
        lines.append(
            f"| {name} | {final:.3f} ± {final_half:.3f} | {seeds} | {area:.3f} ± {area_half:.3f} | {when} | "
            f"{fmean(result['cpu_s'] for result in results):.0f} |"
        )
    return "\n".join(lines)


def tuning_table(folder: Path) -> str:
    """Mean success over training on the tuning seeds, one line an algorithm; the best one bold."""
    heads = [f"lr {chosen['lr_actor']:g}, entropy {chosen['entropy_coeff']:g}" for chosen in TUNED]
    lines = [f"| | {' | '.join(heads)} |", "|---|" + "---|" * len(TUNED)]
    for name in COMPARED["early"]:
        scores = [tuning_score(name, chosen, folder) for chosen in TUNED]
        cells = [f"**{score:.3f}**" if score == max(scores) else f"{score:.3f}" for score in scores]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def plot_learning(folder: Path, path: Path) -> None:
    """Success over games: mean over seeds and its 95 % interval."""
    figure = Figure(figsize=(9.5, 4.0), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for env, axis in zip(TITLES, axes, strict=True):
        for name in COMPARED[env]:
            curves = [success_curve(run) for run in runs_of(env, name, folder)]
            length = min(len(games) for games, _ in curves)
            wins = zip(*(smooth(win)[:length] for _, win in curves), strict=True)
            mean, half = torch.tensor([mean_interval(list(each)) for each in wins]).unbind(1)
            thousands = [at / 1000 for at in curves[0][0][:length]]
            axis.plot(thousands, mean, color=COLOURS[name], label=name, linewidth=1.5)
            axis.fill_between(thousands, mean - half, mean + half, color=COLOURS[name], alpha=0.15, linewidth=0)
        axis.set(title=f"{TITLES[env]}, {len(curves)} seeds", xlabel="thousand games played", ylim=(0, 1.02))
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("success rate of training batches\n(mean of the last 5)")
    figure.legend(*axes[1].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, dpi=85)
