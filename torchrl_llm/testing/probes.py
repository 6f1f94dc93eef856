"""Probes: environments so small that their optimum is known and a correct algorithm reaches it in
seconds.

A loss with the wrong sign, or with credit that goes to the wrong turn, has the right shapes and
finite values, but does not learn. :data:`PROBES` test one ability after the other, so that the
first failure says where to look. :func:`solve` trains a small random model on a probe, with the
environment, policy, collector and trainer of a real run; :func:`episodes` lists all episodes of a
probe, so that the result is an expectation and not a sample.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from tensordict import TensorDictBase
from torchrl.data import LazyStackStorage, ReplayBuffer

from torchrl_llm import keys
from torchrl_llm.collectors import TurnCollector
from torchrl_llm.data import TurnsToSequence
from torchrl_llm.envs import GEMEnv
from torchrl_llm.functional import turn_first
from torchrl_llm.modules import HFPolicy, SamplingConfig, TokenScorer, TurnCritic
from torchrl_llm.modules.lm import embedding_of
from torchrl_llm.objectives import GroupRelative, LLMGRPOLoss, LLMPPOLoss, LLMReinforceLoss, ReBN, TurnGAE, TurnLoss
from torchrl_llm.testing.environments import Step
from torchrl_llm.testing.policies import ScriptedPolicy
from torchrl_llm.testing.tiny import random_model
from torchrl_llm.testing.tokenizers import word_tokenizer
from torchrl_llm.trainers import LLMTrainer, TrainerConfig

WORDS = ("left", "right", "wait")
"""Every word of messages and answers."""


class Probe:
    """Base class: a few deterministic tasks, in which every answer is one token and no message
    tells whether it was right.

    A subclass declares the messages and implements :meth:`pay`. The answers may be any token of
    ``word_tokenizer(WORDS)``.

    Args:
        task: the number of the task, from 0.

    Attributes:
        answers: the responses so far.
        asks: the messages, ``[tasks][turns]``. A game is terminated after the last turn, or, if it
            is not :meth:`over`, truncated.
        gamma: discount per turn.
        optimum: mean return of the best policy, undiscounted.
        values: the discounted value of the state before each turn, ``[tasks][turns]``, where it is
            the same for every player; ``None`` where it is not. A probe with values is for losses
            with a critic.
        iterations, epochs: batches that a sound algorithm needs, with some to spare, and passes
            over each.

    Examples:
        >>> game = ConditionalAnswer(task=1)
        >>> game.reset()[0], game.step("right")[1:3]
        ('right', (1.0, True))
    """

    asks: ClassVar[tuple[tuple[str, ...], ...]]
    gamma: ClassVar[float] = 1.0
    optimum: ClassVar[float] = 1.0
    values: ClassVar[tuple[tuple[float, ...], ...] | None] = None
    iterations: ClassVar[int] = 40
    epochs: ClassVar[int] = 2

    def __init__(self, task: int = 0) -> None:
        self.task = task
        self.answers: list[str] = []

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """Start the game."""
        self.answers = []
        return self.asks[self.task][0], {}

    def step(self, action: str) -> Step:
        """Answer. After the last turn its message comes again."""
        self.answers.append(action)
        messages = self.asks[self.task]
        return messages[min(len(self.answers), len(messages) - 1)], self.pay(), self.over(), False, {}

    def pay(self) -> float:
        """The reward of the last answer."""
        raise NotImplementedError

    def over(self) -> bool:
        """Whether the game is terminated."""
        return len(self.answers) == len(self.asks[self.task])


class ConstantAnswer(Probe):
    """The answer is "left". If it fails: the gradient itself, its sign, whose log-probs, which
    parameters."""

    asks = (("wait",),)

    def pay(self) -> float:
        return float(self.answers == ["left"])


class ConditionalAnswer(Probe):
    """The answer is the word that is shown. If it fails: the context, masks, rows that get another
    row's advantage."""

    asks = (("left",), ("right",))

    def pay(self) -> float:
        return float(self.answers == [*self.asks[self.task]])


class DelayedReward(Probe):
    """The first answer is paid two turns later. If it fails: credit does not reach earlier
    turns."""

    asks = (("wait", "wait", "wait"),)

    def pay(self) -> float:
        return float(self.over() and self.answers[0] == "left")


