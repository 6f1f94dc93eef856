"""Does it learn? The shipped small model on GuessTheNumber-easy, before and after training, final
weights.

    python benchmarks/learning.py --algo LLMPPO --seed 0
    OMP_NUM_THREADS=1 python benchmarks/learning.py --seeds 20 --jobs 2
    OMP_NUM_THREADS=1 python benchmarks/learning.py --world key-and-door --algo GRPO --seed 0

The settings are in ``examples/configs/tiny_*.yaml``. The win rate is taken over 512 sampled
episodes (2,048 with ``--seeds``) at temperature 1 on tasks that are played once before and once
after training, and used for nothing else: no evaluation stops the run or selects weights. Writes
``result.json``, ``metrics.csv`` and ``report.html`` to ``--output-dir``.

``--world`` trains in another world (:mod:`torchrl_llm.testing.worlds`), whose best success rate is
known, with the same settings; only the number of turns is scaled (:data:`TURNS`). The model that it
starts from is made once, in ``runs/worlds`` (``benchmarks/small_models/make_worlds.py``). The model
of ``tally`` thinks; other settings behind these flags, such as ``--contexts append``, show what
that is worth. With ``--world coding-tools`` it is ``examples/coding_tools.py`` that runs, with its
own settings.

``--seeds N`` trains with N seeds for each algorithm (``--algo``: for this one), each in a process
of its own, ``--jobs`` at a time, and writes the distribution over seeds: ``summary.md``,
``summary.json`` and ``learning.png``, and in ``runs.json`` every run with its learning curve. The
seeds are drawn and not chosen: they are the 32-bit words (big-endian) of the SHA-256 of the text
``--draw``, then of that text with ``:1``, ``:2``, ... after it. Finished runs are not repeated, and
runs of other settings are an error; interrupted ones begin again.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import yaml

from torchrl_llm.runs.table import read_metrics

if TYPE_CHECKING:
    from torchrl_llm.runs import RunSettings

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples"))

CONFIGS = {"LLMREINFORCE": "tiny_reinforce_llm", "LLMPPO": "tiny_ppo_llm", "GRPO": "tiny_grpo_multiturn"}
TARGET = 0.95
TIMEOUT = 3600.0
"""Seconds of one run of ``--seeds``; one takes 2 to 15 minutes."""
WINDOW = 5
"""Batches of a moving mean of the win rate."""
TURNS = {"guess": 3, "coins": 10, "key-and-door": 8, "tally": 2}
"""``max_steps`` counts turns and is scaled by these. A game of guess has 3 turns, so a run plays as
many games of key-and-door (10 turns) as of guess, less a fifth. One of coins has 5: it plays twice
as many, for the last 4 % of its tasks are learned last. One of tally has 4, of 9 tokens each: half
as many games are enough."""
CODING = "coding-tools"
"""What ``examples/coding_tools.py`` trains in, with settings of its own."""


# ---------------------------------------- seeds


def drawn_seeds(draw: str, count: int) -> list[int]:
    """The first ``count`` seeds of a draw; everyone can draw them again, and nobody can choose
    them.

    >>> drawn_seeds("final-1", 2)
    [3362399716, 3932118510]
    """
    digests = (hashlib.sha256(f"{draw}:{i}".encode() if i else draw.encode()).digest() for i in range(1 + count // 8))
    return np.frombuffer(b"".join(digests), dtype=">u4")[:count].tolist()


# ---------------------------------------- statistics


def interquartile_mean(values: np.ndarray) -> np.ndarray:
    """The mean of the middle half of the values along the last axis, a value cut in two counting in
    part.

    >>> interquartile_mean(np.array([0.0, 1.0, 2.0, 100.0])).item()
    1.5
    """
    ordered, n = np.sort(values, axis=-1), values.shape[-1]
    edges = np.arange(n + 1)
    inside = np.clip(np.minimum(edges[1:], 0.75 * n) - np.maximum(edges[:-1], 0.25 * n), 0, 1)
    return ordered @ inside / inside.sum()


def bootstrap_interval(values: np.ndarray, *, samples: int = 10_000) -> tuple[float, float]:
    """95 % interval of the interquartile mean, by resampling seeds (Agarwal et al., 2021,
    arXiv:2108.13264)."""
    chosen = np.random.default_rng(0).integers(len(values), size=(samples, len(values)))
    low, high = np.quantile(interquartile_mean(values[chosen]), [0.025, 0.975])
    return float(low), float(high)


def largest_fall(wins: np.ndarray) -> float:
    """How far a learning curve, the mean of :data:`WINDOW` batches, falls below its own running
    maximum at most.

    >>> largest_fall(np.array([0.5] * 5 + [0.9] * 5 + [0.4] * 5 + [1.0] * 5))
    0.5
    """
    means = np.convolve(wins, np.ones(WINDOW) / WINDOW, mode="valid")
    return round(float((np.maximum.accumulate(means) - means).max()), 6)


def summarize(results: list[dict]) -> dict:
    """The distribution over the seeds of one algorithm: final win rates, falls, cost."""
    after = np.array([result["success_after"] for result in results])
    falls = [largest_fall(np.array(result["wins"])) for result in results]
    return {
        "after": after.tolist(),
        "iqm": float(interquartile_mean(after)),
        "iqm_ci95": bootstrap_interval(after),
        "worst": float(after.min()),
        "reached": int((after >= TARGET).sum()),
        "seeds": [result["seed"] for result in results],
        "falls": falls,
        "games": max(result["episodes"] for result in results),
        "cpu_s": [result["cpu_s"] for result in results],
    }


def table(summaries: dict[str, dict]) -> str:
    """The distributions as Markdown: one table of figures, and one of all seeds."""
    lines = [
        f"| algorithm | seeds | interquartile mean (95 % interval) | worst | at least {TARGET} | largest fall | games | CPU-seconds, median |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for algo, s in summaries.items():
        low, high = s["iqm_ci95"]
        lines.append(
            f"| {algo} | {len(s['after'])} | **{s['iqm']:.3f}** ({low:.3f} to {high:.3f}) | {s['worst']:.3f} | "
            f"{s['reached']} of {len(s['after'])} | {max(s['falls']):.2f} | {s['games']:,} | {np.median(s['cpu_s']):.0f} |"
        )
    lines += ["", f"| seed | {' | '.join(summaries)} |", "|---" * (1 + len(summaries)) + "|"]
    seeds = dict.fromkeys(seed for s in summaries.values() for seed in s["seeds"])
    for seed in seeds:
        found = (dict(zip(s["seeds"], s["after"], strict=True)).get(seed) for s in summaries.values())
        lines.append(f"| {seed} | {' | '.join('-' if each is None else f'{each:.3f}' for each in found)} |")
    return "\n".join(lines) + "\n"


def draw(results: dict[str, list[dict]], path: Path) -> None:
    """The learning curves: of each algorithm the median over seeds and bands of quantiles, over the
    games played."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2 * len(results), 3.6), layout="constrained")
    for axes, (algo, runs) in zip(
        figure.subplots(1, len(results), sharey=True, squeeze=False)[0], results.items(), strict=True
    ):
        smooth = [np.convolve(run["wins"], np.ones(WINDOW) / WINDOW, mode="valid") for run in runs]
        curves = np.array([each[: min(map(len, smooth))] for each in smooth])
        games = np.array(runs[0]["games"])[WINDOW - 1 :][: curves.shape[1]]
        for low, high, name in ((0.0, 1.0, "all seeds"), (0.25, 0.75, "middle half")):
            axes.fill_between(
                games, *np.quantile(curves, [low, high], axis=0), color="C0", alpha=0.2, linewidth=0, label=name
            )
        axes.plot(games, np.median(curves, axis=0), color="C0", label="median")
        axes.axhline(TARGET, color="0.5", linewidth=0.8, linestyle=":")
        axes.locator_params(axis="x", nbins=5)
        axes.set(title=f"{algo}, {len(runs)} seeds", xlabel="games of training", ylim=(0.3, 1.01))
    figure.axes[0].set_ylabel(f"win rate, mean of {WINDOW} batches")
    figure.axes[0].legend(loc="lower right", frameon=False)
    figure.savefig(path, dpi=130)


