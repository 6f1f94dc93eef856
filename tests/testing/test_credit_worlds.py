"""The worlds of the credit study: their rules, and that their values are exact."""

from __future__ import annotations

import itertools
import math
import random
from statistics import fmean, stdev

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_llm import keys
from torchrl_llm.collectors import TurnCollector
from torchrl_llm.envs import GEMEnv
from torchrl_llm.testing.credit_worlds import (
    CREDIT_WORLDS,
    RIGHT,
    DelayedReward,
    DistractingRewards,
    Packed,
    Stairs,
    TruncationTrap,
    best_answer,
    optimal_return,
    optimal_success,
    uniform_return,
)
from torchrl_llm.testing.environments import Bet, EarlyDecision
from torchrl_llm.testing.policies import ScriptedPolicy
from torchrl_llm.testing.tabular import (
    Outcome,
    TabularWorld,
    answer_value,
    best_values,
    expected,
    policy_values,
    uniform,
)
from torchrl_llm.testing.tokenizers import word_tokenizer
from torchrl_llm.testing.worlds import resolve_world

SMALL = {
    "early-decision": EarlyDecision(luck=0.25),
    "delayed-reward": DelayedReward(delay=2),
    "distracting-rewards": DistractingRewards(turns=2, noise=0.3),
    "stairs": Stairs(height=2, turns=4),
    "truncation-trap": TruncationTrap(farthest=3, limit=None),
}
"""Small enough that every episode can be listed."""


def play(world, seed: int, choose) -> tuple[list[str], list[float], list[dict]]:
    """Texts, rewards and infos of an episode; ``choose`` maps the texts so far to an answer."""
    texts, rewards, infos, done = [world.reset(seed)[0]], [], [], False
    while not done:
        answer = choose(texts)
        message, reward, terminated, truncated, info = world.step(answer)
        texts += [answer, message]
        rewards.append(reward)
        infos.append(info)
        done = terminated or truncated
        assert not (terminated and truncated)
    return texts, rewards, infos


def listed(world, policy, state, gamma: float) -> tuple[float, float]:
    """Return and success from a state on, by listing every answer and outcome; nothing is
    remembered."""
    total = won = 0.0
    for answer, p in policy(state).items():
        for outcome in world.outcomes(state, answer):
            later, wins = (
                (0.0, outcome.success) if outcome.state is None else listed(world, policy, outcome.state, gamma)
            )
            total += p * outcome.probability * (outcome.reward + gamma * later)
            won += p * outcome.probability * wins
    return total, won


def random_policy(world, seed: int, *, illegal: bool = True):
    """A policy that depends on the state, illegal answers included."""

    def chances(state):
        rng = random.Random(repr((seed, state)))
        answers = (*world.ANSWERS, *["nonsense"] * illegal)
        weights = [rng.random() for _ in answers]
        return {answer: weight / sum(weights) for answer, weight in zip(answers, weights, strict=True)}

    return chances


@pytest.fixture(params=list(CREDIT_WORLDS))
def name(request):
    return request.param


