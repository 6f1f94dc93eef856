"""Text environments as TorchRL environments: :class:`GEMEnv`, N of them as one ``EnvBase``.

The TorchRL side: options, specs, ``reset`` and ``step`` of TensorDicts. Episodes run in
:mod:`~torchrl_llm.envs.slots`, all at once by :mod:`~torchrl_llm.envs.lockstep`; random generators
and threads of environments are in :mod:`~torchrl_llm.envs.isolation`, chat templates are in
:mod:`~torchrl_llm.envs.chat`.
"""

from __future__ import annotations

import json
import logging
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.envs import EnvBase
from transformers import PreTrainedTokenizerBase

from torchrl_llm import keys
from torchrl_llm.envs.answers import MissingThinking
from torchrl_llm.envs.chat import ChatFormatter, Template
from torchrl_llm.envs.columns import ExtraKinds
from torchrl_llm.envs.context_window import ContextWindow, Overflow
from torchrl_llm.envs.contexts import ContextRule
from torchrl_llm.envs.env_spec import EnvSpec
from torchrl_llm.envs.faults import EnvironmentFault, FaultCounter
from torchrl_llm.envs.isolation import MAX_THREADS
from torchrl_llm.envs.lockstep import Lockstep
from torchrl_llm.envs.registry import EnvSource, resolve_env
from torchrl_llm.envs.slots import SlotMachine
from torchrl_llm.envs.success import SuccessRule
from torchrl_llm.envs.tasks import Stream, TaskSampler
from torchrl_llm.envs.template_probe import Contexts
from torchrl_llm.envs.tensors import chosen_slots, done_of, observation_of, responses_of, set_specs
from torchrl_llm.envs.text_env import SuccessBy
from torchrl_llm.envs.tools import Tool, tool_schemas
from torchrl_llm.stops import HasStopIds, share_stop_ids
from torchrl_llm.utils.fixed import Delegated
from torchrl_llm.utils.options import Checked, ConfigError, Count, Natural, Positive

logger = logging.getLogger(__name__)

OnDone = Literal["refill", "idle"]


def _declared_tools(specs: Sequence[EnvSpec]) -> Sequence[Tool]:
    """The tools that all environments of a mixture declare."""
    first, *others = specs
    for spec in others:
        if spec.tools is not first.tools and tool_schemas(spec.tools) != tool_schemas(first.tools):
            raise ConfigError(
                f"The environments {first.name!r} and {spec.name!r} of the mixture declare different tools, and one prompt shows "
                "them: declare the same, or pass tools=[...], which all episodes are shown."
            )
    return first.tools


