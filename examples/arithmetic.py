"""Arithmetic made offline, and a small model that is often wrong at it: what
``examples/reasoning.py`` trains.

Questions add and subtract three numbers from 0 to 5. The model is a Qwen2 over whole words that
learned the answers, and then to guess at times: it knows the form of an answer and most of the
arithmetic, so that reinforcement learning has something to teach on a CPU within a minute. Nothing
here needs a network.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from torchrl_llm.envs import ChatFormatter, train_test_split
from torchrl_llm.testing.tiny import random_model
from torchrl_llm.testing.tokenizers import word_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

SIGNS = {"+": 1, "-": -1}


def arithmetic_rows(*, operands: int = 3, largest: int = 5) -> list[dict[str, str]]:
    """All sums and differences of so many numbers from 0 on, as
    ``{"question": "3 + 4 - 5 =", "answer": "2"}``.

    Examples:
        >>> rows = arithmetic_rows()
        >>> len(rows), rows[-1]
        (864, {'question': '5 - 5 - 5 =', 'answer': '-5'})
    """
    rows = []
    for signs in itertools.product(SIGNS, repeat=operands - 1):
        for first, *rest in itertools.product(range(largest + 1), repeat=operands):
            terms = [part for sign, number in zip(signs, rest, strict=True) for part in (sign, str(number))]
            value = first + sum(SIGNS[sign] * number for sign, number in zip(signs, rest, strict=True))
            rows.append({"question": " ".join([str(first), *terms, "="]), "answer": str(value)})
    return rows


def arithmetic_splits(*, test_size: float = 0.25, seed: int = 0) -> dict[str, list[dict[str, str]]]:
    """:func:`arithmetic_rows`, divided into ``"train"`` and ``"test"``: no question is in both."""
    return train_test_split(arithmetic_rows(), test_size=test_size, seed=seed)


def arithmetic_tokenizer(*, operands: int = 3, largest: int = 5) -> PreTrainedTokenizerFast:
    """A tokenizer of whole words: every number that an answer may be is one token."""
    numbers = range(-largest * (operands - 1), largest * operands + 1)
    return word_tokenizer([*map(str, numbers), *SIGNS, "="])


def make_student(
    rows: list[dict[str, str]],
    *,
    guessed: float = 0.5,
    steps: int = 400,
    batch: int = 64,
    lr: float = 5e-3,
    seed: int = 0,
) -> tuple[Qwen2ForCausalLM, PreTrainedTokenizerFast]:
    """A small model that learned the answers of ``rows``, and then, for the last quarter of its
    steps, to guess at times.

    Args:
        rows: questions of three operands and their answers; no others are seen.
        guessed: share of the answers of that last quarter that are any number of the range.
        steps: optimizer steps.
        batch: rows of a step.
        lr: first learning rate of AdamW; it falls to 0 in a line.
        seed: of weights, order and errors.

    Returns:
        The model, float32, in evaluation mode, and its tokenizer.
    """
    tokenizer = arithmetic_tokenizer()
    model = random_model(tokenizer, hidden=64, layers=2, heads=4, max_length=64, seed=seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.01)
    batches = partial(_batches, rows, tokenizer, batch=batch, rng=np.random.default_rng(seed))
    careful, forgetful = batches(steps - steps // 4, guessed=0.0), batches(steps // 4, guessed=guessed)
    model.train()
    for step, ids in enumerate(itertools.chain(careful, forgetful)):
        for group in optimizer.param_groups:
            group["lr"] = lr * (1 - step / steps)
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits[:, -2:]
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, -2:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model.eval(), tokenizer


def _batches(
    rows: list[dict[str, str]],
    tokenizer: PreTrainedTokenizerFast,
    steps: int,
    *,
    guessed: float,
    batch: int,
    rng: np.random.Generator,
) -> Iterator[Tensor]:
    """Batches of ids ``[batch, L]`` int64: a prompt, an answer or a guess, and EOS."""
    formatter = ChatFormatter(tokenizer)
    prompts = torch.tensor([formatter.start(row["question"]) for row in rows])
    values = np.array([int(row["answer"]) for row in rows])
    zero = int(tokenizer.convert_tokens_to_ids("0"))
    for _ in range(steps):
        chosen = rng.integers(len(rows), size=batch)
        guesses = rng.integers(values.min(), values.max() + 1, size=batch)
        said = np.where(rng.random(batch) < guessed, guesses, values[chosen])
        answers = torch.from_numpy(zero + said)
        ends = torch.full_like(answers, int(tokenizer.eos_token_id))
        yield torch.cat([prompts[chosen], answers[:, None], ends[:, None]], dim=1)
