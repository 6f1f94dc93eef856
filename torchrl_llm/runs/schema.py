"""The settings of a run described: by section for ``--help``, and as a JSON schema for editors and
checks of YAML files."""

from __future__ import annotations

import inspect
import json
import re
import types
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from torchrl_llm.runs.config import RunSettings, shown_default
from torchrl_llm.utils.options import Checked, Range, describe
from torchrl_llm.utils.sections import family_of, meanings_of, sections_of, settings_in, settings_of

_TYPES = {int: "integer", float: "number", bool: "boolean", str: "string", Path: "string", dict: "object"}


def plain(docstring: str) -> str:
    """A docstring as text for a terminal: without the marks of reStructuredText.

    Examples:
        >>> plain("What :class:`~torchrl_llm.trainers.LLMTrainer` reads (``seed``).")
        'What LLMTrainer reads (seed).'
    """
    return re.sub(r":\w+:`~?(?:[\w.]*\.)?(\w+)`", r"\1", docstring).replace("``", "")


def title_of(kinds: tuple[type[Checked], ...]) -> str:
    """The first sentence of the docstring of a section's class; of several classes, of the base
    that they share.

    Examples:
        >>> title_of(sections_of(RunSettings)["optim"])
        'AdamW'
        >>> title_of(sections_of(RunSettings)["rollouts"])
        'How batches are collected'
    """
    said = " ".join(plain(inspect.getdoc(family_of(kinds)) or "").partition("\n\n")[0].split())
    return said.partition(". ")[0].rstrip(".")


def settings_schema() -> dict[str, Any]:
    """The JSON schema (draft 7) of a YAML file of settings: sections, types, ranges, choices,
    defaults and meanings.

    Rules about two settings together are :class:`~torchrl_llm.runs.RunSettings`'s; a schema does
    not have them.

    Examples:
        >>> settings_schema()["properties"]["trainer"]["properties"]["epochs"]
        {'description': 'Passes over each batch. Default: 1.', 'type': 'integer', 'minimum': 1, 'default': 1}
    """
    meaning, settings = meanings_of(RunSettings), settings_of(RunSettings)
    defaults = {name: option.default for name, option in settings.items()} | RunSettings().as_json()
    described = {
        name: {"description": f"{plain(meaning[name])} Default: {shown_default(name)}.", **_schema(option.hint)}
        | ({} if option.default is inspect.Parameter.empty else {"default": defaults[name]})
        for name, option in settings.items()
    }
    sections = {
        section: {"description": f"{title_of(kinds)}."}
        | _object({name: described[name] for name in settings_in(RunSettings, section)})
        for section, kinds in sections_of(RunSettings).items()
    }
    own = {name: described[name] for name in settings_in(RunSettings, None)}
    title = {"$schema": "http://json-schema.org/draft-07/schema#", "title": "Settings of a run of torchrl_llm"}
    return title | _object(own | sections)


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _schema(hint: Any) -> dict[str, Any]:
    """The schema of the values that fit an annotation (:func:`torchrl_llm.utils.options.fits`)."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        limits = [_limits(limit) for limit in arguments[1:]]
        return _schema(arguments[0]) | {name: value for limit in limits for name, value in limit.items()}
    if origin in (Union, types.UnionType):
        return {"anyOf": [_schema(each) for each in arguments]}
    if origin is Literal:
        return {"enum": [*arguments]}
    if origin is list or arguments[1:] == (...,):
        return {"type": "array", "items": _schema(arguments[0])}
    if origin is tuple:
        items = [_schema(each) for each in arguments]
        return {"type": "array", "items": items, "minItems": len(items), "maxItems": len(items)}
    if hint is type(None):
        return {"type": "null"}
    kind = origin or hint
    if kind not in _TYPES:
        raise TypeError(
            f"{describe(hint)} has no JSON schema; expected one of {[*_TYPES]}, or a union or list of them."
        )
    return {"type": _TYPES[kind]}


def _limits(limit: Range) -> dict[str, float]:
    """An interval in the words of a schema. An infinite end has none: JSON has no such number."""
    low, high = limit.interval[1:-1].split(", ")
    ends = {
        ("minimum" if limit.interval[0] == "[" else "exclusiveMinimum"): low,
        ("maximum" if limit.interval[-1] == "]" else "exclusiveMaximum"): high,
    }
    return {name: json.loads(end) for name, end in ends.items() if end not in ("-inf", "inf")}
