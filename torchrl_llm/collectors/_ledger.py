"""Which tickets are out and what becomes of them: :class:`Ledger`.

Who plays them, and where, is a player's business (:mod:`~torchrl_llm.collectors._player`, in this process, or
:mod:`~torchrl_llm.collectors._workers`, on Ray).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Literal, Protocol, cast

from torchrl_llm.collectors._episode import Episode
from torchrl_llm.envs.env import GEMEnv
from torchrl_llm.envs.text_env import EnvironmentFault

logger = logging.getLogger(__name__)

Reason = Literal["error", "timeout", "context", "stale"]


class Player(Protocol):
    """Plays episodes, each to its end, in any order. One thread calls it at a time."""

    @property
    def in_flight(self) -> int:
        """What was asked of environments and policy, and is not answered yet."""

    def round(self, deal: Callable[[], Episode | None]) -> bool:
        """Start what ``deal`` gives while there is room, and play on. Returns whether anything is in flight.

        Waits only if there is nothing else to do, and not for long.
        """

    def vacate(self, episode: Episode) -> None:
        """Play ``episode`` no further, if it is played."""

    def clear(self) -> None:
        """Play nothing any further, and wait until nothing is."""

    def wake(self) -> None:
        """End a wait in :meth:`round`; another thread may call this."""

    def close(self, timeout: float) -> None:
        """Give up what is in flight after ``timeout`` seconds, and free what plays."""


class Ledger:
    """Deals tickets in order, drops whole groups, and hands over batches in the order dealt.

    Args:
        env: its tickets are dealt, and its counter is the one that counts them.
        vacate: called for every dropped episode that is not finished.
        max_faults: failed episodes tolerated from one :meth:`take` to the next.

    Attributes:
        episodes: dealt and neither taken nor dropped, in the order dealt.
        dropped: dropped episodes, by reason: "error", "timeout" and "context" (of a member of the group), "stale".
        faults: failed episodes, by "error", "timeout" and "context" (the first prompt leaves no room for a response).
    """

    def __init__(self, env: GEMEnv, *, vacate: Callable[[Episode], None], max_faults: int) -> None:
        self.env, self.max_faults = env, max_faults
        self.episodes: dict[int, Episode] = {}
        self.dropped: Counter[Reason] = Counter()
        self.faults: Counter[Reason] = Counter()
        self._vacate = vacate
        self._torn: tuple[int, Reason] | None = None  # a group dropped before all its members were dealt
        self._faults_since: list[EnvironmentFault] = []
        self._version = -1

    def deal(self, room: int) -> Episode | None:
        """The next ticket; ``None`` if ``room`` are out."""
        self._check_whole()
        while len(self.episodes) < room:
            index = self.env.draw()
            ticket = self.env.tickets[index]
            if self._torn is not None and ticket.group_id == self._torn[0]:
                self.dropped[self._torn[1]] += 1
                continue
            self._torn = None
            self.episodes[index] = episode = Episode(index, ticket)
            return episode
        return None

    def take(self, count: int, version: int, max_staleness: int) -> list[Episode] | None:
        """The next ``count`` episodes in the order dealt; ``None`` if they are not all finished.

        Episodes with a token of weights more than ``max_staleness`` older than ``version`` are dropped with their groups.
        """
        oldest = version - max_staleness
        if self._version != version:
            self._version = version
            self._drop_stale(list(self.episodes.values()), oldest)
        while True:
            batch = list(islice(self.episodes.values(), count))
            if len(batch) < count or not all(episode.finished for episode in batch):
                return None
            if not self._drop_stale(batch, oldest):
                break
        for episode in batch:
            del self.episodes[episode.index]
        self._faults_since = []
        return batch

    def fault(self, episode: Episode | None, fault: EnvironmentFault | TimeoutError) -> None:
        """Count a failed episode and drop its group; ``None``: one that had been dropped before, and timed out.

        Raises:
            EnvironmentFault: the first, if there were more than ``max_faults``.
        """
        if episode is None or not isinstance(fault, EnvironmentFault):
            self.faults["timeout"] += 1
            return
        reason = cast(Reason, fault.stop_reason.name.lower())
        self.faults[reason] += 1
        self._faults_since.append(fault)
        logger.warning("%s Its group is dropped; other tickets fill the batch.", fault)
        self._drop(episode.ticket.group_id, reason)
        if (count := len(self._faults_since)) > self.max_faults:
            first = self._faults_since[0]
            first.add_note(f"It was the first of {count} failed episodes of a batch; max_faults={self.max_faults}.")
            raise first

    def next_index(self) -> int:
        """The first ticket that was neither taken nor dropped: where a run goes on that starts anew from here."""
        dealt = self.env.num_dealt
        return next(iter(self.episodes), dealt - dealt % self.env.group_size)

    def clear(self) -> None:
        """Forget all episodes that are out."""
        self.episodes.clear()
        self._torn = None

    def _check_whole(self) -> None:
        if not self.episodes and self._torn is None and self.env.num_dealt % self.env.group_size:
            raise RuntimeError(
                f"The next ticket is {self.env.num_dealt}, inside a group of {self.env.group_size}. Was the environment "
                "reset by something else than this collector? A reset of all its slots keeps groups whole; a partial one "
                "may not."
            )

    def _drop_stale(self, episodes: Sequence[Episode], oldest: int) -> bool:
        groups = {episode.ticket.group_id for episode in episodes if episode.stale(oldest)}
        for group in groups:
            self._drop(group, "stale")
        return bool(groups)

    def _drop(self, group: int, reason: Reason) -> None:
        """Drop a whole group, also the members that are not dealt yet."""
        for episode in [each for each in self.episodes.values() if each.ticket.group_id == group]:
            del self.episodes[episode.index]
            self.dropped[reason] += 1
            if not episode.finished:
                self._vacate(episode)
        dealt = self.env.num_dealt
        if dealt % self.env.group_size and self.env.tickets[dealt].group_id == group:
            self._torn = group, reason
