"""The question of the study, asked once of a real model: :func:`run` and :func:`write_report`.

SmolLM2-135M-Instruct after its warm start plays GuessTheNumber with each of the study's eight
estimators, with the settings of the demo. What is compared, and what is expected, stands here and
was committed before the first run; a result carries the :func:`digest` of it.
"""

import hashlib
import itertools
import json
import time
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from learning import drawn_seeds
from matplotlib.figure import Figure
from report import fill

from credit_study import page as study_page
from credit_study import registered
from credit_study.page import COLORS, scores_of
from credit_study.runs import run_all, write
from credit_study.statistics import overall

DATA = registered.PATH.with_name("credit_smollm2.json")
CONFIG = registered.ROOT / "examples" / "configs" / "smollm2_reinforce_llm.yaml"

DRAW = "credit-smollm2-1"

START = "the start"
"""What stands for the weights of the warm start among the estimators: they are evaluated, and not
trained."""

COMMON: dict[str, Any] = {
    "max_steps": 1800,
    "record_interval": 0,
    "save_checkpoints": False,
    "progress": False,
    "overwrite": True,
}
"""Beside the settings of :data:`CONFIG`: the demo's, which were chosen for LLMREINFORCE, on other
seeds. A run ends with the iteration, of 48 games, that reaches 1,800 turns: the eleventh to
thirteenth."""

CORRECTED = (
    "A first registration (commit cd11118) gave every run 10^9 turns and ended it after 14 iterations. The warm-up is a share of the turns, so that the learning rate stayed "
    "below 1e-8 and nothing was learned. Three runs of it were seen (the start, returns to go, ReBN: 0.418 of the held-out games each, the same games); the others were "
    "not made. Only the number of turns and of iterations has changed since."
)

_GROUPS = {"group_size": 4, "scale": "batch"}
_CRITIC = {"critic_trunk": "shared", "lr_critic": 1e-3}

OWN: dict[str, dict[str, Any]] = {
    "PPO 0.95": _CRITIC,
    "PPO 1": _CRITIC,
    "GRPO": _GROUPS,
    "RLOO": {"group_size": 4},
    "GRPO per turn": _GROUPS,
    "GRPO per state": {"group_size": 4, "state": "prefix"},
}
"""What estimators have of their own beside :data:`registered.ESTIMATORS
<credit_study.registered.ESTIMATORS>`: groups of four games, GRPO's scale of the batch (by the
group's own this model broke before, docs/results/smollm2.md), the shared critic of the example
settings."""

PAIRS = [
    ("GRPO per turn", "GRPO"),
    ("ReBN", "GRPO"),
    ("returns to go", "RLOO"),
    ("GRPO per state", "GRPO per turn"),
    ("PPO 0.95", "PPO 1"),
    ("PPO 0.95", "ReBN"),
]
"""The pairs that are tested: the pairs of the study's H2 (the first three), H3, H1 and H4, as far
as they are about one choice."""

EXPECTED = (
    "A game is paid at its end alone (0.1 is taken for an illegal turn, which the warm start has made rare), it ends by itself, and there is no luck but the "
    "policy's own. Of the study's worlds delayed-reward is like that, and there none of the pairs that were tested differed by more than chance. So none of the six pairs is expected to "
    "differ. The ranking would not hold if one does. The order of the eight by the win rate of all training games is reported, with its rank correlation "
    "(Kendall) with the order in delayed-reward by training batches; one run each cannot settle an order, and nothing is claimed from it."
)

RULES = {
    "final": "The share of 256 held-out games, the same for all, that the final weights win. It judges the pairs.",
    "training": "The share of all training games that were won. It judges nothing.",
    "test": (
        "The games differ by ten secret numbers. For a pair, the differences of the games won, summed by number, are given all 2^10 signs; p is the share of these whose "
        "sum is as far from 0 as the real one. Holm's correction over the six pairs; a difference is claimed where the corrected p is below 0.05. It is about two runs of one seed, not "
        "about seeds."
    ),
    "seed": "The first of benchmarks/learning.py, drawn_seeds, of the draw: one run for each estimator, all of the same warm start.",
}


_ORDER = (
    *(
        "algo",
        "model_path",
        "dtype",
        "device",
        "lora_r",
        "env_name",
        "batch_size",
        "num_envs",
        "minibatch_size",
        "lr_actor",
        "adam_beta2",
    ),
    *(
        "warmup_fraction",
        "lr_decay_fraction",
        "min_lr_fraction",
        "kl_coeff",
        "gamma",
        "clip_advantage",
        "entropy_coeff",
        "target_kl",
    ),
    *(
        "target_kl_share",
        "max_model_len",
        "max_output_tokens",
        "max_tokens",
        "max_steps",
        "evaluation_interval",
        "final_episodes",
    ),
)
"""The settings as they stood in the file when the study was registered, which :func:`digest` is
of."""


