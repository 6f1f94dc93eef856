"""Texts that act where they are not escaped, planted in every file of a folder that commands
read."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml
from safetensors import safe_open
from safetensors.numpy import save_file

from torchrl_llm.runs.checkpoint_files import write_sums

HALF = "\ud800"
PAYLOAD = (
    f"\x1b]0;owned\x07\x1b[2J\x9b1;31m\x08\r\x00\u202efdp\u200b{HALF}[red]bold[/red]<script>alert(1)</script>`]("
    "![x](http://127.0.0.1:9/x)\n# all runs passed\n{{ 7 * 7 }}$\\frac{1}$ !!python/object/apply:os.system [id]"
)
"""Escapes, a change of direction, half a character, and markup of rich, HTML, Markdown, Jinja,
LaTeX and YAML."""


def everywhere(value: Any) -> Any:
    """JSON with the payload behind every text, and as a further entry of every object."""
    if isinstance(value, dict):
        return {name: everywhere(each) for name, each in value.items()} | {PAYLOAD: PAYLOAD}
    if isinstance(value, list):
        return [everywhere(each) for each in value]
    return value + PAYLOAD if isinstance(value, str) else value


def in_values(value: Any) -> Any:
    """JSON with the payload behind texts of several words alone, so that more of it is read."""
    if isinstance(value, dict):
        return {name: in_values(each) for name, each in value.items()}
    if isinstance(value, list):
        return [in_values(each) for each in value]
    return value + PAYLOAD if isinstance(value, str) and " " in value else value


def one_by_one(value: Any, depth: int = 3) -> Iterator[Any]:
    """JSON with one of its entries replaced by the payload."""
    if isinstance(value, dict) and depth:
        for name, each in value.items():
            for changed in one_by_one(each, depth - 1):
                yield value | {name: changed}
    elif isinstance(value, list) and value and depth:
        for changed in one_by_one(value[0], depth - 1):
            yield [changed, *value[1:]]
    yield PAYLOAD


def plant(file: Path, change: Callable[[Any], Any]) -> None:
    """Change the content of a file: of JSON, of YAML, of a recording's description, or else a
    text."""
    if file.suffix == ".json":
        file.write_text(json.dumps(change(json.loads(file.read_text()))))
    elif file.suffix == ".yaml":
        file.write_text(json.dumps(change(yaml.safe_load(file.read_text()))))  # JSON is YAML too
    elif file.suffix == ".safetensors":
        with safe_open(file, "numpy") as opened:
            about = json.loads(opened.metadata()["torchrl_llm"])
            arrays = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118, it is no dictionary
        save_file(arrays, file, {"torchrl_llm": json.dumps(change(about))})
    else:
        file.write_text(change(file.read_text()).replace(HALF, ""), newline="")
    for folder in file.parents:
        if (folder / "sums.json").is_file():
            write_sums(folder)
