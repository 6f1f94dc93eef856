"""Tally: its rules, the template that drops thoughts, and that the model which learns it clones the
contexts that are sampled."""

from __future__ import annotations

import itertools
import random

import make_worlds as maker
import pytest
import torch

from torchrl_llm import keys
from torchrl_llm.envs import AsTemplate, ChatFormatter, GEMEnv, Response
from torchrl_llm.testing.policies import ScriptedPolicy
from torchrl_llm.testing.thinking_worlds import Tally, digits, tally_optimum, with_thought
from torchrl_llm.testing.tokenizers import word_tokenizer
from torchrl_llm.testing.worlds import OPTIMA, resolve_world

PLAIN = {"enable_thinking": False}


def said(whole: str) -> Response:
    """A response as an environment gets it."""
    return Response(whole, text=whole.rpartition("</think>")[2].strip(), thinking="some")


def play(world: Tally, seed: int, player) -> tuple[list[str], list[float], bool]:
    """Texts, rewards and success of an episode."""
    texts, rewards, over = [world.reset(seed)[0]], [], False
    while not over:
        texts.append(player(texts))
        message, reward, over, _, info = world.step(said(texts[-1]))
        texts.append(message)
        rewards.append(reward)
        assert ("success" in info) == over
    return texts, rewards, info["success"]


class TestTally:
    def test_what_the_changes_make_of_each_digit(self):
        """Worked out by hand."""
        after = {name: "".join(str(digits(start, [name])[0]) for start in range(10)) for name in Tally.CHANGES}
        assert after == {"plus": "1234567890", "triple": "0369258147", "mirror": "9876543210"}

    def test_the_best_player_always_wins_with_its_thoughts_or_without(self):
        for player in (Tally.best_response, lambda texts: Tally.best_response(texts)[-1]):
            for seed in range(50):
                _, rewards, success = play(Tally(), seed, player)
                assert success
                assert rewards == [0.25] * 4
        assert OPTIMA["tally"]() == tally_optimum() == 1.0

    def test_the_order_of_changes_matters(self):
        """So no count of them is enough: the best answer that only knows how many there are of each
        is right in far less than all messages."""
        right = {}
        for changes in itertools.product(Tally.CHANGES, repeat=4):
            for start in range(10):
                ends = right.setdefault((start, *sorted(changes)), [])
                ends.append(digits(start, changes)[-1])
        best = sum(max(map(ends.count, ends)) for ends in right.values())
        assert best / (10 * 3**4) == pytest.approx(0.37, abs=0.005)

    def test_a_wrong_digit_is_continued_from_and_loses(self):
        world = Tally(rounds=3, changes=1)
        seed = next(seed for seed in range(999) if world.reset(seed) and world.hidden_state() == [["plus"]] * 3)
        world.reset(seed)
        assert [world.step(said(f"<think> 1 </think> {digit}"))[1] for digit in "13"] == [1 / 3, 0.0]
        _, reward, over, truncated, info = world.step(said("4"))
        assert (reward, over, truncated, info) == (1 / 3, True, False, {"success": False})

    def test_an_illegal_answer_costs_a_tenth_and_leaves_the_digit(self):
        for wrong in ("", "plus", "1 1", "10", "<think> 1"):
            world = Tally(rounds=2, changes=1)
            seed = next(seed for seed in range(999) if world.reset(seed) and world.hidden_state() == [["plus"]] * 2)
            world.reset(seed)
            assert world.step(Response(wrong, text=wrong))[:3] == ("plus", -0.1, False)
            assert world.step("1")[1:] == (0.5, True, False, {"success": False})
            assert Tally.best_response(["plus", wrong, "plus"])[-1] == "1"

    def test_same_seed_same_task(self):
        tasks = []
        for seed in (0, 0, 1):
            world = Tally()
            world.reset(seed)
            tasks.append(world.hidden_state())
        assert tasks[0] == tasks[1] != tasks[2]

    def test_wrong_use(self):
        for wrong in ({"rounds": 0}, {"changes": 0}):
            with pytest.raises(ValueError, match="expected at least 1 of each"):
                Tally(**wrong)
        with pytest.raises(RuntimeError, match="reset first"):
            Tally().step("1")

    def test_ids(self):
        assert isinstance(resolve_world("world:tally").make(), Tally)


# ---------------------------------------- the template


@pytest.fixture(scope="module")
def tokenizer():
    return maker.tokenizer_of("tally")


class TestTokenizer:
    @pytest.mark.parametrize("kwargs", [{}, PLAIN])
    def test_contexts_are_what_the_template_shows(self, tokenizer, kwargs):
        """Token for token, of all turns of episodes."""
        formatter = ChatFormatter(tokenizer, chat_template_kwargs=kwargs)
        assert formatter.rule == AsTemplate()
        prompts, episodes = sampled(tokenizer, kwargs)
        assert len(prompts) == 4 * len(episodes)
        for episode, texts in enumerate(episodes):
            for turn in range(4):
                roles = itertools.cycle(["user", "assistant"])
                messages = [
                    {"role": role, "content": text} for role, text in zip(roles, texts[: 2 * turn + 1], strict=False)
                ]
                shown = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **kwargs)
                assert tokenizer.encode(shown) == prompts[episode, turn]
                assert tokenizer.decode(prompts[episode, turn]).count("<think>") == bool(kwargs)

    def test_it_has_a_token_for_any_other_word_only_if_it_thinks(self, tokenizer):
        assert tokenizer.decode(tokenizer.encode("plus jump")) == "plus <unk>"
        with pytest.raises(Exception, match="UNK"):
            word_tokenizer(Tally.WORDS).encode("plus jump")
        with pytest.raises(ValueError, match="expected distinct words"):
            word_tokenizer(["</think>"], thinks=True)


