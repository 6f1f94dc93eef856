"""Tools of MCP servers: programs on standard input and output, and servers that the test starts."""

from __future__ import annotations

import asyncio
import gc
import json
import math
import os
import re
import socket
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest
from gem.tools.tool_env_wrapper import ToolEnvWrapper
from waiting import LIMIT, wait_until

from torchrl_llm.envs import EnvironmentFault, GEMEnv, Response
from torchrl_llm.envs.tool_calls import ToolCall
from torchrl_llm.envs.tool_env import ToolEnv
from torchrl_llm.keys import StopReason
from torchrl_llm.runs import RunSettings, build_run
from torchrl_llm.testing.environments import StopOrGo
from torchrl_llm.testing.policies import ScriptedPolicy
from torchrl_llm.worlds import mcp as mcp_tools
from torchrl_llm.worlds.mcp import MCPServerError, MCPTools, _initialize

pytestmark = pytest.mark.families
pytest.importorskip("fastmcp")

WORLD = Path(__file__).parent / "mcp_world.py"
STORE = Path(__file__).parents[2] / "examples" / "mcp_server.py"
SHORT = 5.0
"""Seconds that a server which hangs is waited for."""


def program(script: Path = WORLD) -> dict:
    return {"command": sys.executable, "args": [str(script)]}


def listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def start_server(script: Path):
    port = free_port()
    process = subprocess.Popen([sys.executable, script, str(port)], stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: listens(port) or process.poll() is not None, "the start of the server")
        assert process.poll() is None
        yield process, f"http://127.0.0.1:{port}/mcp"
    finally:
        process.kill()
        process.wait(LIMIT)


@pytest.fixture
def server():
    """The process of a server, and its address."""
    yield from start_server(WORLD)


@pytest.fixture(scope="module")
def shared_server():
    """The address of a server that no test ends."""
    for _, url in start_server(WORLD):
        yield url


@pytest.fixture(params=["program", "server"])
def tools(request):
    given = program() if request.param == "program" else request.getfixturevalue("shared_server")
    tools = MCPTools(given, timeout=LIMIT)
    yield tools
    tools.close()


def written(value: object) -> str:
    return f"<tool_call>{json.dumps(value)}</tool_call>"


def call(name: str, **arguments) -> str:
    return written({"name": name, "arguments": arguments})


def deep(brackets: int) -> str:
    return f'<tool_call>{{"name": "add", "arguments": {{"a": {"[" * brackets}{"]" * brackets}, "b": 2}}}}</tool_call>'


def connected(server: str | dict, timeout: float) -> MCPTools:
    """Tools whose ``timeout`` is for an answer alone: a connection takes longer on a busy
    machine."""
    tools = MCPTools(server, timeout=LIMIT)
    tools.execute_action(call("add", a=1, b=2))
    tools._timeout = timeout
    return tools


