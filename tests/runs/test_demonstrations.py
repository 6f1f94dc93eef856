"""What supervised fine-tuning imitates: players, messages and recordings; and runs that imitate
them."""

from __future__ import annotations

import json
import logging
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
from small_runs import small_config, weights
from test_checkpoint import digest, interrupted

from torchrl_llm import keys
from torchrl_llm.data import rows_from_episodes
from torchrl_llm.envs import GEMEnv
from torchrl_llm.envs.players import guess_by_hints
from torchrl_llm.metrics import METRICS
from torchrl_llm.modules import SamplingConfig
from torchrl_llm.report import write_report
from torchrl_llm.report.episodes import token_values
from torchrl_llm.runs import ConfigError, build_run
from torchrl_llm.runs.demonstrations import find_demonstrations, read_demonstrations
from torchrl_llm.runs.recording import read_recording
from torchrl_llm.testing.environments import StopOrGo
from torchrl_llm.testing.tiny import load_tiny_tokenizer
from torchrl_llm.trainers import Callback


def stops_by_chance(context, rng):
    """A player of StopOrGo."""
    return rng.choice(["stop", "go on"])


NOT_CALLABLE = 3


class Copies(Callback):
    """The rows that each update learned from."""

    def __init__(self):
        self.rows = []

    def on_batch(self, trainer, rows, metrics):
        self.rows.append(rows.clone())


