"""What the tests of vLLM engines share: batches of one turn, and what a scorer says of them."""

from __future__ import annotations

import numpy as np
import torch
from tensordict import TensorDict

from torchrl_llm import keys
from torchrl_llm.modules import TokenScorer, TurnRequest

CONTEXT = 256
PROMPTS = [
    "At turn 1, you guessed 5, which is too low.",
    "Enter your guess.",
    "You guessed a number which is outside of the range. " * 3,
]


def batch_of(words, texts=PROMPTS, *, turn=0, episodes=None):
    """A batch of prompts; an empty text is an idle slot."""
    rows = [words.encode(text) for text in texts]
    lengths = torch.tensor([[len(row)] for row in rows])
    prompt = torch.zeros(len(rows), int(lengths.max()), dtype=torch.int64)
    for i, row in enumerate(rows):
        prompt[i, : len(row)] = torch.tensor(row, dtype=torch.int64)
    episodes = range(len(rows)) if episodes is None else episodes
    return TensorDict(
        {
            keys.PROMPT: prompt,
            keys.PROMPT_LENGTH: lengths,
            keys.TURN: torch.full_like(lengths, turn),
            keys.EPISODE_ID: torch.tensor(list(episodes)).unsqueeze(-1),
        },
        batch_size=[len(rows)],
    )


def request_of(words, text=PROMPTS[0], *, slot=0, episode=0, turn=0, greedy=False):
    return TurnRequest(slot, np.array(words.encode(text)), episode, turn, greedy)


def finish(policy, limit=200):
    answers = []
    for _ in range(limit):
        if not policy.pending:
            return {answer.slot: answer for answer in answers}
        answers += policy.poll()
    raise AssertionError("the engine does not come to an end")


def rows_of(batch):
    """The conversations of one turn, as the scorer reads them."""
    size = batch[keys.PROMPT_LENGTH] + batch[keys.RESPONSE_MASK].sum(-1, keepdim=True)
    tokens = torch.zeros(len(size), int(size.max()), dtype=torch.int64)
    turn_ids = torch.full_like(tokens, -1)
    for i, length in enumerate(batch[keys.PROMPT_LENGTH].flatten().tolist()):
        response = batch[keys.RESPONSE][i][batch[keys.RESPONSE_MASK][i]]
        tokens[i, :length] = batch[keys.PROMPT][i, :length]
        tokens[i, length : length + len(response)] = response
        turn_ids[i, length : length + len(response)] = 0
    return TensorDict(
        {keys.TOKENS: tokens, keys.ATTENTION_MASK: torch.arange(tokens.shape[1]) < size, keys.TURN_IDS: turn_ids},
        batch_size=[len(size)],
    )


def gaps_of(policy, model, batch):
    """Absolute differences of the policy's log-probs and the scorer's, one for each sampled
    token."""
    policy(batch)
    rows = rows_of(batch)
    scorer = TokenScorer(model, policy.sampling, truncate=policy.sampling.truncates)
    with torch.no_grad():
        scores = scorer(rows)[keys.LOG_PROB][rows[keys.TURN_IDS] >= 0]
    return (scores - batch[keys.RESPONSE_LOG_PROBS][batch[keys.RESPONSE_MASK]]).abs()
