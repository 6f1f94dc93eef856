"""Make the small model that the package ships: ``python benchmarks/small_models/make_tiny_guess.py
--out DIR --seed 0``.

Three parts, each from transcripts of real GEM games: a byte-level BPE with the game's fixed phrases
as added tokens, a Qwen2 of about 0.14 M parameters, and behavior cloning of scripted players that
guess among the numbers the hints still allow, but forget the hints now and then. The clone keeps
their entropy and their faults: reinforcement learning has room.

Each fixed phrase is one token (as in SuperBPE, Liu et al., 2025, arXiv:2503.13423): a whole game
takes about 80 tokens instead of some 400, which is most of what makes training fast on a CPU. The
phrases are added tokens rather than merges because ``AutoTokenizer`` gives every model of type
``qwen2`` the pre-tokenizer of Qwen2, which splits at spaces.

The same seed, package versions and kind of CPU give the same file: the script runs on one thread
and draws from generators of its own. Nothing here is needed to use the model; see
:mod:`torchrl_llm.testing.tiny`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import math
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from torchrl_llm.envs.chat import CHATML, ChatFormatter, compose_message
from torchrl_llm.envs.isolation import kept_global_rng
from torchrl_llm.envs.registry import resolve_env

logger = logging.getLogger(__name__)

ENV_ID = "game:GuessTheNumber-v0-easy"
CORPUS_IDS = (ENV_ID, "game:GuessTheNumber-v0-hard", "game:GuessTheNumber-v0-random")
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# A number of up to two digits is one phrase; a phrase never reaches beyond a newline. Hence text
# that ends in a newline or at a special token has the same ids whether what follows is encoded with
# it or apart from it.
PHRASES = re.compile(r"[0-9]{1,2}|[^0-9\n]*\n|[^0-9\n]+")

Player = Callable[[int, int, random.Random], int]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How the shipped model is made.

    Attributes:
        corpus_games: games of each range that the tokenizer is trained on.
        vocab_size: of the BPE, without the phrases.
        hidden, intermediate, layers, heads: the Qwen2; the head dimension is ``hidden / heads``.
        careful_steps: optimizer steps on a player that always heeds the hints: they are learned
            within 200 steps so.
        forgetful_steps: further steps on a player that ignores them in some guesses, for the faults
            and the entropy.
        forget: the probability of that.
        games: fresh games of a step.
        lr: peak learning rate; linear warm-up over ``warmup`` steps, then a cosine down to zero.
        weight_decay: of AdamW.
    """

    corpus_games: int = 600
    vocab_size: int = 400
    hidden: int = 64
    intermediate: int = 192
    layers: int = 2
    heads: int = 2
    careful_steps: int = 250
    forgetful_steps: int = 150
    forget: float = 0.25
    games: int = 32
    lr: float = 4e-3
    warmup: int = 50
    weight_decay: float = 0.01

    @property
    def steps(self) -> int:
        return self.careful_steps + self.forgetful_steps


def hint_reader(*, forget: float, full: tuple[int, int] = (1, 10)) -> Player:
    """A player that guesses uniformly among what the hints allow, and with probability ``forget``
    in the full range.

    Args:
        forget: probability of a guess that ignores the hints.
        full: the range of the game, both ends included.

    Examples:
        >>> hint_reader(forget=0.0)(6, 6, random.Random(0))
        6
    """

    def guess(low: int, high: int, rng: random.Random) -> int:
        return rng.randint(*full) if rng.random() < forget else rng.randint(low, high)

    return guess


def make_env(env_id: str) -> Any:
    """A GEM environment, by its id."""
    return resolve_env(env_id).make()