def settings(name: str) -> dict[str, Any]:
    """Of the run of an estimator, but for its folders and its seed."""
    from torchrl_llm.runs import RunSettings
    from torchrl_llm.runs.settings_file import read_settings

    values = dict(read_settings(CONFIG, RunSettings))
    base = {name: values.pop(name) for name in _ORDER} | {k: v for k, v in values.items() if k != "output_dir"}
    return base | COMMON | ({} if name == START else registered.ESTIMATORS[name] | OWN.get(name, {}))


def registration() -> dict[str, Any]:
    """Everything that decides what runs and what is claimed."""
    return {
        "settings": {name: settings(name) for name in registered.ESTIMATORS},
        "draw": DRAW,
        "seed": drawn_seeds(DRAW, 1)[0],
        "pairs": PAIRS,
        "expected": EXPECTED,
        "corrected": CORRECTED,
        "rules": RULES,
    }


def digest() -> str:
    """What a result says it was registered by."""
    return hashlib.sha256(json.dumps(registration()).encode()).hexdigest()[:16]


# ---------------------------------------- runs


def train(name: str, start: Path, output: Path) -> None:
    """One run from the warm start; writes ``result.json``."""
    import torch

    from torchrl_llm import keys
    from torchrl_llm.runs import RunSettings, build_run
    from torchrl_llm.trainers import Callback, evaluate

    torch.set_num_threads(1)
    began, curve = time.process_time(), []

    class Watch(Callback):
        def on_iteration(self, trainer: Any, metrics: dict[str, float]) -> None:
            curve.append(metrics["rollout/success"])
            print(metrics, flush=True)

    seed = drawn_seeds(DRAW, 1)[0]
    built = build_run(
        RunSettings.from_values(**settings(name), seed=seed, init_from=start, output_dir=output / "run"),
        callbacks=[Watch()],
    )
    try:
        if name != START:
            built.trainer.train()
        env = built.make_env(stream="test")
        with built.trainer.policy_weights():
            found = evaluate(env, built.policy, built.config.evaluation.final_episodes)
        env.close()
        numbers = found.rows[keys.TASK_ID].tolist()
        result = {
            "estimator": name,
            "seed": seed,
            "episodes": built.trainer.episodes,
            "curve": curve,
            "outcomes": found.outcomes,
            "numbers": [sorted(set(numbers)).index(each) for each in numbers],
            "interval": found.success_ci95,
            "penalized": found.penalized,
            "cpu_s": round(time.process_time() - began, 1),
            "registration": digest(),
        }
    finally:
        built.close()
    write(output / "result.json", result)


def start_run(name: str, start: Path, root: Path) -> dict[str, Any]:
    """The result of a run, which is made unless it is there.

    Raises:
        SystemExit: it is there, of another registration.
    """
    output = root / name.replace(" ", "_")
    if not (output / "result.json").exists():
        output.mkdir(parents=True, exist_ok=True)
        with open(output / "log.txt", "w") as log, redirect_stdout(log), redirect_stderr(log):
            train(name, start, output)
    found = json.loads((output / "result.json").read_text())
    if found["registration"] != digest():
        raise SystemExit(f"{output} is a run of another registration: give another --output-dir, or remove it.")
    return found


def run(start: Path, root: Path, jobs: int) -> None:
    """Make all runs, ``jobs`` at a time, and write the raw results; what is there is not run
    again."""
    begin = partial(start_run, start=start.resolve(), root=root)
    results = run_all(
        begin,
        [START, *registered.ESTIMATORS],
        jobs,
        lambda result: f"{result['estimator']}: {success(result):.3f}",
        timeout=4 * 3600.0,
        runs_a_process=1,
    )
    write(root / "results.json", {"registration": digest(), "runs": results})


# ---------------------------------------- report


def success(result: dict[str, Any]) -> float:
    """The share of the held-out games that were won."""
    return result["outcomes"].count("1") / len(result["outcomes"])


def sign_flip_p(differences: np.ndarray) -> float:
    """The share of all changes of signs whose sum is as far from 0 as the sum of the differences.

    >>> sign_flip_p(np.array([1.0, 1.0, 1.0]))
    0.25
    """
    signs = np.array(list(itertools.product((-1, 1), repeat=len(differences))))
    return float((abs(signs @ differences) >= abs(differences.sum()) - 1e-9).mean())


