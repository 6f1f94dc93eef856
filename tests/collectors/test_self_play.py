"""SelfPlayCollector: every seat's episode is the same as in a plain loop over the game, whatever
runs beside it."""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch
from chatter import Chatter, played
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_episodes import Streaming, same
from torchrl.data import LazyTensorStorage, ReplayBuffer

from torchrl_llm import keys
from torchrl_llm.collectors import SelfPlayCollector, TurnCollector
from torchrl_llm.envs import EnvironmentFault, EnvironmentUnavailableError, GEMEnv, SelfPlayEnv
from torchrl_llm.keys import StopReason
from torchrl_llm.testing.policies import ScriptedPolicy
from torchrl_llm.testing.take_away import TakeAway
from torchrl_llm.testing.tokenizers import byte_tokenizer
from torchrl_llm.utils.options import ConfigError

TOKENIZER = byte_tokenizer()
OPTIONS = {"tokenizer": TOKENIZER, "max_output_tokens": 24, "max_model_len": 512}


def make_env(game=Chatter, **options):
    return SelfPlayEnv(game, **OPTIONS | options)


def speech(episode, turn, failing=frozenset(), players=2):
    if episode // players in failing and turn == episode % 2:
        return "fail"
    return f"{episode}.{turn}" + " end" * (random.Random(f"{episode} {turn}").random() < 0.2)


def says(script=speech, policy=ScriptedPolicy, **options):
    return policy(lambda episode, turn, _: script(episode, turn), tokenizer=TOKENIZER, max_output_tokens=24, **options)


def outcome(rewards, seat):
    others = max(reward for place, reward in enumerate(rewards) if place != seat)
    return (rewards[seat] > others) - (rewards[seat] < others)


def expected_rows(env, games, players, script=speech):
    """Of each game that does not fail, and each seat: tokens, turn ids, rewards, success of the
    last turn, and outcome."""
    rows = {}
    for game in games:
        task = env.task_sampler[game * players]
        say = lambda seat, turn, first=game * players: script(first + seat, turn)  # noqa: E731
        try:
            seats = played(Chatter(players), task.seed, say)
        except ValueError:
            continue
        final = [turns[-1][2] for _, turns in seats]
        for seat, (first, turns) in enumerate(seats):
            tokens = [*env.formatter.start(first)]
            turn_ids = [-1] * len(tokens)
            for number, (text, message, _) in enumerate(turns if turns[0][0] else []):
                response = [*TOKENIZER.encode(text), TOKENIZER.eos_token_id]
                feedback = env.formatter.feedback(response, message)
                tokens += [*response, *feedback]
                turn_ids += [number] * len(response) + [-1] * len(feedback)
            result = outcome(final, seat)
            rows[game * players + seat] = tokens, turn_ids, [turn[2] for turn in turns], result > 0, result
    return rows


def read(rows):
    """What :func:`expected_rows` has, of a batch."""
    found = {}
    for row in rows:
        length, turns = int(row[keys.ATTENTION_MASK].sum()), int(row[keys.TURN_MASK].sum())
        found[int(row[keys.EPISODE_ID])] = (
            row[keys.TOKENS][:length].tolist(),
            row[keys.TURN_IDS][:length].tolist(),
            row[keys.TURN_REWARD][:turns].tolist(),
            bool(row[keys.TURN_SUCCESS][turns - 1]),
            int(row["turn", "extra", "outcome"][turns - 1]),
        )
        assert row[keys.TURN_TERMINATED][:turns].tolist() == [False] * (turns - 1) + [True]
    return found


def alike(batch, other):
    """Whether two batches are equal, NaN where there is no outcome included."""
    for each in (batch, other):
        each[keys.turn_extra("outcome")] = each[keys.turn_extra("outcome")].nan_to_num(nan=9.0)
    return same(batch, other)


