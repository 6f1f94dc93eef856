"""Continuous batching over turns: :class:`Scheduler`.

Here lives which ticket a free slot gets, who is asked next, and what is dropped. Threads that call environments are in
:mod:`~torchrl_llm.envs._pool`; when batches are wanted is the collector's business.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import islice
from typing import Literal, cast

from torchrl_llm.collectors._episode import Episode
from torchrl_llm.envs._pool import LOOK, Call, Pool
from torchrl_llm.envs.game import EnvironmentFault, kept_global_rng
from torchrl_llm.envs.gem import GEMEnv, Reply
from torchrl_llm.modules.policy import TurnPolicy, TurnRequest, TurnResponse

logger = logging.getLogger(__name__)

Reason = Literal["error", "timeout", "context", "stale"]


class Scheduler:
    """Plays the tickets of an environment over its slots, each at its own pace. One thread calls it at a time.

    Args:
        env: deals the tickets; nobody else plays it meanwhile.
        policy: answers single turns.
        greedy: decode greedily.
        num_threads: of the pool that calls environments; 0: they are called in this thread, without a time limit.
        step_timeout: seconds that a call of an environment may take.
        max_faults: failed episodes tolerated from one :meth:`take` to the next.

    Attributes:
        episodes: dealt and neither taken nor dropped, in the order dealt.
        dropped: dropped episodes, by reason: "error", "timeout" and "context" (of a member of the group), "stale".
        faults: failed episodes, by "error", "timeout" and "context" (the first prompt leaves no room for a response).
    """

    def __init__(
        self,
        env: GEMEnv,
        policy: TurnPolicy,
        *,
        greedy: bool,
        num_threads: int,
        step_timeout: float,
        max_faults: int,
    ) -> None:
        self.env, self.policy, self.greedy = env, policy, greedy
        self.step_timeout, self.max_faults = step_timeout, max_faults
        self.pool = Pool(num_threads)
        self.episodes: dict[int, Episode] = {}
        self.dropped: Counter[Reason] = Counter()
        self.faults: Counter[Reason] = Counter()
        self._seats: list[Episode | None] = [None] * env.batch_size[0]
        self._free = deque(range(env.batch_size[0]))
        self._calls: dict[int, Call] = {}
        self._said: dict[int, list[int]] = {}
        self._torn: tuple[int, Reason] | None = None  # a group dropped before all its members were dealt
        self._faults_since: list[EnvironmentFault] = []
        self._fresh = 0
        self._linger = self._next_look = 0.0
        self._version = policy.policy_version

    @property
    def in_flight(self) -> int:
        """Calls and requests that are not answered yet."""
        return len(self._calls) + self.policy.pending

    def round(self, room: int) -> bool:
        """Take what environments answered, deal tickets while fewer than ``room`` are out, let the policy go on by a step.

        Waits only if there is nothing else to do. Returns whether anything is in flight.

        Raises:
            EnvironmentFault: more than ``max_faults`` episodes failed.
        """
        self._hear(0.0 if self.policy.pending or not self._calls else self._patience)
        self._deal(room)
        self._gather(room)
        if self.policy.pending:
            self._speak()
        self._give_up()
        return self.in_flight > 0

    def take(self, count: int, oldest: int) -> list[Episode] | None:
        """The next ``count`` episodes in the order dealt; ``None`` if they are not all finished.

        Episodes with a token of weights older than the version ``oldest`` are dropped with their groups.
        """
        if self._version != self.policy.policy_version:
            self._version = self.policy.policy_version
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

    def next_index(self) -> int:
        """The first ticket that was neither taken nor dropped: where a run goes on that starts anew from here."""
        dealt = self.env.num_dealt
        return next(iter(self.episodes), dealt - dealt % self.env.group_size)

    def clear(self) -> None:
        """Forget all episodes that are out, and wait for the environments' calls (each up to ``step_timeout``)."""
        for slot, episode in enumerate(self._seats):
            if episode is not None:
                self._vacate(slot)
        self.episodes.clear()
        self._torn = None
        while self._calls:
            self._hear(self._patience)
            self._give_up()

    # ------------------------------------------------------------------ environments

    @property
    def _patience(self) -> float:
        return min(LOOK, self.step_timeout / 4)

    def _deal(self, room: int) -> None:
        if not self.episodes and self._torn is None and self._free and self.env.num_dealt % self.env.group_size:
            raise RuntimeError(
                f"The next ticket is {self.env.num_dealt}, inside a group of {self.env.group_size}. Was the environment "
                "reset by something else than this collector? A reset of all its slots keeps groups whole; a partial one "
                "may not."
            )
        if not self._free or len(self.episodes) >= room:
            return
        with self._generators():
            while self._free and len(self.episodes) < room:
                self._deal_one()

    def _deal_one(self) -> None:
        index = self.env.draw()
        ticket = self.env.tickets[index]
        if self._torn is not None and ticket.group_id == self._torn[0]:
            self.dropped[self._torn[1]] += 1
            return
        self._torn = None
        slot = self._free.popleft()
        self.episodes[index] = self._seats[slot] = Episode(index, ticket)
        self._call(slot, partial(self.env.open, slot, index))

    def _generators(self) -> AbstractContextManager[None]:
        """Around calls that this thread makes itself: what they draw from is put back once, not after each."""
        return kept_global_rng(for_games=True) if self.pool.num_threads == 0 else nullcontext()

    def _call(self, slot: int, function: Callable[[], Reply]) -> None:
        self._calls[slot] = self.pool.submit(slot, function)

    def _hear(self, timeout: float) -> None:
        """Take what environments answered; wait up to ``timeout`` seconds for the first."""
        for call in self.pool.finished(timeout):
            slot = call.slot
            del self._calls[slot]
            episode = self._seats[slot]
            if episode is None:  # dropped while its call ran
                self._free.append(slot)
            elif isinstance(call.error, EnvironmentFault):
                self._fault(slot, call.error)
            elif call.error is not None:
                raise call.error
            else:
                self._play(slot, episode, call.result)

    def _play(self, slot: int, episode: Episode, reply: Reply) -> None:
        """Take a slot on to a reply; then ask for its next turn, or leave it if that was the last one."""
        if not episode.lengths:
            self.env.start(slot, episode.index, reply)
        elif self.env.slots[slot].index != episode.index:
            raise RuntimeError(
                f"Slot {slot} of the environment was reset by something else than this collector, which plays ticket "
                f"{episode.index} there. Give each user of the environment an environment of its own."
            )
        else:
            if reply.dropped:
                episode.contexts.append(self.env.context(slot).copy())
            self.env.advance(slot, self._said.pop(slot), reply)
            episode.rewards.append(reply.reward)
        playing, context = self.env.slots[slot], self.env.context(slot)
        episode.lengths.append(playing.length)
        episode.segments.append(playing.segment)
        if playing.finished:
            episode.contexts.append(context.copy())
            episode.stop_reason = playing.stop_reason
            self._leave(slot)
        else:
            self.policy.submit(TurnRequest(slot, context, episode.ticket.episode_id, playing.turn, self.greedy))
            self._fresh += 1

    def _give_up(self) -> None:
        """Give up the calls that have been with their environments for longer than ``step_timeout``."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + self._patience
        for call in self.pool.give_up(self._calls, self.env.busy_since, self.step_timeout):
            slot, cause = call.slot, call.error
            assert cause is not None
            del self._calls[slot]
            episode, turn = self._seats[slot], self.env.slots[slot].turn
            self.env.renew(slot)
            if episode is None:  # dropped while its call ran
                self.faults["timeout"] += 1
                self._free.append(slot)
                continue
            name = self.env.names[episode.ticket.env_id]
            turn = turn if episode.lengths else -1
            self._fault(slot, EnvironmentFault(name, episode.ticket, turn, cause))

    # ------------------------------------------------------------------ the policy

    def _gather(self, room: int) -> None:
        """Wait a little for more to ask the policy at once, unless that would hold up what it is half through."""
        end = time.monotonic() + self._linger
        while self._calls and 0 < self.policy.pending <= self._fresh and (left := end - time.monotonic()) > 0:
            self._hear(left)
            self._deal(room)

    def _speak(self) -> None:
        start = time.monotonic()
        responses = self.policy.poll()
        # At worst, waiting for more takes half as long as it takes the policy to go on.
        self._linger = (time.monotonic() - start) / 2
        self._fresh = 0
        with self._generators():
            for response in responses:
                self._answer(response)

    def _answer(self, response: TurnResponse) -> None:
        slot, limit = response.slot, self.policy.sampling.max_output_tokens
        episode = self._seats[slot]
        if episode is None or slot in self._calls:
            raise RuntimeError(f"The policy answered slot {slot}, which has asked for nothing.")
        if not 0 < len(response.tokens) <= limit:
            raise RuntimeError(
                f"The policy answered slot {slot} with {len(response.tokens)} tokens; expected 1 to {limit}."
            )
        episode.hear(response)
        self._said[slot] = response.tokens.tolist()
        self._call(slot, partial(self.env.answer, slot, self._said[slot]))

    # ------------------------------------------------------------------ ends

    def _leave(self, slot: int) -> None:
        self._seats[slot] = None
        self._free.append(slot)

    def _vacate(self, slot: int) -> None:
        """Take a running episode out of its slot; a call that runs there is waited for before the slot is used again."""
        if slot in self._calls:
            self._seats[slot] = None
        else:
            self.policy.cancel([slot])
            self._leave(slot)

    def _fault(self, slot: int, fault: EnvironmentFault) -> None:
        episode, reason = self._seats[slot], cast(Reason, fault.stop_reason.name.lower())
        assert episode is not None
        self.env.renew(slot)
        self._leave(slot)
        self.faults[reason] += 1
        self._faults_since.append(fault)
        logger.warning("%s Its group is dropped; other tickets fill the batch.", fault)
        self._drop(episode.ticket.group_id, reason)
        if (count := len(self._faults_since)) > self.max_faults:
            first = self._faults_since[0]
            first.add_note(f"It was the first of {count} failed episodes of a batch; max_faults={self.max_faults}.")
            raise first

    def _drop_stale(self, episodes: list[Episode], oldest: int) -> bool:
        groups = {episode.ticket.group_id for episode in episodes if episode.stale(oldest)}
        for group in groups:
            self._drop(group, "stale")
        return bool(groups)

    def _drop(self, group: int, reason: Reason) -> None:
        """Drop a whole group, also the members that are not dealt yet."""
        for slot, episode in enumerate(self._seats):
            if episode is not None and episode.ticket.group_id == group:
                self._vacate(slot)
        for index in [index for index, episode in self.episodes.items() if episode.ticket.group_id == group]:
            del self.episodes[index]
            self.dropped[reason] += 1
        dealt = self.env.num_dealt
        if dealt % self.env.group_size and self.env.tickets[dealt].group_id == group:
            self._torn = group, reason
