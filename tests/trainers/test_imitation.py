"""Supervised fine-tuning learns: a random model comes to do what a player shows it, or more of what
it wins with."""

from __future__ import annotations

import re
from functools import partial

import pytest
import torch
from instances import usual
from torchrl.data import LazyStackStorage, ReplayBuffer

from torchrl_llm.collectors import TurnCollector
from torchrl_llm.data import TurnsToSequence
from torchrl_llm.modules import HFPolicy, PlayerPolicy, SamplingConfig, TokenScorer
from torchrl_llm.objectives import ImitationWeights, LLMSFTLoss
from torchrl_llm.testing import probes
from torchrl_llm.testing.tiny import random_model
from torchrl_llm.testing.tokenizers import word_tokenizer
from torchrl_llm.trainers import LLMTrainer, TrainerConfig

SEEDS = range(3)


def copies(context, rng):
    """The word that was shown first."""
    return re.findall("left|right|wait", context)[0]


def left_at_first(context, rng):
    """Left, then any word."""
    return "left" if context.count("assistant") == 1 else rng.choice(probes.WORDS)


def imitated(probe, player, seed, *, iterations):
    """The share of the optimum that a random model is worth before and after it imitates
    ``player``."""
    tokenizer, size = word_tokenizer(probes.WORDS), 32
    sampling = SamplingConfig(max_output_tokens=1, stop_ids=())
    model = random_model(tokenizer, hidden=16, layers=1, seed=seed)
    actor = TokenScorer(model, sampling)
    policy = HFPolicy(model, tokenizer, sampling, seed=seed)
    shown = PlayerPolicy(player, tokenizer, tokenizer.encode, max_output_tokens=1, seed=seed, trained=policy)
    buffer = ReplayBuffer(storage=LazyStackStorage(size), transform=TurnsToSequence(), batch_size=size)
    trainer = LLMTrainer(
        collector=TurnCollector(
            probes.make_env(probe, num_envs=size, seed=seed), shown, batch_size=size, replay_buffer=buffer
        ),
        replay_buffer=buffer,
        policy=policy,
        loss=LLMSFTLoss(actor),
        optimizer=torch.optim.AdamW(actor.parameters(), lr=1e-2, weight_decay=0.0),
        config=TrainerConfig(epochs=2, max_steps=iterations * size * len(probe.asks[0]), seed=seed),
    )
    before = probes.assess(probe, actor, None).share
    history = trainer.train()
    assert policy.policy_version == len(history) == iterations
    return before, probes.assess(probe, actor, None).share


class Sooner(probes.ConditionalAnswer):
    """Solved by rejection sampling in half of the batches."""

    iterations = 20


@pytest.mark.parametrize(
    ("probe", "player", "iterations"),
    usual([(probes.ConditionalAnswer, copies, 20), (probes.DelayedReward, left_at_first, 30)]),
    ids=["copies", "first"],
)
def test_a_random_model_does_what_the_player_does(probe, player, iterations):
    before, after = imitated(probe, player, seed=0, iterations=iterations)
    assert before < 0.3
    assert after >= 0.95


def rejection(actor, critic, gamma, *, imitate="success"):
    return LLMSFTLoss(actor, estimator=ImitationWeights(imitate=imitate))


@pytest.mark.parametrize("seed", SEEDS)
def test_what_it_wins_with_it_does_more_often(seed):
    """Rejection sampling, from the policy's own episodes; a word of eight is right at first."""
    assert probes.solve(Sooner, rejection, seed=seed).share >= 0.7


def test_its_own_episodes_teach_nothing_if_all_are_imitated():
    assert probes.solve(Sooner, partial(rejection, imitate="all")).share < 0.4