def play(env: Any, seed: int, player: Player, rng: random.Random) -> list[str]:
    """One game as text: first message, response, feedback, response, ..., last feedback.

    Args:
        env: one of GEM's GuessTheNumber environments. It seeds the global generators: call this
            inside :func:`~torchrl_llm.envs.isolation.kept_global_rng`.
        seed: of the game.
        player: told the lowest and the highest number that the hints allow.
        rng: the player's generator.

    Examples:
        >>> with kept_global_rng():
        ...     texts = play(make_env(ENV_ID), 0, hint_reader(forget=0.0), random.Random(1))
        >>> texts[1], texts[2]
        ('\\\\boxed{2}', 'At turn 1, you guessed 2, and the target number is higher than 2.\\nEnter your next guess.')
    """
    observation, info = env.reset(seed=seed)
    texts = [compose_message(observation, info)]
    low, high, done = env.unwrapped.min_number, env.unwrapped.max_number, False
    while not done:
        guess = player(low, high, rng)
        texts.append(f"\\boxed{{{guess}}}")
        observation, _, terminated, truncated, info = env.step(texts[-1])
        texts.append(compose_message(observation, info))
        done = terminated or truncated
        low = max(low, guess + 1) if "higher than" in observation else low
        high = min(high, guess - 1) if "lower than" in observation else high
    return texts


def corpus(rng: random.Random, *, games: int) -> list[str]:
    """The texts that the BPE is trained on: games of three ranges, the numbers up to 99 and the
    role names."""
    texts = [str(number) for number in range(100)] * 200
    texts += ["system\n", "user\n", "assistant\n"] * games
    for env_id in CORPUS_IDS:
        env = make_env(env_id)
        for seed in range(games):
            texts += play(env, seed, _wild_guess, rng)
    return texts


def _wild_guess(low: int, high: int, rng: random.Random) -> int:
    """Any number of the range or just outside it, so that the corpus holds every kind of
    feedback."""
    return rng.randint(max(1, low - 3), high + 3)


def train_tokenizer(texts: list[str], *, vocab_size: int, frequent: int = 50, max_length: int = 4096) -> Qwen2Tokenizer:
    """A byte-level BPE with a ChatML template and frequent phrases as added tokens. Any text is
    encoded without loss.

    Args:
        texts: the corpus.
        vocab_size: at most so many tokens before the phrases, special tokens and the 256 bytes
            included.
        frequent: a phrase that occurs at least this often in the corpus becomes a token.
        max_length: the model's context in tokens.
    """
    qwen2 = Qwen2Tokenizer().backend_tokenizer
    bpe = Tokenizer(models.BPE())
    bpe.normalizer, bpe.pre_tokenizer, bpe.decoder = qwen2.normalizer, qwen2.pre_tokenizer, decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    learned = json.loads(bpe.to_str())["model"]
    tokenizer = Qwen2Tokenizer(
        vocab=learned["vocab"],
        merges=[tuple(merge) for merge in learned["merges"]],
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHATML,
        model_max_length=max_length,
    )
    counts = Counter(phrase for text in texts for phrase in PHRASES.findall(text))
    phrases = [phrase for phrase, count in counts.items() if count >= frequent and len(phrase) > 1]
    tokenizer.add_tokens([AddedToken(phrase, normalized=False) for phrase in phrases])
    return tokenizer


def make_model(tokenizer: Qwen2Tokenizer, recipe: Recipe, *, generator: torch.Generator) -> Qwen2ForCausalLM:
    """A freshly initialized Qwen2 with tied embeddings, float32."""
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden,
        intermediate_size=recipe.intermediate,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.heads,
        max_position_embeddings=tokenizer.model_max_length,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5 / 2, generator=generator)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True, top_k=0
    )
    return model


def render(texts: list[str], formatter: ChatFormatter) -> tuple[list[int], list[bool]]:
    """Ids and action mask of a game, from the first message to the end of the last response, as
    GEMEnv lays it out."""
    ids = list(formatter.start(texts[0]))
    mask = [False] * len(ids)
    for turn in range(1, len(texts), 2):
        response = _respond(texts[turn], formatter)
        feedback = formatter.feedback(response, texts[turn + 1]) if turn + 2 < len(texts) else ()
        ids += [*response, *feedback]
        mask += [True] * len(response) + [False] * len(feedback)
    return ids, mask