def holm(p_values: list[float]) -> list[float]:
    """Holm's correction (1979).

    >>> holm([0.25, 0.125, 0.5])
    [0.5, 0.375, 0.5]
    """
    order, corrected, largest = np.argsort(p_values), [0.0] * len(p_values), 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        corrected[i] = largest
    return corrected


def by_number(better: dict[str, Any], worse: dict[str, Any]) -> np.ndarray:
    """The games won by one less the games won by the other, for each secret number."""
    won = [np.array([int(each) for each in run["outcomes"]]) for run in (better, worse)]
    return np.bincount(better["numbers"], weights=won[0] - won[1])


def kendall(first: list[float], second: list[float]) -> float:
    """Kendall's tau-a: concordant pairs less discordant ones, over all.

    >>> kendall([1, 2, 3], [1, 3, 2])
    0.3333333333333333
    """
    pairs = itertools.combinations(zip(first, second, strict=True), 2)
    return fmean(float(np.sign((a - c) * (b - d))) for (a, b), (c, d) in pairs)


def run_table(runs: dict[str, dict[str, Any]], study: dict[str, float]) -> str:
    """One line an estimator."""
    lines = [
        "| | training games won | held-out games won, of 256 | 95 % interval | penalized turns | CPU-s | `delayed-reward`, training |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, each in runs.items():
        (low, high), curve = each["interval"], each["curve"]
        cells = [f"{fmean(curve):.3f}" if curve else "", f"{success(each):.3f}", f"{low:.3f} to {high:.3f}"]
        cells += [
            f"{each['penalized']:.1%}",
            f"{each['cpu_s']:,.0f}",
            f"{study[name]:.2f}" if name in study else "",
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def pair_table(runs: dict[str, dict[str, Any]]) -> str:
    """One line a pair."""
    lines = ["| pair | difference | p, by number | p, Holm | differs |", "|---|---|---|---|---|"]
    p_values = [sign_flip_p(by_number(runs[better], runs[worse])) for better, worse in PAIRS]
    for (better, worse), p, corrected in zip(PAIRS, p_values, holm(p_values), strict=True):
        difference = success(runs[better]) - success(runs[worse])
        verdict = "no" if corrected >= 0.05 else "yes" if difference > 0 else "the other way"
        lines.append(f"| {better} over {worse} | {difference:+.3f} | {p:.3f} | {corrected:.3f} | {verdict} |")
    return "\n".join(lines)


def plot_runs(runs: dict[str, dict[str, Any]], path: Path) -> None:
    """Win rate of training games: the mean of the last three batches; and of the held-out ones at
    the end."""
    figure = Figure(figsize=(8, 4.6), layout="constrained")
    axis = figure.subplots()
    for name, color in zip(registered.ESTIMATORS, COLORS, strict=True):
        curve = np.convolve(runs[name]["curve"], np.ones(3) / 3, mode="valid")
        axis.plot(np.arange(len(curve)) + 3, curve, color=color, label=name, linewidth=1.4)
        axis.plot(len(runs[name]["curve"]) + 0.5, success(runs[name]), "o", color=color, markersize=5)
    axis.axhline(success(runs[START]), color="#999999", linestyle=":", label=START)
    axis.set(
        xlabel="iteration of 48 games; at the right: 256 held-out games",
        ylabel="win rate, mean of 3 batches",
        ylim=(0.3, 1),
    )
    axis.grid(alpha=0.3)
    figure.legend(loc="outside right center", frameon=False)
    figure.savefig(path, dpi=85)


def write_report(root: Path, page: Path, plots: Path) -> None:
    """Write the raw data, the tables of the page and the plot. Without results in ``root``, from
    the raw data in the repository.

    Raises:
        SystemExit: they are of another registration.
    """
    source = root / "results.json"
    found = json.loads((source if source.exists() else DATA).read_text())
    if found["registration"] != digest():
        raise SystemExit("These results are of another registration: check out the commit that registered them.")
    DATA.write_text(json.dumps(found, separators=(",", ":")) + "\n")
    runs = {each["estimator"]: each for each in found["runs"]}
    world = json.loads(study_page.DATA.read_text())["runs"]
    study = {name: overall(scores_of(world, name, ["delayed-reward"], "training")) for name in registered.ESTIMATORS}
    fill(page, "real model", run_table(runs, study))
    fill(page, "real model, pairs", pair_table(runs))
    plot_runs(runs, plots / "smollm2.png")
    orders = [fmean(runs[name]["curve"]) for name in study], list(study.values())
    total = sum(each["cpu_s"] for each in found["runs"])
    print(f"{len(runs)} runs took {total / 3600:.2f} CPU-hours; Kendall's tau of the orders: {kendall(*orders):.2f}.")
