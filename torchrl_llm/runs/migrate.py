"""Settings as version 0.2 had them: a file of one list, put into sections (:func:`migrated`), and
what was saved (:func:`settings_of_now`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from torchrl_llm.runs.config import RunSettings
from torchrl_llm.runs.settings_file import RENAMED, Loader, composed, fields_of
from torchrl_llm.utils.hints import nearest
from torchrl_llm.utils.options import ConfigError, fits, options_of
from torchrl_llm.utils.sections import (
    alternatives_of,
    harmless_in,
    in_sections,
    section_of,
    sections_of,
    settings_in,
    settings_of,
)


def migrated(path: Path) -> str:
    """The text of a YAML file of settings, with each setting in its section under its name of
    today; comments stay above what they are about. Options of another algorithm and ``null`` for
    one of the algorithm's, which stood for its default, are left out with theirs.

    Args:
        path: a file without sections.

    Raises:
        ConfigError: the file cannot be read, has sections already, has a line that is no setting,
            or lines that cannot be moved.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = Path(folder, "old.yaml")
        ...     _ = file.write_text("algo: GRPO\\n# Small.\\nbatch_size: 8\\nlr_actor: 1e-5\\ngroup_size: 4\\n")
        ...     print(migrated(file), end="")
        algo: GRPO
        rollouts:
          # Small.
          batch_size: 8
          group_size: 4
        optim:
          lr_actor: 1e-5
    """
    root = composed(path)
    if not isinstance(root, yaml.MappingNode) or root.flow_style or not root.value:
        raise ConfigError(f"{path}: expected settings, in lines of the form 'field: value'.")
    names = [*_names(path, root)]
    indent = root.start_mark.column
    lines = [_dedented(line, indent) for line in path.read_text(encoding="utf-8-sig").splitlines()]
    ends = [_end(node) for _, node in root.value]
    starts = [_above(lines, key.start_mark.line, end) for (key, _), end in zip(root.value, [0, *ends], strict=False)]
    starts[0] = root.start_mark.line  # the comment above the first is the file's
    values = dict(zip(names, _loaded("\n".join(lines)).values(), strict=True))
    left_out = _left_out(values)
    found: dict[str, list[str]] = {name: [] for name in ("", *sections_of(RunSettings))}
    for name, (key, _), start, end in zip(names, root.value, starts, [*starts[1:], ends[-1]], strict=True):
        section, first = section_of(RunSettings, name) or "", key.start_mark.line
        said = [*lines[start:first], lines[first].replace(str(key.value), name, 1), *lines[first + 1 : end]]
        if name in left_out:
            continue
        found[section] += [f"  {line}" if section and line else line for line in said]
    parts = [([f"{section}:"] if section else []) + said for section, said in found.items() if said]
    text = "\n".join([*lines[: starts[0]], *(line for part in parts for line in part), *lines[ends[-1] :]]) + "\n"
    if _loaded(text) != in_sections(RunSettings, {name: values[name] for name in names if name not in left_out}):
        raise ConfigError(f"{path}: its lines cannot be moved as they are: write its settings into sections by hand.")
    return text


def settings_of_now(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Saved settings by name as JSON has them, with the defaults of those that there were not yet.

    Version 0.2 saved the options of all algorithms, and ``None`` for a default.

    Examples:
        >>> settings = settings_of_now({"algo": "GRPO", "scale": "none", "baseline": None, "critic_coeff": None})
        >>> settings["scale"], settings["baseline"], "critic_coeff" in settings
        ('none', 'mean', False)
    """
    saved = {RENAMED.get(name, (name, ""))[0]: value for name, value in saved.items()}
    kinds = alternatives_of(RunSettings, saved)
    of_loss, options = saved.keys() & settings_in(RunSettings, "loss").keys(), options_of(kinds["loss"])
    # 0.3 has no options of others, and None where it is a value.
    values = {name for name in of_loss if of_loss <= options.keys() and fits(None, options[name].hint)}
    left_out = _left_out(saved) - values
    saved = {name: value for name, value in saved.items() if name not in left_out}
    of_kinds = {name for section in kinds for name in settings_in(RunSettings, section)}
    defaults = {name: value for name, value in RunSettings().as_json().items() if name not in of_kinds}
    for section, kind in kinds.items():
        # Where an estimator is named, the defaults are its own, and it is not imported because a
        # file says so.
        own = {"estimator": None} if section == "loss" and saved.get("estimator") else vars(kind())
        defaults |= {kind.named_by: kind.known_as, **own}
    return {**defaults, **saved}


def _left_out(values: Mapping[str, Any]) -> set[str]:
    """What had no effect in settings of 0.2: options of other algorithms, ``None`` for a default of
    the algorithm, and defaults of other policies and collectors."""
    # What history="refuse" refused, contexts="template" follows.
    found = {"contexts"} if values.get("contexts") == "refuse" else set()
    for section, kind in alternatives_of(RunSettings, values).items():
        options, harmless = settings_in(RunSettings, section), harmless_in(RunSettings, section)
        for name in values.keys() & options.keys():
            default = options[name].default
            idle = section == "loss" or values[name] in (default, harmless.get(name, default))
            if (name not in options_of(kind) and idle) or (section == "loss" and values[name] is None):
                found.add(name)
    return found


def _dedented(line: str, indent: int) -> str:
    return line[indent:] if line[:indent].isspace() else line


def _end(node: yaml.Node) -> int:
    """The number of lines up to the last one of a value."""
    return int(node.end_mark.line + (node.end_mark.column > 0))


def _above(lines: list[str], line: int, end: int) -> int:
    """The first line of the comment right above a line, behind the value before."""
    while line > end and lines[line - 1].startswith("#"):
        line -= 1
    return line


def _loaded(text: str) -> dict[str, Any]:
    """The data of a text; none of one that is not YAML."""
    try:
        return dict(yaml.load(text, Loader))
    except (yaml.YAMLError, TypeError, ValueError):
        return {}


def _names(path: Path, root: yaml.MappingNode) -> Iterator[str]:
    """The names of today of the settings, in the order of the file."""
    for where, name, _ in fields_of(path, root, RENAMED):
        if name in sections_of(RunSettings):
            raise ConfigError(f"{where} {name} is a section: the file has them already.")
        if name not in settings_of(RunSettings):
            raise ConfigError(f"{where} {name!r} is not a setting.{nearest(name, [*settings_of(RunSettings)])}")
        yield name
