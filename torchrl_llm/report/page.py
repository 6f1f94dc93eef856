"""Puts the page together: :func:`write_report`."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from torchrl_llm.report import summary
from torchrl_llm.report.curves import as_metrics, draw_curves
from torchrl_llm.report.episodes import QUANTITIES, GroupEncoder, compressed, token_values
from torchrl_llm.runs.episode_texts import episode_texts, markdown
from torchrl_llm.runs.outputs import with_final
from torchrl_llm.runs.recorded_groups import Group, groups_of
from torchrl_llm.runs.recording import Recording
from torchrl_llm.runs.run_files import RunFiles
from torchrl_llm.utils.files import write_text

NAME, EPISODES = "report.html", "episodes.md"
"""The page's file, and the file of its episodes as text."""

_OF_A_RECORDING = 4
"""Episodes of each recording in :data:`EPISODES`."""

LIMIT = 5_000_000
"""Bytes of a page, unless it is to be full: it opens in a second, and can be sent by mail."""


def write_report(folder: str | Path, *, full: bool = False) -> Path:
    """Write the run report: one HTML file that needs no server and no network, and episodes as text
    in one of Markdown.

    It has a summary with learning curves (with matplotlib, ``pip install "torchrl-llm[report]"``),
    the recorded episodes turn by turn, groups as tries, and the same task across iterations. Texts
    of environments and models are data in it: they are compressed in blocks, shown as text, and its
    content security policy allows no other script than its own. ``episodes.md`` has the text of
    four episodes of each recording, if there is one.

    Args:
        folder: the ``output_dir`` of a run; one that still runs, was interrupted, or has no
            recordings will do.
        full: embed every recorded group; else as many as fit into 5 MB, and the page says how many
            were left out.

    Returns:
        The file, ``report.html`` in ``folder``.

    Raises:
        FileNotFoundError: there is nothing of a run in ``folder``.

    Examples:
        >>> write_report("runs/none")
        Traceback (most recent call last):
        FileNotFoundError: runs/none is not a folder; expected the output_dir of a run.
    """
    folder = Path(folder)
    files = RunFiles.of(folder)
    page = _Page(files)
    page.add_groups(None if full else LIMIT)
    path = folder / NAME
    write_text(path, page.render())
    if page.recordings:
        write_text(folder / EPISODES, page.episodes())
    return path