# ---------------------------------------- worlds


def make_model(world: str) -> Path:
    """The folder of the model that a world starts from, made if it is missing."""
    if world == CODING:
        import coding_tools

        return coding_tools.small_model()
    folder = Path("runs/worlds") / world
    if not folder.exists():
        # Renamed when it is complete: a run that is stopped here leaves nothing that looks
        # finished.
        unfinished = folder.with_name(f"{world}.{os.getpid()}")
        script = ROOT / "benchmarks" / "small_models" / "make_worlds.py"
        subprocess.run([sys.executable, script, f"--world={world}", f"--out={unfinished}"], check=True)
        unfinished.rename(folder)
    return folder


def world_overrides(world: str, config: Path) -> list[str]:
    """The settings that a world changes in ``config``: model, environment and the number of
    turns."""
    if world == "guess":
        return []
    folder = make_model(world)
    model = [f"--model-path={folder / 'model'}", f"--tokenizer-path={folder / 'tokenizer'}"]
    if world == CODING:
        return model
    max_steps = yaml.safe_load(config.read_text())["trainer"]["max_steps"] * TURNS[world] // TURNS["guess"]
    return [*model, f"--env-name=world:{world}", f"--max-steps={max_steps}"]


def optimum_of(world: str) -> float | None:
    """The best success rate of a world, by dynamic programming, or a player that always succeeds;
    ``None``: it is not known here."""
    if world == "guess":
        return None
    if world == CODING:
        return 1.0
    from torchrl_llm.testing.worlds import OPTIMA

    return OPTIMA[world]()