def ended(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    return False


class TestCalls:
    def test_the_instructions_list_the_tools(self, tools):
        lines = tools.instruction_string().splitlines()
        listed = [json.loads(line) for line in lines[lines.index("Its result is the next message. The tools:") + 1 :]]
        assert [each["name"] for each in listed] == ["add", "count", "die", "fail", "hang"]
        assert listed[0]["description"] == "Add two integers."
        assert listed[0]["parameters"]["required"] == ["a", "b"]

    def test_a_result_is_a_message(self, tools):
        response = f"Let me see. {call('add', a=1, b=2)} And so on."
        assert tools.execute_action(response) == (True, False, "3", f"Let me see. {call('add', a=1, b=2)}")

    @pytest.mark.parametrize(
        ("response", "says"),
        [
            (call("fail"), "out of stock"),
            (call("add", a=1), "(?s)b.*[Mm]issing"),
            (call("subtract"), "Unknown tool"),
            ("<tool_call>add(1, 2)</tool_call>", "not a tool call; expected JSON"),
            ("<tool_call>[1]</tool_call>", "not a tool call; expected JSON"),
            ('<tool_call>{"arguments": {}}</tool_call>', "not a tool call; expected JSON"),
            (written({"name": "add", "arguments": '{"a": 1, "b": 2}'}), r"The arguments are \".*; expected an object"),
            (written({"name": "add", "arguments": [1, 2]}), r"The arguments are \[1, 2\]; expected an object"),
            (written({"name": "add", "arguments": None}), "The arguments are null; expected an object"),
            (written({"name": "add", "arguments": 3}), "The arguments are 3; expected an object"),
            (written({"name": 5}), "The name of the tool is 5; expected a text"),
            (written({"name": None}), "The name of the tool is null; expected a text"),
            (written({"name": ["add"]}), r'The name of the tool is \["add"\]; expected a text'),
            (written({"name": ""}), "Unknown tool"),
            (written({"name": "\ud83d"}), "a character that JSON does not have"),
            (written({"name": "add", "arguments": {"a": "\ud83d", "b": 2}}), "a character that JSON does not have"),
            (written({"name": "add", "arguments": {"\ud83d": 2}}), "a character that JSON does not have"),
            (written({"name": "add", "arguments": {"a": math.nan, "b": 2}}), "a number or a character that JSON"),
            ('<tool_call>{"name": "add", "arguments": {"a": 1e400}}</tool_call>', "a number or a character that JSON"),
            (f'<tool_call>{{"name": "add", "arguments": {{"a": 1{"0" * 5000}}}}}</tool_call>', "not a tool call"),
            (f"<tool_call>{'{' * 2000}</tool_call>", "not a tool call; expected JSON"),
            (f"<tool_call>{'[' * 100_000}</tool_call>", "not a tool call; expected JSON"),
            (deep(2000), "not a tool call|more than 64 brackets"),
            (deep(300), "more than 64 brackets"),
            (deep(60), "(?s)a.*integer"),
        ],
        ids=lambda given: given[:60],
    )
    def test_a_call_that_fails_is_one_too(self, tools, response, says):
        before = tools.execute_action(call("count"))[2].split()
        called, failed, text, parsed = tools.execute_action(response)
        assert (called, failed, parsed) == (True, True, response)
        assert re.search(says, text)
        after = tools.execute_action(call("count"))[2].split()
        # The same process answers, in the same session.
        assert (int(after[0]), after[1]) == (int(before[0]) + 1, before[1])

    def test_a_response_without_a_call(self, tools):
        assert tools.execute_action("<tool_call>add") == (False, True, "", "")

    def test_a_session_lasts(self, tools):
        first, second = (tools.execute_action(call("count"))[2].split() for _ in range(2))
        assert int(second[0]) == int(first[0]) + 1
        assert second[1] == first[1]


def test_calls_of_a_response_are_the_servers(tools):
    env = ToolEnv(StopOrGo(), [tools])
    env.reset(seed=0)
    calls = ToolCall("add", {"a": 1, "b": 2}), ToolCall("fail", {}), ToolCall("add", {"a": 1})
    text, *_, info = env.step(Response("...", calls=calls))
    added, failed, refused = text.splitlines()
    assert added == "add: 3"
    assert failed.startswith("fail: Error: ")
    assert "out of stock" in failed
    assert refused == "add: Error: The argument 'b' is missing."
    assert (info["tool_faults"], info["use_tool"]) == (2, True)


class TestSessions:
    @pytest.mark.parametrize("end", ["close", "garbage"])
    def test_the_program_ends_with_the_tools(self, end):
        tools = MCPTools(program(), timeout=LIMIT)
        process = int(tools.execute_action(call("count"))[2].split()[1])
        assert not ended(process)
        if end == "close":
            tools.close()
            tools.close()
        del tools
        gc.collect()
        wait_until(lambda: ended(process))

    def test_first_connections_of_several_threads(self, shared_server, monkeypatch):
        # Each thread once started a loop of its own, and a later call waited for the loop of
        # another one.
        monkeypatch.setattr(mcp_tools, "_loop_of", mcp_tools.cache(mcp_tools._loop_of.__wrapped__))
        each, barrier, results = [MCPTools(shared_server, timeout=LIMIT) for _ in range(8)], threading.Barrier(8), []

        def work(tools):
            barrier.wait()
            results.extend(tools.execute_action(call("add", a=1, b=2))[2] for _ in range(2))

        threads = [threading.Thread(target=work, args=(tools,)) for tools in each]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == ["3"] * 16
        for tools in each:
            tools.close()


def episode(tools: MCPTools, responses: list[str], tokenizer, **given):
    """One episode in which the player says these lines, and the environment."""
    env = GEMEnv(
        lambda: ToolEnvWrapper(StopOrGo(), tools=[tools]),
        tokenizer=tokenizer, max_model_len=4096, max_output_tokens=128, **given,
    )  # fmt: skip
    policy = ScriptedPolicy(lambda _, turn, context: responses[turn], tokenizer=tokenizer, max_output_tokens=128)
    rollout = env.rollout(len(responses), policy)
    text = tokenizer.decode(env.slots.context(0))
    env.close()
    return rollout["next"], text


class TestFaults:
    def test_a_tool_answers_in_an_episode(self, tools, tokenizer):
        after, text = episode(tools, [call("add", a=20, b=22), "stop"], tokenizer)
        assert "<|im_start|>tool\n42<|im_end|>" in text
        assert after["stop_reason"].flatten().tolist() == [StopReason.RUNNING, StopReason.WON]

    @pytest.mark.parametrize("kind", ["program", "server"])
    def test_a_server_that_dies(self, kind, request, tokenizer, caplog):
        given = program() if kind == "program" else request.getfixturevalue("server")[1]
        after, _ = episode(connected(given, SHORT if kind == "server" else LIMIT), [call("die")], tokenizer)
        assert after["truncated"].all()
        assert (after["stop_reason"] != StopReason.RUNNING).all()
        assert f"The MCP server {MCPTools(given).name}" in caplog.text

    def test_a_program_that_dies_is_no_timeout(self, tokenizer, caplog):
        after, _ = episode(MCPTools(program(), timeout=LIMIT), [call("die")], tokenizer)
        assert (after["stop_reason"] == StopReason.ERROR).all()
        assert "cannot be reached, or its connection ended: start it, or correct the address" in caplog.text

    def test_a_server_that_hangs(self, shared_server, tokenizer, caplog):
        after, _ = episode(connected(shared_server, SHORT), [call("hang")], tokenizer)
        assert after["truncated"].all()
        assert (after["stop_reason"] == StopReason.TIMEOUT).all()
        assert f"The MCP server {shared_server} did not answer within {SHORT} s (" in caplog.text

    def test_a_server_that_is_missing(self, tokenizer):
        url = f"http://127.0.0.1:{free_port()}/mcp"
        with pytest.raises(EnvironmentFault, match=f"at its reset .*The MCP server {url} cannot be reached"):
            episode(MCPTools(url, timeout=LIMIT), ["stop"], tokenizer, max_faults=0)

    @pytest.mark.parametrize("command", ["no-such-program", "true"])
    def test_a_program_that_is_missing(self, command, tokenizer):
        with pytest.raises(EnvironmentFault, match=f"at its reset .*The MCP server '{command}' cannot be reached"):
            episode(MCPTools({"command": command}, timeout=LIMIT), ["stop"], tokenizer, max_faults=0)

    def test_a_program_that_ends_at_once_is_never_waited_for(self):
        """It ends before it is asked, or while it is, or later."""
        for _ in range(60):
            with pytest.raises(MCPServerError, match="cannot be reached"):
                MCPTools({"command": "true"}, timeout=LIMIT).instruction_string()

    def test_a_session_that_ended_before_it_was_asked(self):
        """As the client is when a program ended between its start and the first question: that has
        no answer, and every later one fails."""

        class Ended:
            async def initialize(self):
                await asyncio.Event().wait()

            async def ping(self):
                raise RuntimeError("the session is closed")

        with pytest.raises(RuntimeError, match="the session is closed"):
            asyncio.run(asyncio.wait_for(_initialize(Ended()), LIMIT))

    def test_a_server_that_is_back_is_used_again(self, server):
        process, url = server
        tools = MCPTools(url, timeout=LIMIT)
        assert tools.execute_action(call("add", a=1, b=2))[2] == "3"
        process.kill()
        process.wait(LIMIT)
        tools._timeout = SHORT
        with pytest.raises((MCPServerError, TimeoutError), match="The MCP server"):
            tools.execute_action(call("add", a=1, b=2))
        tools._timeout = LIMIT
        port = int(url.split(":")[2].split("/")[0])
        again = subprocess.Popen([sys.executable, WORLD, str(port)], stderr=subprocess.DEVNULL)
        try:
            wait_until(lambda: listens(port))
            assert tools.execute_action(call("add", a=1, b=2))[2] == "3"
        finally:
            again.kill()
            again.wait(LIMIT)


class TestExample:
    @pytest.fixture
    def example(self, monkeypatch):
        monkeypatch.syspath_prepend(STORE.parent)
        import mcp_tools as example

        return example

    @pytest.mark.parametrize("kind", ["program", "server"])
    def test_the_player_asks_the_server(self, example, kind, capfd):
        for _, url in start_server(STORE) if kind == "server" else [(None, example.PROGRAM)]:
            rows = example.main(url)
        assert rows["turn", "success"].any(-1).all()
        assert rows["turn", "reward"].tolist() == [[0.0, 1.0]] * 4
        shown = capfd.readouterr().out
        assert '{"name": "stock", "description": "How many pieces of an item are in store."' in shown
        tokenizer = example.load_tiny_tokenizer()
        for row in rows:
            actions = tokenizer.decode(row["tokens"][row["turn_ids"] >= 0])
            number = actions.partition("boxed{")[2].partition("}")[0]
            assert f"<|im_start|>tool\n{number}<|im_end|>" in tokenizer.decode(row["tokens"])
            assert actions.count(number) == 1  # the answer, and not the tool's message

    def test_a_model_trains_on_it(self, example, tmp_path):
        for _, url in start_server(STORE):
            run = build_run(
                RunSettings.from_values(
                    model_path="tiny", algo="LLMREINFORCE", env_name="store", num_envs=2, batch_size=4, max_model_len=1024,
                    max_output_tokens=8, lora_r=0, kl_coeff=0.0, max_iterations=1, evaluation_interval=0, final_episodes=4,
                    save_checkpoints=False, output_dir=tmp_path, progress=False,
                ),
                env=partial(example.with_store, url),
            )  # fmt: skip
            try:
                (metrics,) = run.trainer.train()
            finally:
                run.close()
        assert metrics["rollout/episodes"] == 4
