"""Which GEM environments play, and what a random player earns: the table of
``docs/environments.md``.

    python benchmarks/environments.py --episodes 10

Plays every registered id through GEMEnv: with a random player, with a clumsy one that keeps to no
format and, where one is easy to write, with one that wins. Nothing is fetched. Environments that
read word lists or datasets get small ones made here; those that lack a package are listed with it.
"""

import argparse
import contextlib
import json
import logging
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import cycle
from pathlib import Path
from typing import Any
from unittest.mock import patch

from gem.envs.registration import ENV_REGISTRY, make

from torchrl_llm.envs import EnvironmentFault, EnvironmentUnavailableError, GEMEnv, resolve_env
from torchrl_llm.envs.gem_catalog import gem_class
from torchrl_llm.envs.isolation import kept_global_rng
from torchrl_llm.keys import StopReason
from torchrl_llm.testing.tokenizers import byte_tokenizer

Player = Callable[[Any, random.Random, int], str]
"""What to say, from the environment, a source of chance and the 0-based turn."""

PAGE = Path(__file__).resolve().parents[1] / "docs" / "environments.md"
MARKER = "<!-- table of environments -->"
WORDS = [
    "cat",
    "dog",
    "sun",
    "hat",
    "coat",
    "boot",
    "bird",
    "fish",
    "tree",
    "house",
    "mouse",
    "apple",
    "bread",
    "chair",
    "table",
    "garden",
    "planet",
    "window",
    "teacher",
    "picture",
    "kitchen",
    "computer",
    "elephant",
    "notebook",
    "mountain",
    "telephone",
    "chocolate",
    "adventure",
    "dictionary",
    "strawberry",
    "television",
]
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def boxed(*words: Any) -> str:
    """An answer in GEM's format."""
    return "\\boxed{" + " ".join(map(str, words)) + "}"


# ---------------------------------------- players


def random_letter(env: Any, rng: random.Random, turn: int) -> str:
    """A letter in a cell of a crossword."""
    empty = [(i, j) for i, row in enumerate(env.board) for j, cell in enumerate(row) if cell == "_"]
    return boxed(*rng.choice(empty), rng.choice(LETTERS))


def random_digit(env: Any, rng: random.Random, turn: int) -> str:
    """A digit in an empty cell of a Sudoku; its cells are counted from 1."""
    empty = [(i + 1, j + 1) for i, row in enumerate(env.board) for j, cell in enumerate(row) if cell == 0]
    return boxed(*rng.choice(empty), rng.randint(1, len(env.board)))


def random_line(env: Any, rng: random.Random, turn: int) -> str:
    """Two cells of a word search."""
    return boxed(*(rng.randrange(len(env.game_board)) for _ in range(4)))


def random_answer(env: Any, rng: random.Random, turn: int) -> str:
    """The answer of some question of the dataset."""
    entry = env.ds[rng.randrange(len(env.ds))]
    return boxed(entry["answer"])


def own_random_action(env: Any, rng: random.Random, turn: int) -> str:
    """GEM's own random action."""
    with kept_global_rng():
        random.seed(rng.random())
        return env.sample_random_action()


RANDOM: dict[str, Player] = {
    "FifteenPuzzle": lambda env, rng, turn: boxed(rng.choice(["up", "down", "left", "right"])),
    "TowerofHanoi": lambda env, rng, turn: boxed(*rng.sample("ABC", 2)),
    "Crosswords": random_letter,
    "Sudoku": random_digit,
    "WordSearch": random_line,
    "Hangman": lambda env, rng, turn: boxed(rng.choice(LETTERS).upper()),
    "rg": random_answer,
}