# ---------------------------------------- runs


def read(folder: Path) -> dict:
    """The result of a finished run, with its learning curve: ``wins`` of the training batches after
    ``games``."""
    rows = read_metrics(folder / "metrics.csv")
    if not rows:
        raise ValueError(
            f"{folder / 'metrics.csv'} has no rows: expected the rows of a finished run; delete {folder} to train it again"
        )
    wins, games = ([row[f"rollout/{name}"] for row in rows] for name in ("success", "episodes"))
    return json.loads((folder / "result.json").read_text()) | {"wins": wins, "games": games}


def is_finished(folder: Path) -> bool:
    """Whether a run was trained to its end and evaluated; one that was interrupted has a result
    without success rate."""
    result = folder / "result.json"
    return result.exists() and json.loads(result.read_text())["success_after"] is not None


def train_seeds(algorithms: list[str], arguments: argparse.Namespace, overrides: list[str]) -> None:
    """Train with all seeds, in processes of their own, and write the distribution."""
    suffix = "" if arguments.world == "guess" else f"-{arguments.world}"
    output = arguments.output_dir or Path("runs/learning") / f"{arguments.draw}{suffix}"
    if suffix:
        make_model(arguments.world)  # here, so that two processes do not both make it
    seeds = drawn_seeds(arguments.draw, arguments.seeds)
    folders = {(algo, seed): output / f"{algo}-{seed}" for seed in seeds for algo in algorithms}

    overrides = ["--overwrite=true", "--progress=false", "--checkpoint-interval=0", "--final-episodes=2048", *overrides]

    def train(key: tuple[str, int]) -> None:
        (algo, seed), folder = key, folders[key]
        options = ["--world", arguments.world, "--algo", algo, "--seed", str(seed), "--output-dir", str(folder)]
        if not is_finished(folder):
            folder.parent.mkdir(parents=True, exist_ok=True)
            with open(folder.parent / f"{folder.name}.log", "w") as log:
                command = [sys.executable, __file__, *options, *overrides]
                subprocess.run(command, stdout=log, stderr=log, check=True, timeout=TIMEOUT)
        print(f"{algo} {seed}: {read(folder)['success_after']:.3f}", flush=True)

    for (algo, seed), folder in folders.items():
        if is_finished(folder):
            check_settings(folder, settings(algo, arguments.world, seed, folder, overrides))
    with ThreadPoolExecutor(arguments.jobs) as pool:
        list(pool.map(train, folders))
    results = {algo: [read(folders[algo, seed]) for seed in seeds] for algo in algorithms}
    write_summary(results, output, optimum=optimum_of(arguments.world))


