"""Settings in YAML: read by the annotations of a class's options, and written so that they are read
as the same."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import yaml
from yaml.constructor import ConstructorError
from yaml.scanner import ScannerError

from torchrl_llm.utils.files import write_text
from torchrl_llm.utils.hints import nearest, system_of
from torchrl_llm.utils.options import ConfigError, Option, check_value, fits

RENAMED = {
    "adaptive_tasks": ("adaptive_mixture", "0.2.0"),
    "keep_discount": ("discounted_objective", "0.2.0"),
    "alone": ("fallback", "0.3.0"),
}
"""Old name of a setting -> its name now, and since which version, where the nearest name is
another."""


class _NoDataError(ScannerError):
    """YAML that is not plain data."""


class Loader(yaml.SafeLoader):
    """Scalars of YAML 1.2's core schema, decimal only; no tags, and no aliases.

    PyYAML reads YAML 1.1, where ``1e-3`` and ``no`` are something else than they look like, ``010``
    is 8, ``1:30`` is 90 and ``2026-01-01`` is a date. Here ``1e-3`` is a number and ``010`` is 10;
    ``no``, ``1:30`` and ``0x10`` are text.
    """

    # A tag asks for something else than data, and a few aliases of aliases are a value without end.
    def fetch_tag(self) -> None:
        """Refuse a tag, such as ``!!python/name:os.system``."""
        self._refuse("found a tag (!...)")

    def fetch_alias(self) -> None:
        """Refuse an alias, such as ``*name``."""
        self._refuse("found an alias (*...)")

    def _refuse(self, found: str) -> NoReturn:
        raise _NoDataError(
            None, None, f"{found}: settings have none; write the value itself, or quote the text", self.get_mark()
        )


def _integer(_: Any, node: Any) -> int:
    try:
        return int(node.value)
    except ValueError as error:  # of more digits than Python reads
        problem = f"an integer of {len(node.value)} digits"
        raise ConstructorError(None, None, problem, node.start_mark) from error


Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag.rpartition(":")[2] in ("null", "merge")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"^[-+]?\d+$"), list("-+0123456789"))
Loader.add_constructor("tag:yaml.org,2002:int", _integer)
_NUMBER = r"[-+]?(\d+\.?\d*([eE][-+]?\d+)?|\.\d+([eE][-+]?\d+)?|\.(inf|Inf|INF))|\.(nan|NaN|NAN)"
Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(rf"^({_NUMBER})$"), list("-+.0123456789"))
Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"^(true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)


class _Dumper(yaml.SafeDumper):
    """Quotes text that YAML 1.1 or :class:`Loader` would read as something else."""


_Dumper.yaml_implicit_resolvers = {
    first: [*yaml.SafeDumper.yaml_implicit_resolvers.get(first, []), *Loader.yaml_implicit_resolvers.get(first, [])]
    for first in {*yaml.SafeDumper.yaml_implicit_resolvers, *Loader.yaml_implicit_resolvers}
}


def read_settings(path: Path, known: Mapping[str, Option]) -> Iterator[tuple[str, Any]]:
    """The settings of a YAML file, one by one.

    Args:
        path: the file.
        known: the settings that there are, with their annotations.

    Raises:
        ConfigError: the file cannot be read, or a line is wrong; the message names the line.
    """
    root = _composed(path)
    if root is None:
        return
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{path}: expected lines of the form 'field: value'.")
    seen: set[str] = set()
    for key, node in root.value:
        where = f"{path}, line {key.start_mark.line + 1}:"
        if not isinstance(key, yaml.ScalarNode):
            raise ConfigError(f"{where} expected 'field: value', and the field is not text.")
        if key.value not in known:
            raise ConfigError(f"{where} {key.value} is not a setting.{_hint(key, node, root, known)}")
        if key.value in seen:
            raise ConfigError(f"{where} {key.value} is given twice.")
        seen.add(key.value)
        try:
            value = _value(f"{where} {key.value}", node, node.value, known[key.value].hint)
        except yaml.MarkedYAMLError as error:  # such as a key that is a list
            raise ConfigError(f"{where} {key.value} cannot be read: {error.problem}.") from error
        yield key.value, value


def _hint(key: yaml.Node, node: yaml.Node, root: yaml.MappingNode, known: Mapping[str, Option]) -> str:
    """What a wrong name was meant to be, and for which other system the file is written, if it is
    for one."""
    name = str(key.value)
    new, since = RENAMED.get(name, ("", ""))
    if new in known:
        return f" It is {new} since {since}."
    wrong = [str(each.value) for each, _ in root.value if each.value not in known]
    system = system_of(wrong) if 2 * len(wrong) >= len(root.value) else None
    nested = isinstance(node, yaml.MappingNode)
    meant = "" if nested and system is None else nearest(name, [*known], system=system)
    flat = " Settings are flat: write those of a section without it." if nested else ""
    if system is None:
        return meant + flat
    page = "migrating_from_agilerl" if system == "AgileRL" else "other_systems"
    return f"{meant}{flat} The file looks like one for {system}; docs/{page}.md says what its names are here."


def _composed(path: Path) -> yaml.Node | None:
    try:
        return yaml.compose(path.read_text(encoding="utf-8"), Loader)
    except OSError as error:
        raise ConfigError(f"The settings file '{path}' cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: this is not text in UTF-8: {error.reason} at byte {error.start}.") from error
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        if isinstance(error, _NoDataError):
            raise ConfigError(f"{path}, line {line}: {error.problem}.") from error
        what = f"this is not YAML, {error.problem}; expected lines of the form 'field: value'"
        raise ConfigError(f"{path}, line {line}: {what}.") from error
    except yaml.YAMLError as error:  # of a character that YAML forbids
        raise ConfigError(f"{path}: this is not YAML, {' '.join(str(error).split())}.") from error
    except RecursionError as error:
        raise ConfigError(f"{path}: this is not a file of settings, it has brackets without end.") from error


def read_value(name: str, text: str, hint: Any) -> Any:
    """The value that a text spells in YAML; the text itself, if it is not YAML or the annotation
    takes only text.

    Args:
        name: for the error.
        text: such as ``"1e-3"`` or ``"[0.2, 0.3]"``.
        hint: the annotation.

    Raises:
        ConfigError: the value does not fit the annotation.

    Examples:
        >>> read_value("lr", "1e-3", float), read_value("names", "[a, b]", list[str]), read_value("name", "7", str)
        (0.001, ['a', 'b'], '7')
    """
    try:
        return _value(name, yaml.compose(text, Loader), text, hint)
    except (yaml.YAMLError, RecursionError):  # such as an open bracket
        return text


def _value(name: str, node: yaml.Node | None, text: Any, hint: Any) -> Any:
    loader = Loader("")
    try:
        value = text if node is None else loader.construct_document(node)
    finally:
        loader.dispose()
    if isinstance(text, str) and (isinstance(value, str) or (not fits(value, hint) and fits(text, hint))):
        value = text
    if isinstance(value, float) and value.is_integer() and not fits(value, hint) and fits(int(value), hint):
        value = int(value)  # 1e5
    try:
        check_value(name, value, hint)
    except ConfigError as error:
        quoted = isinstance(node, yaml.ScalarNode) and node.style in ("'", '"')
        if quoted and fits(read_value(name, str(value), Any), hint):
            raise ConfigError(f"{error} Leave out the quotes.") from error
        raise
    return value


def write_settings(settings: Mapping[str, Any], path: Path) -> None:
    """Write settings to a YAML file; an older one is replaced atomically."""
    write_text(path, as_yaml(settings))


def as_yaml(settings: Mapping[str, Any]) -> str:
    """Settings as the text of a YAML file.

    Examples:
        >>> as_yaml({"lr_actor": 1e-5, "wandb_project": "1e5"})
        "lr_actor: 1.0e-05\\nwandb_project: '1e5'\\n"
    """
    return yaml.dump(dict(settings), Dumper=_Dumper, sort_keys=False, allow_unicode=True)
