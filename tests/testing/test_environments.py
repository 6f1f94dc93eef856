"""EarlyDecision, and the small vocabulary and random model it is learned with."""

from __future__ import annotations

import itertools
import math
import random
from functools import partial

import pytest
import torch
from transformers import AutoTokenizer

from torchrl_llm import keys
from torchrl_llm.collectors import TurnCollector
from torchrl_llm.envs import ChatFormatter, GEMEnv
from torchrl_llm.modules import HFPolicy, SamplingConfig
from torchrl_llm.testing.environments import Dice, EarlyDecision, Slow
from torchrl_llm.testing.policies import ScriptedPolicy
from torchrl_llm.testing.tiny import random_model
from torchrl_llm.testing.tokenizers import word_tokenizer
from torchrl_llm.trainers import evaluate

THINGS = tuple(EarlyDecision.RIGHT.values())


def answers(message: str, *, first: bool = True, last: bool = True) -> str:
    """What the best player says, or what is wrong in the first or the last turn; bets are on the
    hat."""
    kind, _, shown = message.partition(" ")
    if kind == "bet":
        return "hat"
    right, good = (EarlyDecision.RIGHT[shown], first) if kind == "pack" else (shown, last)
    return right if good else next(thing for thing in THINGS if thing != right)


def play(game: EarlyDecision, seed: int, player) -> tuple[list[str], list[float], list[bool]]:
    """Messages, rewards and ``terminated`` of a game."""
    message, _ = game.reset(seed)
    messages, rewards, ends = [message], [], [False]
    while not ends[-1]:
        message, reward, terminated, truncated, _ = game.step(player(message))
        assert not truncated
        messages.append(message)
        rewards.append(reward)
        ends.append(terminated)
    return messages, rewards, ends[1:]


@pytest.fixture(scope="module")
def words():
    return word_tokenizer(EarlyDecision.WORDS)


class TestEarlyDecision:
    def test_five_turns_and_what_they_say(self):
        for seed in range(30):
            messages, rewards, ends = play(EarlyDecision(), seed, answers)
            assert [message.split()[0] for message in messages] == ["pack", "bet", "bet", "bet", "show", "over"]
            assert ends == [False] * 4 + [True]
            assert len(rewards) == 5

    @pytest.mark.parametrize(("first", "last"), itertools.product([True, False], repeat=2))
    def test_the_last_turn_pays_only_after_the_right_first_one(self, first, last):
        for seed in range(30):
            _, rewards, _ = play(EarlyDecision(), seed, partial(answers, first=first, last=last))
            assert rewards[0] == 0
            assert rewards[4] == (first and last)

    def test_no_feedback_tells_whether_a_turn_was_right(self):
        for seed in range(30):
            best, _, _ = play(EarlyDecision(), seed, answers)
            worst, _, _ = play(EarlyDecision(), seed, lambda message: "over")
            assert best == worst

    def test_messages_are_independent_of_what_bets_pay(self):
        """A bet pays in a quarter of the games, whatever was shown: no player can do better."""
        paid = torch.zeros(4, 3)
        for seed in range(4000):
            messages, rewards, _ = play(EarlyDecision(luck=0.25), seed, answers)
            assert set(rewards[1:4]) <= {0.0, 0.25}
            paid[list(EarlyDecision.RIGHT).index(messages[0].split()[1])] += torch.tensor(rewards[1:4]) / 0.25
        rates = paid / 1000
        assert (rates - 0.25).abs().max() < 0.06

    @pytest.mark.parametrize("luck", [0.0, 0.5])
    def test_known_returns(self, luck):
        game, rng = EarlyDecision(luck=luck), random.Random(0)
        games = 4000
        best = sum(sum(play(game, seed, answers)[1]) for seed in range(games)) / games
        wild = sum(sum(play(game, seed, lambda _: rng.choice(THINGS))[1]) for seed in range(games)) / games
        # Five standard errors; a bet has the variance luck^2 * 3/16, and a win of one in 16 the
        # variance of 15/256.
        error = 5 * (luck**2 * 9 / 16 / games) ** 0.5
        assert best == pytest.approx(game.optimal_return, abs=error + 1e-9)
        assert wild == pytest.approx(game.random_return, abs=error + 5 * (15 / 256 / games) ** 0.5)

    def test_every_weather_and_every_thing_comes_up(self):
        games = [play(EarlyDecision(), seed, answers)[0] for seed in range(200)]
        assert {messages[0].split()[1] for messages in games} == set(EarlyDecision.RIGHT)
        assert {messages[4].split()[1] for messages in games} == set(THINGS)

    def test_same_seed_same_game_and_nothing_else_disturbed(self):
        state = random.getstate()
        assert play(EarlyDecision(), 3, answers) == play(EarlyDecision(), 3, answers)
        assert random.getstate() == state

    def test_wrong_use(self):
        with pytest.raises(ValueError, match="luck is 1"):
            EarlyDecision(luck=1.0)
        game = EarlyDecision()
        with pytest.raises(RuntimeError, match="reset first"):
            game.step("hat")
        play(game, 0, answers)
        with pytest.raises(RuntimeError, match="reset first"):
            game.step("hat")

    def test_in_gem_env_a_right_player_succeeds_and_a_lucky_one_does_not(self, words):
        """Bets that pay never make a success of a lost game, and the game ends as terminated."""

        def script(episode: int, turn: int, context: str) -> str:
            return answers(context.split("<|im_start|> user ")[-1].split(" <|im_end|>")[0], first=episode % 2 == 0)

        env = GEMEnv(EarlyDecision, tokenizer=words, num_envs=8, max_model_len=64, max_output_tokens=1)
        policy = ScriptedPolicy(script, tokenizer=words, max_output_tokens=1, read_context=True)
        rows = TurnCollector(env, policy, batch_size=32).rollout()
        assert rows[keys.TURN_MASK].sum(1).tolist() == [5] * 32
        assert rows[keys.TURN_TERMINATED][:, 4].all()
        assert not rows[keys.TURN_TRUNCATED].any()
        assert rows[keys.TURN_SUCCESS][:, 4].tolist() == [
            episode % 2 == 0 for episode in rows[keys.EPISODE_ID].tolist()
        ]
        assert (rows[keys.TURN_REWARD].sum(1) > 1).any()


