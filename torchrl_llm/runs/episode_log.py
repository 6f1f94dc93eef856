"""Recorded episodes in the trackers of a run: :func:`log_episodes`."""

from __future__ import annotations

from collections.abc import Iterable

from torchrl.record.loggers import Logger, TensorboardLogger, WandbLogger
from torchrl.record.loggers.trackio import TrackioLogger

from torchrl_llm.runs.episode_texts import COLUMNS, EpisodeText, episode_texts, markdown, table_rows
from torchrl_llm.runs.recording import Recording


def log_episodes(loggers: Iterable[Logger], recording: Recording, count: int) -> None:
    """Write the text of some episodes to the trackers, as ``episodes/training``,
    ``episodes/before`` or ``episodes/after``.

    TensorBoard gets a page of Markdown, Weights & Biases a table, trackio a trace for each episode;
    other loggers nothing.

    Args:
        loggers: of the run.
        recording: the episodes.
        count: how many at most.
    """
    name, texts = f"episodes/{recording.kind}", episode_texts(recording, count)
    for target in loggers:
        if isinstance(target, TensorboardLogger):
            target.experiment.add_text(name, markdown(recording, texts), recording.steps)
        elif isinstance(target, WandbLogger):
            import wandb

            table = wandb.Table(columns=[*COLUMNS], data=table_rows(recording, texts))
            target.experiment.log({name: table, "episodes/step": recording.steps})
        elif isinstance(target, TrackioLogger):
            import trackio

            traces = [trackio.Trace(**_trace(recording, each)) for each in texts]
            target.experiment.log({name: traces}, step=recording.steps)


def _trace(recording: Recording, each: EpisodeText) -> dict[str, object]:
    about = {"iteration": recording.iteration, "task": str(each.task), "environment": each.env, "outcome": each.outcome}
    return {
        "messages": [{"role": role, "content": text} for role, text in each.messages],
        "metadata": about | {"turns": each.turns, "return": each.reward},
    }
