"""Settings in sections: :class:`Sectioned`, a dataclass of dataclasses of settings.

A setting has one name in all sections. Its section says where it stands, and is no part of its
name: a flag, a line of a message, a column of a comparison call it by its own name, and settings
without their sections are a mapping, name -> value.

A section may have one of several classes, :class:`Alternative`. Then a setting names the class, and
the settings of the section are those of that class.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from types import MappingProxyType, UnionType
from typing import Any, ClassVar, Literal, Self, cast, get_args

from torchrl_llm.utils.hints import nearest
from torchrl_llm.utils.options import (
    Checked,
    ConfigError,
    Idle,
    Option,
    check_idle,
    check_value,
    describe,
    is_section,
    meanings,
    options_of,
    remembered,
)

__all__ = [
    "Alternative",
    "Sectioned",
    "alternatives_of",
    "choices_of",
    "family_of",
    "harmless_in",
    "in_sections",
    "meanings_of",
    "meant",
    "rules_of",
    "section_of",
    "sections_of",
    "settings_in",
    "settings_of",
]


class Alternative(Checked):
    """Base class of the classes of which a section has one."""

    named_by: ClassVar[str]
    """The setting whose value is the name of the class; the class that has the section documents it
    as a property. It belongs to the base that the classes of a section share."""

    known_as: ClassVar[str]
    """The name of the class in settings, by default that of Python."""

    harmless: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    """Values of its settings that ask for what happens anyway beside another class of the section,
    and are no error there."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.known_as = vars(cls).get("known_as", cls.__name__)

    def defaults(self) -> dict[str, Any]:
        """The default of each option, beside the others."""
        return vars(type(self)())

    def changed(self) -> dict[str, Any]:
        """The options that are not the defaults."""
        defaults = self.defaults()
        return {name: value for name, value in vars(self).items() if value != defaults[name]}


@remembered
def sections_of(cls: type[Checked]) -> Mapping[str, tuple[type[Checked], ...]]:
    """The fields of a class that are sections: name -> the classes of which the section has one.
    Other fields are settings themselves."""
    hints = {name: option.hint for name, option in options_of(cls).items()}
    kinds = {name: get_args(hint) if isinstance(hint, UnionType) else (hint,) for name, hint in hints.items()}
    return MappingProxyType({name: each for name, each in kinds.items() if all(map(is_section, each))})


def family_of(kinds: tuple[type[Checked], ...]) -> type[Checked]:
    """The base that the classes of a section share; of one class, itself."""
    return next((base for base in kinds[0].__mro__ if "named_by" in vars(base)), kinds[0])


@remembered
def choices_of(cls: type[Checked]) -> Mapping[str, str]:
    """The settings that name the class of a section: name -> the section."""
    return MappingProxyType(
        {kind.named_by: section for section, (kind, *_) in sections_of(cls).items() if issubclass(kind, Alternative)}
    )


@remembered
def _by_section(cls: type[Checked]) -> Mapping[str | None, Mapping[str, Option]]:
    """The settings of every section, and under ``None`` those that stand in none."""
    own: dict[str, Option] = {}
    for choice, section in choices_of(cls).items():
        names = tuple(map(_name, sections_of(cls)[section]))
        own[choice] = Option(Literal[names], _name(type(options_of(cls)[section].default)))
    own |= {name: option for name, option in options_of(cls).items() if name not in sections_of(cls)}
    parts: dict[str | None, Mapping[str, Option]] = {None: own}
    parts |= {section: _merged(kinds) for section, kinds in sections_of(cls).items()}
    found = [name for part in parts.values() for name in part]
    if twice := {name for name in found if found.count(name) > 1}:
        raise TypeError(f"{cls.__name__} has {', '.join(sorted(twice))} twice: a setting has one name in all sections.")
    return parts


def settings_in(cls: type[Checked], section: str | None) -> Mapping[str, Option]:
    """The settings of a section, whatever its class; ``None``: those that stand in none, and those
    that name the classes of sections. One that has several defaults has none here."""
    return _by_section(cls)[section]


@remembered
def settings_of(cls: type[Checked]) -> Mapping[str, Option]:
    """All settings of a class by name, as in :func:`settings_in`.

    Raises:
        TypeError: two of them have one name.
    """
    return MappingProxyType({name: each for part in _by_section(cls).values() for name, each in part.items()})


def _merged(kinds: tuple[type[Checked], ...]) -> dict[str, Option]:
    """The options that any of the classes has."""
    found: dict[str, Option] = {}
    for name, option in ((name, option) for kind in kinds for name, option in options_of(kind).items()):
        before = found.get(name, option)
        default = before.default if before.default == option.default else inspect.Parameter.empty
        found[name] = Option(before.hint | option.hint, default)
    return found


