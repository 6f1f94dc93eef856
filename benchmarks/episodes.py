"""What shared prefixes save on episodes: an update with and without them, in turns, in one process.

    OMP_NUM_THREADS=1 python benchmarks/episodes.py --algo GRPO
    OMP_NUM_THREADS=1 python benchmarks/episodes.py --game TowerofHanoi --model 135M

``--algo``: GuessTheNumber-easy as the small model of the package plays it, with the settings of
``examples/configs/tiny_*.yaml``; the whole update, scores and credit included. ``--game``: a board
game that a scripted player plays with random legal moves for eight turns, ``--groups`` tasks
``--group`` times each, encoded by a tokenizer trained on its texts; a forward, and a backward of
the sum of the log-probs, on a random model in the shape of a real one (``benchmarks/learn.py``).

Prints one JSON object: ``speedup``, the median over the rounds; ``rounds``, the speedup of each;
``shared``, the tokens of the rows over the tokens of their trie, the most that could be saved; and
``turns``, of an episode.
"""

import argparse
import json
import random
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import learn
import learning
import torch
from tensordict import TensorDictBase
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from torchrl_llm import keys
from torchrl_llm.collectors import TurnCollector
from torchrl_llm.envs import CHATML, GEMEnv, resolve_env
from torchrl_llm.modules import TokenScorer, enable_prefix_sharing
from torchrl_llm.modules.prefixes import SortedRows
from torchrl_llm.runs import Run, build_run
from torchrl_llm.testing.policies import ScriptedPolicy

TURNS = 8


# ---------------------------------------- scripted players


def hanoi_moves(board: str) -> list[str]:
    """The legal moves of Tower of Hanoi, from the last picture of it."""
    towers = {
        name: [int(disk) for disk in re.findall(r"\d+", line)]
        for name, line in re.findall(r"^([ABC]): \[(.*)\]", board, re.M)[-3:]
    }
    top = {name: disks[-1] if disks else 99 for name, disks in towers.items()}
    return [f"{a} {b}" for a in towers for b in towers if top[a] < top[b]]


def minesweeper_moves(board: str) -> list[str]:
    """Flags for Minesweeper, which never end it, on cells that are hidden."""
    lines = re.findall(r"^ ?(\d+)  ((?:[.F\d]  ?)+)$", board, re.M)[-5:]
    cells = [(row, column, cell) for row, line in lines for column, cell in enumerate(line.split())]
    return [f"flag {row} {column}" for row, column, cell in cells if cell == "."]


def tile_moves(board: str) -> list[str]:
    """The moves of 2048."""
    return ["up", "down", "left", "right"]


GAMES: dict[str, tuple[str, Callable[[str], list[str]]]] = {
    "TowerofHanoi": ("game:TowerofHanoi-v0-easy", hanoi_moves),
    "Minesweeper": ("game:Minesweeper-v0-easy", minesweeper_moves),
    "Game2048": ("game:Game2048-v0-easy", tile_moves),
}
"""The id of each game and the moves that its player chooses from."""


def say(moves: Callable[[str], list[str]], episode: int, turn: int, context: str) -> str:
    """A random legal move; the move of an episode and a turn is always the same."""
    return f"\\boxed{{{random.Random(f'{episode}:{turn}').choice(moves(context))}}}"


def train_tokenizer(env_id: str, moves: Callable[[str], list[str]]) -> PreTrainedTokenizerFast:
    """A BPE of 2,048 tokens on the texts of a game."""
    env, texts = resolve_env(env_id).make(), []
    for episode in range(50):
        text, info = env.reset(seed=episode)
        for turn in range(TURNS):
            texts.append(text + info.get("suffix", ""))
            action = say(moves, episode, turn, texts[-1])
            texts.append(action)
            text, _, terminated, truncated, info = env.step(action)
            if terminated or truncated:
                break
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special, alphabet = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], pre_tokenizers.ByteLevel.alphabet()
    options = {"special_tokens": special, "initial_alphabet": alphabet, "show_progress": False}
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=2048, **options))
    names = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": CHATML}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