@dataclass
class _Page:
    """The parts of a page.

    Attributes:
        files: of the run.
        encoder: of the groups in it.
        groups: description and block of each, in the order of the run.
        left_out: groups that are recorded and not in it.
    """

    files: RunFiles
    encoder: GroupEncoder = field(default_factory=GroupEncoder)
    groups: list[tuple[dict[str, Any], str]] = field(default_factory=list)
    left_out: int = 0

    def __post_init__(self) -> None:
        read = [self.files.read(path) for path in self.files.recordings]
        self.recordings: list[Recording] = [each for each in read if each is not None]
        after = {name.removesuffix("_after"): value for name, value in self.files.result.items()}
        history = with_final(self.files.history, as_metrics(after) if after.get("success") is not None else {})
        self.curves = draw_curves(history, as_metrics(self.files.before))

    def add_groups(self, limit: int | None) -> None:
        """Encode the recorded groups, those that matter most first, until the page has ``limit``
        bytes."""
        ordered = by_importance([list(groups_of(each, number)) for number, each in enumerate(self.recordings)])
        size = len(self.render().encode())
        for position, group in enumerate(ordered):
            known = len(self.encoder.pieces)
            about, block = self.encoder.encode(group)
            # What it adds to the index is compressed with what the others add, to a third or less.
            added = len(json.dumps([about, self.encoder.pieces[known:]]))
            size += len(block) + 80 + added // 2
            # The first group is always in, however large: a page without any would show no episode.
            if limit is not None and size > limit and position:
                self.left_out = len(ordered) - position
                break
            self.groups.append((about, block))
        self.groups.sort(key=lambda each: each[0]["recording"])

    def render(self) -> str:
        """The whole page as text."""
        # Titles, settings and texts may be a stranger's: all are escaped. A name that the template
        # misspells is an error, and not an empty place.
        environment = Environment(
            loader=PackageLoader("torchrl_llm.report", "."),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        script, style = (
            (resources.files("torchrl_llm.report") / name).read_text("utf-8") for name in ("page.js", "page.css")
        )
        # The page's content security policy allows this one script, by its hash.
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        return environment.get_template("page.html.jinja").render(
            script=script,
            style=style,
            script_hash=f"sha256-{digest}",
            index=compressed(json.dumps(self._index(), allow_nan=False).encode()),
            blocks=[block for _, block in self.groups],
            **self._summary(),
        )

    def episodes(self) -> str:
        """Some episodes of each recording as Markdown, in the order of the run."""
        return "\n".join(markdown(each, episode_texts(each, _OF_A_RECORDING)) for each in self.recordings)

    def _index(self) -> dict[str, Any]:
        names = ("kind", "iteration", "steps", "gamma")
        recordings = [
            {"label": _label(each), **{name: getattr(each, name) for name in names}, "missing": token_values(each)[1]}
            for each in self.recordings
        ]
        groups = [about for about, _ in self.groups]
        return {"pieces": self.encoder.pieces, "recordings": recordings, "groups": groups, "quantities": QUANTITIES}

    def _summary(self) -> dict[str, Any]:
        files = self.files
        stop = files.result.get("stop_reason") or files.info.get("stop_reason")
        return {
            "title": files.info.get("title") or _title(files),
            "folder": files.folder.absolute().name,
            "started": f"{str(files.info['started'])[:19].replace('T', ' ')} UTC" if "started" in files.info else "",
            "model": files.info.get("model", ""),
            "seed": str(files.info.get("seed", files.result.get("seed", ""))),
            "stop": str(stop) if stop else "it still runs, or was killed",
            "headline": summary.headline(files),
            "outcome": summary.outcome(files),
            "paired": summary.paired(files),
            "evaluation_tasks": files.result.get("evaluation_tasks"),
            "final": files.before.get("episodes"),
            "costs": summary.costs(files),
            "curves": self.curves,
            "has_matplotlib": find_spec("matplotlib") is not None,
            "warnings": summary.warnings(files.history, teacher="teacher" in files.info.get("changed", {})),
            "about": summary.about(files),
            "problems": files.problems,
            "left_out": self.left_out,
            "shown": len(self.groups),
            "episodes": sum(len(about["episodes"]) for about, _ in self.groups),
        }


def _title(files: RunFiles) -> str:
    parts = [str(files.result[name]) for name in ("algo", "env_name") if name in files.result]
    return " on ".join(parts) or files.folder.absolute().name


def _label(recording: Recording) -> str:
    named = {"before": "before training", "after": "after training"}
    return named.get(recording.kind, f"iteration {recording.iteration}")


def by_importance(groups: list[list[Group]]) -> list[Group]:
    """The groups of all recordings, those that a page must have first: the ends of the run, then
    what halves the gaps.

    Args:
        groups: of each recording, in the order of the run.
    """
    order = list(spread(len(groups)))
    most = max(map(len, groups), default=0)
    # By rank in their recording first: the same task in all recordings before a second task.
    return [groups[number][rank] for rank in range(most) for number in order if rank < len(groups[number])]


def spread(count: int) -> Iterator[int]:
    """0 to ``count - 1`` in an order whose every beginning is spread over the whole: the ends, then
    what halves the gaps.

    Examples:
        >>> list(spread(9))
        [8, 0, 4, 2, 6, 1, 3, 5, 7]
    """
    given = [count - 1, 0][: count if count < 2 else 2]
    yield from given
    seen, step = set(given), max(1, 1 << max(0, (count - 1).bit_length() - 1))
    while step >= 1:
        new = [number for number in range(0, count, step) if number not in seen]
        seen |= set(new)
        yield from new
        step //= 2
