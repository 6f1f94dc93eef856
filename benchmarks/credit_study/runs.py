"""The runs of the study: one run, the tuning, and all of them on all cores, each run once."""

import json
import multiprocessing
import os
import subprocess
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from credit_study import registered

TIMEOUT = 1800.0
"""Seconds of one run; it takes less than 40 of one core."""


def committed(path: Path = registered.PATH) -> None:
    """Refuse to go on unless the registration is the code's, and is committed as it is.

    Raises:
        SystemExit: it is missing, differs, or is not committed.
    """
    if not path.exists():
        raise SystemExit(f"{path} is missing: run `python benchmarks/credit.py study register`, and commit it.")
    if path.read_text() != registered.text():
        raise SystemExit(f"{path} is not what the code says now: the study was registered with other settings.")
    kept = subprocess.run(
        ["git", "show", f"HEAD:./{path.name}"], cwd=path.parent, capture_output=True, text=True, check=False
    )
    if kept.returncode or kept.stdout != path.read_text():
        raise SystemExit(f"{path} is not committed as it is: commit it before the first run.")


# ---------------------------------------- one run


def score(regret: float, world: str) -> float:
    """0 for the regret of the uniform policy, 1 for none."""
    exact = registered.registration()["worlds"][world]
    return 1 - regret / (exact["optimal_return"] - exact["uniform_return"])


def mean_regret(rows: Any) -> float:
    """Mean over episodes of the sum of their regrets."""
    from torchrl_llm import keys

    return float(rows[keys.turn_extra("regret")].nan_to_num(0.0).sum(1).mean())


def train(name: str, world: str, seed: int, chosen: dict[str, float], iterations: int, output: Path) -> None:
    """One run from random weights; writes ``result.json``."""
    from torchrl_llm.runs import RunSettings, build_run
    from torchrl_llm.testing.credit_worlds import CREDIT_WORLDS
    from torchrl_llm.testing.tiny import random_model
    from torchrl_llm.testing.tokenizers import word_tokenizer
    from torchrl_llm.trainers import Callback, evaluate

    started, regrets = time.process_time(), []

    class Watch(Callback):
        def on_batch(self, trainer: Any, rows: Any, metrics: dict[str, float]) -> None:
            regrets.append(mean_regret(rows))

    make, options = CREDIT_WORLDS[world], registered.WORLDS[world]
    tokenizer = word_tokenizer(make.WORDS)
    random_model(tokenizer, seed=seed).save_pretrained(output / "model")
    tokenizer.save_pretrained(output / "tokenizer")
    settings = registered.COMMON | registered.ESTIMATORS[name] | chosen | {"seed": seed, "max_iterations": iterations}
    paths = {
        "model_path": str(output / "model"),
        "tokenizer_path": str(output / "tokenizer"),
        "output_dir": output / "run",
    }
    config = RunSettings.from_values(
        **settings, **paths, env_name=f"world:{world}", env_options=options, overwrite=True
    )
    run = build_run(config, callbacks=[Watch()])
    before = final_regret(run, evaluate)
    run.trainer.train()
    result = {
        "estimator": name,
        "world": world,
        "seed": seed,
        **chosen,
        "iterations": run.trainer.iteration,
        "episodes": run.trainer.episodes,
        "score_before": score(before, world),
        "score": score(final_regret(run, evaluate), world),
        "curve": [round(score(each, world), 4) for each in regrets],
        "cpu_s": round(time.process_time() - started, 1),
        "registration": registered.digest(),
    }
    write(output / "result.json", result)


def final_regret(run: Any, evaluate: Any) -> float:
    """Mean regret on tasks that nothing else uses. Episodes are not cut off: what a policy is worth
    shows at their end."""
    env = run.make_env(stream="test")
    try:
        if "limit" in run.config.env.env_options:
            env.set_curriculum(options=[run.config.env.env_options | {"limit": None}])
        with run.trainer.policy_weights():
            return mean_regret(evaluate(env, run.policy, run.config.evaluation.final_episodes).rows)
    finally:
        env.close()


def write(path: Path, result: dict[str, Any]) -> None:
    """Write JSON so that a file that is there is whole."""
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(result) + "\n")
    unfinished.rename(path)


# ---------------------------------------- all runs


