"""Command line and YAML -> :class:`~torchrl_llm.trainers.RunConfig`, read by the annotations of its fields."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml

from torchrl_llm.options import ConfigError, IdleError, check_value, describe, fits, meanings, nearest, options_of
from torchrl_llm.trainers.config import RunConfig, shown_default


def parse_run_config(argv: Sequence[str] | None = None, *, description: str | None = None) -> RunConfig:
    """Read the settings of a run from ``--config FILE.yaml`` and flags; a later one overrides an earlier one.

    Every field of :class:`~torchrl_llm.trainers.RunConfig` is a flag (``--max-steps`` and ``--max_steps`` are the same), a
    bare flag of a boolean field means true, and values are YAML. Integers are decimal: ``010`` is 10, ``1e5`` is 100000,
    ``1:30`` and ``0x10`` are refused. An unknown field, a wrong value and contradictory fields are errors that name the
    flag, or the file and its line.

    Args:
        argv: the arguments; None takes those of the process.
        description: shown by ``--help``.

    Returns:
        The settings. Exits with a message as :mod:`argparse` does if they are wrong.

    Examples:
        >>> config = parse_run_config(["--algo", "GRPO", "--batch-size", "8", "--group-size", "4", "--wandb"])
        >>> config.algo, config.batch_size, config.wandb
        ('GRPO', 8, True)
    """
    parser = _parser(description)
    # Not parse_args(), whose error does not name the nearest setting.
    settings, unknown = parser.parse_known_args(_underscored(sys.argv[1:] if argv is None else argv))
    if unknown:
        name = unknown[0].partition("=")[0]
        flags = [f"--{field}" for field in options_of(RunConfig)]
        parser.error(f"{name} is no setting.{nearest(name, flags)}")
    try:
        return _run_config(vars(settings), parser.files)
    except ConfigError as error:
        parser.error(str(error))


def _run_config(settings: dict[str, Any], files: dict[str, Path]) -> RunConfig:
    """The settings, without those of a file that a flag leaves without effect.

    If that flag is the algorithm, they are refused: a file is tuned for one algorithm, and its other numbers would not fit.

    Args:
        settings: names and values.
        files: the file of each setting that is from one.
    """
    while True:
        try:
            return RunConfig(**settings)
        except IdleError as error:
            idle = [name for name in error.names if name in settings and name in files]
            by_flag = [name for name in error.under if name in settings and name not in files]
            if not (idle and by_flag):
                raise
            if "algo" in by_flag:
                where = ", ".join(dict.fromkeys(str(files[name]) for name in idle))
                flags = " ".join(f"--{name} {_default_as_text(name)}" for name in idle)
                raise ConfigError(
                    f"{error} They are from {where}: remove them there, or add {flags} to the command line."
                ) from error
            for name in idle:
                del settings[name]


def _default_as_text(name: str) -> str:
    default = options_of(RunConfig)[name].default
    return default if isinstance(default, str) else json.dumps(default)


def resume_command(config: RunConfig) -> str:
    """The command line that resumes a run which this process began from :func:`parse_run_config`.

    Args:
        config: the run's settings.

    Examples:
        >>> resume_command(RunConfig()).endswith(" --resume")
        True
    """
    given = _without(sys.argv, "--resume", "--overwrite")
    undone = ["--overwrite=false"] if config.overwrite and given == _without(sys.argv, "--resume") else []
    undone += ["--resume_from=null"] if config.resume_from is not None else []
    python = Path(sys.executable)
    here = Path.cwd()
    python = python.relative_to(here) if python.is_relative_to(here) else python
    return shlex.join([str(python), *given, *undone, "--resume"])


def _without(argv: Sequence[str], *switches: str) -> list[str]:
    """``argv`` without some switches and their values."""
    kept, dropped = [], False
    for word in argv:
        is_value = dropped and word in ("true", "false")
        dropped = word.partition("=")[0] in switches
        if not (dropped or is_value):
            kept.append(word)
    return kept


class _Parser(argparse.ArgumentParser):
    """A parser that knows which settings are from a file.

    Attributes:
        files: the file of each setting that is from one, and that no later flag gives.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.files: dict[str, Path] = {}

    def error(self, message: str) -> NoReturn:
        """Exit with the message alone: the usage has a hundred lines."""
        self.exit(2, f"{self.prog}: error: {message} (--help lists every setting.)\n")


class _Flag(argparse.Action):
    """One field of the settings."""

    hint: Any = Any

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        parser.files.pop(self.dest, None)
        try:
            setattr(namespace, self.dest, _read(str(option_string), yaml.compose(values, _Loader), values, self.hint))
        except yaml.YAMLError:  # such as an open bracket: taken as text
            setattr(namespace, self.dest, values)
        except ConfigError as error:
            parser.error(str(error))


