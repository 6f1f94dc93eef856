"""Continuous batching over turns: :class:`SlotPlayer`.

Here lives which slot an episode gets and who is asked next. Which tickets there are is the
:class:`~torchrl_llm.collectors._ledger.Ledger`'s; threads that call environments are in :mod:`~torchrl_llm.envs.isolation`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from torchrl_llm.collectors._episode import Episode
from torchrl_llm.envs.env import GEMEnv
from torchrl_llm.envs.isolation import LOOK, MAX_THREADS, Call, Pool, kept_global_rng, revoke_global_rng
from torchrl_llm.envs.slots import Reply
from torchrl_llm.envs.text_env import EnvironmentFault
from torchrl_llm.modules.policy import TurnPolicy, TurnRequest, TurnResponse

Deal = Callable[[], Episode | None]
OnFault = Callable[[Episode | None, EnvironmentFault | TimeoutError], None]


class SlotPlayer:
    """Plays episodes over the slots of an environment, each at its own pace. One thread calls it at a time.

    Args:
        env: nobody else plays it meanwhile.
        policy: answers single turns.
        greedy: decode greedily.
        num_threads: of the pool that calls environments; 0: they are called in this thread, without a time limit; ``None``: one
            a slot, 32 at most.
        step_timeout: seconds that a call of an environment may take.
        on_fault: called with an episode whose environment failed and its :class:`~torchrl_llm.envs.EnvironmentFault`; with
            ``None`` and a ``TimeoutError`` for one that was vacated before.
    """

    def __init__(
        self,
        env: GEMEnv,
        policy: TurnPolicy,
        *,
        greedy: bool,
        num_threads: int | None,
        step_timeout: float,
        on_fault: OnFault,
    ) -> None:
        self.env, self.policy, self.greedy, self.step_timeout = env, policy, greedy, step_timeout
        self.pool = Pool(min(env.batch_size[0], MAX_THREADS) if num_threads is None else num_threads)
        self._on_fault = on_fault
        self._seats: list[Episode | None] = [None] * env.batch_size[0]
        self._free = deque(range(env.batch_size[0]))
        self._calls: dict[int, Call] = {}
        self._said: dict[int, list[int]] = {}
        self._fresh = 0
        self._linger = self._next_look = 0.0

    @property
    def in_flight(self) -> int:
        """Calls and requests that are not answered yet."""
        return len(self._calls) + self.policy.pending

    def round(self, deal: Deal) -> bool:
        """Take what environments answered, fill free slots, let the policy go on by a step.

        Waits only if there is nothing else to do. Returns whether anything is in flight.

        Args:
            deal: the next episode to play, or ``None``.
        """
        self._hear(0.0 if self.policy.pending or not self._calls else self._patience)
        self._fill(deal)
        self._gather(deal)
        if self.policy.pending:
            self._speak()
        self._give_up()
        return self.in_flight > 0

    def vacate(self, episode: Episode) -> None:
        """Take an episode out of its slot, if it has one; a call that runs there is waited for before the slot is used again."""
        for slot, seated in enumerate(self._seats):
            if seated is episode:
                if slot in self._calls:
                    self._seats[slot] = None
                else:
                    self.policy.cancel([slot])
                    self._leave(slot)

    def clear(self) -> None:
        """Vacate all slots, and wait for the environments' calls (each up to ``step_timeout``)."""
        for episode in self._seats:
            if episode is not None:
                self.vacate(episode)
        while self._calls:
            self._hear(self._patience)
            self._give_up()

    def wake(self) -> None:
        """End a wait for environments."""
        self.pool.wake()

    def close(self, timeout: float) -> None:
        """Let the threads end; environments that hang are left behind, without the global random generators."""
        for thread in self.pool.close(min(timeout, self.step_timeout)):
            revoke_global_rng(thread)

    # ------------------------------------------------------------------ environments

    @property
    def _patience(self) -> float:
        return min(LOOK, self.step_timeout / 4)

    def _fill(self, deal: Deal) -> None:
        if not self._free:
            return
        with self._generators():
            while self._free and (episode := deal()) is not None:
                slot = self._free.popleft()
                self._seats[slot] = episode
                self._call(slot, partial(self.env.open, slot, episode.index))

    def _generators(self) -> AbstractContextManager[None]:
        """Around calls that this thread makes itself: what they draw from is put back once, not after each."""
        return kept_global_rng(for_envs=True) if self.pool.num_threads == 0 else nullcontext()

    def _call(self, slot: int, function: Callable[[], Reply]) -> None:
        self._calls[slot] = self.pool.submit(slot, function)

    def _hear(self, timeout: float) -> None:
        """Take what environments answered; wait up to ``timeout`` seconds for the first."""
        for call in self.pool.finished(timeout):
            slot = call.slot
            del self._calls[slot]
            episode = self._seats[slot]
            if episode is None:  # vacated while its call ran
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
            episode.task_id = self.env.slots[slot].task_id
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
            assert isinstance(cause, TimeoutError)
            del self._calls[slot]
            episode, turn = self._seats[slot], self.env.slots[slot].turn
            if episode is None:  # vacated while its call ran
                self.env.renew(slot)
                self._free.append(slot)
                self._on_fault(None, cause)
                continue
            name = self.env.names[episode.ticket.env_id]
            turn = turn if episode.lengths else -1
            self._fault(slot, EnvironmentFault(name, episode.ticket, turn, cause))

    # ------------------------------------------------------------------ the policy

    def _gather(self, deal: Deal) -> None:
        """Wait a little for more to ask the policy at once, unless that would hold up what it is half through."""
        end = time.monotonic() + self._linger
        while self._calls and 0 < self.policy.pending <= self._fresh and (left := end - time.monotonic()) > 0:
            self._hear(left)
            self._fill(deal)

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

    def _fault(self, slot: int, fault: EnvironmentFault) -> None:
        episode = self._seats[slot]
        self.env.renew(slot)
        self._leave(slot)
        self._on_fault(episode, fault)
