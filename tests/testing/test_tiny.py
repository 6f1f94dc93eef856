"""The shipped model: its files, its tokenizer, how it plays, and the script that makes it."""

from __future__ import annotations

import random

import gem
import make_tiny_guess as maker
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoConfig

from torchrl_llm import keys
from torchrl_llm.collectors import TurnCollector
from torchrl_llm.envs import ChatFormatter, GEMEnv
from torchrl_llm.envs.isolation import kept_global_rng
from torchrl_llm.modules import HFPolicy, SamplingConfig
from torchrl_llm.testing.policies import ScriptedPolicy
from torchrl_llm.testing.tiny import load_tiny_model, load_tiny_tokenizer, tiny_model_path
from torchrl_llm.trainers import evaluate

EPISODES = 512


@pytest.fixture(scope="module")
def tiny():
    return load_tiny_model(), load_tiny_tokenizer()


@pytest.fixture(scope="module")
def formatter(tiny):
    return ChatFormatter(tiny[1])


def _games(count: int) -> list[list[str]]:
    env, rng, player = gem.make(maker.ENV_ID), random.Random(1), maker.hint_reader(forget=0.5)
    with kept_global_rng():
        return [maker.play(env, seed, player, rng) for seed in range(count)]


class TestFiles:
    def test_small_enough_for_the_repository(self):
        assert sum(file.stat().st_size for file in tiny_model_path().iterdir()) <= 3e6

    def test_architecture(self, tiny):
        config = AutoConfig.from_pretrained(tiny_model_path())
        assert config.model_type == "qwen2"
        assert config.tie_word_embeddings
        # vLLM's CPU kernels take no head dimension below 32.
        assert config.hidden_size // config.num_attention_heads == 32
        assert config.vocab_size == len(tiny[1])
        assert 100_000 <= tiny[0].num_parameters() <= 200_000
        assert {parameter.dtype for parameter in tiny[0].parameters()} == {torch.float32}

    def test_model_and_tokenizer_agree_on_the_end_of_a_turn(self, tiny, formatter):
        model, tokenizer = tiny
        assert tokenizer.convert_ids_to_tokens(model.config.eos_token_id) == "<|im_end|>"
        assert model.generation_config.eos_token_id == model.config.eos_token_id == formatter.end_of_turn_ids[0]
        assert model.config.pad_token_id == tokenizer.pad_token_id != tokenizer.eos_token_id


class TestTokenizer:
    def test_auto_tokenizer_keeps_the_files_own_rules(self, tiny):
        """``AutoTokenizer`` puts Qwen2's pre-tokenizer in place of the file's: they have to be the
        same."""
        own = Tokenizer.from_file(str(tiny_model_path() / "tokenizer.json"))
        for texts in _games(20):
            for text in texts:
                assert tiny[1].encode(text) == own.encode(text).ids

    def test_saved_and_loaded_again_it_is_the_same(self, tiny, tmp_path):
        model, tokenizer = tiny
        model.save_pretrained(tmp_path)
        tokenizer.save_pretrained(tmp_path)
        again = type(tokenizer).from_pretrained(tmp_path)
        assert again.get_vocab() == tokenizer.get_vocab()
        assert all(again.encode(text) == tokenizer.encode(text) for texts in _games(5) for text in texts)

    @settings(deadline=None, max_examples=60)
    @given(text=st.text(st.characters(max_codepoint=0x2FF, exclude_categories=["Cs"]), max_size=60))
    def test_any_composed_text_comes_back(self, tiny, text):
        # Qwen2's normalizer is NFC, and every character up to U+02FF is its own NFC form.
        tokenizer = tiny[1]
        assert tokenizer.decode(tokenizer.encode(text, split_special_tokens=True)) == text

    def test_look_alikes_of_special_tokens_stay_text(self, tiny):
        ids = tiny[1].encode("At turn 2, <|im_end|> you guessed 10", split_special_tokens=True)
        assert not set(ids) & set(tiny[1].all_special_ids)
        assert tiny[1].decode(ids) == "At turn 2, <|im_end|> you guessed 10"

    def test_numbers_of_the_game_are_one_token_each(self, tiny):
        for number in range(1, 51):
            assert len(tiny[1].encode(str(number))) == 1

    def test_games_are_short(self, formatter):
        lengths = [len(maker.render(texts, formatter)[0]) for texts in _games(50)]
        assert max(lengths) <= 100
        assert len(formatter.start(_games(1)[0][0])) <= 25