def collect_game(game: str, group: int, groups: int) -> TensorDictBase:
    """The rows of ``groups`` tasks, ``group`` times each."""
    env_id, moves = GAMES[game]
    tokenizer = train_tokenizer(env_id, moves)
    env = GEMEnv(
        env_id,
        tokenizer=tokenizer,
        num_envs=group * groups,
        group_size=group,
        max_turns=TURNS,
        max_output_tokens=32,
        max_model_len=4096,
    )
    policy = ScriptedPolicy(partial(say, moves), tokenizer=tokenizer, max_output_tokens=32, read_context=True)
    collector = TurnCollector(env, policy, batch_size=group * groups)
    try:
        return collector.rollout()
    finally:
        collector.shutdown()


# ---------------------------------------- measuring


def cpu_seconds(work: Callable[[], object]) -> float:
    """CPU-seconds of a call."""
    start = time.process_time()
    work()
    return time.process_time() - start


def shape(rows: TensorDictBase) -> dict[str, float]:
    """How much of the rows is shared, and how long they are."""
    ends = rows[keys.ATTENTION_MASK].sum(-1).numpy()
    distinct = ends.sum() - SortedRows.of(rows[keys.TOKENS].numpy(), ends).shared.sum()
    return {
        "rows": len(rows),
        "tokens": int(ends.sum()),
        "shared": round(float(ends.sum() / distinct), 3),
        "turns": round(float(rows[keys.TURN_MASK].sum() / len(rows)), 2),
    }


def updates(algo: str, rounds: int) -> Iterator[tuple[TensorDictBase, dict[str, float]]]:
    """Rows that the small model played, and CPU-seconds of a whole update on them, plainly and
    shared."""
    with tempfile.TemporaryDirectory() as folder:
        runs: dict[str, Run] = {}
        for name in ("plain", "shared"):
            # Without target_kl, which may end one of the updates early.
            options = [f"--share-prefixes={name == 'shared'}", "--target-kl=null", "--progress=false"]
            runs[name] = build_run(learning.settings(algo, "guess", 0, Path(folder) / name, options))
        batches = iter(runs["plain"].trainer.collector)
        for number in range(1 + rounds):
            rows = runs["plain"].trainer.collect(batches)
            assert rows is not None
            order = sorted(runs, reverse=bool(number % 2))  # who comes first changes
            seconds = {name: cpu_seconds(partial(runs[name].trainer.learn, rows.clone())) for name in order}
            if number:  # after a warm-up
                yield rows, seconds
        for run in runs.values():
            run.close()


def passes(game: str, arguments: argparse.Namespace) -> Iterator[tuple[TensorDictBase, dict[str, float]]]:
    """Rows of a game, and CPU-seconds of a forward and a backward of them, plainly and shared."""
    rows, model = (
        collect_game(game, arguments.group, arguments.groups),
        learn.make_model(arguments.model, arguments.layers),
    )
    sharing = enable_prefix_sharing(model)
    scorers = {name: TokenScorer(model, prefixes=sharing if name == "shared" else None) for name in ("plain", "shared")}
    for number in range(1 + arguments.rounds):
        seconds = {}
        for name in sorted(scorers, reverse=bool(number % 2)):
            seconds[name] = cpu_seconds(lambda scorer=scorers[name]: learn.scored(scorer, rows).backward())
            model.zero_grad(set_to_none=True)
        if number:
            yield rows, seconds


def main() -> None:
    """Measure and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--algo", choices=list(learning.CONFIGS))
    what.add_argument("--game", choices=list(GAMES))
    parser.add_argument("--model", choices=list(learn.MODELS), default="135M", help="of --game")
    parser.add_argument("--layers", type=int, help="instead of the model's own number")
    parser.add_argument("--group", type=int, default=8, help="episodes of a task of --game")
    parser.add_argument("--groups", type=int, default=1, help="tasks of --game")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = list(updates(arguments.algo, arguments.rounds) if arguments.algo else passes(arguments.game, arguments))
    ratios = [round(seconds["plain"] / seconds["shared"], 3) for _, seconds in found]
    result = {"speedup": statistics.median(ratios), "rounds": ratios, **shape(found[-1][0])}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
