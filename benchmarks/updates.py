"""CPU-seconds of updates in this process, before a change and after it: in turns, in processes of
their own.

    git worktree add /tmp/before COMMIT
    OMP_NUM_THREADS=1 python benchmarks/updates.py --before /tmp/before --pairs 9

An update is a forward and a backward of all micro-batches, with shared prefixes. The cases named
``iteration`` are the whole :meth:`~torchrl_llm.trainers.LLMTrainer.learn` of
``benchmarks/iteration.py``'s work, ``guarded`` is the same in eight optimizer steps with a
``target_kl`` that none of them reaches, or that the first one does; ``random`` are shapes of
``benchmarks/learn.py --random``; the others are a group of rows, with the bound that their name
ends in.

Prints one JSON object, as ``benchmarks/sampling.py`` does.
"""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import iteration
import learn
import numpy as np
import pairs

from torchrl_llm.data import micro_batches
from torchrl_llm.modules import TokenScorer, enable_prefix_sharing
from torchrl_llm.runs import build_run

Work = Callable[[], object]


def update(model_name: str, max_tokens: int, *shapes: tuple[int, int, int, int], layers: int | None = None) -> Work:
    """Updates of rows of these shapes: tokens of prompts and of responses, responses to a prompt,
    prompts."""
    model = learn.make_model(model_name, layers)
    scorer = TokenScorer(model, prefixes=enable_prefix_sharing(model))
    batches = [learn.make_rows(model.config.vocab_size, *shape) for shape in shapes]

    def work() -> None:
        for rows in batches:
            for part in micro_batches(rows, max_tokens, scorer.prefix_cost):
                learn.scored(scorer, part).backward()
        model.zero_grad(set_to_none=True)

    return work


def random_shapes(count: int) -> list[tuple[int, int, int, int]]:
    """Some of the shapes that ``benchmarks/learn.py --random`` tries."""
    rng = np.random.default_rng(0)
    return [
        (int(rng.integers(1, 250)), int(rng.integers(1, 250)), int(rng.integers(1, 9)), int(rng.integers(1, 5)))
        for _ in range(count)
    ]


def whole(algo: str, **settings: Any) -> Work:
    """The update of an iteration, credit and reference included."""
    folder = tempfile.mkdtemp()
    iteration.make_model(Path(folder))
    config = iteration.make_config(algo, folder, 99).replace(**settings)
    run = build_run(config, env=iteration.AnyGuess)
    rows = run.trainer.collect(iter(run.trainer.collector))
    return lambda: run.trainer.learn(rows.clone())


CASES: dict[str, Callable[[], Work]] = {
    "300+60, 16384": lambda: update("135M", 16_384, (300, 60, 8, 1), layers=2),
    "random, 2048": lambda: update("0.66M", 2_048, *random_shapes(6)),
    "4100+61, 4096": lambda: update("0.66M", 4_096, (4_100, 61, 8, 1), layers=1),
    "4100+61, 16384": lambda: update("0.66M", 16_384, (4_100, 61, 8, 1), layers=1),
    "9000+100, 16384": lambda: update("0.66M", 16_384, (9_000, 100, 3, 1), layers=1),
    "iteration, GRPO": lambda: whole("GRPO"),
    "iteration, LLMPPO": lambda: whole("LLMPPO"),
    "guarded, GRPO": lambda: whole("GRPO", minibatch_size=4, target_kl=1.0),
    "guarded, LLMPPO": lambda: whole("LLMPPO", minibatch_size=4, target_kl=1.0),
    "guarded, GRPO, ended by the first step": lambda: whole("GRPO", minibatch_size=4, target_kl=1e-12),
}


def measure(name: str, repeats: int = 3) -> float:
    """The least CPU-seconds of a case: of three runs, or of as many as three seconds have room
    for."""
    work, seconds = CASES[name](), []
    while len(seconds) < repeats and sum(seconds) < 3:
        start = time.process_time()
        work()
        seconds.append(time.process_time() - start)
    return min(seconds)


if __name__ == "__main__":
    pairs.main(__file__, __doc__, CASES, measure)
