"""PlayerPolicy: chance that belongs to the turn, answers that are whole, and the same episodes
under every collector."""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch

from torchrl_llm import keys
from torchrl_llm.collectors import AsyncTurnCollector, TurnCollector
from torchrl_llm.envs import ChatFormatter, ControlTokenError, GEMEnv
from torchrl_llm.modules import PlayerError, PlayerPolicy
from torchrl_llm.testing.environments import Echo, StopOrGo
from torchrl_llm.testing.policies import ScriptedPolicy


def draws(context, rng):
    """Shows its chance."""
    return f"{rng.random():.6f}"


@pytest.fixture
def make(tokenizer):
    def make(player=draws, **options):
        encode = ChatFormatter(tokenizer).answer
        return PlayerPolicy(player, tokenizer, encode, **{"max_output_tokens": 12, **options})

    return make


def answers(policy, places, contexts=None, *, greedy=False):
    """The texts that a policy writes at (episode, turn), one call for all of them."""
    contexts = contexts or [f"Turn {turn}." for _, turn in places]
    ids = [torch.tensor(policy.tokenizer.encode(context)) for context in contexts]
    prompt = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=9)
    episode, turn = torch.tensor(places).T
    lengths = torch.tensor([len(each) for each in ids])
    slots = torch.arange(len(places))
    made = policy.generate(prompt, lengths, turn, episode, slots=slots, greedy=greedy)
    return [policy.tokenizer.decode(row[:size]) for row, size in zip(made.tokens, made.lengths, strict=True)]


PLACES = [(0, 0), (0, 1), (1, 0), (1, 1), (10, 1), (1, 11), (2**40, 0)]


class TestChance:
    def test_it_belongs_to_seed_episode_and_turn(self, make):
        texts = {(seed, *place): answers(make(seed=seed), [place])[0] for seed in (0, 1, 10) for place in PLACES}
        assert len({*texts.values()}) == len(texts)
        for (seed, episode, turn), text in texts.items():
            assert text == f"{random.Random(f'{seed} {episode} {turn}').random():.6f}<|im_end|>"

    def test_neighbors_and_order_change_nothing(self, make):
        policy = make(seed=3)
        together = dict(zip(PLACES, answers(policy, PLACES), strict=True))
        assert dict(zip(PLACES[::-1], answers(policy, PLACES[::-1]), strict=True)) == together
        assert {place: answers(policy, [place], greedy=True)[0] for place in PLACES} == together

    def test_the_global_generators_are_left_alone(self, make):
        before = random.getstate(), torch.get_rng_state()
        answers(make(), PLACES)
        assert before[0] == random.getstate()
        assert torch.equal(before[1], torch.get_rng_state())


class TestAnswers:
    def test_the_player_reads_the_whole_context_and_no_padding(self, make):
        seen = []
        contexts = ["<|im_start|>user\nhi , you<|im_end|>\n", "a longer context , with its spaces kept ."]
        texts = answers(make(lambda context, rng: seen.append(context) or "yes"), [(0, 0), (1, 0)], contexts)
        assert seen == contexts
        assert texts == ["yes<|im_end|>"] * 2

    @pytest.mark.parametrize("text", ["x" * 12, "x" * 30])
    def test_one_that_is_too_long_is_not_cut(self, make, text):
        match = rf"answer '{text}' has {len(text) + 1} tokens.*1 to 12 \(min_output_tokens=0, max_output_tokens=12\)"
        with pytest.raises(PlayerError, match=match):
            answers(make(lambda *_: text), [(0, 0)])
        assert answers(make(lambda *_: "x" * 11), [(0, 0)]) == ["x" * 11 + "<|im_end|>"]

    def test_one_whose_end_could_not_be_sampled_is_refused(self, make):
        match = r"answer 'xx' has 3 tokens.*expected 4 to 12 \(min_output_tokens=3"
        with pytest.raises(PlayerError, match=match):
            answers(make(lambda *_: "xx", min_output_tokens=3), [(0, 0)])
        assert answers(make(lambda *_: "xxx", min_output_tokens=3), [(0, 0)]) == ["xxx<|im_end|>"]

    @pytest.mark.parametrize("text", ["", " \n"])
    def test_an_empty_one_is_refused(self, make, text):
        with pytest.raises(PlayerError, match=r"The player's answer is '.*': there is nothing to imitate"):
            answers(make(lambda *_: text), [(0, 0)])

    def test_one_without_a_token_is_refused(self, tokenizer):
        policy = PlayerPolicy(lambda *_: "hm", tokenizer, lambda text: (), max_output_tokens=4)
        with pytest.raises(PlayerError, match="answer 'hm' has 0 tokens"):
            answers(policy, [(0, 0)])

    def test_a_special_token_is_refused(self, make):
        with pytest.raises(
            ControlTokenError, match=r"holds '<\|im_start\|>', a special token.*the end of the turn is added"
        ):
            answers(make(lambda *_: "a<|im_start|>"), [(0, 0)])

    def test_nobody_knows_its_log_probs(self, make):
        one = torch.ones(1, dtype=torch.int64)
        made = make().generate(one.view(1, 1), one, one, one, slots=one, greedy=False)
        assert made.log_probs.shape == made.tokens.shape == (1, 12)
        assert made.log_probs.isnan().all()
        assert not make().logprobs_match_trainer

    def test_versions_are_those_of_the_trained_policy(self, make, tokenizer):
        trained = ScriptedPolicy(lambda *_: "", tokenizer=tokenizer)
        trained.layer = torch.nn.Linear(2, 2)
        policy = make(trained=trained)
        one = torch.ones(1, dtype=torch.int64)
        for version in range(3):
            made = policy.generate(one.view(1, 1), one, one, one, slots=one, greedy=False)
            assert made.versions.unique().tolist() == [version]
            trained.weights_changed()
        assert not [*policy.parameters()], "the trained weights are none of the player's"
        alone = make().generate(one.view(1, 1), one, one, one, slots=one, greedy=False)
        assert alone.versions.unique().tolist() == [0]


class TestCollectors:
    """The same rows, however many slots and whoever steps them."""

    @staticmethod
    def stops_by_chance(context, rng):
        return f"{rng.choice(['stop', 'go on'])} {rng.randrange(10)}"

    @pytest.mark.parametrize("environment", [StopOrGo, partial(Echo, turns=3)], ids=["StopOrGo", "Echo"])
    def test_rows_are_equal(self, make, tokenizer, environment):
        def batches(collector_class, slots, **options):
            env = GEMEnv(environment, tokenizer=tokenizer, num_envs=slots, max_output_tokens=16)
            policy = make(self.stops_by_chance, max_output_tokens=16, seed=5)
            collector = collector_class(env, policy, batch_size=8, total_batches=2, **options)
            found = [batch.clone() for batch in collector]
            collector.shutdown()
            return found

        first = batches(TurnCollector, 8)
        for others in (
            batches(TurnCollector, 3),
            batches(AsyncTurnCollector, 3),
            batches(AsyncTurnCollector, 5, num_threads=0),
        ):
            for batch, other in zip(first, others, strict=True):
                action = batch[keys.TURN_IDS] >= 0
                assert batch[keys.SAMPLE_LOG_PROB].isnan().equal(action)
                assert other[keys.SAMPLE_LOG_PROB].isnan().equal(action)
                assert (batch.exclude(keys.SAMPLE_LOG_PROB) == other.exclude(keys.SAMPLE_LOG_PROB)).all()
        texts = {
            tokenizer.decode(row[ids == 0])
            for batch in first
            for row, ids in zip(batch["tokens"], batch["turn_ids"], strict=True)
        }
        assert len(texts) > 4
