"""Tools of MCP servers (https://modelcontextprotocol.io) for
:class:`~torchrl_llm.envs.tool_env.ToolEnv` and GEM's ``ToolEnvWrapper``: :class:`MCPTools`.

GEM has a tool of its own for these, ``gem.tools.mcp_tool.MCPTool``. It connects for each call, so
that a server cannot keep a session, it cannot hold a server on standard input and output, and where
a server fails it hands the model a message: the model would be trained on the failure. Here a
session lasts, and a failure is a fault of the environment.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import threading
import weakref
from collections.abc import Awaitable, Callable, Mapping
from functools import cache
from typing import Any, TypeVar

from torchrl_llm.envs.tools import ToolError
from torchrl_llm.utils.optional import import_extra
from torchrl_llm.utils.options import ConfigError

__all__ = ["MCPServerError", "MCPTools"]

T = TypeVar("T")

_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_INVALID_PARAMS = -32602  # JSON-RPC: the server refuses this call, and continues
_DEEPEST = 64  # brackets within each other; parsers of JSON end at some hundreds
_PATIENCE = 1.0  # seconds without an answer, after which a server is asked again
_CLOSE_TIMEOUT = 10.0  # seconds in which a session should have ended

_HOW = """\
Call a tool, one in a response, with
<tool_call>{{"name": "...", "arguments": {{...}}}}</tool_call>
Its result is the next message. The tools:
{tools}"""


class MCPServerError(RuntimeError):
    """A server of tools cannot be reached, or its connection ended."""


class MCPTools:
    """The tools of an MCP server, for :class:`~torchrl_llm.envs.tool_env.ToolEnv`, or as a tool of
    GEM's ``ToolEnvWrapper``.

    In a ``ToolEnv`` calls have the form that the chat template has for them. To GEM's wrapper, a
    response calls a tool by ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``; the
    result is the next message. What a server says of a call, that it failed or has the wrong
    arguments, is a result too, and so is what is wrong with a call that cannot be sent. A server
    that is missing, ends or does not answer raises, so the episode ends as a fault.

    The session begins with the first reset and lasts until :meth:`close`, or until the tools are
    garbage: a slot's episodes share it. So a server that keeps a state between calls needs a tool
    that resets it.

    Args:
        server: the address, such as ``"http://127.0.0.1:8000/mcp"``; or a program that talks on
            standard input and output, ``{"command": "python", "args": ["server.py"]}``, which has
            few of this process's variables unless ``"env"`` gives more; or several servers,
            ``{"mcpServers": {name: ..., ...}}``.
        timeout: seconds that a call may take, and the first one with the connection. Default 30.

    Raises:
        ConfigError: ``server`` is none of these, or ``timeout`` is not positive.
        MissingExtraError: ``fastmcp`` is not installed.

    Examples:
        >>> tools = MCPTools("http://127.0.0.1:8000/mcp", timeout=5.0)  # doctest: +SKIP
        >>> tools.execute_action('<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>')  # doctest: +SKIP
        (True, False, '3', '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>')
    """

    tool_type = "mcp"

    def __init__(self, server: str | Mapping[str, Any], *, timeout: float = 30.0) -> None:
        if timeout <= 0:
            raise ConfigError(f"The timeout of an MCP server is {timeout!r}; expected seconds, more than 0.")
        self._config, self.name = _read_server(server)
        self._make = import_extra("fastmcp", extra="mcp", what="A server of MCP tools").Client
        self._timeout = timeout
        self._client: Any = None
        self._end: Callable[[], Any] = lambda: None

    def instruction_string(self) -> str:
        """How a tool is called, and the name, description and parameters of each as JSON, for the
        first message.

        Raises:
            MCPServerError, TimeoutError: see :meth:`execute_action`.
        """
        tools = self._run(lambda client: client.list_tools())
        return _HOW.format(tools="\n".join(map(_describe, sorted(tools, key=lambda tool: tool.name))))

    def schemas(self) -> list[dict[str, Any]]:
        """The schema of each tool, for the chat template
        (:class:`~torchrl_llm.envs.tool_env.ToolEnv`).

        Raises:
            MCPServerError, TimeoutError: see :meth:`execute_action`.
        """
        tools = self._run(lambda client: client.list_tools())
        return [
            {"type": "function", "function": _described(tool)} for tool in sorted(tools, key=lambda tool: tool.name)
        ]

    def reset(self) -> None:
        """Nothing: the session lasts, and what a server keeps between calls is reset by a tool of
        its own."""

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """What a tool returns.

        Raises:
            ToolError: the server says that the call failed, or is wrong.
            MCPServerError, TimeoutError: see :meth:`execute_action`.
        """
        failed, text = self._run(lambda client: _answer(client, name, arguments))
        if failed:
            raise ToolError(text)
        return text

    def execute_action(self, action: str) -> tuple[bool, bool, str, str]:
        """Call the tool that a response names.

        Args:
            action: the response.

        Returns:
            Whether it calls a tool, whether that failed, the message, and the response up to the
            end of the call: what ``ToolEnvWrapper`` reads.

        Raises:
            MCPServerError: the server cannot be reached, or its connection ended.
            TimeoutError: it did not answer in time.
        """
        found = _CALL.search(action)
        if found is None:
            return False, True, "", ""
        parsed = action[: found.end()]
        try:
            name, arguments = _read_call(found[1])
        except _WrongCallError as error:
            return True, True, str(error), parsed
        failed, text = self._run(lambda client: _answer(client, name, arguments))
        return True, failed, text, parsed

    def close(self) -> None:
        """End the session, and the program if there is one. Safe to call twice."""
        ending, self._client = self._end(), None
        if ending is not None:
            ending.result(_CLOSE_TIMEOUT)

    def _run(self, work: Callable[[Any], Awaitable[T]]) -> T:
        """The result of ``work`` with the session, which is opened if there is none, and dropped
        after a failure."""
        answer = asyncio.wait_for(self._connected(work), self._timeout)
        running = asyncio.run_coroutine_threadsafe(answer, _event_loop())
        try:
            return running.result()
        except TimeoutError as error:
            self._drop()
            raise TimeoutError(f"The MCP server {self.name} did not answer within {self._timeout} s.") from error
        except Exception as error:
            self._drop()
            raise MCPServerError(
                f"The MCP server {self.name} cannot be reached, or its connection ended: start it, or correct the address "
                f"({type(error).__name__}: {error})."
            ) from error

    async def _connected(self, work: Callable[[Any], Awaitable[T]]) -> T:
        if self._client is None:
            program = isinstance(self._config, dict)
            client = self._make(self._config, auto_initialize=not program)
            await client.__aenter__()
            self._client, self._end = client, weakref.finalize(self, _close, client)
            if program:
                await _initialize(client)
        return await work(self._client)

    def _drop(self) -> None:
        self._end()
        self._client = None


def _read_server(server: str | Mapping[str, Any]) -> tuple[Any, str]:
    """What the client takes, and the server's name in messages."""
    if isinstance(server, str) and server.startswith(("http://", "https://")):
        return server, server
    if isinstance(server, Mapping) and "command" in server:
        return {"mcpServers": {"server": dict(server)}}, repr(" ".join([server["command"], *server.get("args", ())]))
    if isinstance(server, Mapping) and server.get("mcpServers"):
        return dict(server), " and ".join(map(repr, server["mcpServers"]))
    raise ConfigError(
        f'The MCP server is {server!r:.200}; expected an address, such as "http://127.0.0.1:8000/mcp", a program, such as '
        '{"command": "python", "args": ["server.py"]}, or {"mcpServers": {name: ...}}.'
    )