class TestExactValues:
    @settings(max_examples=10, deadline=None)
    @given(seed=st.integers(0, 1000), gamma=st.sampled_from([1.0, 0.9, 0.0]))
    def test_values_of_a_policy_are_those_of_all_episodes(self, seed, gamma):
        for name, world in SMALL.items():
            policy = random_policy(world, seed, illegal=name != "early-decision")
            # has too many episodes to list them all; its last three turns have not
            if name == "early-decision":
                world = EarlyDecision(luck=0.25)
                world.tasks = [Bet(2, "", packed) for packed in (False, True)]
            returns = policy_values(world, policy, gamma=gamma)
            wins = policy_values(world, policy, payoff="success")
            for task in world.tasks:
                assert returns[task] == pytest.approx(listed(world, policy, task, gamma)[0], abs=1e-12)
                assert wins[task] == pytest.approx(listed(world, policy, task, 1.0)[1], abs=1e-12)

    def test_the_environment_plays_what_the_table_says(self, name):
        """Monte Carlo in the environment itself, under a policy that gives some illegal answers."""
        world, rng = SMALL[name], random.Random(0)
        answers = (*world.ANSWERS, "nonsense")
        chances = dict.fromkeys(answers, 1 / len(answers))
        returns = [sum(play(world, seed, lambda texts: rng.choice(answers))[1]) for seed in range(4000)]
        exact = expected(world, policy_values(world, lambda state: chances))
        assert abs(fmean(returns) - exact) < 4 * stdev(returns) / math.sqrt(len(returns))

    @pytest.mark.parametrize("payoff", ["return", "success"])
    def test_the_best_value_is_that_of_the_best_of_all_policies(self, payoff):
        """Every deterministic policy of a small world, by listing its episodes."""
        world = Stairs(height=2, turns=3)
        best = best_values(world, payoff=payoff)
        states = list(best)
        values = {task: [] for task in world.tasks}
        # Two things are right somewhere; a third stands for all that are wrong, and illegal answers
        # are worse.
        for choice in itertools.product(("hat", "coat", "boots"), repeat=len(states)):
            plan = dict(zip(states, choice, strict=True))
            for task in world.tasks:
                values[task].append(
                    listed(world, lambda state, p=plan: {p[state]: 1.0}, task, 1.0)[payoff == "success"]
                )
        assert {task: max(each) for task, each in values.items()} == pytest.approx({t: best[t] for t in world.tasks})

    def test_no_policy_is_better_than_the_best(self, name):
        world = CREDIT_WORLDS[name]()
        best = best_values(world, gamma=0.9)
        for seed in range(5):
            values = policy_values(world, random_policy(world, seed), gamma=0.9)
            assert all(best[state] >= value - 1e-12 for state, value in values.items())

    def test_the_best_answers_are_worth_the_best_values(self, name):
        world = SMALL[name]
        values = policy_values(world, lambda state: {best_answer(world, state): 1.0})
        assert expected(world, values) == pytest.approx(optimal_return(world))
        wins = policy_values(world, lambda state: {best_answer(world, state): 1.0}, payoff="success")
        assert expected(world, wins) == pytest.approx(optimal_success(world)) == 1.0

    def test_known_values(self):
        for luck in (0.0, 0.5):
            world = EarlyDecision(luck=luck)
            assert optimal_return(world) == pytest.approx(world.optimal_return)
            assert uniform_return(world) == pytest.approx(world.random_return)
        assert uniform_return(DistractingRewards(turns=3, noise=2.0)) == pytest.approx(1 / 4)
        assert expected(world, policy_values(world, uniform(world), payoff="success")) == pytest.approx(1 / 16)
        # far n: 0.5 * (value of n - 1) + 0.5 * 0.5, and 1 on arrival: 0.75, 0.625, 0.5625
        assert uniform_return(TruncationTrap(farthest=3)) == pytest.approx((0.75 + 0.625 + 0.5625) / 3)

    def test_wrong_policies_and_tables(self):
        world = DelayedReward()
        with pytest.raises(ValueError, match=r"sum to 0.5: {'hat': 0.5}; expected 1"):
            policy_values(world, lambda state: {"hat": 0.5})
        with pytest.raises(ValueError, match="expected one of"):
            best_values(world, payoff="wins")

        class Circle(TabularWorld):
            ANSWERS, tasks = ("on",), (0,)

            def outcomes(self, state, response):
                return [Outcome(1.0, 0.0, (state + 1) % 3)]

        with pytest.raises(ValueError, match="0 can be reached from itself"):
            best_values(Circle())


