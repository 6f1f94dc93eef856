"""Settings in sections: :class:`Sectioned`, a dataclass of dataclasses of settings.

A setting has one name in all sections. Its section says where it stands, and is no part of its
name: a flag, a line of a message, a column of a comparison call it by its own name, and settings
without their sections are a mapping, name -> value.
"""

from __future__ import annotations

import re
import types
from collections.abc import Mapping
from typing import Any, Self

from torchrl_llm.utils.hints import nearest
from torchrl_llm.utils.options import (
    Checked,
    Option,
    check_idle,
    check_value,
    is_section,
    meanings,
    options_of,
    remembered,
)

__all__ = ["Sectioned", "in_sections", "meanings_of", "meant", "section_of", "sections_of", "settings_of"]


@remembered
def sections_of(cls: type[Checked]) -> Mapping[str, type[Checked]]:
    """The fields of a class that are sections: name -> the class of the section. Other fields are
    settings themselves."""
    hints = {name: option.hint for name, option in options_of(cls).items()}
    found = {name: hint for name, hint in hints.items() if is_section(hint)}
    return types.MappingProxyType(found)


@remembered
def settings_of(cls: type[Checked]) -> Mapping[str, Option]:
    """All settings of a class by name, those of its sections included.

    Raises:
        TypeError: two of them have one name.
    """
    found: dict[str, Option] = {}
    for name, option in options_of(cls).items():
        part = sections_of(cls).get(name)
        own = {name: option} if part is None else options_of(part)
        if twice := found.keys() & own.keys():
            raise TypeError(
                f"{cls.__name__} has {', '.join(sorted(twice))} twice: a setting has one name in all sections."
            )
        found |= own
    return types.MappingProxyType(found)


@remembered
def meanings_of(cls: type[Checked]) -> Mapping[str, str]:
    """What :func:`~torchrl_llm.utils.options.meanings` says of all settings of a class."""
    parts = [meanings(part) for part in sections_of(cls).values()]
    own = {name: text for name, text in meanings(cls).items() if name not in sections_of(cls)}
    return types.MappingProxyType({name: text for part in (own, *parts) for name, text in part.items()})


def section_of(cls: type[Checked], name: str) -> str | None:
    """The section that a setting stands in; ``None``: in none, or there is no such setting."""
    return next((each for each, part in sections_of(cls).items() if name in options_of(part)), None)


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
    found = {name: values[name] for name in options_of(cls) if name in values and name not in sections_of(cls)}
    parts = {
        section: {name: values[name] for name in options_of(part) if name in values}
        for section, part in sections_of(cls).items()
    }
    return found | {section: part for section, part in parts.items() if part}


class Sectioned(Checked):
    """Base class of dataclasses of which some fields are sections: dataclasses that are
    :class:`~torchrl_llm.utils.options.Checked`.

    Rules about options without effect (:attr:`~torchrl_llm.utils.options.Checked.idle`) name
    settings of all sections.

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
            if name in options_of(cls):
                continue
            said, section = meant(cls, name), section_of(cls, name)
            if section is not None:
                part = f"{section}={sections_of(cls)[section].__name__}({name}=...)"
                said = f" It stands in the section {section}: {cls.__name__}({part})."
            raise TypeError(f"{cls.__name__} has no option {name!r}.{said}")
        made = super().__new__(cls, *args, **options)
        check_idle(cls, _flat(cls, options), settings_of(cls))
        return made

    @classmethod
    def from_values(cls, **values: Any) -> Self:
        """The settings with these values, each by its name alone.

        Args:
            values: settings of any section, and whole sections, before which a value by its name
                counts; the others have their defaults.

        Raises:
            TypeError: there is no such setting; the nearest one is named.
        """
        parts = in_sections(cls, _by_name(cls, values))
        return cls(**{name: _part(cls, name, value) for name, value in parts.items()})

    def values(self) -> dict[str, Any]:
        """All settings by name, without their sections."""
        return _flat(type(self), vars(self))

    def replace(self, **changes: Any) -> Self:
        """The settings with other values; arguments as of :meth:`from_values`."""
        return self.from_values(**{**self.values(), **_by_name(type(self), changes)})


def _by_name(cls: type[Checked], given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings and whole sections as settings."""
    for name, value in given.items():
        if name in sections_of(cls):
            check_value(f"{cls.__name__}.{name}", value, sections_of(cls)[name])
        elif name not in settings_of(cls):
            raise TypeError(f"{cls.__name__} has no option {name!r}.{meant(cls, name)}")
    return _flat(cls, given) | {name: value for name, value in given.items() if name not in sections_of(cls)}


def _part(cls: type[Checked], name: str, value: Any) -> Any:
    part = sections_of(cls).get(name)
    return value if part is None else part(**value)


def _flat(cls: type[Checked], values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of fields, with those of a section in its place."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= vars(value) if name in sections_of(cls) else {name: value}
    return found