class TestRows:
    @given(
        players=st.integers(2, 3),
        tables=st.integers(1, 5),
        games=st.integers(1, 6),
        failing=st.sets(st.integers(0, 12), max_size=5),
        streaming=st.booleans(),
        seed=st.integers(0, 1000),
    )
    @settings(max_examples=25, deadline=None)
    def test_they_are_those_of_a_plain_loop(self, players, tables, games, failing, streaming, seed):
        script = partial(speech, failing=frozenset(failing), players=players)
        env = make_env(lambda: Chatter(players), num_envs=tables * players, seed=seed)
        policy = says(script, Streaming if streaming else ScriptedPolicy)
        collector = SelfPlayCollector(env, policy, batch_size=games * players)
        first, second = collector.rollout(), collector.rollout()
        whole = expected_rows(env, range(64), players, script)
        expected = dict([*whole.items()][: 2 * games * players])
        assert read(first) | read(second) == expected
        assert [*first[keys.EPISODE_ID].tolist(), *second[keys.EPISODE_ID].tolist()] == [*expected]
        # Games that failed, by all their seats, and nothing else.
        gone = {episode // players for episode in range(max(expected) + 1)} - {
            episode // players for episode in expected
        }
        assert collector.dropped["error"] >= players * len(gone)
        assert gone <= failing
        assert collector.in_flight == 0

    def test_all_seats_that_are_to_move_are_asked_in_one_call(self):
        asked = []

        class Counting(ScriptedPolicy):
            def generate(self, prompt, lengths, *args, **kwargs):
                asked.append(len(lengths))
                return super().generate(prompt, lengths, *args, **kwargs)

        env = make_env(partial(TakeAway, 6, 6), num_envs=8)
        policy = says(lambda episode, turn: "1", Counting)
        SelfPlayCollector(env, policy, batch_size=8).rollout()
        assert asked == [4] * 6  # four games of six moves

    def test_the_roles_are_those_of_the_seats(self):
        collector = SelfPlayCollector(make_env(num_envs=4), says(), batch_size=8)
        rows = collector.rollout()
        roles = [collector.texts[int(key)] for key in rows[keys.turn_extra("role")][:, 0]]
        assert roles == ["player 0", "player 1"] * 4

    def test_every_seat_is_a_group_of_its_own(self):
        """Different tasks: otherwise GRPO would compare the two sides of a game."""
        rows = SelfPlayCollector(make_env(num_envs=4), says(), batch_size=8).rollout()
        assert rows[keys.GROUP_ID].equal(rows[keys.EPISODE_ID])
        assert len(rows[keys.TASK_ID].unique()) == 8

    def test_it_does_not_depend_on_the_slots_nor_draw_from_global_generators(self):
        random.seed(5)
        state = random.getstate()
        few, many = (SelfPlayCollector(make_env(num_envs=n), says(), batch_size=12).rollout() for n in (2, 10))
        assert alike(few, many)
        assert random.getstate() == state

    def test_a_replay_buffer_is_filled(self):
        buffer = ReplayBuffer(storage=LazyTensorStorage(8))
        for _ in SelfPlayCollector(
            make_env(num_envs=4),
            says(),
            batch_size=4,
            total_batches=2,
            replay_buffer=buffer,
            postproc=lambda rows: rows.select("episode_id"),
        ):
            pass
        assert buffer[:]["episode_id"].tolist() == [*range(8)]


class TestPassed:
    """A seat whose game ended before it moved."""

    def rows(self):
        env = make_env(partial(TakeAway, 6, 6), num_envs=4)
        # The first player of every second game says what is not a move.
        policy = says(lambda episode, turn: "7" if episode % 4 == 0 else "1")
        collector = SelfPlayCollector(env, policy, batch_size=4)
        return collector.rollout(), collector

    def test_it_keeps_its_reward_and_has_no_action(self):
        rows, collector = self.rows()
        _, passed, *_ = rows
        assert not (passed[keys.TURN_IDS] >= 0).any()
        assert passed[keys.TURN_MASK].sum() == 1
        assert passed[keys.TURN_REWARD][0] == 1
        assert passed[keys.TURN_SUCCESS][0]
        assert passed[keys.TURN_STOP_REASON][0] == StopReason.WON
        assert "left 6" in TOKENIZER.decode(passed[keys.TOKENS][passed[keys.ATTENTION_MASK]])
        assert collector.passed == 1
        assert collector.metrics()["data/passed"] == 1


class TestLimits:
    """What one seat may not do ends the game for all."""

    def test_a_limit_of_turns(self):
        env = make_env(partial(TakeAway, 9, 9), num_envs=4, max_turns=2)
        rows = SelfPlayCollector(env, says(lambda episode, turn: "1"), batch_size=4).rollout()
        # The first player's second turn is answered when it is its turn again: after the other's
        # second one.
        assert rows[keys.TURN_MASK].sum(1).tolist() == [2, 2] * 2
        reasons = rows[keys.TURN_STOP_REASON][:, 1].tolist()
        assert reasons == [StopReason.MAX_TURNS, StopReason.ENV_TRUNCATED] * 2
        assert rows[keys.TURN_TRUNCATED][:, 1].all()
        assert not rows[keys.TURN_REWARD].any()

    def test_a_full_context(self):
        env = make_env(partial(TakeAway, 9, 9), num_envs=2, max_model_len=100, max_output_tokens=4)
        policy = ScriptedPolicy(lambda *_: "1", tokenizer=TOKENIZER, max_output_tokens=4)
        rows = SelfPlayCollector(env, policy, batch_size=2).rollout()
        ends = rows[keys.TURN_STOP_REASON].amax(1).tolist()
        # The second player's first message holds the first move, so that its context is full first.
        assert ends == [StopReason.ENV_TRUNCATED, StopReason.CONTEXT]

    def test_a_context_that_slides(self):
        env = make_env(partial(TakeAway, 9, 9), num_envs=2, max_model_len=120, max_output_tokens=4, overflow="slide")
        policy = ScriptedPolicy(lambda *_: "1", tokenizer=TOKENIZER, max_output_tokens=4)
        rows = SelfPlayCollector(env, policy, batch_size=2).rollout()
        assert rows[keys.TURN_MASK].sum(1).tolist() == [5, 4]
        assert rows[keys.TURN_TERMINATED].any(1).all()


