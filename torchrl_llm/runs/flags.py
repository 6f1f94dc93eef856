"""Command line and YAML -> :class:`~torchrl_llm.runs.RunSettings`, read by the annotations of its
fields."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torchrl_llm.runs.config import RunSettings, shown_default
from torchrl_llm.runs.schema import plain, title_of
from torchrl_llm.runs.settings_file import read_settings, read_value
from torchrl_llm.utils.arguments import COMMAND_LINE, ArgumentParser
from torchrl_llm.utils.options import ConfigError, IdleError, describe
from torchrl_llm.utils.sections import meanings_of, section_of, sections_of, settings_in, settings_of


def parse_settings(argv: Sequence[str] | None = None, *, description: str | None = None) -> RunSettings:
    """Read the settings of a run from ``--config FILE.yaml`` and flags; a later one overrides an
    earlier one.

    Every setting of :class:`~torchrl_llm.runs.RunSettings` is a flag (``--max-steps``,
    ``--max_steps`` and ``--trainer.max-steps`` are the same), a bare flag of a boolean field means
    true, and values are YAML. Integers are decimal: ``010`` is 10, ``1e5`` is 100000, ``1:30`` and
    ``0x10`` are refused. An unknown field, a wrong value and contradictory fields are errors that
    name the flag, or the file and its line.

    Args:
        argv: the arguments; None takes the process's.
        description: shown by ``--help``.

    Returns:
        The settings. Exits with a message as :mod:`argparse` does if they are wrong.

    Examples:
        >>> config = parse_settings(["--algo", "GRPO", "--batch-size", "8", "--group-size", "4", "--wandb"])
        >>> config.algo, config.rollouts.batch_size, config.output.wandb
        ('GRPO', 8, True)
    """
    parser = ArgumentParser(description=description, noun="setting", usage=USAGE)
    add_settings(parser)
    try:
        return run_settings_of(parser.read(argv))
    except ConfigError as error:
        parser.error(str(error))


_SPELLINGS = {"env_name": ("--env",)}
"""Further flags of a setting."""

USAGE = "%(prog)s [--config FILE] [--FIELD VALUE ...]"


def add_settings(parser: ArgumentParser) -> None:
    """Add ``--config`` and a flag for every setting; ``--help SECTION`` shows those of a
    section."""
    parser.add_argument("--config", action=_File, metavar="FILE", help="a YAML file of the sections below")
    add_flags(parser, settings_in(RunSettings, None))
    for section, kinds in sections_of(RunSettings).items():
        names = settings_in(RunSettings, section)
        add_flags(parser, names, sections=True)
        shown = argparse.ArgumentParser(
            prog=section,
            add_help=False,
            usage=argparse.SUPPRESS,
            description=f"{title_of(kinds)}, in a file below {section}:",
        )
        add_flags(shown.add_argument_group("settings"), names)
        parser.add_section(section, title_of(kinds), shown)


def add_flags(
    group: argparse._ActionsContainer,
    names: Iterable[str],
    others: Mapping[str, str] = MappingProxyType({}),
    *,
    sections: bool = False,
) -> None:
    """Add a flag for each of these settings, with its meaning, type and default.

    Args:
        group: of a parser.
        names: of the settings.
        others: what some of them mean here, if it is not what they mean to a run.
        sections: take the name with its section before it too.
    """
    # Defaults stay RunSettings's: only flags that are given may reach it, because some of its rules
    # ask what was given.
    meaning, options = {**meanings_of(RunSettings), **others}, settings_of(RunSettings)
    for name in names:
        hint = options[name].hint
        # argparse formats help with %.
        said = f"{plain(meaning[name])} (type: {describe(hint)}; default: {shown_default(name)})".replace("%", "%%")
        bare: dict[str, Any] = {"nargs": "?", "const": "true"} if hint in (bool, bool | None) else {}
        group.add_argument(
            *_SPELLINGS.get(name, ()),
            f"--{name}",
            *([f"--{section}.{name}"] if sections and (section := section_of(RunSettings, name)) else []),
            dest=name,
            action=Flag,
            hint=hint,
            metavar="VALUE",
            help=said,
            default=argparse.SUPPRESS,
            **bare,
        )


def given_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings among parsed arguments, without those that were not given."""
    return {name: value for name, value in vars(arguments).items() if name in settings_of(RunSettings)}


def run_settings_of(arguments: argparse.Namespace) -> RunSettings:
    """The settings of parsed arguments (:func:`add_settings`), without the settings of a file that
    a flag leaves without effect.

    If that flag is the algorithm, they are refused: a file is tuned for one algorithm, and its
    other numbers would not fit.

    Raises:
        ConfigError: they are wrong, or contradict each other.
    """
    settings, files = given_settings(arguments), _files(arguments)
    while True:
        try:
            return RunSettings.from_values(**settings)
        except IdleError as error:
            idle = [name for name in error.names if name in settings and name in files]
            by_flag = [name for name in error.under if name in settings and name not in files]
            if not (idle and by_flag):
                raise
            if "algo" in by_flag:
                where = ", ".join(dict.fromkeys(str(files[name]) for name in idle))
                raise ConfigError(f"{error} They are from {where}: remove them there.") from error
            for name in idle:
                del settings[name]


def resume_command(config: RunSettings) -> str:
    """The command line that resumes a run which this process began from :func:`parse_settings`.

    Args:
        config: the run's settings.

    Examples:
        >>> resume_command(RunSettings()).endswith(" --resume")
        True
    """
    words = COMMAND_LINE.get() or sys.argv
    given = _without(words, "--resume", "--overwrite")
    undone = ["--overwrite=false"] if config.output.overwrite and given == _without(words, "--resume") else []
    undone += ["--resume_from=null"] if config.output.resume_from is not None else []
    return shlex.join([*_program(Path(given[0])), *given[1:], *undone, "--resume"])


def _program(script: Path) -> list[str]:
    """How the program that runs is called: by its name if it is a console script, else by this
    Python."""
    if not script.suffix:
        return [script.name]
    python, here = Path(sys.executable), Path.cwd()
    python = python.relative_to(here) if python.is_relative_to(here) else python
    # `python -m package` has the path of its __main__.py as its first argument.
    return [str(python), *(["-m", script.parent.name] if script.name == "__main__.py" else [str(script)])]


def _without(argv: Sequence[str], *switches: str) -> list[str]:
    """``argv`` without some switches and their values."""
    kept, dropped = [], False
    for word in argv:
        is_value = dropped and word in ("true", "false")
        dropped = word.partition("=")[0] in switches
        if not (dropped or is_value):
            kept.append(word)
    return kept


def _files(arguments: argparse.Namespace) -> dict[str, Path]:
    """The file of each setting that is from one, and that no later flag gives."""
    return vars(arguments).setdefault("setting_files", {})


class Flag(argparse.Action):
    """One field of the settings.

    Args:
        hint: its annotation, by which a value is read and checked.
        options: those of :class:`argparse.Action`.
    """

    def __init__(self, *, hint: Any, **options: Any) -> None:
        super().__init__(**options)
        self.hint = hint

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        _files(namespace).pop(self.dest, None)
        try:
            setattr(namespace, self.dest, read_value(str(option_string), values, self.hint))
        except ConfigError as error:
            parser.error(str(error))


class _File(argparse.Action):
    """``--config``: all fields of a YAML file."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        try:
            for name, value in read_settings(Path(values), RunSettings):
                setattr(namespace, name, value)
                _files(namespace)[name] = Path(values)
        except ConfigError as error:
            parser.error(str(error))
