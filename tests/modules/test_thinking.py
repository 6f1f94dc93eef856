"""Episodes whose template drops earlier thinking: what they cost grows with their turns, not with
the square of them."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from torchrl_llm import keys
from torchrl_llm.data import episode_from_messages, rows_from_episodes
from torchrl_llm.envs import CHATML, ChatFormatter
from torchrl_llm.modules import HFPolicy, SamplingConfig, TokenScorer, enable_prefix_sharing
from torchrl_llm.modules.segments import Segments
from torchrl_llm.testing.tiny import load_tiny_model, load_tiny_tokenizer


@pytest.fixture(scope="module")
def formatter():
    tokenizer = load_tiny_tokenizer()
    tokenizer.chat_template = CHATML.replace(
        "message['content']", "message['content'].split('</think>')[-1].lstrip('\n')"
    )
    return ChatFormatter(tokenizer)


def row_of(formatter, turns):
    """The row ``[1]`` of a conversation in which each answer is thought about."""
    messages = [{"role": "user", "content": "Guess a number between 1 and 10."}]
    for turn in range(turns):
        thought = f"<think>{'is it higher or lower? ' * 12}</think>\n\n{turn % 10}"
        messages += [{"role": "assistant", "content": thought}, {"role": "user", "content": f"Not {turn % 10}."}]
    return rows_from_episodes([episode_from_messages(messages, formatter, reward=1.0)])


def count_tokens(model):
    """A list that gets the tokens of every forward."""
    counts = []
    model.get_input_embeddings().register_forward_hook(lambda module, args, out: counts.append(args[0].numel()))
    return counts


def contexts_of(row):
    """What the policy saw at each turn."""
    segments = Segments.find(row[keys.ATTENTION_MASK])
    tokens, turn_ids = segments.split(row[keys.TOKENS]), segments.split(row[keys.TURN_IDS], fill=-1)
    starts = (turn_ids >= 0).int().argmax(1).tolist()
    return [ids[:start] for ids, start in zip(tokens.tolist(), starts, strict=True)]


class TestUpdate:
    def test_twice_the_turns_are_twice_the_tokens(self, formatter):
        model = load_tiny_model()
        scorer = TokenScorer(model, prefixes=enable_prefix_sharing(model))
        counts = count_tokens(model)
        for turns in (16, 32, 64):
            scorer(row_of(formatter, turns))
        assert len(counts) == 3
        for fewer, more in pairwise(counts):
            assert more == pytest.approx(2 * fewer, rel=0.1)


class TestPolicy:
    def test_only_what_stands_behind_the_first_dropped_thought_is_encoded_again(self, formatter):
        model, one = load_tiny_model(), torch.ones(1, dtype=torch.int64)
        policy = HFPolicy(model, formatter.tokenizer, SamplingConfig(max_output_tokens=12, min_output_tokens=12))
        counts, before = count_tokens(model), []
        for turn, ids in enumerate(contexts_of(row_of(formatter, 8))):
            counts.clear()
            places = {"turn": one * turn, "episode_id": one, "slots": one}
            policy.generate(torch.tensor([ids]), one * len(ids), **places, greedy=False)
            # Up to where the thought began that is dropped now.
            assert ids[: len(before)] == before
            # The last sampled token is never read.
            assert sum(counts) == len(ids) - len(before) + 11, turn
            before = ids
