"""The record of a rollout: :class:`Episode`, from the environment to the row.

Collectors write it, :func:`torchrl_llm.data.rows_from_episodes` reads it. It holds every token
once, so it needs no more memory than its row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from torchrl_llm.keys import REWARD, NestedKey, StopReason

LARGEST_REWARD = 1e12
"""Rewards are at most of this size: credit adds up the squares of returns in float32, which ends at
3.4e38. The variance of larger ones would be infinite, and every advantage 0."""


def is_reward(number: Any) -> bool:
    """Whether a number can be a reward: finite, and of at most :data:`LARGEST_REWARD`.

    Examples:
        >>> [is_reward(number) for number in (-1, float("nan"), 1e39, 10**400)]
        [True, False, False, False]
    """
    # Not float(number): an integer may be beyond every float, which compares all the same.
    return bool(abs(number) <= LARGEST_REWARD)


def plain_number(value: Any) -> Any:
    """A number of numpy or torch, also in an array of one, as a number of Python; anything else as
    it is.

    Examples:
        >>> import numpy as np
        >>> plain_number(np.array([1.0])), plain_number("1.0")
        (1.0, '1.0')
    """
    shape = getattr(value, "shape", None)
    return value.item() if shape is not None and hasattr(value, "item") and math.prod(shape) == 1 else value


class Turn(NamedTuple):
    """A response, and its place in the context.

    Attributes:
        start: tokens of the context before it.
        segment: how often the context was cut and rebuilt before.
        tokens: ``[m]`` int64, the sampled ids.
        log_probs: ``[m]``, under the distribution really sampled from.
        versions: ``[m]`` int64, the weights that sampled each token.
    """

    start: int
    segment: int
    tokens: npt.NDArray[np.int64]
    log_probs: npt.NDArray[np.floating]
    versions: npt.NDArray[np.int64]


# eq=False: arrays that are compared have no single truth value. An episode equals itself only.
@dataclass(eq=False)
class Episode:
    """One episode, as far as it was collected.

    Attributes:
        index: of its task in the sampler; -1: not known.
        episode_id, group_id, env_id: of its :class:`~torchrl_llm.envs.TaskSpec`.
        task_id: of its :class:`~torchrl_llm.envs.TaskIdentity`; ``None``: not known.
        turns: the responses.
        rewards: of the turns that the environment has processed.
        columns: of these turns, the other columns (:class:`~torchrl_llm.keys.TurnColumn`), by name:
            numbers, or hashes of texts as ``int``.
        texts: hash -> text, as far as known.
        contexts: the tokens of each segment that is over, int64: up to its last response, and with
            the last feedback for the last segment.
        stop_reason: why it ended, or that it runs.
        terminated, truncated: how it ended; neither while it runs.
        success: whether it ended in success.
        oldest: the lowest version of the weights that sampled a token; ``None`` before the first.
    """

    index: int
    episode_id: int
    group_id: int
    env_id: int
    task_id: int | None = None
    turns: list[Turn] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    columns: dict[NestedKey, list[float]] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    contexts: list[npt.NDArray[np.int64]] = field(default_factory=list)
    stop_reason: int = StopReason.RUNNING
    terminated: bool = False
    truncated: bool = False
    success: bool = False
    oldest: int | None = None

    @property
    def finished(self) -> bool:
        """Whether it has ended."""
        return self.terminated or self.truncated

    @property
    def awaits_reward(self) -> bool:
        """Whether the last response was sent to the environment, and its reward has not come."""
        return len(self.turns) > len(self.rewards)

    @property
    def length(self) -> int:
        """Tokens of its row: the tokens of the segments, with one column of padding between
        them."""
        return sum(map(len, self.contexts)) + max(0, len(self.contexts) - 1)

    def is_stale(self, oldest: int) -> bool:
        """Whether a token was sampled with weights older than the version ``oldest``."""
        return self.oldest is not None and self.oldest < oldest

    def add(self, turn: Turn) -> None:
        """Record the response of the next turn."""
        self.turns.append(turn)
        if len(turn.versions):
            oldest = int(turn.versions.min())
            self.oldest = oldest if self.oldest is None else min(self.oldest, oldest)

    def record(self, values: Mapping[NestedKey, float]) -> None:
        """Record what the environment returned to the last response, in each column."""
        for name, value in values.items():
            (self.rewards if name == REWARD else self.columns.setdefault(name, [])).append(value)

    def end_segment(self, context: npt.NDArray[np.int64]) -> None:
        """Record that the context ``[l]`` before the last response is cut after it, where the next
        segment begins."""
        self.contexts.append(np.concatenate([context, self.turns[-1].tokens]))

    def end(
        self, context: npt.NDArray[np.int64], stop_reason: int, *, terminated: bool, truncated: bool, success: bool
    ) -> None:
        """Record the last context ``[l]`` and how the episode ended."""
        self.contexts.append(context)
        self.stop_reason, self.success = stop_reason, success
        self.terminated, self.truncated = terminated, truncated
