"""Settings in YAML: read by the annotations of a class's options, and written so that they are read
as the same."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import yaml
from yaml.constructor import ConstructorError
from yaml.scanner import ScannerError

from torchrl_llm.utils.files import write_text
from torchrl_llm.utils.hints import system_of
from torchrl_llm.utils.options import Checked, ConfigError, Option, check_value, fits, options_of
from torchrl_llm.utils.sections import choices_of, meant, section_of, sections_of, settings_in, settings_of

RENAMED = {
    "adaptive_tasks": ("adaptive_mixture", "0.2.0"),
    "keep_discount": ("discounted_objective", "0.2.0"),
    "alone": ("fallback", "0.3.0"),
    "history": ("contexts", "0.3.0"),
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


def read_settings(path: Path, cls: type[Checked], *, by_name: bool = False) -> Iterator[tuple[str, Any]]:
    """The settings of a YAML file, one by one, without the names of their sections.

    Args:
        path: the file.
        cls: the class of the settings, whose sections the file has
            (:func:`~torchrl_llm.utils.sections.sections_of`).
        by_name: the file was written by this package, maybe by version 0.2: take settings outside
            of sections too, and null for an option of an algorithm, which stood for its default.

    Raises:
        ConfigError: the file cannot be read, or a line is wrong; the message names the line.
    """
    root = composed(path)
    if root is not None:
        known = settings_of(cls) if by_name else settings_in(cls, None)
        yield from _Reader(path, cls, nulls=by_name).read(root, {**options_of(cls), **known})


@dataclass
class _Reader:
    """Reads the settings of a class from a file."""

    path: Path
    cls: type[Checked]
    nulls: bool = False

    def read(
        self, node: yaml.Node, known: Mapping[str, Option], section: str | None = None
    ) -> Iterator[tuple[str, Any]]:
        """The settings of a section, or of the whole file."""
        if section is not None and isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:null":
            return  # all of it is left out, or a comment
        if not isinstance(node, yaml.MappingNode):
            line, below = (f", line {node.start_mark.line + 1}", f" below {section}:") if section else ("", "")
            raise ConfigError(f"{self.path}{line}: expected lines of the form 'field: value'{below}.")
        for where, name, value in fields_of(self.path, node):
            if name not in known:
                raise ConfigError(f"{where} {self._wrong(name, node, known, section)}")
            if section is None and name in sections_of(self.cls):
                yield from self.read(value, settings_in(self.cls, name), name)
                continue
            try:
                of_class = section_of(self.cls, name) in choices_of(self.cls).values()
                hint = known[name].hint | None if self.nulls and of_class else known[name].hint
                read = _value(f"{where} {name}", value, value.value, hint)
            except yaml.MarkedYAMLError as error:  # such as a key that is a list
                raise ConfigError(f"{where} {name} cannot be read: {error.problem}.") from error
            yield name, read

    def _wrong(self, name: str, node: yaml.MappingNode, known: Mapping[str, Option], section: str | None) -> str:
        """What is wrong with a name, what it was meant to be, and for which other system the file
        is written, if it is for one."""
        sections, settings = sections_of(self.cls), settings_of(self.cls)
        given = [str(each.value) for each, _ in node.value]
        if name in settings:
            place = section_of(self.cls, name)
            stands = f"{name} stands in {'no section, but beside them' if place is None else f'the section {place}'}"
            old = section is None and sections.keys().isdisjoint(given)
            return f"{stands}{': torchrl-llm migrate translates a file without sections, as they were before 0.3.0' if old else ''}."
        if name in sections:
            return f"{name} is a section of its own, and stands in no other."
        said = f"{name} is not a setting{'' if section is None else f' of {section}'}."
        new, since = RENAMED.get(name, ("", ""))
        if new in settings:
            return f"{said} It is {new} since {since}."
        wrong = [each for each in given if each not in known]
        system = system_of(wrong) if 2 * len(wrong) >= len(given) else None
        said += meant(self.cls, name, here=section, system=system)
        if system is None:
            listed = section is None and sections and said.endswith("setting.")
            return f"{said} The sections are {', '.join(sections)}." if listed else said
        page = "migrating_from_agilerl" if system == "AgileRL" else "other_systems"
        return f"{said} The file looks like one for {system}; docs/{page}.md says what its names are here."


def fields_of(
    path: Path, node: yaml.MappingNode, renamed: Mapping[str, tuple[str, str]] = MappingProxyType({})
) -> Iterator[tuple[str, str, yaml.Node]]:
    """Where each field of a mapping stands, its name (by :data:`RENAMED`, the new one), and its
    value.

    Raises:
        ConfigError: a field is not text, or is given twice.
    """
    seen: set[str] = set()
    for key, value in node.value:
        where = f"{path}, line {key.start_mark.line + 1}:"
        if not isinstance(key, yaml.ScalarNode):
            raise ConfigError(f"{where} expected 'field: value', and the field is not text.")
        name, _ = renamed.get(key.value, (key.value, ""))
        if name in seen:
            raise ConfigError(f"{where} {name} is given twice.")
        seen.add(name)
        yield where, name, value


def composed(path: Path) -> yaml.Node | None:
    """The document of a YAML file, with the places of its values.

    Raises:
        ConfigError: it cannot be read, or is no plain data.
    """
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