class _WrongCallError(ValueError):
    """What the policy is told of a call that it wrote wrongly."""


def _read_call(text: str) -> tuple[str, dict[str, Any]]:
    """The tool that a call names, and its arguments; what is returned here can be sent.

    Raises:
        _WrongCallError: the policy wrote it wrongly.

    Examples:
        >>> _read_call('{"name": "add", "arguments": {"a": 1}}')
        ('add', {'a': 1})
    """
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        call = None
    if not isinstance(call, dict) or "name" not in call:
        raise _WrongCallError('This is not a tool call; expected JSON, {"name": "...", "arguments": {...}}.')
    name, arguments = call["name"], call.get("arguments", {})
    if not isinstance(name, str):
        raise _WrongCallError(f"The name of the tool is {json.dumps(name):.80}; expected a text.")
    if not isinstance(arguments, dict):
        raise _WrongCallError(f"The arguments are {json.dumps(arguments):.80}; expected an object, {{...}}.")
    try:
        # Not what Python reads besides JSON: NaN, infinity, halves of characters.
        json.dumps([name, arguments], allow_nan=False, ensure_ascii=False).encode()
    except ValueError:
        raise _WrongCallError("The call has a number or a character that JSON does not have.") from None
    if _is_deeper(arguments, _DEEPEST):
        raise _WrongCallError(f"The arguments have more than {_DEEPEST} brackets within each other.")
    return name, arguments


