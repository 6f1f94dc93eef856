"""The probes: their optima are what is said, sound algorithms reach them, and broken ones do
not."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable

import pytest
import torch
from instances import usual
from tensordict.nn import TensorDictModuleBase

from torchrl_llm import keys
from torchrl_llm.modules import SamplingConfig, TokenScorer, TurnCritic
from torchrl_llm.objectives import LLMPPOLoss, LLMReinforceLoss, ReBN, TurnGAE
from torchrl_llm.testing.probes import (
    ALGORITHMS,
    PROBES,
    WORDS,
    ConditionalAnswer,
    ConstantAnswer,
    DelayedReward,
    EarlyDecision,
    KnownValue,
    Probe,
    Solution,
    TimeLimit,
    assess,
    episodes,
    solve,
)
from torchrl_llm.testing.tiny import random_model
from torchrl_llm.testing.tokenizers import word_tokenizer

VALUES = [probe for probe in PROBES if probe.values is not None]
TOKENS = len(word_tokenizer(WORDS))
TRIALS = [(probe, algo) for probe in PROBES for algo in ALGORITHMS if probe not in VALUES or algo == "LLMPPO"]


class TwoBatches(ConstantAnswer):
    iterations = 2


def games(probe: type[Probe]) -> list[Probe]:
    return [probe(task) for task in range(len(probe.asks))]


def play(game: Probe, player: Callable[[int, str], str]) -> tuple[list[str], list[float]]:
    """The messages and rewards of a game; the player answers to a turn and its message."""
    message, _ = game.reset()
    messages, rewards = [message], []
    for turn in range(len(game.asks[0])):
        message, reward, *_ = game.step(player(turn, message))
        messages.append(message)
        rewards.append(reward)
    return messages, rewards


class TestProbes:
    @pytest.mark.parametrize("probe", PROBES)
    def test_the_optimum_is_the_mean_return_of_the_best_of_all_players(self, probe):
        heard = sorted({(k, m) for game in games(probe) for k, m in enumerate(play(game, lambda *_: "left")[0][:-1])})
        means = []
        for words in itertools.product(WORDS, repeat=len(heard)):
            player = dict(zip(heard, words, strict=True))
            returns = [sum(play(game, lambda *said, by=player: by[said])[1]) for game in games(probe)]
            means.append(sum(returns) / len(returns))
        assert max(means) == probe.optimum

    @pytest.mark.parametrize("probe", VALUES)
    def test_values_are_discounted_returns_whatever_is_said_averaged_over_games_that_look_alike(self, probe):
        for words in itertools.product(WORDS, repeat=len(probe.asks[0])):
            heard, paid = [], []
            for game, values in zip(games(probe), probe.values, strict=True):
                messages, rewards = play(game, lambda turn, _, said=words: said[turn])
                heard.append(messages)
                paid.append([*rewards, 0.0 if game.over() else values[-1]])
            for task, turn in itertools.product(range(len(heard)), range(len(words))):
                alike = [i for i, messages in enumerate(heard) if messages[: turn + 1] == heard[task][: turn + 1]]
                to_go = [sum(probe.gamma**k * reward for k, reward in enumerate(paid[i][turn:])) for i in alike]
                assert sum(to_go) / len(alike) == probe.values[task][turn]

    def test_only_the_game_that_goes_on_for_ever_is_cut_off(self):
        rows = episodes(TimeLimit)
        assert torch.equal(rows[keys.TURN_TRUNCATED].any(1), rows[keys.ENV_ID] == 0)
        assert torch.equal(rows[keys.TURN_TERMINATED].any(1), rows[keys.ENV_ID] == 1)

    def test_without_a_critic_a_game_that_is_cut_off_is_worth_what_it_paid(self):
        """What LLMREINFORCE takes both games for, where the critic says 2 and 2 of the one that
        continues."""
        target = ReBN(gamma=TimeLimit.gamma)(episodes(TimeLimit))[keys.TURN_VALUE_TARGET]
        assert torch.equal(target, torch.tensor([[1.5, 1.0]]).expand_as(target))


class TestAssess:
    def parts(self, seed: int = 0) -> tuple[TokenScorer, TurnCritic]:
        model = random_model(word_tokenizer(WORDS), hidden=16, layers=1, seed=seed)
        actor = TokenScorer(model, SamplingConfig(max_output_tokens=1, stop_ids=()))
        return actor, TurnCritic(copy.deepcopy(model.model))

    @pytest.mark.parametrize("probe", [ConditionalAnswer, DelayedReward, TimeLimit])
    def test_every_conversation_is_listed_once(self, probe):
        rows = episodes(probe)
        said = rows[keys.TOKENS][rows[keys.TURN_IDS] >= 0].view(len(rows), -1)
        listed = torch.cat([rows[keys.ENV_ID].unsqueeze(1), said], 1).unique(dim=0)
        assert len(listed) == len(rows) == len(probe.asks) * TOKENS ** len(probe.asks[0])

    def test_a_uniform_player(self):
        actor, critic = self.parts()
        actor.model.lm_head.weight.data.zero_()
        assert assess(ConditionalAnswer, actor, critic).share == pytest.approx(1 / TOKENS)
        assert assess(EarlyDecision, actor, critic).share == pytest.approx((1 / TOKENS**2 + 0.25 / TOKENS) / 1.125)

    def test_a_critic_that_says_half_everywhere(self):
        actor, critic = self.parts()
        critic.value_head.bias.data.fill_(0.5)
        assert assess(KnownValue, actor, critic).value_error == pytest.approx(0.5)
        assert assess(TimeLimit, actor, critic).value_error == pytest.approx(1.5)

    def test_rows_whose_turn_ids_are_off_by_one_are_refused(self, monkeypatch):
        rows = episodes(ConstantAnswer)
        rows[keys.TURN_IDS] = rows[keys.TURN_IDS].roll(-1, 1)
        monkeypatch.setattr("torchrl_llm.testing.probes.episodes", lambda probe: rows)
        with pytest.raises(ValueError, match="add up to"):
            assess(ConstantAnswer, *self.parts())


class TestSolve:
    @pytest.mark.parametrize(("probe", "algo"), usual(TRIALS, 3))
    def test_every_algorithm_solves_every_probe(self, probe, algo):
        solution = solve(probe, ALGORITHMS[algo])
        assert solution.solved, f"{solution}. {probe.__doc__}"

    @pytest.mark.extra
    @pytest.mark.parametrize(("probe", "algo"), TRIALS)
    def test_and_with_another_seed(self, probe, algo):
        assert solve(probe, ALGORITHMS[algo], seed=1).solved

    def test_two_batches_are_not_enough(self):
        assert not solve(TwoBatches, ALGORITHMS["GRPO"]).solved

    def test_values_need_a_critic(self):
        with pytest.raises(ValueError, match="KnownValue is about values; LLMGRPOLoss has no critic"):
            solve(KnownValue, ALGORITHMS["GRPO"])

    def test_the_global_generators_are_left_alone(self):
        states = random.getstate(), torch.get_rng_state()
        solve(TwoBatches, ALGORITHMS["LLMPPO"])
        assert random.getstate() == states[0]
        assert torch.equal(torch.get_rng_state(), states[1])

    def test_what_counts_as_solved(self):
        assert Solution(share=0.97).solved
        assert not Solution(share=0.96).solved
        assert Solution(share=0.0, value_error=0.1).solved
        assert not Solution(share=1.0, value_error=0.11).solved


class WrongSign(LLMReinforceLoss):
    def objective(self, log_ratio, advantage):
        return super().objective(log_ratio, -advantage)


class DetachedRatio(LLMReinforceLoss):
    def objective(self, log_ratio, advantage):
        return super().objective(log_ratio.detach() + 0.0 * log_ratio, advantage)


class FirstTurnsCredit(ReBN):
    def estimate(self, tensordict):
        figures = super().estimate(tensordict)
        figures["turn_advantage"][:, 1:] = 0.0
        return figures


class LastTurnsCredit(ReBN):
    def estimate(self, tensordict):
        figures = super().estimate(tensordict)
        figures["turn_advantage"][:, :-1] = 0.0
        return figures


class NeighboursCredit(ReBN):
    """Every conversation gets the advantages of the next one."""

    def estimate(self, tensordict):
        figures = super().estimate(tensordict)
        return figures | {"turn_advantage": figures["turn_advantage"].roll(1, 0)}


class NoBootstrap(TurnGAE):
    """Takes what was cut off for over."""

    def estimate(self, tensordict):
        over = tensordict[keys.TURN_TERMINATED] | tensordict[keys.TURN_TRUNCATED]
        return super().estimate(tensordict.clone(recurse=True).set(keys.TURN_TERMINATED, over))


class BlindActor(TensorDictModuleBase):
    """Scores the answers without having seen the messages."""

    def __init__(self, actor: TokenScorer) -> None:
        super().__init__()
        self.actor = actor
        self.in_keys, self.out_keys = actor.in_keys, actor.out_keys

    def forward(self, tensordict):
        answers = torch.where(tensordict[keys.TURN_IDS] >= 0, tensordict[keys.TOKENS], 0)
        return self.actor(tensordict.copy().set(keys.TOKENS, answers))


def reinforce(loss=LLMReinforceLoss, estimator=ReBN, see=lambda actor: actor):
    def make_loss(actor, critic, gamma):
        return loss(see(actor), kl_coeff=0.0, estimator=estimator(gamma=gamma))

    return make_loss


def ppo(estimator=TurnGAE, wrong_gamma=None, **wrong):
    def make_loss(actor, critic, gamma):
        options = {"kl_coeff": 0.0, "clip_value": None} | wrong
        credit = estimator(gamma=gamma if wrong_gamma is None else wrong_gamma)
        return LLMPPOLoss(actor, critic, **options, estimator=credit)

    return make_loss


BROKEN = {
    "the sign": (ConstantAnswer, reinforce(WrongSign)),
    "a detached ratio": (ConstantAnswer, reinforce(DetachedRatio)),
    "a prompt that is not seen": (ConditionalAnswer, reinforce(see=BlindActor)),
    "another row's credit": (ConditionalAnswer, reinforce(estimator=NeighboursCredit)),
    "credit for the last turn only": (DelayedReward, reinforce(estimator=LastTurnsCredit)),
    "credit for the first turn only": (EarlyDecision, reinforce(estimator=FirstTurnsCredit)),
    "a critic that is not trained": (KnownValue, ppo(critic_coeff=0.0)),
    "no discount": (KnownValue, ppo(wrong_gamma=1.0)),
    "no bootstrap": (TimeLimit, ppo(NoBootstrap)),
}
"""Losses with one thing wrong, and the probe that is there to find it."""

CHEAP = ("the sign", "a prompt that is not seen", "a critic that is not trained", "credit for the last turn only")
"""The probes of ``make test``: one for the gradient, the rows, the critic and credit."""


class TestBroken:
    @pytest.mark.parametrize("fault", usual(BROKEN, CHEAP))
    def test_a_probe_finds(self, fault):
        probe, make_loss = BROKEN[fault]
        assert not solve(probe, make_loss).solved

    def test_and_nothing_in_the_unbroken_twin(self):
        assert solve(ConditionalAnswer, reinforce()).solved
