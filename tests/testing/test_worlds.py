"""Coins and KeyAndDoor: their rules, and that their optimum is exact."""

from __future__ import annotations

import itertools
import random

import make_worlds as maker
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from torchrl_llm import keys
from torchrl_llm.collectors import TurnCollector
from torchrl_llm.envs import ChatFormatter, GEMEnv, UnknownEnvironmentError
from torchrl_llm.testing.policies import ScriptedPolicy
from torchrl_llm.testing.take_away import TakeAway
from torchrl_llm.testing.tokenizers import word_tokenizer
from torchrl_llm.testing.worlds import (
    OPTIMA,
    WORLDS,
    Coins,
    Corridor,
    KeyAndDoor,
    Line,
    coins_optimum,
    key_and_door_optimum,
    most_worth,
    resolve_world,
)

EVERY_SEED = range(3000)
"""Seeds enough for every task of the default worlds to come up."""


def seed_of_each_task(world) -> dict:
    """A seed for every task: the environment itself must be able to start each of them."""
    found = {}
    for seed in EVERY_SEED:
        world.reset(seed)
        found.setdefault(world._line if isinstance(world, Coins) else world._now, seed)
    assert set(found) == set(world.tasks)
    return found


def play(world, seed: int, player) -> tuple[list[str], list[float], bool]:
    """Texts (message, response, ..., message), rewards and success of an episode."""
    texts, rewards, terminated = [world.reset(seed)[0]], [], False
    while not terminated:
        response = player(texts)
        message, reward, terminated, truncated, info = world.step(response)
        texts += [response, message]
        rewards.append(reward)
        assert not truncated
        assert ("success" in info) == terminated
    return texts, rewards, info["success"]


def outcomes(world, seeds: tuple[int, ...], answers, said: tuple[str, ...] = ()) -> set[frozenset[int]]:
    """What every policy achieves, by exhaustion: for each policy the seeds that it wins. The
    environment is replayed.

    Args:
        seeds: of tasks that the conversation so far cannot tell apart.
        said: the responses so far.
    """
    achieved = set()
    for answer in answers:
        groups, won = {}, set()
        for seed in seeds:
            world.reset(seed)
            for response in said:
                world.step(response)
            message, _, over, _, info = world.step(answer)
            if not over:
                groups.setdefault(message, []).append(seed)
            elif info["success"]:
                won.add(seed)
        parts = [outcomes(world, tuple(group), answers, (*said, answer)) for group in groups.values()]
        achieved |= {frozenset(won).union(*choice) for choice in itertools.product(*parts)}
    return achieved


# Tally, whose tasks are too many to list, has tests of its own: test_thinking_worlds.py.
@pytest.fixture(scope="module", params=["coins", "key-and-door"])
def name(request):
    return request.param


@pytest.fixture
def world(name):
    return WORLDS[name]()


