"""A tool of GEM in an episode: the model writes Python, GEM runs it, and the result is a message.

    # a scripted player, in seconds: what the model reads, and which tokens it is trained on
    python examples/tools.py
    # a model; give yours as --model-path
    python examples/tools.py --config examples/configs/tiny_reinforce_llm.yaml \\
        --max-model-len 1024 --max-output-tokens 32 --output-dir runs/tools

GEM runs the program in a process of its own, which is not a sandbox: see "Tools" in the page on
environments.
"""

import re
import sys
from functools import partial

import gem
from gem.tools.python_code_tool import PythonCodeTool
from gem.tools.tool_env_wrapper import ToolEnvWrapper
from tensordict import TensorDict
from transformers import PreTrainedTokenizerBase

from torchrl_llm import keys
from torchrl_llm.collectors import TurnCollector
from torchrl_llm.envs import GEMEnv
from torchrl_llm.report import run_and_report
from torchrl_llm.runs import build_run, parse_settings
from torchrl_llm.testing.policies import ScriptedPolicy
from torchrl_llm.testing.tiny import load_tiny_tokenizer

USED = 0.1  # for a program that runs, once; the answer pays 1


def sums() -> ToolEnvWrapper:
    """Sums, and a Python tool that an episode may use once."""
    task = gem.make("rg:chain_sum")
    return ToolEnvWrapper(task, tools=[PythonCodeTool()], tool_success_reward=USED, max_tool_uses=1)


def solve(episode: int, turn: int, context: str) -> str:
    """A player: let Python calculate, then answer with its result."""
    if turn == 0:
        (terms,) = re.findall(r"^State the final answer .*: (.*) =", context, re.MULTILINE)
        return f"<python>print({terms})</python>"
    return rf"\boxed{{{re.findall(r'Code execution result: (-?[0-9]+)', context)[-1]}}}"


def collect(tokenizer: PreTrainedTokenizerBase, *, episodes: int = 2) -> TensorDict:
    """Rows ``[B]`` of the player's episodes."""
    env = GEMEnv(sums, tokenizer=tokenizer, num_envs=episodes, max_model_len=1024, max_output_tokens=64)
    policy = ScriptedPolicy(solve, tokenizer=tokenizer, max_output_tokens=64, read_context=True)
    return TurnCollector(env, policy, batch_size=episodes).rollout()


def main() -> TensorDict:
    """Print the first episode; returns the rows."""
    tokenizer = load_tiny_tokenizer()
    rows = collect(tokenizer)
    row = rows[0]
    shown = row["attention_mask"]
    print(tokenizer.decode(row["tokens"][shown]))
    actions = row["tokens"][row["turn_ids"] >= 0]
    print(f"trained on {len(actions)} of {int(shown.sum())} tokens: {tokenizer.decode(actions)}")
    print(f"reward of each turn: {row[keys.TURN_REWARD].tolist()}")
    return rows


if __name__ == "__main__":
    if sys.argv[1:]:
        config = parse_settings(description=__doc__)
        run_and_report(config, partial(build_run, config, env=sums))
    else:
        main()
