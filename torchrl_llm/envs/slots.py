"""Episodes slot by slot: :class:`Slot`, :class:`Reply`, and :class:`SlotMachine`, which runs them.

This module runs and ends episodes, counts and replaces environments that fail, and saves what runs.
What of an episode a turn sees is in :mod:`~torchrl_llm.envs.contexts`, TensorDicts and specs are in
:mod:`~torchrl_llm.envs.env`.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from torchrl_llm.envs.chat import ChatFormatter
from torchrl_llm.envs.columns import NO_EXTRAS, merged_columns
from torchrl_llm.envs.contexts import Append, ContextRule, RequestingRule, Slide, Span, ids_of, num_tokens, selected
from torchrl_llm.envs.env_spec import EnvSpec
from torchrl_llm.envs.faults import FaultCounter
from torchrl_llm.envs.isolation import Call, IsolatedEnv, Pool, kept_global_rng, revoke_global_rng
from torchrl_llm.envs.response import Response
from torchrl_llm.envs.success import SuccessRule
from torchrl_llm.envs.tasks import TaskIdentity, TaskSampler, TaskSpec
from torchrl_llm.envs.text_env import NO_STEP, EnvironmentFault, EnvironmentUnavailableError, TextStep
from torchrl_llm.keys import COLUMNS, REWARD, NestedKey, StopReason
from torchrl_llm.utils.options import ConfigError

logger = logging.getLogger(__name__)

Overflow = Literal["truncate", "slide"]

NO_TASK_SPEC = TaskSpec(-1, -1, 0, 0)
NO_TASK = TaskIdentity(-1, known=False)
TERMINATED = (StopReason.WON, StopReason.LOST, StopReason.TURN_LIMIT)
FAILED = (StopReason.ERROR, StopReason.TIMEOUT)
_CLOSE_TIMEOUT = 1.0  # seconds that threads may take to end


class PromptTooLongError(EnvironmentFault):
    """The first context of an episode leaves no room for a response."""

    @property
    def stop_reason(self) -> StopReason:
        """``CONTEXT``."""
        return StopReason.CONTEXT


class Reply(NamedTuple):
    """The result of an environment's reset or step, in tokens.

    Attributes:
        spans: what it adds to the episode: of a reset, the whole first context; of a step, the
            response and the feedback.
        step: what the environment returned; nothing at a reset.
        stop_reason: of the episode after it.
        context: the spans of the next context, which opens a new segment; ``None``: it grows by
            ``spans``. Also at the end of an episode that was cut off.
        task: of a reset, the task.
        asked: whether the context ends with a request of the context rule, whose answer the
            environment does not get.
    """

    spans: Sequence[Span]
    step: TextStep = NO_STEP
    stop_reason: StopReason = StopReason.RUNNING
    context: Sequence[Span] | None = None
    task: TaskIdentity = NO_TASK
    asked: bool = False


@dataclass
class Slot:
    """The state of one slot of the batch.

    Attributes:
        envs: its environments, by index into the mixture, each with its own random state.
        index: of its task in the ``task_sampler``; ``None``: the slot idles.
        task_spec: the task.
        task_id: of its :class:`~torchrl_llm.envs.tasks.TaskIdentity`.
        turn: finished turns.
        length: tokens of the context.
        segment: how many contexts were none that extend the one before.
        spans: the episode so far.
        context: what of it the context is made of.
        stop_reason: why the episode ended, or that it runs.
        responses: the ids of the responses so far.
        steps: what the environment returned to each.
        asked: whether the context ends with a request of the context rule: the message of the last
            step comes once more behind the next response, which the environment does not get.
    """

    envs: dict[int, IsolatedEnv] = field(default_factory=dict)
    index: int | None = None
    task_spec: TaskSpec = NO_TASK_SPEC
    task_id: int = -1
    turn: int = 0
    length: int = 0
    segment: int = 0
    spans: list[Span] = field(default_factory=list)
    context: list[Span] = field(default_factory=list)
    stop_reason: StopReason = StopReason.RUNNING
    responses: list[list[int]] = field(default_factory=list)
    steps: list[TextStep] = field(default_factory=list)
    asked: bool = False

    @property
    def total(self) -> float:
        """The sum of the rewards."""
        return sum(step.reward for step in self.steps)

    @property
    def finished(self) -> bool:
        return self.stop_reason != StopReason.RUNNING

    @property
    def live(self) -> bool:
        return self.index is not None and not self.finished


_SlotCall = tuple[TaskSpec, int, Callable[[], Reply]]
"""For which task a slot calls, in which turn (-1: the reset), and what."""


@dataclass(eq=False, kw_only=True, repr=False)
class SlotMachine:
    """Runs the episodes of N slots, each at its own pace, in token ids and without a TensorDict.

    :class:`~torchrl_llm.envs.GEMEnv` holds one and steps all slots at once (:meth:`step`).
    Collectors without a barrier between turns take it (``env.slots``) and run single slots, by
    :meth:`open` and :meth:`start`, :meth:`answer` and :meth:`advance`. It is a sequence of the
    slots' states: ``env.slots[0].turn``.

    Attributes:
        mixture: the :class:`~torchrl_llm.envs.EnvSpec` of each environment.
        formatter: writes contexts and reads responses.
        task_sampler: which task each index is.
        num_slots: N.
        max_model_len, max_output_tokens, max_turns, context_rule, overflow, num_threads,
            step_timeout: see :class:`~torchrl_llm.envs.GEMEnv`.
        faults: counts failed episodes of :meth:`begin` and :meth:`step`; what runs single slots
            counts its own.
        success: decides which episodes are a success.
        num_sampled: tasks sampled so far.
        last_fault: of ``faults``, the last; ``None``: none failed.
        new_faults: those since it was set to (), as a ``GEMEnv`` does before each reset and step.
        names: of the environments.
        columns: of a turn, beside those that all have: what they declare, and what the formatter
            counts.
        prompt: ``[N, max_model_len]`` int64, the contexts, each valid up to its slot's length.

    Examples:
        >>> from torchrl_llm.envs import GEMEnv
        >>> from torchrl_llm.testing.environments import StopOrGo
        >>> from torchrl_llm.testing.tokenizers import byte_tokenizer
        >>> slots = GEMEnv(StopOrGo, tokenizer=byte_tokenizer(), max_output_tokens=32).slots
        >>> task, response = slots.next_task(), [*slots.formatter.answer("stop")]
        >>> slots.start(0, task, slots.open(0, task))
        >>> slots.advance(0, response, slots.answer(0, response))
        >>> slots[0].turn, slots[0].stop_reason.name
        (1, 'WON')
    """

    mixture: tuple[EnvSpec, ...]
    formatter: ChatFormatter
    task_sampler: TaskSampler
    num_slots: int
    max_model_len: int
    max_output_tokens: int
    max_turns: int | None
    context_rule: ContextRule | None
    overflow: Overflow
    num_threads: int
    step_timeout: float | None
    faults: FaultCounter
    success: SuccessRule
    num_sampled: int = field(default=0, init=False)
    last_fault: EnvironmentFault | None = field(default=None, init=False)
    new_faults: Sequence[EnvironmentFault] = field(default=(), init=False)

    def __post_init__(self) -> None:
        # First, because it fails at once where there is no memory for so many slots.
        self.prompt = torch.zeros(self.num_slots, self.max_model_len, dtype=torch.int64)
        self.names = tuple(spec.name for spec in self.mixture)
        counted = ("the chat template", self.formatter.columns)
        self.columns = merged_columns([counted, *((spec.name, spec.columns) for spec in self.mixture)])
        # An evaluation replaces the sampler.
        self._stream, self._first_seed = self.task_sampler.stream, self.task_sampler.seed
        slide = [Slide()] if self.overflow == "slide" else []
        rules = (self.formatter.rule, self.context_rule or Append(), *slide)
        self._rules = [rule for rule in rules if type(rule) is not Append]
        self._request = self.context_rule.request if isinstance(self.context_rule, RequestingRule) else None
        self._slots = [Slot() for _ in range(self.num_slots)]
        self._firsts: tuple[Any, list[int]] = (None, [])
        self._pool: Pool | None = None

    def __len__(self) -> int:
        return self.num_slots

    def __getitem__(self, slot: int) -> Slot:
        return self._slots[slot]

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._slots)

    @property
    def has_segments(self) -> bool:
        """Whether there may be contexts that do not extend the one before."""
        return bool(self._rules)

    @property
    def group_size(self) -> int:
        """Episodes that share a task."""
        return self.task_sampler.group_size

    def context(self, slot: int) -> npt.NDArray[np.int64]:
        """The ids of a slot's context, ``[length]``: a view, valid until the slot's next turn."""
        return self.prompt.numpy()[slot, : self._slots[slot].length]

    def values(self, slot: int) -> dict[NestedKey, float]:
        """What the last turn of a slot has of each column: the reward, and :attr:`columns`. Before
        the first all are blank."""
        found = self._slots[slot].steps[-1].values if self._slots[slot].steps else {}
        return {column.name: found.get(column.name, column.blank) for column in (COLUMNS[REWARD], *self.columns)}

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
        task_spec = self.task_sampler[index]
        try:
            env = self._env(slot, task_spec)
            context = self.formatter.first_spans(env.reset(task_spec.seed))
        except (EnvironmentUnavailableError, ConfigError):  # no task would have another one
            raise
        # an environment may call sys.exit(); Ctrl-C passes
        except (Exception, SystemExit) as error:
            raise self.fault(task_spec, -1, error) from error
        if (length := num_tokens(context)) + self.max_output_tokens > self.max_model_len:
            cause = ValueError(
                f"the first prompt has {length} tokens; with a response of max_output_tokens={self.max_output_tokens} it "
                f"does not fit into max_model_len={self.max_model_len}. Raise max_model_len, lower max_output_tokens, or "
                "shorten the system prompt"
            )
            raise PromptTooLongError(self.names[task_spec.env_id], task_spec, -1, cause)
        return Reply(context, task=env.task or NO_TASK)

    def _env(self, slot: int, task_spec: TaskSpec) -> IsolatedEnv:
        """A slot's environment for a task."""
        envs = self._slots[slot].envs
        env = envs.get(task_spec.env_id)
        if env is None or env.options != task_spec.options:
            env = envs[task_spec.env_id] = self.new_env(task_spec.env_id, task_spec.options)
        return env

    def new_env(self, env_id: int, options: tuple[tuple[str, Any], ...]) -> IsolatedEnv:
        """Another one of the environments ``env_id`` of the mixture, made with these options."""
        spec = self.mixture[env_id]
        return IsolatedEnv(spec, rows=self._stream if spec.divide else None, options=options)

    def start(self, slot: int, index: int, reply: Reply) -> None:
        """Start the episode of the task ``index`` in a slot, with what :meth:`open` returned."""
        envs, task_spec = self._slots[slot].envs, self.task_sampler[index]
        self._slots[slot] = Slot(envs, index=index, task_spec=task_spec, task_id=reply.task.task_id)
        self._slots[slot].spans += reply.spans
        self._show(slot, reply.spans)

    def answer(self, slot: int, response: list[int]) -> Reply:
        """Send a response to a slot's environment, unless the context rule has asked for it;
        nothing but the environment changes until :meth:`advance`.

        Different slots may be opened and answered in different threads at once.

        Raises:
            EnvironmentFault: the environment raised or returned something malformed.
        """
        state = self._slots[slot]
        try:
            said = self.formatter.decode(response)
            if state.asked:
                step = state.steps[-1]._replace(reward=0.0, success=None, extras=NO_EXTRAS)
            else:
                step = state.envs[state.task_spec.env_id].step(said)
            split = said if self._rules or self.formatter.columns else None
            message = step.results or step.message
            new = self.formatter.turn_spans(response, message, state.turn, role=step.role, said=split)
            step = step.with_extras(self.formatter.columns_of(said, new))
        except (Exception, SystemExit) as error:
            raise self.fault(state.task_spec, state.turn, error) from error
        if state.asked:
            new = [span._replace(kind="summary") if span.kind == "answer" else span for span in new]
        reply = Reply(new, step, *self._next_context(state, new, self._stop_reason(state, step)))
        if self._request is None or state.asked or reply.stop_reason != StopReason.RUNNING:
            return reply
        context = [*state.context, *new] if reply.context is None else reply.context
        request = self._request(context)
        return reply if request is None else self._asking(state, response, said, reply, request)

    def _asking(self, state: Slot, response: list[int], said: Response, reply: Reply, request: str) -> Reply:
        """A reply whose message ends with a request; as it was, where that has no room."""
        # of the user, also behind the output of a tool
        new = self.formatter.turn_spans(response, f"{reply.step.message}\n\n{request}", state.turn, said=said)
        reason, context = self._next_context(state, new, StopReason.RUNNING)
        if reason != StopReason.RUNNING:
            return reply
        return reply._replace(spans=new, context=context, asked=True)

    def _next_context(
        self, state: Slot, new: list[Span], reason: StopReason
    ) -> tuple[StopReason, Sequence[Span] | None]:
        """Why an episode ends that would end for ``reason`` behind its ``new`` spans, and its next
        context; ``None``: it grows."""
        if reason in TERMINATED:  # nothing reads what follows
            return reason, None
        room = self.max_model_len - self.max_output_tokens
        if not self._rules:
            full = reason == StopReason.RUNNING and state.length + num_tokens(new) > room
            return StopReason.CONTEXT if full else reason, None
        ends = reason != StopReason.RUNNING
        if ends and self._rules == [Slide()] and state.length + num_tokens(new) <= self.max_model_len:
            return reason, None
        spans = [*state.spans, *new]
        context = selected(self._rules, spans, self.formatter, room)
        if num_tokens(context) > room and reason == StopReason.RUNNING:
            reason = StopReason.CONTEXT
        # A critic values what would follow an episode that was cut off by its last context, which
        # has to hold all of the last feedback, if there is room at all.
        if num_tokens(context) > self.max_model_len and self.overflow == "slide":
            context = Slide()(context, self.formatter, self.max_model_len)
        return reason, None if context == state.context + new else context

    def advance(self, slot: int, response: list[int], reply: Reply) -> None:
        """Add to a slot what :meth:`answer` returned; the last context of an episode is cut at
        ``max_model_len``."""
        state = self._slots[slot]
        state.responses.append(response)
        state.turn += 1
        state.steps.append(reply.step)
        state.stop_reason, state.asked = reply.stop_reason, reply.asked
        state.spans += reply.spans
        if reply.stop_reason in TERMINATED:
            self.success.watch(state.task_spec.env_id, state.total, reply.step, won=reply.stop_reason == StopReason.WON)
        if reply.context is None:
            self._append(slot, reply.spans)
        else:
            state.segment += 1
            self._show(slot, reply.context)

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

    def empty(self, slot: int) -> None:
        """Let a slot idle; it keeps its environments."""
        self._slots[slot] = Slot(self._slots[slot].envs)

    def renew(self, slot: int) -> None:
        """Abandon a slot's environments, which may still run: it idles, and makes new ones for its
        next task."""
        self._slots[slot] = Slot()
        self.prompt[slot] = 0

    def fault(self, task_spec: TaskSpec, turn: int, cause: BaseException) -> EnvironmentFault:
        """The error of an environment that failed in a turn (-1: at its reset) of a task."""
        return EnvironmentFault(self.names[task_spec.env_id], task_spec, turn, cause)

    # ---------------------------------------- several slots at once

    def begin(self, indices: Mapping[int, int | None]) -> None:
        """Start the tasks ``indices`` (slot -> index of its task; ``None``: the next one that can
        be started), in threads if there are any.

        Raises:
            EnvironmentFault: too many failed in a row, or one of a given index did.
        """
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

    def step(self, responses: Mapping[int, list[int]]) -> None:
        """Send each slot its response, in threads if there are any, and advance it. An environment
        that fails ends its episode.

        Raises:
            EnvironmentFault: too many failed in a row.
        """
        at = {i: (self._slots[i].task_spec, self._slots[i].turn) for i in responses}
        calls = {i: (*at[i], partial(self.answer, i, response)) for i, response in responses.items()}
        for i, reply in self._call(calls).items():
            if isinstance(reply, EnvironmentFault):
                # The response stays in the context: the policy sampled it, whatever became of the
                # environment.
                said = Span(responses[i], self._slots[i].turn, "answer")
                reply = Reply([said], stop_reason=self._contain(i, reply))
            elif reply.stop_reason != StopReason.RUNNING:
                self.faults.recent.clear()
            self.advance(i, responses[i], reply)

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
        """The reply or the fault of a finished call. Raises errors that are not faults of the
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
            self.faults.record(fault)
            self.faults.warn(fault, "Its episode ends here.")
        return fault.stop_reason

    def _show(self, slot: int, context: Sequence[Span]) -> None:
        self._slots[slot].context, self._slots[slot].length = [], 0
        self.prompt.numpy()[slot] = 0
        self._append(slot, context)

    def _append(self, slot: int, spans: Sequence[Span]) -> None:
        # Cuts nothing while an episode runs: it ends where the next response would not fit.
        state = self._slots[slot]
        ids = ids_of(spans)[: self.max_model_len - state.length]
        end = state.length + len(ids)
        self.prompt.numpy()[slot, state.length : end] = ids
        state.length = end
        state.context += spans

    def _stop_reason(self, state: Slot, step: TextStep) -> StopReason:
        """Why the episode ends with a step, if not for its context."""
        # The environment's own end before our budgets: an episode that ends with its last turn was
        # not cut.
        if step.terminated:
            if self.success.holds(state.task_spec.env_id, state.total, step):
                return StopReason.WON
            # GEM's own turn limit sets both flags. The limit stands in the prompt: it is part of
            # the task.
            return StopReason.TURN_LIMIT if step.truncated else StopReason.LOST
        if step.truncated:
            return StopReason.ENV_TRUNCATED
        if state.turn + 1 == self.max_turns:
            return StopReason.MAX_TURNS
        return StopReason.RUNNING

    # ---------------------------------------- state

    def set_seed(self, seed: int) -> None:
        """Seed the tasks and sample them from the first again; running episodes continue.

        With another seed than the first, ids depend on the seed too: TorchRL gives each worker of a
        ``SerialEnv`` or ``ParallelEnv`` its own.
        """
        # The stage of a curriculum that is in force holds from the first task on.
        stages = tuple(replace(stage, first_group=0) for stage in self.task_sampler.stages[-1:])
        by_seed = seed != self._first_seed
        self.task_sampler = replace(self.task_sampler, seed=seed, ids_by_seed=by_seed, stages=stages)
        self.num_sampled = 0

    def state_dict(self) -> OrderedDict:
        """What :meth:`load_state_dict` needs: the counters, and each slot as its task and its
        responses so far."""
        slots = [
            {"index": slot.index, "stop_reason": int(slot.stop_reason), "responses": [*map(list, slot.responses)]}
            for slot in self
        ]
        counts = {"num_sampled": self.num_sampled, "faults": dict(self.faults.counts)}
        return OrderedDict(task_sampler=asdict(self.task_sampler), slots=slots, **counts)

    def load_state_dict(self, state_dict: OrderedDict) -> None:
        """Continue where :meth:`state_dict` was taken: running episodes are replayed, finished ones
        come back without their contexts. An empty state changes nothing and is logged.

        Raises:
            ValueError: the state is of other groups, mixture, stream, workers or number of slots.
        """
        if not state_dict:
            logger.warning(
                "GEMEnv got an empty state and continues with task %d; save env.state_dict().", self.num_sampled
            )
            return
        saved, slots = type(self.task_sampler)(**state_dict["task_sampler"]), state_dict["slots"]
        running = {
            i: slot
            for i, slot in enumerate(slots)
            if slot["index"] is not None and slot["stop_reason"] == StopReason.RUNNING
        }
        # The seed may differ: set_seed may have been called since the environment was made, here or
        # there.
        same_seed = replace(saved, seed=self.task_sampler.seed, ids_by_seed=self.task_sampler.ids_by_seed)
        if same_seed != self.task_sampler or (running and len(slots) != len(self)):
            raise ValueError(
                f"The state is of {saved} over {len(slots)} slots; this environment has {self.task_sampler} over "
                f"{len(self)} slots. Make it with the same arguments (only the seed may differ)."
            )
        self.task_sampler, self.num_sampled = saved, state_dict["num_sampled"]
        self._first_seed = self._first_seed if saved.ids_by_seed else saved.seed
        # A collector that runs single slots counts faults itself.
        self.faults.counts = Counter(state_dict.get("faults", {}))
        self._slots = [Slot(slot.envs) for slot in self]
        for slot, old in zip(self, slots, strict=False):
            slot.stop_reason = StopReason(old["stop_reason"])
        self.begin({i: old["index"] for i, old in running.items()})
        for i, old in running.items():
            # Replayed and not unpickled: environments need not be picklable, and task and responses
            # determine them.
            for response in map(list, old["responses"]):
                self.advance(i, response, self.answer(i, response))

    def close(self) -> None:
        """End the threads; those of environments that hang are left behind."""
        if self._pool is not None:
            for thread in self._pool.close(_CLOSE_TIMEOUT):
                # Otherwise every other environment of the process would wait for it.
                revoke_global_rng(thread)
