"""Tools of environments: what they are, and the schemas by which the chat template shows them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from enum import Enum
from typing import Any, Protocol, get_args, get_type_hints, runtime_checkable
from weakref import WeakKeyDictionary

from transformers.utils import get_json_schema

from torchrl_llm.utils.options import ConfigError

Schema = Mapping[str, Any]
"""A tool as templates know it: ``{"type": "function", "function": {"name": ..., "description": ...,
"parameters": ...}}``."""


class ToolError(Exception):
    """A tool refuses a call: the policy's fault, which is answered by this message and counted. Any
    other exception of a tool is a fault of the environment."""


@runtime_checkable
class ToolSet(Protocol):
    """An object that has tools, such as :class:`~torchrl_llm.worlds.mcp.MCPTools`."""

    def schemas(self) -> Sequence[Schema]:
        """The schema of each tool."""

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """What a tool returns, as text.

        Raises:
            ToolError: it refuses the call.
        """


@runtime_checkable
class ToolService(Protocol):
    """What TorchRL's ``ToolService`` is to its environments: one tool."""

    name: str
    schema_in: Mapping[str, Any]

    def __call__(self, **arguments: Any) -> Any: ...


Tool = Callable[..., Any] | Schema | ToolSet | ToolService
"""A function with type hints and a docstring whose section ``Args`` describes each argument, a JSON
schema, an object with tools, or a ``ToolService`` of TorchRL."""


def tool_schemas(tools: Iterable[Tool]) -> tuple[Schema, ...]:
    """The schemas of tools, in order.

    Raises:
        ConfigError: one is not a tool, a function has no hints or no docstring, or two have one
            name.

    Examples:
        >>> def add(a: int, b: int) -> int:
        ...     '''Add two numbers.
        ...
        ...     Args:
        ...         a: the first.
        ...         b: the second.
        ...     '''
        ...     return a + b
        >>> [schema["function"]["name"] for schema in tool_schemas([add, {"name": "look", "parameters": {}}])]
        ['add', 'look']
    """
    if isinstance(tools, Mapping | str) or not isinstance(tools, Iterable):
        raise ConfigError(f"The tools are {tools!r:.80}; expected a list of them.")
    found = tuple(schema for tool in tools for schema in _schemas_of(tool))
    names = [schema["function"]["name"] for schema in found]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"Two tools have the name {twice[0]!r}: give one of them another.")
    return found


def _schemas_of(tool: Any) -> Sequence[Schema]:
    if isinstance(tool, Mapping):
        schema = tool if "function" in tool else {"type": "function", "function": {**tool}}
        if isinstance(schema["function"], Mapping) and isinstance(schema["function"].get("name"), str):
            return [schema]
    elif isinstance(tool, ToolSet) and not inspect.isclass(tool):
        return [schema for each in tool.schemas() for schema in _schemas_of(each)]
    elif isinstance(tool, ToolService) and not inspect.isclass(tool):
        return [_schema_of_service(tool)]
    elif inspect.isroutine(tool):
        return [_schema_of_function(tool)]
    raise ConfigError(
        f"A tool is {tool!r:.80}; expected a function with type hints and a docstring, a JSON schema "
        '{"name": ..., "description": ..., "parameters": ...}, or an object with schemas() and call().'
    )


def _schema_of_service(service: ToolService) -> Schema:
    """The schema of a service, whose arguments are a JSON schema or types by name."""
    given, parameters = service.schema_in, dict(service.schema_in)
    if not isinstance(given.get("properties"), Mapping):
        kinds = {name: _JSON_TYPES.get(kind, kind) for name, kind in given.items()}
        properties = {name: {"type": kind} if isinstance(kind, str) else {} for name, kind in kinds.items()}
        parameters = {"type": "object", "properties": properties, "required": [*given]}
    described = inspect.getdoc(service) or ""
    return {"type": "function", "function": {"name": service.name, "description": described, "parameters": parameters}}


_JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}


def _hints_of(function: Callable[..., Any]) -> Mapping[str, Any]:
    """Its type hints; those that are text, if they cannot be evaluated, as they stand."""
    try:
        return get_type_hints(function)
    except (NameError, TypeError, AttributeError):
        return getattr(function, "__annotations__", {})


def _has_enum(hint: Any) -> bool:
    """Whether a value of this type may be or hold a member of an ``Enum``."""
    return (isinstance(hint, type) and issubclass(hint, Enum)) or any(map(_has_enum, get_args(hint)))


def _check_parameters(function: Callable[..., Any]) -> None:
    """Refuse what calls cannot give: arguments by position, members of an ``Enum``, ``self``."""
    hints = _hints_of(function)
    for name, each in inspect.signature(function, eval_str=False).parameters.items():
        if name == "self":
            raise ConfigError(
                f"The tool {function.__qualname__!r} is a method without its object: give the method of an object, which "
                "with_tools(Env, lambda env: [env.method]) takes from the environment."
            )
        if each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD):
            raise ConfigError(
                f"The tool {function.__name__!r} takes any number of arguments ({str(each).partition(':')[0]}); calls give those that its schema has: "
                "name each."
            )
        is_enum = _has_enum(hints.get(name))
        if each.kind is each.POSITIONAL_ONLY or is_enum:
            raise ConfigError(
                f"The tool {function.__name__!r} takes {name!r} {'as an Enum' if is_enum else 'by position'}; calls give JSON by name: take "
                f"{'a Literal of texts' if is_enum else 'it by name'}."
            )


# Tools with a state are made again in each episode, and the docstring of a method is read slowly.
_of_methods: WeakKeyDictionary[Any, Schema] = WeakKeyDictionary()


def _schema_of_function(function: Callable[..., Any]) -> Schema:
    # The same function has another schema where it is not a method: it takes self.
    if not inspect.ismethod(function):
        return _read_schema(function)
    if function.__func__ not in _of_methods:
        _of_methods[function.__func__] = _read_schema(function)
    return deepcopy(_of_methods[function.__func__])


def _read_schema(function: Callable[..., Any]) -> Schema:
    _check_parameters(function)
    try:
        return dict(get_json_schema(function))
    except Exception as error:  # of several classes, by the version of transformers
        raise ConfigError(
            f"The tool {getattr(function, '__name__', function)!r} has no schema ({error}). Give each argument a type hint, and "
            "the docstring a line on each in its section Args."
        ) from error
