"""Continuations of episodes from the middle, and the values of states by them."""

from __future__ import annotations

import random
from itertools import product

import pytest
import torch
from scripted_episodes import make_env
from torchrl.envs import RewardScaling, TransformedEnv

from torchrl_llm import keys
from torchrl_llm.collectors import Branches, ReplayError, TurnCollector, branch, value_states
from torchrl_llm.collectors.branching import BRANCH_IDS
from torchrl_llm.envs import EnvironmentFault, GEMEnv
from torchrl_llm.testing.policies import ScriptedPolicy
from torchrl_llm.utils.options import ConfigError

TURNS = 4


def worth(said: str) -> float:
    """Of the last letter, given those before it."""
    return {"a": 1.0, "b": -0.1}[said[-1]] * len(said) + 0.7 * (said[-2:] == "ab")


class Letters:
    """Four turns of one letter, each paid by what was said so far; an episode that begins with "b"
    ends after two."""

    def reset(self, seed=None):
        self.said, self.seed = "", seed
        return f"Task {seed}.", {}

    def step(self, action):
        self.said += action.strip()[0]
        over = len(self.said) == (2 if self.said[0] == "b" else TURNS)
        return f"Heard {self.said}.", worth(self.said), over, False, {}


class Forgetful(Letters):
    """Shows how often it was reset, which no seed decides."""

    resets = 0

    def reset(self, seed=None):
        Forgetful.resets += 1
        super().reset(seed)
        return f"Reset {Forgetful.resets}.", {}


class Unpaid(Letters):
    """Pays what no seed decides, and shows nothing of it."""

    resets = 0

    def reset(self, seed=None):
        Unpaid.resets += 1
        return super().reset(seed)

    def step(self, action):
        text, reward, *rest = super().step(action)
        return text, reward + Unpaid.resets, *rest


class Leaving(Letters):
    """Ends early in every episode but the first, without a word."""

    resets = 0

    def reset(self, seed=None):
        Leaving.resets += 1
        return super().reset(seed)

    def step(self, action):
        text, reward, over, *rest = super().step(action)
        return text, reward, over or Leaving.resets > 1, *rest


class Breaking(Letters):
    """Fails at an "a" after "ab"."""

    broken = False

    def step(self, action):
        if Breaking.broken and self.said == "ab" and action.strip()[0] == "a":
            raise RuntimeError("broken")
        return super().step(action)


def letter(episode: int, turn: int, _: str = "") -> str:
    return random.Random(f"{episode} {turn}").choice("ab")


@pytest.fixture
def make(tokenizer):
    def make(env=Letters, script=letter, *, num_envs=3, batch_size=4, group_size=1, branches=None, **options):
        env = make_env(env, tokenizer=tokenizer, num_envs=num_envs, group_size=group_size, **options)
        policy = ScriptedPolicy(script, tokenizer=tokenizer, max_output_tokens=4)
        return TurnCollector(env, policy, batch_size=batch_size, branches=branches)

    return make


def said(tokenizer, episode) -> str:
    return "".join(tokenizer.decode(turn.tokens)[0] for turn in episode.turns)


def value(before: str) -> float:
    """Of a state under :func:`letter`, by summing over all that can follow."""
    length = 2 if before[:1] == "b" else TURNS
    if len(before) == length:
        return 0.0
    return sum(worth(before + each) + value(before + each) for each in "ab") / 2


