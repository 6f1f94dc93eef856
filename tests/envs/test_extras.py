"""Extras that environments declare: what is refused, and that every way to collect delivers the
same ones."""

from __future__ import annotations

import itertools
import logging
import math
from functools import partial
from typing import ClassVar

import numpy as np
import pytest
import torch
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.envs import check_env_specs

from torchrl_llm import collectors, keys
from torchrl_llm.collectors import AsyncTurnCollector, TurnCollector
from torchrl_llm.data import TurnsToSequence, cat_rows, micro_batches, turns_to_rows
from torchrl_llm.envs import EnvironmentFault, EnvSpec, GEMEnv, TextStep, text_key
from torchrl_llm.envs.columns import MOST_CHARACTERS
from torchrl_llm.testing.environments import StopOrGo
from torchrl_llm.testing.policies import ScriptedPolicy
from torchrl_llm.testing.worlds import Coins, KeyAndDoor, coins_optimum

REGRET, STATE = keys.turn_extra("regret"), keys.turn_extra("state")
ANSWERS = ("left", "right", "jump")
KINDS = {"regret": float, "state": str}


class Told:
    """Ends in the second turn; its info is what it is given.

    Args:
        info: of each step.
        extras: declared.
    """

    def __init__(self, info, extras=KINDS):
        self.info, self.extras = info, extras

    def reset(self, seed=None):
        self.turn = 0
        return "Begin.", {}

    def step(self, action):
        self.turn += 1
        return "On.", 0.5, self.turn == 2, False, self.info


def told(info, extras=KINDS, name="told"):
    return EnvSpec(name, partial(Told, info, extras), extras=extras)


@pytest.fixture
def make(tokenizer):
    defaults = {"tokenizer": tokenizer, "num_envs": 4, "max_output_tokens": 16}
    return lambda env=Coins, **kwargs: GEMEnv(env, **{**defaults, **kwargs})


@pytest.fixture
def policy(tokenizer):
    return lambda: ScriptedPolicy(
        lambda episode, turn, _: ANSWERS[(episode + turn * episode) % 3], tokenizer=tokenizer, max_output_tokens=16
    )


def same(one, other):
    return set(one) == set(other) and all(
        torch.equal(one[name].nan_to_num(-7), other[name].nan_to_num(-7)) for name in one
    )


class TestDeclaration:
    @pytest.mark.parametrize("extras", [["regret"], {"regret": int}, {3: float}, {"": str}, "regret"])
    def test_what_is_no_declaration_is_refused(self, extras):
        with pytest.raises(TypeError, match="'told' declares the extras"):
            told({}, extras)

    def test_a_class_that_is_a_factory_shows_its_own(self, make):
        assert make().extras == {"regret": float, "state": str}
        assert make([StopOrGo, KeyAndDoor]).extras == {"state": str}
        assert make(StopOrGo).extras == {}

    def test_one_name_has_one_kind_in_a_mixture(self, make):
        with pytest.raises(TypeError, match="'x' is str in 'b' and float"):
            make([told({}, {"x": float}, "a"), told({}, {"x": str}, "b")])

    def test_those_of_a_lambda_cannot_be_seen_and_a_warning_says_how(self, make, caplog):
        with caplog.at_level(logging.WARNING):
            env = make(lambda: Coins(), num_envs=2)
            env.reset()
            env.reset()
        assert [record.message.count("EnvSpec(name, make, extras=Coins.extras)") for record in caplog.records] == [1]
        assert "extra" not in env.reset()

    def test_an_attribute_of_that_name_that_declares_nothing_is_left_alone(self, make):
        assert "extra" not in make(EnvSpec("other", partial(Told, {}, None))).reset()

    def test_an_environment_without_any_has_no_keys_of_them(self, make, policy):
        rows = TurnCollector(make(StopOrGo, max_turns=2), policy(), batch_size=4).rollout()
        assert keys.turn_extras(rows) == {}


