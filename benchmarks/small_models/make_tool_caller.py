"""Make the small model of ``examples/coding_tools.py``: ``python
benchmarks/small_models/make_tool_caller.py --out DIR --seed 0``.

A Qwen2 of about 0.16 M parameters that clones scripted players, as the other small models here do:
first one that asks twice and writes the program that fits, then one that asks too little, writes a
program at random or ends without one, now and then. The start calls tools in the right form and
writes the right program in about a third of its episodes.

The players' episodes are collected as a model's are, by an environment, its formatter and a
collector, and the rows are cloned: the contexts are those of training, token for token.

Writes ``DIR/model`` and ``DIR/tokenizer``; they are apart for the reason that
:mod:`make_worlds` gives.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from make_tiny_guess import Recipe, clone
from make_worlds import save
from tensordict import TensorDict
from tokenizers import AddedToken
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from torchrl_llm import keys
from torchrl_llm.collectors import TurnCollector
from torchrl_llm.envs import GEMEnv
from torchrl_llm.testing.policies import ScriptedPolicy
from torchrl_llm.testing.tiny import random_model
from torchrl_llm.testing.tokenizers import byte_tokenizer

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from coding_tools import CODING, DIGITS, OPERATIONS, apply

logger = logging.getLogger(__name__)

CALL_TOKENS = ("<tool_call>", "</tool_call>")
TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools:"
    "{% for tool in tools %} {{ tool.function.name }}{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls %}{{ '\n' if message.content or not loop.first }}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""ChatML with calls in the form of Hermes, Qwen2.5 and Qwen3. It shows the names of the tools and
nothing else of them: this model learned how they are called."""

LIMITS = {"max_model_len": 256, "max_output_tokens": 24}
RECIPE = Recipe(careful_steps=250, forgetful_steps=150, forget=0.35, games=64)
DONE = "Done."
PROGRAMS = [(operation, number) for operation in OPERATIONS for number in DIGITS]

Player = Callable[[int, int, str], str]
"""A script of :class:`~torchrl_llm.testing.policies.ScriptedPolicy`."""


def call(name: str, **arguments: str | int) -> str:
    """A call as the template writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def ask(*digits: int) -> str:
    return "\n".join(call("ask", x=x) for x in digits)


def write(program: tuple[str, int]) -> str:
    return call("write", operation=program[0], number=program[1])


def called(context: str) -> list[tuple[dict, str]]:
    """The calls of an episode so far, each with its result."""
    calls = map(json.loads, re.findall(r"<tool_call>\n(.*)\n</tool_call>", context))
    return [*zip(calls, re.findall(r"<\|im_start\|>tool\n(?:\w+: )?(.*)<\|im_end\|>", context), strict=True)]


def results_of(name: str, calls: list[tuple[dict, str]]) -> dict[int, int]:
    """What ``ask`` or ``run`` said of each digit."""
    return {each["arguments"]["x"]: int(result) for each, result in calls if each["name"] == name}


def fitting(asked: dict[int, int]) -> list[tuple[str, int]]:
    """The programs that do what the function did to every digit that was asked.

    >>> fitting({0: 2, 1: 3})
    [('plus', 2)]
    """
    return [each for each in PROGRAMS if all(apply(each, x) == y for x, y in asked.items())]


def solve(episode: int, turn: int, context: str) -> str:
    """The best player: asks what the function makes of 0 and 1, which tells what it is, writes it,
    and ends."""
    if turn == 0:
        return ask(0, 1)
    return write(fitting(results_of("ask", called(context)))[0]) if turn == 1 else DONE


def forgetful(forget: float, rng: random.Random) -> Player:
    """A player that forgets with probability ``forget`` at each turn: to ask (both digits, or one),
    what it was told, or to write at all. Some of its programs it runs, and mends."""

    def respond(episode: int, turn: int, context: str) -> str:
        forgets, calls = rng.random() < forget, called(context)
        asked, ran = (results_of(name, calls) for name in ("ask", "run"))
        if not any(each["name"] == "write" for each, _ in calls):
            if not asked:
                return rng.choice([ask(rng.choice((0, 1))), write(rng.choice(PROGRAMS))]) if forgets else ask(0, 1)
            return rng.choice([DONE, *map(write, PROGRAMS)]) if forgets else write(rng.choice(fitting(asked)))
        if any(asked.get(x, y) != y for x, y in ran.items()) and calls[-1][0]["name"] == "run":
            return write(rng.choice(fitting(asked)))
        return call("run", x=rng.choice((0, 1))) if forgets and not ran else DONE

    return respond


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level, with a token for each fixed phrase of a call or a message, and for each digit."""
    written = [call("run", x=1), ask(0, 1), *map(write, PROGRAMS), *(f"tool\n{name}: 1" for name in ("ask", "run"))]
    first = ["system\nTools: ask write run", "user\nWrite the hidden function.", "assistant\n", "tool\n1", DONE]
    first += ["tool\nWritten.", "All tests pass.", "A test fails.", "\n", "Error: There is no program."]
    texts = [piece for text in (*written, *first) for piece in re.split("|".join(CALL_TOKENS), text)]
    tokenizer = byte_tokenizer(chat_template=TEMPLATE, corpus=texts * 20, vocab_size=700, phrases=True)
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in CALL_TOKENS])
    return tokenizer


def episodes(
    tokenizer: PreTrainedTokenizerFast, player: Player, *, games: int, batches: int, seed: int
) -> Iterator[TensorDict]:
    """Batches of rows ``[games]`` of a player's episodes."""
    env = GEMEnv(CODING, tokenizer=tokenizer, num_envs=games, seed=seed, **LIMITS)
    policy = ScriptedPolicy(player, tokenizer=tokenizer, read_context=True, max_output_tokens=env.max_output_tokens)
    yield from TurnCollector(env, policy, batch_size=games, total_batches=batches)


def examples(tokenizer: PreTrainedTokenizerFast, recipe: Recipe, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of ids and action masks ``[games, L]``: the best player's episodes, then the
    forgetful one's."""
    players = (solve, forgetful(recipe.forget, random.Random(seed)))
    for i, (player, steps) in enumerate(zip(players, (recipe.careful_steps, recipe.forgetful_steps), strict=True)):
        for rows in episodes(tokenizer, player, games=recipe.games, batches=steps, seed=2 * seed + i):
            yield rows[keys.TOKENS], rows[keys.TURN_IDS] >= 0


def make(*, seed: int, recipe: Recipe = RECIPE) -> tuple[Qwen2ForCausalLM, PreTrainedTokenizerFast]:
    """The model and its tokenizer.

    Args:
        seed: of the initial weights and the cloned episodes.
        recipe: default: the one of the example's model.
    """
    tokenizer = make_tokenizer()
    sizes = {"hidden": recipe.hidden, "layers": recipe.layers, "heads": recipe.heads}
    model = random_model(tokenizer, **sizes, max_length=LIMITS["max_model_len"], seed=seed)
    clone(model, examples(tokenizer, recipe, seed), recipe)
    return model, tokenizer


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    model, tokenizer = make(seed=arguments.seed)
    save(model, tokenizer, arguments.out)
    logger.info("%d parameters, %d tokens, in %s", model.num_parameters(), len(tokenizer), arguments.out)


if __name__ == "__main__":
    main()
