"""Games of TextWorld, real ones. Needs its package: ``make test-families``."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import threading

import numpy as np
import pytest
from waiting import LIMIT

from torchrl_llm import keys
from torchrl_llm.envs import ChatFormatter, GEMEnv, IsolatedEnv, resolve_env
from torchrl_llm.runs import RunSettings, build_run
from torchrl_llm.testing.policies import ScriptedPolicy
from torchrl_llm.testing.tokenizers import byte_tokenizer
from torchrl_llm.worlds import textworld as family

pytestmark = pytest.mark.families
pytest.importorskip("textworld", reason="TextWorld is not installed: make test-families")

SMALL = {
    "coin_collector": {"level": 3},
    "treasure_hunter": {"level": 12},
    "simple": {"goal": "brief"},
    "cooking": {"recipe": 2, "take": 1, "cut": True, "cook": True, "open": True},
    "custom": {"world_size": 3, "nb_objects": 4, "quest_length": 3},
}


def game(name="coin_collector", **options):
    return family.TextWorldGame(name, **(SMALL[name] | options))


def boxed(command):
    return f"\\boxed{{{command}}}"


def play(env, seed):
    """All that an episode along the walkthrough shows."""
    seen = [env.reset(seed)]
    while not env._state.won:
        seen.append(env.step(boxed(env.walkthrough[0])))
    return repr(seen)


class TestGames:
    @pytest.mark.parametrize("name", SMALL)
    def test_the_walkthrough_wins_and_returns_1(self, name):
        env = game(name)
        env.reset(3)
        plan, total = env.walkthrough, 0.0
        for number, command in enumerate(plan, 1):
            text, reward, terminated, truncated, info = env.step(boxed(command))
            total += reward
            assert terminated == (number == len(plan))
            assert not truncated
            assert info["score"] == pytest.approx(total * info["max_score"])
        assert info["success"]
        assert total == pytest.approx(1)
        assert "The End" in text
        assert "RESTART" not in text

    def test_the_first_message_has_the_rules_the_objective_and_the_room(self):
        env = game(max_turns=7)
        text, info = env.reset(3)
        rules, objective, room = text.split("\n\n")[:3]
        assert "7 turns" in rules
        assert "verbs drop, examine, go, inventory, look, take." in rules
        assert objective == env.hidden_state()[0]
        assert room.startswith("-= ")
        assert info == {"suffix": "Enter your next command."}
        assert "$$" not in text, "the banner is left out"

    def test_commands_are_shown_if_asked(self):
        env = game(show_commands=True)
        _, info = env.reset(3)
        assert info["suffix"] == "Admissible commands: go north, inventory, look.\nEnter your next command."
        _, _, _, _, info = env.step(boxed("go north"))
        assert "go south" in info["suffix"]

    def test_a_loss_terminates_without_reward(self):
        env = game("treasure_hunter", level=3)
        env.reset(3)
        env.step(boxed("go west"))
        text, reward, terminated, truncated, info = env.step(boxed("take fly larva"))
        assert "You lost" in text
        assert (reward, terminated, truncated, info["success"]) == (0, True, False, False)
        with pytest.raises(RuntimeError, match="reset first"):
            env.step(boxed("look"))

    def test_the_last_turn_terminates_at_the_limit(self):
        env = game(max_turns=2)
        env.reset(3)
        assert not env.step(boxed("look"))[2]
        text, reward, terminated, truncated, info = env.step(boxed("look"))
        assert text.endswith("You have used all turns.")
        assert (reward, terminated, truncated, info["success"]) == (0, True, True, False)

    @pytest.mark.parametrize("answer", ["go north", r"\boxed{}", r"\boxed{ }", r"\boxed{go north", ""])
    def test_a_response_without_a_command_ends_the_episode_as_in_gems_games(self, answer):
        env = game()
        env.reset(3)
        text, reward, terminated, truncated, info = env.step(answer)
        assert text == "At turn 1, you did not provide a command in \\boxed{}."
        assert (reward, terminated, truncated, info["success"]) == (-0.1, True, False, False)

    def test_the_last_command_counts(self):
        env = game()
        env.reset(3)
        assert "Basement" in env.step(r"Not \boxed{look} but \boxed{ go north }.")[0]

    def test_what_the_game_does_not_understand_costs_a_turn(self):
        env = game()
        env.reset(3)
        text, reward, terminated, _, _ = env.step(boxed("take moon"))
        assert "can't see any such thing" in text
        assert (reward, terminated, env.turn) == (0, False, 1)


class TestCommandsOfTheInterpreter:
    @pytest.mark.parametrize(
        "command", ["save", "script", "restart", "quit", "RESTORE", "restrict commands", "tw-print x"]
    )
    def test_they_are_not_passed_on(self, command, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        env = game()
        env.reset(3)
        text, reward, terminated, _, _ = env.step(boxed(command))
        assert text == f"The game does not know the verb {command.lower().split()[0]!r}."
        assert (reward, terminated) == (0, False)
        env.step(boxed("y"))
        assert not list(tmp_path.iterdir())
        assert "Basement" in env.step(boxed("go north"))[0], "the game continues"

    @pytest.mark.parametrize("command", ["go north. go east", "go north then go east", "go north\ngo east"])
    def test_one_command_a_turn(self, command):
        env = game()
        env.reset(3)
        assert "several commands" in env.step(boxed(command))[0]
        assert "Kitchenette" in env.step(boxed("look"))[0]

    def test_a_long_command_is_refused(self):
        env = game()
        env.reset(3)
        assert "enter at most 100" in env.step(boxed("take " + "x" * 300))[0]


class TestExtras:
    def test_they_describe_the_turn(self):
        env = game()
        env.reset(3)
        env.step(boxed("go north"))
        env.step(boxed("go east"))
        info = env.step(boxed("take coin"))[4]
        assert set(env.extras) <= set(info)
        assert info["location"].startswith("-= Bedroom =-")
        assert info["inventory"] == "You are carrying nothing."
        assert "take coin" in info["admissible_commands"].split("\n")
        assert (info["score"], info["max_score"]) == (1, 1)

    def test_a_format_error_has_them_too(self):
        env = game()
        env.reset(3)
        assert set(env.extras) <= set(env.step("")[4])

    def test_they_reach_the_rows(self):
        tokenizer = byte_tokenizer()
        spec = resolve_env("textworld:coin_collector")
        env = GEMEnv(spec, tokenizer=tokenizer, max_model_len=4096, max_output_tokens=16, max_turns=2)
        policy = ScriptedPolicy(lambda *_: boxed("look"), tokenizer=tokenizer, max_output_tokens=16)
        rollout = env.rollout(2, policy)
        assert rollout[("next", *keys.extra("max_score"))].flatten().tolist() == [1, 1]
        first, second = rollout[("next", *keys.extra("location"))].flatten().tolist()
        assert first == second != 0


class TestSeeds:
    @pytest.mark.parametrize("name", SMALL)
    def test_a_game_is_a_function_of_its_seed(self, name):
        env = game(name)
        first, other = play(env, 3), play(env, 4)
        family.compile_game.cache_clear()
        assert play(env, 3) == first != other

    def test_no_global_generator_is_touched(self):
        textworld = pytest.importorskip("textworld")
        random.seed(1)
        np.random.seed(1)
        textworld.g_rng.set_seed(5)
        before = random.getstate(), np.random.get_state()[1].tolist()
        family.compile_game.cache_clear()
        for name in SMALL:
            play(game(name), 3)
        assert (random.getstate(), np.random.get_state()[1].tolist()) == before
        assert textworld.g_rng.seed == 5

    def test_importing_it_touches_none_either(self):
        code = (
            "import random, numpy as np\n"
            "from torchrl_llm.envs import resolve_env\n"
            "np.random.seed(1)\n"
            "before = np.random.get_state()[1].tolist(), random.getstate()\n"
            "resolve_env('textworld:simple')\n"
            "import sys; assert 'textworld' in sys.modules\n"
            "assert (np.random.get_state()[1].tolist(), random.getstate()) == before\n"
        )
        subprocess.run([sys.executable, "-c", code], check=True, timeout=LIMIT)

    def test_it_does_not_depend_on_the_order_of_sets(self):
        code = (
            "from torchrl_llm.worlds.textworld import demonstrations\n"
            "for name in ('treasure_hunter', 'cooking', 'custom'):\n"
            "    print(*demonstrations(f'textworld:{name}', [3], skill=0.7, max_turns=9))\n"
        )
        shown = [
            subprocess.run(
                [sys.executable, "-c", code],
                check=True,
                capture_output=True,
                timeout=LIMIT,
                env=os.environ | {"PYTHONHASHSEED": seed},
            ).stdout
            for seed in ("1", "2")
        ]
        assert shown[0] == shown[1] != b""

    def test_tasks_are_told_apart_by_what_is_hidden(self):
        env = game("simple", rewards="sparse")
        env.reset(3)
        hidden = env.hidden_state()
        assert hidden[2] == env.walkthrough
        assert any("old key" in fact for fact in hidden[1])
        env.reset(4)
        assert env.hidden_state() != hidden


class TestResources:
    def test_no_file_is_left_while_a_game_runs(self, tmp_path, monkeypatch):
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        family.compile_game.cache_clear()
        env = game()
        env.reset(3)
        assert not list(tmp_path.iterdir())
        env.close()
        env.close()
        with pytest.raises(RuntimeError, match="reset first"):
            env.step(boxed("look"))

    def test_games_in_threads_are_those_of_one_thread(self):
        seen = {}

        def run(seed):
            env = IsolatedEnv(lambda: game("simple"))
            messages = [env.reset(seed)]
            while not env.env._state.won:
                messages.append(env.step(boxed(env.env.walkthrough[0])).message)
            seen[seed] = messages

        for seed in range(4):
            run(seed)
        alone = dict(seen)
        seen.clear()
        family.compile_game.cache_clear()
        threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT)
        assert seen == alone


class TestOptions:
    @pytest.mark.parametrize(
        ("name", "options", "message"),
        [
            ("coin_collector", {"level": 151}, "level=151 .*expected 1 to 100 or 101 to 150 or 201 to 233"),
            ("coin_collector", {"level": "3"}, "level='3'"),
            ("coin_collector", {"max_turns": 0}, "max_turns=0 .*expected 1 to 10000"),
            ("coin_collector", {"show_commands": 1}, "show_commands=1 .*expected False or True"),
            ("simple", {"rewards": "rich"}, "expected 'dense' or 'balanced' or 'sparse'"),
            ("cooking", {"go": 7}, "go=7 .*expected 1 or 6 or 9 or 12"),
            ("cooking", {"take": 2}, "at most recipe"),
            ("cooking", {"recipe_seed": 2}, "take to be at least 1"),
        ],
    )
    def test_bad_values(self, name, options, message):
        with pytest.raises(ValueError, match=message):
            family.TextWorldGame(name, **options)

    def test_unknown_options(self):
        with pytest.raises(
            TypeError, match=r"no option 'levle'; expected one of \['max_turns', .* Did you mean 'level'"
        ):
            family.TextWorldGame("coin_collector", levle=3)

    @pytest.mark.parametrize("level", [1, 100, 101, 150, 201, 233])
    def test_the_allowed_levels_of_coin_collector_are_those_that_textworld_makes(self, level):
        env = game(level=level)
        env.reset(0)
        assert len(env.walkthrough) == (level - 1) % 100 + 1


class TestDemonstrations:
    def test_they_are_lines_of_a_file_of_messages(self, tmp_path):
        from torchrl_llm.data import read_transcripts

        path = tmp_path / "walks.jsonl"
        lines = family.demonstrations("textworld:coin_collector", [3, 4], level=3)
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        episodes = read_transcripts(path, ChatFormatter(byte_tokenizer()))
        assert [episode.success for episode in episodes] == [True, True]
        assert [len(episode.turns) for episode in episodes] == [3, 3]

    def test_less_skill_wins_less(self):
        wins = {}
        for skill in (0.0, 0.5, 1.0):
            lines = family.demonstrations("textworld:coin_collector", range(8), skill=skill, level=4, max_turns=6)
            wins[skill] = sum(line["success"] for line in lines)
        assert wins[0.0] < wins[1.0] == 8
        assert wins[0.0] <= wins[0.5] < 8

    def test_skill_is_a_probability(self):
        with pytest.raises(ValueError, match=r"skill=2; expected a probability"):
            list(family.demonstrations("textworld:coin_collector", [1], skill=2))


def settings(path, **options):
    return RunSettings.from_values(
        model_path="tiny",
        algo="LLMREINFORCE",
        env_name="textworld:coin_collector",
        env_options={"level": 2, "max_turns": 3, "show_commands": True},
        num_envs=2,
        batch_size=4,
        max_model_len=2048,
        max_output_tokens=16,
        lora_r=0,
        evaluation_interval=0,
        final_episodes=4,
        output_dir=path,
        progress=False,
        **options,
    )


class TestTraining:
    def test_a_rollout_of_a_model(self, tmp_path):
        run = build_run(settings(tmp_path))
        try:
            batch = run.trainer.collector.rollout()
        finally:
            run.close()
        assert len(batch) == 4
        assert (batch[keys.TURN_REWARD].sum(1) <= 1).all()

    def test_an_iteration(self, tmp_path):
        run = build_run(settings(tmp_path, max_iterations=1, save_checkpoints=False, group_size=2))
        before = [each.clone() for each in run.trainer.loss.parameters()]
        try:
            run.trainer.train()
        finally:
            run.close()
        assert run.trainer.iteration == 1
        assert any((old != new).any() for old, new in zip(before, run.trainer.loss.parameters(), strict=True))