def _respond(text: str, formatter: ChatFormatter) -> list[int]:
    return [*formatter.tokenizer.encode(text, add_special_tokens=False), formatter.end_of_turn_ids[0]]


def batches(
    env: Any, player: Player, formatter: ChatFormatter, *, games: int, rng: random.Random
) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless batches of fresh games: ids ``[games, L]`` int64, right-padded, and action mask
    ``[games, L]`` bool."""
    while True:
        yield collate([play(env, rng.randrange(2**31), player, rng) for _ in range(games)], formatter)


def collate(games: list[list[str]], formatter: ChatFormatter) -> tuple[Tensor, Tensor]:
    """A batch of games: ids ``[games, L]`` int64, right-padded, and action mask ``[games, L]``
    bool."""
    return stack([render(texts, formatter) for texts in games], formatter.tokenizer.pad_token_id)


def stack(rows: list[tuple[list[int], list[bool]]], pad: int) -> tuple[Tensor, Tensor]:
    """Ids and action masks of rows, right-padded."""
    width = max(len(ids) for ids, _ in rows)
    return (
        torch.tensor([ids + [pad] * (width - len(ids)) for ids, _ in rows]),
        torch.tensor([mask + [False] * (width - len(mask)) for _, mask in rows]),
    )


def clone_loss(model: Qwen2ForCausalLM, ids: Tensor, mask: Tensor) -> Tensor:
    """Mean negative log-likelihood of the action tokens. Rows are right-padded, so causal attention
    needs no mask."""
    hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state[mask[:, 1:]]
    return F.cross_entropy(model.lm_head(hidden).float(), ids[:, 1:][mask[:, 1:]])


def clone(model: Qwen2ForCausalLM, data: Iterator[tuple[Tensor, Tensor]], recipe: Recipe) -> None:
    """Behavior cloning in place: AdamW, linear warm-up, cosine to zero."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, weight_decay=recipe.weight_decay, betas=(0.9, 0.98))
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: (
            min(1.0, (step + 1) / recipe.warmup) * 0.5 * (1 + math.cos(math.pi * min(1.0, step / recipe.steps)))
        ),
    )
    model.train()
    for step, (ids, mask) in enumerate(data):
        loss = clone_loss(model, ids, mask)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        if step % 100 == 0 or step == recipe.steps - 1:
            logger.info("step %d of %d, loss %.4f", step, recipe.steps, loss.item())
    model.eval()


def _examples(tokenizer: Qwen2Tokenizer, recipe: Recipe, rng: random.Random) -> Iterator[tuple[Tensor, Tensor]]:
    """The careful player's games, then the forgetful one's."""
    env, formatter = make_env(ENV_ID), ChatFormatter(tokenizer)
    for forget, steps in ((0.0, recipe.careful_steps), (recipe.forget, recipe.forgetful_steps)):
        games = batches(env, hint_reader(forget=forget), formatter, games=recipe.games, rng=rng)
        yield from itertools.islice(games, steps)


def make(*, seed: int, recipe: Recipe | None = None) -> tuple[Qwen2ForCausalLM, Qwen2Tokenizer]:
    """The model and its tokenizer, from nothing but GEM's games.

    Args:
        seed: of the corpus, the initial weights and the cloned games.
        recipe: defaults to the one of the shipped model.
    """
    recipe = recipe or Recipe()
    with kept_global_rng(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        texts = corpus(random.Random(seed), games=recipe.corpus_games)
        tokenizer = train_tokenizer(texts, vocab_size=recipe.vocab_size)
        model = make_model(tokenizer, recipe, generator=torch.Generator().manual_seed(seed))
        clone(model, _examples(tokenizer, recipe, random.Random(seed)), recipe)
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
    model.save_pretrained(arguments.out)
    tokenizer.save_pretrained(arguments.out)
    logger.info("%d parameters, %d tokens, in %s", model.num_parameters(), len(tokenizer), arguments.out)


if __name__ == "__main__":
    main()
