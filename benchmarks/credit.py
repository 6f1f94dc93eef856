"""Which credit assignment should I use? The estimators on identical data, and what they teach a
model.

    python benchmarks/credit.py gradients --output-dir runs/credit
    python benchmarks/credit.py sweeps --output-dir runs/credit
    python benchmarks/credit.py learning --env guess --output-dir runs/credit
    python benchmarks/credit.py learning --env early --output-dir runs/credit
    python benchmarks/credit.py report --output-dir runs/credit
    python benchmarks/credit.py study register
    python benchmarks/credit.py study run --output-dir runs/credit/study
    python benchmarks/credit.py study report --output-dir runs/credit/study
    python benchmarks/credit.py real run --init-from runs/smollm2/warm/checkpoints/last
    python benchmarks/credit.py real report

``gradients`` draws batches from a language MDP that is small enough to enumerate and compares the
gradient of each estimator's loss with the true one; ``sweeps`` changes one choice at a time there.
``learning`` trains LLMPPO, LLMREINFORCE and GRPO with several seeds, on GuessTheNumber
(:mod:`learning`'s runs) or on :class:`~torchrl_llm.testing.environments.EarlyDecision`, where each
algorithm first chooses its learning rate and entropy bonus from the same grid, on seeds that are
not reported. A run that is finished (it has a ``result.json``) is not run again. ``report`` writes
the tables and plots of ``docs/results/credit.md`` for which there are data.

``study`` compares eight estimators in four worlds (:mod:`torchrl_llm.testing.credit_worlds`), each
of which separates some of them. ``register`` writes hypotheses, seeds, settings and rules
(:mod:`credit_study.registered`), which are committed before ``run`` starts; ``run`` uses all cores
and continues where it was interrupted; ``report`` writes tables, plots and
``docs/results/data/credit.json``.

``real`` asks once of a real model whether its ranking holds (:mod:`credit_study.real_model`):
SmolLM2 from the warm start of ``make demo MODEL=smollm2``, one run for each estimator, 12 to 18
CPU-minutes and 5 GB each.
"""

import argparse
import json
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from report import fill, machine  # noqa: E402

PAGE = ROOT / "docs" / "results" / "credit.md"
PLOTS = ROOT / "docs" / "results" / "credit"


def report_gradients(folder: Path) -> None:
    """The estimators on identical data."""
    from credit_study import gradients

    results = json.loads((folder / "gradients.json").read_text())
    gradients.plot_gradients(results, PLOTS / "gradients.png")
    for game in gradients.GAMES:
        fill(PAGE, f"gradients, {game}", gradients.gradient_table(results, game))


def report_sweeps(folder: Path) -> None:
    """One choice at a time."""
    from credit_study import sweeps

    results = json.loads((folder / "sweeps.json").read_text())
    for name in sweeps.SWEEPS:
        (game, *_) = sweeps.OWN.get(name, ["unequal tasks"])
        fill(PAGE, name, sweeps.sweep_table(results, name, game))


def report_learning(folder: Path) -> None:
    """Learning curves, and the machine of their CPU seconds."""
    from credit_study import curves

    curves.plot_learning(folder, PLOTS / "learning.png")
    for env in curves.TITLES:
        fill(PAGE, f"learning {env}", curves.learning_table(env, folder))
    fill(PAGE, "tuning", curves.tuning_table(folder))
    fill(PAGE, "machine", f"| machine |\n|---|\n| {machine()} |")


PARTS = {
    "gradients": (report_gradients, ["gradients.json"]),
    "sweeps": (report_sweeps, ["sweeps.json"]),
    "learning": (report_learning, ["guess", "early"]),
}
"""What each part of the page is written by, and the data that it needs."""