class TestValues:
    def test_numbers_and_texts(self):
        info = {"regret": np.float32(0.5), "state": "here", "other": object()}
        step = TextStep.read(("", 0.0, False, False, info), KINDS)
        assert step.extras.values == {"regret": 0.5, "state": text_key("here")}
        assert step.extras.texts == {text_key("here"): "here"}
        label = TextStep.read(("", 0.0, False, False, {"label": True}), {"label": float})
        assert label.extras.values == {"label": 1.0}
        assert isinstance(label.extras.values["label"], float)

    def test_a_number_may_be_none_by_nan(self):
        step = TextStep.read(("", 0.0, False, False, {"regret": math.nan, "state": ""}), KINDS)
        assert math.isnan(step.extras.values["regret"])
        assert step.extras.values["state"] == text_key("") != 0

    @pytest.mark.parametrize(
        ("info", "error", "match"),
        [
            ({"regret": 1.0}, ValueError, r"no info\['state'\].*its info has \['regret'\]"),
            (None, ValueError, r"no info\['regret'\]"),
            ({"regret": "1", "state": "s"}, TypeError, r"info\['regret'\] '1'; expected a number"),
            ({"regret": None, "state": "s"}, TypeError, r"info\['regret'\] None; expected a number"),
            ({"regret": math.inf, "state": "s"}, ValueError, "inf; expected a finite number"),
            ({"regret": -1e300, "state": "s"}, ValueError, r"info\['regret'\] -1e\+300; expected a finite number"),
            ({"regret": 10**5000, "state": "s"}, ValueError, r"info\['regret'\] inf; expected a finite number"),
            ({"regret": np.ones(2), "state": "s"}, TypeError, r"info\['regret'\] array.*; expected a number"),
            ({"regret": torch.ones(2), "state": "s"}, TypeError, r"info\['regret'\] tensor.*; expected a number"),
            ({"regret": 1.0, "state": 3}, TypeError, r"info\['state'\] 3; expected text"),
        ],
    )
    def test_others_are_refused(self, info, error, match):
        with pytest.raises(error, match=match):
            TextStep.read(("", 0.0, False, False, info), KINDS)

    def test_a_missing_one_is_a_fault_of_the_environment(self, make, policy):
        with pytest.raises(EnvironmentFault, match=r"'told' failed in turn 0.*no info\['state'\]"):
            TurnCollector(make(told({"regret": 0.0}), max_faults=0), policy(), batch_size=4).rollout()

    def test_a_turn_that_fails_has_none(self, make, policy):
        env = make([told({"regret": 0.25, "state": "a"}), told({"regret": 0.0}, name="bad")])
        rows = TurnCollector(env, policy(), batch_size=4, keep_failed=True).rollout()
        assert rows[keys.TURN_STOP_REASON][1, 0] == keys.StopReason.ERROR
        assert rows[REGRET][0].tolist() == [0.25, 0.25]
        assert rows[REGRET][1, 0].isnan()
        assert rows[STATE].tolist() == [[text_key("a")] * 2, [0, 0]] * 2


class Pages:
    """Ends in the first turn; its extra is a page of its task, 20,000 characters."""

    extras: ClassVar = {"page": str}

    def reset(self, seed=None):
        self.page = f"{seed} ".ljust(20_000, "x")
        return "Read.", {}

    def step(self, action):
        return "", 1.0, True, False, {"page": self.page}


class TestTexts:
    def test_long_ones_are_cut_and_known_by_the_hash_of_the_whole(self, make, policy):
        collector = TurnCollector(make(Pages), policy(), batch_size=4)
        found = collector.rollout()[keys.turn_extra("page")].flatten().tolist()
        pages = [f"{collector.env.task_sampler[i].seed} ".ljust(20_000, "x") for i in range(4)]
        assert found == [text_key(page) for page in pages]
        assert collector.texts == {text_key(page): page[:MOST_CHARACTERS] for page in pages}

    def test_the_newest_are_kept_within_a_number_of_characters(self, make, policy, monkeypatch):
        monkeypatch.setattr(collectors.collector, "_MOST_CHARACTERS", 3 * MOST_CHARACTERS)
        collector = TurnCollector(make(Pages), policy(), batch_size=4)
        found = [*collector.rollout()[keys.turn_extra("page")][:, 0].tolist()]
        assert [*collector.texts] == found[1:]
        found += collector.rollout()[keys.turn_extra("page")][:, 0].tolist()
        assert [*collector.texts] == found[-3:]


