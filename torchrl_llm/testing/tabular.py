"""Text environments given by a table of outcomes, and the exact value of every policy in them.

An environment of this kind says what each answer can lead to, with which probability
(:class:`Outcome`). From that :class:`TabularWorld` runs episodes, and dynamic programming computes
what no number of episodes can show exactly: the value of every state under a policy
(:func:`policy_values`), the best one (:func:`best_values`), and how much a single answer loses (its
regret).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

from torchrl_llm.envs.columns import ExtraKinds
from torchrl_llm.utils.options import check_value

Step = tuple[str, float, bool, bool, dict[str, Any]]
Policy = Callable[[Any], Mapping[str, float]]
"""Maps a state to the probability of each answer; those it leaves out have none. Other texts than
answers are illegal answers."""

Payoff = Literal["return", "success"]
"""What is valued: the discounted sum of rewards, or the probability that the episode ends in
success."""

ILLEGAL_REWARD = -0.1
"""Reward of an illegal answer, as GEM's of a format error."""


class Outcome(NamedTuple):
    """What an answer can lead to.

    Attributes:
        probability: of this outcome.
        reward: of the turn.
        state: the next state; ``None``: the episode is over.
        success: whether it is over and won.
    """

    probability: float
    reward: float
    state: Hashable | None
    success: bool = False


class OutcomeTable(Protocol):
    """What the exact values are computed from.

    Attributes:
        ANSWERS: the legal answers.
        tasks: the states that an episode can start in, each as likely.
    """

    @property
    def ANSWERS(self) -> tuple[str, ...]: ...

    @property
    def tasks(self) -> Sequence[Any]: ...

    def outcomes(self, state: Any, response: str) -> Sequence[Outcome]:
        """All outcomes of an answer; their probabilities sum to 1."""


class TabularWorld:
    """Base class of text environments given by a table. A subclass says ``ANSWERS``, ``WORDS``,
    ``tasks``, and three methods.

    The state is known to a player that remembers the episode so far: what is hidden is only chance
    that is still to come. Chance is drawn from the task's seed and the answers so far, so that an
    episode is a function of its task and its answers, as in an environment that can be replayed,
    and yet luck differs between the episodes of a group as soon as their answers do.

    Its extras are the ``state`` in which an answer was given, as :meth:`label` names it, and the
    ``regret`` of the answer: how much less than the best one it returns on average if all later
    answers are the best. A regret is free of luck: the expected regrets of an episode sum to the
    optimum minus the expected return.

    Args:
        limit: turns after which an episode is cut off, truncated and not terminated; ``None``
            (default): never.

    Attributes:
        state: in which the next answer will be given; ``None``: no episode is running.
    """

    ANSWERS: ClassVar[tuple[str, ...]]
    WORDS: ClassVar[tuple[str, ...]]
    extras: ClassVar[ExtraKinds] = {"regret": float, "state": str}
    thread_safe = True
    tasks: Sequence[Any]

    def __init__(self, *, limit: int | None = None) -> None:
        if limit is not None and limit < 1:
            raise ValueError(f"limit is {limit}; expected at least 1 turn, or None for no limit.")
        self.limit = limit
        self.state: Any = None
        self._best: dict[Any, float] = {}
        self._seed: int | None = None
        self._said: list[str] = []

    def message(self, state: Any) -> str:
        """What the player is shown in a state."""
        raise NotImplementedError

    def label(self, state: Any) -> str:
        """The name of a state, for comparing answers that were given in the same one. Default: its
        message."""
        return self.message(state)

    def outcomes(self, state: Any, response: str) -> Sequence[Outcome]:
        """All outcomes of an answer; their probabilities sum to 1."""
        raise NotImplementedError

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """Start the task of ``seed``."""
        self.state = random.Random(seed).choice(self.tasks)
        self._seed, self._said = seed, []
        return self.message(self.state), {}

    def step(self, action: str) -> Step:
        """Answer."""
        if self.state is None:
            raise RuntimeError("There is no running game: reset first.")
        response, before = action.strip(), self.state
        self._said.append(response)
        outcomes = self.outcomes(before, response)
        # The whole history, and not the turn alone: episodes of a group that differ have luck of
        # their own.
        luck = random.Random(repr((self._seed, self._said)))
        (outcome,) = luck.choices(outcomes, [each.probability for each in outcomes])
        info: dict[str, Any] = {"state": self.label(before), "regret": self.regret(before, response)}
        over = outcome.state is None
        truncated = not over and len(self._said) == self.limit
        if over:
            info["success"] = outcome.success
        self.state = None if over or truncated else outcome.state
        return "over" if over else self.message(outcome.state), outcome.reward, over, truncated, info

    def regret(self, state: Any, response: str) -> float:
        """How much less than the best answer ``response`` returns, if all later answers are the
        best; at least 0."""
        if not self._best:
            self._best = best_values(self)
        return self._best[state] - answer_value(self, state, response, self._best)