class GEMEnv(Checked, EnvBase):
    """N text environments as one TorchRL environment of batch size ``[N]``; a turn is a step.

    Observations (:mod:`torchrl_llm.keys`): the whole context so far ``("tokens", "prompt")``
    ``[N, max_model_len]`` int64, right-padded with 0, and its length, ``"turn"``, ``"episode_id"``,
    ``"group_id"``, ``"env_id"``, ``"task_id"``, ``"success"`` and ``"stop_reason"``, all
    ``[N, 1]``; after a step also its :attr:`extras`. Action: ``("tokens", "response")``
    ``[N, max_output_tokens]`` int64 and ``("tokens", "response_mask")`` bool. The last observation
    of an episode holds its last response and, as far as it fits, the environment's last message.

    Tasks come from a :class:`~torchrl_llm.envs.TaskSampler`: the same seed gives the same episodes,
    whatever else draws random numbers and however many slots there are. Environments see the global
    generators of ``random`` and ``numpy.random`` seeded by their task, and leave them untouched for
    everything else. A partial-step mask ``"_step"`` ``[N]`` is honored: slots outside it keep their
    state. Episodes run in :attr:`slots`, a :class:`~torchrl_llm.envs.SlotMachine`, which collectors
    without a barrier between turns take directly.

    An episode ends as ``terminated`` when its environment says so (also at its own turn limit), and
    as ``truncated`` by our budgets: ``max_turns``, or when the next response would not fit into
    ``max_model_len``. With ``overflow="slide"`` the oldest turns leave the context instead
    (:class:`~torchrl_llm.envs.Slide`), and an episode is truncated only where the last turn alone
    does not fit.

    What a turn sees of its episode is a rule's (:mod:`torchrl_llm.envs.contexts`): of templates
    that drop earlier thinking, what they show. A context that does not extend the one before opens
    a new segment of the episode, counted in the observation ``"segment"`` ``[N, 1]``, and is
    trained on as the policy saw it (:mod:`torchrl_llm.modules.segments`). Ids never change.

    An environment that raises (also ``SystemExit``) or returns something malformed ends its own
    episode: truncated, reward 0, no feedback, ``StopReason.ERROR`` (``TIMEOUT`` if it raised
    ``TimeoutError``). It is logged, counted in :attr:`faults`, and replaced by a new one. One that
    fails at its reset, or whose first prompt leaves no room for a response (counted as "context"),
    has no episode: its slot gets the next task. A child process that an environment forks ends when
    it returns from the call. With ``step_timeout`` environments are called in threads, and one that
    takes longer is left behind: its episode ends with ``StopReason.TIMEOUT``. Without, an
    environment that hangs holds up the others.

    Args:
        env: an id (of GEM, or of a family of :func:`~torchrl_llm.envs.register_env_family`), a
            factory of any object with ``reset`` and ``step`` (:class:`~torchrl_llm.envs.TextEnv`),
            an :class:`~torchrl_llm.envs.EnvSpec`, or a list of these: a mixture, sampled in turn,
            or by ``weights``.
        tokenizer: the tokenizer of the policy's model.
        num_envs: slots N; default 1. A multiple of ``group_size``.
        max_model_len: width of the context in tokens; default 1024.
        max_output_tokens: width of a response in tokens; default 64.
        max_turns: our turn budget, which summaries count in too; default none.
        context_rule: selects from what the template shows of an episode what a turn sees, such as
            :class:`~torchrl_llm.envs.KeepLast` or :class:`~torchrl_llm.envs.Summarize`; default
            all.
        overflow: ``"truncate"`` (default) or ``"slide"``: what happens when the context is full.
        group_size: episodes that share a task; default 1.
        weights: how often each environment of a mixture is sampled, see
            :class:`~torchrl_llm.envs.TaskSampler`; default none, in turn.
        max_faults: failed episodes tolerated in a row, with none between them that ended well; one
            more raises the first of them. In an evaluation also how many may fail at all. Default
            16, so that one bad task does not end a long run, and a broken environment does. 0
            raises at once.
        num_threads: threads that call environments, so that slow ones run in parallel (those that
            declare ``thread_safe = True``, see :class:`~torchrl_llm.envs.TextEnv`; others one at a
            time). Default: none (0), which is the fastest for environments that answer in
            microseconds; with ``step_timeout`` one a slot, 32 at most.
        step_timeout: seconds that one reset or step may take; waiting for other environments does
            not count. Default none. It needs threads.
            :class:`~torchrl_llm.collectors.AsyncTurnCollector` has threads and a limit of its own.
        system_prompt, template, contexts, chat_template_kwargs, missing_thinking, template_date:
            see :class:`~torchrl_llm.envs.ChatFormatter`.
        tools: likewise; default: those that the environments declare, which have to be the same in
            a mixture.
        success_reward: an episode is a success if it terminates with at least this; default 1.0.
            Where the environment says ``info["success"]`` as it terminates, that decides. If 64
            episodes of an environment were lost and one of them earned half as much, a warning asks
            whether that was meant.
        success_by: whether that is the ``"last"`` reward, or the ``"return"``, the sum of the
            rewards (up to 1e-6). Default: as the id says, ``"return"`` for GEM's that pay progress
            turn by turn (:data:`~torchrl_llm.envs.GEM_CLASSES`); ``"last"`` for a factory.
        on_done: what a partial reset does to a finished slot: ``"refill"`` (default) starts the
            next task; ``"idle"`` leaves it empty (``prompt_length`` 0, reward 0, no environment
            call) until a reset of the whole environment.
        stream, seed, worker, num_workers: see :class:`~torchrl_llm.envs.TaskSampler`.
        divide: divide the rows of GEM's data-backed environments among the streams
            (:func:`~torchrl_llm.envs.divide_rows`): eight tenths are for training, one for each
            other stream. Default ``None``: as the id says (GEM's are divided, but for ids of
            ``eval:``, which are held out as they are); not those that a factory was given.
        device: device of the tensors; default CPU.

    Raises:
        UnknownEnvironmentError: no environment has this id.
        EnvironmentFault: more than ``max_faults`` episodes in a row failed; a
            :class:`~torchrl_llm.envs.PromptTooLongError` if the first one's prompt was too long.
        EnvironmentUnavailableError: at a reset, an environment lacks a package or data; the message
            says which.

    Attributes:
        slots: runs the episodes.
        lockstep: runs all slots at once. What follows here is of these two, and the environment's
            too.
        mixture: the :class:`~torchrl_llm.envs.EnvSpec` of each environment.
        names: of the environments.
        extras: name -> ``float`` or ``str`` of the extras that its environments declare
            (:mod:`~torchrl_llm.envs.columns`).
        formatter: the :class:`~torchrl_llm.envs.ChatFormatter`.
        task_sampler: which task each index is; it may be replaced.
        num_sampled: tasks sampled so far.
        group_size: episodes that share a task.
        success_reward: the reward from which on an episode that terminates is a success.
        faults: failed episodes so far, by "error", "timeout" and "context".
        last_fault: the last of them; ``None``: none failed.
        new_faults: those of the last reset or step.

    Examples:
        >>> from torchrl_llm.testing.policies import ScriptedPolicy
        >>> from torchrl_llm.testing.tokenizers import byte_tokenizer
        >>> tokenizer = byte_tokenizer()
        >>> env = GEMEnv("game:GuessTheNumber-v0-easy", tokenizer=tokenizer, num_envs=2, max_model_len=2048)
        >>> policy = ScriptedPolicy(lambda episode, turn, context: r"\\boxed{5}", tokenizer=tokenizer, max_output_tokens=64)
        >>> rollout = env.rollout(2, policy)
        >>> rollout["next", "reward"].shape
        torch.Size([2, 2, 1])
    """

    batch_locked = True
    machine: ClassVar[type[SlotMachine]] = SlotMachine
    """What :attr:`slots` is made of."""
    slots: SlotMachine
    lockstep: Lockstep

    mixture = Delegated[tuple[EnvSpec, ...]]("slots.mixture")
    names = Delegated[tuple[str, ...]]("slots.names")
    formatter = Delegated[ChatFormatter]("slots.window.formatter")
    task_sampler = Delegated[TaskSampler]("slots.task_sampler")
    num_sampled = Delegated[int]("slots.num_sampled")
    num_threads = Delegated[int]("lockstep.num_threads")
    step_timeout = Delegated[float | None]("lockstep.step_timeout")
    max_model_len = Delegated[int]("slots.window.max_model_len")
    max_output_tokens = Delegated[int]("slots.window.max_output_tokens")
    max_turns = Delegated[int | None]("slots.max_turns")
    max_faults = Delegated[int]("lockstep.faults.max_faults")
    context_rule = Delegated[ContextRule | None]("slots.window.context_rule")
    overflow = Delegated[Overflow]("slots.window.overflow")
    group_size = Delegated[int]("slots.group_size")
    success_reward = Delegated[float]("slots.success.threshold")
    faults = Delegated[Counter[str]]("lockstep.faults.counts")
    last_fault = Delegated[EnvironmentFault | None]("lockstep.last_fault")
    new_faults = Delegated[Sequence[EnvironmentFault]]("lockstep.new_faults")

    def __init__(
        self,
        env: EnvSource | Sequence[EnvSource],
        *,
        tokenizer: PreTrainedTokenizerBase,
        num_envs: Count = 1,
        max_model_len: Count = 1024,
        max_output_tokens: Count = 64,
        max_turns: Count | None = None,
        context_rule: ContextRule | None = None,
        overflow: Overflow = "truncate",
        group_size: Count = 1,
        weights: Sequence[float] | None = None,
        max_faults: Natural = 16,
        num_threads: Natural | None = None,
        step_timeout: Positive | None = None,
        system_prompt: str | None = None,
        template: Template = "chat",
        contexts: Contexts = "template",
        chat_template_kwargs: dict[str, Any] | None = None,
        missing_thinking: MissingThinking = "refuse",
        template_date: str | None = None,
        tools: Sequence[Tool] | None = None,
        success_reward: float = 1.0,
        success_by: SuccessBy | None = None,
        on_done: OnDone = "refill",
        stream: Stream = "train",
        seed: int = 0,
        worker: int = 0,
        num_workers: int = 1,
        divide: bool | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(device=device or "cpu", batch_size=(num_envs,))
        if hasattr(env, "step") and not callable(env):
            raise TypeError(
                f"GEMEnv got an environment, a {type(env).__name__}; expected its class or another function that makes one: "
                "every slot has one of its own."
            )
        sources: Sequence[Any] = [env] if isinstance(env, str | EnvSpec) or callable(env) else env
        specs = [
            replace(spec, divide=spec.divide if divide is None else divide, success_by=success_by or spec.success_by)
            for spec in map(resolve_env, sources)
        ]
        self._check_sizes(specs, num_envs, group_size, max_model_len, max_output_tokens)
        formatter = ChatFormatter(
            tokenizer,
            template=template,
            contexts=contexts,
            system_prompt=system_prompt,
            chat_template_kwargs=chat_template_kwargs,
            missing_thinking=missing_thinking,
            template_date=template_date,
            tools=_declared_tools(specs) if tools is None else tools,
        )
        task_sampler = TaskSampler(
            seed=seed,
            stream=stream,
            group_size=group_size,
            mixture_size=len(specs),
            worker=worker,
            num_workers=num_workers,
            weights=None if weights is None else tuple(weights),
        )
        if num_threads is None:
            num_threads = 0 if step_timeout is None else min(num_envs, MAX_THREADS)
        elif num_threads == 0 and step_timeout is not None:
            raise ValueError(
                "GEMEnv: num_threads is 0; expected >= 1 with a step_timeout: a call in the caller's own thread cannot be "
                "left."
            )
        window = ContextWindow(
            formatter=formatter,
            max_model_len=max_model_len,
            max_output_tokens=max_output_tokens,
            context_rule=context_rule,
            overflow=overflow,
        )
        self.slots = self.machine(
            mixture=tuple(specs),
            window=window,
            task_sampler=task_sampler,
            num_slots=num_envs,
            max_turns=max_turns,
            success=SuccessRule(specs, success_reward),
        )
        faults = FaultCounter(max_faults, "in a row")
        self.lockstep = Lockstep(slots=self.slots, num_threads=num_threads, step_timeout=step_timeout, faults=faults)
        self.on_done = on_done
        set_specs(self, vocab_size=len(tokenizer))

    @staticmethod
    def _check_sizes(
        specs: list[EnvSpec], num_envs: int, group_size: int, max_model_len: int, max_output_tokens: int
    ) -> None:
        if not specs:
            raise ValueError("GEMEnv: env is []; expected at least one environment.")
        if num_envs % group_size:
            raise ValueError(f"GEMEnv: num_envs is {num_envs!r}; expected a multiple of {group_size=}.")
        if max_model_len <= max_output_tokens:
            raise ValueError(f"GEMEnv: max_model_len is {max_model_len!r}; expected more than {max_output_tokens=}.")

    def __repr__(self) -> str:
        names = "group_size", "max_model_len", "max_output_tokens", "max_turns", "on_done"
        shown = {"num_envs": len(self.slots), "stream": self.task_sampler.stream, "seed": self.task_sampler.seed}
        shown |= {name: getattr(self, name) for name in names}
        settings = ", ".join(f"{name}={value!r}" for name, value in shown.items())
        running = sum(slot.live for slot in self.slots)
        mixture = ", ".join(dict.fromkeys(self.names))
        return (
            f"{type(self).__name__}({mixture}; {settings}; {self.num_sampled} tasks sampled, {running} slots running)"
        )

    @property
    def single_turn(self) -> tuple[bool | None, ...]:
        """Of each environment of the mixture, whether its episodes end with their first response;
        ``None``: not known."""
        return tuple(True if self.max_turns == 1 else spec.single_turn for spec in self.mixture)

    @property
    def extras(self) -> ExtraKinds:
        return {column.name[-1]: column.kind for column in self.slots.columns}

    def rollout(self, max_steps: int, policy: Any = None, *args: Any, **kwargs: Any) -> TensorDictBase:
        """TorchRL's rollout; the policy's stop ids end responses here too."""
        if isinstance(policy, HasStopIds):  # TorchRL takes any function, and None
            share_stop_ids(self, policy)
        return super().rollout(max_steps, policy, *args, **kwargs)

    def set_curriculum(
        self, *, weights: Sequence[float] | None = None, options: Sequence[Mapping[str, Any]] | None = None
    ) -> None:
        """Change what is sampled, from the next group on; episodes that run keep their tasks.

        Use the method of the same name of a collector that collects in the background. What is set
        is part of the saved state, with the group at which it begins: the first that was not
        sampled when this was called.

        Args:
            weights: how often each environment of the mixture is sampled, relative to each other;
                >= 0, not all 0. Default: as they were.
            options: of each environment, keyword arguments that it is made with from now on:
                numbers, texts, lists and mappings, as JSON has them. Default: as they were. An
                environment is made, and closed, for each entry that changed.

        Raises:
            ConfigError: there is not one of them for each environment, weights are negative or all
                0, or an environment cannot be made with its options.

        Examples:
            >>> from torchrl_llm.testing.tokenizers import byte_tokenizer
            >>> from torchrl_llm.testing.worlds import Coins
            >>> env = GEMEnv(Coins, tokenizer=byte_tokenizer())
            >>> env.set_curriculum(options=[{"moves": 7}])
            >>> _ = env.reset()
            >>> env.slots[0].envs[0].message[-7:]
            'moves 7'
        """
        plain = None if options is None else [self._plain(*each) for each in enumerate(options)]
        task_sampler = self.task_sampler.with_stage(self.num_sampled, weights=weights, options=plain)
        if plain is not None:
            before = self.task_sampler.last_stage.options or ({},) * len(plain)
            for env_id, (each, old) in enumerate(zip(plain, before, strict=True)):
                if each != old:
                    self._check_options(env_id, each)
        self.task_sampler = task_sampler

    @staticmethod
    def _plain(env_id: int, options: Mapping[str, Any]) -> dict[str, Any]:
        """Options as a checkpoint returns them, so that an environment is made alike before and
        after it."""
        try:
            return dict(json.loads(json.dumps(dict(options))))
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"The options of environment {env_id} are {options!r:.200}; expected a mapping of plain data ({error})."
            ) from error

    def _check_options(self, env_id: int, options: Mapping[str, Any]) -> None:
        try:
            env = self.slots.new_env(env_id, tuple(options.items())).make()
        except Exception as error:
            raise ConfigError(
                f"The environment {self.names[env_id]!r} cannot be made with the options {dict(options)!r:.200}: "
                f"{type(error).__name__}: {error}"
            ) from error
        if hasattr(env, "close"):  # it was made to see whether it can be
            env.close()

    # ---------------------------------------- TorchRL's private methods

    def _set_seed(self, seed: int | None) -> None:
        if seed is not None:
            self.lockstep.set_seed(seed)

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        self.new_faults = ()
        chosen = chosen_slots(tensordict, "_reset", len(self.slots))
        partial_reset = tensordict is not None and tensordict.get("_reset", None) is not None
        if partial_reset and self.on_done == "idle":
            for i in chosen:
                self.slots.empty(i)
        else:
            self.lockstep.begin(dict.fromkeys(chosen))
        never = torch.zeros(len(self.slots), 1, dtype=torch.bool)
        done = {keys.DONE: never, keys.TERMINATED: never.clone(), keys.TRUNCATED: never.clone()}
        return self._tensordict(observation_of(self.slots) | done)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.new_faults = ()
        slots, chosen = self.slots, chosen_slots(tensordict, "_step", len(self.slots))
        over = [i for i in chosen if slots[i].finished]
        if over:
            raise RuntimeError(
                f"The slots {over} were stepped after their episodes had ended. Reset them first (step_and_maybe_reset does), "
                'or leave them out with the partial-step mask "_step".'
            )
        responses = responses_of(tensordict)
        live = {i: responses[i] for i in chosen if slots[i].live}
        self.lockstep.step(live)
        reward = torch.zeros(len(slots), 1)
        reward.numpy()[[*live], 0] = [slots[i].steps[-1].reward for i in live]
        return self._tensordict(observation_of(slots) | done_of(slots) | {keys.REWARD: reward})

    def _tensordict(self, values: dict[Any, Tensor]) -> TensorDict:
        return TensorDict(values, batch_size=self.batch_size, device=self.device)

    # ---------------------------------------- state

    def state_dict(self, *args: Any, **kwargs: Any) -> OrderedDict:
        """What :meth:`load_state_dict` needs: the counters, and each slot as its task and its
        responses so far."""
        return self.lockstep.state_dict()

    def load_state_dict(self, state_dict: OrderedDict, *args: Any, **kwargs: Any) -> None:
        """Continue where :meth:`state_dict` was taken: running episodes are replayed;
        :meth:`observe` returns them.

        Finished slots come back finished, without their contexts. An empty state (TorchRL's own
        collectors save none) changes nothing and is logged.

        Raises:
            ValueError: the state is of an environment with other groups, mixture, stream, workers
                or number of slots.
        """
        self.lockstep.load_state_dict(state_dict)

    def observe(self) -> TensorDict:
        """The current observation of all slots, as a policy reads it (batch ``[N]``)."""
        return self._tensordict(observation_of(self.slots) | done_of(self.slots))

    def close(self, *, raise_if_closed: bool = True) -> None:
        """End the threads; those of environments that hang are left behind."""
        self.lockstep.close()
        super().close(raise_if_closed=raise_if_closed)
