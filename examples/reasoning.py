"""Train a language model on questions with checkable answers, and measure it on held-out ones before and after.

    python examples/reasoning.py --config examples/configs/tiny_reasoning.yaml
    python examples/reasoning.py --config examples/configs/tiny_reasoning.yaml --algo LLMPPO
    python examples/reasoning.py --config examples/configs/tiny_reasoning.yaml --resume

The questions are arithmetic made offline, divided into train and test; ``model_path: arithmetic`` makes a small model that
is often wrong. For your own, change ``splits`` and ``reward_fn``. The report goes to ``--output-dir``.
"""

import json
import logging
import time
from dataclasses import replace
from functools import partial

from transformers.utils.logging import disable_progress_bar

from torchrl_llm.envs import PromptDatasetEnv
from torchrl_llm.record.report import comparison_table, conversations_text, plot_learning_curve, write_json
from torchrl_llm.testing.arithmetic import arithmetic_splits, make_pupil
from torchrl_llm.trainers import Evaluation, Run, RunConfig, build_run, parse_run_config


def reward_fn(completion: str, answer: str, question: str) -> float:
    """1.0 for the answer and nothing else."""
    return float(completion.strip() == answer)


def main(config: RunConfig) -> dict:
    """Train as ``config`` says; returns what ``result.json`` holds."""
    started = time.perf_counter()
    splits = arithmetic_splits(seed=config.seed)
    if config.model_path == "arithmetic":
        config = with_pupil(config, splits["train"])
    run = build_run(config, make_env=partial(PromptDatasetEnv, splits, reward_fn))
    try:
        before = evaluate_before(run)
        print(f"before training: {before.success:.3f} of the held-out questions answered", flush=True)
        run.trainer.train()
        after = run.final_evaluation()
        return report(run, before, after, time.perf_counter() - started)
    finally:
        run.close()


def with_pupil(config: RunConfig, rows: list[dict[str, str]]) -> RunConfig:
    """``config`` with a small model that learnt from ``rows``, made in ``output_dir`` unless a resumed run has it."""
    model_path, tokenizer_path = config.output_dir / "pupil", config.output_dir / "pupil_tokenizer"
    if not (config.resume and model_path.exists()):
        model, tokenizer = make_pupil(rows, seed=config.seed)
        model.save_pretrained(model_path)
        tokenizer.save_pretrained(tokenizer_path)
    return replace(config, model_path=str(model_path), tokenizer_path=str(tokenizer_path))


def evaluate_before(run: Run) -> Evaluation:
    """Ask the untrained model; a resumed run reads what it found before it was stopped."""
    path = run.config.output_dir / "evaluation_before.json"
    if run.trainer.iteration:
        return Evaluation(**json.loads(path.read_text()))
    before = run.final_evaluation()
    write_json(before.figures(), path)
    return before


def report(run: Run, before: Evaluation, after: Evaluation, seconds: float) -> dict:
    """Write ``result.json``, ``learning_curve.png`` and ``conversations_after.md``; print the comparison."""
    config, out = run.config, run.config.output_dir
    result = {
        "algo": config.algo,
        "seed": config.seed,
        "accuracy_before": before.success,
        "accuracy_after": after.success,
        "accuracy_ci95": after.success_ci95,
        "evaluation_tasks": after.tasks,
        "evaluation_task_overlap": after.task_overlap,
        "evaluation_faults": after.faults,
        "episodes": run.trainer.episodes,
        "iterations": run.trainer.iteration,
        "wall_s": round(seconds, 1),
    }
    write_json(result, out / "result.json")
    (out / "conversations_after.md").write_text(conversations_text(after.rows, run.tokenizer, count=6))
    plot_learning_curve(run.trainer.history, out / "learning_curve.png", title=f"{config.algo} on {config.env_name}")
    print(f"\n{config.algo}\n\n{comparison_table({'before': before, 'after': after})}\n\nreport: {out}/")
    return result


if __name__ == "__main__":
    disable_progress_bar()  # transformers' own, for loading and saving: they break ours
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    main(parse_run_config(description=__doc__))