class EarlyDecision(Probe):
    """The first and last answers must be right, and a bet between them is luck. If it fails: which
    turn gets which credit."""

    asks = (("left", "wait", "right"), ("left", "wait", "right"))
    optimum = 1.125
    iterations = 60

    def pay(self) -> float:
        if len(self.answers) == 2:
            return 0.25 * (self.answers[1] == WORDS[self.task])
        return float(self.answers[::2] == ["left", "right"])


class KnownValue(Probe):
    """No answer matters: the second message tells whether the reward is 1. If it fails: the critic,
    the discount."""

    asks = (("wait", "left"), ("wait", "right"))
    gamma = 0.5
    optimum = 0.5
    values = ((0.25, 1.0), (0.25, 0.0))

    def pay(self) -> float:
        return float(self.over() and self.task == 0)


class TimeLimit(Probe):
    """Every turn pays 1. One game lasts for ever and is cut off after two turns, the other is
    over by then.

    The first is worth ``1 / (1 - gamma)`` at any time, and not the sum of what was paid before the
    cut. If it fails: the bootstrap after truncation, or one after termination.
    """

    asks = (("left", "left"), ("right", "right"))
    gamma = 0.5
    optimum = 2.0
    values = ((2.0, 2.0), (1.5, 1.0))
    epochs = 4

    def pay(self) -> float:
        return 1.0

    def over(self) -> bool:
        return self.task == 1 and super().over()


PROBES: tuple[type[Probe], ...] = (
    ConstantAnswer,
    ConditionalAnswer,
    DelayedReward,
    EarlyDecision,
    KnownValue,
    TimeLimit,
)
"""The probes, in the order in which to read their failures."""

MakeLoss = Callable[[TokenScorer, TurnCritic, float], TurnLoss]
"""``(actor, critic, gamma) -> loss``; a loss without a critic leaves it aside."""

OPTIONS: dict[str, Any] = {"kl_coeff": 0.0, "entropy_coeff": 0.01}
"""What the losses of :data:`ALGORITHMS` have in common: no reference, and a small bonus for
entropy."""

ALGORITHMS: dict[str, MakeLoss] = {
    "LLMPPO": lambda actor, critic, gamma: LLMPPOLoss(
        actor, critic, clip_value=None, **OPTIONS, estimator=TurnGAE(gamma=gamma)
    ),
    "LLMREINFORCE": lambda actor, critic, gamma: LLMReinforceLoss(actor, **OPTIONS, estimator=ReBN(gamma=gamma)),
    "GRPO": lambda actor, critic, gamma: LLMGRPOLoss(actor, **OPTIONS, estimator=GroupRelative(gamma=gamma)),
}
"""The library's losses as the probes try them."""


@dataclass(frozen=True, kw_only=True)
class Solution:
    """What a trained model is worth, exactly.

    Attributes:
        share: its expected return as a share of the optimum.
        value_error: the critic's root mean square error in a turn, the largest of all tasks and
            turns; ``None``: no values.
    """

    share: float
    value_error: float | None = None

    @property
    def solved(self) -> bool:
        """Whether ``share`` is at least 0.97, or, where there are values, ``value_error`` at most
        0.1."""
        return self.share >= 0.97 if self.value_error is None else self.value_error <= 0.1


