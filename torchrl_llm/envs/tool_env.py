"""Environments with tools: :class:`ToolEnv` executes the calls of a response, and
:func:`with_tools` gives tools to any environment."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

from torchrl_llm import turn_columns
from torchrl_llm.envs.columns import ExtraKinds
from torchrl_llm.envs.env_spec import EnvSpec
from torchrl_llm.envs.registry import EnvSource, resolve_env
from torchrl_llm.envs.tool_arguments import check_arguments
from torchrl_llm.envs.tool_calls import BadCall, ToolCall
from torchrl_llm.envs.tools import Tool, ToolError, ToolService, ToolSet, tool_schemas
from torchrl_llm.utils.options import ConfigError

FAULTS, CALLS = turn_columns.TOOL_FAULTS[-1], turn_columns.TOOL_CALLS[-1]

Tools = Sequence[Tool] | Callable[[], Sequence[Tool]] | Callable[[Any], Sequence[Tool]]
"""Tools, or a function that makes them; it may take the environment, whose methods are tools
then."""

ToolParser = Callable[[str], Mapping[str, Any]]
"""From an answer to its ``"calls"``, each with ``tool`` and ``args``: TorchRL's
``LLMToolParser``."""


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
            TorchRL's ``ToolService``; or, for tools with a state, a function that makes them, again
            for each episode unless they have ``reset()``. The function may take the environment,
            whose methods are tools then.
        max_calls: the most calls in an episode. Default: any number.
        extras: that the environment declares. Default: its attribute.
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
        self,
        env: Any,
        tools: Tools,
        *,
        max_calls: int | None = None,
        parser: ToolParser | None = None,
        extras: ExtraKinds | None = None,
    ) -> None:
        if max_calls is not None and max_calls < 1:
            raise ConfigError(f"ToolEnv: max_calls is {max_calls!r}; expected at least 1.")
        self.env, self.max_calls, self._left, self._parser = env, max_calls, max_calls, parser
        self._make = tools if callable(tools) else None
        self._take(_made(tools, lambda: env))
        own = getattr(env, "extras", None) if extras is None else extras
        self._own = dict(own) if isinstance(own, Mapping) else {}
        if taken := sorted(self._own.keys() & {"use_tool", "tool_results", FAULTS, CALLS}):
            raise ConfigError(
                f"The environment declares the extra {taken[0]!r}, which tools write: give it another name."
            )
        self.extras = {**self._own, **_counted(parser)}

    def _take(self, tools: Sequence[Tool]) -> None:
        self._schemas = {schema["function"]["name"]: schema["function"] for schema in tool_schemas(tools)}
        self._functions = {name: function for tool in tools for name, function in _functions_of(tool)}
        self._tools = [*tools]
        self._others = [tool for tool in tools if tool is not self.env]  # which may be one of them

    @property
    def thread_safe(self) -> bool:
        """Whether the environment and all tools are."""
        return all(map(_is_thread_safe, (self.env, *self._tools)))

    def __getattr__(self, name: str) -> Any:
        # What the environment declares: hidden_state, close.
        if name.startswith("__") or name == "env":
            raise AttributeError(name)
        return getattr(self.env, name)

    def reset(self, **kwargs: Any) -> Any:
        """Start an episode of the environment, and of tools with a state: those that have
        ``reset()`` are reset, and all others that a function made are made again."""
        self._left = self.max_calls
        if self._make is not None and not all(hasattr(tool, "reset") for tool in self._others):
            for tool in self._others:
                if hasattr(tool, "close"):
                    tool.close()
            self._take(_made(self._make, lambda: self.env))
        for tool in self._others:
            if hasattr(tool, "reset"):
                tool.reset()
        return self.env.reset(**kwargs)

    def step(self, action: str) -> Any:
        """Execute the calls of a response, or send one without calls to the environment."""
        calls = getattr(action, "calls", ()) if self._parser is None else _parsed(self._parser, action)
        if not calls:
            result = self.env.step(action)
            if isinstance(result, tuple) and len(result) == 5 and isinstance(result[4] or {}, Mapping):
                return *result[:4], {FAULTS: 0, CALLS: 0, **(result[4] or {})}
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
        info = {**blank, FAULTS: faults, CALLS: len(calls), "use_tool": True, "tool_results": results}
        return "\n".join(results), 0.0, False, False, info

    def _called(self, call: ToolCall | BadCall) -> Any:
        if self._left == 0:
            raise ToolError(f"All {self.max_calls} calls are used; answer without tools.")
        self._left = None if self._left is None else self._left - 1
        if isinstance(call, BadCall):
            raise ToolError(call.reason)
        if call.name not in self._functions:
            raise ToolError(f"There is no tool {call.name!r:.80}; the tools are {', '.join(self._functions)}.")
        check_arguments(self._schemas[call.name].get("parameters") or {}, call.arguments)
        # What a tool does to its arguments is no change of the call, which is recorded.
        return self._functions[call.name](**deepcopy(dict(call.arguments)))


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
    tools: Tools,
    *,
    max_calls: int | None = None,
    parser: ToolParser | None = None,
) -> EnvSpec:
    """An environment whose policy may call tools, for :class:`~torchrl_llm.envs.GEMEnv`.

    Args:
        env: an id, a factory or a spec.
        tools: see :class:`ToolEnv`; a function that makes them, if they have a state. One that
            takes the environment gets one that was made for the schemas first, and not reset.
        max_calls, parser: see :class:`ToolEnv`. With a parser the template does not show the tools:
            the first message has to say how they are called.

    Raises:
        ConfigError: a tool is none, or cannot be called; or the environment has tools already.

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
    spec = resolve_env(env)
    if spec.tools:
        raise ConfigError(f"The environment {spec.name!r} has tools already: give it all of them at once.")
    tools = tuple(tools) if isinstance(tools, Iterator) else tools
    opened: list[Any] = []  # for the schemas

    def make_env() -> Any:
        opened.append(spec.make())
        return opened[0]

    made = _made(tools, make_env)
    schemas = tool_schemas(made)
    # The environment may be a tool itself.
    for each in {id(each): each for each in (*made, *opened)}.values() if callable(tools) else ():
        if hasattr(each, "close"):
            each.close()
    names = tuple(schema["function"]["name"] for schema in schemas)
    make = ToolEnvMaker(spec.make, tools, max_calls, parser, spec.extras, names)
    extras = {**spec.extras, **_counted(parser)}
    return replace(spec, make=make, extras=extras, single_turn=None, tools=schemas if parser is None else ())


