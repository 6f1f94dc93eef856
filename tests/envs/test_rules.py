"""The rules of a game: of data sets (others are in runs/test_paired_runs.py)."""

import pytest

from torchrl_llm.envs import CHATML, PromptDatasetEnv
from torchrl_llm.envs.rules import rules_of
from torchrl_llm.testing.tokenizers import byte_tokenizer

ROWS = [{"question": f"{i} + 1?", "answer": str(i + 1)} for i in range(12)]


def exact(completion, answer, question):
    return completion == answer


class TestDataSets:
    @pytest.mark.parametrize(
        "other",
        [
            {"reward_fn": lambda completion, answer, question: answer in completion},
            {"dataset": [*ROWS[1:], {"question": "0 + 1?", "answer": "one"}]},
        ],
    )
    def test_reward_function_and_answers_are_rules(self, tokenizer, other):
        given = {"dataset": ROWS, "reward_fn": exact, "tokenizer": tokenizer}
        one, same, two = (PromptDatasetEnv(**each) for each in (given, given, given | other))
        assert rules_of(one) == rules_of(same) != rules_of(two)

    def test_so_is_the_day_where_the_template_shows_it(self, tokenizer):
        shows = byte_tokenizer(chat_template="{{ strftime_now('%Y-%m-%d') }}" + CHATML)
        for each, same in ((shows, False), (tokenizer, True)):
            one, other = (
                PromptDatasetEnv(ROWS, exact, tokenizer=each, template_date=f"2024-02-{day}") for day in (28, 29)
            )
            assert (rules_of(one) == rules_of(other)) == same
