"""What an episode costs whose template drops earlier thinking, against what its samples cost one by
one: updates, and the tokens that a policy encodes.

    OMP_NUM_THREADS=1 python benchmarks/thinking.py
    OMP_NUM_THREADS=1 python benchmarks/thinking.py --worlds guess --turns 8 --layers 30 --pairs 3
    OMP_NUM_THREADS=1 python benchmarks/thinking.py --vllm  # where vLLM is installed

A player plays GEM's GuessTheNumber-hard (``guess``, of as many turns as are asked for) and its
Minesweeper-hard (``board``), and thinks for ``--thinking`` random words of one token each before
every answer. The tokenizer is trained on the texts of the game. The episode is one row whose
segments share their beginnings; its *samples* are each turn's context and response as a row of its
own, in a forward of its own, without padding. An update is a forward and a backward of the
library's loss with the same weights, float32, on a random model in the shape of SmolLM2-135M with
``--layers`` of its 30 and as large a part of its vocabulary, so that the head, which both forms
compute for the same tokens, has its share of the work.

Prints one JSON object. Of each world and number of turns: ``plain``, the tokens of the samples;
``distinct``, those of their trie; ``computed``, those of the update's forward; ``tokens``, plain
over distinct; the CPU-seconds of both forms, ``speedup``, the median of pairs in turns, with its
``interval``; ``share``, the speed-up over ``tokens``; the relative gaps of the losses and the
gradients; and the tokens of prompts that :class:`~torchrl_llm.modules.HFPolicy` encodes with what
it keeps between turns, and without. With ``--vllm`` only the share of the tokens of prompts that
its prefix cache has.
"""

import argparse
import json
import math
import random
import re
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import episodes
import gem
import learn
import torch
from episodes import cpu_seconds
from in_turns import interval
from report import machine
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from torchrl_llm import keys
from torchrl_llm.collectors import TurnCollector
from torchrl_llm.data import micro_batches
from torchrl_llm.envs import CHATML, GEMEnv
from torchrl_llm.modules import HFPolicy, SamplingConfig, TokenScorer, enable_prefix_sharing
from torchrl_llm.modules.prefixes import SortedRows
from torchrl_llm.modules.segments import Segments
from torchrl_llm.objectives import LLMReinforceLoss, total, write_loss_weights
from torchrl_llm.testing.policies import ScriptedPolicy

DROPS_THINKING = CHATML.replace("message['content']", "message['content'].split('</think>')[-1].lstrip('\n')")
CONTEXT = 8_192
SEEN = (keys.TOKENS, keys.ATTENTION_MASK, keys.TURN_IDS, keys.SAMPLE_LOG_PROB, keys.ADVANTAGE, keys.LOSS_WEIGHT)


class World(NamedTuple):
    """A game, and a player of it that does not end it.

    Attributes:
        env_id: GEM's.
        answers: all that the player may say.
        answer: what it says in an episode and a turn.
        limited: the environment has a limit of turns, which is to be raised.
    """

    env_id: str
    answers: list[str]
    answer: Callable[[int, int], str]
    limited: bool = False


NUMBERS = [str(number) for number in range(1, 51)]
FLAGS = [f"flag {cell // 8} {cell % 8}" for cell in range(64)]
WORLDS = {
    "guess": World(
        "game:GuessTheNumber-v0-hard",
        NUMBERS,
        lambda episode, turn: random.Random(episode).sample(NUMBERS, 50)[turn],
        limited=True,
    ),
    "board": World("game:Minesweeper-v0-hard", FLAGS, lambda episode, turn: FLAGS[turn]),
}


# ---------------------------------------- an episode


def make_tokenizer(world: World) -> PreTrainedTokenizerFast:
    """Trained on the game's texts, with a template that drops thinking."""
    tokenizer = episodes.train_tokenizer(world.env_id, lambda board: world.answers)
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.chat_template = DROPS_THINKING
    return tokenizer


def collect(world: World, tokenizer: PreTrainedTokenizerFast, turns: int, thinking: int) -> TensorDictBase:
    """The row ``[1]`` of an episode of so many turns: the first of eight that is not won before."""
    words = [tokenizer.convert_tokens_to_string([name]) for name in sorted(tokenizer.get_vocab())]
    words = [word for word in words if re.fullmatch(" [a-z]+", word)]

    def say(episode: int, turn: int, context: str) -> str:
        thought = random.Random(f"{episode}:{turn}").choices(words, k=thinking)
        return f"<think>{''.join(thought)}</think>\n\n\\boxed{{{world.answer(episode, turn)}}}"

    most = thinking + 32
    sizes = {"max_model_len": CONTEXT, "max_output_tokens": most, "max_turns": turns}
    game = partial(gem.make, world.env_id, max_turns=turns) if world.limited else world.env_id
    env = GEMEnv(game, tokenizer=tokenizer, num_envs=8, **sizes)
    # About what a random model says of each token, so that no ratio is far from 1.
    policy = ScriptedPolicy(say, tokenizer=tokenizer, max_output_tokens=most, log_prob=-math.log(len(tokenizer)))
    (rows,) = TurnCollector(env, policy, batch_size=8, total_batches=1)
    whole = rows[rows[keys.TURN_MASK].sum(-1) == turns]
    if not len(whole):
        raise RuntimeError(f"None of eight episodes of {world.env_id} has {turns} turns: give other --turns.")
    return whole[:1]


