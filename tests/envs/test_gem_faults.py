"""GEMEnv: what is refused, and what a fault of an environment ends."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from functools import partial

import pytest
from gem_episodes import play

from torchrl_llm import keys
from torchrl_llm.collectors import AsyncTurnCollector, TurnCollector
from torchrl_llm.envs import EnvironmentFault, PromptTooLongError, UnknownEnvironmentError
from torchrl_llm.envs.registry import resolve_env
from torchrl_llm.envs.tasks import TaskSpec
from torchrl_llm.keys import StopReason
from torchrl_llm.testing.environments import Echo, Faulty, StopOrGo
from torchrl_llm.utils.options import ConfigError


class TestErrors:
    def test_unknown_id_names_close_ones(self, make):
        with pytest.raises(UnknownEnvironmentError, match="GuessTheNumber-v0-easy"):
            make("game:GuesTheNumber-easy")
        with pytest.raises(UnknownEnvironmentError, match="rg:chain_sum'"):
            make("rg:chain_sums")
        with pytest.raises(UnknownEnvironmentError, match="print_envs"):
            make("zzzzzzzz")

    def test_an_option_that_a_game_has_not_is_told_once(self, make, caplog):
        """It is the settings' fault, and not an episode's, which would be counted and played
        again."""
        spec = resolve_env("game:GuessTheNumber-v0-easy")
        env = make(replace(spec, make=partial(spec.make, max_turn=4)))
        with pytest.raises(
            ConfigError,
            match=r"^The environment .* has no argument max_turn, which env_options names; it has .*max_turns\.$",
        ):
            env.reset()
        assert caplog.text == ""

    def test_the_sentence_of_a_fault_ends_once(self):
        fault = EnvironmentFault("mine", TaskSpec(0, 0, 0, 0), 1, ValueError("No such move."))
        assert "ValueError: No such move. To see it again" in str(fault)

    def test_first_prompt_too_long(self, make):
        with pytest.raises(PromptTooLongError, match="Raise max_model_len"):
            make(max_model_len=300).reset()
        fits = int(make().reset()[keys.PROMPT_LENGTH]) + 32
        make(max_model_len=fits).reset()
        with pytest.raises(PromptTooLongError, match=f"has {fits - 32} tokens"):
            make(max_model_len=fits - 1).reset()

    def test_a_single_long_prompt_is_left_out(self, make, says):
        class Verbose(Echo):
            def reset(self, seed=None):
                return ("Speak. " * (100 if seed // 4 % 2 else 1)), super().reset(seed)[1]

        env = make(Verbose, num_envs=2, max_model_len=300)
        batch = play(env, says("x"), 6)
        seeds = {env.task_sampler[i].seed // 4 % 2 for i in batch[keys.EPISODE_ID].unique().tolist()}
        assert seeds == {0}
        assert env.faults["context"] > 0
        assert env.last_fault.stop_reason == StopReason.CONTEXT

    @pytest.mark.parametrize(
        ("fault", "turn"), [("raise", -1), ("raise", 2), ("nan", 0), ("nan", 2), ("malformed", -1), ("malformed", 0)]
    )
    def test_faults_carry_task_turn_and_cause(self, make, says, fault, turn):
        state = random.getstate()
        with pytest.raises(EnvironmentFault) as caught:
            play(make(partial(Faulty, fault, turn), seed=4, max_faults=0), says("x"), 4)
        error = caught.value
        assert error.turn == turn
        assert error.task_spec.episode_id == 0
        assert isinstance(error.cause, {"raise": RuntimeError, "nan": ValueError, "malformed": TypeError}[fault])
        assert str(error.task_spec.seed) in str(error)
        assert random.getstate() == state

    @pytest.mark.parametrize(
        "wrong",
        [
            {"num_envs": 3, "group_size": 2},
            {"num_envs": 0},
            {"env": []},
            {"max_turns": 0},
            {"max_output_tokens": 0},
            {"max_model_len": 32},
            {"on_done": "stop"},
        ],
    )
    def test_wrong_sizes_are_named(self, make, wrong):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            make(**wrong)

    def test_an_environment_instead_of_its_class(self, make):
        with pytest.raises(TypeError, match="an environment, a Faulty; expected its class"):
            make(Faulty("nan"))

    @pytest.mark.parametrize("reward", [None, "1.0", [1.0]], ids=["none", "text", "list"])
    def test_a_reward_that_is_no_number(self, make, says, reward):
        class Pays(Faulty):
            def step(self, action):
                return ("Go on.", reward, False, False, {})

        with pytest.raises(EnvironmentFault, match=r"step\(\) returned the reward .*; expected a number"):
            play(make(lambda: Pays("nan"), max_faults=0), says("x"), 1)


class Sometimes(Faulty):
    """Fails in the episodes of the task seeds ``bad``."""

    def __init__(self, fault, turn, bad):
        super().__init__(fault, 99)
        self._turn, self._bad = turn, bad

    def reset(self, seed=None):
        self.at = self._turn if seed in self._bad else 99
        return super().reset(seed)


class Quits(StopOrGo):
    def step(self, action):
        raise SystemExit(3)


class TooLate(StopOrGo):
    def step(self, action):
        raise TimeoutError("no server")


class Vague(StopOrGo):
    def step(self, action):
        return "Hm.", 0.0, "no", False, {}


class TestContainment:
    """A failed episode ends; the others go on."""

    @pytest.mark.parametrize("fault", ["raise", "nan", "malformed"])
    def test_one_episode_ends_as_truncated_and_the_rest_go_on(self, make, says, fault, caplog):
        bad = make(num_envs=2).task_sampler[1].seed
        env = make(partial(Sometimes, fault, 1, [bad]), num_envs=2, max_turns=3)
        steps = env.rollout(3, says("x"), break_when_any_done=False)
        last = steps["next", "stop_reason"][..., 0]
        assert last.tolist() == [[0, 0, StopReason.MAX_TURNS], [0, StopReason.ERROR, 0]]
        assert steps["next", "truncated"][1, 1]
        assert not steps["next", "terminated"].any()
        assert steps["next", "reward"].sum() == 0
        assert env.faults == {"error": 1}
        assert "episode 1" in caplog.text

    @pytest.mark.parametrize("collector", [TurnCollector, AsyncTurnCollector])
    def test_faults_that_are_alike_are_shown_at_powers_of_ten(self, make, says, collector, caplog):
        """A bug that fails every episode was shown for each of them, in lines of which only numbers
        differ."""

        class Breaks(StopOrGo):
            def step(self, action):
                raise KeyError(random.random())

        env = make([Breaks, TooLate], num_envs=4, max_faults=40)
        with pytest.raises(EnvironmentFault) as raised:
            collector(env, says("x"), batch_size=32, max_faults=40).rollout()
        assert "the first of 41 failed episodes" in raised.value.__notes__[0]
        for name in ("KeyError", "TimeoutError"):
            found = [record.getMessage() for record in caplog.records if name in record.getMessage()]
            assert [message.rpartition(". ")[2] for message in found] == [
                "Of faults like it, only the 10th, the 100th and so on are shown.",
                "It is the 10th fault like it.",
            ]

    @pytest.mark.parametrize("reward", [1e39, -1e20, 10**400], ids=["1e39", "-1e20", "an integer"])
    def test_a_reward_that_float32_cannot_reckon_with(self, make, says, reward, caplog):
        class Pays(StopOrGo):
            def step(self, action):
                return ("", reward if self.unlucky else 1.0, True, False, {})

            def reset(self, seed=None):
                self.unlucky = seed == bad
                return super().reset(seed)

        bad = make(num_envs=2).task_sampler[1].seed
        rows = TurnCollector(make(Pays, num_envs=2), says("x"), batch_size=4).rollout()
        assert rows[keys.TURN_REWARD].flatten().tolist() == [1.0] * 4
        assert "episode 1" in caplog.text
        assert "expected a finite number of at most 1e+12 in size" in caplog.text

    @pytest.mark.parametrize(
        ("kind", "reason"), [(Quits, StopReason.ERROR), (TooLate, StopReason.TIMEOUT), (Vague, StopReason.ERROR)]
    )
    def test_kinds_of_faults(self, make, says, kind, reason):
        env = make(kind)
        assert env.rollout(1, says("x"))["next", "stop_reason"].item() == reason
        assert env.faults == {reason.name.lower(): 1}

    def test_a_reset_that_fails_samples_the_next_task(self, make):
        seeds = [make().task_sampler[i].seed for i in (1, 2)]
        env = make(partial(Sometimes, "raise", -1, seeds), num_envs=3)
        assert env.reset()["episode_id"].flatten().tolist() == [0, 3, 4]
        assert env.faults == {"error": 2}

    def test_too_many_in_a_row_raise_the_first(self, make, says):
        env = make(partial(Faulty, "raise", 0), max_faults=2)
        with pytest.raises(EnvironmentFault, match="episode 0") as caught:
            env.rollout(5, says("x"), break_when_any_done=False)
        assert any("first of 3" in note for note in caught.value.__notes__)
        assert env.faults == {"error": 3}

    def test_an_episode_that_ends_well_begins_a_new_row(self, make, says):
        seeds = [make().task_sampler[i].seed for i in (0, 1, 3, 4)]
        env = make(partial(Sometimes, "raise", 0, seeds), max_faults=2, max_turns=1)
        env.rollout(6, says("x"), break_when_any_done=False)
        assert env.faults == {"error": 4}

    def test_a_failed_environment_is_replaced(self, make, says):
        made = []

        def factory():
            made.append(Faulty("raise", 0))
            return made[-1]

        make(factory).rollout(3, says("x"), break_when_any_done=False)
        assert len(made) == 3

    def test_a_forked_child_that_comes_back_ends(self, make, says, tmp_path):
        class Forks(StopOrGo):
            def step(self, action):
                child = os.fork()
                if child:
                    ends.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
                return super().step(action)

        ends = []
        env = make(Forks)
        env.rollout(1, says("stop"))
        # a child that played on would leave a file of its own
        (tmp_path / str(os.getpid())).touch()
        assert ends == [1]
        assert len(list(tmp_path.iterdir())) == 1