def write_report(folder: Path) -> None:
    """Fill the tables of the page and draw its plots, of the parts whose data the folder has.

    Raises:
        SystemExit: it has the data of none.
    """
    missing = {name: [each for each in data if not (folder / each).exists()] for name, (_, data) in PARTS.items()}
    if all(missing.values()):
        raise SystemExit(
            f"{folder} has the data of no part of {PAGE.name}: run `gradients`, `sweeps` or `learning` first."
        )
    PLOTS.mkdir(exist_ok=True)
    for name, (report, _) in PARTS.items():
        if missing[name]:
            lacking = " and no ".join(missing[name])
            print(f"{name}: {folder} has no {lacking}; its tables and plots stay as they are.")
        else:
            report(folder)


def study(arguments: argparse.Namespace) -> None:
    """The study's commands."""
    from credit_study import registered, runs

    if arguments.action == "register":
        registered.register()
    elif arguments.action == "run":
        runs.study(arguments.output_dir, arguments.jobs)
    else:
        from credit_study import page

        page.write_report(arguments.output_dir, PAGE, PLOTS)


def real(arguments: argparse.Namespace) -> None:
    """The commands of the real model."""
    from credit_study import real_model

    if arguments.action == "report":
        real_model.write_report(arguments.output_dir, PAGE, PLOTS)
    elif arguments.init_from is None:
        raise SystemExit(
            "--init-from is missing: the checkpoint of a warm start, such as runs/smollm2/warm/checkpoints/last."
        )
    else:
        real_model.run(arguments.init_from, arguments.output_dir, arguments.jobs)


def add_real(commands: argparse._SubParsersAction) -> None:
    """The arguments of ``real``."""
    parser = commands.add_parser("real", help="the same question, asked once of SmolLM2")
    parser.add_argument("action", choices=["run", "report"])
    parser.add_argument("--init-from", type=Path, help="the checkpoint of the warm start")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes at a time; default: one a core")
    parser.add_argument("--output-dir", type=Path, default=Path("runs/credit/real"), help="default: runs/credit/real")


def add_study(commands: argparse._SubParsersAction) -> None:
    """The arguments of ``study``."""
    parser = commands.add_parser("study", help="eight estimators in four worlds, registered before it runs")
    parser.add_argument("action", choices=["register", "run", "report"])
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes at a time; default: one a core")
    parser.add_argument("--output-dir", type=Path, default=Path("runs/credit/study"), help="default: runs/credit/study")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    compare = commands.add_parser("gradients", help="bias and noise of the estimators' gradients")
    compare.add_argument("--policies", type=int, default=5, help="random language models that play; default 5")
    compare.add_argument("--batches", type=int, default=2000, help="batches of each size; default 2000")
    compare.add_argument(
        "--sizes",
        type=int,
        nargs=2,
        default=[8, 32],
        help="conversations in a batch, a smaller and a larger number; default 8 32",
    )
    sweep = commands.add_parser("sweeps", help="one choice at a time: critic, group size, batch statistics, staleness")
    sweep.add_argument("--policies", type=int, default=5, help="random language models that play; default 5")
    sweep.add_argument("--batches", type=int, default=1000, help="batches of each kind that is drawn; default 1000")
    train = commands.add_parser("learning", help="learning curves")
    train.add_argument("--env", choices=["guess", "early"], required=True)
    train.add_argument("--seeds", type=int, nargs="+", default=list(range(5)), help="default 0 1 2 3 4")
    report = commands.add_parser("report", help="tables and plots of docs/results/credit.md")
    for command in (compare, sweep, train, report):
        command.add_argument("--output-dir", type=Path, default=Path("runs/credit"), help="default: runs/credit")
    add_study(commands)
    add_real(commands)
    arguments = parser.parse_args()
    if arguments.command == "study":
        study(arguments)
    elif arguments.command == "real":
        real(arguments)
    elif arguments.command == "gradients":
        from credit_study.gradients import gradients

        gradients(arguments.output_dir, arguments.policies, arguments.batches, arguments.sizes)
    elif arguments.command == "sweeps":
        from credit_study.sweeps import sweeps

        sweeps(arguments.output_dir, arguments.policies, arguments.batches)
    elif arguments.command == "learning":
        from credit_study.curves import learn

        learn(arguments.env, arguments.seeds, arguments.output_dir)
    else:
        write_report(arguments.output_dir)


if __name__ == "__main__":
    main()