def samples(row: TensorDictBase) -> TensorDict:
    """Each turn's context and response as a row of its own, with the weights that it has in the
    episode."""
    segments = Segments.find(row[keys.ATTENTION_MASK])
    assert segments is not None, "the template drops nothing"
    seen = row.select(*SEEN, strict=False).items()
    parts = {key: segments.split(value, fill=keys.row_fill(key)) for key, value in seen}
    acting = parts[keys.TURN_IDS] >= 0
    # What follows the last response, in a segment of its own, belongs to no sample.
    parts[keys.ATTENTION_MASK] &= acting.flip(1).cummax(1).values.flip(1)
    return TensorDict(parts, [len(segments.rows)])[acting.any(1)]


def distinct_tokens(rows: TensorDictBase) -> int:
    """Tokens of the trie of plain rows."""
    ends = rows[keys.ATTENTION_MASK].sum(-1).numpy()
    return int(ends.sum() - SortedRows.of(rows[keys.TOKENS].numpy(), ends).shared.sum())


# ---------------------------------------- updates


def make_model(layers: int) -> LlamaForCausalLM:
    """SmolLM2-135M's shape: so many of its layers, and as large a part of its vocabulary."""
    vocabulary, _, depth, *_ = learn.MODELS["135M"]
    return learn.make_model("135M", layers, vocabulary * layers // depth)


def count_tokens(model: LlamaForCausalLM, counts: list[int]) -> Any:
    """Write the tokens of every forward into a list, until the handle that it returns is
    removed."""
    return model.get_input_embeddings().register_forward_hook(lambda module, args, out: counts.append(args[0].numel()))


class Forms:
    """The two forms of an episode's update on one model.

    Args:
        model: trained.
        row: of the episode.
    """

    def __init__(self, model: LlamaForCausalLM, row: TensorDictBase) -> None:
        self.model = model
        prefixes = enable_prefix_sharing(model)
        scorers = {"plain": TokenScorer(model), "shared": TokenScorer(model, prefixes=prefixes)}
        self.losses = {
            name: LLMReinforceLoss(scorer, kl_coeff=0.0, clipping="none") for name, scorer in scorers.items()
        }
        write_loss_weights(row, self.losses["shared"])
        acting = row[keys.TURN_IDS] >= 0
        of_turns = torch.randn(row[keys.TURN_MASK].shape[1], generator=torch.Generator().manual_seed(0))
        row[keys.ADVANTAGE] = of_turns[row[keys.TURN_IDS].clamp(min=0)] * acting
        self.parts = {"plain": micro_batches(samples(row), 1), "shared": [row.select(*SEEN)]}

    def update(self, name: str) -> Tensor:
        """Add the gradient; returns the loss."""
        found = torch.zeros(())
        for part in self.parts[name]:
            loss = total(self.losses[name](part.copy()))
            loss.backward()
            found += loss.detach()
        return found

    def results(self, name: str) -> tuple[Tensor, Tensor, int]:
        """The loss, the gradient, and the tokens computed."""
        counts: list[int] = []
        handle = count_tokens(self.model, counts)
        loss = self.update(name)
        handle.remove()
        gradient = nn.utils.parameters_to_vector([weight.grad for weight in self.model.parameters()])
        self.model.zero_grad(set_to_none=True)
        return loss, gradient, sum(counts)

    def seconds(self, name: str) -> float:
        """CPU-seconds of an update."""
        found = cpu_seconds(lambda: self.update(name))
        self.model.zero_grad(set_to_none=True)
        return found


def compare(forms: Forms, pairs: int) -> dict[str, Any]:
    """Seconds, tokens, and that both forms do the same."""
    found = {name: forms.results(name) for name in ("plain", "shared")}
    (loss, gradient, plain), (other_loss, other, computed) = found["plain"], found["shared"]
    distinct = distinct_tokens(samples(forms.parts["shared"][0]))
    seconds: dict[str, list[float]] = {name: [] for name in found}
    for pair in range(pairs):
        for name in sorted(seconds, reverse=bool(pair % 2)):
            seconds[name].append(forms.seconds(name))
    ratios = [a / b for a, b in zip(seconds["plain"], seconds["shared"], strict=True)]
    speedup, tokens = statistics.median(ratios), plain / distinct
    result = {"plain": plain, "distinct": distinct, "computed": computed, "tokens": round(tokens, 3)}
    result |= {f"{name}_s": round(statistics.median(each), 3) for name, each in seconds.items()}
    result |= {"speedup": round(speedup, 3), "interval": interval(ratios), "share": round(speedup / tokens, 3)}
    gaps = float((loss - other_loss).abs() / loss.abs()), float((gradient - other).norm() / gradient.norm())
    return result | {"loss_gap": gaps[0], "gradient_gap": gaps[1]}


# ---------------------------------------- what policies encode


def contexts(row: TensorDictBase) -> list[list[int]]:
    """What the policy saw at each turn."""
    parts = samples(row)
    first = (parts[keys.TURN_IDS] >= 0).int().argmax(1).tolist()
    return [ids[:start] for ids, start in zip(parts[keys.TOKENS].tolist(), first, strict=True)]


def encoded(policy: HFPolicy, prompts: list[list[int]], *, keep: bool) -> list[int]:
    """Tokens of each prompt that a policy encodes when it is asked turn by turn.

    What it samples in between is not what the player said. That changes no count: responses with
    thoughts never return as they were sampled.
    """
    counts: list[int] = []
    handle = count_tokens(policy.model, counts)
    found, one = [], torch.ones(1, dtype=torch.int64)
    for turn, ids in enumerate(prompts):
        if not keep:
            policy.drop_cache()
        counts.clear()
        sizes = {"turn": one * turn, "episode_id": one, "slots": one}
        policy.generate(torch.tensor([ids]), one * len(ids), **sizes, greedy=False)
        found.append(sum(count for count in counts if count > 1))  # the others are sampled tokens
    handle.remove()
    return found


def behind_dropped(prompts: list[list[int]]) -> list[int]:
    """Tokens of each context that do not continue what it shares with the one before."""
    found = []
    for before, after in pairwise([[], *prompts]):
        equal = [a == b for a, b in zip(before, after, strict=False)]
        found.append(len(after) - [*equal, False].index(False))
    return found


def encodings(tokenizer: PreTrainedTokenizerFast, row: TensorDictBase, responses: int = 16) -> dict[str, int]:
    """Tokens of prompts that :class:`HFPolicy` encodes in an episode."""
    model, prompts = make_model(1), contexts(row)
    policy = HFPolicy(model, tokenizer, SamplingConfig(max_output_tokens=responses, min_output_tokens=responses))
    kept, fresh = (sum(encoded(policy, prompts, keep=keep)) for keep in (True, False))
    return {"prompts": fresh, "encoded": kept, "behind_dropped": sum(behind_dropped(prompts))}


def hit_rate(tokenizer: PreTrainedTokenizerFast, row: TensorDictBase) -> dict[str, float]:
    """The share of the prompts' tokens that vLLM's prefix cache has."""
    from torchrl_llm.modules.vllm import VLLMPolicy

    with tempfile.TemporaryDirectory() as folder:
        make_model(1).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        sampling = SamplingConfig(max_output_tokens=1)
        policy = VLLMPolicy(folder, tokenizer, sampling, dtype="float32", max_model_len=CONTEXT)
        prompts = contexts(row)
        asked = [{"prompt_token_ids": ids} for ids in prompts]
        found = [policy.llm.generate(prompt, use_tqdm=False)[0].num_cached_tokens for prompt in asked]
        policy.close()
    return {"prompts": sum(map(len, prompts)), "cached": sum(found), "hit_rate": sum(found) / sum(map(len, prompts))}


def main() -> None:
    """Measure and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", nargs="+", choices=list(WORLDS), default=list(WORLDS))
    parser.add_argument("--turns", nargs="+", type=int, default=[8, 16, 32])
    parser.add_argument("--thinking", type=int, default=256, help="words of a thought")
    parser.add_argument("--layers", type=int, default=2, help="of 30")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--vllm", action="store_true", help="the hit rate of its prefix cache, and nothing else")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = {"machine": machine(), "layers": arguments.layers, "pairs": arguments.pairs}
    for name in arguments.worlds:
        tokenizer = make_tokenizer(WORLDS[name])
        for turns in arguments.turns:
            row = collect(WORLDS[name], tokenizer, turns, arguments.thinking)
            if arguments.vllm:
                result[f"{name}, {turns}"] = hit_rate(tokenizer, row)
                continue
            found = encodings(tokenizer, row)
            result[f"{name}, {turns}"] = compare(Forms(make_model(arguments.layers), row), arguments.pairs) | found
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
