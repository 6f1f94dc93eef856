"""The metrics of a run as one table, ``metrics.csv``: a row for each iteration, a column for each
metric.

Wide, because a row is then what one iteration measured, and plots, filters and correlations need no
pivot.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from io import StringIO
from pathlib import Path

FILE = "metrics.csv"
"""The table in the folder of a run."""

_FIRST = ("iteration", "rollout/steps", "rollout/episodes")
"""The first columns: what the other ones are plotted over."""


def table_columns(history: Iterable[Mapping[str, float]]) -> list[str]:
    """The columns of the table of these metrics: iteration, turns, episodes, then metrics in order
    of appearance.

    Examples:
        >>> table_columns([{"rollout/reward": 0.5}, {"rollout/reward": 1.0, "evaluation/success": 0.25}])
        ['iteration', 'rollout/steps', 'rollout/episodes', 'rollout/reward', 'evaluation/success']
    """
    return list(dict.fromkeys([*_FIRST, *(name for metrics in history for name in metrics)]))


def table_text(history: Sequence[Mapping[str, float]]) -> str:
    """The table as text, header included.

    Args:
        history: the metrics of each iteration, from the first (``LLMTrainer.history``).

    Examples:
        >>> print(table_text([{"rollout/steps": 8.0}, {"rollout/steps": 16.0, "evaluation/success": 0.25}]), end="")
        iteration,rollout/steps,rollout/episodes,evaluation/success
        1,8.0,,
        2,16.0,,0.25
    """
    columns = table_columns(history)
    rows = (row_text(columns, number, metrics) for number, metrics in enumerate(history, 1))
    return _line(columns) + "".join(rows)


def row_text(columns: Iterable[str], iteration: int, metrics: Mapping[str, float]) -> str:
    """The line of an iteration, with its end; empty cells for metrics that it lacks, ``nan`` for
    one that is undefined.

    Args:
        columns: :func:`table_columns`; they name all of the metrics.
        iteration: its number, from 1.
        metrics: its metrics.
    """
    # float() prints the shortest text that reads as the same number.
    cells = {name: str(float(value)) for name, value in metrics.items()} | {"iteration": str(iteration)}
    return _line(cells.get(name, "") for name in columns)


def _line(cells: Iterable[str]) -> str:
    out = StringIO()
    csv.writer(out, lineterminator="\n").writerow(cells)
    return out.getvalue()


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The metrics of each iteration from a table; none if there is no such file.

    A last line without its end is left out: it is being written, or a crash has cut it.

    Raises:
        ValueError: the file is not such a table, or is damaged.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, FILE)
        ...     _ = path.write_text(table_text([{"rollout/steps": 8.0}]) + "2,16")
        ...     read_metrics(path)
        [{'rollout/steps': 8.0}]
    """
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    columns, *rows = list(csv.reader(StringIO(text[: text.rfind("\n") + 1]))) or [[]]
    if columns[:1] != ["iteration"]:
        raise ValueError(
            f"{path} begins with {','.join(columns)[:60]!r}; expected a table of metrics, 'iteration,...'."
        )
    named = (zip(columns[1:], row[1:], strict=True) for row in rows)
    return [{name: float(cell) for name, cell in cells if cell} for cells in named]
