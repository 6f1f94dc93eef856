"""Continuous batching over turns: :class:`ThreadExecutor`.

Assigns episodes to slots and schedules calls of policy and environments. Threads that call environments are in
:mod:`~torchrl_llm.envs.isolation`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from torchrl_llm.collectors._queue import Fault
from torchrl_llm.envs.env import GEMEnv
from torchrl_llm.envs.isolation import LOOK, MAX_THREADS, Call, Pool, kept_global_rng, revoke_global_rng
from torchrl_llm.envs.slots import TERMINATED, Reply
from torchrl_llm.envs.text_env import EnvironmentFault
from torchrl_llm.episode import Episode, Turn
from torchrl_llm.keys import StopReason
from torchrl_llm.modules.policy import TurnPolicy, TurnRequest, TurnResponse

NextEpisode = Callable[[], Episode | None]
OnFault = Callable[[Episode | None, Fault], None]


class ThreadExecutor:
    """Plays episodes over the slots of an environment, each at its own pace. One thread calls it at a time.

    Args:
        env: played by nothing else meanwhile.
        policy: answers single turns.
        next_episode: the next episode to play, or ``None``.
        greedy: decode greedily.
        num_threads: of the pool that calls environments; 0: they are called in this thread, without a time limit; ``None``: one
            a slot, 32 at most.
        step_timeout: seconds that a call of an environment may take.
        on_fault: called with an episode whose environment failed and its :class:`~torchrl_llm.envs.EnvironmentFault`; with
            ``None`` and a ``TimeoutError`` for one that was released before.
    """

    def __init__(
        self,
        env: GEMEnv,
        policy: TurnPolicy,
        next_episode: NextEpisode,
        *,
        greedy: bool,
        num_threads: int | None,
        step_timeout: float,
        on_fault: OnFault,
    ) -> None:
        self.env, self.policy, self.greedy, self.step_timeout = env, policy, greedy, step_timeout
        self.pool = Pool(min(env.batch_size[0], MAX_THREADS) if num_threads is None else num_threads)
        self._next_episode, self._on_fault = next_episode, on_fault
        self._slots: list[Episode | None] = [None] * env.batch_size[0]
        self._free = deque(range(env.batch_size[0]))
        self._calls: dict[int, Call] = {}
        self._new_requests = 0
        self._batching_delay = self._next_look = 0.0

    @property
    def in_flight(self) -> int:
        """Calls and requests that are not answered yet."""
        return len(self._calls) + self.policy.pending

    def step(self) -> bool:
        """Collect what environments answered, fill free slots, run one step of the policy.

        Waits only if there is nothing else to do. Returns whether anything is in flight.
        """
        self._collect_results(0.0 if self.policy.pending or not self._calls else self._poll_interval)
        self._fill()
        self._wait_for_more()
        if self.policy.pending:
            self._step_policy()
        self._give_up()
        return self.in_flight > 0

    def release(self, episode: Episode) -> None:
        """Take an episode out of its slot, if it has one; a call that runs there is waited for before the slot is used again."""
        if episode not in self._slots:
            return
        slot = self._slots.index(episode)
        if slot in self._calls:
            self._slots[slot] = None
        else:
            self.policy.cancel([slot])
            self._free_slot(slot)

    def clear(self) -> None:
        """Release all slots, and wait for the environments' calls (each up to ``step_timeout``)."""
        for episode in self._slots:
            if episode is not None:
                self.release(episode)
        while self._calls:
            self._collect_results(self._poll_interval)
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
    def _poll_interval(self) -> float:
        return min(LOOK, self.step_timeout / 4)

    def _fill(self) -> None:
        if not self._free:
            return
        with self._generators():
            while self._free and (episode := self._next_episode()) is not None:
                slot = self._free.popleft()
                self._slots[slot] = episode
                self._call(slot, partial(self.env.open, slot, episode.index))

    def _generators(self) -> AbstractContextManager[None]:
        """Around calls that this thread makes itself: what they draw from is put back once, not after each."""
        return kept_global_rng(for_envs=True) if self.pool.num_threads == 0 else nullcontext()

    def _call(self, slot: int, function: Callable[[], Reply]) -> None:
        self._calls[slot] = self.pool.submit(slot, function)

    def _collect_results(self, timeout: float) -> None:
        """Take what environments answered; wait up to ``timeout`` seconds for the first."""
        for call in self.pool.finished(timeout):
            slot = call.slot
            del self._calls[slot]
            episode = self._slots[slot]
            if episode is None:  # released while its call ran
                self._free.append(slot)
            elif isinstance(call.error, EnvironmentFault):
                self._fail(slot, call.error)
            elif call.error is not None:
                raise call.error
            else:
                self._advance(slot, episode, call.result)

    def _advance(self, slot: int, episode: Episode, reply: Reply) -> None:
        """Take a slot on to a reply; then ask for its next turn, or free it if that was the last one."""
        if not episode.awaits_reward:
            self.env.start(slot, episode.index, reply)
            episode.task_id = self.env.slots[slot].task_id
        elif self.env.slots[slot].index != episode.index:
            raise RuntimeError(
                f"Slot {slot} of the environment was reset by something else than this collector, which plays task "
                f"{episode.index} there. Give each user of the environment an environment of its own."
            )
        else:
            if reply.dropped:
                episode.end_segment(self.env.context(slot))
            self.env.advance(slot, episode.turns[-1].tokens.tolist(), reply)
            episode.rewards.append(reply.reward)
        state, context = self.env.slots[slot], self.env.context(slot)
        if not state.finished:
            self.policy.submit(TurnRequest(slot, context, episode.episode_id, state.turn, self.greedy))
            self._new_requests += 1
            return
        reason, terminated = state.stop_reason, state.stop_reason in TERMINATED
        success = reason == StopReason.WON
        episode.end(context.copy(), reason, terminated=terminated, truncated=not terminated, success=success)
        self._free_slot(slot)

    def _give_up(self) -> None:
        """Give up the calls that have been with their environments for longer than ``step_timeout``."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + self._poll_interval
        for call in self.pool.give_up(self._calls, self.env.busy_since, self.step_timeout):
            slot, cause = call.slot, call.error
            assert isinstance(cause, TimeoutError)
            del self._calls[slot]
            episode = self._slots[slot]
            if episode is None:  # released while its call ran
                self.env.renew(slot)
                self._free.append(slot)
                self._on_fault(None, cause)
                continue
            turn = len(episode.rewards) if episode.awaits_reward else -1
            name, task_spec = self.env.names[episode.env_id], self.env.task_sampler[episode.index]
            self._fail(slot, EnvironmentFault(name, task_spec, turn, cause))

    # ------------------------------------------------------------------ the policy

    def _wait_for_more(self) -> None:
        """Wait a little for more requests to send at once, unless the policy is in the middle of older ones."""
        end = time.monotonic() + self._batching_delay
        while self._calls and 0 < self.policy.pending <= self._new_requests and (left := end - time.monotonic()) > 0:
            self._collect_results(left)
            self._fill()

    def _step_policy(self) -> None:
        start = time.monotonic()
        responses = self.policy.poll()
        # At worst, waiting for more takes half as long as a step of the policy.
        self._batching_delay = (time.monotonic() - start) / 2
        self._new_requests = 0
        with self._generators():
            for response in responses:
                self._answer(response)

    def _answer(self, response: TurnResponse) -> None:
        slot, limit = response.slot, self.policy.sampling.max_output_tokens
        episode = self._slots[slot]
        if episode is None or slot in self._calls:
            raise RuntimeError(f"The policy answered slot {slot}, which has asked for nothing.")
        if not 0 < len(response.tokens) <= limit:
            raise RuntimeError(
                f"The policy answered slot {slot} with {len(response.tokens)} tokens; expected 1 to {limit}."
            )
        state = self.env.slots[slot]
        # Not the response's own arrays: they may be rows of a batch, which would be kept alive.
        tokens, log_probs, versions = response.tokens.copy(), response.log_probs.copy(), response.versions.copy()
        episode.add(Turn(state.length, state.segment, tokens, log_probs, versions))
        self._call(slot, partial(self.env.answer, slot, tokens.tolist()))

    # ------------------------------------------------------------------ ends

    def _free_slot(self, slot: int) -> None:
        self._slots[slot] = None
        self._free.append(slot)

    def _fail(self, slot: int, fault: EnvironmentFault) -> None:
        episode = self._slots[slot]
        self.env.renew(slot)
        self._free_slot(slot)
        self._on_fault(episode, fault)