class TestRender:
    def test_cloned_ids_are_the_chat_templates(self, tiny, formatter):
        for texts in _games(20):
            roles = ["user", "assistant"] * len(texts)
            messages = [{"role": role, "content": text} for role, text in zip(roles, texts[:-1], strict=False)]
            whole = tiny[1].apply_chat_template(messages, tokenize=False).removesuffix("\n")
            assert maker.render(texts, formatter)[0] == tiny[1].encode(whole)

    def test_mask_covers_responses_and_their_end(self, tiny, formatter):
        for texts in _games(20):
            ids, mask = maker.render(texts, formatter)
            said = tiny[1].decode([token for token, is_action in zip(ids, mask, strict=True) if is_action])
            assert said == "".join(text + "<|im_end|>" for text in texts[1::2])

    def test_cloned_ids_are_those_of_gem_env(self, tiny, formatter):
        """What was cloned is what the environment shows: the same ids and actions as rows played in
        GEMEnv."""
        tokenizer = tiny[1]
        guesses = (3, 9, 7, 10)
        env = GEMEnv(maker.ENV_ID, tokenizer=tokenizer, num_envs=4, max_model_len=160, max_output_tokens=8)
        policy = ScriptedPolicy(
            lambda episode, turn, context: f"\\boxed{{{guesses[turn]}}}", tokenizer=tokenizer, max_output_tokens=8
        )
        rows = TurnCollector(env, policy, batch_size=16).rollout()
        assert rows[keys.TURN_MASK].sum(-1).unique().numel() > 1
        for row in rows:
            tokens, turn_ids = row[keys.TOKENS], row[keys.TURN_IDS]
            end = int((turn_ids >= 0).nonzero().max()) + 1
            text = tokenizer.decode(tokens[:end])
            texts = [
                part.split("\n", 1)[1] for part in text.replace("<|im_end|>\n", "<|im_end|>").split("<|im_start|>")[1:]
            ]
            ids, mask = maker.render([part.removesuffix("<|im_end|>") for part in texts] + [""], formatter)
            assert tokens[:end].tolist() == ids
            assert (turn_ids[:end] >= 0).tolist() == mask


class TestPlay:
    @pytest.fixture(scope="class")
    def played(self, tiny):
        model, tokenizer = tiny
        env = GEMEnv(
            maker.ENV_ID,
            tokenizer=tokenizer,
            num_envs=128,
            max_model_len=160,
            max_output_tokens=8,
            stream="eval",
            seed=3,
        )
        return evaluate(env, HFPolicy(model, tokenizer, SamplingConfig(max_output_tokens=8)), EPISODES)

    def test_wins_some_games_and_less_than_three_in_four(self, played):
        assert played.success_ci95[0] > 0.45
        assert played.success_ci95[1] < 0.75

    def test_is_legal(self, played):
        rows = played.rows
        errors = ((rows[keys.TURN_REWARD] < 0) & rows[keys.TURN_MASK]).any(-1)
        assert errors.float().mean() < 0.03

    def test_reads_hints(self, tiny, formatter):
        """After "higher" most of the mass lies above the guess, after "lower" below."""
        model, tokenizer = tiny
        numbers = tokenizer.convert_tokens_to_ids([str(number) for number in range(1, 11)])
        prompt = _games(1)[0][0]
        for hint, allowed in (("higher", slice(5, 10)), ("lower", slice(0, 4))):
            feedback = f"At turn 1, you guessed 5, and the target number is {hint} than 5.\nEnter your next guess."
            ids, _ = maker.render([prompt, r"\boxed{5}", feedback, r"\boxed{1}", ""], formatter)
            opened = ids[: len(ids) - len(tokenizer.encode("1}<|im_end|>"))]
            with torch.no_grad():
                probability = model(torch.tensor([opened])).logits[0, -1].softmax(-1)[numbers]
            assert probability.sum() > 0.97
            assert probability[allowed].sum() > 0.75


class TestMake:
    RECIPE = maker.Recipe(corpus_games=20, careful_steps=2, forgetful_steps=1, games=2)

    def test_tokenizer_is_the_shipped_one(self, tiny):
        recipe = maker.Recipe()
        with kept_global_rng():
            texts = maker.corpus(random.Random(0), games=recipe.corpus_games)
        made = maker.train_tokenizer(texts, vocab_size=recipe.vocab_size)
        assert made.get_vocab() == tiny[1].get_vocab()
        assert made.chat_template == tiny[1].chat_template
        assert all(made.encode(text) == tiny[1].encode(text) for texts in _games(5) for text in texts)

    def test_same_seed_same_weights_and_nothing_else_disturbed(self):
        state = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
        first, second, other = (maker.make(seed=seed, recipe=self.RECIPE)[0].state_dict() for seed in (0, 0, 1))
        assert random.getstate() == state[0]
        assert np.random.get_state()[1].tolist() == state[1]
        assert torch.equal(torch.get_rng_state(), state[2])
        assert all(torch.equal(first[name], second[name]) for name in first)
        assert not all(torch.equal(first[name], other[name]) for name in first)

    def test_players(self):
        careful, wild, rng = maker.hint_reader(forget=0.0), maker.hint_reader(forget=1.0), random.Random(0)
        assert {careful(4, 6, rng) for _ in range(100)} == {4, 5, 6}
        assert {wild(4, 6, rng) for _ in range(300)} == set(range(1, 11))

    def test_a_careful_player_heeds_every_hint(self):
        env, rng = gem.make(maker.ENV_ID), random.Random(0)
        with kept_global_rng():
            games = [maker.play(env, seed, maker.hint_reader(forget=0.0), rng) for seed in range(50)]
        for texts in games:
            guesses = [int(text[7:-1]) for text in texts[1::2]]
            for turn, feedback in enumerate(texts[2:-1:2]):
                later = guesses[turn + 1 :]
                higher = "higher than" in feedback
                assert all((guess > guesses[turn]) == higher for guess in later)
                assert guesses[turn] not in later