def solve(probe: type[Probe], make_loss: MakeLoss, *, seed: int = 0) -> Solution:
    """Train a small random model on ``probe`` and work out what it is worth.

    The model is a Qwen2 of one layer; the critic is another. A batch has 32 episodes, in groups of
    8; the learning rate falls from 0.01 to 0 along a cosine. The global generators are left as they
    were.

    Args:
        probe: one of :data:`PROBES`, or one of your own.
        make_loss: one of :data:`ALGORITHMS`, or your own. The actor writes entropies too.
        seed: of weights and sampling.

    Raises:
        ValueError: ``probe`` has values, and the loss has no critic; see also :func:`assess`.

    Examples:
        >>> solve(ConstantAnswer, ALGORITHMS["LLMREINFORCE"]).solved
        True
    """
    tokenizer, sampling = word_tokenizer(WORDS), SamplingConfig(max_output_tokens=1, stop_ids=())
    model = random_model(tokenizer, hidden=16, layers=1, seed=seed)
    actor, critic = TokenScorer(model, sampling, entropy=True), TurnCritic(copy.deepcopy(model.model))
    loss = make_loss(actor, critic, probe.gamma)
    if probe.values is not None and loss.critic_network is None:
        raise ValueError(f"{probe.__name__} is about values; {type(loss).__name__} has no critic: use a loss with one.")
    networks: list[torch.nn.Module] = [actor] if loss.critic_network is None else [actor, critic]
    optimizer = torch.optim.AdamW([{"params": [*each.parameters()]} for each in networks], lr=1e-2, weight_decay=0.0)
    policy, size = HFPolicy(model, tokenizer, sampling, seed=seed), 32
    buffer = ReplayBuffer(storage=LazyStackStorage(size), transform=TurnsToSequence(), batch_size=size)
    env = make_env(probe, num_envs=size, group_size=8, seed=seed)
    steps = probe.iterations * size * len(probe.asks[0])
    trainer = LLMTrainer(
        collector=TurnCollector(env, policy, batch_size=size, replay_buffer=buffer),
        replay_buffer=buffer,
        policy=policy,
        loss=loss,
        optimizer=optimizer,
        config=TrainerConfig(epochs=probe.epochs, max_steps=steps, seed=seed),
    )
    trainer.train()
    return assess(probe, actor, critic)


def make_env(probe: type[Probe], **options: Any) -> GEMEnv:
    """The games of ``probe`` as a mixture, with ``options`` of
    :class:`~torchrl_llm.envs.GEMEnv`."""
    options |= {"tokenizer": word_tokenizer(WORDS), "max_model_len": 64, "max_output_tokens": 1}
    games = [partial(probe, task) for task in range(len(probe.asks))]
    return GEMEnv(games, max_turns=len(probe.asks[0]), **options)


def episodes(probe: type[Probe]) -> TensorDictBase:
    """Every episode of ``probe``: ``[tasks * V ** turns]`` rows, for ``V`` tokens of the
    vocabulary.

    ``"env_id"`` is the task. The tasks are deterministic, so an episode's probability is the one of
    its answers.

    Examples:
        >>> episodes(ConditionalAnswer)["turn", "reward"].sum()  # of 8 answers in each game, one is right
        tensor(2.)
    """
    tokenizer = word_tokenizer(WORDS)
    tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))

    def script(episode: int, turn: int, context: str) -> str:
        return tokens[episode // len(tokens) ** turn % len(tokens)]

    policy = ScriptedPolicy(script, tokenizer=tokenizer, max_output_tokens=1, end_turn=False)
    ways = len(tokens) ** len(probe.asks[0])
    env = make_env(probe, num_envs=len(probe.asks) * ways, group_size=ways)
    try:
        return TurnCollector(env, policy, batch_size=len(probe.asks) * ways).rollout()
    finally:
        env.close()


@torch.no_grad()
def assess(probe: type[Probe], actor: TokenScorer, critic: TurnCritic) -> Solution:
    """The return of the actor and the error of the critic, summed over all :func:`episodes`.

    Raises:
        ValueError: the probabilities of a probe's episodes do not add up to 1 for each game: rows
            or scorer are broken.
    """
    rows, tasks = episodes(probe).to(embedding_of(actor.model).device), len(probe.asks)
    probability = actor(rows.clone())[keys.LOG_PROB].sum(1).exp()
    if abs(float(probability.sum()) - tasks) > 1e-3 * tasks:
        raise ValueError(
            f"The probabilities of all episodes of {tasks} games add up to {float(probability.sum()):.3f}; expected "
            f"{tasks}. The rows or the scorer are broken: look at their turn_ids and log-probs."
        )
    share = float((probability * rows[keys.TURN_REWARD].sum(1)).sum()) / tasks / probe.optimum
    if probe.values is None:
        return Solution(share=share)
    known, task = torch.tensor(probe.values, device=rows.device), rows[keys.ENV_ID]
    value = turn_first(critic(rows.clone())[keys.STATE_VALUE], rows[keys.TURN_IDS], known.shape[1])
    square = probability.unsqueeze(1) * (value - known[task]).square()
    return Solution(share=share, value_error=torch.zeros_like(known).index_add(0, task, square).max().sqrt().item())
