"""What the study compares, said before it runs: :func:`registration`.

The registration is written to ``docs/results/data/credit_registration.json`` and committed before
the first reported run. The study refuses to run or to report if this file or the code that it was
written from has changed since.
"""

import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any, Literal

from learning import drawn_seeds

from torchrl_llm.testing.credit_worlds import CREDIT_WORLDS, optimal_return, optimal_success, uniform_return

ROOT = Path(__file__).resolve().parents[2]
PATH = ROOT / "docs" / "results" / "data" / "credit_registration.json"

DRAW = "credit-1"
SEEDS = 10
TUNING_DRAW, TUNING_SEEDS = "credit-1-tuning", 2

SEEN = (
    "Twelve runs were looked at before this was registered, to choose the lengths of episodes and runs: seed 1, lr 0.003, entropy 0.01, "
    "120 iterations (the first two 200). Final scores: stairs: ReBN 1.00, GRPO 0.98, GRPO per state 0.98, GRPO per turn 1.00, PPO 0.95 0.41; "
    "delayed-reward: ReBN 1.00, PPO 0.95 1.00; distracting-rewards: ReBN 0.58, GRPO -0.05; truncation-trap: ReBN 0.40, PPO 0.95 1.00, "
    "PPO 1 1.00. The worlds and the hypotheses were written before; of H1 it was then said that the difference may be too small to see."
)
"""What was known."""

Measure = Literal["training", "final"]

_GROUP = {"algo": "GRPO", "group_size": 8}
_LEAVE_ONE_OUT = _GROUP | {"baseline": "leave_one_out", "scale": "none"}

ESTIMATORS: dict[str, dict[str, Any]] = {
    "returns to go": {"algo": "LLMREINFORCE", "normalize_over": "none"},
    "ReBN": {"algo": "LLMREINFORCE"},
    "PPO 0.95": {"algo": "LLMPPO", "lmbda": 0.95},
    "PPO 1": {"algo": "LLMPPO", "lmbda": 1.0},
    "GRPO": _GROUP,
    "RLOO": _LEAVE_ONE_OUT,
    "GRPO per turn": _GROUP | {"credit": "turn"},
    "GRPO per state": _LEAVE_ONE_OUT | {"credit": "state", "state": "state"},
}
"""Settings of a run that set an estimator apart."""

WORLDS: dict[str, dict[str, Any]] = {
    "delayed-reward": {"delay": 6},
    "distracting-rewards": {"turns": 5, "noise": 0.5},
    "stairs": {"height": 4, "turns": 10},
    "truncation-trap": {"farthest": 6, "settle": 0.5, "limit": 3},
}
"""Options of each world."""

GRID = [{"lr_actor": lr, "entropy_coeff": entropy} for entropy in (0.01, 0.03) for lr in (3e-3, 6e-3)]
"""What every estimator chooses from, in each world by itself."""

COMMON: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "lora_r": 0,
    "num_envs": 64,
    "batch_size": 64,
    "max_model_len": 128,
    "max_output_tokens": 1,
    "epochs": 2,
    "gamma": 1.0,
    "kl_coeff": 0.0,
    "schedule": "constant",
    "max_iterations": 160,
    "max_steps": 10**9,
    "evaluation_interval": 0,
    "final_episodes": 512,
    "record_interval": 0,
    "save_checkpoints": False,
    "progress": False,
}
"""Settings that all runs have in common."""

TUNING_ITERATIONS = 80
BUDGET_CPU_S = 4 * 3600
"""For everything, tuning included. Smoke runs say 320 runs of about 23 CPU-seconds and 256 of
tuning of half that: 2.9 hours."""

HYPOTHESES = {
    "H1 delay": (
        "delayed-reward: the estimators without a critic (returns to go, ReBN, GRPO, RLOO, GRPO per turn) hardly differ: at gamma 1 every turn "
        "has the episode's return. PPO 1 learns sooner than PPO 0.95, in which 0.26 of the return (1 - 0.95 ** 6) reaches the decision "
        "only through a critic that is still learning; with so little the difference may be too small to see."
    ),
    "H2 distraction": (
        "distracting-rewards: credit per turn (returns to go, ReBN, GRPO per turn, GRPO per state) is better than credit per episode (GRPO, "
        "RLOO), which holds the luck of all five turns; PPO 0.95 is better than PPO 1, for it holds less of the luck of later turns."
    ),
    "H3 revisits": (
        "stairs: GRPO per state is better than GRPO per turn, which compares answers given on different floors, and than GRPO and RLOO, which "
        "give all answers of an episode the same credit."
    ),
    "H4 truncation": (
        "truncation-trap: only PPO goes on where the goal is farther than the limit, for only it bootstraps after a truncated turn. The "
        "others settle there: their score stays below that of going on from near and stopping from far."
    ),
    "H5 no winner": "No estimator is the best in all four worlds, by the interquartile mean of the score.",
}
"""Each with its reason. H1 to H4 are judged by the pairs of :data:`COMPARED`, H5 by the table of
all worlds."""

