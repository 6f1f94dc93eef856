"""The enumerable game: its conversations are all there are, and what it says of them agrees with
other ways to know it."""

from __future__ import annotations

import itertools
from functools import cache

import pytest
import torch
from torch import nn

from torchrl_llm import keys
from torchrl_llm.modules import TokenScorer, TurnCritic
from torchrl_llm.objectives import LLMReinforceLoss
from torchrl_llm.testing.enumerable import (
    EnumerableMDP,
    Step,
    batch_gradient,
    make_dyadic,
    relative_error,
    small_talk,
    tiny_lm,
)


@pytest.fixture(scope="module")
def mdp():
    return EnumerableMDP()


@pytest.fixture(scope="module")
def actor():
    return TokenScorer(tiny_lm(0))


def both(mdp: EnumerableMDP):
    return [mdp, mdp.uncut]


class TestConversations:
    def test_the_game_has_what_credit_can_get_wrong(self, mdp):
        rows = mdp.rows()
        lengths = torch.nn.functional.one_hot(rows[keys.TURN_IDS] + 1, 3)[..., 1:].sum(1)
        played = rows[keys.TURN_MASK]
        assert len(rows) == 28
        assert len(mdp.uncut.rows()) == 44
        assert set(rows[keys.GROUP_ID].tolist()) == {0, 1}
        assert set(lengths[played].tolist()) == {0, 1, 2}  # a turn without tokens among them
        assert (rows[keys.TURN_REWARD][played] != 0).sum() > 40  # rewards on (nearly) every turn
        assert (played.sum(1) == 1).any()  # early ends
        assert int(rows[keys.TURN_TRUNCATED].sum()) == 9
        assert not mdp.uncut.rows()[keys.TURN_TRUNCATED].any()
        assert (rows[keys.TURN_TERMINATED] | rows[keys.TURN_TRUNCATED]).sum() == len(rows)

    @pytest.mark.parametrize("seed", range(3))
    def test_the_conversations_are_all_there_are(self, mdp, seed):
        actor = TokenScorer(tiny_lm(seed))
        for game in both(mdp):
            probability = game.log_probability(actor).exp()
            task = game.rows()[keys.GROUP_ID]
            for label in (0, 1):
                torch.testing.assert_close(probability[task == label].sum().item(), 0.5, rtol=0, atol=1e-12)
            assert len({tuple(row) for row in game.rows()[keys.TOKENS].tolist()}) == len(task)

    def test_probabilities_are_those_of_the_language_model(self, mdp, actor):
        rows = mdp.rows(actor)
        for row in rows:
            tokens = row[keys.TOKENS][row[keys.ATTENTION_MASK]]
            log_probs = actor.model(tokens.unsqueeze(0)).logits[0].log_softmax(-1)
            for i in range(len(tokens)):
                expected = log_probs[i - 1, tokens[i]] if row[keys.TURN_IDS][i] >= 0 else torch.zeros(())
                assert abs(row[keys.SAMPLE_LOG_PROB][i].item() - expected.item()) < 1e-12

    def test_everything_is_float64(self, mdp, actor):
        rows, critic = mdp.rows(actor), TurnCritic(tiny_lm(1))
        nn.init.ones_(critic.value_head.weight)
        values = critic(rows.clone())
        for value in (rows[keys.SAMPLE_LOG_PROB], rows[keys.TURN_REWARD], values[keys.STATE_VALUE]):
            assert value.dtype == torch.float64
        assert values[keys.BOOTSTRAP_VALUE].unique().numel() == len(rows)

    def test_the_cut_game_is_the_beginning_of_the_whole_one(self, mdp):
        def texts(rows):
            return [tuple(row[keys.TOKENS][row[keys.ATTENTION_MASK]].tolist()) for row in rows]

        whole = texts(mdp.uncut.rows())
        for row, tokens in zip(mdp.rows(), texts(mdp.rows()), strict=True):
            if row[keys.TURN_TRUNCATED].any():
                assert any(tokens == each[: len(tokens)] for each in whole)
            else:
                assert tokens in whole

    def test_the_global_random_state_is_left_alone(self):
        before = torch.random.get_rng_state()
        first, second = tiny_lm(3), tiny_lm(3)
        assert torch.equal(before, torch.random.get_rng_state())
        assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
        assert not torch.equal(first.lm_head.weight, tiny_lm(4).lm_head.weight)

    def test_games_that_cannot_be_listed(self):
        with pytest.raises(ValueError, match="max_turns"):
            EnumerableMDP(lambda task, said: Step(0.0, (0,), 0), max_turns=None).rows()
        with pytest.raises(ValueError, match="too many"):
            EnumerableMDP(lambda task, said: Step(0.0, (0,), 4), max_turns=5).rows()
        with pytest.raises(ValueError, match="max_turns is 0"):
            EnumerableMDP(max_turns=0)