def harmless_in(cls: type[Checked], section: str) -> dict[str, Any]:
    """The values that the classes of a section declare :attr:`~Alternative.harmless`."""
    kinds = cast(tuple[type[Alternative], ...], sections_of(cls)[section])
    return {name: value for kind in kinds for name, value in kind.harmless.items()}


@remembered
def meanings_of(cls: type[Checked]) -> Mapping[str, str]:
    """What :func:`~torchrl_llm.utils.options.meanings` says of all settings of a class; of those
    that some classes of a section have alone, which these are."""
    found = {choice: inspect.getdoc(getattr(cls, choice)) or "" for choice in choices_of(cls)}
    found |= {name: text for name, text in meanings(cls).items() if name not in sections_of(cls)}
    for section, kinds in sections_of(cls).items():
        for name in settings_in(cls, section):
            having = [kind for kind in kinds if name in options_of(kind)]
            only = "" if len(having) == len(kinds) else f" ({', '.join(map(_name, having))})"
            found[name] = f"{meanings(having[0])[name].removesuffix('.')}{only}."
    return MappingProxyType(found)


def _name(kind: type[Checked]) -> str:
    """The name of a class of a section in settings."""
    return kind.known_as if issubclass(kind, Alternative) else kind.__name__


def rules_of(cls: type[Checked]) -> tuple[Idle, ...]:
    """The rules about settings without effect, of a class and of its sections."""
    return (*cls.idle, *(rule for kinds in sections_of(cls).values() for kind in kinds for rule in kind.idle))


def section_of(cls: type[Checked], name: str) -> str | None:
    """The section that a setting stands in; ``None``: in none, or there is no such setting."""
    return next((section for section in sections_of(cls) if name in settings_in(cls, section)), None)


def meant(cls: type[Checked], name: str, *, here: str | None = None, system: str | None = None) -> str:
    """What a wrong name was meant to be, and the section that it stands in.

    Args:
        cls: has the settings.
        name: the wrong name.
        here: the section that it was given in.
        system: whose words are read first, if it is known; nothing is guessed then.
    """
    said = nearest(name, [*settings_of(cls), *sections_of(cls)], system=system)
    found = re.match(r" Did you mean '(\w+)'\?", said)
    section = section_of(cls, found[1]) if found else None
    return said if section in (None, here) else f"{said} It stands in the section {section}."