def _counted(parser: ToolParser | None) -> dict[str, type[float]]:
    """What is counted of each turn; calls are counted by the formatter, if it reads them."""
    return {FAULTS: float} if parser is None else {FAULTS: float, CALLS: float}


def _made(tools: Any, env: Callable[[], Any]) -> Sequence[Tool]:
    """The tools, which a function may make, from the environment if it takes that."""
    if not callable(tools):
        return tuple(tools) if isinstance(tools, Iterator) else tools
    needed = [
        each.kind
        for each in inspect.signature(tools).parameters.values()
        if each.default is each.empty and each.kind is not each.VAR_POSITIONAL and each.kind is not each.VAR_KEYWORD
    ]
    if len(needed) > 1 or inspect.Parameter.KEYWORD_ONLY in needed:
        raise ConfigError(
            f"The tools are {tools!r:.80}; expected a list of tools, or a function without arguments that makes one, or of the "
            "environment alone."
        )
    return cast(Sequence[Tool], tools(env()) if needed else tools())


@dataclass(frozen=True, eq=False)
class ToolEnvMaker:
    """Makes an environment with tools, see :func:`with_tools`.

    Attributes:
        make: makes the environment.
        tools, max_calls, parser, extras: see :class:`ToolEnv`.
        names: of the tools.
    """

    make: Callable[..., Any]
    tools: Any
    max_calls: int | None
    parser: ToolParser | None
    extras: ExtraKinds
    names: tuple[str, ...]

    def __call__(self, **options: Any) -> Any:
        env = self.make(**options)
        return ToolEnv(env, self.tools, max_calls=self.max_calls, parser=self.parser, extras=self.extras)


def _functions_of(tool: Any) -> list[tuple[str, Callable[..., Any]]]:
    if isinstance(tool, ToolSet):
        names = [schema["function"]["name"] for schema in tool_schemas([tool])]
        return [(name, partial(_call_of, tool, name)) for name in names]
    if isinstance(tool, ToolService):
        return [(tool.name, tool)]
    if not inspect.isroutine(tool) or inspect.iscoroutinefunction(tool):
        raise ConfigError(
            f"The tool {tool!r:.80} cannot be called; expected an ordinary function (asyncio.run inside will do), or an object with "
            "call()."
        )
    return [(tool.__name__, tool)]


def _call_of(tool: ToolSet, tool_name: str, /, **arguments: Any) -> Any:
    return tool.call(tool_name, arguments)


def _is_thread_safe(part: Any) -> bool:
    """Whether an environment or a tool says so; for a method its object does."""
    return any(getattr(each, "thread_safe", False) for each in (part, getattr(part, "__self__", None)))


def _as_list(result: Any) -> list[Any]:
    """A set, whose order would differ between processes, for JSON."""
    if not isinstance(result, set | frozenset):
        raise TypeError
    return sorted(result, key=repr)


def _as_text(result: Any) -> str:
    """What the policy reads of a tool's result.

    Raises:
        TypeError: it would read where in memory the result is, which is elsewhere in a replay.
    """
    if inspect.iscoroutine(result):
        result.close()  # or Python warns that nobody awaited it
    try:
        text = str(result) if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=_as_list)
    except (TypeError, ValueError):
        text = str(result)
    if not isinstance(result, str) and re.search(r" at 0x[0-9a-f]+>", text):
        raise TypeError(f"the tool returned a {type(result).__name__}, {text:.80}; expected text, or what JSON has")
    return text
