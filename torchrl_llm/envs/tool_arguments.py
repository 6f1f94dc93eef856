"""Arguments of calls against the JSON schemas of their tools."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from torchrl_llm.envs.tools import Schema, ToolError

_KINDS: Mapping[str, type | tuple[type, ...]] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "array": list,
    "object": dict,
    "null": type(None),
}


_SHOWN_WHOLE = {"items", "prefixItems", "properties", "additionalProperties", "anyOf", "oneOf", "const"}


def check_arguments(parameters: Schema, arguments: Mapping[str, Any]) -> None:
    """Refuse arguments that the schema of a tool does not have, or has otherwise.

    Raises:
        ToolError: for the policy.

    Examples:
        >>> check_arguments({"properties": {"unit": {"enum": ["c", "f"]}}}, {"unit": "k"})
        Traceback (most recent call last):
            ...
        torchrl_llm.envs.tools.ToolError: The argument 'unit' is "k"; expected one of "c", "f".
    """
    known = parameters.get("properties")
    if missing := [name for name in parameters.get("required") or () if name not in arguments]:
        raise ToolError(f"The argument {missing[0]!r} is missing.")
    if known is None:  # the schema says nothing of them
        return
    unknown = [name for name in arguments if name not in known]
    if unknown and not parameters.get("additionalProperties"):
        raise ToolError(f"There is no argument {unknown[0]!r:.80}; expected {', '.join(known) or 'none'}.")
    for name, value in arguments.items():
        if not _fits(known.get(name), value):
            raise ToolError(f"The argument {name!r} is {json.dumps(value):.80}; expected {_expected(known[name])}.")


def _fits(schema: Any, value: Any) -> bool:
    if not isinstance(schema, Mapping) or (value is None and schema.get("nullable")):
        return True
    kinds = schema.get("type")
    if value not in schema.get("enum", [value]) or schema.get("const", value) != value:
        return False
    if any(schema.get(name) and not any(_fits(each, value) for each in schema[name]) for name in ("anyOf", "oneOf")):
        return False
    if kinds is not None and not _is_of([kinds] if isinstance(kinds, str) else kinds, value):
        return False
    if isinstance(value, list):
        return _fit_items(schema, value)
    return _fit_properties(schema, value) if isinstance(value, dict) else True


def _fit_items(schema: Mapping[str, Any], value: list[Any]) -> bool:
    first = schema.get("prefixItems") or []
    # JSON Schema would take fewer or more; this is what is written of a tuple, which would not.
    if first and "items" not in schema and len(value) != len(first):
        return False
    pairs = zip(value, [*first, *[schema.get("items")] * len(value)], strict=False)
    return all(_fits(each, item) for item, each in pairs)


def _fit_properties(schema: Mapping[str, Any], value: Mapping[str, Any]) -> bool:
    known, other = schema.get("properties") or {}, schema.get("additionalProperties")
    if any(name not in value for name in schema.get("required") or ()):
        return False
    if other is False and not value.keys() <= known.keys():
        return False
    return all(_fits(known.get(name, other), each) for name, each in value.items())


def _is_of(kinds: list[str], value: Any) -> bool:
    if isinstance(value, bool):  # an int, to Python
        return "boolean" in kinds
    return any(isinstance(value, _KINDS.get(kind, object)) for kind in kinds)


def _expected(schema: Any) -> str:
    if "enum" in schema:
        return f"one of {', '.join(map(json.dumps, schema['enum']))}"
    kind = schema.get("type")
    if kind is None or {*schema} & _SHOWN_WHOLE:
        return json.dumps(schema)[:200]
    return kind if isinstance(kind, str) else " or ".join(kind)


def kinds_of(schema: Any) -> frozenset[str]:
    """The types that a schema allows, as far as it says.

    Examples:
        >>> sorted(kinds_of({"anyOf": [{"type": "string"}, {"type": "null"}]})), sorted(kinds_of({"enum": ["c", "f"]}))
        (['null', 'string'], ['string'])
    """
    if not isinstance(schema, Mapping):
        return frozenset()
    kinds = schema.get("type") or ()
    found = {kinds} if isinstance(kinds, str) else {*kinds}
    for each in [*(schema.get("anyOf") or ()), *(schema.get("oneOf") or ())]:
        found |= kinds_of(each)
    if not found and all(isinstance(each, str) for each in schema.get("enum") or [None]):
        found = {"string"}
    return frozenset(found | ({"null"} if schema.get("nullable") else set()))