def sampled(tokenizer, kwargs, *, count: int = 6) -> tuple[dict[tuple[int, int], list[int]], list[list[str]]]:
    """What a scripted player sees of each turn of some episodes in :class:`GEMEnv`, and the texts
    of the episodes."""
    rng, player = random.Random(3), maker.tally_player(0.5)
    episodes = [maker.play(Tally(), seed, player, rng) for seed in range(count)]
    if kwargs:
        episodes = [[text.rpartition("</think>")[2].strip() for text in texts] for texts in episodes]

    class Replayed(Tally):
        """The episodes in their order."""

        made = itertools.count()

        def reset(self, seed=None):
            return super().reset(next(self.made))

    def script(episode: int, turn: int, context: str) -> str:
        return episodes[episode][2 * turn + 1]

    env = GEMEnv(Replayed, tokenizer=tokenizer, num_envs=1, max_output_tokens=16, chat_template_kwargs=kwargs)
    policy = ScriptedPolicy(script, tokenizer=tokenizer, max_output_tokens=16)
    prompts = {}
    for episode in range(count):
        rollout = env.rollout(4, policy)
        assert rollout.shape == (1, 4)
        for turn, step in enumerate(rollout[0]):
            prompts[episode, turn] = step["tokens", "prompt"][: step["tokens", "prompt_length"]].tolist()
    return prompts, episodes


# ---------------------------------------- the model


class TestMaker:
    @pytest.mark.parametrize("kwargs", [{}, PLAIN])
    def test_what_is_cloned_is_what_is_sampled(self, tokenizer, kwargs):
        prompts, episodes = sampled(tokenizer, kwargs)
        formatter = ChatFormatter(tokenizer, chat_template_kwargs=kwargs)
        for episode, texts in enumerate(episodes):
            for turn, (ids, mask) in enumerate(maker.samples(texts, formatter)):
                context, response = prompts[episode, turn], [*tokenizer.encode(texts[2 * turn + 1]), 2]
                assert ids == context + response
                assert mask == [False] * len(context) + [True] * len(response)

    def test_a_batch_has_all_turns_with_and_without_thoughts(self, tokenizer):
        texts = ["plus", "<think> 1 </think> 1", "plus", "<think> 2 </think> 2", "over"]
        ids, mask = maker.with_and_without_thoughts(tokenizer)([texts])
        shown = [tokenizer.decode(row[acting]) for row, acting in zip(ids, mask, strict=True)]
        thinking = ["<think> 1 </think> 1 <|im_end|>", "<think> 2 </think> 2 <|im_end|>"]
        assert shown == [*thinking, "1 <|im_end|>", "2 <|im_end|>"]
        assert [tokenizer.decode(row).count("<think> </think>") for row in ids] == [0, 0, 1, 1]

    def test_it_can_clone_contexts_that_keep_thoughts(self, tokenizer):
        texts = ["plus", "<think> 1 </think> 1", "plus", "<think> 2 </think> 2", "over"]
        ids, mask = maker.with_and_without_thoughts(tokenizer, "append")([texts])
        shown = tokenizer.decode(ids[1, : mask[1].int().argmax()])
        assert shown.count("<think> 1 </think> 1") == 1

    def test_players(self):
        """One that never slips wins; one that always slips is legal, thinks half of the time, and
        is right now and then."""
        rng = random.Random(0)
        for forget, wins in ((0.0, 1.0), (1.0, 0.0)):
            player = maker.PLAYERS["tally"](forget)
            played = [play(Tally(), seed, lambda texts, p=player: p(texts, rng)) for seed in range(100)]
            assert sum(success for *_, success in played) / 100 == pytest.approx(wins, abs=0.05)
            assert min(min(rewards) for _, rewards, _ in played) >= 0
        responses = [response for texts, *_ in played for response in texts[1::2]]
        assert sum(response.startswith("<think>") for response in responses) / 400 == pytest.approx(0.5, abs=0.1)
        assert sum(sum(rewards) for _, rewards, _ in played) / 100 == pytest.approx(0.25, abs=0.08)

    def test_a_thought_ends_in_its_answer(self):
        assert with_thought([3, *digits(3, ["mirror", "plus"])]) == "<think> 3 6 7 </think> 7"

    def test_same_seed_same_model(self):
        recipe = maker.Recipe(careful_steps=1, forgetful_steps=1, games=2)
        (first, _), (second, _), (other, _) = (maker.make("tally", seed=seed, recipe=recipe) for seed in (0, 0, 1))
        assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
        assert not torch.equal(first.lm_head.weight, other.lm_head.weight)
        assert first.num_parameters() == 110_016

    def test_a_player_in_gem_env_is_paid_for_what_stands_behind_its_thinking(self, tokenizer):
        def script(episode: int, turn: int, context: str) -> str:
            parts = [part.split("<|im_end|>")[0].split() for part in context.split("<|im_start|>")[1:-1]]
            return Tally.best_response([" ".join(part[1:]) for part in parts])

        env = GEMEnv(Tally, tokenizer=tokenizer, num_envs=8, max_output_tokens=16)
        policy = ScriptedPolicy(script, tokenizer=tokenizer, max_output_tokens=16, read_context=True)
        rollout = env.rollout(4, policy)
        assert rollout["next", keys.SUCCESS][:, -1].all()
        assert torch.allclose(rollout["next", "reward"].sum(1), torch.tensor(1.0))
        assert rollout["segment"][:, -1].unique().tolist() == [3]