def bisect(env: Any, rng: random.Random, turn: int) -> str:
    """The middle of what the hints have left."""
    low, high = env.min_number, env.max_number
    for guess in env.previous_guesses:
        low, high = (max(low, guess + 1), high) if guess < env.game_number else (low, min(high, guess - 1))
    return boxed((low + high) // 2)


def hanoi(disks: int, source: str = "A", target: str = "C", spare: str = "B") -> list[tuple[str, str]]:
    """The shortest solution."""
    if disks == 0:
        return []
    before, after = hanoi(disks - 1, source, spare, target), hanoi(disks - 1, spare, target, source)
    return [*before, (source, target), *after]


def solve_sudoku(env: Any, rng: random.Random, turn: int) -> str:
    """The next empty cell, from the solution."""
    cells = [(i, j) for i, row in enumerate(env.board) for j, cell in enumerate(row) if cell == 0]
    row, column = cells[0]
    return boxed(row + 1, column + 1, env.full_grid[row][column])


def solve_crossword(env: Any, rng: random.Random, turn: int) -> str:
    """The next empty cell, from the solution."""
    i, j = next((i, j) for i, row in enumerate(env.board) for j, cell in enumerate(row) if cell == "_")
    return boxed(i, j, env.solution[i][j])


SCRIPTED: dict[str, tuple[str, Player]] = {
    "GuessTheNumber": ("bisection", bisect),
    "TowerofHanoi": ("shortest solution", lambda env, rng, turn: boxed(*hanoi(env.num_disks)[turn])),
    "Mastermind": ("knows the code", lambda env, rng, turn: boxed(*env.game_code)),
    "Wordle": ("knows the word", lambda env, rng, turn: boxed(env.secret_word)),
    "Hangman": ("knows the word", lambda env, rng, turn: boxed(env.secret_word)),
    "Sudoku": ("knows the solution", solve_sudoku),
    "Crosswords": ("knows the solution", solve_crossword),
    "rg": ("knows the answer", lambda env, rng, turn: boxed(env.data["answer"])),
    "MathEnv": ("knows the answer", lambda env, rng, turn: boxed(env.answer)),
    "MathVisualEnv": ("knows the answer", lambda env, rng, turn: boxed(env.answer)),
    "QaEnv": (
        "knows the answer",
        lambda env, rng, turn: f"<answer>{env.answer}</answer> {boxed(env.answer)}",
    ),
    "CodeEnv": ("writes the program", lambda env, rng, turn: "```python\nprint(int(input()) + 1)\n```"),
}

CLUMSY = (
    "",
    "I do not know.",
    boxed("banana"),
    boxed(""),
    boxed("[1, 2]"),
    boxed("1/0"),
    boxed("{'a': 1}"),
    "```\n)\n```",
)


def clumsy_player() -> Player:
    """Says one after the other what few environments can read."""
    texts = cycle(CLUMSY)
    return lambda env, rng, turn: next(texts)


RANDOM["CodeEnv"] = lambda env, rng, turn: f"```python\nprint({rng.randint(0, 9)})\n```"

SUCCESS = {
    "Crosswords": "all letters right",
    "FifteenPuzzle": "all tiles in order",
    "Game2048": "the target tile",
    "GuessTheNumber": "the number",
    "Hangman": "the word",
    "Mastermind": "the code",
    "Minesweeper": "all safe cells open",
    "Sokoban": "all boxes on targets",
    "Sudoku": "the grid filled",
    "TowerofHanoi": "all disks on C",
    "WordSearch": "all words found",
    "Wordle": "the word",
    "rg": "full score of the answer",
    "MathEnv": "an equal answer",
    "MathVisualEnv": "an equal answer",
    "QaEnv": "the answer, normalized",
    "CodeEnv": "all tests passed",
}


def random_player(env_id: str) -> Player:
    """The random player of an id."""
    return RANDOM.get(family(env_id), own_random_action)


def family(env_id: str) -> str:
    """What decides how an id is played: the game, ``rg``, or the class of the dataset."""
    kind, _, name = env_id.partition(":")
    if kind == "game":
        return name.partition("-")[0]
    return "rg" if kind == "rg" else str(ENV_REGISTRY[env_id].entry_point).rpartition(":")[2]


# ---------------------------------------- local data


@contextlib.contextmanager
def word_lists(words: Sequence[str] = WORDS) -> Iterator[None]:
    """Inside, GEM's games find these words, and no others, as NLTK's corpus ``words``."""
    import nltk
    from gem.envs.game_env import hangman, word_search, wordle
    from nltk.corpus.reader import WordListCorpusReader
    from nltk.corpus.util import LazyCorpusLoader

    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as patches:
        if words:
            corpus = Path(folder) / "corpora" / "words"
            corpus.mkdir(parents=True)
            for name in ("en", "en-basic"):
                (corpus / name).write_text("\n".join(words))
        patches.enter_context(patch.object(nltk.data, "path", [folder]))
        patches.enter_context(patch.object(nltk, "download", lambda *_: False))
        for module in (hangman, word_search, wordle):  # a loaded corpus keeps to its folder
            loader = LazyCorpusLoader("words", WordListCorpusReader, r"(?!README|\.).*", encoding="ascii")
            patches.enter_context(patch.object(module, "words", loader))
        yield


def local_dataset(env_id: str) -> Any:
    """Twenty tasks in the columns that an id reads."""
    from datasets import Dataset

    given = ENV_REGISTRY[env_id].kwargs
    question = given.get("question_key", "problem")
    if "test_key" in given:
        tests = json.dumps({"inputs": ["1\n", "41\n"], "outputs": ["2\n", "42\n"]})
        return Dataset.from_list(
            [{question: f"Print the number read plus one. ({i})", given["test_key"]: tests} for i in range(20)]
        )
    images = {given["image_key"]: []} if "image_key" in given else {}
    rows = [{question: f"What is {i} + {i}?", given["answer_key"]: str(2 * i), **images} for i in range(20)]
    return Dataset.from_list(rows)


def factory(env_id: str) -> Callable[[], Any]:
    """What makes an environment, with local data where it needs some."""
    lacking = any(find_spec(name) is None for name in gem_class(env_id).packages)
    if lacking or "dataset_name" not in ENV_REGISTRY[env_id].kwargs:
        return resolve_env(env_id).make
    # Answers of MathEnv are graded in this process; CodeEnv knows no such argument, and takes it.
    return lambda: make(env_id, dataset=local_dataset(env_id), use_mp=False)


# ---------------------------------------- playing


@dataclass
class Played:
    """What some episodes came to: most turns, mean return, share of successes, what failed,
    seconds."""

    turns: int
    reward: float
    success: float
    faults: list[EnvironmentFault]
    seconds: float


def play(env_id: str, player: Player, episodes: int, seed: int = 0) -> Played:
    """Play episodes of an id through GEMEnv, one slot.

    Raises:
        EnvironmentUnavailableError: the environment cannot be made.
    """
    made: list[Any] = []
    build = factory(env_id)

    def remember() -> Any:
        made.append(build())
        return made[-1]

    env = GEMEnv(
        remember,
        tokenizer=byte_tokenizer(),
        max_model_len=2**17,
        max_output_tokens=2**15,
        seed=seed,
        success_by=resolve_env(env_id).success_by,
    )
    rng, start = random.Random(seed), time.perf_counter()
    returns, turns, wins, faults = [], [0], 0, []
    for _ in range(episodes):
        try:
            index = env.slots.next_task()
            env.slots.start(0, index, env.slots.open(0, index))
            rewards = []
            while env.slots[0].live:
                said = env.formatter.tokenizer.encode(
                    player(made[-1], rng, env.slots[0].turn), add_special_tokens=False
                )
                reply = env.slots.answer(0, said)
                env.slots.advance(0, said, reply)
                rewards.append(reply.step.reward)
            returns.append(sum(rewards))
            turns.append(env.slots[0].turn)
            wins += env.slots[0].stop_reason == StopReason.WON
        except EnvironmentFault as fault:
            if isinstance(fault.cause, EnvironmentUnavailableError):
                raise fault.cause from fault
            faults.append(fault)
    mean = sum(returns) / max(1, len(returns))
    return Played(max(turns), mean, wins / episodes, faults, time.perf_counter() - start)


def line(env_id: str, episodes: int) -> str:
    """A line of the table."""
    kind = family(env_id)
    try:
        chance = play(env_id, random_player(env_id), episodes)
    except EnvironmentUnavailableError as error:
        return f"| `{env_id}` | {SUCCESS[kind]} | | | | | **lacks**: {_cell(error.needs)} |"
    if len(chance.faults) == episodes:
        return f"| `{env_id}` | {SUCCESS[kind]} | | | | | **fails**: {_cell(str(chance.faults[0].cause))} |"
    name, player = SCRIPTED.get(kind, ("", None))
    played = play(env_id, player, episodes) if player else None
    best = f"{name}: {played.success:.0%}" if played else ""
    turns = max(chance.turns, played.turns if played else 0)
    return (
        f"| `{env_id}` | {SUCCESS[kind]} | {turns} | {chance.reward:.2f} | {chance.success:.0%} | {best} | "
        f"{status(env_id, turns, [*chance.faults, *(played.faults if played else [])])} |"
    )


def status(env_id: str, turns: int, faults: list[EnvironmentFault]) -> str:
    """That an id plays, what it needs for that, and whether a response makes it raise."""
    data = "dataset_name" in ENV_REGISTRY[env_id].kwargs
    words = family(env_id) in ("Wordle", "Hangman", "WordSearch")
    needs = [f"`{name}`" for name in gem_class(env_id).packages]
    clumsy = play(env_id, clumsy_player(), len(CLUMSY) if turns == 1 else 3).faults
    said = [
        "plays" + (" with local data" if data else " with a local word list" if words else ""),
        f"needs {' and '.join(needs)}" if needs else "",
        f"{len(faults)} episodes failed" if faults else "",
        "raises at an answer that it cannot read" if clumsy else "",
    ]
    return "; ".join(filter(None, said))


def _cell(text: str) -> str:
    return text.replace("|", "\\|").split(" Its data")[0].split(": nltk")[0]


def write(lines: list[str], page: Path) -> None:
    """Put the table behind the marker of a page."""
    head, found, _ = page.read_text().partition(MARKER)
    if not found:
        raise ValueError(f"{page} has no line {MARKER}.")
    page.write_text("\n".join([head + MARKER, "", *lines, ""]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=10, help="of each id and player")
    parser.add_argument("--ids", default="", help="only ids that start so; prints and writes nothing")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # CodeEnv's python
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    lines = ["| id | success is | most turns | random: return | random: success | other player: success | status |"]
    lines.append("|---|---|---|---|---|---|---|")
    # CodeEnv writes where it is
    with word_lists(), tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for env_id in filter(lambda name: name.startswith(args.ids), ENV_REGISTRY):
            with contextlib.redirect_stdout(sys.stderr):
                row = line(env_id, args.episodes)
            print(row, flush=True)
            lines.append(row)
    if not args.ids:
        write(lines, PAGE)


if __name__ == "__main__":
    main()