class TestWordTokenizer:
    def test_one_token_a_word(self, words):
        assert len(words) == 5 + len(EarlyDecision.WORDS)
        assert [words.decode(words.encode(word)) for word in EarlyDecision.WORDS] == list(EarlyDecision.WORDS)
        assert all(len(words.encode(word)) == 1 for word in EarlyDecision.WORDS)

    def test_a_conversation_is_the_chat_templates(self, words):
        formatter = ChatFormatter(words)
        response = [*words.encode("hat"), words.eos_token_id]
        ids = [*formatter.start("pack sun"), *response, *formatter.feedback(response, "bet")]
        messages = [("user", "pack sun"), ("assistant", "hat"), ("user", "bet")]
        template = words.apply_chat_template(
            [{"role": role, "content": text} for role, text in messages], tokenize=False, add_generation_prompt=True
        )
        assert ids == words.encode(template)

    def test_an_unknown_word_is_an_error(self, words):
        with pytest.raises(Exception, match="UNK"):
            words.encode("umbrella")

    def test_words_that_cannot_be_tokens(self):
        for wrong in ("two words", "", "user", "hat"):
            with pytest.raises(ValueError, match="words holds"):
                word_tokenizer(["hat", wrong])

    def test_saved_and_loaded_again_it_is_the_same(self, words, tmp_path):
        words.save_pretrained(tmp_path)
        again = AutoTokenizer.from_pretrained(tmp_path)
        text = "<|im_start|>user\nshow hat<|im_end|>\n"
        assert again.encode(text) == words.encode(text)
        assert again.decode(words.encode("hat scarf")) == "hat scarf"


class TestRandomModel:
    def test_same_seed_same_weights_and_nothing_else_disturbed(self, words):
        state = torch.get_rng_state()
        first, second, other = (random_model(words, seed=seed).state_dict() for seed in (0, 0, 1))
        assert torch.equal(torch.get_rng_state(), state)
        assert all(torch.equal(first[name], second[name]) for name in first)
        assert not any(torch.equal(first[name], other[name]) for name in first if first[name].ndim == 2)

    def test_weights_do_not_depend_on_the_global_generators(self, words):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            first = random_model(words).state_dict()
            torch.manual_seed(2)
            second = random_model(words).state_dict()
        assert all(torch.equal(first[name], second[name]) for name in first)

    def test_it_knows_nothing_yet(self, words):
        model = random_model(words)
        assert model.config.vocab_size == len(words) == 17
        with torch.no_grad():
            probability = model(torch.tensor([words.encode("pack sun bet")])).logits.softmax(-1)
        assert probability.max() < 0.5

    def test_it_plays_like_chance(self, words):
        env = GEMEnv(EarlyDecision, tokenizer=words, num_envs=64, max_model_len=64, max_output_tokens=1, stream="eval")
        policy = HFPolicy(random_model(words), words, SamplingConfig(max_output_tokens=1))
        played = evaluate(env, policy, 256)
        assert played.turns == 5
        assert played.success < 0.05
        assert played.reward < EarlyDecision().random_return


class TestSlow:
    def test_times_have_the_mean_and_the_deviation(self):
        game = Slow(Dice, mean=0.03, sigma=1.0)
        logs = torch.tensor([game.latency(task, turn) for task in range(100) for turn in range(20)]).log()
        assert float(logs.std()) == pytest.approx(1.0, abs=0.06)
        assert float(logs.mean()) == pytest.approx(math.log(0.03) - 0.5, abs=0.08)
        assert Slow(Dice, mean=0.03).latency(1, 2) == 0.03
        assert Slow(Dice, sigma=1.0, seed=1).latency(1, 2) != game.latency(1, 2)

    def test_it_sleeps_as_long_as_it_says(self, clock):
        game = Slow(Dice, mean=0.02, sigma=0.5)
        game.reset(1), game.step("x"), game.step("x")
        assert clock.now == sum(game.latency(1, turn) for turn in (-1, 0, 1))

    def test_the_game_inside_is_isolated(self):
        random.seed(5)
        first = Slow(Dice, mean=0.0)
        shown = [first.reset(1)[0], first.step("x")[0]]
        assert random.random() == random.Random(5).random()
        second = Slow(Dice, mean=0.0)
        text = second.reset(1)[0]
        random.seed(9)
        assert [text, second.step("x")[0]] == shown

    def test_wrong_times(self):
        with pytest.raises(ValueError, match="mean"):
            Slow(Dice, mean=-1.0)
