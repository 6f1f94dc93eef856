"""Episodes in flight, and what failures cost: :class:`EpisodeQueue`, :class:`FaultPolicy`.

How and where episodes are played is an executor's business (:class:`RolloutExecutor`).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

from torchrl_llm.envs.text_env import EnvironmentFault
from torchrl_llm.episode import Episode

logger = logging.getLogger(__name__)

Fault = EnvironmentFault | TimeoutError


class RolloutExecutor(Protocol):
    """Plays episodes, each to its end, in any order. One thread calls it at a time, but for :meth:`wake`."""

    @property
    def in_flight(self) -> int:
        """What was asked of environments and policy, and is not answered yet."""

    def step(self) -> bool:
        """Start episodes while there is room, and play on; returns whether anything is in flight.

        Waits only if there is nothing else to do, and not for long.
        """

    def release(self, episode: Episode) -> None:
        """Stop playing ``episode``, if it is played."""

    def clear(self) -> None:
        """Stop playing all episodes, and wait until nothing runs."""

    def wake(self) -> None:
        """End a wait in :meth:`step`."""

    def close(self, timeout: float) -> None:
        """Give up what is in flight after ``timeout`` seconds, and free what plays."""


@dataclass
class FaultPolicy:
    """What failed environments cost: their groups are dropped and replaced, up to a limit.

    Attributes:
        max_faults: failed episodes tolerated for one batch; one more raises the first of them.
        keep_failed: deliver failed episodes as far as they were played, and replace none.
        counts: failed episodes so far, by "error", "timeout" and "context" (the first prompt leaves no room for a response).
    """

    max_faults: int = 16
    keep_failed: bool = False
    counts: Counter[str] = field(default_factory=Counter)
    _of_batch: list[Fault] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.max_faults < 0:
            raise ValueError(f"max_faults is {self.max_faults!r}; expected >= 0.")

    @property
    def any_of_batch(self) -> bool:
        """Whether an episode has failed since the last batch."""
        return bool(self._of_batch)

    def record(self, fault: Fault) -> None:
        """Count a failed episode.

        Raises:
            EnvironmentFault: the first since the last batch, if there were more than ``max_faults``.
        """
        self.counts[reason_of(fault)] += 1
        # A call that comes back too late, of an episode that had been dropped, is no fault of this batch.
        if not isinstance(fault, EnvironmentFault):
            return
        self._of_batch.append(fault)
        if (count := len(self._of_batch)) > self.max_faults:
            first, self._of_batch = self._of_batch[0], []
            first.add_note(f"It was the first of {count} failed episodes of a batch; max_faults={self.max_faults}.")
            raise first

    def next_batch(self) -> None:
        """Count from 0 again: a batch is complete."""
        self._of_batch.clear()


def reason_of(fault: Fault) -> str:
    """What a failure is counted as."""
    return fault.stop_reason.name.lower() if isinstance(fault, EnvironmentFault) else "timeout"


class EpisodeQueue:
    """Episodes between the task and the batch, in the order dealt.

    An episode is drawn, played and popped with a batch; or dropped with its whole group, because a member failed or is too old.
    Members of a dropped group that are drawn later are skipped.

    Args:
        draw: the next episode, by its task; raises where the environment deals by itself.
        release: called with every dropped episode that is not finished.
        group_size: episodes of a group.
        faults: what failures cost.

    Attributes:
        limit: how many episodes may be in the queue.
        episodes: by id, what was drawn and neither popped nor dropped, in the order dealt.
        dropped: dropped episodes, by reason: "error", "timeout" and "context" (of a member of the group), "stale".
    """

    def __init__(
        self, draw: Callable[[], Episode], release: Callable[[Episode], None], *, group_size: int, faults: FaultPolicy
    ) -> None:
        self._next_task, self._release = draw, release
        self.group_size, self.faults = group_size, faults
        self.limit = 0
        self.episodes: dict[int, Episode] = {}
        self.dropped: Counter[str] = Counter()
        self._group, self._members = -1, 0  # the group that is being dealt
        self._skipped: str | None = None  # why the rest of it is dropped
        self._version = -1

    @property
    def room(self) -> int:
        """How many episodes may be added."""
        return max(0, self.limit - len(self.episodes))

    def next(self) -> Episode | None:
        """The next episode to play; ``None`` if there is no room."""
        while self.room:
            if self.add(episode := self._next_task()):
                return episode
        return None

    def add(self, episode: Episode) -> bool:
        """Add an episode; False if its group was dropped, and it need not be played."""
        if episode.group_id != self._group:
            self._group, self._members, self._skipped = episode.group_id, 0, None
        self._members += 1
        if self._skipped is not None:
            self.dropped[self._skipped] += 1
            return False
        self.episodes[episode.episode_id] = episode
        return True

    def pop_batch(self, size: int, version: int, max_staleness: int) -> list[Episode] | None:
        """The next ``size`` episodes in the order dealt; ``None`` if they are not all finished.

        Episodes with a token of weights more than ``max_staleness`` older than ``version`` are dropped with their groups.

        Raises:
            RuntimeError: tasks are missing, and no environment has failed.
        """
        oldest = version - max_staleness
        if self._version != version:
            self._version = version
            self._drop_stale(list(self.episodes.values()), oldest)
        while True:
            batch = list(islice(self.episodes.values(), size))
            if len(batch) < size or not all(episode.finished for episode in batch):
                return None
            if not self._drop_stale(batch, oldest) and not self._drop_incomplete(batch):
                break
        for episode in batch:
            del self.episodes[episode.episode_id]
        self.faults.next_batch()
        return batch

    def fail(self, episode: Episode | None, fault: Fault) -> None:
        """Count a failed episode and drop its group; ``None``: one that had been dropped before, and timed out.

        Raises:
            EnvironmentFault: too many failed, see :class:`FaultPolicy`.
        """
        if episode is not None:
            logger.warning("%s Its group is dropped; other tasks fill the batch.", fault)
            self.drop(episode.group_id, reason_of(fault))
        self.faults.record(fault)

    def drop(self, group: int, reason: str) -> None:
        """Drop a whole group, also the members that are not dealt yet."""
        for episode in [each for each in self.episodes.values() if each.group_id == group]:
            del self.episodes[episode.episode_id]
            self.dropped[reason] += 1
            if not episode.finished:
                self._release(episode)
        if group == self._group and self._members < self.group_size:
            self._skipped = reason

    def clear(self) -> None:
        """Forget all episodes."""
        self.episodes.clear()
        self._group, self._members, self._skipped = -1, 0, None

    def _drop_stale(self, episodes: Sequence[Episode], oldest: int) -> bool:
        groups = {episode.group_id for episode in episodes if episode.is_stale(oldest)}
        for group in groups:
            self.drop(group, "stale")
        return bool(groups)

    def _drop_incomplete(self, batch: Sequence[Episode]) -> bool:
        """Drop groups that lack a member: one that failed at its reset, in an environment that deals by itself."""
        if self.faults.keep_failed:
            return False
        # Of the last group further members may be dealt.
        sizes = Counter(episode.group_id for episode in self.episodes.values() if episode.group_id != self._group)
        incomplete = [group for group in {episode.group_id for episode in batch} if 0 < sizes[group] < self.group_size]
        if incomplete and not self.faults.any_of_batch:
            found = Counter(episode.group_id for episode in batch)
            raise RuntimeError(
                f"The environment dealt {len(batch)} episodes in groups of {sorted(set(found.values()))}; expected "
                f"{len(batch)} in groups of {self.group_size}. Was it reset by something else than this collector? "
                "A reset of all its slots keeps groups whole; a partial one may not."
            )
        for group in incomplete:
            self.drop(group, "error")
        return bool(incomplete)