class TestExpectations:
    @pytest.mark.parametrize("gamma", [1.0, 0.7])
    def test_values_satisfy_the_bellman_equation(self, mdp, actor, gamma):
        """Played with the rules alone: from a context, the value is the mean over what can be said
        next."""

        @cache
        def chances(context):
            return actor.model(torch.tensor([context])).logits[0, -1].softmax(-1)

        def value(task, said, context):
            step = small_talk(task, said)
            context = context + step.feedback
            if step.limit is None:
                return torch.zeros((), dtype=torch.float64)
            return action_value(task, said, (), context, step.limit)

        def action_value(task, said, partial, context, limit):
            if len(partial) == limit or partial[-1:] == (2,):
                now = (*said, partial)
                return small_talk(task, now).reward + gamma * value(task, now, context)
            return sum(
                chance * action_value(task, said, (*partial, token), (*context, token), limit)
                for token, chance in enumerate(chances(context))
            )

        with torch.no_grad():
            state_value, bootstrap_value = mdp.state_values(actor, gamma)
            for row, values, bootstrap in zip(mdp.rows(), state_value, bootstrap_value, strict=True):
                tokens, ids = row[keys.TOKENS].tolist(), row[keys.TURN_IDS].tolist()
                said = [tuple(t for t, i in zip(tokens, ids, strict=True) if i == k) for k in range(2)]
                task, first = int(row[keys.GROUP_ID]), ids.index(0)
                assert abs(values[first] - value(task, (), ())) < 1e-12
                if len(said[0]) == 2:  # in the middle of a turn
                    expected = action_value(task, (), said[0][:1], tuple(tokens[: first + 1]), 2)
                    assert abs(values[first + 1] - expected) < 1e-12
                if 1 in ids:
                    second = ids.index(1)
                    context = tuple(tokens[: first + len(said[0])])
                    assert abs(values[second] - value(task, (said[0],), context)) < 1e-12
                if row[keys.TURN_TRUNCATED].any():
                    step = small_talk(task, tuple(said))
                    whole = tuple(tokens[: int(row[keys.ATTENTION_MASK].sum())])
                    context = whole[: len(whole) - len(step.feedback)]
                    assert abs(bootstrap - value(task, tuple(said), context)) < 1e-12
                else:
                    assert bootstrap == 0

    def test_the_gradient_is_the_slope_of_the_objective(self, mdp):
        actor = TokenScorer(tiny_lm(5))
        gradient = mdp.policy_gradient(actor)
        direction = torch.randn(len(gradient), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        point = nn.utils.parameters_to_vector(actor.parameters()).detach()

        def at(step):
            nn.utils.vector_to_parameters(point + step * direction, actor.parameters())
            return mdp.objective(actor).item()

        slope = (8 * (at(1e-3) - at(-1e-3)) - (at(2e-3) - at(-2e-3))) / 12e-3
        assert abs(slope - (gradient @ direction).item()) < 1e-7 * abs(slope)

    def test_returns_and_bootstrap(self, mdp):
        rows, bootstrap = mdp.rows(), torch.arange(28.0, dtype=torch.float64)
        for row, figure in zip(rows, mdp.returns(0.7, bootstrap), strict=True):
            played = int(row[keys.TURN_MASK].sum())
            expected = sum(0.7**k * row[keys.TURN_REWARD][k].item() for k in range(played))
            if row[keys.TURN_TRUNCATED].any():
                expected += 0.7**played * row[keys.EPISODE_ID].item()
            assert abs(figure.item() - expected) < 1e-12

    def test_frozen_turns_have_no_gradient(self, mdp, actor):
        assert mdp.policy_gradient(actor, frozen_from=0).abs().max() == 0
        partly = mdp.policy_gradient(actor, frozen_from=1)
        assert relative_error(partly, mdp.policy_gradient(actor)) > 0.01
        torch.testing.assert_close(mdp.policy_gradient(actor, frozen_from=2), mdp.policy_gradient(actor))


class TestBatches:
    @pytest.mark.parametrize("same_task", [False, True])
    def test_multisets_stand_for_all_ordered_batches(self, actor, same_task):
        mdp = EnumerableMDP(max_turns=1)
        p, task = mdp.log_probability(actor).detach().exp(), mdp.rows()[keys.GROUP_ID].tolist()
        index, probability = mdp.batches(actor, 3, same_task=same_task)
        ordered: dict[tuple[int, ...], float] = {}
        for members in itertools.product(range(len(task)), repeat=3):
            if same_task and len({task[i] for i in members}) > 1:
                continue
            # the task is drawn once, not thrice
            chance = float(p[list(members)].prod()) * (4 if same_task else 1)
            ordered[tuple(sorted(members))] = ordered.get(tuple(sorted(members)), 0.0) + chance
        found = dict(zip(map(tuple, index.tolist()), probability.tolist(), strict=True))
        assert found == pytest.approx(ordered, rel=1e-12)
        assert sum(found.values()) == pytest.approx(1.0, abs=1e-12)

    def test_the_expected_gradient_is_the_mean_of_the_batches_gradients(self, actor):
        """One backward pass over all batches, or each batch by itself: weights and statistics of
        its own."""
        mdp = EnumerableMDP(max_turns=1)
        policy_loss = LLMReinforceLoss(actor, kl_coeff=0.0, weighting="token")
        rows, index_and_p = mdp.rows(actor).exclude(keys.EPISODE_ID), mdp.batches(actor, 2)
        mean = sum(p * batch_gradient(policy_loss, rows[members]) for members, p in zip(*index_and_p, strict=True))
        assert relative_error(mdp.expected_gradient(policy_loss, 2), mean) < 1e-10

    def test_the_population_is_the_policy(self, mdp):
        actor = TokenScorer(make_dyadic(tiny_lm(2)))
        population = mdp.population(actor, 512)
        names = keys.TOKENS, keys.TURN_IDS
        said, found = (torch.cat([rows[name] for name in names], 1) for rows in (mdp.rows(), population))
        share = (found.unsqueeze(1) == said).all(-1).sum(0) / 512
        torch.testing.assert_close(share.double(), mdp.log_probability(actor).detach().exp(), rtol=0, atol=1e-12)
        assert mdp.policy_gradient(actor).norm() > 0.01
        with pytest.raises(ValueError, match="multiples of 1/256"):
            mdp.population(actor, 256)