def _is_deeper(value: Any, depth: int) -> bool:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return depth < 0 or any(_is_deeper(each, depth - 1) for each in parts)


def _describe(tool: Any) -> str:
    return json.dumps(_described(tool), ensure_ascii=False)


def _described(tool: Any) -> dict[str, Any]:
    fields = tool.model_dump(by_alias=True)
    return {"name": fields["name"], "description": fields["description"], "parameters": fields["inputSchema"]}


async def _answer(client: Any, name: str, arguments: Mapping[str, Any]) -> tuple[bool, str]:
    """Call a tool; whether it failed, and its text."""
    try:
        result = await client.call_tool(name, arguments, raise_on_error=False)
    except Exception as error:
        # The class of this error has other names in other versions of the protocol's package.
        refused = getattr(getattr(error, "error", None), "code", None) == _INVALID_PARAMS
        # Whatever went wrong with the call: a server that answers is not down.
        if refused or await _answers(client):
            return True, str(error)
        raise
    return result.is_error, "\n".join(getattr(part, "text", f"[{part.type}]") for part in result.content)


async def _initialize(client: Any) -> None:
    """Begin the session with a program.

    The answer of one that ends before it is asked would be waited for until the timeout; what is
    asked later fails at once. A program may be pinged at any time, a web server in a session only.
    """
    starting = asyncio.ensure_future(client.initialize())
    try:
        await asyncio.wait([starting], timeout=_PATIENCE)
        if not starting.done():
            # Not cancelled, whatever happens: an answer that nobody waits for would end the
            # session.
            asking = asyncio.ensure_future(client.ping())
            await asyncio.wait([starting, asking], return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait([starting], timeout=_PATIENCE)  # of one that refuses pings
            if not starting.done():
                await asking
            asking.add_done_callback(lambda asked: asked.cancelled() or asked.exception())
        await starting
    finally:
        starting.cancel()


async def _answers(client: Any) -> bool:
    try:
        return bool(await client.ping())
    except Exception:  # noqa: BLE001  of the transport, whichever it is: the error of the call is raised
        return False


# ---------------------------------------- the thread of all sessions


_starting = threading.Lock()


def _event_loop() -> asyncio.AbstractEventLoop:
    """The loop in which all sessions of this process run."""
    # Slots ask for it from several threads at once, and a cache alone would start a loop for each.
    # A fork has no threads.
    with _starting:
        return _loop_of(os.getpid())


@cache
def _loop_of(process: int) -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    # A daemon: a server that hangs does not hold up the exit.
    threading.Thread(target=loop.run_forever, name="torchrl_llm MCP", daemon=True).start()
    return loop


def _close(client: Any) -> Any:
    return asyncio.run_coroutine_threadsafe(client.close(), _event_loop())
