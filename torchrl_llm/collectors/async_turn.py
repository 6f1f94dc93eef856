"""Batches of whole episodes without a barrier between turns: :class:`AsyncTurnCollector`,
:class:`ThreadExecutor`.

The executor assigns episodes to slots and schedules calls of policy and environments. Threads that
call environments are in :mod:`~torchrl_llm.envs.isolation`.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from torchrl.envs import EnvBase

from torchrl_llm.collectors._queue import EpisodeSource, RolloutExecutor
from torchrl_llm.collectors.collector import EpisodeCollector
from torchrl_llm.envs.env import GEMEnv
from torchrl_llm.envs.faults import EnvironmentFault
from torchrl_llm.envs.isolation import MAX_THREADS, POLL_INTERVAL, Call, Pool, kept_global_rng, revoke_global_rng
from torchrl_llm.envs.slots import TERMINATED, Reply, SlotMachine
from torchrl_llm.episode import Episode, Turn
from torchrl_llm.keys import StopReason
from torchrl_llm.modules.policy import TurnPolicy, TurnRequest, TurnResponse
from torchrl_llm.utils.options import Natural, Positive

STEP_TIMEOUT = 60.0
"""Seconds that an environment may take, unless another limit is given."""


class AsyncTurnCollector(EpisodeCollector):
    """Runs every slot at its own pace: an environment steps as soon as its own turn is sampled.

    Responses are requested one by one (:meth:`TurnPolicy.submit`, :meth:`TurnPolicy.poll`),
    environments are called in threads, and a slot is refilled as soon as its episode ends. Batches
    are the same as of :class:`~torchrl_llm.collectors.TurnCollector`: B tasks in the order sampled,
    whole groups, rows ``[B]``.

    With ``max_staleness=0`` (on-policy) a batch is collected with one version of the weights and
    nothing is in flight when it is delivered. With ``max_staleness=k`` up to ``(k + 1) B`` tasks
    are in flight at a time, and unfinished episodes continue with the new weights;
    ``"policy_version"`` tells which weights sampled which token. A task is sampled only if the
    batch it will be in comes at most k updates later, provided that there is one update a batch; so
    short episodes are not favored. Whatever else happens to the weights, it is checked at delivery:
    an episode with a token more than k versions old is dropped with its group, counted in
    :attr:`dropped`, and further tasks fill the batch.

    An environment that raises, returns something malformed or takes more than ``step_timeout`` ends
    its own episode (logged, counted in :attr:`faults`): the episode has no true reward, so its
    group is dropped and further tasks fill the batch. Environments that declare
    ``thread_safe = True`` are called in parallel, others one at a time
    (:class:`~torchrl_llm.envs.TextEnv`).

    Args:
        env: a :class:`~torchrl_llm.envs.GEMEnv`, or a function that makes it. Its slots bound how
            many episodes run at a time.
        policy: a :class:`~torchrl_llm.modules.policy.TurnPolicy`.
        batch_size: episodes B of a batch.
        max_staleness: how many versions old a token may be at delivery; default 0.
        num_threads: threads that call environments; default one a slot, 32 at most. 0 calls them in
            the thread that drives the policy: the fastest for environments that answer in
            microseconds, but without time limit.
        step_timeout: seconds that one reset or step may take; waiting for other environments does
            not count. Default 60.
        max_faults: failed episodes tolerated for one batch; one more raises the first of them.
            Default 16.
        background: a thread continues to collect while the caller trains. Needs a policy with
            weights of its own (``policy.owns_weights``). Default:
            ``max_staleness > 0 and policy.owns_weights``. Otherwise everything runs within
            ``next()``. What trains meanwhile must not draw from the global generators of ``random``
            and ``numpy.random`` if the environments may (PyTorch's are not concerned).
        total_frames, total_batches, replay_buffer, postproc, exploration_type, weight_sync_schemes,
            pre_collect_hook, post_collect_hook: see :class:`~torchrl_llm.collectors.TurnCollector`.

    Raises:
        TypeError: ``env`` is not a GEMEnv.
        ValueError: a setting makes no sense; the message names it.
        EnvironmentFault: at ``next()``, more than ``max_faults`` episodes failed.

    Any error at ``next()`` shuts the collector down.

    Examples:
        >>> from torchrl_llm.testing.environments import StopOrGo
        >>> from torchrl_llm.testing.policies import ScriptedPolicy
        >>> from torchrl_llm.testing.tokenizers import byte_tokenizer
        >>> tokenizer = byte_tokenizer()
        >>> env = GEMEnv(StopOrGo, tokenizer=tokenizer, num_envs=2, max_output_tokens=32)
        >>> policy = ScriptedPolicy(lambda episode, turn, _: "stop" if turn == episode else "go", tokenizer=tokenizer)
        >>> collector = AsyncTurnCollector(env, policy, batch_size=3, total_batches=1)
        >>> for batch in collector:
        ...     print(batch["turn", "mask"].int().tolist())
        [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
        >>> collector.shutdown()
    """

    def __init__(
        self,
        env: GEMEnv | Callable[[], GEMEnv],
        policy: TurnPolicy,
        *,
        max_staleness: Natural = 0,
        num_threads: Natural | None = None,
        step_timeout: Positive = STEP_TIMEOUT,
        background: bool | None = None,
        **kwargs: Any,
    ) -> None:
        if background is None:
            background = max_staleness > 0 and policy.owns_weights
        if background and not policy.owns_weights:
            raise ValueError(
                f"{type(self).__name__}: background is True; expected False: the policy's weights are the trainer's "
                "(policy.owns_weights is False)."
            )
        super().__init__(env, policy, max_staleness, False, background, **kwargs)
        slots = slots_of(self.env)
        self._executor = ThreadExecutor(
            slots, policy, self._queue, greedy=self._greedy, num_threads=num_threads, step_timeout=step_timeout
        )


def slots_of(env: EnvBase) -> SlotMachine:
    """The slots of an environment, to run one by one.

    Raises:
        TypeError: it is no GEMEnv.
    """
    if isinstance(env, GEMEnv):
        return env.slots
    raise TypeError(
        f"env is a {type(env).__name__}; expected a GEMEnv, whose slots can be run one by one. What a "
        "transform would do belongs into postproc or the replay buffer's transform."
    )


class ThreadExecutor(RolloutExecutor):
    """Runs episodes over slots, each at its own pace. One thread calls it at a time.

    Args:
        slots: used by nothing else meanwhile.
        policy: answers single turns.
        queue: the episodes.
        greedy: decode greedily.
        num_threads: of the pool that calls environments; 0: they are called in this thread, without
            a time limit; ``None``: one a slot, 32 at most.
        step_timeout: seconds that a call of an environment may take.
    """

    def __init__(
        self,
        slots: SlotMachine,
        policy: TurnPolicy,
        queue: EpisodeSource,
        *,
        greedy: bool,
        num_threads: int | None,
        step_timeout: float,
    ) -> None:
        self.slots, self.policy, self.greedy, self.step_timeout = slots, policy, greedy, step_timeout
        self.pool = Pool(min(len(slots), MAX_THREADS) if num_threads is None else num_threads)
        self._queue = queue
        # A slot is free if it has no episode and no call: an episode may be released while its call
        # still runs.
        self._episodes: list[Episode | None] = [None] * len(slots)
        self._calls: dict[int, Call] = {}
        # A quarter of the limit, so that a late call is noticed before it has taken 1.25 times as
        # long.
        self._poll_interval = min(POLL_INTERVAL, step_timeout / 4)
        self._new_requests = 0
        self._last_step = self._step_seconds = self._next_check = 0.0
        # How long the last calls took: at first it is not known that environments answer quickly.
        self._call_seconds = deque([math.inf], maxlen=16)

    @property
    def in_flight(self) -> int:
        return len(self._calls) + self.policy.pending

    def step(self) -> bool:
        # Waits only where the policy has nothing to do.
        self._collect_env_results(0.0 if self.policy.pending or not self._calls else self._poll_interval)
        self._fill()
        self._wait_for_requests()
        if self.policy.pending:
            self._step_policy()
        self._drop_late_calls()
        return self.in_flight > 0

    def release(self, episode: Episode) -> None:
        if episode in self._episodes:
            slot = self._episodes.index(episode)
            self._episodes[slot] = None
            # With a call in the environment, the policy has nothing of this slot to cancel.
            if slot not in self._calls:
                self.policy.cancel([slot])

    def clear(self) -> None:
        """Release all slots, and wait for the environments' calls (each up to ``step_timeout``)."""
        for episode in filter(None, [*self._episodes]):
            self.release(episode)
        while self._calls:
            self._collect_env_results(self._poll_interval)
            self._drop_late_calls()

    def wake(self) -> None:
        self.pool.wake()

    def close(self, timeout: float) -> None:
        """Let the threads end; environments that hang are left behind, without the global random
        generators."""
        for thread in self.pool.close(min(timeout, self.step_timeout)):
            revoke_global_rng(thread)

    # ---------------------------------------- environments

    def _fill(self) -> None:
        with self._generators():
            for slot, episode in enumerate(self._episodes):
                if episode is None and slot not in self._calls:
                    episode = self._queue.next()
                    if episode is None:
                        return
                    self._episodes[slot] = episode
                    self._calls[slot] = self.pool.submit(slot, partial(self.slots.open, slot, episode.index))

    def _generators(self) -> AbstractContextManager[object]:
        """Around calls that this thread makes itself: the global generators are restored once, not
        after each."""
        return kept_global_rng(for_envs=True) if self.pool.num_threads == 0 else nullcontext()

    def _collect_env_results(self, timeout: float) -> None:
        """Process what environments returned; wait up to ``timeout`` seconds for the first."""
        for call in self.pool.finished(timeout):
            del self._calls[call.slot]
            self._call_seconds.append(call.seconds)
            episode = self._episodes[call.slot]
            if episode is None:  # released while its call ran
                continue
            if isinstance(call.error, EnvironmentFault):
                self._fail(call.slot, episode, call.error)
            elif call.error is not None:
                raise call.error
            else:
                self._advance(call.slot, episode, call.result)

    def _advance(self, slot: int, episode: Episode, reply: Reply) -> None:
        """Apply what the environment returned; then request the next turn, or free the slot if that
        was the last one."""
        if not episode.awaits_reward:
            self.slots.start(slot, episode.index, reply)
            episode.task_id = self.slots[slot].task_id
        # Otherwise rewards of another task would be trained on.
        elif self.slots[slot].index != episode.index:
            raise RuntimeError(
                f"Slot {slot} of the environment was reset by something else than this collector, which runs task "
                f"{episode.index} there. Give each user of the environment an environment of its own."
            )
        else:
            if reply.context is not None:
                episode.end_segment(self.slots.context(slot))
            self.slots.advance(slot, episode.turns[-1].tokens.tolist(), reply)
            episode.record(self.slots.values(slot))
            episode.texts |= reply.step.texts
        state, context = self.slots[slot], self.slots.context(slot)
        if not state.finished:
            self._request(slot, episode)
            return
        reason, terminated = state.stop_reason, state.stop_reason in TERMINATED
        success = reason == StopReason.WON
        # The context is a view, which the next episode of the slot overwrites.
        episode.end(context.copy(), reason, terminated=terminated, truncated=not terminated, success=success)
        self._episodes[slot] = None

    def _request(self, slot: int, episode: Episode) -> None:
        """Ask the policy for the next turn of a slot."""
        turn, context = self.slots[slot].turn, self.slots.context(slot)
        self.policy.submit(TurnRequest(slot, context, episode.episode_id, turn, self.greedy))
        self._new_requests += 1

    def _drop_late_calls(self) -> None:
        """Abandon the calls that have been with their environments for longer than
        ``step_timeout``."""
        now = time.monotonic()
        if now < self._next_check:
            return
        self._next_check = now + self._poll_interval
        for call in self.pool.abandon_late(self._calls, self.slots.busy_since, self.step_timeout):
            del self._calls[call.slot]
            episode = self._episodes[call.slot]
            if episode is None:  # released while its call ran
                self.slots.renew(call.slot)
                self._queue.count_timeout()
            else:
                assert call.error is not None
                task_spec = self.slots.task_sampler[episode.index]
                turn = len(episode.rewards) if episode.awaits_reward else -1
                self._fail(call.slot, episode, self.slots.fault(task_spec, turn, call.error))

    def _fail(self, slot: int, episode: Episode, fault: EnvironmentFault) -> None:
        self.slots.renew(slot)
        self._episodes[slot] = None
        self._queue.fail(episode, fault)

    # ---------------------------------------- the policy

    def _wait_for_requests(self) -> None:
        """Wait a little for environments: a request that comes after the policy has begun a step
        waits until that ends."""
        start = time.monotonic()
        while self._calls and self.policy.pending:
            left = max(0.0, start + self._patience() - time.monotonic())
            if left == 0.0 and not any(call.finished for call in self._calls.values()):
                return
            self._collect_env_results(left)
            self._fill()

    def _patience(self) -> float:
        """Seconds that further requests are worth: at worst, waiting takes half as long as a step
        of the policy."""
        older = self.policy.pending - self._new_requests
        if older == 0:
            return self._step_seconds / 2
        # Older requests wait too, so the limit is their share of it. And only calls since the last
        # step count, if most of the recent ones were answered in time: a slow environment would
        # hold up every step.
        calls = sum(call.submitted >= self._last_step for call in self._calls.values())
        limit = self._step_seconds / 2 * calls / (calls + older)
        return limit if statistics.median(self._call_seconds) < limit else 0.0

    def _step_policy(self) -> None:
        start = time.monotonic()
        responses = self.policy.poll()
        self._last_step = time.monotonic()
        self._step_seconds = self._last_step - start
        self._new_requests = 0
        with self._generators():
            for response in responses:
                self._record(response)

    def _record(self, response: TurnResponse) -> None:
        """Add a response to its episode, and send it to the environment."""
        slot, limit = response.slot, self.policy.sampling.max_output_tokens
        episode = self._episodes[slot]
        if episode is None or slot in self._calls:
            raise RuntimeError(f"The policy answered slot {slot}, which has asked for nothing.")
        if not 0 < len(response.tokens) <= limit:
            raise RuntimeError(
                f"The policy answered slot {slot} with {len(response.tokens)} tokens; expected 1 to {limit}."
            )
        state = self.slots[slot]
        # Not the response's own arrays: they may be rows of a batch, which would be kept alive.
        tokens, log_probs, versions = response.tokens.copy(), response.log_probs.copy(), response.versions.copy()
        episode.add(Turn(state.length, state.segment, tokens, log_probs, versions))
        self._send(slot, tokens.tolist())

    def _send(self, slot: int, response: list[int]) -> None:
        """Send a response to the environment."""
        self._calls[slot] = self.pool.submit(slot, partial(self.slots.answer, slot, response))