class TestEveryWayDeliversTheSame:
    @pytest.mark.parametrize("threads", [0, 3])
    @pytest.mark.parametrize("options", [{}, {"overflow": "slide", "max_model_len": 150}])
    def test_collectors(self, make, policy, threads, options):
        environments = [Coins, KeyAndDoor, StopOrGo]
        barrier = TurnCollector(make(environments, max_turns=9, **options), policy(), batch_size=12)
        rows = barrier.rollout()
        collector = AsyncTurnCollector(
            make(environments, max_turns=9, **options), policy(), batch_size=12, num_threads=threads
        )
        others = collector.rollout()
        collector.shutdown()
        assert same(keys.turn_extras(rows), keys.turn_extras(others))
        assert barrier.texts == collector.texts
        assert barrier.texts.keys() == {*rows[STATE].unique().tolist()} - {0}
        assert all(text_key(text) == key for key, text in barrier.texts.items())
        taken = rows[keys.TURN_MASK]
        for env_id, (has_regret, has_state) in enumerate([(True, True), (False, True), (False, False)]):
            own = taken & (rows[keys.ENV_ID] == env_id).unsqueeze(-1)
            assert bool(rows[REGRET][own].isnan().logical_not().all()) == has_regret
            assert bool((rows[STATE][own] != 0).all()) == has_state
        assert not rows[REGRET][~taken].any()
        assert not rows[STATE][~taken].any()

    def test_rollouts_and_stock_collectors(self, make, policy):
        check_env_specs(make())
        rows = TurnCollector(make(), policy(), batch_size=8).rollout()
        first = turns_to_rows(make().rollout(5, policy()))
        assert same(keys.turn_extras(first), keys.turn_extras(rows[:4]))
        env = make(on_done="idle")
        stock = Collector(env, policy(), frames_per_batch=20, total_frames=20, reset_at_each_iter=True)
        buffer = ReplayBuffer(storage=LazyTensorStorage(8), transform=TurnsToSequence(max_model_len=1024, max_turns=5))
        for turns in stock:
            buffer.extend(turns)
        stock.shutdown()
        # It resets before it collects, so that its first tasks are the second four.
        assert buffer[:][keys.EPISODE_ID].tolist() == rows[keys.EPISODE_ID][4:].tolist()
        assert same(keys.turn_extras(buffer[:]), keys.turn_extras(rows[4:]))

    def test_batches_have_the_keys_whatever_environments_are_in_them(self, make, policy):
        collector = TurnCollector(make([StopOrGo, Coins], num_envs=1, max_turns=5), policy(), batch_size=1)
        batches = [collector.rollout() for _ in range(2)]
        rows = cat_rows(batches)
        assert rows[keys.ENV_ID].tolist() == [0, 1]
        assert rows[REGRET].shape == (2, 5)
        assert rows[REGRET].isnan().any(-1).tolist() == [True, False]
        parts = micro_batches(rows, 1)
        assert same(keys.turn_extras(cat_rows(parts)), keys.turn_extras(rows[[1, 0]]))

    def test_a_restored_environment_has_those_of_its_running_episodes(self, make, policy):
        env, other = make(), make()
        env.rollout(2, policy())
        other.load_state_dict(env.state_dict())
        there, here = env.observe()["extra"], other.observe()["extra"]
        assert same(dict(there.items()), dict(here.items()))
        assert (there["state"] != 0).all()


def returns_of(world, seed):
    """The return of every sequence of five answers to a task, and the extras of its turns."""
    found = {}
    for answers in itertools.product(ANSWERS, repeat=5):
        world.reset(seed)
        steps = [world.step(answer) for answer in answers]
        found[answers] = [step[1] for step in steps], [step[4]["regret"] for step in steps]
        assert steps[-1][2]
    return found


@pytest.mark.parametrize("seed", range(12))
def test_regret_of_coins_is_what_enumeration_finds(seed):
    found = returns_of(Coins(), seed)
    best = {
        answers[:turn]: max(
            sum(rewards[turn:]) for other, (rewards, _) in found.items() if other[:turn] == answers[:turn]
        )
        for answers in found
        for turn in range(6)
    }
    for answers, (rewards, regrets) in found.items():
        for turn, regret in enumerate(regrets):
            value = rewards[turn] + best[answers[: turn + 1]]
            assert regret == pytest.approx(best[answers[:turn]] - value, abs=1e-9)
        assert sum(regrets) == pytest.approx(best[()] - sum(rewards), abs=1e-9)
    # So of every policy, such as the uniform one: the expected regrets sum to the optimum minus the
    # expected return.
    regret, total = (np.mean([sum(each[part]) for each in found.values()]) for part in (1, 0))
    assert regret == pytest.approx(coins_optimum() - total)
    assert min(min(regrets) for _, regrets in found.values()) >= 0
