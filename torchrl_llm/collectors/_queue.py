"""Episodes in flight: :class:`EpisodeQueue`; and what runs them: :class:`RolloutExecutor`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Protocol

from torchrl_llm.envs.faults import EnvironmentFault, FaultCounter
from torchrl_llm.episode import Episode


class EpisodeSource(Protocol):
    """Where an executor gets episodes from, and reports failures to."""

    def next(self) -> Episode | None:
        """The next episode to run; ``None`` if there is no room."""

    def fail(self, episode: Episode, fault: EnvironmentFault) -> None:
        """Report an episode whose environment failed."""

    def count_timeout(self) -> None:
        """Report an environment that did not answer in time, for an episode that had been
        released."""


class RolloutExecutor(Protocol):
    """Runs episodes, each to its end, in any order. One thread calls it at a time, except for
    :meth:`wake`."""

    @property
    def in_flight(self) -> int:
        """Requests to environments and policy that are not answered yet."""

    def step(self) -> bool:
        """Start episodes while there is room, and continue those that run; returns whether anything
        is in flight.

        Waits only if there is nothing else to do, and not for long.
        """

    def release(self, episode: Episode) -> None:
        """Stop ``episode``, if it runs."""

    def clear(self) -> None:
        """Stop all episodes, and wait until nothing runs."""

    def wake(self) -> None:
        """End a wait in :meth:`step`. Default: does nothing, for executors whose steps are
        short."""
        return

    def close(self, timeout: float) -> None:
        """Stop waiting for what is in flight after ``timeout`` seconds, and free threads and
        processes."""


class EpisodeQueue:
    """Episodes between the task and the batch, in the order sampled.

    An episode is sampled, run, and delivered in a batch; or it is dropped with its whole group,
    because a member failed or is too old. Members of a dropped group that are sampled later are
    skipped.

    Args:
        next_task: samples the next task; raises where the environment samples by itself.
        release: called with every dropped episode that is not finished.
        group_size: episodes of a group.
        max_faults: failed episodes tolerated for one batch; one more raises the first of them.
        keep_failed: deliver failed episodes as far as they were collected, and replace none.

    Attributes:
        limit: how many episodes may be in the queue.
        episodes: by id, what was sampled and neither delivered nor dropped, in the order sampled.
        dropped: dropped episodes, by reason: "error", "timeout" and "context" (of a member of the
            group), "stale".
        faults: counts failed episodes.
    """

    def __init__(
        self,
        next_task: Callable[[], Episode],
        release: Callable[[Episode], None],
        *,
        group_size: int,
        max_faults: int,
        keep_failed: bool,
    ) -> None:
        self._next_task, self._release = next_task, release
        self.group_size, self.keep_failed = group_size, keep_failed
        self.limit = 0
        self.episodes: dict[int, Episode] = {}
        self.dropped: Counter[str] = Counter()
        self.faults = FaultCounter(max_faults, "of a batch")
        self._group, self._members = -1, 0  # the group that is being sampled
        self._skipped: str | None = None  # why the rest of it is dropped
        self._version = -1
        self._finished = 0  # so many of the first episodes are known to have ended

    @property
    def room(self) -> int:
        """How many episodes may be added."""
        return max(0, self.limit - len(self.episodes))

    def next(self) -> Episode | None:
        """The next episode to run; ``None`` if there is no room."""
        while self.room:
            if self.add(episode := self._next_task()):
                return episode
        return None

    def add(self, episode: Episode) -> bool:
        """Add the next sampled episode. False if its group was dropped, so that it need not run."""
        if episode.group_id != self._group:
            self._group, self._members, self._skipped = episode.group_id, 0, None
        self._members += 1
        if self._skipped is not None:
            self.dropped[self._skipped] += 1
            return False
        self.episodes[episode.episode_id] = episode
        return True

    def pop_batch(self, size: int, version: int, max_staleness: int) -> list[Episode] | None:
        """The next ``size`` episodes in the order sampled; ``None`` if they are not all finished.

        Episodes with a token of weights more than ``max_staleness`` older than ``version`` are
        dropped with their groups.

        Raises:
            RuntimeError: tasks are missing, and no environment has failed.
        """
        oldest = version - max_staleness
        # Nothing grows older in between, and this goes through all episodes.
        if self._version != version:
            self._version = version
            self._drop_stale([*self.episodes.values()], oldest)
        while True:
            # In the order sampled, which the dictionary keeps: the first to finish would be the
            # short ones.
            if not self._has_finished(size):
                return None
            batch = [*islice(self.episodes.values(), size)]
            if not self._drop_stale(batch, oldest) and not self._drop_incomplete(batch):
                break
        for episode in batch:
            self._remove(episode)
        # max_faults is for one batch.
        self.faults.recent.clear()
        return batch

    def fail(self, episode: Episode, fault: EnvironmentFault) -> None:
        """Count a failed episode and drop its group.

        Raises:
            EnvironmentFault: too many failed, see :class:`~torchrl_llm.envs.faults.FaultCounter`.
        """
        self.faults.warn(fault, "Its group is dropped; other tasks fill the batch.")
        # Before it is counted, which raises if there were too many.
        self.drop(episode.group_id, fault.reason)
        self.faults.record(fault)

    def count_timeout(self) -> None:
        """Count an environment that did not answer in time, after its group was dropped: no failure
        of this batch."""
        self.faults.counts["timeout"] += 1

    def drop(self, group: int, reason: str) -> None:
        """Drop a whole group, also the members that are not sampled yet."""
        for episode in [each for each in self.episodes.values() if each.group_id == group]:
            self._remove(episode)
            self.dropped[reason] += 1
            if not episode.finished:
                self._release(episode)
        # The rest of the group is sampled and skipped: the next group starts at its own place in
        # the sequence of tasks.
        if group == self._group and self._members < self.group_size:
            self._skipped = reason

    def clear(self) -> None:
        """Forget all episodes."""
        self.episodes.clear()
        self._group, self._members, self._skipped, self._finished = -1, 0, None, 0

    def _remove(self, episode: Episode) -> None:
        del self.episodes[episode.episode_id]
        self._finished = 0

    def _has_finished(self, size: int) -> bool:
        """Whether the first ``size`` episodes have ended; asked after every step, so it continues
        where it stopped."""
        for episode in islice(self.episodes.values(), self._finished, size):
            if not episode.finished:
                return False
            self._finished += 1
        return self._finished >= size

    def _drop_stale(self, episodes: Sequence[Episode], oldest: int) -> bool:
        groups = {episode.group_id for episode in episodes if episode.is_stale(oldest)}
        for group in groups:
            self.drop(group, "stale")
        return bool(groups)

    def _drop_incomplete(self, batch: Sequence[Episode]) -> bool:
        """Drop groups that lack a member: one that failed at its reset, in an environment that
        samples by itself."""
        if self.keep_failed:
            return False
        # Of the last group further members may be sampled.
        sizes = Counter(episode.group_id for episode in self.episodes.values() if episode.group_id != self._group)
        incomplete = [group for group in {episode.group_id for episode in batch} if 0 < sizes[group] < self.group_size]
        if incomplete and not self.faults.recent:
            found = Counter(episode.group_id for episode in batch)
            raise RuntimeError(
                f"The environment sampled {len(batch)} episodes in groups of {sorted(set(found.values()))}; expected "
                f"{len(batch)} in groups of {self.group_size}. Was it reset by something else than this collector? "
                "A reset of all its slots keeps groups whole; a partial one may not."
            )
        for group in incomplete:
            self.drop(group, "error")
        return bool(incomplete)