class TestBranch:
    @pytest.mark.parametrize("options", [{}, {"overflow": "slide", "max_model_len": 70}, {"num_threads": 2}])
    def test_replays_and_goes_on(self, make, tokenizer, options):
        collector = make(num_envs=2, batch_size=6, max_output_tokens=4, **options)
        collector.rollout()
        points = [(episode, turn) for episode in collector.episodes for turn in range(len(episode.turns))]
        found = branch(collector.env, collector.policy, points, count=3)
        assert all(len(each) == 3 for each in found)
        for (origin, turn), continuations in zip(points, found, strict=True):
            for each in continuations:
                assert said(tokenizer, each)[:turn] == said(tokenizer, origin)[:turn]
                own = "".join(letter(each.episode_id, k) for k in range(turn, len(each.turns)))
                assert said(tokenizer, each)[turn:] == own
                assert each.rewards == [worth(said(tokenizer, each)[: k + 1]) for k in range(len(each.turns))]
                assert (each.group_id, each.finished) == (origin.group_id, True)
        ids = [each.episode_id for continuations in found for each in continuations]
        assert min(ids) >= BRANCH_IDS
        slid = any(turn.segment for episode in collector.episodes for turn in episode.turns)
        assert slid == ("overflow" in options)

    def test_an_episode_does_not_depend_on_its_neighbors(self, make):
        collector = make()
        collector.rollout()
        points = [(episode, 1) for episode in collector.episodes]
        together = branch(collector.env, collector.policy, points, count=2)
        alone = [branch(collector.env, collector.policy, [point], count=2)[0] for point in reversed(points)]
        for one, other in zip(together, reversed(alone), strict=True):
            assert [each.rewards for each in one] == [each.rewards for each in other]
            assert [each.episode_id for each in one] == [each.episode_id for each in other]

    @pytest.mark.parametrize("env", [Forgetful, Unpaid, Leaving])
    def test_an_environment_that_does_not_repeat_itself(self, make, env):
        env.resets = 0
        collector = make(env, lambda *_: "a", num_envs=1, batch_size=1)
        collector.rollout()
        with pytest.raises(ReplayError, match="function of its seed"):
            branch(collector.env, collector.policy, [(collector.episodes[0], 2)])

    def test_failed_ones_are_left_out_up_to_a_limit(self, make, tokenizer):
        Breaking.broken = False
        collector = make(
            Breaking, lambda episode, turn, _: "abbb"[turn] if episode < BRANCH_IDS else letter(episode, turn)
        )
        collector.rollout()
        Breaking.broken = True
        points = [(collector.episodes[0], 2)]
        (found,) = branch(collector.env, collector.policy, points, count=8)
        assert 0 < len(found) < 8
        assert {said(tokenizer, each)[:3] for each in found} == {"abb"}
        with pytest.raises(EnvironmentFault, match="continuations of a batch"):
            branch(collector.env, collector.policy, points, count=8, max_faults=0)
        # Nothing is left running.
        Breaking.broken = False
        assert len(branch(collector.env, collector.policy, points, count=8)[0]) == 8

    def test_what_cannot_be_continued(self, make, tokenizer):
        collector, other = make(), make(seed=1, num_envs=2)
        collector.rollout()
        episode = collector.episodes[0]
        for turn in (-1, len(episode.turns)):
            with pytest.raises(ValueError, match="counted from 0"):
                branch(collector.env, collector.policy, [(episode, turn)])
        worker = GEMEnv(Letters, tokenizer=tokenizer, num_envs=1, max_output_tokens=4, worker=1, num_workers=2)
        with pytest.raises(ValueError, match="no task of env"):
            branch(worker, collector.policy, [(episode, 0)])
        other.env.reset()
        with pytest.raises(RuntimeError, match="is running"):
            branch(other.env, collector.policy, [])
        transformed = TransformedEnv(other.env, RewardScaling(0.0, 2.0))
        with pytest.raises(TypeError, match="GEMEnv"):
            TurnCollector(transformed, collector.policy, batch_size=1, branches=Branches(count=1))

    @pytest.mark.parametrize("workers", [1, 3])
    def test_tasks_are_found_by_their_ids(self, make, workers):
        for worker in range(workers):
            collector = make(group_size=2, worker=worker, num_workers=workers, num_envs=2)
            collector.rollout()
            points = [(episode, 0) for episode in collector.episodes]
            for (origin, _), (each,) in zip(points, branch(collector.env, collector.policy, points), strict=True):
                start = origin.turns[0].start
                assert each.contexts[0][:start].tolist() == origin.contexts[0][:start].tolist()