def folder_of(root: Path, name: str, world: str, seed: int, chosen: dict[str, float], iterations: int) -> Path:
    """Where a run is; what it depends on is in its name."""
    tuned = "-".join(f"{value:g}" for value in chosen.values())
    return root / world / f"{name.replace(' ', '_')}-{tuned}-{iterations}-{seed}"


def start(key: tuple[str, str, int, dict[str, float], int], root: Path) -> dict[str, Any]:
    """The result of a run, which is made unless it is there.

    Raises:
        SystemExit: it is there, of another registration.
        RuntimeError: it failed twice.
    """
    output = folder_of(root, *key)
    result = output / "result.json"
    if not result.exists():
        output.mkdir(parents=True, exist_ok=True)
        with open(output / "log.txt", "w") as log, redirect_stdout(log), redirect_stderr(log):
            try:
                train(*key, output)
            except Exception:  # noqa: BLE001  # whatever fails is repeated once, as was registered
                traceback.print_exc()
                try:
                    train(*key, output)
                except Exception as error:
                    raise RuntimeError(f"{output} failed twice: see log.txt there.") from error
    found = json.loads(result.read_text())
    if found["registration"] != registered.digest():
        raise SystemExit(f"{output} is a run of another registration: give another --output-dir, or remove it.")
    return found


def run_all(
    begin: Callable[[Any], dict[str, Any]],
    keys: Iterable[Any],
    jobs: int,
    say: Callable[[dict[str, Any]], str],
    *,
    timeout: float = TIMEOUT,
    runs_a_process: int | None = None,
) -> list[dict[str, Any]]:
    """The results of runs in order, in ``jobs`` processes of one thread each; ``say`` makes the
    line that tells of one.

    Large models get a process each (``runs_a_process=1``), small ones share it and what it has
    imported.

    Raises:
        multiprocessing.TimeoutError: a process died, or a run does not end within ``timeout``
            seconds.
    """
    keys, results = list(keys), []
    # what the processes inherit
    os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
    with multiprocessing.get_context("spawn").Pool(jobs, maxtasksperchild=runs_a_process) as pool:
        coming = pool.imap(begin, keys)
        for _ in keys:
            results.append(coming.next(timeout))
            print(f"{len(results)}/{len(keys)} {say(results[-1])}", flush=True)
    return results


def line(result: dict[str, Any]) -> str:
    """What is said of a run."""
    return f"{result['world']}, {result['estimator']}: {result['score']:.3f}"


def tuning_keys() -> list[tuple]:
    """The tuning runs."""
    study = registered.registration()
    return [
        (name, world, seed, chosen, registered.TUNING_ITERATIONS)
        for world in registered.WORLDS
        for name in registered.ESTIMATORS
        for chosen in registered.GRID
        for seed in study["tuning_seeds"]
    ]


def choose(tuning: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, float]]:
    """For each (estimator, world) the setting of the grid with the highest mean score over
    training; the first of equal ones."""
    found = {}
    for name in registered.ESTIMATORS:
        for world in registered.WORLDS:
            runs = [each for each in tuning if (each["estimator"], each["world"]) == (name, world)]

            def worth(chosen: dict[str, float], runs: list[dict[str, Any]] = runs) -> float:
                return fmean(fmean(each["curve"]) for each in runs if chosen.items() <= each.items())

            found[name, world] = max(registered.GRID, key=worth)
    return found


def reported_keys(chosen: dict[tuple[str, str], dict[str, float]]) -> list[tuple]:
    """The reported runs, world by world."""
    iterations, seeds = registered.COMMON["max_iterations"], registered.registration()["seeds"]
    return [
        (name, world, seed, chosen[name, world], iterations)
        for world in registered.WORLDS
        for name in registered.ESTIMATORS
        for seed in seeds
    ]


def study(root: Path, jobs: int) -> None:
    """Tune, run, and write the raw results; what is there is not run again."""
    committed()
    tuning = run_all(partial(start, root=root / "tuning"), tuning_keys(), jobs, line)
    results = run_all(partial(start, root=root / "runs"), reported_keys(choose(tuning)), jobs, line)
    write(root / "results.json", {"registration": registered.digest(), "tuning": tuning, "runs": results})
