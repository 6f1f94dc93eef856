"""An episode that asks an MCP server: the server's tools are in the first message, a result is a
message of the role tool.

    pip install "torchrl-llm[mcp]"
    # starts examples/mcp_server.py for each slot, and ends it
    python examples/mcp_tools.py
    # one that runs
    python examples/mcp_server.py 8000 & python examples/mcp_tools.py http://127.0.0.1:8000/mcp
"""

import json
import random
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

from gem.core import Env
from gem.tools.tool_env_wrapper import ToolEnvWrapper
from tensordict import TensorDict

from torchrl_llm.collectors import TurnCollector
from torchrl_llm.envs import GEMEnv
from torchrl_llm.testing.policies import ScriptedPolicy
from torchrl_llm.testing.tiny import load_tiny_tokenizer
from torchrl_llm.worlds.mcp import MCPTools

PROGRAM = {"command": sys.executable, "args": [str(Path(__file__).with_name("mcp_server.py"))]}


class Inventory(Env):
    """How many pieces are in store? Only the server knows."""

    # it has a generator of its own, so the slots wait for their servers side by side
    thread_safe = True
    STOCK = {"bolts": 40, "nails": 75, "screws": 12}  # noqa: RUF012

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        self.item = random.Random(seed).choice(sorted(self.STOCK))
        return f"How many {self.item} are in store? Give the number within \\boxed{{}}.", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        answer = re.search(r"\\boxed{(\d{1,9})}", action)
        right = answer is not None and int(answer[1]) == self.STOCK[self.item]
        return "Right." if right else "Wrong.", float(right), True, False, {}


def with_store(server: str | dict[str, Any], timeout: float = 30.0) -> ToolEnvWrapper:
    """The question, and the tools of a server; a slot has a session of its own."""
    return ToolEnvWrapper(Inventory(), tools=[MCPTools(server, timeout=timeout)], max_tool_uses=2)


def solve(episode: int, turn: int, context: str) -> str:
    """A player: ask the server, then answer with what it said."""
    if turn == 0:
        item = re.findall(r"How many (\w+) are", context)[-1]
        return f"<tool_call>{json.dumps({'name': 'stock', 'arguments': {'item': item}})}</tool_call>"
    return r"\boxed{" + re.findall(r"tool\n(\d+)", context)[-1] + "}"


def main(server: str | dict[str, Any]) -> TensorDict:
    """Play, print the first episode; returns the rows ``[B]``."""
    tokenizer = load_tiny_tokenizer()
    limits = {"max_model_len": 2048, "max_output_tokens": 96}
    env = GEMEnv(partial(with_store, server), tokenizer=tokenizer, num_envs=2, num_threads=2, **limits)
    policy = ScriptedPolicy(solve, tokenizer=tokenizer, max_output_tokens=96, read_context=True)
    rows = TurnCollector(env, policy, batch_size=4).rollout()
    env.close()
    print(tokenizer.decode(rows["tokens"][0][rows["attention_mask"][0]]))
    print(f"won: {rows['turn', 'success'].any(-1).tolist()}")
    return rows


if __name__ == "__main__":
    main(sys.argv[1] if sys.argv[1:] else PROGRAM)
