"""Episodes slot by slot: :class:`Slot`, :class:`Reply`, and :class:`SlotEpisodes`, which runs them.

This module lets contexts grow and slide, ends episodes, and counts and replaces environments that
fail. TensorDicts, specs and saved states are in :mod:`~torchrl_llm.envs.env`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from torchrl_llm.envs.chat import ChatFormatter
from torchrl_llm.envs.extras import NO_EXTRAS, ExtraKinds, Extras
from torchrl_llm.envs.faults import FaultCounter
from torchrl_llm.envs.isolation import Call, IsolatedEnv, Pool, kept_global_rng
from torchrl_llm.envs.tasks import Stream, TaskIdentity, TaskSampler, TaskSpec
from torchrl_llm.envs.text_env import EnvironmentFault, EnvironmentUnavailableError, EnvSpec, TextStep
from torchrl_llm.keys import StopReason
from torchrl_llm.utils.options import ConfigError

logger = logging.getLogger(__name__)

Overflow = Literal["truncate", "slide"]

NO_TASK_SPEC = TaskSpec(-1, -1, 0, 0)
NO_TASK = TaskIdentity(-1, known=False)
TERMINATED = (StopReason.WON, StopReason.LOST, StopReason.TURN_LIMIT)
FAILED = (StopReason.ERROR, StopReason.TIMEOUT)
_WARN_AFTER = 64  # episodes without a success; then a warning asks what counts as one


class PromptTooLongError(EnvironmentFault):
    """The first context of an episode leaves no room for a response."""

    @property
    def stop_reason(self) -> StopReason:
        """``CONTEXT``."""
        return StopReason.CONTEXT


class Reply(NamedTuple):
    """The result of an environment's reset or step, in tokens.

    Attributes:
        ids: what it adds to the context: of a reset, the whole first context; of a step, the
            response and the feedback.
        reward: of the turn; 0.0 at a reset.
        stop_reason: of the episode after it.
        dropped: the oldest turns that leave the context, to make room; 0: the context grows. Also
            at the end of an episode that was cut off.
        task: of a reset, the task.
        says_success: whether the environment returned ``info["success"]``.
        extras: of the turn, those that its environment declares.
    """

    ids: Sequence[int]
    reward: float = 0.0
    stop_reason: StopReason = StopReason.RUNNING
    dropped: int = 0
    task: TaskIdentity = NO_TASK
    says_success: bool = False
    extras: Extras = NO_EXTRAS


@dataclass
class Slot:
    """The state of one slot of the batch.

    Attributes:
        envs: its environments, by index into the mixture, each with its own random state.
        index: of its task in the ``task_sampler``; ``None``: the slot idles.
        task_spec: the task.
        task_id: of its :class:`~torchrl_llm.envs.tasks.TaskIdentity`.
        turn: finished turns.
        total: sum of the rewards.
        length: tokens of the context.
        segment: how often the context was cut at its beginning.
        pieces: what the context is made of: the first prompt, then each turn's response and
            feedback, without dropped ones.
        stop_reason: why the episode ended, or that it runs.
        responses: the ids of the responses so far.
        extras: of the last turn, all that the mixture has; blank before the first.
    """

    envs: dict[int, IsolatedEnv] = field(default_factory=dict)
    index: int | None = None
    task_spec: TaskSpec = NO_TASK_SPEC
    task_id: int = -1
    turn: int = 0
    total: float = 0.0
    length: int = 0
    segment: int = 0
    pieces: list[Sequence[int]] = field(default_factory=list)
    stop_reason: StopReason = StopReason.RUNNING
    responses: list[list[int]] = field(default_factory=list)
    extras: Extras = NO_EXTRAS

    @property
    def finished(self) -> bool:
        return self.stop_reason != StopReason.RUNNING

    @property
    def live(self) -> bool:
        return self.index is not None and not self.finished

    def excess(self, size: int, room: int) -> int:
        """How many of the oldest turns have to leave the context before a turn of ``size`` tokens;
        0: nothing helps.

        Args:
            size: tokens of the turn.
            room: tokens that a context may have beside the next response.
        """
        first, *turns = map(len, self.pieces)
        room -= first
        if size > room:
            return 0
        # Half of the room is kept, so that a full context is not cut at every turn: each cut is a
        # new segment to train on.
        kept = np.cumsum([size, *reversed(turns)]) <= max(size, room // 2)
        return len(turns) + 1 - int(kept.sum())


class SuccessRule:
    """Decides which terminated episodes are a success; warns if an environment never has one.

    Args:
        specs: the environments of the mixture; their ``success_by`` says whether the last reward or
            the return (up to 1e-6) counts.
        threshold: an episode is a success with at least this reward.
    """

    def __init__(self, specs: Sequence[EnvSpec], threshold: float) -> None:
        self.threshold, self._specs = threshold, specs
        # episodes, and the most that one earned
        self._never_won = dict.fromkeys(range(len(specs)), (0, 0.0))

    def holds(self, slot: Slot, step: TextStep) -> bool:
        """Whether an episode that terminates with ``step`` is a success."""
        if step.success is not None:
            return step.success
        return self._earned(slot.task_spec.env_id, slot.total + step.reward, step.reward) >= self.threshold

    def _earned(self, env_id: int, total: float, last: float) -> float:
        # Shares of 1 need not sum to 1: ten times 0.1 is 0.9999999999999999.
        return total + 1e-6 if self._specs[env_id].success_by == "return" else last

    def watch(self, slot: Slot, reply: Reply) -> None:
        """Warn, once, if an environment is never won though one of its episodes earned half of what
        that takes."""
        env_id = slot.task_spec.env_id
        if env_id not in self._never_won:
            return
        if reply.says_success or reply.stop_reason == StopReason.WON:
            del self._never_won[env_id]
            return
        count, most = self._never_won[env_id]
        count, most = count + 1, max(most, self._earned(env_id, slot.total, reply.reward))
        self._never_won[env_id] = count, most
        if count >= _WARN_AFTER and most >= self.threshold / 2 > 0:
            del self._never_won[env_id]
            spec = self._specs[env_id]
            earned = "return" if spec.success_by == "return" else "last reward"
            logger.warning(
                "None of %d episodes of %r was a success; the highest %s was %.3g, and a success takes success_reward=%s. If "
                "less counts as won there, set success_reward, or let the environment say info['success'].",
                count, spec.name, earned, most, self.threshold,
            )  # fmt: skip


_SlotCall = tuple[TaskSpec, int, Callable[[], Reply]]
"""For which task a slot calls, in which turn (-1: the reset), and what."""


class SlotEpisodes:
    """Runs the episodes of :class:`~torchrl_llm.envs.GEMEnv` slot by slot, in token ids, without a
    TensorDict.

    It is a base class of its own so that the file of the environment shows the TorchRL side alone;
    the attributes below are ``GEMEnv``'s.
    """

    names: tuple[str, ...]
    extras: ExtraKinds
    formatter: ChatFormatter
    task_sampler: TaskSampler
    num_sampled = 0
    num_threads: int
    step_timeout: float | None
    last_fault: EnvironmentFault | None = None
    new_faults: Sequence[EnvironmentFault] = ()
    max_model_len: int
    max_output_tokens: int
    max_turns: int | None
    overflow: Overflow
    _fault_counter: FaultCounter
    mixture: tuple[EnvSpec, ...]
    _stream: Stream
    _slots: list[Slot]
    _firsts: tuple[Any, list[int]] = (None, [])
    _prompt: Tensor
    _success: SuccessRule
    _pool: Pool | None = None

    @property
    def slots(self) -> Sequence[Slot]:
        """The state of each slot. The methods below run slots one by one; they need no
        TensorDict."""
        return self._slots

    def context(self, slot: int) -> npt.NDArray[np.int64]:
        """The ids of a slot's context, ``[slots[slot].length]``: a view, valid until the slot's
        next turn."""
        return self._prompt.numpy()[slot, : self._slots[slot].length]

    def next_task(self) -> int:
        """Sample the next task; returns its index in :attr:`task_sampler`."""
        self.num_sampled += 1
        return self.num_sampled - 1

    def open(self, slot: int, index: int) -> Reply:
        """Reset a slot's environment for the task ``index``; nothing but the environment changes
        until :meth:`start`.

        Different slots may be opened and answered in different threads at once.

        Raises:
            EnvironmentFault: the environment raised or returned something malformed.
            EnvironmentUnavailableError: it cannot be made.
            ConfigError: it cannot be made with its options.
            PromptTooLongError: the first context leaves no room for a response.
        """
        task_spec, envs = self.task_sampler[index], self._slots[slot].envs
        try:
            env = envs.get(task_spec.env_id)
            if env is None or env.options != task_spec.options:
                env = envs[task_spec.env_id] = self._isolated(task_spec.env_id, task_spec.options)
            context = self.formatter.start(env.reset(task_spec.seed))
        except (EnvironmentUnavailableError, ConfigError):  # no task would have another one
            raise
        # an environment may call sys.exit(); Ctrl-C passes
        except (Exception, SystemExit) as error:
            raise self.fault(task_spec, -1, error) from error
        if len(context) + self.max_output_tokens > self.max_model_len:
            cause = ValueError(
                f"the first prompt has {len(context)} tokens; with a response of max_output_tokens={self.max_output_tokens} it "
                f"does not fit into max_model_len={self.max_model_len}. Raise max_model_len, lower max_output_tokens, or "
                "shorten the system prompt"
            )
            raise PromptTooLongError(self.names[task_spec.env_id], task_spec, -1, cause)
        return Reply(context, task=env.task or NO_TASK)

    def _isolated(self, env_id: int, options: tuple[tuple[str, Any], ...]) -> IsolatedEnv:
        spec = self.mixture[env_id]
        rows = self._stream if spec.divide else None
        return IsolatedEnv(spec.make, spec.name, rows=rows, extras=spec.extras, options=options)

    def start(self, slot: int, index: int, reply: Reply) -> None:
        """Start the episode of the task ``index`` in a slot, with what :meth:`open` returned."""
        envs, task_spec = self._slots[slot].envs, self.task_sampler[index]
        self._slots[slot] = Slot(envs, index=index, task_spec=task_spec, task_id=reply.task.task_id, pieces=[reply.ids])
        self._prompt[slot] = 0
        self._append(slot, reply.ids)

    def answer(self, slot: int, response: list[int]) -> Reply:
        """Send a response to a slot's environment; nothing but the environment changes until
        :meth:`advance`.

        Different slots may be opened and answered in different threads at once.

        Raises:
            EnvironmentFault: the environment raised or returned something malformed.
        """
        state = self._slots[slot]
        try:
            step = state.envs[state.task_spec.env_id].step(self.formatter.decode(response))
            ids = [*response, *self.formatter.feedback(response, step.message, role=step.role)]
        except (Exception, SystemExit) as error:
            raise self.fault(state.task_spec, state.turn, error) from error
        reason = self._stop_reason(state, step, state.length + len(ids))
        reason, dropped = self._slide(state, len(ids), reason) if self.overflow == "slide" else (reason, 0)
        return Reply(ids, step.reward, reason, dropped, says_success=step.success is not None, extras=step.extras)

    def _slide(self, state: Slot, size: int, reason: StopReason) -> tuple[StopReason, int]:
        """Why an episode ends that would end for ``reason``, and how many turns leave the context
        for one of ``size`` tokens."""
        room = self.max_model_len - self.max_output_tokens
        if reason == StopReason.CONTEXT and (dropped := state.excess(size, room)):
            return StopReason.RUNNING, dropped
        if reason in (StopReason.RUNNING, *TERMINATED) or state.length + size <= self.max_model_len:
            return reason, 0
        # A critic values what would follow an episode that was cut off by its last context, which
        # has to hold all of the last feedback, if there is room at all.
        return reason, state.excess(size, room) or state.excess(size, self.max_model_len)

    def advance(self, slot: int, response: list[int], reply: Reply) -> None:
        """Add to a slot what :meth:`answer` returned; the last feedback of an episode is cut at
        ``max_model_len``, if it does not slide."""
        state = self._slots[slot]
        state.responses.append(response)
        state.turn += 1
        state.total += reply.reward
        if self.extras:
            state.extras = reply.extras.of(self.extras)
        state.stop_reason = reply.stop_reason
        state.pieces.append(reply.ids)
        if reply.stop_reason in TERMINATED:
            self._success.watch(state, reply)
        if reply.dropped:
            del state.pieces[1 : 1 + reply.dropped]
            state.segment += 1
            state.length = 0
            self._prompt[slot] = 0
            self._append(slot, [*chain.from_iterable(state.pieces)])
        else:
            # Cuts nothing while an episode runs: it ends where the next response would not fit.
            self._append(slot, reply.ids[: self.max_model_len - state.length])

    def first_of_each_task(self, count: int) -> list[int]:
        """Of the next ``count`` tasks, counted from 0, those that no earlier one shares a known
        task with.

        Resets the environments of all slots, so no episode may be running. A task counts where its
        environment fails, or does not say what is hidden (:class:`~torchrl_llm.envs.TaskIdentity`).
        The result is cached: evaluations ask for the same tasks again and again, and each
        computation resets ``count`` environments.
        """
        # Equal samplers may differ in their progress.
        key = self.task_sampler, self.task_sampler.shares, self.task_sampler.stages, count
        if self._firsts[0] != key:
            self._firsts = key, self._find_firsts(count)
        return [*self._firsts[1]]

    def _find_firsts(self, count: int) -> list[int]:
        seen: dict[Any, int] = {}
        slots = len(self._slots)
        for first in range(0, count, slots):
            indices = {slot: first + slot for slot in range(min(slots, count - first))}
            for slot, reply in self._open(indices).items():
                task = NO_TASK
                if isinstance(reply, Reply):
                    task = reply.task
                else:
                    self._slots[slot].envs.pop(reply.task_spec.env_id, None)
                group = "group", self.task_sampler[indices[slot]].group_id
                # Tasks of unknown hidden state may differ behind one first observation: each group
                # counts.
                seen.setdefault(task.task_id if task.known else group, indices[slot])
        return sorted(seen.values())

    def busy_since(self, slot: int) -> float | None:
        """``time.monotonic()`` when the slot's running call reached the environment; ``None``: no
        call is there."""
        # A copy: the thread of the slot may add an environment meanwhile.
        times = [env.busy_since for env in list(self._slots[slot].envs.values())]
        return next((since for since in times if since is not None), None)

    def renew(self, slot: int) -> None:
        """Abandon a slot's environments, which may still run: it idles, and makes new ones for its
        next task."""
        self._slots[slot] = Slot()
        self._prompt[slot] = 0

    def fault(self, task_spec: TaskSpec, turn: int, cause: BaseException) -> EnvironmentFault:
        """The error of an environment that failed in a turn (-1: at its reset) of a task."""
        return EnvironmentFault(self.names[task_spec.env_id], task_spec, turn, cause)

    def _begin(self, indices: Mapping[int, int | None]) -> None:
        """Start the tasks ``indices`` (slot -> index of its task; ``None``: the next one that can
        be started)."""
        waiting = {slot: self.next_task() if index is None else index for slot, index in indices.items()}
        while waiting:
            opened, waiting = waiting, {}
            for slot, reply in self._open(opened).items():
                if isinstance(reply, Reply):
                    self.start(slot, opened[slot], reply)
                # The caller replays a saved episode, for which no other task can stand in.
                elif indices[slot] is not None:
                    raise reply
                else:
                    self._contain(slot, reply)
                    waiting[slot] = self.next_task()

    def _open(self, indices: Mapping[int, int]) -> dict[int, Reply | EnvironmentFault]:
        """:meth:`open` a task in each slot."""
        return self._call(
            {i: (self.task_sampler[index], -1, partial(self.open, i, index)) for i, index in indices.items()}
        )

    def _call(self, calls: Mapping[int, _SlotCall]) -> dict[int, Reply | EnvironmentFault]:
        """Make a call for each slot, in threads if there are any; its reply or its fault."""
        if self.num_threads and self._pool is None:
            self._pool = Pool(self.num_threads)
        pool = self._pool or Pool(0)
        # One loan for the calls of all slots: the state is saved and restored once a step.
        with nullcontext() if self.num_threads else kept_global_rng(for_envs=True):
            made = {slot: pool.submit(slot, function) for slot, (_, _, function) in calls.items()}
        pool.wait(made, self.busy_since, self.step_timeout)
        return {slot: self._outcome(call, *calls[slot][:2]) for slot, call in made.items()}

    def _outcome(self, call: Call, task_spec: TaskSpec, turn: int) -> Any:
        """The reply or the fault of a finished call. Raises errors that are no faults of the
        environment."""
        if call.error is None:
            return call.result
        if call.abandoned:
            return self.fault(task_spec, turn, call.error)
        if isinstance(call.error, EnvironmentFault):
            return call.error
        raise call.error

    def _contain(self, slot: int, fault: EnvironmentFault) -> StopReason:
        """Count a failed episode and drop its environment; raise the first fault if there were too
        many in a row."""
        last, self.last_fault = self.last_fault, fault
        # Its state is unknown after an error; the next task makes a new one.
        self._slots[slot].envs.pop(fault.task_spec.env_id, None)
        same_call = last is not None and fault.batched_call is not None and fault.batched_call is last.batched_call
        if not same_call:
            self.new_faults = [*self.new_faults, fault]
            self._fault_counter.record(fault)
            self._fault_counter.warn(fault, "Its episode ends here.")
        return fault.stop_reason

    def _append(self, slot: int, ids: Sequence[int]) -> None:
        length = self._slots[slot].length
        self._prompt.numpy()[slot, length : length + len(ids)] = ids
        self._slots[slot].length += len(ids)

    def _stop_reason(self, state: Slot, step: TextStep, length: int) -> StopReason:
        # The environment's own end before our budgets: an episode that ends with its last turn was
        # not cut.
        if step.terminated:
            if self._success.holds(state, step):
                return StopReason.WON
            # GEM's own turn limit sets both flags. The limit stands in the prompt: it is part of
            # the task.
            return StopReason.TURN_LIMIT if step.truncated else StopReason.LOST
        if step.truncated:
            return StopReason.ENV_TRUNCATED
        if state.turn + 1 == self.max_turns:
            return StopReason.MAX_TURNS
        if length + self.max_output_tokens > self.max_model_len:
            return StopReason.CONTEXT
        return StopReason.RUNNING