class TestValues:
    def test_the_mean_return_is_the_value_of_the_state(self, make, tokenizer):
        """To five standard errors; a wrong turn, a lost reward or a missing letter is farther
        off."""
        collector = make(num_envs=16, batch_size=3)
        collector.rollout()
        count = 100
        found = value_states(collector.env, collector.policy, collector.episodes, Branches(count=count))
        for episode, row in zip(collector.episodes, found.values.tolist(), strict=True):
            text = said(tokenizer, episode)
            for turn in range(len(text)):
                ends = [text[:turn] + "".join(rest) for rest in product("ab", repeat=TURNS - turn)]
                most = max(abs(sum(worth(end[: k + 1]) for k in range(turn, len(end)))) for end in ends)
                assert row[turn] == pytest.approx(value(text[:turn]), abs=5 * 0.6 * most / count**0.5)
            assert row[len(text) :] == [0.0] * (found.values.shape[1] - len(text))

    def test_discount(self, make):
        collector = make(script=lambda *_: "a", batch_size=1)
        collector.rollout()
        found = value_states(collector.env, collector.policy, collector.episodes, Branches(count=1, gamma=0.5))
        paid = [worth("a" * (k + 1)) for k in range(TURNS)]
        expected = [sum(0.5 ** (k - t) * paid[k] for k in range(t, TURNS)) for t in range(TURNS)]
        assert found.values.tolist() == [pytest.approx(expected)]

    def test_equal_states_of_a_group_are_continued_once(self, make):
        """Four episodes "a?.." share the first state, and those with equal letters the next ones;
        groups share nothing."""
        collector = make(
            group_size=4, num_envs=4, batch_size=8, script=lambda episode, turn, _: "aabb"[(episode + turn) % 4]
        )
        collector.rollout()
        found = value_states(collector.env, collector.policy, collector.episodes, Branches(count=2))
        texts = {
            (e.group_id, tuple(tuple(t.tokens) for t in e.turns[:k]))
            for e in collector.episodes
            for k in range(len(e.turns))
        }
        assert found.continuations == 2 * len(texts)
        assert len(texts) < sum(len(e.turns) for e in collector.episodes)
        assert len(set(found.values[:4, 0].tolist())) == 1

    def test_the_choice_depends_on_nothing_that_follows(self, make):
        """Episodes that differ from their third letter on have the same states chosen up to
        there."""
        chosen = []
        for rest in ("aa", "bb"):
            collector = make(
                batch_size=40, script=lambda episode, turn, _, rest=rest: ("a", letter(episode, 1), *rest)[turn]
            )
            collector.rollout()
            branches = Branches(count=1, share=0.4)
            chosen.append(~value_states(collector.env, collector.policy, collector.episodes, branches).values.isnan())
        assert (chosen[0][:, :3] == chosen[1][:, :3]).all()
        assert (chosen[0][:, 3] != chosen[1][:, 3]).any()
        assert 0.3 < torch.cat(chosen).float().mean() < 0.5

    @pytest.mark.parametrize("wrong", [{"count": 0}, {"count": 1, "share": 0.0}, {"count": 1, "gamma": 1.5}])
    def test_wrong_options(self, wrong):
        with pytest.raises(ConfigError):
            Branches(**wrong)


class TestCollector:
    def test_batches_are_as_without(self, make):
        plain, branched = make(), make(branches=Branches(count=2))
        for _ in range(3):
            rows, more = plain.rollout(), branched.rollout()
            values = more.pop(keys.SAMPLED_VALUE)
            assert (rows == more).all()
            assert (values != 0).any()
        assert branched.metrics()["data/continuations"] > 0
        assert branched.metrics()["data/continued_turns"] > branched.metrics()["data/continuations"]

    def test_a_resumed_one_goes_on_exactly(self, make):
        branches = Branches(count=2, share=0.7)
        first = make(branches=branches)
        first.rollout()
        state = first.state_dict()
        second = make(branches=branches)
        second.load_state_dict(state)
        rows, again = first.rollout(), second.rollout()
        torch.testing.assert_close(again[keys.SAMPLED_VALUE], rows[keys.SAMPLED_VALUE], rtol=0, atol=0, equal_nan=True)
        assert second.metrics() == first.metrics()