class TestAll:
    def test_ids(self, name):
        assert type(resolve_world(f"world:{name}").make()) is CREDIT_WORLDS[name]

    def test_an_episode_is_a_function_of_task_and_answers(self, name):
        """And chance does not come from the global generator, nor equal after different answers."""
        rng, state = random.Random(1), random.getstate()
        plans = [[rng.choice(CREDIT_WORLDS[name].ANSWERS) for _ in range(20)] for _ in range(10)]
        for seed, plan in enumerate(plans):
            played = [play(CREDIT_WORLDS[name](), seed, lambda texts, p=plan: p[len(texts) // 2]) for _ in range(2)]
            assert played[0] == played[1]
        assert random.getstate() == state

    def test_words(self, name):
        """No text has a word that the tokenizer lacks."""
        world, rng = CREDIT_WORLDS[name](), random.Random(0)
        tokenizer = word_tokenizer(world.WORDS)
        for seed in range(50):
            for text in play(world, seed, lambda texts: rng.choice(world.ANSWERS))[0]:
                assert tokenizer.decode(tokenizer.encode(text)) == text

    def test_regrets_sum_to_what_is_missing(self, name):
        """On average: optimum minus return; in each episode too where nothing is random."""
        if name == "early-decision":
            pytest.skip("has no extras")
        world, rng = SMALL[name], random.Random(0)
        missing = []
        answers = (*world.ANSWERS, "nonsense")
        for seed in range(500):
            start = (world.reset(seed), world.state)[1]
            _, rewards, infos = play(world, seed, lambda texts: rng.choice(answers))
            regrets = [info["regret"] for info in infos]
            assert min(regrets) >= -1e-12
            missing.append(best_values(world)[start] - sum(rewards) - sum(regrets))
        if name == "distracting-rewards":
            assert abs(fmean(missing)) < 4 * stdev(missing) / math.sqrt(len(missing))
            assert stdev(missing) > 0.1
        else:
            assert max(map(abs, missing)) < 1e-9

    def test_wrong_use(self, name):
        with pytest.raises(RuntimeError, match="reset first"):
            CREDIT_WORLDS[name]().step("hat")

    def test_in_gem_env_the_best_player_succeeds(self, name):
        """Through the tokenizer and the collector, with extras; the player has its own copy of the
        environment."""
        world, words = CREDIT_WORLDS[name], word_tokenizer(CREDIT_WORLDS[name].WORDS)
        player = best_player(name)
        env = GEMEnv(world, tokenizer=words, num_envs=8, max_model_len=200, max_output_tokens=2)
        rows = TurnCollector(
            env, ScriptedPolicy(player, tokenizer=words, max_output_tokens=2, read_context=True), batch_size=32
        ).rollout()
        ended = rows[keys.TURN_TERMINATED].any(1)
        assert rows[keys.TURN_SUCCESS].any(1)[ended].all()
        assert ended.all() == (name != "truncation-trap")
        if name != "early-decision":
            mask = rows[keys.TURN_MASK]
            assert torch.allclose(rows[keys.turn_extra("regret")][mask], torch.zeros(()), atol=1e-6)


def best_player(name: str):
    """The best answer to the messages of an episode, for a scripted policy that reads the
    context."""

    def messages(context: str) -> list[str]:
        parts = [part.split("<|im_end|>")[0].split() for part in context.split("<|im_start|>")[1:-1]]
        return [" ".join(part[1:]) for part in parts if part[0] == "user"]

    def answer(episode: int, turn: int, context: str) -> str:
        shown = messages(context)[-1].split()
        if name == "stairs":
            return Stairs().right_answer(int(shown[1]))
        if name == "truncation-trap":
            return "go"
        return RIGHT.get(shown[-1], shown[-1] if shown[-1] in RIGHT.values() else "hat")

    return answer


class TestDelayedReward:
    @pytest.mark.parametrize("delay", [1, 4])
    def test_the_first_answer_is_paid_at_the_end_and_nothing_else_matters(self, delay):
        world = DelayedReward(delay=delay)
        for seed, other in itertools.product(range(8), RIGHT.values()):
            weather = world.reset(seed)[0].split()[1]
            for first in RIGHT.values():
                _, rewards, infos = play(world, seed, lambda t, f=first, o=other: f if len(t) == 1 else o)
                right = first == RIGHT[weather]
                assert rewards == [0.0] * delay + [float(right)]
                assert infos[-1]["success"] == right
                assert [info["regret"] for info in infos] == [float(not right)] + [0.0] * delay

    def test_an_illegal_answer(self):
        world = DelayedReward(delay=1)
        _, rewards, _ = play(world, 0, lambda texts: "over")
        assert rewards == [-0.1, -0.1]


class TestDistractingRewards:
    def test_luck_does_not_depend_on_the_answer_and_is_not_shared_by_a_group(self):
        world = DistractingRewards(turns=5, noise=10.0)
        shown = Packed(0, "sun")
        for answer in (*RIGHT.values(), "nonsense"):
            outcomes = world.outcomes(shown, answer)
            assert sum(each.probability for each in outcomes) == pytest.approx(1.0)
            assert sum(each.probability for each in outcomes if each.reward > 0) == pytest.approx(0.5)
        lucks = {answer: [] for answer in ("hat", "coat")}
        for seed in range(400):
            for answer, found in lucks.items():
                world.reset(seed)
                found.append(world.step(answer)[1] > 0)
        agree = fmean(a == b for a, b in zip(*lucks.values(), strict=True))
        assert 0.4 < agree < 0.6

    def test_a_success_is_all_answers_right(self):
        world = DistractingRewards(turns=3)
        for wrong in (None, 0, 1, 2):

            def choose(texts, wrong=wrong):
                return "nonsense" if len(texts) // 2 == wrong else RIGHT[texts[-1].split()[1]]

            _, rewards, infos = play(world, 5, choose)
            assert infos[-1]["success"] == (wrong is None)
            assert all("success" not in info for info in infos[:-1])
            paid = [reward - (0.5 if reward > 0 else -0.5) for reward in rewards]
            assert paid == pytest.approx([-0.1 if turn == wrong else 1 / 3 for turn in range(3)])

    def test_the_variances_of_the_docstring(self):
        """Of the return, of the return from a turn on, and of a temporal difference with exact
        values, given the answers."""
        world = DistractingRewards(turns=4, noise=0.7)
        episodes = [play(world, seed, lambda texts: RIGHT[texts[-1].split()[1]])[1] for seed in range(3000)]
        rewards = torch.tensor(episodes, dtype=torch.float64)
        assert float(rewards.sum(1).var()) == pytest.approx(4 * 0.49, rel=0.1)
        to_go = rewards.flip(1).cumsum(1).var(0)
        # (turns + 1) / 2 of them, on average
        assert float(to_go.mean()) == pytest.approx(2.5 * 0.49, rel=0.1)
        assert float(rewards.var(0).mean()) == pytest.approx(0.49, rel=0.1)


class TestStairs:
    def test_states_are_revisited_at_different_turns(self):
        world, rng = Stairs(), random.Random(0)
        turns = {}
        for seed in range(200):
            _, _, infos = play(world, seed, lambda texts: rng.choice(world.ANSWERS))
            for turn, info in enumerate(infos):
                turns.setdefault(info["state"], set()).add(turn)
        assert set(turns) == {"floor 0", "floor 1", "floor 2", "floor 3"}
        assert all(len(each) >= 8 for each in turns.values())

    def test_a_right_answer_leads_up_a_wrong_one_down_and_an_illegal_one_nowhere(self):
        world = Stairs(height=4, turns=9)
        (seed,) = itertools.islice((s for s in range(100) if world.reset(s)[0] == "floor 2"), 1)
        plan = ["hat", "hat", "hat", "nonsense", "coat", "boots", "scarf"]
        texts, rewards, infos = play(world, seed, lambda texts: plan[len(texts) // 2])
        assert texts[::2] == [f"floor {i}" for i in (2, 1, 0, 1, 1, 2, 3)] + ["over"]
        assert rewards == [0.0, 0.0, 0.0, -0.1, 0.0, 0.0, 1.0]
        assert infos[-1]["success"]

    def test_alike_floors_show_the_same_and_want_different_things(self):
        world = Stairs(alike=True)
        shown = {}
        for seed in range(50):
            texts, _, infos = play(world, seed, lambda texts: "nonsense")
            assert texts[0] == infos[0]["state"]
            shown.setdefault(texts[2], set()).add(infos[0]["state"])
        assert shown == {"floor even": {"floor 0", "floor 2"}, "floor odd": {"floor 1", "floor 3"}}
        assert len({world.right_answer(floor) for floor in range(4)}) == 4
        assert optimal_success(world) == 1.0

    def test_limits(self):
        for wrong in ({"height": 0}, {"height": 11}, {"height": 4, "turns": 3}):
            with pytest.raises(ValueError, match="expected 1 to 10 floors"):
                Stairs(**wrong)


class TestTruncationTrap:
    def test_is_cut_off_and_not_over(self):
        world = TruncationTrap()
        ends = set()
        for seed in range(50):
            first = int(world.reset(seed)[0].split()[1])
            texts, rewards, infos = play(world, seed, lambda texts: "go")
            assert len(rewards) == min(first, 3)
            assert sum(rewards) == float(first <= 3)
            assert ("success" in infos[-1]) == (first <= 3)
            ends.add((first, texts[-1]))
        assert {(6, "far 3"), (5, "far 2"), (4, "far 1"), (3, "over")} <= ends

    def test_what_is_seen_of_an_episode_lies(self):
        """Far from the goal the rewards before the cut say stop, and the true values say go."""
        world = TruncationTrap()
        best = best_values(world)
        for far in (4, 5, 6):
            assert answer_value(world, far, "go", best) == 1.0 > answer_value(world, far, "stop", best) == 0.5
            (seed,) = itertools.islice((s for s in range(100) if world.reset(s)[0] == f"far {far}"), 1)
            assert sum(play(world, seed, lambda texts: "go")[1]) == 0.0 < sum(play(world, seed, lambda t: "stop")[1])

    def test_without_a_limit(self):
        world = TruncationTrap(limit=None)
        for seed in range(20):
            assert play(world, seed, lambda texts: "go")[2][-1]["success"]

    def test_limits(self):
        for wrong in ({"farthest": 0}, {"settle": 1.5}):
            with pytest.raises(ValueError, match="expected 1 to 9 steps"):
                TruncationTrap(**wrong)
        with pytest.raises(ValueError, match="expected at least 1 turn, or None"):
            TruncationTrap(limit=0)