# ---------------------------------------- exact values


def answer_value(
    world: OutcomeTable,
    state: Any,
    response: str,
    values: Mapping[Any, float],
    *,
    gamma: float = 1.0,
    payoff: Payoff = "return",
) -> float:
    """The value of an answer in a state, given the values of the states after it."""
    return sum(
        each.probability
        * (
            (each.reward if payoff == "return" else float(each.success))
            + (0.0 if each.state is None else gamma * values[each.state])
        )
        for each in world.outcomes(state, response)
    )


def policy_values(
    world: OutcomeTable, policy: Policy, *, gamma: float = 1.0, payoff: Payoff = "return"
) -> dict[Any, float]:
    """The value of every state that a policy can reach, exactly.

    Episodes are not cut off: where the environment truncates, the value belongs to the episode that
    would go on.

    Args:
        world: whose outcomes.
        policy: maps a state to the probabilities of answers, which sum to 1.
        gamma: discount per turn. Default 1.0.
        payoff: ``"return"`` (default), or ``"success"``: its probability, for ``gamma=1``.

    Raises:
        ValueError: probabilities do not sum to 1, or a state can be reached from itself.

    Examples:
        >>> from torchrl_llm.testing.credit_worlds import DelayedReward
        >>> world = DelayedReward()
        >>> expected(world, policy_values(world, uniform(world)))
        0.25
    """
    check_value("payoff", payoff, Payoff)

    def evaluate(state: Any, values: Mapping[Any, float]) -> float:
        chances = policy(state)
        if abs(sum(chances.values()) - 1) > 1e-9:
            raise ValueError(
                f"The policy's probabilities in {state!r} sum to {sum(chances.values())}: {dict(chances)}; expected 1."
            )
        return sum(
            p * answer_value(world, state, each, values, gamma=gamma, payoff=payoff) for each, p in chances.items()
        )

    return _solve(world, evaluate, lambda state: [each for each, p in policy(state).items() if p])


def best_values(world: OutcomeTable, *, gamma: float = 1.0, payoff: Payoff = "return") -> dict[Any, float]:
    """The value of every state under the policy that is best there.

    Args:
        world, gamma, payoff: see :func:`policy_values`.

    Raises:
        ValueError: a state can be reached from itself.

    Examples:
        >>> from torchrl_llm.testing.credit_worlds import Stairs
        >>> expected(Stairs(), best_values(Stairs()))
        1.0
    """
    check_value("payoff", payoff, Payoff)
    answers = (*world.ANSWERS, "")  # "" is an illegal answer

    def choose(state: Any, values: Mapping[Any, float]) -> float:
        return max(answer_value(world, state, each, values, gamma=gamma, payoff=payoff) for each in answers)

    return _solve(world, choose, lambda state: answers)


def expected(world: OutcomeTable, values: Mapping[Any, float]) -> float:
    """The mean value over the tasks: the expected return of an episode, or its probability of
    success."""
    return sum(values[task] for task in world.tasks) / len(world.tasks)


def uniform(world: OutcomeTable) -> Policy:
    """The policy that gives each legal answer the same probability."""
    chances = dict.fromkeys(world.ANSWERS, 1 / len(world.ANSWERS))
    return lambda state: chances


def _solve(
    world: OutcomeTable,
    back_up: Callable[[Any, Mapping[Any, float]], float],
    answers: Callable[[Any], Iterable[str]],
) -> dict[Any, float]:
    """Values from the ends of the episodes backwards: ``back_up`` computes a state's from those
    after it."""
    values: dict[Any, float] = {}
    open_states: set[Any] = set()

    def visit(state: Any) -> None:
        if state in values:
            return
        if state in open_states:
            raise ValueError(f"The state {state!r} can be reached from itself; expected one that counts its turns.")
        open_states.add(state)
        for response in answers(state):
            for outcome in world.outcomes(state, response):
                if outcome.state is not None:
                    visit(outcome.state)
        values[state] = back_up(state, values)

    for task in world.tasks:
        visit(task)
    return values