COMPARED: dict[str, tuple[str, Measure, list[tuple[str, str]]]] = {
    "H1 delay": ("delayed-reward", "training", [("PPO 1", "PPO 0.95"), ("ReBN", "GRPO"), ("GRPO per turn", "GRPO")]),
    "H2 distraction": (
        "distracting-rewards",
        "training",
        [
            ("ReBN", "GRPO"),
            ("GRPO per turn", "GRPO"),
            ("returns to go", "RLOO"),
            ("GRPO per state", "RLOO"),
            ("PPO 0.95", "PPO 1"),
        ],
    ),
    "H3 revisits": (
        "stairs",
        "training",
        [("GRPO per state", "GRPO per turn"), ("GRPO per state", "GRPO"), ("GRPO per state", "RLOO")],
    ),
    "H4 truncation": (
        "truncation-trap",
        "final",
        [("PPO 0.95", "ReBN"), ("PPO 0.95", "GRPO"), ("PPO 1", "ReBN"), ("PPO 1", "GRPO")],
    ),
}
"""For each hypothesis its world, the measure that judges it, and the pairs that judge it, the one
first that is expected to be better. In H1, of ReBN and GRPO per turn over GRPO, no difference is
expected."""

RULES = {
    "score": (
        "1 minus the mean regret of an episode over the regret of the uniform policy (both exact): 0 is the policy that gives legal "
        "answers the same probability, 1 the best one."
    ),
    "training": "The mean score of all training batches: how soon it is learned, and how well. It judges H1, H2 and H3.",
    "final": (
        "The score of the final weights in 512 episodes of tasks that nothing else uses, not cut off in truncation-trap. It judges H4, where "
        "training batches show only what was not cut off."
    ),
    "tuning": (
        f"In each world every estimator takes the setting of the grid with the highest mean score over the training batches of "
        f"{TUNING_ITERATIONS} iterations, on {TUNING_SEEDS} tuning seeds that are not reported; of equal ones the first."
    ),
    "seeds": (
        "benchmarks/learning.py, drawn_seeds: the 32-bit words of the SHA-256 of the draw's name. A seed sets initial weights, tasks and sampling."
    ),
    "statistics": (
        "Interquartile mean over seeds and worlds; 95 % percentile intervals of 10,000 bootstrap samples, stratified by world; probability "
        "of improvement: the mean over worlds of P(X > Y) + P(X = Y) / 2 over pairs of seeds (Agarwal et al., 2021, "
        "arXiv:2108.13264). A difference is claimed where the interval of the probability of improvement excludes 0.5."
    ),
    "failures": "A run that fails is repeated once with the same seed; if it fails again its score is that of the weights it began with.",
}


@cache
def _exact(name: str, options: str) -> dict[str, float]:
    world = CREDIT_WORLDS[name](**json.loads(options))
    return {
        "optimal_return": optimal_return(world),
        "optimal_success": optimal_success(world),
        "uniform_return": uniform_return(world),
    }


def registration() -> dict[str, Any]:
    """Everything that decides what runs and what is claimed."""
    return {
        "seen": SEEN,
        "hypotheses": HYPOTHESES,
        "compared": COMPARED,
        "rules": RULES,
        "estimators": ESTIMATORS,
        "worlds": {name: {"options": options, **_exact(name, json.dumps(options))} for name, options in WORLDS.items()},
        "grid": GRID,
        "common": COMMON,
        "tuning_iterations": TUNING_ITERATIONS,
        "draw": DRAW,
        "seeds": drawn_seeds(DRAW, SEEDS),
        "tuning_draw": TUNING_DRAW,
        "tuning_seeds": drawn_seeds(TUNING_DRAW, TUNING_SEEDS),
        "budget_cpu_s": BUDGET_CPU_S,
    }


def text() -> str:
    """The registration as the text of its file."""
    return json.dumps(registration(), indent=1) + "\n"


def digest() -> str:
    """What a result says it was registered by."""
    return hashlib.sha256(text().encode()).hexdigest()[:16]


def register(path: Path = PATH) -> None:
    """Write the registration; one that is there already is never replaced by another.

    Raises:
        SystemExit: another one is there.
    """
    if path.exists() and path.read_text() != text():
        raise SystemExit(
            f"{path} holds another registration. A study is registered once: delete it only before any run."
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text())
    print(f"{path}: {digest()}. Commit it before the first run.")
