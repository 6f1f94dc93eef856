"""What the folder of a run holds for its report: :class:`RunFiles`."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchrl_llm.runs.recording import FOLDER, Recording, RecordingError, read_recording
from torchrl_llm.runs.run_json import read_json
from torchrl_llm.runs.table import FILE as METRICS
from torchrl_llm.runs.table import read_metrics
from torchrl_llm.utils.terminal import one_line


@dataclass(frozen=True)
class RunFiles:
    """The files of a run as its report reads them. A run may lack any of them: it still runs, or an
    older version wrote it.

    Attributes:
        folder: the run's.
        info: ``run.json``, see :func:`torchrl_llm.runs.run_info.run_info`; empty without it.
        result: ``result.json``; empty without it, and where the run was resumed since.
        before: ``evaluation_before.json``; empty without it.
        after: ``evaluation_after.json``; empty without it, and where the result does not come from
            an end.
        history: the metrics of every iteration that are finite numbers, from ``metrics.csv``.
        recordings: files of recorded episodes: those before training, of training in order, after
            training.
    """

    folder: Path
    info: Mapping[str, Any]
    result: Mapping[str, Any]
    before: Mapping[str, Any]
    after: Mapping[str, Any]
    history: list[dict[str, float]]
    recordings: list[Path]
    problems: list[str] = field(default_factory=list)
    """Files that could not be read, and why."""

    @classmethod
    def of(cls, folder: Path) -> RunFiles:
        """Read everything but the recordings.

        Raises:
            FileNotFoundError: there is no such folder, or nothing of a run in it.
        """
        if not folder.is_dir():
            raise FileNotFoundError(f"{folder} is not a folder; expected the output_dir of a run.")
        problems: list[str] = []
        names = ("run.json", "result.json", "evaluation_before.json", "evaluation_after.json")
        info, result, before, after = (read_json(folder / name, problems) for name in names)
        history, recordings = _history(folder / METRICS, problems), _recordings(folder / FOLDER)
        if not _is_of(result, info, history):
            result, recordings = {}, [path for path in recordings if path.stem != "after"]
        if result.get("success_after") is None:
            after = {}
        if not (info or result or before or history or recordings):
            raise FileNotFoundError(
                f"{folder} holds nothing of a run (run.json, result.json, {METRICS}, {FOLDER}/): give the output_dir of one."
            )
        return cls(folder, info, result, before, after, history, recordings, problems)

    def read(self, path: Path) -> Recording | None:
        """A recording; ``None``: the file is damaged, which :attr:`problems` then says."""
        try:
            return read_recording(path)
        except RecordingError as error:
            self.problems.append(one_line(str(error)))
            return None


def _is_of(result: Mapping[str, Any], info: Mapping[str, Any], history: Sequence[Mapping[str, float]]) -> bool:
    """Whether a result belongs to the run's last start: a run that is resumed has the result of its
    earlier end, perhaps in another setting."""
    if result.get("iterations", len(history)) < len(history):
        return False
    said = result.get("started"), info.get("started")  # an earlier version did not say
    return None in said or said[0] == said[1]


def _recordings(folder: Path) -> list[Path]:
    before, after = (folder / f"{kind}.safetensors" for kind in ("before", "after"))
    order = [before, *sorted(folder.glob("iteration-*.safetensors")), after]
    return [path for path in order if path.exists()]


def _history(path: Path, problems: list[str]) -> list[dict[str, float]]:
    try:
        history = read_metrics(path)
        history = [{name: value for name, value in each.items() if math.isfinite(value)} for each in history]
        if not all("rollout/steps" in metrics for metrics in history):
            raise ValueError("an iteration has no rollout/steps.")
    except (OSError, ValueError, csv.Error) as error:
        problems.append(one_line(f"{path.name} could not be read: {error}"))
        return []
    return history
