"""Episodes continued from the middle: :func:`branch`; and what states are worth by that:
:func:`value_states`.

A task and the responses up to a turn are a saved environment: they are replayed in a slot, and the
policy continues from there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchrl_llm.collectors._queue import EpisodeSource
from torchrl_llm.collectors.async_turn import STEP_TIMEOUT, ThreadExecutor, slots_of
from torchrl_llm.envs.env import GEMEnv
from torchrl_llm.envs.faults import EnvironmentFault, FaultCounter
from torchrl_llm.envs.games import SelfPlayEnv
from torchrl_llm.envs.slots import SlotMachine
from torchrl_llm.episode import Episode
from torchrl_llm.modules.policy import TurnPolicy
from torchrl_llm.utils.options import Checked, Count, Natural, PositiveShare, Share

BRANCH_IDS = 2**61
"""The episode ids of continuations are the 2**61 from here on, of which no stream of
:mod:`torchrl_llm.envs.tasks` has any."""

FAULT_SCOPE = "of the continuations of a batch"


Points = Sequence[tuple[Episode, int]]
"""Episodes, each with the turn before which it is continued."""


class ReplayError(RuntimeError):
    """An environment did not repeat itself when its task and the responses were replayed."""


@dataclass(frozen=True, kw_only=True)
class Branches(Checked):
    """How the states of episodes are valued by continuing from them, see :func:`value_states`.

    Args:
        count: continuations of a state.
        share: of the states that are valued, in (0, 1]. A hash of the task and the responses so far
            decides which: a choice that depends on what follows, such as on the number of turns,
            would bias the credit. Default: 1.0.
        gamma: discount per turn of the values, the estimator's. Default: 1.0.

    Raises:
        ConfigError: one of them is out of its range.
    """

    count: Count
    share: PositiveShare = 1.0
    gamma: Share = 1.0


class StateValues(NamedTuple):
    """What :func:`value_states` found.

    Attributes:
        values: ``[B, T]`` float32, the mean return of the continuations of the state before each
            turn; NaN where it has none, 0 behind an episode's end.
        continuations: how many were played.
        turns: that the policy sampled in them.
    """

    values: Tensor
    continuations: int
    turns: int


def branch(
    env: GEMEnv,
    policy: TurnPolicy,
    points: Points,
    *,
    count: Count = 1,
    greedy: bool = False,
    max_faults: Natural | FaultCounter = 16,
) -> list[list[Episode]]:
    """Continue finished episodes from the middle, several times each.

    A continuation is an episode of the same task and group: the first ``turn`` responses are
    replayed, and the policy samples the rest. Its ``episode_id``, by which the policy draws its
    noise, is a hash of the state and of how many continuations it had before. So equal states have
    different continuations, and the same weights sample the same ones, whatever else runs: nothing
    of them has to be saved with a run.

    Args:
        env: that collected the episodes, or one made and seeded like it. No episode may be running
            in it.
        policy: samples what follows.
        points: each an episode and the turn, counted from 0, before which it is continued.
        count: continuations of each. Default 1.
        greedy: decode greedily; then all of a state are the same. Default False.
        max_faults: continuations tolerated whose environment fails; they are left out. A counter
            counts on. Default 16.

    Returns:
        For each point its continuations, fewer than ``count`` where some failed.

    Raises:
        TypeError: the environment is not a GEMEnv, or is of games of several players.
        ValueError: an episode has no such turn, or is of no task of the environment.
        RuntimeError: an episode is running in the environment.
        ReplayError: a replayed turn showed or paid something else than before: the environment is
            no function of its seed.
        EnvironmentFault: more than ``max_faults`` continuations failed.

    Examples:
        >>> from torchrl_llm.collectors import TurnCollector
        >>> from torchrl_llm.testing.environments import StopOrGo
        >>> from torchrl_llm.testing.policies import ScriptedPolicy
        >>> from torchrl_llm.testing.tokenizers import byte_tokenizer
        >>> tokenizer = byte_tokenizer()
        >>> env = GEMEnv(StopOrGo, tokenizer=tokenizer, num_envs=2, max_output_tokens=32, max_turns=3)
        >>> policy = ScriptedPolicy(lambda episode, *_: "go" if episode < BRANCH_IDS else "stop", tokenizer=tokenizer)
        >>> collector = TurnCollector(env, policy, batch_size=1)
        >>> collector.rollout()["turn", "mask"].tolist()
        [[True, True, True]]
        >>> [episode] = collector.episodes
        >>> [[len(each.turns) for each in found] for found in branch(env, policy, [(episode, 0), (episode, 1)], count=2)]
        [[1, 1], [2, 2]]
    """
    slots = slots_of(env)
    _check(env, points)
    counter = max_faults if isinstance(max_faults, FaultCounter) else FaultCounter(max_faults, FAULT_SCOPE)
    source = _Continuations(slots, points, count, counter)
    timeout = env.step_timeout or STEP_TIMEOUT
    executor = BranchExecutor(slots, policy, source, greedy=greedy, num_threads=env.num_threads, step_timeout=timeout)
    try:
        while executor.step():
            pass
    except BaseException:
        # Nothing of this is to answer later: neither the policy nor an environment.
        policy.cancel()
        for slot in range(len(slots)):
            slots.renew(slot)
        raise
    finally:
        executor.close(timeout)
    for (origin, turn), continuations in zip(points, source.found, strict=True):
        if any(len(each.turns) <= turn for each in continuations):
            raise _replay_error(slots, origin, turn)
    return source.found


def value_states(
    env: GEMEnv,
    policy: TurnPolicy,
    episodes: Sequence[Episode],
    branches: Branches,
    *,
    greedy: bool = False,
    max_faults: Natural = 16,
) -> StateValues:
    """What the states of episodes are worth: the mean return of continuations from each of them.

    It is what :class:`~torchrl_llm.objectives.TurnVine` reads. A state that several episodes of a
    group passed, with equal responses, is continued once. A continuation that is cut off counts 0
    from there on, as an episode does where there is no critic.

    Args:
        env, policy, greedy, max_faults: see :func:`branch`.
        episodes: B finished ones, of up to T turns.
        branches: how many continuations, of which states.

    Raises:
        Exception: what :func:`branch` raises.
    """
    places: dict[int, list[tuple[int, int]]] = {}
    for i, episode in enumerate(episodes):
        for turn, state in zip(range(len(episode.turns)), _states(episode), strict=True):
            places.setdefault(state, []).append((i, turn))
    chosen = [at for state, at in places.items() if state < branches.share * 2**64]
    points = [(episodes[i], turn) for (i, turn), *_ in chosen]
    found = branch(env, policy, points, count=branches.count, greedy=greedy, max_faults=max_faults)
    values = torch.zeros(len(episodes), max((len(each.turns) for each in episodes), default=0))
    for i, episode in enumerate(episodes):
        values[i, : len(episode.turns)] = torch.nan
    turns = 0
    for at, continuations in zip(chosen, found, strict=True):
        returns = [_return_from(each, at[0][1], branches.gamma) for each in continuations]
        turns += sum(len(each.turns) - at[0][1] for each in continuations)
        for place in at if returns else ():
            values[place] = float(np.mean(returns))
    return StateValues(values, sum(map(len, found)), turns)


def _return_from(episode: Episode, turn: int, gamma: float) -> float:
    return sum(gamma**k * reward for k, reward in enumerate(episode.rewards[turn:]))


def _states(episode: Episode) -> Iterator[int]:
    """The state before each turn: a hash in [0, 2**64) of the task and of the responses so far."""
    digest = blake2b(episode.group_id.to_bytes(8, "big"), digest_size=8)
    for turn in episode.turns:
        yield int.from_bytes(digest.digest(), "big")
        digest.update(len(turn.tokens).to_bytes(8, "big") + turn.tokens.astype("<i8").tobytes())


def _index(slots: SlotMachine, episode: Episode) -> int | None:
    """The index of an episode's task in the sampler, which not every executor keeps; ``None``: it
    is none of its tasks."""
    index = slots.task_sampler.index_of(episode.episode_id, episode.group_id)
    return index if index is not None and slots.task_sampler[index].env_id == episode.env_id else None


def _check(env: GEMEnv, points: Points) -> None:
    if isinstance(env, SelfPlayEnv):
        raise TypeError("env is a SelfPlayEnv; expected a GEMEnv: the seats of a game cannot be continued one by one.")
    if any(slot.live for slot in env.slots):
        raise RuntimeError("An episode is running in the environment: continue others between batches only.")
    for episode, turn in points:
        if not (episode.finished and 0 <= turn < len(episode.turns)):
            raise ValueError(
                f"Turn {turn} of episode {episode.episode_id} is to be continued, which has {len(episode.turns)} turns; expected "
                "a finished episode and one of its turns, counted from 0."
            )
        if _index(env.slots, episode) is None:
            raise ValueError(f"Episode {episode.episode_id} is of no task of env; expected the one that collected it.")


def _replay_error(slots: SlotMachine, origin: Episode, turn: int) -> ReplayError:
    return ReplayError(
        f"Episode {origin.episode_id} of {slots.names[origin.env_id]!r} was replayed with its seed and responses, and went otherwise "
        f"before turn {turn}: the environment draws chance from elsewhere. Make it a function of its seed, or do not branch."
    )


class _Continuations(EpisodeSource):
    """The continuations that are to be played, and those that were."""

    def __init__(self, slots: SlotMachine, points: Points, count: int, faults: FaultCounter) -> None:
        self.origin: dict[Episode, tuple[Episode, int]] = {}
        self.found: list[list[Episode]] = []
        self._faults = faults
        before = Counter[int]()
        for origin, turn in points:
            self.found.append([])
            index, state = _index(slots, origin), [*_states(origin)][turn]
            assert index is not None  # checked before
            for _ in range(count):
                key = blake2b(f"{state} {before[state]}".encode(), digest_size=8).digest()
                before[state] += 1
                noise = BRANCH_IDS + int.from_bytes(key, "big") % BRANCH_IDS
                episode = Episode(index, noise, origin.group_id, origin.env_id)
                self.origin[episode] = origin, turn
                self.found[-1].append(episode)
        self._left = iter([*self.origin])

    def next(self) -> Episode | None:
        return next(self._left, None)

    def fail(self, episode: Episode, fault: EnvironmentFault) -> None:
        for each in self.found:
            if episode in each:
                each.remove(episode)
        self._faults.record(fault)

    def count_timeout(self) -> None:
        """Nothing: no continuation is released while its environment is called."""


class BranchExecutor(ThreadExecutor):
    """Replays the first responses of each episode, and asks the policy for the others.

    The arguments are the same as of :class:`~torchrl_llm.collectors.async_turn.ThreadExecutor`; the
    queue knows the origin of every episode.
    """

    _queue: _Continuations

    def _request(self, slot: int, episode: Episode) -> None:
        (origin, turn), done = self._queue.origin[episode], len(episode.turns)
        if done <= turn:
            given = origin.turns[done]
            shown = origin.contexts[given.segment][: given.start]
            # As float32, in which the rewards of a turn view are.
            paid = np.array_equal(np.array(episode.rewards, np.float32), np.array(origin.rewards[:done], np.float32))
            if not (paid and np.array_equal(self.slots.context(slot), shown)):
                raise _replay_error(self.slots, origin, done)
        if done >= turn:
            super()._request(slot, episode)
        else:
            episode.add(given)
            with self._generators():
                self._send(slot, given.tokens.tolist())