class TestBoth:
    def test_the_scripted_player_reaches_the_optimum_over_all_tasks(self, name, world):
        wins = [play(world, seed, world.best_response)[2] for seed in seed_of_each_task(world).values()]
        assert sum(wins) / len(wins) == OPTIMA[name]()

    def test_same_seed_same_episode_and_nothing_else_disturbed(self, world):
        rng, state = random.Random(0), random.getstate()
        answers = [rng.choice([*world.WORDS, "?"]) for _ in range(20)]

        def player(texts):
            return answers[len(texts) // 2]

        episodes = [play(world, seed, player) for seed in range(20)]
        assert episodes == [play(type(world)(), seed, player) for seed in range(20)]
        assert len({episode[0][0] for episode in episodes}) > 1
        assert random.getstate() == state

    def test_an_illegal_answer_costs_a_turn_and_a_tenth(self, world):
        turns = len(play(world, 1, world.best_response)[1])
        first = world.reset(1)[0]
        for wrong in ("", "jump", "left left", "LEFT"):
            world.reset(1)
            message, reward, over, _, _ = world.step(wrong)
            assert reward == -0.1
            assert not over
            assert message.split()[-1] != "over"
        _, rewards, success = play(world, 1, lambda texts: "?")
        assert rewards == [-0.1] * len(rewards)
        assert not success
        assert len(rewards) == turns + (isinstance(world, KeyAndDoor))  # whose slack is a turn
        assert world.reset(1)[0] == first

    def test_white_space_around_an_answer_does_no_harm(self, world):
        world.reset(1)
        assert world.step(" left\n")[1] >= 0

    def test_a_row_has_at_most_200_tokens(self, world):
        formatter = ChatFormatter(word_tokenizer(world.WORDS))
        lengths = set()
        for seed in range(200):
            for player in (world.best_response, lambda texts: "over"):
                texts = play(world, seed, player)[0]
                lengths.add(len(maker.render(texts, formatter)[0]))
        assert max(lengths) == (98 if isinstance(world, KeyAndDoor) else 80)

    def test_wrong_use(self, world):
        with pytest.raises(RuntimeError, match="reset first"):
            type(world)().step("left")
        play(world, 0, world.best_response)
        with pytest.raises(RuntimeError, match="reset first"):
            world.step("left")

    def test_in_gem_env_the_best_player_succeeds_and_a_lazy_one_does_not(self, world):
        words = word_tokenizer(world.WORDS)

        def script(episode: int, turn: int, context: str) -> str:
            parts = [part.split("<|im_end|>")[0].split() for part in context.split("<|im_start|>")[1:-1]]
            return world.best_response([" ".join(part[1:]) for part in parts]) if episode % 2 else "left"

        env = GEMEnv(type(world), tokenizer=words, num_envs=8, max_model_len=200, max_output_tokens=2)
        policy = ScriptedPolicy(script, tokenizer=words, max_output_tokens=2, read_context=True)
        rows = TurnCollector(env, policy, batch_size=32).rollout()
        won = rows[keys.TURN_SUCCESS].any(1)
        odd = rows[keys.EPISODE_ID] % 2 == 1
        assert won[odd].all()
        assert not won[~odd].all()
        assert not rows[keys.TURN_TRUNCATED].any()
        assert torch.allclose(rows[keys.TURN_REWARD].sum(1)[odd], torch.tensor(1.0))

    def test_ids(self, name, world):
        spec = resolve_world(f"world:{name}")
        assert spec.name == f"world:{name}"
        assert type(spec.make()) is type(world)
        with pytest.raises(UnknownEnvironmentError, match="world:coins"):
            resolve_world("world:coin")


def test_a_game_of_two_players_has_an_id_too():
    assert isinstance(resolve_world("world:take-away").make(smallest=4), TakeAway)


class TestCoins:
    def test_five_turns(self):
        for seed in range(50):
            assert len(play(Coins(), seed, Coins.best_response)[1]) == 5

    @pytest.mark.parametrize(("cells", "moves", "worths"), [(4, 3, (2, 3)), (5, 4, (1, 2, 4)), (5, 6, (1, 1, 2))])
    def test_the_optimum_is_that_of_all_plans(self, cells, moves, worths):
        """Every sequence of moves, played in the environment: the best one collects what dynamic
        programming says."""
        world = Coins(cells=cells, moves=moves, worths=worths)
        wins = []
        for task, seed in seed_of_each_task(world).items():
            results = []
            for plan in itertools.product(Coins.MOVES, repeat=moves):
                texts, rewards, success = play(world, seed, lambda texts, plan=plan: plan[len(texts) // 2])
                results.append((sum(rewards), success))
                assert texts[0] == task.shown
            best = max(total for total, _ in results)
            assert best == pytest.approx(1.0)
            assert all(success == (total > best - 1e-9) for total, success in results)
            wins.append(any(success for _, success in results))
        assert sum(wins) / len(wins) == coins_optimum(world) == 1.0

    def test_most_worth_of_lines_worked_out_by_hand(self):
        assert most_worth(Line(1, (3, 0, 0, 9), moves=1)) == 3
        assert most_worth(Line(1, (3, 0, 0, 9), moves=2)) == 9
        assert most_worth(Line(1, (3, 0, 0, 9), moves=3)) == 9
        assert most_worth(Line(1, (3, 0, 0, 9), moves=4)) == 12

    def test_a_coin_is_collected_once_and_pays_its_share(self):
        world = Coins(cells=3, moves=4, worths=(1, 3))
        seed = seed_of_each_task(world)[Line(1, (1, 0, 3), 4)]
        moves = iter(["left", "left", "right", "right"])
        texts, rewards, success = play(world, seed, lambda texts: next(moves))
        assert texts[::2] == ["1 me 3 moves 4", "me 0 3 moves 3", "me 0 3 moves 2", "0 me 3 moves 1", "over"]
        assert rewards == [0.25, 0.0, 0.0, 0.75]
        assert success

    def test_known_shares_of_simple_players(self):
        """The figures of the docstring: nearest coin first, dearest coin first."""
        world = Coins()
        wins = {"nearest": 0, "dearest": 0}
        for seed in seed_of_each_task(world).values():
            for kind in wins:

                def player(texts, kind=kind):
                    line = Line.read(texts[-1])
                    coins = [(i, w) for i, w in enumerate(line.worths) if w]
                    order = {"nearest": lambda c: (abs(c[0] - line.cell), -c[1]), "dearest": lambda c: -c[1]}[kind]
                    return "left" if not coins or min(coins, key=order)[0] < line.cell else "right"

                wins[kind] += play(world, seed, player)[2]
        assert {kind: round(count / 150, 2) for kind, count in wins.items()} == {"nearest": 0.92, "dearest": 0.96}

    def test_a_discounted_objective_has_the_same_optimum(self):
        def discounted(line: Line) -> float:
            return max(w + 0.9 * discounted(after) for after, w in map(line.after, Coins.MOVES)) if line.moves else 0.0

        def player(texts):
            line = Line.read(texts[-1])
            nexts = {move: line.after(move) for move in Coins.MOVES}
            return max(nexts, key=lambda move: nexts[move][1] + 0.9 * discounted(nexts[move][0]))

        world = Coins()
        assert all(play(world, seed, player)[2] for seed in seed_of_each_task(world).values())

    def test_wrong_settings(self):
        for wrong in ({"moves": 0}, {"moves": 10}, {"cells": 2}, {"worths": (0, 1)}, {"worths": (10,)}):
            with pytest.raises(ValueError, match="expected 1 to 9 moves"):
                Coins(**wrong)


class TestKeyAndDoor:
    def test_eight_to_eleven_turns_are_needed_and_one_more_allowed(self):
        world = KeyAndDoor()
        needed = set()
        for task, seed in seed_of_each_task(world).items():
            best, lazy = (len(play(world, seed, p)[1]) for p in (world.best_response, lambda texts: "left"))
            assert best == task.needed
            assert lazy == best + 1
            needed.add(best)
        assert needed == {8, 9, 10, 11}

    def test_no_shorter_way_is_there(self):
        """Every plan of one turn less than needed, in a corridor short enough for all of them."""
        world = KeyAndDoor(cells=3, slack=0)
        for task, seed in seed_of_each_task(world).items():
            wins = []
            for plan in itertools.product(KeyAndDoor.ANSWERS, repeat=task.needed):
                texts, _, success = play(world, seed, lambda texts, plan=plan: plan[len(texts) // 2])
                wins += [len(texts) // 2] * success
            assert set(wins) == {task.needed}

    @pytest.mark.parametrize(
        ("cells", "slack", "told", "rate"),
        [(3, 0, True, 1.0), (3, 0, False, 0.5), (3, 1, False, 0.5), (3, 2, False, 1.0), (4, 0, False, 0.5)],
    )
    def test_the_optimum_is_that_of_all_policies(self, cells, slack, told, rate):
        world = KeyAndDoor(cells=cells, slack=slack, told=told)
        seeds = seed_of_each_task(world)
        groups = {}
        for task, seed in seeds.items():
            groups.setdefault(world.first_message(task), []).append(seed)
        # An illegal answer waits, as "take" in the hall does; with it the larger ones take ten
        # seconds.
        answers = (*KeyAndDoor.ANSWERS, *["?"] * (cells + slack == 3))
        wins = sum(max(map(len, outcomes(world, tuple(group), answers))) for group in groups.values())
        assert wins / len(seeds) == key_and_door_optimum(world) == rate

    def test_no_message_tells_whether_the_key_is_held(self):
        """With the key and without it, the same walk shows the same."""
        world = KeyAndDoor(slack=3)
        for task, seed in seed_of_each_task(world).items():
            there, back = ("left", "right") if task.key == 0 else ("right", "left")
            steps = abs(task.cell - task.key)
            shown = []
            for deed in ("take", "open"):
                world.reset(seed)
                shown.append([world.step(word)[0] for word in [there] * steps + [deed] + [back] * 5])
            assert shown[0] == shown[1]
            assert shown[0][-1] == "door"

    def test_the_door_opens_with_the_key_only_and_only_there(self):
        state = Corridor(3, key=0, cell=0, turns=9)
        walked = state.after("right").after("right")
        assert not walked.after("open").opened
        held = state.after("take").after("right")
        assert not held.after("open").opened
        assert held.after("right").after("open").opened
        assert not walked.after("take").holds

    def test_no_reward_before_the_end(self):
        world = KeyAndDoor()
        for seed in range(50):
            _, rewards, success = play(world, seed, world.best_response)
            assert success
            assert rewards == [0.0] * (len(rewards) - 1) + [1.0]

    def test_a_step_the_wrong_way_loses_and_a_wait_does_not(self):
        world = KeyAndDoor()
        for seed in range(50):
            wrong = "right" if world.reset(seed)[0].split()[1] == "left" else "left"
            for answer, wins in ((wrong, False), ("take", True)):
                success = play(world, seed, lambda t, a=answer: a if len(t) == 1 else world.best_response(t))[2]
                assert success == wins

    def test_the_hidden_state_is_the_task(self):
        world = KeyAndDoor()
        seen = set()
        for seed in EVERY_SEED:
            world.reset(seed)
            seen.add(repr(world.hidden_state()))
        assert len(seen) == len(world.tasks) == 8

    def test_wrong_settings(self):
        for wrong in ({"cells": 2}, {"slack": -1}):
            with pytest.raises(ValueError, match="expected at least 3 cells"):
                KeyAndDoor(**wrong)


class TestMaker:
    def test_players(self, name):
        """Nothing forgotten is best; all forgotten is legal, and loses most."""
        world, rng = WORLDS[name](), random.Random(0)
        for forget, low, high in ((0.0, 1.0, 1.0), (1.0, 0.0, 0.5)):
            player = maker.PLAYERS[name](forget)
            wins, rewards = 0, []
            for seed in range(100):
                _, earned, success = play(world, seed, lambda texts, p=player: p(texts, rng))
                wins += success
                rewards += earned
            assert low <= wins / 100 <= high
            assert min(rewards) >= 0

    def test_same_seed_same_model(self, name):
        # few tasks: two games may be the same
        recipe = maker.Recipe(careful_steps=2, forgetful_steps=1, games=8)
        (first, tokenizer), (second, _), (other, _) = (maker.make(name, seed=seed, recipe=recipe) for seed in (0, 0, 1))
        assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
        # No episode holds the padding: its embedding tells the initial weights. The first batch
        # tells the episodes.
        initial = [model.get_input_embeddings().weight[tokenizer.pad_token_id] for model in (first, other)]
        assert not torch.equal(*initial)
        batches = [next(maker.examples(name, tokenizer, recipe, seed))[0].tolist() for seed in (0, 0, 1)]
        assert batches[0] == batches[1] != batches[2]

    def test_what_is_saved_can_be_loaded(self, name, tmp_path):
        model, tokenizer = maker.make(name, seed=0, recipe=maker.Recipe(careful_steps=1, forgetful_steps=0, games=2))
        maker.save(model, tokenizer, tmp_path)
        again = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
        text = WORLDS[name]().reset(0)[0]
        assert again.encode(text) == tokenizer.encode(text)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
        assert 100_000 <= loaded.num_parameters() <= 130_000
        assert loaded.config.vocab_size == len(again)
