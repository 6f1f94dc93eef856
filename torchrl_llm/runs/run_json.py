"""The JSON files of a run as its report and comparisons read them, which may be a stranger's:
:func:`read_json`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import MISSING, fields
from functools import partial
from pathlib import Path
from typing import Any

from torchrl_llm.metrics.paired import PairedComparison
from torchrl_llm.utils.options import fits
from torchrl_llm.utils.terminal import one_line


def read_json(path: Path, problems: list[str]) -> dict[str, Any]:
    """The content of one of the files; empty without it. Texts are on one line, and steer no
    terminal.

    Args:
        path: the file, ``run.json``, ``result.json`` or the file of an evaluation.
        problems: gets what could not be read, and entries that are of another kind than a run
            writes. These are left out.
    """
    if not path.exists():
        return {}
    try:
        content = _plain(json.loads(path.read_text()))
    except (OSError, ValueError, RecursionError) as error:
        problems.append(one_line(f"{path.name} could not be read: {error}"))
        return {}
    if not isinstance(content, dict):
        problems.append(f"{path.name} could not be read: expected an object, {{...}}.")
        return {}
    known = {name: value for name, value in content.items() if value is not None}
    wrong = [name for name, value in known.items() if not _fits(name, value)]
    problems += [f"{path.name}: {name} is {str(content[name])!r:.80}, and is left out." for name in wrong]
    return {name: value for name, value in known.items() if name not in wrong}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {one_line(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return one_line(value) if isinstance(value, str) else value


def _is_number(value: Any) -> bool:
    # A larger integer has no float, which a table would show.
    return isinstance(value, int | float) and not isinstance(value, bool) and (value != value or -1e300 < value < 1e300)


def _is_paired(value: Any) -> bool:
    named = fits(value, dict) and all(map(_is_number, value.values()))
    known = {each.name: each.default is MISSING for each in fields(PairedComparison)}
    return named and known.keys() >= value.keys() >= {name for name, needed in known.items() if needed}


_NUMBERS = r"(success|reward|turns|penalized|response_length)(_before|_after)?|episodes|iterations|faults|tasks|task_overlap|seed"
_KINDS: dict[str, Callable[[Any], bool]] = {
    rf"{_NUMBERS}|wall_s|cpu_s|peak_rss_mb|evaluation_(tasks|task_overlap|faults)": _is_number,
    r"success(_before)?_ci95": lambda value: fits(value, list[Any]) and len(value) == 2 and all(map(_is_number, value)),
    "outcomes": lambda value: fits(value, str) and re.fullmatch("[01]*", value) is not None,
    "task_digest|beginnings|started|title|model|algo|stop_reason": partial(fits, hint=str),
    "paired": _is_paired,
    "same_games": partial(fits, hint=bool),
    "settings": lambda value: fits(value, dict) and all(fits(text, str) for text in value.values()),
    "changed": lambda value: fits(value, dict) and all(fits(pair, tuple[Any, Any]) for pair in value.values()),
    "environment": lambda value: fits(value, dict) and fits(value.get("versions", {}), dict),
    "machine|environments": partial(fits, hint=dict),
}
"""Names of entries, as patterns, and whether a value is of the kind that runs write. Any other
entry is shown as text, if at all."""


def _fits(name: str, value: Any) -> bool:
    return all(kind(value) for pattern, kind in _KINDS.items() if re.fullmatch(pattern, name))
