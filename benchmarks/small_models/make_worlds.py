"""Make a small model for a world: ``python benchmarks/small_models/make_worlds.py --world coins
--out DIR --seed 0``.

The worlds come from :mod:`torchrl_llm.testing.worlds`. The model is a Qwen2 of about 0.11 M
parameters over whole words that clones scripted players (:mod:`make_tiny_guess` does the same for
GuessTheNumber): first the best one, so that it learns the rules quickly, then one that forgets now
and then. The start plays legally and wins about half of its episodes.

The model of ``tally`` thinks. It clones each turn in the context in which it will be sampled, which
has no earlier thoughts, and the same episodes without any (``enable_thinking=False``), so that it
can be trained both ways. With ``--contexts append`` it clones them in contexts that keep thoughts.

Writes ``DIR/model`` and ``DIR/tokenizer``. They are apart because ``AutoTokenizer`` would read the
tokenizer as Qwen2's byte-level BPE beside the files of a Qwen2: give both, as ``model_path`` and
``tokenizer_path``. The same seed, package versions and kind of CPU give the same files.
"""

from __future__ import annotations

import argparse
import logging
import random
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, get_args

import torch
from make_tiny_guess import Recipe, clone, collate, render, stack
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from torchrl_llm.envs import ChatFormatter, Response
from torchrl_llm.envs.contexts import ids_of, selected
from torchrl_llm.envs.response import split_thinking
from torchrl_llm.envs.template_probe import Contexts
from torchrl_llm.testing.thinking_worlds import Tally, digits, with_thought
from torchrl_llm.testing.tiny import random_model
from torchrl_llm.testing.tokenizers import word_tokenizer
from torchrl_llm.testing.worlds import WORLDS, Coins, KeyAndDoor

__all__ = ["PLAYERS", "RECIPES", "Recipe", "make", "play", "render", "save"]

logger = logging.getLogger(__name__)

Player = Callable[[list[str], random.Random], str]
"""Given message, response, ..., message and a generator, returns the next response."""


def coins_player(forget: float) -> Player:
    """A player of ``Coins`` that follows a best plan, and moves at random with probability
    ``forget`` a turn."""

    def respond(texts: list[str], rng: random.Random) -> str:
        return rng.choice(list(Coins.MOVES)) if rng.random() < forget else Coins.best_response(texts)

    return respond


def key_and_door_player(forget: float) -> Player:
    """A player of ``KeyAndDoor`` that forgets the key's side and whether it holds the key with
    probability ``forget`` a turn.

    It then guesses both, so that it is right about half of the time.
    """

    def respond(texts: list[str], rng: random.Random) -> str:
        if rng.random() >= forget:
            return KeyAndDoor.best_response(texts)
        place = texts[-1].split()[-1]
        return KeyAndDoor.answer(place, side=rng.choice(["left", "right"]), holds=rng.random() < 0.5)

    return respond


def tally_player(forget: float) -> Player:
    """A player of ``Tally`` that slips with probability ``forget`` a turn.

    It then answers at random without a thought, or takes one change for any other in its thought,
    as likely.
    """

    def respond(texts: list[str], rng: random.Random) -> str:
        if rng.random() >= forget:
            return Tally.best_response(texts)
        if rng.random() < 0.5:
            return rng.choice(Tally.ANSWERS)
        start, changes = Tally.read(texts)
        changes[rng.randrange(len(changes))] = rng.choice([*Tally.CHANGES])
        return with_thought([start, *digits(start, changes)])

    return respond


PLAYERS: dict[str, Callable[[float], Player]] = {
    "coins": coins_player,
    "key-and-door": key_and_door_player,
    "tally": tally_player,
}
RECIPES = {
    "coins": Recipe(careful_steps=250, forgetful_steps=100, forget=0.4),
    "key-and-door": Recipe(careful_steps=150, forgetful_steps=100, forget=0.2),
    "tally": Recipe(careful_steps=150, forgetful_steps=100, forget=0.2, games=16),
}


def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    """The tokenizer of a world."""
    return word_tokenizer(WORLDS[name].WORDS, thinks=WORLDS[name] is Tally)


