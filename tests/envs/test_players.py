"""Scripted players: they play the real environments legally, and win as often as their skill
allows."""

from __future__ import annotations

import random
import re
from functools import partial

import pytest

from torchrl_llm.envs import IsolatedEnv, players, resolve_env
from torchrl_llm.testing.tiny import load_tiny_tokenizer

PENALIZED = (
    "did not provide",
    "change the board",
    "outside the range",
    "entries but the code",
    "already guessed",
    "already been guessed",
    "you tried to move",
)

SMALL = {"board_size": 3, "target_tile": 8, "max_turns": 5}

# The shares that were won of 2,000 episodes.
RATES = [
    ("game:GuessTheNumber-v0-easy", {}, "guess_at_random", 0.40),
    ("game:GuessTheNumber-v0-easy", {}, "guess_by_half_the_hints", 0.60),
    ("game:GuessTheNumber-v0-easy", {}, "guess_by_hints", 0.76),
    ("game:Mastermind-v0-easy", {}, "break_code_at_random", 0.32),
    ("game:Mastermind-v0-easy", {}, "break_code_by_half_the_pegs", 1.0),
    ("game:Mastermind-v0-easy", {}, "break_code_by_pegs", 1.0),
    ("game:Mastermind-v0-easy", {"max_turns": 4}, "break_code_at_random", 0.14),
    ("game:Mastermind-v0-easy", {"max_turns": 4}, "break_code_by_half_the_pegs", 0.52),
    ("game:Mastermind-v0-easy", {"max_turns": 4}, "break_code_by_pegs", 0.87),
    ("game:Game2048-v0-easy", SMALL, "slide_at_random", 0.48),
    ("game:Game2048-v0-easy", SMALL, "slide_to_merge_half_the_time", 0.68),
    ("game:Game2048-v0-easy", SMALL, "slide_to_merge", 0.86),
    ("game:TowerofHanoi-v0-easy", {}, "move_disks_at_random", 0.006),
    ("game:TowerofHanoi-v0-easy", {}, "move_most_disks_right", 0.80),
    ("game:TowerofHanoi-v0-easy", {}, "move_disks_right", 1.0),
    ("rg:aiw", {}, "count_at_random", 0.17),
    ("rg:aiw", {}, "count_half_right", 0.50),
    ("rg:aiw", {}, "count_right", 1.0),
]


@pytest.fixture(scope="module")
def tokenizer():
    return load_tiny_tokenizer()


def play(env_id, player, tokenizer, episodes, **options):
    """The share of episodes that are won, the mean number of turns, and the observations after a
    turn."""
    env, rng = IsolatedEnv(partial(resolve_env(env_id).make, **options)), random.Random(0)
    wins, observations = 0, []
    for seed in range(episodes):
        messages, total, done = [{"role": "user", "content": env.reset(seed)}], 0.0, False
        while not done:
            context = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            action = player(context, rng)
            step = env.step(action)
            observations.append(step.message)
            messages += [{"role": "assistant", "content": action}, {"role": "user", "content": step.message}]
            total, done = total + step.reward, step.terminated or step.truncated
        wins += total > 1 - 1e-6  # a reward of 1 for the goal, or shares of 1 for progress
    return wins / episodes, len(observations) / episodes, observations


class TestTheRealEnvironments:
    @pytest.mark.parametrize(("env_id", "options", "name", "rate"), RATES)
    def test_play_is_legal_and_as_good_as_the_skill(self, tokenizer, env_id, options, name, rate):
        won, _, observations = play(env_id, vars(players)[name], tokenizer, episodes=400, **options)
        standard_error = (rate * (1 - rate) / 400) ** 0.5
        assert abs(won - rate) <= 4 * standard_error
        assert not [text for text in observations if any(words in text for words in PENALIZED)]

    @pytest.mark.parametrize(
        ("env_id", "answers"),
        [
            ("game:GuessTheNumber-v0-easy", ["11", "number"]),
            ("game:Mastermind-v0-easy", ["1 2 3", "1 7", "code"]),
            ("game:Game2048-v0-easy", ["north"]),
            ("game:TowerofHanoi-v0-easy", ["D", "B A"]),
        ],
    )
    def test_illegal_turns_are_seen(self, tokenizer, env_id, answers):
        for answer in answers:
            _, _, observations = play(env_id, lambda context, rng, said=answer: f"\\boxed{{{said}}}", tokenizer, 1)
            assert any(words in observations[0] for words in PENALIZED)

    def test_more_skill_takes_fewer_turns(self, tokenizer):
        skills = players.break_code_at_random, players.break_code_by_half_the_pegs, players.break_code_by_pegs
        random_turns, half, good = (play("game:Mastermind-v0-easy", each, tokenizer, 200)[1] for each in skills)
        assert random_turns > half + 2
        assert half > good + 0.5


class TestWhatPlayersRead:
    @pytest.mark.parametrize(
        "name", ["guess_by_hints", "break_code_by_pegs", "slide_to_merge", "move_disks_right", "count_right"]
    )
    def test_another_task_is_refused(self, name):
        with pytest.raises(ValueError, match="it was shown 'What is 2"):
            vars(players)[name]("What is 2 + 2?", random.Random(0))

    @pytest.mark.parametrize("board_size", [2, 3, 4])
    def test_slides_are_those_of_the_game(self, board_size):
        """Every move of 200 boards: what the player expects is what GEM makes of it."""
        env = resolve_env("game:Game2048-v0-easy").make(board_size=board_size)
        for seed in range(50):
            env.reset(seed)
            for direction in ("up", "down", "left", "right"):
                expected = getattr(env, f"_move_{direction}")()
                assert players._slide(env.board, direction) == expected
                env.step(f"\\boxed{{{direction}}}")

    def test_longer_codes(self, tokenizer):
        """Three digits, which may be repeated: 64 codes."""
        options = {"code_length": 3, "num_numbers": 4, "duplicate_numbers": True, "max_turns": 10}
        won, turns, _ = play("game:Mastermind-v0-easy", players.break_code_by_pegs, tokenizer, 100, **options)
        assert won == 1.0
        assert turns < 5

    def test_all_questions_of_aiw(self, tokenizer):
        """Every kind of question is among them, and each is answered right."""
        asked = []

        def player(context, rng):
            asked.append(context)
            return players.count_right(context, rng)

        assert play("rg:aiw", player, tokenizer, 300)[0] == 1.0
        for words in ("she also has \\d sisters", "she also has \\d brothers", "female friends", "Matilda"):
            assert any(re.search(words, context) for context in asked)
