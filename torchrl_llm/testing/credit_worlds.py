"""Worlds that tell credit estimators apart, each by one property, with exact values
(:mod:`~torchrl_llm.testing.tabular`).

- :class:`DelayedReward`: one decision, paid many turns later. It separates Monte-Carlo returns from
  bootstrapped values (small lambda, an untrained critic), for with nothing in between a return has
  no noise to trade for.
- :class:`DistractingRewards`: luck on every turn, whatever is answered. It separates credit per
  turn, which leaves out the luck of earlier turns, from credit per episode, and a critic with small
  lambda, which leaves out the noise of later turns, from both.
- :class:`Stairs`: states that are revisited, at different turns. It separates comparison within a
  state from comparison within a turn, where answers to different questions are compared.
- :class:`TruncationTrap`: episodes that are cut off before the reward. It separates estimators that
  bootstrap after a truncated turn from those that count 0 there and learn to settle for less.

``EarlyDecision`` (:mod:`~torchrl_llm.testing.environments`) is of this family too: a late reward
behind luck. Answers are single words, and any other text is an illegal answer that pays -0.1. The
models that play them begin with random weights and learn in under a minute of one CPU core.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

from torchrl_llm.testing.environments import EarlyDecision
from torchrl_llm.testing.tabular import (
    ILLEGAL_REWARD,
    Outcome,
    OutcomeTable,
    TabularWorld,
    answer_value,
    best_values,
    expected,
    policy_values,
    uniform,
)

RIGHT = EarlyDecision.RIGHT
"""Weather -> the thing that is right for it."""

THINGS = tuple(RIGHT.values())


class Packed(NamedTuple):
    """A state of :class:`DelayedReward` and :class:`DistractingRewards`.

    Attributes:
        turn: counted from 0.
        weather: that is shown; ``""``: none.
        right: whether all decisions so far were right.
    """

    turn: int
    weather: str
    right: bool = True


class DelayedReward(TabularWorld):
    """The first of several turns decides, and the last one pays.

    The first message shows the weather, and one of four things is right for it. Then come ``delay``
    turns in which any of the things will do. The last of them pays 1 if the first answer was right.
    An illegal answer pays -0.1 and counts as wrong in the first turn.

    It separates Monte-Carlo returns from bootstrapped values. At :math:`\\gamma = 1` every turn of
    an episode has the same return, so credit per turn and per episode are the same: a control. What
    differs is how soon the reward reaches the first turn: at once by a return, and through
    ``delay`` values of a critic by a small :math:`\\lambda`.

    Args:
        delay: turns between the decision and its reward, which the last of them brings. Default 6.

    Attributes:
        WORDS: every word of messages and answers, for
            :func:`~torchrl_llm.testing.tokenizers.word_tokenizer`.
        tasks: the states that an episode can start in, each as likely: the four weathers.

    Examples:
        >>> world = DelayedReward(delay=2)
        >>> world.reset(0)[0]
        'pack wind'
        >>> [world.step(word)[:3] for word in ("scarf", "hat", "hat")]
        [('wait', 0.0, False), ('wait', 0.0, False), ('over', 1.0, True)]
    """

    ANSWERS: ClassVar[tuple[str, ...]] = THINGS
    WORDS: ClassVar[tuple[str, ...]] = ("pack", *RIGHT, "wait", *THINGS, "over")

    def __init__(self, *, delay: int = 6) -> None:
        if delay < 1:
            raise ValueError(f"delay is {delay}; expected at least 1 turn.")
        super().__init__()
        self.delay = delay
        self.tasks = [Packed(0, weather) for weather in RIGHT]

    def message(self, state: Packed) -> str:
        """The weather, or that one waits."""
        return f"pack {state.weather}" if state.turn == 0 else "wait"

    def label(self, state: Packed) -> str:
        """Turn, weather, and whether the decision was right: all that the return depends on."""
        return f"turn {state.turn} {state.weather} {state.right}"

    def outcomes(self, state: Packed, response: str) -> Sequence[Outcome]:
        """One outcome: nothing is random."""
        right = response == RIGHT[state.weather] if state.turn == 0 else state.right
        paid = 0.0 if response in THINGS else ILLEGAL_REWARD
        if state.turn == self.delay:
            return [Outcome(1.0, paid + float(right), None, right)]
        return [Outcome(1.0, paid, Packed(state.turn + 1, state.weather, right))]


class DistractingRewards(TabularWorld):
    """Every turn asks a question of its own, and pays luck on top that has nothing to do with the
    answer.

    A turn shows the weather, drawn independently; the thing that is right for it pays
    ``1 / turns``. Beside that every turn pays ``noise`` or ``-noise``, as likely, whatever was
    answered. An episode is a success if all answers were right.

    It separates credit per turn from credit per episode. The return of the episode holds the luck
    of all turns, the return from a turn on the noise of the later ones, and a temporal difference
    with the exact values the noise of the turn alone: the variance of an advantage is
    ``turns * noise**2``, half of that on average, or ``noise**2``.

    Args:
        turns: of an episode. Default 5.
        noise: what luck pays or costs in each turn. Default 0.5, more than twice what a right
            answer pays.

    Attributes:
        WORDS: every word of messages and answers, for
            :func:`~torchrl_llm.testing.tokenizers.word_tokenizer`.
        tasks: the states that an episode can start in, each as likely: the four weathers.

    Examples:
        >>> world = DistractingRewards(turns=2, noise=0.5)
        >>> world.reset(0)[0]
        'pack wind'
        >>> world.step("scarf")[1] in (1.0, 0.0)
        True
    """

    ANSWERS: ClassVar[tuple[str, ...]] = THINGS
    WORDS: ClassVar[tuple[str, ...]] = ("pack", *RIGHT, *THINGS, "over")

    def __init__(self, *, turns: int = 5, noise: float = 0.5) -> None:
        if turns < 1 or noise < 0:
            raise ValueError(f"turns={turns}, noise={noise}; expected at least 1 turn, and a noise of at least 0.")
        super().__init__()
        self.turns, self.noise = turns, noise
        self.tasks = [Packed(0, weather) for weather in RIGHT]

    def message(self, state: Packed) -> str:
        """The weather."""
        return f"pack {state.weather}"

    def label(self, state: Packed) -> str:
        """Turn and weather: all that the return depends on."""
        return f"turn {state.turn} {state.weather}"

    def outcomes(self, state: Packed, response: str) -> Sequence[Outcome]:
        """Good luck or bad, and the weather of the next turn."""
        correct = response == RIGHT[state.weather]
        right = state.right and correct
        paid = correct / self.turns if response in THINGS else ILLEGAL_REWARD
        lucks = (self.noise, -self.noise)
        if state.turn + 1 == self.turns:
            return [Outcome(1 / 2, paid + luck, None, right) for luck in lucks]
        chance = 1 / (2 * len(RIGHT))
        return [
            Outcome(chance, paid + luck, Packed(state.turn + 1, weather, right)) for luck in lucks for weather in RIGHT
        ]


class Landing(NamedTuple):
    """A state of :class:`Stairs`.

    Attributes:
        floor: counted from 0; the top is not a state, for the episode ends there.
        turns: that are left.
    """

    floor: int
    turns: int


class Stairs(TabularWorld):
    """Climb to the top: each floor has a right thing, and a wrong one leads a floor down.

    A message shows the floor by its number. On floor ``i`` one of four things is right (the things
    in their order, over and over): it leads a floor up, any other thing a floor down, from the
    lowest one nowhere. An illegal answer costs its turn and 0.1. Reaching the top pays 1 and is a
    success; when the turns are used up the episode is over.

    It separates comparison within a state from comparison within a turn. After a few answers the
    episodes of a group stand on different floors, so that their returns from the same turn on tell
    where they stand and not what they answered; but each floor is visited many times. The ``state``
    that it declares is the floor, without the turns that are left.

    Args:
        height: floors below the top. Default 4.
        turns: allowed. Default 10.
        alike: whether later messages say only whether the floor's number is even or odd, so that
            states look alike in which different things are right, and the player has to remember
            its way (aliasing). Default False.

    Attributes:
        WORDS: every word of messages and answers, for
            :func:`~torchrl_llm.testing.tokenizers.word_tokenizer`.
        tasks: the states that an episode can start in, each as likely: every floor.

    Examples:
        >>> world = Stairs()
        >>> world.reset(0)[0], world.reset(1)[0]
        ('floor 3', 'floor 1')
        >>> [world.step(word)[0] for word in ("coat", "hat", "coat")]
        ['floor 2', 'floor 1', 'floor 2']
    """

    ANSWERS: ClassVar[tuple[str, ...]] = THINGS
    WORDS: ClassVar[tuple[str, ...]] = ("floor", *map(str, range(10)), "even", "odd", *THINGS, "over")

    def __init__(self, *, height: int = 4, turns: int = 10, alike: bool = False) -> None:
        if not 1 <= height <= 10 or turns < height:
            raise ValueError(f"height={height}, turns={turns}; expected 1 to 10 floors and at least as many turns.")
        super().__init__()
        self.height, self.turns, self.alike = height, turns, alike
        self.tasks = [Landing(floor, turns) for floor in range(height)]

    def message(self, state: Landing) -> str:
        """The floor, or whether its number is odd."""
        hidden = self.alike and state.turns < self.turns
        return f"floor {('even', 'odd')[state.floor % 2] if hidden else state.floor}"

    def label(self, state: Landing) -> str:
        """The floor."""
        return f"floor {state.floor}"

    def right_answer(self, floor: int) -> str:
        """What leads up from a floor.

        Examples:
            >>> Stairs().right_answer(1)
            'coat'
        """
        return THINGS[floor % len(THINGS)]

    def outcomes(self, state: Landing, response: str) -> Sequence[Outcome]:
        """One outcome: nothing is random."""
        paid, floor = 0.0, state.floor
        if response not in THINGS:
            paid = ILLEGAL_REWARD
        else:
            floor = floor + 1 if response == self.right_answer(floor) else max(floor - 1, 0)
        if floor == self.height:
            return [Outcome(1.0, paid + 1.0, None, True)]
        if state.turns == 1:
            return [Outcome(1.0, paid, None, False)]
        return [Outcome(1.0, paid, Landing(floor, state.turns - 1))]


class TruncationTrap(TabularWorld):
    """Walk on for 1, or settle for less at once; but an episode may be cut off on the way.

    A message shows how far the goal is. ``go`` leads one step nearer, and pays 1 on arrival, which
    is a success. ``stop`` pays ``settle`` and ends the episode. So does an illegal answer, which
    pays -0.1. Every episode is cut off after ``limit`` turns, as by a budget of ours: truncated,
    not terminated. Starts that are farther than that never see the goal.

    It separates estimators that bootstrap after a truncated turn from those that count 0 there.
    Going on is always best: it returns 1. Who counts 0 for what was cut off learns to stop wherever
    the goal is farther than the limit; a critic knows from the nearer starts what the place is
    worth where the episode was cut off. What is computed exactly
    (:func:`~torchrl_llm.testing.tabular.policy_values`, the regret) is the episode that continues.

    Args:
        farthest: distance of the farthest start, at most 9. Default 6.
        settle: what stopping pays, between 0 and 1. Default 0.5.
        limit: turns after which an episode is cut off; ``None``: never, which shows what a policy
            is worth. Default 3.

    Attributes:
        WORDS: every word of messages and answers, for
            :func:`~torchrl_llm.testing.tokenizers.word_tokenizer`.
        tasks: the states that an episode can start in, each as likely: distances from 1 on.

    Examples:
        >>> world = TruncationTrap()
        >>> world.reset(0)[0]
        'far 4'
        >>> [world.step("go")[:4] for _ in range(3)][-1]
        ('far 1', 0.0, False, True)
        >>> world.regret(4, "stop"), world.regret(4, "go")
        (0.5, 0.0)
    """

    ANSWERS: ClassVar[tuple[str, ...]] = ("go", "stop")
    WORDS: ClassVar[tuple[str, ...]] = ("far", *map(str, range(1, 10)), *ANSWERS, "over")

    def __init__(self, *, farthest: int = 6, settle: float = 0.5, limit: int | None = 3) -> None:
        if not (1 <= farthest <= 9 and 0 <= settle <= 1):
            raise ValueError(f"farthest={farthest}, settle={settle}; expected 1 to 9 steps, and a reward from 0 to 1.")
        super().__init__(limit=limit)
        self.settle = settle
        self.tasks = list(range(1, farthest + 1))

    def message(self, state: int) -> str:
        """The distance."""
        return f"far {state}"

    def outcomes(self, state: int, response: str) -> Sequence[Outcome]:
        """One outcome: nothing is random."""
        if response == "go":
            return [Outcome(1.0, 0.0, state - 1)] if state > 1 else [Outcome(1.0, 1.0, None, True)]
        return [Outcome(1.0, self.settle if response == "stop" else ILLEGAL_REWARD, None, False)]


CREDIT_WORLDS: dict[str, Any] = {
    "early-decision": EarlyDecision,
    "delayed-reward": DelayedReward,
    "distracting-rewards": DistractingRewards,
    "stairs": Stairs,
    "truncation-trap": TruncationTrap,
}
"""The worlds by the names of their ids, such as ``"world:stairs"``; options go to their
constructors."""


def optimal_success(world: OutcomeTable) -> float:
    """The best probability of success, in [0, 1], by dynamic programming over all tasks.

    Examples:
        >>> [optimal_success(make()) for make in CREDIT_WORLDS.values()]
        [1.0, 1.0, 1.0, 1.0, 1.0]
    """
    return expected(world, best_values(world, payoff="success"))


def optimal_return(world: OutcomeTable) -> float:
    """The best expected return, by dynamic programming over all tasks.

    Examples:
        >>> [round(optimal_return(make()), 6) for make in CREDIT_WORLDS.values()]
        [1.375, 1.0, 1.0, 1.0, 1.0]
    """
    return expected(world, best_values(world))


def uniform_return(world: OutcomeTable) -> float:
    """The expected return of the policy that gives each legal answer the same probability.

    Examples:
        >>> [round(uniform_return(make()), 3) for make in CREDIT_WORLDS.values()]
        [0.438, 0.25, 0.25, 0.129, 0.582]
    """
    return expected(world, policy_values(world, uniform(world)))


def best_answer(world: OutcomeTable, state: Any) -> str:
    """The first answer of a best policy in a state.

    Examples:
        >>> best_answer(Stairs(), Landing(floor=2, turns=2))
        'boots'
    """
    values = best_values(world)
    return max(world.ANSWERS, key=lambda answer: answer_value(world, state, answer, values))