def check_settings(folder: Path, config: "RunSettings") -> None:
    """Refuse a finished run of other settings, which would stand in the table beside runs of
    these."""
    from torchrl_llm.runs.config import HOW_TO_RUN
    from torchrl_llm.runs.identity import config_changes
    from torchrl_llm.runs.migrate import settings_of_now
    from torchrl_llm.runs.settings_file import read_settings

    saved = settings_of_now(dict(read_settings(folder / "config.yaml", type(config), by_name=True)))
    changes = config_changes(saved, config.as_json(), ignore=HOW_TO_RUN)
    if changes:
        listed = "; ".join(f"{name} was {old!r}, is {new!r}" for name, (old, new) in changes.items())
        raise SystemExit(f"{folder} is a run of other settings: {listed}. Give another --output-dir, or remove it.")


def published(result: dict) -> dict:
    """What is published of a run: from it the table and the plot can be made again."""
    names = ("seed", "success_before", "success_after", "episodes", "iterations", "cpu_s", "wall_s")
    return {
        **{name: result[name] for name in names},
        "games": [int(games) for games in result["games"]],
        "wins": [round(win, 4) for win in result["wins"]],
    }


def write_summary(results: dict[str, list[dict]], output: Path, *, optimum: float | None) -> None:
    """Write the runs and their distribution over seeds, and which success rate is the best possible
    where that is known."""
    runs = {algo: [published(result) for result in each] for algo, each in results.items()}
    (output / "runs.json").write_text(json.dumps(runs, separators=(",", ":")) + "\n")
    summaries = {algo: summarize(runs) for algo, runs in results.items()}
    text, best = table(summaries), {}
    if optimum is not None:
        text += f"\nThe best policy succeeds in {optimum:.3f} of the episodes.\n"
        best = {"optimum": optimum}
    (output / "summary.json").write_text(json.dumps(summaries | best, indent=2) + "\n")
    (output / "summary.md").write_text(text)
    draw(results, output / "learning.png")
    print(text)


def settings(algo: str, world: str, seed: int, output: Path, overrides: list[str]) -> "RunSettings":
    """The settings of one run."""
    from torchrl_llm.runs import parse_settings

    name = "tiny_coding_tools" if world == CODING else CONFIGS[algo]
    path = ROOT / "examples" / "configs" / f"{name}.yaml"
    return parse_settings(
        [
            f"--config={path}",
            f"--algo={algo}",
            f"--seed={seed}",
            f"--output-dir={output}",
            "--evaluation-interval=0",
            "--final-episodes=512",
            *world_overrides(world, path),
            *overrides,
        ]
    )


def train_one(arguments: argparse.Namespace, overrides: list[str]) -> None:
    """Train with one seed, and write ``result.json``."""
    # not needed by the process that only starts others
    if arguments.world == CODING:
        import coding_tools as script
    else:
        import multiturn as script

    # A folder of its own for a world: benchmarks/report.py reads all results directly below
    # runs/learning as one table.
    folder = Path("runs/learning") / ("" if arguments.world == "guess" else arguments.world)
    output = arguments.output_dir or folder / f"{arguments.algo}-{arguments.seed}"
    script.main(settings(arguments.algo, arguments.world, arguments.seed, output, overrides))


def main() -> None:
    """Train with one seed, or with many."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algo", choices=list(CONFIGS), help="needed for one seed; default of --seeds: all three")
    parser.add_argument("--world", choices=[*TURNS, CODING], default="guess", help="what is learned; default guess")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, help="train with this many drawn seeds")
    parser.add_argument("--draw", default="final-2", help="the text that the seeds are drawn from")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument(
        "--output-dir",
        type=Path,
        help="default: runs/learning/ALGO-SEED or runs/learning/DRAW; worlds: .../WORLD/ALGO-SEED or .../DRAW-WORLD",
    )
    arguments, overrides = parser.parse_known_args()
    if arguments.seeds is not None:
        train_seeds([arguments.algo] if arguments.algo else list(CONFIGS), arguments, overrides)
    elif arguments.algo is None:
        parser.error("give --algo, or --seeds for all three")
    else:
        train_one(arguments, overrides)


if __name__ == "__main__":
    main()
