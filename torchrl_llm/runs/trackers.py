"""Where a run's metrics go: one table, and trackers; and what a resumed run writes again."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tensordict import TensorDictBase
from torchrl.record.loggers import Logger, TensorboardLogger, get_logger
from torchrl.record.loggers.trackio import TrackioLogger

from torchrl_llm.runs.config import RunSettings
from torchrl_llm.runs.table import row_text, table_columns, table_text
from torchrl_llm.trainers.callbacks import Callback
from torchrl_llm.utils.files import write_text
from torchrl_llm.utils.optional import import_extra

_SERVICE_WAIT = 300.0
"""Seconds that W&B's service may take to start."""


class MetricsTable(Callback):
    """Writes the metrics of a run to one CSV file, a row for each iteration and a column for each
    metric.

    A row is appended. A metric that appears later gets the next column: then the file is written
    again, whole or not at all, which few iterations do. A resumed run begins with the rows that its
    checkpoint knows of, so that it ends with the file of a run that never stopped.

    Args:
        path: the file, see :mod:`torchrl_llm.runs.table`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._columns: list[str] = []

    def on_start(self, trainer: Any) -> None:
        if trainer.history:
            self._write(trainer.history)
        else:
            self.path.unlink(missing_ok=True)

    def on_iteration(self, trainer: Any, metrics: dict[str, float]) -> None:
        if not (metrics.keys() <= set(self._columns) and self.path.exists()):
            self._write(trainer.history)
            return
        with self.path.open("a", encoding="utf-8", newline="") as file:
            file.write(row_text(self._columns, trainer.iteration, metrics))

    def _write(self, history: Sequence[Mapping[str, float]]) -> None:
        self._columns = table_columns(history)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_text(self.path, table_text(history))


def make_loggers(config: RunSettings) -> list[Logger]:
    """TensorBoard, Weights & Biases and trackio by flag; the table is :class:`MetricsTable`.

    Raises:
        MissingExtraError: a tracker is not installed; the message says how to.
    """
    where = config.output.output_dir
    for tracker in ("tensorboard", "wandb", "trackio"):
        if getattr(config.output, tracker):
            import_extra(tracker, extra=tracker, what=f"{tracker}=true")
    loggers: list[Logger] = []
    if config.output.tensorboard:
        loggers.append(get_logger("tensorboard", str(where), "tensorboard"))
    if config.output.wandb:
        # W&B gives up a run whose service has not started after 30 s, which a busy machine needs
        # now and then. It reads how long to wait from this variable alone: the service belongs to
        # the process, not to the run.
        os.environ.setdefault("WANDB__SERVICE_WAIT", str(_SERVICE_WAIT))
        # "allow" continues the run of this id, or begins it.
        kwargs = {"project": config.output.wandb_project, "id": _drawn_id(where / "wandb_id"), "resume": "allow"}
        loggers.append(get_logger("wandb", str(where), where.name, wandb_kwargs=kwargs))
    if config.output.trackio:
        # trackio continues the run of a name, so that the name has to be this run's alone.
        name = f"{where.name}-{_drawn_id(where / 'trackio_id')}"
        loggers.append(TrackioRun(name, config.output.trackio_project, embed=False))
    for target in loggers:
        # As text, because TensorBoard takes no lists, dictionaries or None.
        target.log_hparams({name: str(value) for name, value in config.values().items()})
    return loggers


class TrackioRun(TrackioLogger):
    """TorchRL's logger, with the metrics of an iteration as one row instead of a row for each."""

    def log_metrics(
        self, metrics: dict[str, Any] | TensorDictBase, step: int | None = None, *, keys_sep: str = "/"
    ) -> dict[str, Any]:
        """Log numbers by their names."""
        values = dict(metrics.flatten_keys(keys_sep).items() if isinstance(metrics, TensorDictBase) else metrics)
        numbers = {name: float(value) for name, value in values.items()}
        self.experiment.log(numbers, step=step)
        return numbers


def rewind_tensorboard(target: Logger, steps: int) -> None:
    """Tell TensorBoard to drop what it has after ``steps``: the resumed run writes it again. Other
    loggers stay as they are."""
    if isinstance(target, TensorboardLogger):
        # An event file is only appended to; a session that starts at a step hides what was logged
        # after it.
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        start = SessionLog(status=SessionLog.START)
        target.experiment.file_writer.add_event(Event(step=steps + 1, session_log=start))


def _drawn_id(path: Path) -> str:
    """The run's id in a tracker, drawn once and kept in its folder: a resumed run continues
    there."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, uuid.uuid4().hex[:8])
    return path.read_text()
