"""Time and memory of what looks at a whole batch at once: comparing states, and cutting rows into
micro-batches.

``OMP_NUM_THREADS=1 python benchmarks/large_batches.py``; each case in a process of its own, because
the peak memory of one never falls.
"""

import argparse
import json
import resource
import subprocess
import sys
import time

import torch
from tensordict import TensorDict

from torchrl_llm import keys
from torchrl_llm.data import micro_batches
from torchrl_llm.modules.prefixes import PrefixCost
from torchrl_llm.objectives import GroupRelative

RESPONSE, FEEDBACK, GROUP = 4, 6, 8
"""Tokens of each turn, and episodes of a task."""


def episodes(size: int, turns: int, prompt: int) -> TensorDict:
    """Rows of random tokens in groups of :data:`GROUP`, which share a prompt."""
    generator = torch.Generator().manual_seed(0)
    group = torch.arange(size) // GROUP
    tokens = torch.randint(3, 50, (size, prompt + turns * (RESPONSE + FEEDBACK)), generator=generator)
    tokens[:, :prompt] = tokens[group * GROUP, :prompt]
    turn_ids = torch.full_like(tokens, -1)
    for turn in range(turns):
        start = prompt + turn * (RESPONSE + FEEDBACK)
        turn_ids[:, start : start + RESPONSE] = turn
    last = torch.zeros(size, turns, dtype=torch.bool)
    last[:, -1] = True
    rows = TensorDict({keys.TOKENS: tokens, keys.TURN_IDS: turn_ids, keys.GROUP_ID: group}, [size])
    rows[keys.TURN_REWARD], rows[keys.TURN_MASK] = torch.randn(size, turns, generator=generator), torch.ones_like(last)
    rows[keys.TURN_TERMINATED], rows[keys.TURN_TRUNCATED] = last, torch.zeros_like(last)
    return rows


def chain(size: int) -> TensorDict:
    """Rows of which each begins with the one before, and is a token longer."""
    mask = torch.arange(size + 100) < 100 + torch.arange(size).unsqueeze(1)
    tokens = torch.randint(3, 50, (1, size + 100), generator=torch.Generator().manual_seed(0)).where(mask, 0)
    return TensorDict({keys.TOKENS: tokens, keys.ATTENTION_MASK: mask}, [size])


CASES = {
    "states by prefix, 1,024 episodes of 40 turns": ("prefix", 1024, 40, 300),
    "states by prefix, 4,096 episodes of 20 turns": ("prefix", 4096, 20, 300),
    "states by observation, 512 episodes of 40 turns": ("observation", 512, 40, 1000),
    "micro-batches, a chain of 4,000 prefixes": ("chain", 4000),
}


def measure(kind: str, *sizes: int) -> dict[str, float]:
    """CPU seconds of a case, and what it adds to the peak memory, in MB."""
    rows = chain(*sizes) if kind == "chain" else episodes(*sizes)
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    if kind == "chain":
        micro_batches(rows, 16384, PrefixCost(stage=200.0, context=1e-3, key=0.05))
    else:
        GroupRelative(credit="state", state=kind, baseline="leave_one_out", scale="none")(rows)
    seconds = time.process_time() - start
    return {
        "seconds": round(seconds, 2),
        "megabytes": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024,
    }


def main() -> None:
    """Print the figures of each case as a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=CASES, help="measure this one, here")
    case = parser.parse_args().case
    if case is not None:
        torch.set_num_threads(1)
        print(json.dumps({"case": case, **measure(*CASES[case])}))
        return
    for name in CASES:
        subprocess.run([sys.executable, __file__, "--case", name], check=True)


if __name__ == "__main__":
    main()
