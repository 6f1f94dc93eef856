"""Arithmetic made offline: rows, splits and tokens. What the model that learns from them can do is
seen in the example."""

from __future__ import annotations

import torch
from arithmetic import arithmetic_rows, arithmetic_splits, arithmetic_tokenizer, make_student

from torchrl_llm.envs import ChatFormatter


class TestRows:
    def test_the_answers_are_right(self):
        for row in arithmetic_rows():
            assert eval(row["question"].removesuffix("=")) == int(row["answer"])

    def test_no_question_is_in_both_splits(self):
        splits = {name: {row["question"] for row in rows} for name, rows in arithmetic_splits().items()}
        assert {name: len(questions) for name, questions in splits.items()} == {"train": 648, "test": 216}
        assert not splits["train"] & splits["test"]


class TestTokenizer:
    def test_every_row_is_words_and_every_answer_one_of_them(self):
        tokenizer = arithmetic_tokenizer()
        assert {len(tokenizer.encode(row["question"])) for row in arithmetic_rows()} == {6}
        for row in arithmetic_rows():
            (token,) = tokenizer.encode(row["answer"])
            assert tokenizer.decode([token]) == row["answer"]


class TestPupil:
    def test_the_same_seed_gives_the_same_model_and_no_generator_is_touched(self):
        rows, before = arithmetic_splits()["train"], torch.get_rng_state()
        first, second, other = (make_student(rows, steps=3, seed=seed)[0].state_dict() for seed in (0, 0, 1))
        assert torch.equal(before, torch.get_rng_state())
        assert all(torch.equal(first[name], second[name]) for name in first)
        assert not all(torch.equal(first[name], other[name]) for name in first)

    def test_learns_to_answer_and_stop(self):
        rows = arithmetic_splits()["train"]
        model, tokenizer = make_student(rows, steps=30)
        prompts = torch.tensor([ChatFormatter(tokenizer).start(row["question"]) for row in rows[:64]])
        answers = torch.tensor([tokenizer.encode(row["answer"]) for row in rows[:64]])
        logits = model(input_ids=torch.cat([prompts, answers], 1)).logits.log_softmax(-1)
        assert logits[:, -1, tokenizer.eos_token_id].exp().mean() > 0.9
        numbers = [tokenizer.convert_tokens_to_ids(str(number)) for number in range(-10, 16)]
        assert logits[:, -2, numbers].exp().sum(-1).mean() > 0.9
