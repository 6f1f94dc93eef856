"""All slots of an environment at once: :class:`Lockstep`.

It steps the slots of a :class:`~torchrl_llm.envs.GEMEnv` together, in threads if there are any,
counts and replaces environments that fail, and saves what runs. Single slots, which is all that
collectors without a barrier between turns need, are in :mod:`~torchrl_llm.envs.slots`.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from torchrl_llm.envs.contexts import Span
from torchrl_llm.envs.faults import EnvironmentFault, FaultCounter
from torchrl_llm.envs.isolation import Call, Pool, kept_global_rng, revoke_global_rng
from torchrl_llm.envs.slots import NO_TASK, Reply, SlotMachine
from torchrl_llm.envs.tasks import TaskSpec
from torchrl_llm.keys import StopReason

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT = 1.0  # seconds that threads may take to end

_SlotCall = tuple[TaskSpec, int, Callable[[], Reply]]
"""For which task a slot calls, in which turn (-1: the reset), and what."""


@dataclass(eq=False, kw_only=True, repr=False)
class Lockstep:
    """Runs the slots of a :class:`~torchrl_llm.envs.SlotMachine` a turn at a time: each turn ends
    when every environment has answered, or has failed.

    Attributes:
        slots: nothing else runs them meanwhile.
        num_threads, step_timeout: see :class:`~torchrl_llm.envs.GEMEnv`.
        faults: counts failed episodes; what runs single slots counts its own.
        last_fault: the last of them; ``None``: none failed.
        new_faults: those since it was set to (), as a ``GEMEnv`` does before each reset and step.

    Examples:
        >>> from torchrl_llm.envs import GEMEnv
        >>> from torchrl_llm.testing.environments import StopOrGo
        >>> from torchrl_llm.testing.tokenizers import byte_tokenizer
        >>> env = GEMEnv(StopOrGo, tokenizer=byte_tokenizer(), num_envs=2, max_output_tokens=32)
        >>> env.lockstep.begin({0: None, 1: None})
        >>> env.lockstep.step({slot: [*env.formatter.answer(said)] for slot, said in enumerate(["go", "stop"])})
        >>> [slot.stop_reason.name for slot in env.slots]
        ['RUNNING', 'WON']
    """

    slots: SlotMachine
    num_threads: int
    step_timeout: float | None
    faults: FaultCounter
    last_fault: EnvironmentFault | None = field(default=None, init=False)
    new_faults: Sequence[EnvironmentFault] = field(default=(), init=False)

    def __post_init__(self) -> None:
        self._first_seed = self.slots.task_sampler.seed
        self._firsts: tuple[Any, list[int]] = (None, [])
        self._pool: Pool | None = None

    def begin(self, indices: Mapping[int, int | None]) -> None:
        """Start the tasks ``indices`` (slot -> index of its task; ``None``: the next one that can
        be started), in threads if there are any.

        Raises:
            EnvironmentFault: too many failed in a row, or one of a given index did.
        """
        waiting = {slot: self.slots.next_task() if index is None else index for slot, index in indices.items()}
        while waiting:
            opened, waiting = waiting, {}
            for slot, reply in self._open(opened).items():
                if isinstance(reply, Reply):
                    self.slots.start(slot, opened[slot], reply)
                # The caller replays a saved episode, for which no other task can stand in.
                elif indices[slot] is not None:
                    raise reply
                else:
                    self._contain(slot, reply)
                    waiting[slot] = self.slots.next_task()

    def step(self, responses: Mapping[int, list[int]]) -> None:
        """Send each slot its response, in threads if there are any, and advance it. An environment
        that fails ends its episode.

        Raises:
            EnvironmentFault: too many failed in a row.
        """
        calls: dict[int, _SlotCall] = {}
        for i, response in responses.items():
            state = self.slots[i]
            calls[i] = state.task_spec, state.turn, partial(self.slots.answer, i, response)
        for i, reply in self._call(calls).items():
            if isinstance(reply, EnvironmentFault):
                # The response stays in the context: the policy sampled it, whatever became of the
                # environment.
                said = Span(responses[i], self.slots[i].turn, "answer")
                reply = Reply([said], stop_reason=self._contain(i, reply))
            elif reply.stop_reason != StopReason.RUNNING:
                self.faults.recent.clear()
            self.slots.advance(i, responses[i], reply)

    def _open(self, indices: Mapping[int, int]) -> dict[int, Reply | EnvironmentFault]:
        """Open a task in each slot; what came of it, or its fault."""
        specs = self.slots.task_sampler
        return self._call({i: (specs[index], -1, partial(self.slots.open, i, index)) for i, index in indices.items()})

    def _call(self, calls: Mapping[int, _SlotCall]) -> dict[int, Reply | EnvironmentFault]:
        """Make a call for each slot, in threads if there are any; its reply or its fault."""
        if self.num_threads and self._pool is None:
            self._pool = Pool(self.num_threads)
        pool = self._pool or Pool(0)
        # One loan for the calls of all slots: the state is saved and restored once a step.
        with nullcontext() if self.num_threads else kept_global_rng(for_envs=True):
            made = {slot: pool.submit(slot, function) for slot, (_, _, function) in calls.items()}
        pool.wait(made, self.slots.busy_since, self.step_timeout)
        return {slot: self._outcome(call, *calls[slot][:2]) for slot, call in made.items()}

    def _outcome(self, call: Call, task_spec: TaskSpec, turn: int) -> Any:
        """The reply or the fault of a finished call. Raises errors that are not faults of the
        environment."""
        if call.error is None:
            return call.result
        if call.abandoned:
            return self.slots.fault(task_spec, turn, call.error)
        if isinstance(call.error, EnvironmentFault):
            return call.error
        raise call.error

    def _contain(self, slot: int, fault: EnvironmentFault) -> StopReason:
        """Count a failed episode and drop its environment; raise the first fault if there were too
        many in a row."""
        last, self.last_fault = self.last_fault, fault
        # Its state is unknown after an error; the next task makes a new one.
        self.slots[slot].envs.pop(fault.task_spec.env_id, None)
        same_call = last is not None and fault.batched_call is not None and fault.batched_call is last.batched_call
        if not same_call:
            self.new_faults = [*self.new_faults, fault]
            self.faults.record(fault)
            self.faults.warn(fault, "Its episode ends here.")
        return fault.stop_reason

    def first_of_each_task(self, count: int) -> list[int]:
        """Of the next ``count`` tasks, counted from 0, those that no earlier one shares a known
        task with.

        Resets the environments of all slots, so no episode may be running. A task counts where its
        environment fails, or does not say what is hidden (:class:`~torchrl_llm.envs.TaskIdentity`).
        The result is cached: evaluations ask for the same tasks again and again, and each
        computation resets ``count`` environments.
        """
        # Equal samplers may differ in their progress.
        sampler = self.slots.task_sampler
        key = sampler, sampler.shares, sampler.stages, count
        if self._firsts[0] != key:
            self._firsts = key, self._find_firsts(count)
        return [*self._firsts[1]]

    def _find_firsts(self, count: int) -> list[int]:
        seen: dict[Any, int] = {}
        slots = len(self.slots)
        for first in range(0, count, slots):
            indices = {slot: first + slot for slot in range(min(slots, count - first))}
            for slot, reply in self._open(indices).items():
                task = NO_TASK
                if isinstance(reply, Reply):
                    task = reply.task
                else:
                    self.slots[slot].envs.pop(reply.task_spec.env_id, None)
                group = "group", self.slots.task_sampler[indices[slot]].group_id
                # Tasks of unknown hidden state may differ behind one first observation: each group
                # counts.
                seen.setdefault(task.task_id if task.known else group, indices[slot])
        return sorted(seen.values())

    # ---------------------------------------- state

    def set_seed(self, seed: int) -> None:
        """Seed the tasks and sample them from the first again; running episodes continue.

        With another seed than the first, ids depend on the seed too: TorchRL gives each worker of a
        ``SerialEnv`` or ``ParallelEnv`` its own.
        """
        sampler = self.slots.task_sampler
        # The stage of a curriculum that is in force holds from the first task on.
        stages = tuple(replace(stage, first_group=0) for stage in sampler.stages[-1:])
        by_seed = seed != self._first_seed
        self.slots.task_sampler = replace(sampler, seed=seed, ids_by_seed=by_seed, stages=stages)
        self.slots.num_sampled = 0

    def state_dict(self) -> OrderedDict:
        """What :meth:`load_state_dict` needs: the counters, and each slot as its task and its
        responses so far."""
        slots = [
            {"index": slot.index, "stop_reason": int(slot.stop_reason), "responses": [*map(list, slot.responses)]}
            for slot in self.slots
        ]
        counts = {"num_sampled": self.slots.num_sampled, "faults": dict(self.faults.counts)}
        return OrderedDict(task_sampler=asdict(self.slots.task_sampler), slots=slots, **counts)

    def load_state_dict(self, state_dict: OrderedDict) -> None:
        """Continue where :meth:`state_dict` was taken: running episodes are replayed, finished ones
        come back without their contexts. An empty state changes nothing and is logged.

        Raises:
            ValueError: the state is of other groups, mixture, stream, workers or number of slots.
        """
        if not state_dict:
            logger.warning(
                "GEMEnv got an empty state and continues with task %d; save env.state_dict().", self.slots.num_sampled
            )
            return
        sampler, slots = self.slots.task_sampler, state_dict["slots"]
        saved = type(sampler)(**state_dict["task_sampler"])
        running = {
            i: slot
            for i, slot in enumerate(slots)
            if slot["index"] is not None and slot["stop_reason"] == StopReason.RUNNING
        }
        # The seed may differ: set_seed may have been called since the environment was made, here or
        # there.
        same_seed = replace(saved, seed=sampler.seed, ids_by_seed=sampler.ids_by_seed)
        if same_seed != sampler or (running and len(slots) != len(self.slots)):
            raise ValueError(
                f"The state is of {saved} over {len(slots)} slots; this environment has {sampler} over "
                f"{len(self.slots)} slots. Make it with the same arguments (only the seed may differ)."
            )
        self.slots.task_sampler, self.slots.num_sampled = saved, state_dict["num_sampled"]
        self._first_seed = self._first_seed if saved.ids_by_seed else saved.seed
        # A collector that runs single slots counts faults itself.
        self.faults.counts = Counter(state_dict.get("faults", {}))
        for i in range(len(self.slots)):
            self.slots.empty(i)
        for slot, old in zip(self.slots, slots, strict=False):
            slot.stop_reason = StopReason(old["stop_reason"])
        self.begin({i: old["index"] for i, old in running.items()})
        for i, old in running.items():
            # Replayed and not unpickled: environments need not be picklable, and task and responses
            # determine them.
            for response in map(list, old["responses"]):
                self.slots.advance(i, response, self.slots.answer(i, response))

    def close(self) -> None:
        """End the threads; those of environments that hang are left behind."""
        if self._pool is not None:
            for thread in self._pool.close(_CLOSE_TIMEOUT):
                # Otherwise every other environment of the process would wait for it.
                revoke_global_rng(thread)