class _File(argparse.Action):
    """``--config``: all fields of a YAML file."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        try:
            for name, value in _settings_of(Path(values)):
                setattr(namespace, name, value)
                parser.files[name] = Path(values)
        except ConfigError as error:
            parser.error(str(error))


class _Loader(yaml.SafeLoader):
    """Scalars of YAML 1.2's core schema, decimal only.

    PyYAML reads YAML 1.1, where ``1e-3`` and ``no`` are something else than they look like, ``010`` is 8, ``1:30`` is 90
    and ``2026-01-01`` is a date. Here ``1e-3`` is a number and ``010`` is 10; ``no``, ``1:30`` and ``0x10`` are text.
    """


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag.rpartition(":")[2] in ("null", "merge")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"^[-+]?\d+$"), list("-+0123456789"))
_Loader.add_constructor("tag:yaml.org,2002:int", lambda loader, node: int(node.value))
_NUMBER = r"[-+]?(\d+\.?\d*([eE][-+]?\d+)?|\.\d+([eE][-+]?\d+)?|\.(inf|Inf|INF))|\.(nan|NaN|NAN)"
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(rf"^({_NUMBER})$"), list("-+.0123456789"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"^(true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)


class _Dumper(yaml.SafeDumper):
    """Quotes text that YAML 1.1 or :class:`_Loader` would read as something else."""


_Dumper.yaml_implicit_resolvers = {
    first: [*yaml.SafeDumper.yaml_implicit_resolvers.get(first, []), *_Loader.yaml_implicit_resolvers.get(first, [])]
    for first in {*yaml.SafeDumper.yaml_implicit_resolvers, *_Loader.yaml_implicit_resolvers}
}

_FOR_THIS_START = ("resume", "resume_from", "accept_changes", "overwrite")
"""Settings about the start of a run. They are not saved, because a saved file is read by a later start."""


def save_run_config(config: RunConfig, path: str | Path) -> None:
    """Write the settings to a file that ``--config`` reads, without those about the start of a run (``resume``, ``overwrite``).

    Args:
        config: the settings.
        path: the file; an older one is replaced atomically.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_run_config(RunConfig(algo="GRPO", group_size=4), path := f"{folder}/config.yaml")
        ...     parse_run_config(["--config", path]) == RunConfig(algo="GRPO", group_size=4)
        True
    """
    settings = {name: value for name, value in config.as_json().items() if name not in _FOR_THIS_START}
    path = Path(path)
    new = path.with_name(f".{path.name}.new")
    new.write_text(yaml.dump(settings, Dumper=_Dumper, sort_keys=False, allow_unicode=True), encoding="utf-8")
    new.replace(path)


def _settings_of(path: Path) -> Iterator[tuple[str, Any]]:
    """The fields of a file; errors name its lines."""
    known = options_of(RunConfig)
    try:
        text = path.read_text()
        root = yaml.compose(text, _Loader)
    except OSError as error:
        raise ConfigError(f"--config is '{path}', which cannot be read: {error.strerror}.") from error
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"{path}, line {line}: this is no YAML, {error.problem}.") from error
    if root is None:
        return
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{path}: expected lines of the form 'field: value'.")
    seen: set[str] = set()
    for key, node in root.value:
        where = f"{path}, line {key.start_mark.line + 1}:"
        if key.value not in known:
            raise ConfigError(f"{where} {key.value} is no setting.{nearest(str(key.value), [*known])}")
        if key.value in seen:
            raise ConfigError(f"{where} {key.value} is given twice.")
        seen.add(key.value)
        yield key.value, _read(f"{where} {key.value}", node, node.value, known[key.value].hint)


def _read(name: str, node: yaml.Node | None, text: Any, hint: Any) -> Any:
    """The value of a node; the text itself, if the field takes only text."""
    loader = _Loader("")
    try:
        value = text if node is None else loader.construct_document(node)
    finally:
        loader.dispose()
    if isinstance(text, str) and (isinstance(value, str) or (not fits(value, hint) and fits(text, hint))):
        value = text
    if isinstance(value, float) and value.is_integer() and not fits(value, hint) and fits(int(value), hint):
        value = int(value)  # 1e5
    check_value(name, value, hint)
    return value


def _parser(description: str | None) -> _Parser:
    # Defaults are RunConfig's: only flags that are given may reach it, because some of its rules ask what was given.
    # No abbreviations: the next new setting could make one ambiguous.
    parser = _Parser(
        description=description, allow_abbrev=False, usage="%(prog)s [--config FILE] [--FIELD VALUE ...]", formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
    )  # fmt: skip
    parser.add_argument("--config", action=_File, metavar="FILE", help="a YAML file of the fields below")
    meaning = meanings(RunConfig)
    for name, option in options_of(RunConfig).items():
        # argparse formats help with %.
        said = f"{meaning[name]} (type: {describe(option.hint)}; default: {shown_default(name)})".replace("%", "%%")
        bare: dict[str, Any] = {"nargs": "?", "const": "true"} if option.hint is bool else {}
        flag = parser.add_argument(f"--{name}", action=_Flag, metavar="VALUE", help=said, **bare)
        flag.hint = option.hint  # type: ignore[attr-defined]
    return parser


def _underscored(argv: Sequence[str]) -> list[str]:
    """``--max-steps`` -> ``--max_steps``."""
    words = (word.partition("=") for word in argv)
    return ["--" + "".join([flag[2:].replace("-", "_"), *rest]) if flag.startswith("--") else "".join([flag, *rest])
            for flag, *rest in words]  # fmt: skip