def in_sections(cls: type[Checked], values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by name -> the same in their sections, in the order of the class."""
    parts = {section: {n: values[n] for n in names if n in values} for section, names in _by_section(cls).items()}
    return parts[None] | {section: part for section, part in parts.items() if section and part}


class Sectioned(Checked):
    """Base class of dataclasses of which some fields are sections: dataclasses that are
    :class:`~torchrl_llm.utils.options.Checked`.

    Rules about options without effect (:attr:`~torchrl_llm.utils.options.Checked.idle`) name
    settings of all sections; a section has those about its own.

    Examples:
        >>> from dataclasses import field, make_dataclass
        >>> Optim = make_dataclass("Optim", [("lr", float, 0.1)], bases=(Checked,), kw_only=True)
        >>> sections = [("seed", int, 0), ("optim", Optim, field(default_factory=Optim))]
        >>> Run = make_dataclass("Run", sections, bases=(Sectioned,), kw_only=True)
        >>> run = Run.from_values(lr=0.2)
        >>> run, run.values(), run.replace(seed=1).optim.lr
        (Run(seed=0, optim=Optim(lr=0.2)), {'seed': 0, 'lr': 0.2}, 0.2)
        >>> Run(lr=0.2)
        Traceback (most recent call last):
        TypeError: Run has no option 'lr'. It stands in the section optim: Run(optim=Optim(lr=...)).
    """

    def __new__(cls, *args: Any, **options: Any) -> Self:
        for name in options:
            if name not in options_of(cls):
                raise TypeError(f"{cls.__name__} has no option {name!r}.{_place(cls, name, options)}")
        made = super().__new__(cls, *args, **options)
        for section in choices_of(cls).values():
            kinds = sections_of(cls)[section]
            if section in options and type(options[section]) not in kinds:
                raise ConfigError(
                    f"{section} is a subclass, {type(options[section]).__name__}; expected {describe(options_of(cls)[section].hint)} itself."
                )
        given = _flat(cls, options)
        check_idle(cls, given, _known(cls, _kinds(cls, given)))
        return made

    @classmethod
    def from_values(cls, **values: Any) -> Self:
        """The settings with these values, each by its name alone.

        Args:
            values: settings of any section, and whole sections, before which a value by its name
                counts; the others have their defaults.

        Raises:
            TypeError: there is no such setting; the nearest one is named.
            ConfigError: a value is wrong, or (:class:`~torchrl_llm.utils.options.IdleError`) a
                setting is of another class of its section than the one that is named.
        """
        given = _by_name(cls, values)
        kinds = _kinds(cls, given)
        _check_others(cls, kinds, given)
        own = {kind: {n: given[n] for n in options_of(kind) if n in given} for kind in (cls, *kinds.values())}
        return cls(**own[cls], **{section: kind(**own[kind]) for section, kind in kinds.items()})

    def values(self) -> dict[str, Any]:
        """All settings by name, without their sections."""
        return _flat(type(self), vars(self))

    def options(self) -> Mapping[str, Option]:
        """All settings that these have by name, with annotations and defaults."""
        return _known(type(self), {name: type(getattr(self, name)) for name in sections_of(type(self))})

    def replace(self, **changes: Any) -> Self:
        """The settings with other values; arguments as of :meth:`from_values`. A section that gets
        another class keeps the settings that both classes declare alike, and has the defaults of
        the others."""
        cls, before, given = type(self), self.values(), _by_name(type(self), changes)
        for choice, section in choices_of(cls).items():
            # Not the defaults, which may be others beside the changes.
            kept, own = getattr(self, section).changed(), options_of(type(getattr(self, section)))
            if given.get(choice, before[choice]) != before[choice]:
                theirs = options_of(_kinds(cls, given)[section])
                kept = {name: value for name, value in kept.items() if theirs.get(name) == own[name]}
            before = {name: value for name, value in before.items() if section_of(cls, name) != section} | kept
        return self.from_values(**{**before, **given})


def _place(cls: type[Checked], name: str, given: Mapping[str, Any]) -> str:
    """Where a setting stands that was given beside the sections, or what a wrong name was meant to
    be."""
    if name in choices_of(cls):
        named = choices_of(cls)[name]
        return f" It is the class of a section: give {named} one of {describe(options_of(cls)[named].hint)}."
    section = section_of(cls, name)
    if section is None:
        return meant(cls, name)
    kind = next(kind for kind in (type(given.get(section)), *sections_of(cls)[section]) if name in options_of(kind))
    return f" It stands in the section {section}: {cls.__name__}({section}={kind.__name__}({name}=...))."


def _by_name(cls: type[Checked], given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings and whole sections as settings."""
    for name, value in given.items():
        if name in sections_of(cls):
            check_value(f"{cls.__name__}.{name}", value, options_of(cls)[name].hint)
        elif name not in settings_of(cls):
            raise TypeError(f"{cls.__name__} has no option {name!r}.{meant(cls, name)}")
    own = {name: value for name, value in given.items() if name not in sections_of(cls)}
    whole = _flat(cls, {name: value for name, value in given.items() if name in sections_of(cls)})
    for choice, section in choices_of(cls).items():
        if section in given and own.get(choice, whole[choice]) != whole[choice]:
            kind = type(given[section]).__name__
            raise ConfigError(f"{choice} is {own[choice]!r}, and {section} is a {kind}: leave one of them out.")
    return whole | own


def alternatives_of(cls: type[Checked], given: Mapping[str, Any]) -> dict[str, type[Alternative]]:
    """The classes that settings by name have: section -> the one of its :class:`Alternative`
    classes that is named, or the default's.

    Raises:
        ConfigError: there is none of that name.
    """
    return {section: kind for section, kind in _kinds(cls, given).items() if issubclass(kind, Alternative)}


def _kinds(cls: type[Checked], given: Mapping[str, Any]) -> dict[str, type[Checked]]:
    """The class of each section."""
    chosen = {section: type(options_of(cls)[section].default) for section in sections_of(cls)}
    for choice, section in choices_of(cls).items():
        if choice in given:
            check_value(choice, given[choice], settings_of(cls)[choice].hint)
            (chosen[section],) = (kind for kind in sections_of(cls)[section] if _name(kind) == given[choice])
    return chosen


def _known(cls: type[Checked], kinds: Mapping[str, type[Checked]]) -> dict[str, Option]:
    """The settings where sections have these classes."""
    parts = {name: option for kind in kinds.values() for name, option in options_of(kind).items()}
    return {**settings_in(cls, None), **parts}


def _check_others(cls: type[Checked], kinds: Mapping[str, type[Checked]], given: Mapping[str, Any]) -> None:
    """Refuse settings that only other classes of a section have."""
    for choice, section in choices_of(cls).items():
        kind, own = kinds[section], options_of(kinds[section])
        groups: dict[str, list[str]] = {}
        for setting in [name for name in given if name in settings_in(cls, section) and name not in own]:
            having = [f'"{_name(each)}"' for each in sections_of(cls)[section] if setting in options_of(each)]
            groups.setdefault(" or ".join(having), []).append(setting)
        for named, settings in groups.items():
            instead = f"set {choice} to {named}"
            rule = Idle(tuple(settings), {choice: (_name(kind),)}, instead, harmless_in(cls, section))
            rule.check(given, {choice: _name(kind)})


def _flat(cls: type[Checked], values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of fields, with those of a section in its place."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Alternative):
            found[value.named_by] = type(value).known_as
        found |= vars(value) if name in sections_of(cls) else {name: value}
    return found
