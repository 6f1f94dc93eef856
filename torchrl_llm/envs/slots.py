"""Episodes slot by slot: :class:`Slot`, :class:`Reply`, and :class:`SlotMachine`, which runs them.

An episode begins by a reset, grows by a response and its feedback, and ends. All slots at once are
in :mod:`~torchrl_llm.envs.lockstep`, what of an episode a turn sees in
:mod:`~torchrl_llm.envs.context_window`, TensorDicts and specs in :mod:`~torchrl_llm.envs.env`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from torchrl_llm.envs.chat import ChatFormatter
from torchrl_llm.envs.columns import NO_EXTRAS, merged_columns
from torchrl_llm.envs.context_window import ContextWindow
from torchrl_llm.envs.contexts import Span, ids_of
from torchrl_llm.envs.env_spec import EnvSpec
from torchrl_llm.envs.faults import EnvironmentFault, EnvironmentUnavailableError, PromptTooLongError
from torchrl_llm.envs.isolation import IsolatedEnv
from torchrl_llm.envs.response import Response
from torchrl_llm.envs.success import SuccessRule
from torchrl_llm.envs.tasks import TaskIdentity, TaskSampler, TaskSpec
from torchrl_llm.envs.text_env import NO_STEP, TextStep
from torchrl_llm.keys import COLUMNS, REWARD, NestedKey, StopReason
from torchrl_llm.utils.fixed import Delegated
from torchrl_llm.utils.options import ConfigError

NO_TASK_SPEC = TaskSpec(-1, -1, 0, 0)
NO_TASK = TaskIdentity(-1, known=False)
TERMINATED = (StopReason.WON, StopReason.LOST, StopReason.TURN_LIMIT)
FAILED = (StopReason.ERROR, StopReason.TIMEOUT)


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


@dataclass(eq=False, kw_only=True, repr=False)
class SlotMachine:
    """Runs the episodes of N slots, each at its own pace, in token ids and without a TensorDict.

    :class:`~torchrl_llm.envs.GEMEnv` has one (``env.slots``), whose slots it runs all at once
    (:class:`~torchrl_llm.envs.Lockstep`). Collectors without a barrier between turns run single
    slots, by :meth:`open` and :meth:`start`, :meth:`answer` and :meth:`advance`. It is a sequence
    of the slots' states: ``env.slots[0].turn``.

    Attributes:
        mixture: the :class:`~torchrl_llm.envs.EnvSpec` of each environment.
        window: makes the context of each turn.
        task_sampler: which task each index is.
        num_slots: N.
        max_turns: see :class:`~torchrl_llm.envs.GEMEnv`.
        success: decides which episodes are a success.
        num_sampled: tasks sampled so far.
        formatter: of the window; writes contexts and reads responses.
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
    window: ContextWindow
    task_sampler: TaskSampler
    num_slots: int
    max_turns: int | None
    success: SuccessRule
    num_sampled: int = field(default=0, init=False)

    formatter = Delegated[ChatFormatter]("window.formatter")

    def __post_init__(self) -> None:
        # First, because it fails at once where there is no memory for so many slots.
        self.prompt = torch.zeros(self.num_slots, self.window.max_model_len, dtype=torch.int64)
        self.names = tuple(spec.name for spec in self.mixture)
        counted = ("the chat template", self.formatter.columns)
        self.columns = merged_columns([counted, *((spec.name, spec.columns) for spec in self.mixture)])
        self._stream = self.task_sampler.stream  # an evaluation replaces the sampler
        self._slots = [Slot() for _ in range(self.num_slots)]

    def __len__(self) -> int:
        return self.num_slots

    def __getitem__(self, slot: int) -> Slot:
        return self._slots[slot]

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._slots)

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
        if problem := self.window.problem_of(context):
            raise PromptTooLongError(self.names[task_spec.env_id], task_spec, -1, ValueError(problem))
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
        state, window, formatter = self._slots[slot], self.window, self.window.formatter
        try:
            said = formatter.decode(response)
            if state.asked:
                step = state.steps[-1]._replace(reward=0.0, success=None, extras=NO_EXTRAS)
                # Calls in it are executed by nobody.
                said = Response(said, text=said.text, thinking=said.thinking)
            else:
                step = state.envs[state.task_spec.env_id].step(said)
            split = said if window.rebuilds or formatter.columns else None
            message = step.results or step.message
            new = formatter.turn_spans(response, message, state.turn, role=step.role, said=split)
            step = step.with_extras(formatter.columns_of(said, new))
        except (Exception, SystemExit) as error:
            raise self.fault(state.task_spec, state.turn, error) from error
        if state.asked:
            new = [span._replace(kind="summary") if span.kind == "answer" else span for span in new]
        reason = self._stop_reason(state, step)
        if reason in TERMINATED:  # nothing reads what follows
            return Reply(new, step, reason)
        reason, context = window.following(state.spans, state.context, state.length, new, reason)
        reply = Reply(new, step, reason, context)
        if window.request is None or state.asked or reason != StopReason.RUNNING:
            return reply
        request = window.request([*state.context, *new] if context is None else context)
        return reply if request is None else self._asking(state, response, said, reply, request)

    def _asking(self, state: Slot, response: list[int], said: Response, reply: Reply, request: str) -> Reply:
        """A reply whose message ends with a request; as it was, where that has no room."""
        # of the user, also behind the output of a tool
        new = self.formatter.turn_spans(response, f"{reply.step.message}\n\n{request}", state.turn, said=said)
        reason, context = self.window.following(state.spans, state.context, state.length, new, StopReason.RUNNING)
        return reply._replace(spans=new, context=context, asked=True) if reason == StopReason.RUNNING else reply

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

    def _show(self, slot: int, context: Sequence[Span]) -> None:
        self._slots[slot].context, self._slots[slot].length = [], 0
        self.prompt.numpy()[slot] = 0
        self._append(slot, context)

    def _append(self, slot: int, spans: Sequence[Span]) -> None:
        # Cuts nothing while an episode runs: it ends where the next response would not fit.
        state = self._slots[slot]
        ids = ids_of(spans)[: self.window.max_model_len - state.length]
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
