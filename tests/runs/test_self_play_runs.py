"""Runs of self-play: settings, opponents, matches, resuming, and learning."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from torchrl_llm import keys
from torchrl_llm.cli import main
from torchrl_llm.envs import GEMEnv, SelfPlayEnv
from torchrl_llm.metrics import paired_comparison
from torchrl_llm.modules import PlayerPolicy
from torchrl_llm.runs import RunSettings, build_run, parse_settings, play_match
from torchrl_llm.runs.saved import SavedModel
from torchrl_llm.testing.policies import ScriptedPolicy
from torchrl_llm.testing.take_away import TakeAway, take_at_random, take_well
from torchrl_llm.testing.tiny import random_model
from torchrl_llm.testing.tokenizers import byte_tokenizer, word_tokenizer
from torchrl_llm.trainers import evaluate
from torchrl_llm.utils.options import ConfigError

TOKENIZER = byte_tokenizer()
GAMES = "torchrl_llm.testing.take_away"
CONFIGS = Path(__file__).parents[2] / "examples" / "configs"


def player(function, env):
    return PlayerPolicy(function, env.formatter.tokenizer, env.formatter.answer, max_output_tokens=4)


def make_env(game=TakeAway, **options):
    return SelfPlayEnv(game, tokenizer=TOKENIZER, num_envs=16, max_output_tokens=4, stream="test", **options)


class TestMatch:
    def test_the_seats_are_counted_apart(self):
        """With a heap of five the first player wins, if both play well."""
        env = make_env(partial(TakeAway, 5, 5))
        match = play_match(env, player(take_well, env), player(take_well, env), 10)
        assert (match.wins, match.draws, match.losses, match.unfinished) == ((5, 0), (0, 0), (0, 5), 0)
        assert match.score == 0.5
        assert match.evaluation.success == 0.5
        assert "as player 1: 0 won, 0 drawn, 5 lost" in str(match)

    def test_it_is_the_same_each_time(self):
        env = make_env()
        first, second = (play_match(env, player(take_at_random, env), player(take_well, env), 12) for _ in range(2))
        assert first.evaluation.outcomes == second.evaluation.outcomes
        assert first.evaluation.task_digest == second.evaluation.task_digest
        assert first.evaluation.beginnings == second.evaluation.beginnings

    def test_against_another_opponent_it_is_another_game(self):
        env = make_env()
        match, other = (
            play_match(env, player(take_at_random, env), player(each, env), 4) for each in (take_well, take_at_random)
        )
        with pytest.raises(ValueError, match="not of the same games"):
            paired_comparison(match.evaluation, other.evaluation)

    def test_a_game_that_fails_is_not_won_and_not_replaced(self):
        class Fragile(TakeAway):
            def move(self, text):
                if text == "0":
                    raise ValueError("zero")
                super().move(text)

        env = make_env(Fragile)
        breaks = ScriptedPolicy(lambda episode, turn, _: "0" if episode % 8 == 0 else "9", tokenizer=TOKENIZER)
        match = play_match(env, breaks, player(take_well, env), 8)
        assert match.unfinished == match.evaluation.faults == 2
        assert sum(match.losses) == 6
        assert match.evaluation.episodes == 8

    def test_a_game_that_is_cut_is_unfinished(self):
        env = make_env(partial(TakeAway, 9, 9), max_turns=1)
        match = play_match(env, player(take_well, env), player(take_well, env), 4)
        assert (match.unfinished, match.score) == (4, 0.0)


class TestRefused:
    @pytest.mark.parametrize(
        ("settings", "said"),
        [
            ({"algo": "GRPO", "group_size": 2}, "GRPO compares the episodes of one task"),
            ({"algo": "LLMREINFORCE", "dynamic_sampling": 2}, "dynamic_sampling=2 compares"),
            ({"evaluation_greedy": True}, "evaluation_greedy"),
            ({"group_size": 1}, "group_size is 1; expected an integer, at least 2; the players of a game"),
            ({"batch_size": 3}, "batch_size=3 is not a multiple of group_size=2"),
            ({"step_timeout": 3.0}, "step_timeout=3.0 does nothing with collector='self_play'"),
            ({"max_staleness": 1}, "max_staleness=1 does nothing with collector='self_play'"),
            ({"ray_workers": 2}, "ray_workers=2 does nothing"),
            ({"policy": "vllm", "sleep_mode": True}, "opponent of collector"),
            ({"collector": "turn", "opponent": "tiny"}, "opponent='tiny' does nothing with collector='turn'"),
        ],
    )
    def test_settings(self, settings, said):
        with pytest.raises(ConfigError, match=said):
            RunSettings.from_values(**{"collector": "self_play", **settings})

    def test_the_players_are_the_group(self):
        assert RunSettings.from_values(collector="self_play").rollouts.group_size == 2
        assert (
            RunSettings.from_values(collector="self_play", group_size=3, batch_size=6, num_envs=6).rollouts.group_size
            == 3
        )
        assert RunSettings.from_values(collector="self_play").replace(seed=1).rollouts.group_size == 2

    @pytest.mark.parametrize(
        ("opponent", "said"),
        [
            ("nobody", "opponent is 'nobody': no file or folder, and no player"),
            (f"{GAMES}:take_badly", "cannot be imported"),
            (f"{GAMES}:MOST_TAKEN", "expected a function"),
            ("smollm", "no file or folder"),
        ],
    )
    def test_opponents(self, tmp_path, opponent, said):
        with pytest.raises(ConfigError, match=said):
            build_run(small(tmp_path, model_path="tiny", opponent=opponent), env=TakeAway)

    def test_evaluations(self):
        env = make_env()
        policy = player(take_well, env)
        with pytest.raises(ValueError, match="who has the other seats"):
            evaluate(env, policy, 4)
        with pytest.raises(ValueError, match="samples"):
            evaluate(env, policy, 4, greedy=True, opponent=policy)
        with pytest.raises(ValueError, match="expected a SelfPlayEnv"):
            evaluate(GEMEnv(lambda: None, tokenizer=TOKENIZER), policy, 4, opponent=policy)


def small(folder, **settings):
    given = {
        "collector": "self_play",
        "algo": "LLMREINFORCE",
        "estimator": "RoleRelative",
        "gamma": 1.0,
        "kl_coeff": 0.0,
        "device": "cpu",
        "num_envs": 8,
        "batch_size": 8,
        "max_model_len": 128,
        "max_output_tokens": 4,
        "evaluation_interval": 1,
        "evaluation_episodes": 4,
        "final_episodes": 6,
        "max_iterations": 2,
        "lr_actor": 1e-2,
        "output_dir": folder,
        "progress": False,
    }
    return RunSettings.from_values(**given | settings)


class TestRun:
    def test_with_lora_the_opponent_is_the_base_and_stays_it(self, tmp_path):
        run = build_run(small(tmp_path, model_path="tiny", lora_r=2, save_checkpoints=False), env=TakeAway)
        env = run.make_env(stream="test")
        before = play_match(env, run.opponent, player(take_at_random, env), 6).evaluation.rows
        run.trainer.train()
        after = play_match(env, run.opponent, player(take_at_random, env), 6).evaluation.rows
        assert before[keys.TOKENS].equal(after[keys.TOKENS])
        assert run.opponent.model is run.policy.model
        run.close()

    @pytest.mark.parametrize("players", [2, 3])
    def test_a_saved_model_plays_games_of_as_many_players(self, tmp_path, players):
        config = small(tmp_path, model_path="tiny", group_size=players, batch_size=6, num_envs=6)
        saved = SavedModel(path=tmp_path, weights=tmp_path, tokenizer=None, settings=config.as_json())
        assert (saved.config().collector, saved.config().rollouts.group_size) == ("self_play", players)

    @pytest.mark.parametrize("role", ["model", "environment", "player"])
    def test_play_shows_one_conversation_and_no_game(self, tmp_path, capsys, role):
        run = build_run(small(tmp_path, model_path="tiny", env_name="world:take-away", max_iterations=1))
        run.trainer.train()
        run.close()
        assert main(["play", str(tmp_path), "--as", role]) == 2
        assert "let torchrl-llm eval play its games" in capsys.readouterr().err
        assert main(["eval", str(tmp_path), "--episodes", "2", "--opponent", f"{GAMES}:take_at_random"]) == 0

    def test_a_resumed_run_ends_in_the_same_weights(self, tmp_path):
        words(tmp_path)
        settings = {"model_path": str(tmp_path / "model"), "tokenizer_path": str(tmp_path / "tokenizer"), "lora_r": 0}
        settings |= {"checkpoint_interval": 1, "record_interval": 1}
        whole = build_run(small(tmp_path / "whole", **settings), env=TakeAway)
        history = whole.trainer.train()
        first = build_run(small(tmp_path / "parts", **settings | {"max_iterations": 1}), env=TakeAway)
        first.trainer.train()
        first.close()
        changed = {"resume": True, "accept_changes": ["max_iterations"]}
        second = build_run(small(tmp_path / "parts", **settings | changed), env=TakeAway)
        rest = second.trainer.train()
        for one, other in zip(whole.models.model.parameters(), second.models.model.parameters(), strict=True):
            assert torch.equal(one, other)
        assert rest[-1]["evaluation/reward"] == history[-1]["evaluation/reward"]
        whole.close()
        second.close()

    def test_the_example_settings_go_on_from_those_of_the_warm_start(self, tmp_path):
        quick = ["--max-iterations=1", "--batch-size=8", "--num-envs=8", "--final-episodes=4", "--progress=false"]
        warm = [f"--config={CONFIGS / 'tiny_self_play_warmup.yaml'}", f"--output-dir={tmp_path / 'warm'}", *quick]
        first = build_run(parse_settings(warm))
        assert len(first.trainer.train()) == 1
        first.close()
        start = ["--minibatch-size=8", f"--init-from={tmp_path / 'warm' / 'checkpoints' / 'last'}"]
        learned = [
            f"--config={CONFIGS / 'tiny_self_play.yaml'}",
            f"--output-dir={tmp_path / 'learned'}",
            *quick,
            *start,
        ]
        second = build_run(parse_settings(learned))
        for one, other in zip(first.models.model.parameters(), second.models.model.parameters(), strict=True):
            assert torch.equal(one, other)
        assert len(second.trainer.train()) == 1
        assert second.final_evaluation().episodes == 4
        second.close()

    def test_an_opponent_that_is_a_player(self, tmp_path):
        words(tmp_path)
        paths = {"model_path": str(tmp_path / "model"), "tokenizer_path": str(tmp_path / "tokenizer"), "lora_r": 0}
        run = build_run(small(tmp_path / "run", opponent=f"{GAMES}:take_well", **paths), env=TakeAway)
        assert run.final_evaluation().episodes == 6
        assert isinstance(run.opponent, PlayerPolicy)
        run.close()


def words(folder, **options):
    """A model with the vocabulary of the game, that has learned nothing."""
    tokenizer = word_tokenizer(TakeAway.WORDS)
    random_model(tokenizer, **options).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "tokenizer")


@pytest.mark.slow
@pytest.mark.extra
def test_it_learns_to_beat_the_player_that_it_imitated(tmp_path):
    """From legal moves at random to 0.65 of 400 games against the frozen start;
    benchmarks/self_play.py has drawn seeds."""
    words(tmp_path)
    common = {
        "model_path": str(tmp_path / "model"),
        "tokenizer_path": str(tmp_path / "tokenizer"),
        "dtype": "float32",
        "lora_r": 0,
        "num_envs": 128,
        "batch_size": 128,
        "max_output_tokens": 2,
        "max_model_len": 96,
        "evaluation_interval": 0,
        "save_checkpoints": False,
        "record_interval": 0,
    }
    imitating = {"algo": "SFT", "demonstrations": f"{GAMES}:take_at_random", "lr_actor": 1e-2, "max_iterations": 50}
    imitating |= {"estimator": None, "gamma": 1.0}
    warm = build_run(small(tmp_path / "warm", **common | imitating), env=TakeAway)
    warm.trainer.train()
    warm.models.model.save_pretrained(tmp_path / "start")
    warm.close()
    learning = {
        "model_path": str(tmp_path / "start"),
        "lr_actor": 2e-3,
        "max_iterations": 20,
        "epochs": 2,
        "minibatch_size": 64,
    }
    run = build_run(small(tmp_path / "run", **common | learning), env=TakeAway)
    env = run.make_env(stream="test")
    before = play_match(env, run.policy, run.opponent, 400)
    run.trainer.train()
    after = play_match(env, run.policy, run.opponent, 400)
    assert 0.4 < before.score < 0.6
    assert after.score >= 0.65, after
    assert min(after.wins) > max(before.wins[1], 80), after  # in both seats
    run.close()
