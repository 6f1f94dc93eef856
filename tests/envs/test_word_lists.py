"""GEM's games of words with a list of one's own: no NLTK data, no network."""

from __future__ import annotations

import pytest

from torchrl_llm.envs import GEMEnv
from torchrl_llm.envs.faults import EnvironmentUnavailableError
from torchrl_llm.envs.gem_words import READS_WORDS, read_words
from torchrl_llm.envs.registry import resolve_env
from torchrl_llm.testing.policies import ScriptedPolicy
from torchrl_llm.utils.options import ConfigError

NAMES = [each.removesuffix("Env") for each in READS_WORDS]
IDS = [f"game:{name}-v0-{level}" for name in NAMES for level in ("easy", "hard", "random")]
WORDS = ["cat", "dog", "tree", "house", "mouse", "bridges", "lantern"]


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "words.txt"
    path.write_text("\n".join(WORDS))
    return path


def make(env_id: str, **options):
    return resolve_env(env_id).make(**options)


def secret(env) -> list[str]:
    return list(getattr(env, "placed_words", None) or [env.secret_word])


@pytest.mark.parametrize("env_id", IDS)
def test_a_seed_fixes_words_of_the_file(env_id, path):
    env, twin = (make(env_id, word_list=str(path)) for _ in range(2))
    drawn = []
    for seed in range(12):
        first, again = env.reset(seed=seed)[0], twin.reset(seed=seed)[0]
        assert (first, secret(env)) == (again, secret(twin))
        drawn += secret(env)
    assert set(drawn) <= {word.upper() for word in WORDS}
    assert len(set(drawn)) > 1


def test_games_with_other_lists_stay_apart(path, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text("ant\nbee\n")
    games = [make("game:Wordle-v0-easy", word_list=str(each)) for each in (path, other)]
    assert {game.reset(seed=1) and game.secret_word for game in games} <= {"CAT", "DOG", "ANT", "BEE"}
    assert games[0].secret_word in ("CAT", "DOG")
    assert games[1].secret_word in ("ANT", "BEE")


def test_the_list_that_is_installed():
    env = make("game:Hangman-v0-hard", word_list="reasoning_gym")
    env.reset(seed=0)
    assert env.secret_word.lower() in read_words("reasoning_gym")
    assert len(env.secret_word) == 7


def test_an_episode_is_played(path, tokenizer):
    spec = resolve_env("game:Wordle-v0-easy")
    env = GEMEnv(lambda: spec.make(word_list=str(path)), tokenizer=tokenizer)
    assert "3-letter" in tokenizer.decode(env.reset()["tokens", "prompt"][0])
    env.close()


def test_lines_that_are_no_words_are_left_out(tmp_path):
    path = tmp_path / "dict"
    path.write_text("Ada\nisn't\n\ncat\nCAT\nna\u00efve\ntwo words\n", encoding="utf-8")
    assert read_words(path) == ("ada", "cat")


class TestRefused:
    def test_a_file_that_is_not_there(self, tmp_path):
        with pytest.raises(ConfigError, match=r"cannot be read .*expected a text file with one word a line"):
            make("game:Wordle-v0-easy", word_list=str(tmp_path / "none.txt"))

    def test_a_file_that_is_no_text(self, tmp_path):
        path = tmp_path / "words.bin"
        path.write_bytes(b"\xff\xfe\x00")
        with pytest.raises(ConfigError, match="cannot be read"):
            make("game:Wordle-v0-easy", word_list=str(path))

    def test_a_file_without_a_word(self, tmp_path):
        path = tmp_path / "words.txt"
        path.write_text("1,2\n3,4\n")
        with pytest.raises(ConfigError, match="has 2 lines and none is a word"):
            make("game:Wordle-v0-easy", word_list=str(path))

    @pytest.mark.parametrize(
        ("env_id", "missing"), [("game:Hangman-v0-hard", "7"), ("game:Wordle-v0-random", "4 or 5")]
    )
    def test_lengths_that_a_game_asks_for(self, env_id, missing, tmp_path):
        path = tmp_path / "words.txt"
        path.write_text("cat\ndog\n")
        with pytest.raises(ConfigError, match=f"no word of {missing} letters"):
            make(env_id, word_list=str(path))

    def test_no_path(self):
        with pytest.raises(ConfigError, match="word_list='7' cannot be read"):
            make("game:Wordle-v0-easy", word_list=7)

    def test_a_game_without_words(self, path):
        with pytest.raises(ConfigError, match="has no argument word_list"):
            make("game:GuessTheNumber-v0-easy", word_list=str(path))

    def test_other_arguments_as_ever(self, path):
        with pytest.raises(ConfigError, match="has no argument word_size"):
            make("game:Wordle-v0-easy", word_list=str(path), word_size=3)

    def test_the_option_is_named_where_nltk_has_no_list(self, monkeypatch, tokenizer, tmp_path):
        import nltk

        monkeypatch.setattr(nltk, "download", lambda *_: False)
        monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
        with pytest.raises(
            EnvironmentUnavailableError, match="the option word_list, a file of words or 'reasoning_gym'"
        ):
            GEMEnv("game:Hangman-v0-easy", tokenizer=tokenizer).reset()


@pytest.mark.parametrize("env_id", IDS)
def test_each_is_played_to_its_end_without_nltk(env_id, tokenizer, monkeypatch, tmp_path):
    import nltk

    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
    monkeypatch.setattr(nltk, "download", lambda *_: pytest.fail("it asks for the network"))
    spec, games = resolve_env(env_id), []

    def factory():
        games.append(spec.make(word_list="reasoning_gym"))
        return games[-1]

    limits = {"tokenizer": tokenizer, "max_output_tokens": 32}
    env = GEMEnv(factory, max_model_len=2**15, success_by=spec.success_by, **limits)
    policy = ScriptedPolicy(lambda *_: rf"\boxed{{{getattr(games[0], 'secret_word', 'none 0 0 across')}}}", **limits)
    after = env.rollout(25, policy)["next"]
    assert after["done"][0, -1]
    assert after["success"][0, -1] == ("WordSearch" not in env_id)
    env.close()