class TestFaults:
    @pytest.mark.parametrize("seat", [0, 1])
    def test_a_failing_seat_takes_its_whole_game_along(self, seat):
        script = lambda episode, turn: "fail" if episode == 2 + seat else f"{episode}.{turn}"  # noqa: E731
        collector = SelfPlayCollector(make_env(lambda: Chatter(most=9), num_envs=4, seed=4), says(script), batch_size=6)
        ids = collector.rollout()[keys.EPISODE_ID].tolist()
        assert ids == [0, 1, 4, 5, 6, 7]
        assert (collector.dropped, collector.faults) == ({"error": 2}, {"error": 1})

    @pytest.mark.parametrize("seat", [0, 1])
    def test_a_game_that_broke_is_made_again(self, seat):
        class Brittle(Chatter):
            broken = False

            def start(self, seed):
                assert not self.broken
                super().start(seed)

            def move(self, text):
                self.broken = "fail" in text
                super().move(text)

        script = lambda episode, turn: "fail" if episode == seat else f"{episode}.{turn}"  # noqa: E731
        collector = SelfPlayCollector(make_env(lambda: Brittle(most=9), num_envs=2, seed=4), says(script), batch_size=4)
        assert collector.rollout()[keys.EPISODE_ID].tolist() == [2, 3, 4, 5]
        assert collector.faults == {"error": 1}

    def test_too_many_raise_and_another_batch_may_follow(self):
        healed = []
        script = lambda episode, turn: f"{episode}.{turn}" if healed else "fail"  # noqa: E731
        collector = SelfPlayCollector(make_env(num_envs=4), says(script), batch_size=4, max_faults=2)
        with pytest.raises(EnvironmentFault, match="it was told to"):
            collector.rollout()
        healed.append(True)
        assert len(collector.rollout()) == 4

    def test_a_prompt_that_is_too_long(self):
        collector = SelfPlayCollector(make_env(num_envs=2, max_model_len=40), says(), batch_size=2, max_faults=1)
        with pytest.raises(EnvironmentFault, match="first prompt has"):
            collector.rollout()


class TestState:
    def test_a_resumed_collector_goes_on_exactly(self):
        failing = partial(speech, failing=frozenset({1, 5}))
        whole = SelfPlayCollector(make_env(num_envs=4), says(failing), batch_size=6)
        whole.rollout()
        state = whole.state_dict()
        resumed = SelfPlayCollector(make_env(num_envs=6), says(failing), batch_size=6)
        resumed.load_state_dict(state)
        assert alike(whole.rollout(), resumed.rollout())
        assert whole.dropped == resumed.dropped


class TestOpponent:
    def test_seats_are_swapped_and_its_episodes_are_left_out(self):
        said = []
        opponent = says(lambda episode, turn: said.append(episode) or "x")
        policy = says(lambda episode, turn: "y")
        policy.weights_changed()  # the opponent's version is another, and nothing of it is stale
        rows = SelfPlayCollector(make_env(num_envs=4), policy, batch_size=8, opponent=opponent).rollout()
        assert rows[keys.EPISODE_ID].tolist() == [0, 3, 4, 7]
        assert {*said} <= {1, 2, 5, 6}
        text = TOKENIZER.batch_decode([row[keys.TOKENS][row[keys.TURN_IDS] >= 0] for row in rows])
        assert not any("x" in each for each in text)


class TestRefused:
    def test_another_collector(self):
        env = make_env()
        with pytest.raises(RuntimeError, match="SelfPlayCollector"):
            TurnCollector(env, says(), batch_size=2).rollout()

    def test_another_environment(self):
        env = GEMEnv(Chatter, **OPTIONS)
        with pytest.raises(EnvironmentUnavailableError, match="self_play"):
            env.reset()
        with pytest.raises(TypeError, match="expected a SelfPlayEnv"):
            SelfPlayCollector(env, says(), batch_size=2)

    def test_other_numbers_of_players(self):
        with pytest.raises(ConfigError, match="group_size is 3"):
            make_env(group_size=3)
        with pytest.raises(ConfigError, match="equal numbers"):
            SelfPlayEnv([lambda: Chatter(2), TakeAway, partial(Chatter, 3)], **OPTIONS)

    def test_what_is_no_game(self):
        with pytest.raises(ConfigError, match="not a game of several players"):
            make_env("game:GuessTheNumber-v0-easy")

    def test_a_part_of_a_game(self):
        with pytest.raises(ValueError, match="multiple of the group size 2"):
            SelfPlayCollector(make_env(), says(), batch_size=3)

    def test_a_mixture_of_games(self):
        env = SelfPlayEnv([Chatter, TakeAway], num_envs=4, **OPTIONS)
        rows = SelfPlayCollector(env, says(lambda episode, turn: "1"), batch_size=8).rollout()
        assert rows[keys.ENV_ID].tolist() == [0, 0, 1, 1] * 2
        assert torch.isfinite(rows[keys.TURN_REWARD]).all()
