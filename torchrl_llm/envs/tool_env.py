"""Environments with tools: :class:`ToolEnv` executes the calls of a response, and
:func:`with_tools` gives tools to any environment."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torchrl_llm import keys
from torchrl_llm.envs.env_spec import EnvSpec
from torchrl_llm.envs.registry import EnvSource, resolve_env
from torchrl_llm.envs.tool_calls import BadCall, ToolCall
from torchrl_llm.envs.tools import Schema, Tool, ToolError, ToolService, ToolSet, tool_schemas
from torchrl_llm.utils.options import ConfigError

FAULTS = keys.TOOL_FAULTS[-1]

ToolParser = Callable[[str], Mapping[str, Any]]
"""From an answer to its ``"calls"``, each with ``tool`` and ``args``: TorchRL's
``LLMToolParser``."""

_KINDS: Mapping[str, type | tuple[type, ...]] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "array": list,
    "object": dict,
    "null": type(None),
}


class ToolEnv:
    """A text environment whose policy may call tools.

    A response with calls is a turn of its own: all are executed, in order, and their results are
    the next message, of the role ``tool``. It pays 0 and ends nothing. A response without calls
    goes to the environment.

    What the policy does wrong is answered by a text that says so, and counted (the metric
    ``data/tool_faults``): a call that is malformed, of no tool, with wrong arguments or beyond
    ``max_calls``, and one that the tool refuses by a :class:`~torchrl_llm.envs.ToolError`.
    Any other exception of a tool is a fault of the environment.

    Calls are read by the formatter, which has to know the tools: :func:`with_tools` sees to it. The
    environment's own extras are blank in turns of calls: NaN, or the empty text.

    Args:
        env: the environment.
        tools: functions, objects with tools (:class:`~torchrl_llm.envs.ToolSet`), or
            TorchRL's ``ToolService``.
        max_calls: the most calls in an episode. Default: any number.
        parser: reads the calls in an answer, such as TorchRL's ``XMLBlockParser``
            (``LLMToolParser``). Default: the formatter does, in the form of the template.

    Raises:
        ConfigError: a tool is none, or cannot be called.

    Examples:
        >>> from torchrl_llm.envs import Response
        >>> from torchrl_llm.testing.environments import StopOrGo
        >>> def double(number: int) -> int:
        ...     '''Double a number.
        ...
        ...     Args:
        ...         number: any.
        ...     '''
        ...     return 2 * number
        >>> env = ToolEnv(StopOrGo(), [double])
        >>> _ = env.reset(seed=0)
        >>> calls = ToolCall("double", {"number": 4}), ToolCall("double", {"number": "four"})
        >>> text, *_, info = env.step(Response("...", calls=calls))
        >>> print(text)
        double: 8
        double: Error: The argument 'number' is "four"; expected integer.
        >>> info["tool_faults"]
        1
    """

    def __init__(
        self, env: Any, tools: Sequence[Tool], *, max_calls: int | None = None, parser: ToolParser | None = None
    ) -> None:
        if max_calls is not None and max_calls < 1:
            raise ConfigError(f"ToolEnv: max_calls is {max_calls!r}; expected at least 1.")
        self.env, self.max_calls, self._left, self._parser = env, max_calls, max_calls, parser
        self._schemas = {schema["function"]["name"]: schema["function"] for schema in tool_schemas(tools)}
        self._functions = {name: function for tool in tools for name, function in _functions_of(tool)}
        own = getattr(env, "extras", None)
        self._own = dict(own) if isinstance(own, Mapping) else {}
        self.extras = {**self._own, FAULTS: float}

    def __getattr__(self, name: str) -> Any:
        # What the environment declares: thread_safe, hidden_state, close.
        if name.startswith("__") or name == "env":
            raise AttributeError(name)
        return getattr(self.env, name)

    def reset(self, **kwargs: Any) -> Any:
        """Start an episode of the environment."""
        self._left = self.max_calls
        return self.env.reset(**kwargs)

    def step(self, action: str) -> Any:
        """Execute the calls of a response, or send one without calls to the environment."""
        calls = getattr(action, "calls", ()) if self._parser is None else _parsed(self._parser, action)
        if not calls:
            result = self.env.step(action)
            if isinstance(result, tuple) and len(result) == 5 and isinstance(result[4] or {}, Mapping):
                return *result[:4], {FAULTS: 0, **(result[4] or {})}
            return result  # no step, as the check behind this says
        results: list[str] = []
        faults = 0
        for call in calls:
            try:
                result = _as_text(self._called(call))
            except ToolError as error:
                result, faults = f"Error: {error}", faults + 1
            # Of several each has the name of its tool.
            name = f"{call.name}: " if isinstance(call, ToolCall) and len(calls) > 1 else ""
            results.append(name + result)
        blank = {name: "" if kind is str else float("nan") for name, kind in self._own.items()}
        info = {**blank, FAULTS: faults, "use_tool": True, "tool_results": results}
        return "\n".join(results), 0.0, False, False, info

    def _called(self, call: ToolCall | BadCall) -> Any:
        if self._left == 0:
            raise ToolError(f"All {self.max_calls} calls are used; answer without tools.")
        self._left = None if self._left is None else self._left - 1
        if isinstance(call, BadCall):
            raise ToolError(call.reason)
        if call.name not in self._functions:
            raise ToolError(f"There is no tool {call.name!r}; the tools are {', '.join(self._functions)}.")
        _check_arguments(self._schemas[call.name].get("parameters") or {}, call.arguments)
        return self._functions[call.name](**call.arguments)


def _parsed(parser: ToolParser, action: str) -> list[ToolCall | BadCall]:
    found = parser(getattr(action, "text", action))["calls"]
    return [
        ToolCall(call.tool, call.args)
        if isinstance(call.args, Mapping)
        else BadCall(action, "Its arguments are no object.")
        for call in found
    ]


def with_tools(
    env: EnvSource,
    tools: Sequence[Tool] | Callable[[], Sequence[Tool]],
    *,
    max_calls: int | None = None,
    parser: ToolParser | None = None,
) -> EnvSpec:
    """An environment whose policy may call tools, for :class:`~torchrl_llm.envs.GEMEnv`.

    Args:
        env: an id, a factory or a spec.
        tools: see :class:`ToolEnv`; or a function that makes them, if they have a state: each slot
            has its own then.
        max_calls, parser: see :class:`ToolEnv`. With a parser the template does not show the tools:
            the first message has to say how they are called.

    Raises:
        ConfigError: a tool is none, or cannot be called.

    Examples:
        >>> from torchrl_llm.testing.environments import StopOrGo
        >>> class Notes:
        ...     def schemas(self):
        ...         return [{"name": "note", "parameters": {"properties": {"text": {"type": "string"}}}}]
        ...     def call(self, name, arguments):
        ...         return "Noted."
        >>> spec = with_tools(StopOrGo, lambda: [Notes()], max_calls=3)
        >>> spec.name, spec.make().reset(seed=1)[0]
        ('StopOrGo', 'Say stop or go on.')
    """
    spec, made = resolve_env(env), tools() if callable(tools) else tools
    schemas = tool_schemas(made)
    for tool in made if callable(tools) else ():
        if hasattr(tool, "close"):  # it was made for its schemas
            tool.close()
    extras = {**spec.extras, FAULTS: float}
    make: Callable[..., Any] = partial(_make, spec.make, tools, max_calls, parser)
    return replace(spec, make=make, extras=extras, single_turn=None, tools=schemas if parser is None else ())


def _make(
    make: Callable[..., Any], tools: Any, max_calls: int | None, parser: ToolParser | None, /, **options: Any
) -> Any:
    return ToolEnv(make(**options), tools() if callable(tools) else tools, max_calls=max_calls, parser=parser)


def _functions_of(tool: Any) -> list[tuple[str, Callable[..., Any]]]:
    if isinstance(tool, ToolSet):
        names = [schema["function"]["name"] for schema in tool_schemas([tool])]
        return [(name, partial(_call_of, tool, name)) for name in names]
    if isinstance(tool, ToolService):
        return [(tool.name, tool)]
    if not inspect.isroutine(tool):
        raise ConfigError(f"The tool {tool!r:.80} cannot be called; expected a function, or an object with call().")
    return [(tool.__name__, tool)]


def _call_of(tool: ToolSet, tool_name: str, /, **arguments: Any) -> Any:
    return tool.call(tool_name, arguments)


def _check_arguments(parameters: Schema, arguments: Mapping[str, Any]) -> None:
    """Refuse arguments that the schema of a tool does not have, or has otherwise."""
    known = parameters.get("properties") or {}
    if missing := [name for name in parameters.get("required") or () if name not in arguments]:
        raise ToolError(f"The argument {missing[0]!r} is missing.")
    if unknown := [name for name in arguments if name not in known]:
        raise ToolError(f"There is no argument {unknown[0]!r}; expected {', '.join(known) or 'none'}.")
    for name, value in arguments.items():
        if not _fits(known[name], value):
            kind = known[name].get("type")
            raise ToolError(f"The argument {name!r} is {json.dumps(value):.80}; expected {kind}.")


def _fits(schema: Any, value: Any) -> bool:
    kinds = schema.get("type") if isinstance(schema, Mapping) else None
    if kinds is None or (value is None and schema.get("nullable")):
        return True
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if isinstance(value, bool):  # an int, to Python
        return "boolean" in kinds
    return any(isinstance(value, _KINDS.get(kind, object)) for kind in kinds)


def _as_text(result: Any) -> str:
    if isinstance(result, str):
        return str(result)
    try:
        return json.dumps(result, ensure_ascii=False)
    except (TypeError, ValueError):
        return str(result)
