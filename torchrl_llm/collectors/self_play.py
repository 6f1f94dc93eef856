"""Games whose players all learn: :class:`SelfPlayCollector`, :class:`TableExecutor`.

A seat is a slot, and its episode a conversation like any other; only its turns wait for the other
seats. Games themselves are in :mod:`torchrl_llm.envs.games`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from torchrl_llm.collectors._queue import EpisodeSource
from torchrl_llm.collectors.async_turn import STEP_TIMEOUT, ThreadExecutor
from torchrl_llm.collectors.collector import EpisodeCollector
from torchrl_llm.envs.contexts import num_tokens
from torchrl_llm.envs.faults import EnvironmentFault
from torchrl_llm.envs.games import GameSlots, SelfPlayEnv
from torchrl_llm.envs.slots import Reply
from torchrl_llm.envs.tasks import TaskSampler
from torchrl_llm.episode import Episode, Turn
from torchrl_llm.modules.policy import TurnPolicy, TurnRequest, TurnResponse
from torchrl_llm.utils.options import Count


class SelfPlayCollector(EpisodeCollector):
    """Plays games of several players in which one policy has all seats, and delivers an episode for
    each seat.

    Batches are as of :class:`~torchrl_llm.collectors.TurnCollector`: rows ``[B]`` in the order
    sampled, by one version of the policy, with nothing in flight between them, and a resumed run
    continues exactly. The episodes of a game are neighbors in a batch, one a seat in the order of
    the players, each with its own context and reward; all are trained on. All seats that are to
    move are asked in one call of the policy, over all games.

    The seats of a game have different tasks, and a game that one of them wins the others lose. So
    in the rows each episode is a group of its own (``"group_id"``), and nothing compares them;
    episodes of the same seat in other games are compared by
    :class:`~torchrl_llm.objectives.RoleRelative`. The players of a game have consecutive values of
    ``"episode_id"``.

    A game that fails is dropped with all its seats, and another one fills the batch. A seat whose
    game ended before it moved has an episode of one turn without a response (:attr:`passed`): its
    reward counts in metrics, and nothing is learned from it.

    With an ``opponent``, a batch is a match: in the n-th game the policy has the seat
    ``n % players``, the opponent all others, and only the policy's episodes are delivered,
    ``batch_size / players`` of them.

    Args:
        env: a :class:`~torchrl_llm.envs.SelfPlayEnv`, or a function that makes it.
        policy: a :class:`~torchrl_llm.modules.policy.TurnPolicy`.
        batch_size: episodes B of a batch, of all seats.
        opponent: another policy, which does not learn; default none.
        max_faults: failed games tolerated for one batch; one more raises an ``EnvironmentFault``.
            Default 16.
        total_frames, total_batches, replay_buffer, postproc, exploration_type, weight_sync_schemes,
            pre_collect_hook, post_collect_hook: see :class:`~torchrl_llm.collectors.TurnCollector`.

    Raises:
        TypeError: ``env`` is not a SelfPlayEnv.
        ValueError: ``batch_size`` is not a multiple of the number of players.
        EnvironmentFault: at ``next()``, more than ``max_faults`` games failed.

    Attributes:
        passed: episodes so far whose seat never got to move.

    Examples:
        >>> from torchrl_llm.testing.take_away import TakeAway
        >>> from torchrl_llm.testing.policies import ScriptedPolicy
        >>> from torchrl_llm.testing.tokenizers import byte_tokenizer
        >>> tokenizer = byte_tokenizer()
        >>> env = SelfPlayEnv(lambda: TakeAway(5, 5), tokenizer=tokenizer, num_envs=4, max_output_tokens=4)
        >>> policy = ScriptedPolicy(lambda episode, turn, _: "2" if turn else "1", tokenizer=tokenizer, max_output_tokens=4)
        >>> rows = SelfPlayCollector(env, policy, batch_size=4).rollout()
        >>> rows["turn", "reward"].tolist(), rows["episode_id"].tolist()
        ([[0.0, 1.0], [0.0, -1.0], [0.0, 1.0], [0.0, -1.0]], [0, 1, 2, 3])
    """

    def __init__(
        self,
        env: SelfPlayEnv | Callable[[], SelfPlayEnv],
        policy: TurnPolicy,
        *,
        batch_size: Count,
        opponent: TurnPolicy | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(env, policy, batch_size=batch_size, **kwargs)
        if not isinstance(self.env, SelfPlayEnv):
            raise TypeError(
                f"env is a {type(self.env).__name__}; expected a SelfPlayEnv, whose slots are the seats of games. What a transform "
                "would do belongs into postproc or the replay buffer's transform."
            )
        self.opponent = opponent
        self._executor = TableExecutor(self.env.slots, policy, self._queue, greedy=self._greedy, opponent=opponent)

    @property
    def passed(self) -> int:
        return self._executor.passed if isinstance(self._executor, TableExecutor) else 0

    def metrics(self) -> dict[str, float]:
        return super().metrics() | {"data/passed": float(self.passed)}

    def _next_batch(self) -> list[Episode]:
        episodes = super()._next_batch()
        if self.opponent is not None:
            episodes = [each for each in episodes if is_learners(each, self.env.task_sampler)]
        for episode in episodes:
            episode.group_id = episode.episode_id
        return episodes

    def _after_error(self, error: BaseException) -> None:
        # Nothing runs apart from this thread, so a later rollout may sample further games.
        self._forget()


def is_learners(episode: Episode, task_sampler: TaskSampler) -> bool:
    """Whether the policy, and not the opponent, has the seat of an episode: seat ``n % players`` of
    the n-th game of a stream.

    Examples:
        >>> task_sampler = TaskSampler(group_size=2)
        >>> [is_learners(Episode(index, *task_sampler[index][:3]), task_sampler) for index in range(6)]
        [True, False, False, True, True, False]
    """
    base, players = task_sampler.base, task_sampler.group_size
    return (episode.episode_id - base) % players == (episode.group_id - base) % players


class TableExecutor(ThreadExecutor):
    """Runs the episodes of whole games, over groups of slots, in the caller's thread.

    A response is a move in its match. The seat that made it is answered when it is its turn
    again, or the game has ended.

    Args:
        slots: used by nothing else meanwhile.
        policy: answers single turns.
        queue: the episodes.
        greedy: decode greedily.
        opponent: answers instead of the policy but for one seat of each game (:func:`is_learners`);
            ``None``: the policy has all.
    """

    slots: GameSlots

    def __init__(
        self,
        slots: GameSlots,
        policy: TurnPolicy,
        queue: EpisodeSource,
        *,
        greedy: bool,
        opponent: TurnPolicy | None = None,
    ) -> None:
        players: Any = policy if opponent is None else _Players(policy, opponent, self._is_opponents)
        super().__init__(slots, players, queue, greedy=greedy, num_threads=0, step_timeout=STEP_TIMEOUT)
        self.passed = 0

    def _is_opponents(self, slot: int) -> bool:
        episode = self._episodes[slot]
        return episode is not None and not is_learners(episode, self.slots.task_sampler)

    def _fill(self) -> None:
        with self._generators():
            for first in range(0, len(self.slots), self.slots.group_size):
                seats = self.slots.seats(first)
                if any(self._episodes[slot] is not None or slot in self._calls for slot in seats):
                    continue
                episode = self._queue.next()
                if episode is None:
                    return
                # The rest of the group: batches are whole groups, and no game of this one has
                # failed yet.
                for slot in seats:
                    self._episodes[slot] = episode
                    episode = self._queue.next() if slot < seats[-1] else episode
                self._deal(first)

    def _deal(self, first: int) -> None:
        episode = self._episodes[first]
        assert episode is not None
        try:
            self.slots.start_match(first, episode.index)
        except EnvironmentFault as fault:
            self._fail(first, episode, fault)
        else:
            self._continue(first)

    def _continue(self, slot: int) -> None:
        """Tell those seats of a game that go on what has happened."""
        for each in self.slots.due(slot):
            episode = self._episodes[each]
            if episode is None or each in self._calls:
                continue
            call: Callable[[], Reply]
            if episode.awaits_reward:
                call = partial(self.slots.answer, each, episode.turns[-1].tokens.tolist())
            elif self.slots.ended(each):
                call = partial(self._pass, each, episode)
            else:
                call = partial(self.slots.open, each, episode.index)
            self._calls[each] = self.pool.submit(each, call)

    def _pass(self, slot: int, episode: Episode) -> Reply:
        """End an episode whose seat never got to move."""
        reply = self.slots.open(slot, episode.index)
        self.slots.start(slot, episode.index, reply)
        episode.task_id = self.slots[slot].task_id
        none = np.zeros(0)
        episode.add(
            Turn(num_tokens(reply.spans), 0, none.astype(np.int64), none.astype(np.float32), none.astype(np.int64))
        )
        self.passed += 1
        return self.slots.forgo(slot)

    def _send(self, slot: int, response: list[int]) -> None:
        episode = self._episodes[slot]
        assert episode is not None
        try:
            self.slots.move(slot, response)
        except EnvironmentFault as fault:
            self._fail(slot, episode, fault)
        else:
            self._continue(slot)

    def _advance(self, slot: int, episode: Episode, reply: Reply) -> None:
        super()._advance(slot, episode, reply)
        if episode.finished and not self.slots.ended(slot):
            # A budget has cut this seat's episode, and nobody else can have its turn.
            self.slots.stop(slot)
            self._continue(slot)


class _Players:
    """Policy and opponent as one for an executor.

    Args:
        policy, opponent: the policies.
        is_opponents: whether the opponent is to answer a slot.
    """

    def __init__(self, policy: TurnPolicy, opponent: TurnPolicy, is_opponents: Callable[[int], bool]) -> None:
        self.policies, self.sampling = (policy, opponent), policy.sampling
        self._is_opponents = is_opponents

    @property
    def pending(self) -> int:
        return sum(policy.pending for policy in self.policies)

    def submit(self, request: TurnRequest) -> None:
        self.policies[self._is_opponents(request.slot)].submit(request)

    def poll(self) -> list[TurnResponse]:
        policy, opponent = self.policies
        answers = policy.poll() if policy.pending else []
        if not opponent.pending:
            return answers
        # Its weights do not age: with versions of its own, its side of a game would count as stale,
        # and drop the game.
        version = policy.policy_version
        return [*answers, *(each._replace(versions=np.full_like(each.versions, version)) for each in opponent.poll())]

    def cancel(self, slots: Sequence[int] | None = None) -> None:
        for policy in self.policies:
            policy.cancel(slots)
