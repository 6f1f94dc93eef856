"""The page of a real model from the folders of its runs: docs/results/smollm2.md.

    python benchmarks/real.py --game GuessTheNumber-easy runs/reinforce runs/ppo runs/grpo \\
        --game 2048 runs/2048

Writes the tables behind the markers of the page, ``smollm2.png`` (win rates of the training
batches, and of the held-out evaluations before and after with their intervals) and
``data/smollm2.json`` with the numbers of both.
"""

import argparse
import csv
import json
from pathlib import Path

import matplotlib
from report import RESULTS, fill

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLORS = {"LLMREINFORCE": "#1f77b4", "LLMPPO": "#d95f02", "GRPO": "#1b9e77"}


def read(folder: Path) -> dict:
    """The numbers of one run: its result, and the win rate of each training batch."""
    result = json.loads((folder / "result.json").read_text())
    with (folder / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    return result | {
        "episodes_trained": [int(float(row["rollout/episodes"])) for row in rows],
        "batch_success": [float(row["rollout/success"]) for row in rows],
    }


def table(runs: list[dict]) -> str:
    """One line a run."""
    (evaluated,) = {run["paired"]["episodes"] for run in runs}
    lines = [
        f"| algorithm, seed | games | before | after, of {evaluated} | 95 % interval | gained, lost | McNemar p | penalized turns |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for run in runs:
        paired, (low, high) = run["paired"], run["success_ci95"]
        penalized = f"{run['penalized_before']:.1%} to {run['penalized_after']:.1%}"
        lines.append(
            f"| {run['algo']}, {run['seed']} | {run['episodes']:,} | {run['success_before']:.3f} | **{run['success_after']:.3f}** | "
            f"{low:.3f} to {high:.3f} | {paired['gained']}, {paired['lost']} | {paired['p_value']:.0e} | {penalized} |"
        )
    return "\n".join(lines)


def draw(games: dict[str, list[dict]], path: Path) -> None:
    """A panel for each game."""
    columns = min(2, len(games))
    shape = -(-len(games) // columns), columns
    size = 5.2 * columns, 4.6 * shape[0]
    figure, panels = plt.subplots(*shape, figsize=size, sharey=True, squeeze=False, layout="constrained")
    for panel in panels.flat[len(games) :]:
        panel.remove()
    for panel, (game, runs) in zip(panels.flat, games.items(), strict=False):
        for run in runs:
            color = COLORS[run["algo"]]
            panel.plot(run["episodes_trained"], run["batch_success"], color=color, alpha=0.35, linewidth=1.2)
            ends = [0, run["episodes_trained"][-1]]
            rates = [run["success_before"], run["success_after"]]
            bounds = [run["success_before_ci95"], run["success_ci95"]]
            errors = [
                [abs(rate - interval[end]) for rate, interval in zip(rates, bounds, strict=True)] for end in (0, 1)
            ]
            first = run["algo"] not in {each["algo"] for each in runs[: runs.index(run)]}
            style = {"marker": "o"} if first else {"marker": "s", "linestyle": "--"}
            label = f"{run['algo']}, seed {run['seed']}"
            panel.errorbar(ends, rates, yerr=errors, color=color, capsize=3, label=label, **style)
        panel.set(title=game, xlabel="episodes trained on", ylim=(0, 1.02))
        panel.grid(alpha=0.3)
        # Below: many runs leave no room inside.
        panel.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=2, fontsize="small", frameon=False)
    for row in panels:
        row[0].set_ylabel("win rate")
    figure.savefig(path, dpi=100)


class AddGame(argparse.Action):
    """``--game NAME RUN...``, each time one panel and one table."""

    def __call__(self, parser, namespace, values, option_string=None):
        name, *folders = values
        getattr(namespace, self.dest)[name] = [read(Path(folder)) for folder in folders]


def main() -> None:
    """Write the page's tables, its figure and its data."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--game", dest="games", nargs="+", metavar="NAME RUN", action=AddGame, default={})
    games = parser.parse_args().games
    for game, runs in games.items():
        fill(RESULTS / "smollm2.md", game, table(runs))
    draw(games, RESULTS / "smollm2.png")
    (RESULTS / "data" / "smollm2.json").write_text(json.dumps(games, indent=1) + "\n")


if __name__ == "__main__":
    main()
