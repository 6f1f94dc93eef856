"""The names that other systems have for settings and options of this package, read from
``other_systems.toml`` beside this file; docs/other_systems.md shows them."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from importlib import resources
from string import Template
from types import MappingProxyType

__all__ = ["MARKS", "SYSTEMS"]

_READ = tomllib.loads((resources.files(__package__) / "other_systems.toml").read_text("utf-8"))


def _table(*tables: Mapping[str, str]) -> Mapping[str, str]:
    found = {name: Template(text).substitute(_READ["texts"]) for table in tables for name, text in table.items()}
    return MappingProxyType(found)


_OF_TRANSFORMERS = ("TRL", "LLaMA-Factory", "axolotl")
"""The systems whose settings are those of transformers, and more."""

SYSTEMS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        system: _table(own, _READ["transformers"] if system in _OF_TRANSFORMERS else {})
        for system, own in _READ["systems"].items()
    }
)
"""System -> its name -> ours, and what is to be known about it. Where two systems have one name,
the first is meant."""

MARKS: Mapping[str, frozenset[str]] = MappingProxyType(
    {system: frozenset(marks) for system, marks in _READ["marks"].items()}
)
"""Names in files that no other system has, by system."""
