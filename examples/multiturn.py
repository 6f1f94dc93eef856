"""Train a language model on a multi-turn game, evaluate it before and after, and write a report.

    python examples/multiturn.py --config examples/configs/tiny_ppo_llm.yaml
    python examples/multiturn.py --algo GRPO --config examples/configs/grpo_multiturn.yaml --wandb
    python examples/multiturn.py --config examples/configs/tiny_ppo_llm.yaml --resume
    accelerate launch --config_file examples/configs/accelerate_fsdp2.yaml examples/multiturn.py --config examples/configs/tiny_ppo_llm.yaml

``--help`` documents every setting; ``--resume`` goes on where a run was stopped. The report goes to ``--output-dir``:
``result.json``, ``learning_curve.png``, ``conversations_before.md``, ``conversations_after.md``, the metrics as CSV, and
checkpoints whose weights PEFT and transformers load.
"""

import json
import logging
import resource
import time
from functools import partial

from transformers.utils.logging import disable_progress_bar

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


def main(config: RunConfig) -> dict:
    """Train as ``config`` says; returns what ``result.json`` holds (of several processes the first one writes it).

    Ctrl-C and SIGTERM end the run in good order: it is saved, the report says how far it came, and a line how to go on.
    """
    started, cpu = time.perf_counter(), time.process_time()
    with catch_signals(resume_command(config)):
        run = interruptible(partial(build_run, config))
        try:
            return train(run, started, cpu)
        finally:
            run.close()
            run.trainer.accelerator.end_training()


def train(run: Run, started: float, cpu: float) -> dict:
    """Evaluate, train, evaluate, report; ``started`` and ``cpu`` are when the process began to count."""
    before = after = None
    try:
        before = evaluate_before(run)
        if before is not None and run.trainer.distributed.is_main:
            print(f"before training, {before.episodes} episodes: win rate {before.success:.3f}", flush=True)
        run.trainer.train()
        after = run.final_evaluation()
    except Interrupted as interrupted:
        report(run, before, after, started, cpu, stop_reason=f"interrupted by {interrupted.name}")
        raise
    return report(run, before, after, started, cpu, stop_reason=run.trainer.stop_reason)


def report(
    run: Run,
    before: Evaluation | None,
    after: Evaluation | None,
    started: float,
    cpu: float,
    *,
    stop_reason: str | None,
) -> dict:
    """Write the report on the first process, and return what ``result.json`` holds; of an interrupted run what there is."""
    config = run.config
    if not run.trainer.distributed.is_main:
        return {}
    title = f"{config.algo} on {config.env_name}"
    if run.trainer.history:
        plot_learning_curve(
            run.trainer.history,
            config.output_dir / "learning_curve.png",
            title=title,
            before=before and before.metrics("evaluation"),
        )
    evaluations = {name: figures for name, figures in (("before", before), ("after", after)) if figures is not None}
    result = {
        "algo": config.algo,
        "seed": config.seed,
        "env_name": config.env_name,
        "success_before": before and before.success,
        "success_before_ci95": before and before.success_ci95,
        "success_after": after and after.success,
        "success_ci95": after and after.success_ci95,
        "reward_before": before and before.reward,
        "reward_after": after and after.reward,
        "turns_before": before and before.turns,
        "turns_after": after and after.turns,
        "evaluation_tasks": after and after.tasks,
        "evaluation_task_overlap": after and after.task_overlap,
        "evaluation_faults": after and after.faults,
        "episodes": run.trainer.episodes,
        "iterations": run.trainer.iteration,
        "stop_reason": stop_reason,
        "wall_s": round(time.perf_counter() - started, 1),
        "cpu_s": round(time.process_time() - cpu, 1),
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }
    write_json(result, config.output_dir / "result.json")
    if after is not None:
        write_conversations(run, after, "after")
        if config.export_merged:
            run.models.export_merged(config.output_dir / "merged", run.tokenizer)
    table = f"\n\n{comparison_table(evaluations)}\n" if evaluations else ""
    print(f"\n{title}: {stop_reason}{table}")
    wanted = ("result.json", "learning_curve.png", "conversations_before.md", "conversations_after.md")
    there = [name for name in wanted if (config.output_dir / name).exists()]
    print(f"report: {config.output_dir}/ ({', '.join(there)})", flush=True)
    return result


def evaluate_before(run: Run) -> Evaluation | None:
    """Play the untrained model; a resumed run reads what it found, and one from another run's checkpoint has none."""
    run.begin()
    path = run.config.output_dir / "evaluation_before.json"
    if run.config.resume and path.exists():
        return Evaluation(**json.loads(path.read_text()))
    if run.trainer.iteration:
        return None
    before = run.final_evaluation()
    if run.trainer.distributed.is_main:
        write_conversations(run, before, "before")
        write_json(before.figures(), path)
    return before


def write_conversations(run: Run, evaluation: Evaluation, when: str) -> None:
    """Write sample conversations of ``evaluation`` to ``conversations_<when>.md``."""
    kwargs = run.config.chat_template_kwargs
    text = conversations_text(evaluation.rows, run.tokenizer, count=6, chat_template_kwargs=kwargs)
    text = f"# Conversations {when} training\n\n{text}"
    (run.config.output_dir / f"conversations_{when}.md").write_text(text)


if __name__ == "__main__":
    disable_progress_bar()  # transformers' own, for loading and saving: they break ours
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    main(parse_run_config(description=__doc__))