class TestFind:
    def test_a_player_of_the_package(self):
        assert find_demonstrations("guess_by_hints") is guess_by_hints

    def test_a_player_of_ones_own(self):
        assert find_demonstrations(f"{__name__}:stops_by_chance") is stops_by_chance

    def test_a_path_that_is_there(self, tmp_path, monkeypatch):
        (tmp_path / "a.jsonl").touch()
        assert find_demonstrations(str(tmp_path / "a.jsonl")) == tmp_path / "a.jsonl"
        monkeypatch.setenv("HOME", str(tmp_path))
        assert find_demonstrations("~/a.jsonl") == tmp_path / "a.jsonl"

    @pytest.mark.parametrize(
        ("given", "match"),
        [
            (
                "guess_by_hint",
                r"is 'guess_by_hint': no file or folder, and no player.*guess_at_random.*Did you mean 'guess_by_hints'",
            ),
            ("no/such.jsonl", "no file or folder, and no player"),
            ("", "no file or folder, and no player"),
            ("_guess", "no file or folder, and no player"),
            ("re", "no file or folder, and no player"),
            ("no_such.module:player", r"names 'no_such.module:player', which cannot be imported \(No module"),
            (f"{__name__}:no_such", "which cannot be imported"),
            (f"{__name__}:NOT_CALLABLE", r"NOT_CALLABLE' is 3; expected a function \(context, rng\) -> text"),
        ],
    )
    def test_what_is_neither_is_refused(self, tmp_path, given, match):
        with pytest.raises(ConfigError, match=match):
            find_demonstrations(given)
        with pytest.raises(ConfigError, match=match):  # before a model is loaded
            build_run(small_config(tmp_path, "SFT", demonstrations=given, model_path="/no/such/model"))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Runs of two iterations whose episodes are recorded, one whose contexts slide; and the rows of
    their updates."""
    found = {}
    for name, more in {"plain": {}, "slide": {"overflow": "slide", "max_model_len": 64}}.items():
        copies = Copies()
        settings = {"record_interval": 1, "max_iterations": 2, "batch_size": 24, **more}
        config = small_config(tmp_path_factory.mktemp(name), "LLMREINFORCE", **settings)
        build_run(config, callbacks=[copies]).trainer.train()
        found[name] = config.output.output_dir, copies.rows
    return found


@pytest.fixture(scope="module")
def env():
    return GEMEnv(StopOrGo, tokenizer=load_tiny_tokenizer())


class TestRecordings:
    @pytest.mark.parametrize("name", ["plain", "slide"])
    def test_they_are_the_rows_that_were_recorded(self, recorded, env, name):
        path, batches = recorded[name]
        episodes = read_demonstrations(path, env, max_model_len=1024)
        files = sorted(path.glob("rollouts/*.safetensors"))
        ids = [read_recording(file).arrays["episode_id"].tolist() for file in files]
        assert len(ids) == 2
        assert len(episodes) == sum(map(len, ids)) >= 12
        rows = [
            rows[rows["episode_id"].tolist().index(i)].cpu()
            for rows, own in zip(batches, ids, strict=True)
            for i in own
        ]
        gaps = 0
        for episode, expected in zip(episodes, rows, strict=True):
            (row,) = rows_from_episodes([episode])
            for key in (keys.TOKENS, keys.ATTENTION_MASK, keys.TURN_IDS, keys.SAMPLE_LOG_PROB):
                width = len(row[key])
                assert row[key].equal(expected[key][:width]), key
                assert not (expected[key][width:] > 0).any()
            for name_of_turn in ("reward", "mask", "terminated", "truncated", "success", "stop_reason"):
                key = ("turn", name_of_turn)
                assert row[key].equal(expected[key][: len(row[key])]), key
                assert not expected[key][len(row[key]) :].any()
            for turn in episode.turns:
                context = episode.contexts[turn.segment]
                assert np.array_equal(context[turn.start : turn.start + len(turn.tokens)], turn.tokens)
            gaps += len(episode.contexts) - 1
        assert (gaps > 0) == (name == "slide")

    def test_a_file_and_the_folder_of_recordings_are_read_too(self, recorded, env):
        path, _ = recorded["plain"]
        whole = read_demonstrations(path, env, max_model_len=1024)
        assert len(read_demonstrations(path / "rollouts", env, max_model_len=1024)) == len(whole)
        files = sorted(path.glob("rollouts/iteration-*.safetensors"))
        assert sum(len(read_demonstrations(file, env, max_model_len=1024)) for file in files) == len(whole)

    def test_those_of_evaluations_are_not(self, recorded, env, tmp_path):
        path, _ = recorded["plain"]
        file = sorted(path.glob("rollouts/iteration-*.safetensors"))[0]
        (tmp_path / "run" / "rollouts").mkdir(parents=True)
        for kind in ("before", "after"):
            shutil.copy(file, tmp_path / "run" / "rollouts" / f"{kind}.safetensors")
        with pytest.raises(ConfigError, match=r"no recorded episodes of training \(record_interval above 0\)"):
            read_demonstrations(tmp_path / "run", env, max_model_len=1024)
        shutil.copy(file, tmp_path / "run" / "rollouts")
        found = read_demonstrations(tmp_path / "run", env, max_model_len=1024)
        assert len(found) == read_recording(file).episodes

    def test_another_tokenizer_is_refused(self, recorded, tokenizer):
        other = GEMEnv(StopOrGo, tokenizer=tokenizer)
        with pytest.raises(
            ConfigError, match=r"recorded with another tokenizer: the token \d+ is '.*' there, and .* of this model"
        ):
            read_demonstrations(recorded["plain"][0], other, max_model_len=1024)

    def test_an_episode_that_is_too_long_is_refused(self, recorded, env):
        path, _ = recorded["plain"]
        longest = max(each.length for each in read_demonstrations(path, env, max_model_len=1024))
        assert read_demonstrations(path, env, max_model_len=longest)
        with pytest.raises(
            ConfigError, match=rf"an episode has {longest} tokens, and max_model_len is {longest - 1}: raise it"
        ):
            read_demonstrations(path, env, max_model_len=longest - 1)

    def test_an_answer_that_could_not_be_sampled_is_refused(self, env, tmp_path):
        messages = [{"role": "user", "content": "Guess."}, {"role": "assistant", "content": "Perhaps it is 7?"}]
        (tmp_path / "a.jsonl").write_text(json.dumps({"messages": messages}))
        length = len(env.formatter.answer("Perhaps it is 7?"))
        for most in (length, length - 1):
            made = GEMEnv(StopOrGo, tokenizer=load_tiny_tokenizer(), max_output_tokens=most)
            if most == length:
                assert len(read_demonstrations(tmp_path / "a.jsonl", made, max_model_len=1024)) == 1
                continue
            with pytest.raises(
                ConfigError, match=rf"an answer has {length} tokens.*expected are 1 to max_output_tokens={most}: raise"
            ):
                read_demonstrations(tmp_path / "a.jsonl", made, max_model_len=1024)

    @pytest.mark.parametrize("source", ["messages", "recordings"])
    def test_so_is_one_that_ends_before_a_policy_may_end_it(self, env, recorded, tmp_path, source):
        """The end of the turn would have the log-prob minus infinity, and would not be learned."""
        path = recorded["plain"][0] if source == "recordings" else Path(transcripts(tmp_path / "a.jsonl"))
        ends = env.formatter.end_of_turn_ids
        free = read_demonstrations(path, env, max_model_len=1024, sampling=SamplingConfig(stop_ids=ends))
        held = [turn.tokens.tolist().index(ends[0]) for each in free for turn in each.turns if ends[0] in turn.tokens]
        fewest = min(held)
        sampling = SamplingConfig(stop_ids=ends, min_output_tokens=fewest)
        assert len(read_demonstrations(path, env, max_model_len=1024, sampling=sampling)) == len(free)
        sampling = SamplingConfig(stop_ids=ends, min_output_tokens=fewest + 1)
        match = (
            rf"an answer has {fewest + 1} tokens.*min_output_tokens={fewest + 1} lets no answer end before.*lower it"
        )
        with pytest.raises(ConfigError, match=match):
            read_demonstrations(path, env, max_model_len=1024, sampling=sampling)

    def test_so_is_an_empty_one_with_its_line(self, env, tmp_path):
        messages = [{"role": "user", "content": "Guess."}, {"role": "assistant", "content": ""}]
        (tmp_path / "a.jsonl").write_text(json.dumps({"messages": messages}))
        with pytest.raises(ConfigError, match=r"a\.jsonl, line 1: its answer in turn 0 is ''"):
            read_demonstrations(tmp_path / "a.jsonl", env, max_model_len=1024)

    def test_other_files_are_refused_and_nobody_is_told_to_delete_them(self, env, tmp_path):
        for name in ("mine.json", "mine.txt", "mine.safetensors", "mine.jsonl"):
            (tmp_path / name).write_text("{}")
            with pytest.raises(ConfigError, match=rf"demonstrations='.*{name}': ") as error:
                read_demonstrations(tmp_path / name, env, max_model_len=1024)
            assert "delete" not in str(error.value)
        with pytest.raises(ConfigError, match=r"mine\.txt': it is not \.jsonl, \.json, \.parquet, which hold"):
            read_demonstrations(tmp_path / "mine.txt", env, max_model_len=1024)
        with pytest.raises(ConfigError, match="no recorded episodes of training"):
            read_demonstrations(tmp_path, env, max_model_len=1024)


def transcripts(path):
    """A file of messages of GuessTheNumber, as somebody would write it."""
    said = [("5", "You guessed 5, which is too low."), ("7", "Congratulations!")]
    lines = [
        {"messages": [{"role": "user", "content": f"Guess {i}."}, *turns], "reward": i % 2, "success": bool(i % 2)}
        for i in range(5)
        for turns in [
            [m for a, b in said for m in ({"role": "assistant", "content": a}, {"role": "user", "content": b})]
        ]
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return str(path)


SOURCES = {
    "player": lambda *_: "guess_by_half_the_hints",
    "messages": lambda tmp_path, _: transcripts(tmp_path / "written.jsonl"),
    "recordings": lambda _, recorded: str(recorded["plain"][0]),
    "own": lambda *_: None,
}


class TestRuns:
    def test_a_player_of_another_game_is_refused_before_anything_is_evaluated(self, tmp_path):
        settings = {"demonstrations": "guess_by_hints", "env_name": "game:Mastermind-v0-easy", "max_model_len": 1024}
        with pytest.raises(
            ConfigError, match=r"'guess_by_hints', which cannot play env_name='game:Mastermind-v0-easy'"
        ):
            build_run(small_config(tmp_path, "SFT", **settings))

    def test_so_is_one_whose_answer_is_too_long(self, tmp_path):
        settings = {"demonstrations": "guess_by_hints", "max_output_tokens": 2}
        with pytest.raises(ConfigError, match=r"whose answer .* has 4 tokens.*: raise max_output_tokens, which is 2\."):
            build_run(small_config(tmp_path, "SFT", **settings))

    @pytest.mark.parametrize("source", ["player", "messages"])
    def test_so_is_one_that_ends_too_early(self, tmp_path, source):
        """With ``min_output_tokens`` the loss of such an answer was infinite, and its end was not
        learned."""
        settings = {"demonstrations": SOURCES[source](tmp_path, None), "min_output_tokens": 5}
        with pytest.raises(
            ConfigError, match=r"min_output_tokens=5 lets no answer end before it has as many: lower it"
        ):
            build_run(small_config(tmp_path, "SFT", **settings))

    def test_its_own_episodes_are_chosen_among(self, tmp_path):
        """All that a model samples teaches it nothing."""
        settings = {"demonstrations": None, "model_path": "/no/such/model"}
        with pytest.raises(
            ConfigError, match=r"without demonstrations would imitate all.*give demonstrations, or choose"
        ):
            small_config(tmp_path, "SFT", **settings)
        for chosen in ({"imitate": "success"}, {"imitate": "return"}, {"min_return": 0.5}):
            assert small_config(tmp_path, "SFT", **settings, **chosen).rollouts.demonstrations is None

    @pytest.mark.parametrize("given", [{"collector": "async"}, {"group_size": 2}, {"adaptive_mixture": True}], ids=str)
    def test_settings_of_what_is_played_do_not_go_with_given_episodes(self, tmp_path, given):
        ((name, value),) = given.items()
        env_name = [f"game:GuessTheNumber-v0-{level}" for level in ("easy", "hard")]
        settings = {
            "demonstrations": transcripts(tmp_path / "a.jsonl"),
            "model_path": "/no/such/model",
            "env_name": env_name,
        }
        with pytest.raises(ConfigError, match=rf"^{name}={value!r}: for episodes that are played.*: leave it out"):
            build_run(small_config(tmp_path, "SFT", **settings, **given))

    @pytest.mark.parametrize("source", SOURCES)
    def test_a_run_imitates(self, tmp_path, recorded, caplog, source):
        given = SOURCES[source](tmp_path, recorded)
        config = small_config(
            tmp_path,
            "SFT",
            demonstrations=given,
            max_iterations=3,
            lr_actor=1e-2,
            epochs=2,
            minibatch_size=4,
            record_interval=1,
            min_return=None if given else -100.0,
        )
        run = build_run(config)
        before = weights(run)
        with caplog.at_level(logging.WARNING):
            history = run.trainer.train()
        assert [record.getMessage() for record in caplog.records if "torchrl_llm" in record.name] == []
        assert (weights(run) - before).abs().max() > 1e-4
        for metrics in history:
            assert set(metrics) <= set(METRICS)
            wanted = {"loss/objective", "loss/nll", "loss/imitated", "policy/entropy", "optim/grad_norm_actor"}
            assert all(math.isfinite(metrics[name]) for name in wanted)
            assert metrics["loss/imitated"] == pytest.approx(1.0)
            assert metrics["loss/nll"] == pytest.approx(metrics["loss/objective"])
            # none where nothing was sampled
            assert math.isfinite(metrics.get("policy/first_turn_entropy", 0.0))
            ratios = {"log_prob_gap", "kl_old", "kl_reference", "clip_fraction", "ESS", "log_ratio"}
            assert not {f"policy/{name}" for name in ratios} & set(metrics)
        if given is not None:
            assert history[-1]["loss/nll"] < history[0]["loss/nll"]

    def test_only_what_was_won_is_imitated(self, tmp_path):
        given = transcripts(tmp_path / "written.jsonl")
        run = build_run(
            small_config(tmp_path, "SFT", demonstrations=given, batch_size=5, imitate="success", max_iterations=2)
        )
        for metrics in run.trainer.train():
            assert metrics["loss/imitated"] == pytest.approx(2 / 5)
            assert metrics["loss/objective"] < metrics["loss/nll"]

    def test_resumed_in_the_same_bytes(self, tmp_path):
        """The orders go on; of players see test_checkpoint."""

        def config(name, **more):
            settings = {
                "demonstrations": transcripts(tmp_path / "a.jsonl"),
                "batch_size": 4,
                "lr_actor": 1e-3,
                "max_iterations": 3,
            }
            saved = {"save_checkpoints": True, "checkpoint_interval": 1}
            return small_config(tmp_path / name, "SFT", **settings | saved | more)

        whole = build_run(config("whole"))
        whole.trainer.train()
        interrupted(config("cut"), 2)
        run = build_run(config("cut", resume=True))
        assert run.trainer.iteration == 1
        run.trainer.train()
        assert digest(run) == digest(whole)

    def test_resumed_with_other_episodes_says_so(self, tmp_path, caplog):
        given = {"demonstrations": transcripts(tmp_path / "a.jsonl"), "save_checkpoints": True}
        build_run(small_config(tmp_path, "SFT", **given, max_iterations=1)).trainer.train()
        more = {"resume": True, "accept_changes": ["max_iterations"], "max_iterations": 2}
        for change, warned in (("5", False), ("6", True)):
            file = tmp_path / "a.jsonl"
            file.write_text(file.read_text().replace('"content": "5"', f'"content": "{change}"'))
            with caplog.at_level(logging.WARNING):
                build_run(small_config(tmp_path, "SFT", **given, **more)).close()
            assert ("not those that the checkpoint was made with" in caplog.text) == warned

    def test_a_report_is_written_of_it(self, tmp_path):
        """Its episodes have no log-probs of who wrote them."""
        config = small_config(tmp_path, "SFT", demonstrations="guess_by_hints", max_iterations=2, record_interval=1)
        build_run(config).trainer.train()
        (file, _) = sorted(config.output.output_dir.glob("rollouts/*.safetensors"))
        values, missing = token_values(read_recording(file))
        action = read_recording(file).arrays["turn_ids"] >= 0
        assert np.isnan(read_recording(file).arrays["sample_log_prob"][action]).all()
        assert (values["credit"][action] > 0).all()
        assert all("demonstration" in missing[name] for name in ("log_prob", "ratio", "kl"))
        assert "<code>demonstrations</code>" in write_report(config.output.output_dir).read_text()

    def test_own_environments(self, tmp_path):
        player = f"{__name__}:stops_by_chance"
        run = build_run(
            small_config(tmp_path, "SFT", demonstrations=player, max_turns=5, max_iterations=2), env=StopOrGo
        )
        history = run.trainer.train()
        assert 0 < history[0]["rollout/success"] <= 1
        assert history[0]["rollout/turns"] > 1