def play(env: Any, seed: int, player: Player, rng: random.Random) -> list[str]:
    """An episode as text: first message, response, message, response, ..., last message.

    Examples:
        >>> play(Coins(cells=3, moves=2, worths=(1, 2)), 0, coins_player(0.0), random.Random(0))
        ['2 me 1 moves 2', 'left', 'me 0 1 moves 1', 'left', 'over']
    """
    texts, done = [env.reset(seed)[0]], False
    while not done:
        texts.append(player(texts, rng))
        thinking, text = split_thinking(texts[-1])
        message, _, terminated, truncated, _ = env.step(Response(texts[-1], text=text, thinking=thinking))
        texts.append(message)
        done = terminated or truncated
    return texts


def samples(texts: list[str], formatter: ChatFormatter) -> Iterator[tuple[list[int], list[bool]]]:
    """Ids and action mask of each turn of an episode, in the context in which GEMEnv shows it.

    Args:
        texts: of :func:`play`.
    """
    spans = formatter.first_spans(texts[0])
    for turn, (text, message) in enumerate(zip(texts[1::2], texts[2::2], strict=True)):
        context = ids_of(selected([formatter.rule], spans, formatter))
        response = formatter.answer(text)
        yield [*context, *response], [False] * len(context) + [True] * len(response)
        spans += formatter.turn_spans(response, message, turn, said=formatter.decode(response))


def with_and_without_thoughts(
    tokenizer: PreTrainedTokenizerFast, contexts: Contexts = "template"
) -> Callable[[list[list[str]]], tuple[Tensor, Tensor]]:
    """Makes batches of all turns of episodes: as they were, and without their thoughts behind a
    prompt with an empty one."""
    thinks, plain = (
        ChatFormatter(tokenizer, contexts=contexts, chat_template_kwargs=kwargs)
        for kwargs in ({}, {"enable_thinking": False})
    )

    def batch(games: list[list[str]]) -> tuple[Tensor, Tensor]:
        silent = [[split_thinking(text)[1] for text in texts] for texts in games]
        rows = [samples(texts, thinks) for texts in games] + [samples(texts, plain) for texts in silent]
        return stack([*chain.from_iterable(rows)], tokenizer.pad_token_id)

    return batch


def examples(
    name: str, tokenizer: PreTrainedTokenizerFast, recipe: Recipe, seed: int, contexts: Contexts = "template"
) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of ids and action masks: the best player's episodes, then the forgetful one's."""
    env, rng = WORLDS[name](), random.Random(seed)
    if WORLDS[name] is Tally:
        batch = with_and_without_thoughts(tokenizer, contexts)
    else:
        batch = partial(collate, formatter=ChatFormatter(tokenizer))
    for forget, steps in ((0.0, recipe.careful_steps), (recipe.forget, recipe.forgetful_steps)):
        player = PLAYERS[name](forget)
        for _ in range(steps):
            yield batch([play(env, rng.randrange(2**31), player, rng) for _ in range(recipe.games)])


def make(
    name: str, *, seed: int, recipe: Recipe | None = None, contexts: Contexts = "template"
) -> tuple[Qwen2ForCausalLM, PreTrainedTokenizerFast]:
    """The model of a world and its tokenizer.

    Args:
        name: one of :data:`~torchrl_llm.testing.worlds.WORLDS`.
        seed: of the initial weights and the cloned episodes.
        recipe: default: the one of :data:`RECIPES`.
        contexts: how earlier turns look in the examples of a model that thinks.
    """
    recipe = recipe or RECIPES[name]
    tokenizer = tokenizer_of(name)
    model = random_model(
        tokenizer, hidden=recipe.hidden, layers=recipe.layers, heads=recipe.heads, max_length=256, seed=seed
    )
    clone(model, examples(name, tokenizer, recipe, seed, contexts), recipe)
    return model, tokenizer


def save(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write ``folder/model`` and ``folder/tokenizer``."""
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "tokenizer")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", choices=list(WORLDS), required=True)
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--contexts", choices=get_args(Contexts), default="template", help="of tally's examples")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    model, tokenizer = make(arguments.world, seed=arguments.seed, contexts=arguments.contexts)
    save(model, tokenizer, arguments.out)
    logger.info("%d parameters, %d tokens, in %s", model.num_parameters(), len(tokenizer), arguments.out)


if __name__ == "__main__":
    main()
