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

from arithmetic import arithmetic_splits, make_student
from transformers.utils.logging import disable_progress_bar

from torchrl_llm.envs import PromptDatasetEnv
from torchrl_llm.record.report import comparison_table, conversations_text, plot_learning_curve, write_json
from torchrl_llm.trainers import (
    Evaluation,
    Interrupted,
    Run,
    RunConfig,
    build_run,
    catch_signals,
    interruptible,
    parse_run_config,
    resume_command,
)


def reward_fn(completion: str, answer: str, question: str) -> float:
    """1.0 for the answer and nothing else."""
    return float(completion.strip() == answer)


def main(config: RunConfig) -> dict:
    """Train as ``config`` says; returns what ``result.json`` holds."""
    started = time.perf_counter()
    with catch_signals(resume_command(config)):
        run = interruptible(partial(build, config))
        before = after = None
        try:
            before = evaluate_before(run)
            if before is not None:
                print(f"before training: {before.success:.3f} of the held-out questions answered", flush=True)
            run.trainer.train()
            after = run.final_evaluation()
            return report(run, before, after, time.perf_counter() - started, stop_reason=run.trainer.stop_reason)
        except Interrupted as interrupted:
            stop_reason = f"interrupted by {interrupted.name}"
            report(run, before, after, time.perf_counter() - started, stop_reason=stop_reason)
            raise
        finally:
            run.close()


def build(config: RunConfig) -> Run:
    """The run of ``config``, with its questions and, if it asks for one, a model made from them."""
    splits = arithmetic_splits(seed=config.seed)
    if config.model_path == "arithmetic":
        config = with_student(config, splits["train"])
    return build_run(config, make_env=partial(PromptDatasetEnv, splits, reward_fn))


def with_student(config: RunConfig, rows: list[dict[str, str]]) -> RunConfig:
    """``config`` with a small model that learnt from ``rows``, made in ``output_dir`` unless a resumed run has it."""
    model_path, tokenizer_path = config.output_dir / "student", config.output_dir / "student_tokenizer"
    if not (config.resume and model_path.exists()):
        model, tokenizer = make_student(rows, seed=config.seed)
        model.save_pretrained(model_path)
        tokenizer.save_pretrained(tokenizer_path)
    return replace(config, model_path=str(model_path), tokenizer_path=str(tokenizer_path))


def evaluate_before(run: Run) -> Evaluation | None:
    """Ask the untrained model; a resumed run reads what it found, and one from another run's checkpoint has none."""
    path = run.config.output_dir / "evaluation_before.json"
    if run.trainer.iteration:
        return Evaluation(**json.loads(path.read_text())) if path.exists() else None
    run.begin()
    before = run.final_evaluation()
    write_json(before.figures(), path)
    return before


def report(
    run: Run, before: Evaluation | None, after: Evaluation | None, seconds: float, *, stop_reason: str | None
) -> dict:
    """Write ``result.json``, ``learning_curve.png`` and ``conversations_after.md``, of an interrupted run what there is."""
    config, out = run.config, run.config.output_dir
    result = {
        "algo": config.algo,
        "seed": config.seed,
        "accuracy_before": before and before.success,
        "accuracy_after": after and after.success,
        "accuracy_ci95": after and after.success_ci95,
        "evaluation_tasks": after and after.tasks,
        "evaluation_task_overlap": after and after.task_overlap,
        "evaluation_faults": after and after.faults,
        "episodes": run.trainer.episodes,
        "iterations": run.trainer.iteration,
        "stop_reason": stop_reason,
        "wall_s": round(seconds, 1),
    }
    write_json(result, out / "result.json")
    if after is not None:
        (out / "conversations_after.md").write_text(conversations_text(after.rows, run.tokenizer, count=6))
    if run.trainer.history:
        plot_learning_curve(
            run.trainer.history,
            out / "learning_curve.png",
            title=f"{config.algo} on {config.env_name}",
            before=before and before.metrics("evaluation"),
        )
    evaluations = {name: each for name, each in (("before", before), ("after", after)) if each is not None}
    table = f"\n\n{comparison_table(evaluations)}\n" if evaluations else ""
    print(f"\n{config.algo}: {stop_reason}{table}\nreport: {out}/", flush=True)
    return result


if __name__ == "__main__":
    disable_progress_bar()  # transformers' own, for loading and saving: they break ours
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    main(parse_run_config(description=__doc__))
