"""Text environments as TorchRL environments: :class:`GEMEnv`, N of them as one ``EnvBase``.

Here lives the step from text worlds to TensorDicts: who plays which ticket, why an episode ended, and constant-width
tensors. Games and their random numbers live in :mod:`~torchrl_llm.envs.game`, templates in
:mod:`~torchrl_llm.envs.chat`, tickets in :mod:`~torchrl_llm.envs.tickets`; policies and credit are elsewhere.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import chain, islice
from typing import Any, Literal, NamedTuple, cast, get_args

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import Binary, Bounded, Categorical, Composite, Unbounded
from torchrl.envs import EnvBase
from transformers import PreTrainedTokenizerBase

from torchrl_llm import keys
from torchrl_llm.envs._pool import MAX_THREADS, Call, Pool
from torchrl_llm.envs.chat import ChatFormatter, History, Template
from torchrl_llm.envs.game import (
    EnvironmentFault,
    EnvironmentUnavailableError,
    Game,
    TextEnv,
    TextStep,
    kept_global_rng,
    pays_progress,
    resolve_env,
    revoke_global_rng,
)
from torchrl_llm.envs.tasks import Task
from torchrl_llm.envs.tickets import Stream, Ticket, Tickets
from torchrl_llm.keys import StopReason
from torchrl_llm.stops import share_stop_ids

logger = logging.getLogger(__name__)

OnDone = Literal["refill", "idle"]
Overflow = Literal["truncate", "slide"]
SuccessBy = Literal["last", "return"]

_NO_TICKET = Ticket(-1, -1, 0, 0)
_NO_TASK = Task(-1, known=False)
TERMINATED = (StopReason.WON, StopReason.LOST, StopReason.TURN_LIMIT)
FAILED = (StopReason.ERROR, StopReason.TIMEOUT)
_PATIENCE = 1.0  # seconds that threads may take to end
_LOST = 64  # episodes without a success after which it is asked what counts as one


class PromptTooLongError(EnvironmentFault):
    """The first context of an episode leaves no room for a response."""

    @property
    def stop_reason(self) -> StopReason:
        """``CONTEXT``."""
        return StopReason.CONTEXT


class Reply(NamedTuple):
    """What an environment's answer comes to.

    Attributes:
        ids: what it adds to the context: of a start, the whole first context; of a turn, the response and the feedback.
        reward: of the turn; 0.0 at a start.
        stop_reason: of the episode after it.
        dropped: the oldest turns that leave the context, to make room; 0: the context grows.
        task: of a start, what is played.
        said: whether the environment itself said if the episode is a success.
    """

    ids: Sequence[int]
    reward: float = 0.0
    stop_reason: StopReason = StopReason.RUNNING
    dropped: int = 0
    task: Task = _NO_TASK
    said: bool = False


@dataclass
class Slot:
    """One row of the batch, for reading.

    Attributes:
        games: its games, by index into the mixture, each with its own random state.
        index: the place of its ticket among the tickets; ``None``: the slot idles.
        ticket: the ticket being played.
        task_id: of the task that it names (:class:`~torchrl_llm.envs.tasks.Task`).
        turn: turns played.
        total: sum of the rewards.
        length: tokens of the context.
        segment: how often the context was made anew.
        pieces: what the context is made of: the first prompt, then each turn's response and feedback, without dropped ones.
        stop_reason: why the episode ended, or that it runs.
        responses: the ids of the responses so far.
    """

    games: dict[int, Game] = field(default_factory=dict)
    index: int | None = None
    ticket: Ticket = _NO_TICKET
    task_id: int = -1
    turn: int = 0
    total: float = 0.0
    length: int = 0
    segment: int = 0
    pieces: list[Sequence[int]] = field(default_factory=list)
    stop_reason: StopReason = StopReason.RUNNING
    responses: list[list[int]] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        return self.stop_reason != StopReason.RUNNING

    @property
    def live(self) -> bool:
        return self.index is not None and not self.finished


_Planned = tuple[Ticket, int, Callable[[], Reply]]
"""What a slot's call is for: its ticket, the turn (-1: the reset), and the call."""


def _outcome(function: Callable[[], Reply]) -> Reply | EnvironmentFault:
    try:
        return function()
    except EnvironmentFault as fault:
        return fault


class GEMEnv(EnvBase):
    """N text environments as one TorchRL environment of batch size ``[N]``; a turn is a step.

    Observations (:mod:`torchrl_llm.keys`): the whole context so far ``("tokens", "prompt")`` ``[N, max_model_len]``
    int64, right-padded with 0, and its length, ``"turn"``, ``"episode_id"``, ``"group_id"``, ``"env_id"``, ``"task_id"``,
    ``"success"`` and ``"stop_reason"``, all ``[N, 1]``. Action: ``("tokens", "response")`` ``[N, max_output_tokens]``
    int64 and ``("tokens", "response_mask")`` bool. The last observation of an episode holds its last response and,
    as far as it fits, the environment's last words.

    Each slot plays tickets (:class:`~torchrl_llm.envs.tickets.Tickets`): the same seed gives the same games, whatever else
    draws random numbers and however many slots there are. Environments see the global generators of ``random`` and
    ``numpy.random`` seeded by their ticket, and leave them untouched for everyone else. A partial-step mask ``"_step"``
    ``[N]`` is honoured: slots outside it keep their state. :attr:`slots` and the methods :meth:`draw`, :meth:`open`,
    :meth:`start`, :meth:`answer` and :meth:`advance` play single slots, for collectors without a barrier between turns.

    An episode ends as ``terminated`` when its environment says so (also at its own turn limit), and as ``truncated`` by
    our budgets: ``max_turns``, or when the next response would not fit into ``max_model_len``. With ``overflow="slide"`` the
    oldest turns leave the context instead, all but the first prompt and as much as fills half of the room behind it; the
    ids of what stays do not change. What follows is a new segment of the episode, counted in the observation ``"segment"``
    ``[N, 1]``, and trained on as the policy saw it (:mod:`torchrl_llm.segments`). The episode is truncated only where the
    last turn alone does not fit.

    An environment that raises (also ``SystemExit``) or returns something malformed ends its own episode: truncated, reward
    0, no feedback, ``StopReason.ERROR`` (``TIMEOUT`` if it raised ``TimeoutError``). It is logged, counted in
    :attr:`faults`, and replaced by a new one. One that fails at its reset, or whose first prompt leaves no room for a
    response (counted as "context"), has no episode: its slot gets the next ticket.
    A child process that an environment forks ends when it comes back out of the call. With ``step_timeout`` environments
    are called in threads, and one that takes longer is left behind: its episode ends with ``StopReason.TIMEOUT``. Without,
    an environment that hangs holds up the others.

    Args:
        env: a GEM id, a factory of any object with ``reset`` and ``step`` (:class:`TextEnv`), or a list of these: a mixture,
            dealt in turn, or by ``weights``.
        tokenizer: the tokenizer of the policy's model.
        num_envs: slots N; default 1. A multiple of ``group_size``.
        max_model_len: width of the context in tokens; default 1024.
        max_output_tokens: width of a response in tokens; default 64.
        max_turns: our turn budget; default none.
        overflow: ``"truncate"`` (default) or ``"slide"``: what happens when the context is full.
        group_size: episodes that share a task; default 1.
        weights: how often each environment of a mixture is dealt, see :class:`~torchrl_llm.envs.tickets.Tickets`; default
            none, in turn.
        max_faults: failed episodes tolerated in a row, with none between them that ended well; one more raises the first
            of them. In an evaluation also how many may fail at all. Default 16, so that one bad task does not end a long
            run, and a broken environment does. 0 raises at once.
        num_threads: threads that call environments, so that slow ones answer side by side (those that declare
            ``thread_safe = True``, see :class:`TextEnv`; others one at a time). Default: none (0), which is the fastest for
            environments that answer in microseconds; with ``step_timeout`` one a slot, 32 at most.
        step_timeout: seconds that one reset or step may take; waiting for other environments does not count. Default
            none. It needs threads. :class:`~torchrl_llm.collectors.AsyncTurnCollector` has threads and a limit of its own.
        system_prompt, template, history, chat_template_kwargs: see :class:`~torchrl_llm.envs.chat.ChatFormatter`.
        success_reward: an episode is a success if it terminates with at least this; default 1.0. Where the environment says
            ``info["success"]`` as it terminates, that decides. If 64 episodes of an environment were lost and one of them
            earned half as much, a warning asks whether that was meant.
        success_by: whether that is the ``"last"`` reward, or the ``"return"``, the sum of the rewards (up to 1e-6). Default:
            ``"return"`` for the GEM ids that pay progress turn by turn (:data:`~torchrl_llm.envs.PAYS_PROGRESS`),
            ``"last"`` for everything else.
        on_done: what a partial reset does to a finished slot: ``"refill"`` (default) deals the next ticket; ``"idle"``
            leaves it empty (``prompt_length`` 0, reward 0, no environment call) until a reset of the whole environment.
        stream, seed, worker, num_workers: see :class:`~torchrl_llm.envs.tickets.Tickets`.
        divide: divide the rows of GEM's data-backed environments among the streams (:func:`~torchrl_llm.envs.divide_rows`):
            eight tenths are for training, one for each other stream. Default ``None``: those of a GEM id, but for ids of
            ``eval:``, which are held out as they are; not those that a factory was given.
        device: device of the tensors; default CPU.

    Raises:
        UnknownEnvironmentError: no GEM environment has this id.
        EnvironmentFault: more than ``max_faults`` episodes in a row failed; a :class:`PromptTooLongError` if the first one's
            prompt was too long.
        EnvironmentUnavailableError: at a reset, a GEM environment lacks a package or data; the message says which.

    Attributes:
        faults: failed episodes, by "error", "timeout" and "context".
        last_fault: the last of them; ``None``: none failed.

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

    def __init__(
        self,
        env: str | Callable[[], TextEnv] | Sequence[str | Callable[[], TextEnv]],
        *,
        tokenizer: PreTrainedTokenizerBase,
        num_envs: int = 1,
        max_model_len: int = 1024,
        max_output_tokens: int = 64,
        max_turns: int | None = None,
        overflow: Overflow = "truncate",
        group_size: int = 1,
        weights: Sequence[float] | None = None,
        max_faults: int = 16,
        num_threads: int | None = None,
        step_timeout: float | None = None,
        system_prompt: str | None = None,
        template: Template = "chat",
        history: History = "refuse",
        chat_template_kwargs: dict[str, Any] | None = None,
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
                "every slot plays one of its own."
            )
        envs = [env] if isinstance(env, str) or callable(env) else list(env)
        self._check_sizes(envs, num_envs, group_size, max_model_len, max_output_tokens, max_turns, on_done)
        if max_faults < 0:
            raise ValueError(f"GEMEnv: max_faults is {max_faults!r}; expected >= 0.")
        if overflow not in get_args(Overflow):
            raise ValueError(f"GEMEnv: overflow is {overflow!r}; expected one of {get_args(Overflow)}.")
        if success_by not in (None, *get_args(SuccessBy)):
            raise ValueError(f"GEMEnv: success_by is {success_by!r}; expected None or one of {get_args(SuccessBy)}.")
        self.names, self._factories = zip(*map(resolve_env, envs), strict=True)
        self.formatter = ChatFormatter(
            tokenizer,
            template=template,
            history=history,
            system_prompt=system_prompt,
            chat_template_kwargs=chat_template_kwargs,
        )
        self.tickets = Tickets(
            seed=seed,
            stream=stream,
            group_size=group_size,
            num_tasks=len(envs),
            worker=worker,
            num_workers=num_workers,
            weights=None if weights is None else tuple(weights),
        )
        self._first_seed = seed
        self.num_dealt = 0
        self._slots = [Slot() for _ in range(num_envs)]
        self._firsts: tuple[Any, list[int]] = None, []
        self.num_threads, self.step_timeout = self._threads(num_threads, step_timeout), step_timeout
        self._pool: Pool | None = None
        self.max_faults = max_faults
        self.faults: Counter[str] = Counter()
        self.last_fault: EnvironmentFault | None = None
        self._faults_in_a_row: list[EnvironmentFault] = []
        self.max_model_len, self.max_output_tokens, self.max_turns = max_model_len, max_output_tokens, max_turns
        self.success_reward, self.on_done, self.overflow = success_reward, on_done, overflow
        divided = [isinstance(env, str) and not env.startswith("eval:") if divide is None else divide for env in envs]
        self._rows = [stream if divides else None for divides in divided]
        self._lost = dict.fromkeys(range(len(envs)), (0, 0.0))  # of those that nobody has won yet
        self._sums = [pays_progress(env) if success_by is None else success_by == "return" for env in envs]
        self._prompt = torch.zeros(num_envs, max_model_len, dtype=torch.int64)
        self._make_specs(len(tokenizer))

    @staticmethod
    def _check_sizes(
        envs: list[Any],
        num_envs: int,
        group_size: int,
        max_model_len: int,
        max_output_tokens: int,
        max_turns: int | None,
        on_done: str,
    ) -> None:
        checks = {
            "env": (len(envs) > 0, envs, "at least one environment"),
            "num_envs": (num_envs >= 1 and num_envs % group_size == 0, num_envs, f"a multiple of {group_size=}"),
            "max_output_tokens": (max_output_tokens >= 1, max_output_tokens, ">= 1"),
            "max_model_len": (max_model_len > max_output_tokens, max_model_len, f"more than {max_output_tokens=}"),
            "max_turns": (max_turns is None or max_turns >= 1, max_turns, "None or >= 1"),
            "on_done": (on_done in get_args(OnDone), on_done, f"one of {get_args(OnDone)}"),
        }
        for name, (holds, given, expected) in checks.items():
            if not holds:
                raise ValueError(f"GEMEnv: {name} is {given!r}; expected {expected}.")

    def _threads(self, num_threads: int | None, step_timeout: float | None) -> int:
        if step_timeout is not None and step_timeout <= 0:
            raise ValueError(f"GEMEnv: step_timeout is {step_timeout!r}; expected seconds > 0, or None.")
        if num_threads is None:
            return 0 if step_timeout is None else min(len(self._slots), MAX_THREADS)
        if num_threads < (step_timeout is not None):
            raise ValueError(
                f"GEMEnv: num_threads is {num_threads!r}; expected >= 0, and >= 1 with a step_timeout: a call in the "
                "caller's own thread cannot be left."
            )
        return num_threads

    def _make_specs(self, vocab_size: int) -> None:
        n = self.batch_size[0]
        size = {"shape": (n, 1), "dtype": torch.int64}
        self.observation_spec = Composite(
            {
                "tokens": Composite(
                    prompt=Unbounded(shape=(n, self.max_model_len), dtype=torch.int64),
                    prompt_length=Bounded(low=0, high=self.max_model_len, **size),
                    shape=(n,),
                ),
                keys.TURN: Unbounded(**size),
                keys.EPISODE_ID: Unbounded(**size),
                keys.GROUP_ID: Unbounded(**size),
                keys.ENV_ID: Bounded(low=0, high=len(self.names), **size),
                keys.TASK_ID: Unbounded(**size),
                keys.SUCCESS: Binary(1, shape=(n, 1), dtype=torch.bool),
                keys.STOP_REASON: Bounded(low=0, high=max(StopReason), **size),
            },
            shape=(n,),
            device=self.device,
        )
        if self.overflow == "slide":
            self.observation_spec[keys.SEGMENT] = Unbounded(**size)
        width = (n, self.max_output_tokens)
        self.action_spec = Composite(
            tokens=Composite(
                response=Categorical(vocab_size, shape=width, dtype=torch.int64),
                response_mask=Binary(self.max_output_tokens, shape=width, dtype=torch.bool),
                shape=(n,),
            ),
            shape=(n,),
            device=self.device,
        )
        self.reward_spec = Unbounded(shape=(n, 1), dtype=torch.float32, device=self.device)
        done = {
            name: Binary(1, shape=(n, 1), dtype=torch.bool) for name in (keys.DONE, keys.TERMINATED, keys.TRUNCATED)
        }
        self.full_done_spec = Composite(done, shape=(n,), device=self.device)

    def __repr__(self) -> str:
        shown = {
            "num_envs": len(self._slots), "group_size": self.group_size, "stream": self.tickets.stream,
            "seed": self.tickets.seed, "max_model_len": self.max_model_len, "max_output_tokens": self.max_output_tokens,
            "max_turns": self.max_turns, "on_done": self.on_done,
        }  # fmt: skip
        played = ", ".join(dict.fromkeys(self.names))
        settings = ", ".join(f"{name}={value!r}" for name, value in shown.items())
        live = sum(slot.live for slot in self._slots)
        return f"{type(self).__name__}({played}; {settings}; {self.num_dealt} tickets dealt, {live} slots playing)"

    @property
    def group_size(self) -> int:
        """Episodes that share a task."""
        return self.tickets.group_size

    def rollout(self, max_steps: int, policy: Any = None, *args: Any, **kwargs: Any) -> TensorDictBase:
        """As TorchRL's, of a policy whose stop ids end responses here too."""
        share_stop_ids(self, policy)
        return super().rollout(max_steps, policy, *args, **kwargs)

    # ------------------------------------------------------------------ TorchRL's private methods

    def _set_seed(self, seed: int | None) -> None:
        """Name the tasks by ``seed`` and deal them from the first again; running episodes go on.

        With another seed than the one that the environment was made with, ids are named by the seed too: TorchRL gives each
        worker of a ``SerialEnv`` or ``ParallelEnv`` its own.
        """
        if seed is not None:
            self.tickets = replace(self.tickets, seed=seed, ids_by_seed=seed != self._first_seed)
            self.num_dealt = 0

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        mask = tensordict.get("_reset", None) if tensordict is not None else None
        chosen = list(range(len(self._slots))) if mask is None else mask.flatten().nonzero().flatten().tolist()
        if mask is not None and self.on_done == "idle":
            for i in chosen:
                self._slots[i] = Slot(self._slots[i].games)
        else:
            self._begin(dict.fromkeys(chosen))
        never = torch.zeros(len(self._slots), 1, dtype=torch.bool)
        done = {keys.DONE: never, keys.TERMINATED: never.clone(), keys.TRUNCATED: never.clone()}
        return self._tensordict(self._observation() | done)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        chosen = tensordict.get("_step", None)
        stepped = [True] * len(self._slots) if chosen is None else chosen.flatten().tolist()
        over = [i for i, slot in enumerate(self._slots) if stepped[i] and slot.finished]
        if over:
            raise RuntimeError(
                f"The slots {over} were stepped after their episodes had ended. Reset them first (step_and_maybe_reset does), "
                'or leave them out with the partial-step mask "_step".'
            )
        active = [i for i, slot in enumerate(self._slots) if stepped[i] and slot.live]
        responses = self._responses(tensordict)
        slots = self._slots
        calls = {i: (slots[i].ticket, slots[i].turn, partial(self.answer, i, responses[i])) for i in active}
        rewards = torch.zeros(len(slots), 1)
        for i, reply in self._call(calls).items():
            if isinstance(reply, EnvironmentFault):
                reply = Reply(responses[i], stop_reason=self._contain(i, reply))
            elif reply.stop_reason != StopReason.RUNNING:
                self._faults_in_a_row.clear()
            self.advance(i, responses[i], reply)
            rewards[i, 0] = reply.reward
        return self._tensordict(self._observation() | self._done() | {keys.REWARD: rewards})

    # ------------------------------------------------------------------ single slots

    @property
    def slots(self) -> Sequence[Slot]:
        """What each slot plays. The methods below play slots one by one; they need no TensorDict."""
        return self._slots

    def context(self, slot: int) -> npt.NDArray[np.int64]:
        """The ids of a slot's context, ``[slots[slot].length]``: a view, valid until the slot is played on."""
        return self._prompt.numpy()[slot, : self._slots[slot].length]

    def draw(self) -> int:
        """Deal the next ticket: its index among :attr:`tickets`."""
        self.num_dealt += 1
        return self.num_dealt - 1

    def open(self, slot: int, index: int) -> Reply:
        """Reset a slot's game for the ticket ``index``; nothing but the game changes until :meth:`start`.

        Different slots may be opened and answered in different threads at once.

        Raises:
            EnvironmentFault: the environment raised or returned something malformed.
            EnvironmentUnavailableError: it is of GEM and cannot be made.
            PromptTooLongError: the first context leaves no room for a response.
        """
        ticket, games = self.tickets[index], self._slots[slot].games
        name = self.names[ticket.env_id]
        try:
            if ticket.env_id not in games:
                games[ticket.env_id] = Game(self._factories[ticket.env_id], name, rows=self._rows[ticket.env_id])
            context = self.formatter.start(games[ticket.env_id].reset(ticket.seed))
            task = games[ticket.env_id].task or _NO_TASK
        except EnvironmentUnavailableError:
            raise
        except (Exception, SystemExit) as error:
            raise EnvironmentFault(name, ticket, -1, error) from error
        if len(context) + self.max_output_tokens > self.max_model_len:
            cause = ValueError(
                f"the first prompt has {len(context)} tokens; with a response of max_output_tokens={self.max_output_tokens} it "
                f"does not fit into max_model_len={self.max_model_len}. Raise max_model_len, lower max_output_tokens, or "
                "shorten the system prompt"
            )
            raise PromptTooLongError(name, ticket, -1, cause)
        return Reply(context, task=task)

    def start(self, slot: int, index: int, reply: Reply) -> None:
        """Let a slot play the ticket ``index`` from what :meth:`open` returned."""
        games = self._slots[slot].games
        self._slots[slot] = Slot(games, index=index, ticket=self.tickets[index], task_id=reply.task.task_id)
        self._slots[slot].pieces.append(reply.ids)
        self._prompt[slot] = 0
        self._append(slot, reply.ids)

    def answer(self, slot: int, response: list[int]) -> Reply:
        """Play a response in a slot's game; nothing but the game changes until :meth:`advance`.

        Different slots may be opened and answered in different threads at once.

        Raises:
            EnvironmentFault: the environment raised or returned something malformed.
        """
        playing = self._slots[slot]
        ticket = playing.ticket
        try:
            step = playing.games[ticket.env_id].step(self.formatter.decode(response))
            ids = [*response, *self.formatter.feedback(response, step.message, role=step.role)]
        except (Exception, SystemExit) as error:
            raise EnvironmentFault(self.names[ticket.env_id], ticket, playing.turn, error) from error
        reason = self._stop_reason(playing, step, playing.length + len(ids))
        if reason == StopReason.CONTEXT and self.overflow == "slide" and (dropped := self._excess(playing, len(ids))):
            return Reply(ids, step.reward, dropped=dropped)
        return Reply(ids, step.reward, reason, said=step.success is not None)

    def advance(self, slot: int, response: list[int], reply: Reply) -> None:
        """Take a slot on to what :meth:`answer` returned; an episode's last words are cut at ``max_model_len``."""
        playing = self._slots[slot]
        playing.responses.append(response)
        playing.turn += 1
        playing.total += reply.reward
        playing.stop_reason = reply.stop_reason
        playing.pieces.append(reply.ids)
        if reply.stop_reason in TERMINATED:
            self._ask_what_counts(playing, reply)
        if reply.dropped:
            del playing.pieces[1 : 1 + reply.dropped]
            playing.segment += 1
            playing.length = 0
            self._prompt[slot] = 0
            self._append(slot, [*chain.from_iterable(playing.pieces)])
        else:
            self._append(slot, reply.ids[: self.max_model_len - playing.length])

    def first_of_each_task(self, count: int) -> list[int]:
        """Of the next ``count`` tickets, counted from 0, those that no earlier one shares a known task with.

        Resets the games of all slots, so no episode may be running. A ticket counts where its environment fails, or does not
        say what is hidden (:class:`~torchrl_llm.envs.Task`). The answer is remembered: evaluations ask for the same tickets
        again and again, and each would reset ``count`` games for it.
        """
        question = (self.tickets, self.tickets.shares, count)  # the shares are no part of what makes tickets equal
        if self._firsts[0] != question:
            self._firsts = question, self._find_firsts(count)
        return [*self._firsts[1]]

    def _find_firsts(self, count: int) -> list[int]:
        seen: dict[Any, int] = {}
        slots = len(self._slots)
        for first in range(0, count, slots):
            tickets = {slot: self.tickets[first + slot] for slot in range(min(slots, count - first))}
            calls = {i: (ticket, -1, partial(self.open, i, first + i)) for i, ticket in tickets.items()}
            for slot, reply in self._call(calls).items():
                task = _NO_TASK if isinstance(reply, EnvironmentFault) else reply.task
                if isinstance(reply, EnvironmentFault):
                    self._slots[slot].games.pop(reply.ticket.env_id, None)
                seen.setdefault(task.task_id if task.known else ("group", tickets[slot].group_id), first + slot)
        return sorted(seen.values())

    def busy_since(self, slot: int) -> float | None:
        """``time.monotonic()`` when the slot's running call reached the environment; ``None``: no call is there."""
        times = [game.busy_since for game in list(self._slots[slot].games.values())]
        return next((since for since in times if since is not None), None)

    def renew(self, slot: int) -> None:
        """Leave a slot's games to whoever still calls them: it idles, and plays with new ones from the next ticket on."""
        self._slots[slot] = Slot()
        self._prompt[slot] = 0

    def _begin(self, indices: Mapping[int, int | None]) -> None:
        """Start the tickets ``indices`` (slot -> index of its ticket; ``None``: the next one that can be started)."""
        waiting = {slot: self.draw() if index is None else index for slot, index in indices.items()}
        while waiting:
            calls = {i: (self.tickets[index], -1, partial(self.open, i, index)) for i, index in waiting.items()}
            dealt, waiting = waiting, {}
            for slot, reply in self._call(calls).items():
                if isinstance(reply, Reply):
                    self.start(slot, dealt[slot], reply)
                elif indices[slot] is not None:
                    raise reply
                else:
                    self._contain(slot, reply)
                    waiting[slot] = self.draw()

    def _call(self, calls: Mapping[int, _Planned]) -> dict[int, Reply | EnvironmentFault]:
        """Make a call for each slot, in threads if there are any; its reply or its fault."""
        if self.num_threads == 0:
            with kept_global_rng(for_games=True):
                return {slot: _outcome(function) for slot, (_, _, function) in calls.items()}
        self._pool = self._pool or Pool(self.num_threads)
        made = {slot: self._pool.submit(slot, partial(_outcome, function)) for slot, (_, _, function) in calls.items()}
        self._pool.wait(made, self.busy_since, self.step_timeout)
        return {slot: self._heard(call, *calls[slot][:2]) for slot, call in made.items()}

    def _heard(self, call: Call, ticket: Ticket, turn: int) -> Reply | EnvironmentFault:
        """What came of a call in a thread. Raises what is no fault of the environment."""
        if call.error is None:
            return cast(Reply | EnvironmentFault, call.result)
        if call.abandoned:
            return EnvironmentFault(self.names[ticket.env_id], ticket, turn, call.error)
        raise call.error

    def _contain(self, slot: int, fault: EnvironmentFault) -> StopReason:
        """Count a failed episode and give its environment away; raise the first if there were too many in a row."""
        reason, last = fault.stop_reason, self.last_fault
        self.last_fault = fault
        self._slots[slot].games.pop(fault.ticket.env_id, None)
        if last is not None and fault.batched_call is not None and fault.batched_call is last.batched_call:
            return reason
        self.faults[reason.name.lower()] += 1
        self._faults_in_a_row.append(fault)
        if len(self._faults_in_a_row) > self.max_faults:
            first, count = self._faults_in_a_row[0], len(self._faults_in_a_row)
            self._faults_in_a_row = []
            first.add_note(f"It was the first of {count} failed episodes in a row; max_faults={self.max_faults}.")
            raise first
        # Without the traceback: a bug that fails every episode would show it each time, and once more when it is raised.
        logger.warning("%s Its episode ends here.", fault)
        return reason

    def _excess(self, playing: Slot, size: int) -> int:
        """How many of the oldest turns have to leave the context before one of ``size`` tokens; 0: nothing helps."""
        first, *turns = map(len, playing.pieces)
        room = self.max_model_len - self.max_output_tokens - first
        if size > room:
            return 0
        kept = np.cumsum([size, *reversed(turns)]) <= max(size, room // 2)
        return len(turns) + 1 - int(kept.sum())

    def _append(self, slot: int, ids: Sequence[int]) -> None:
        length = self._slots[slot].length
        self._prompt.numpy()[slot, length : length + len(ids)] = ids
        self._slots[slot].length += len(ids)

    def _stop_reason(self, playing: Slot, step: TextStep, length: int) -> StopReason:
        if step.terminated:
            if self._is_success(playing, step):
                return StopReason.WON
            # GEM's own turn limit sets both flags. The limit stands in the prompt: it is part of the task.
            return StopReason.TURN_LIMIT if step.truncated else StopReason.LOST
        if step.truncated:
            return StopReason.ENV_TRUNCATED
        if playing.turn + 1 == self.max_turns:
            return StopReason.MAX_TURNS
        if length + self.max_output_tokens > self.max_model_len:
            return StopReason.CONTEXT
        return StopReason.RUNNING

    def _is_success(self, playing: Slot, step: TextStep) -> bool:
        """Whether an episode that terminates with ``step`` is one."""
        if step.success is not None:
            return step.success
        return self._earned(playing.ticket.env_id, playing.total + step.reward, step.reward) >= self.success_reward

    def _earned(self, env_id: int, total: float, last: float) -> float:
        return total + 1e-6 if self._sums[env_id] else last

    def _ask_what_counts(self, playing: Slot, reply: Reply) -> None:
        """Warn, once, if an environment is never won though its episodes earn nearly as much as that takes."""
        env_id = playing.ticket.env_id
        if env_id not in self._lost:
            return
        if reply.said or reply.stop_reason == StopReason.WON:
            del self._lost[env_id]
            return
        count, most = self._lost[env_id]
        most = max(most, self._earned(env_id, playing.total, reply.reward))
        self._lost[env_id] = count + 1, most
        if count + 1 >= _LOST and most >= self.success_reward / 2 > 0:
            del self._lost[env_id]
            logger.warning(
                "None of %d episodes of %r was a success; the highest %s was %.3g, and a success takes success_reward=%s. If "
                "less counts as won there, set success_reward, or let the environment say info['success'].",
                count + 1, self.names[env_id], "return" if self._sums[env_id] else "last reward", most, self.success_reward,
            )  # fmt: skip

    # ------------------------------------------------------------------ tensors

    def _responses(self, tensordict: TensorDictBase) -> list[list[int]]:
        mask = tensordict[keys.RESPONSE_MASK].bool()
        flat = iter(tensordict[keys.RESPONSE][mask].tolist())
        return [list(islice(flat, length)) for length in mask.sum(-1).tolist()]

    def _observation(self) -> dict[Any, Tensor]:
        slots = self._slots
        columns = torch.tensor(
            [
                [s.length, s.turn, *s.ticket[:3], s.task_id, s.stop_reason, s.stop_reason == StopReason.WON, s.segment]
                for s in slots
            ]
        ).unsqueeze(-1)
        length, turn, episode, group, env, task, reason, success, segment = columns.unbind(1)
        return {
            **({keys.SEGMENT: segment} if self.overflow == "slide" else {}),
            keys.PROMPT: self._prompt.masked_fill(length == 0, 0),
            keys.PROMPT_LENGTH: length,
            keys.TURN: turn,
            keys.EPISODE_ID: episode,
            keys.GROUP_ID: group,
            keys.ENV_ID: env,
            keys.TASK_ID: task,
            keys.STOP_REASON: reason,
            keys.SUCCESS: success.bool(),
        }

    def _done(self) -> dict[Any, Tensor]:
        done = torch.tensor([slot.finished for slot in self._slots]).unsqueeze(-1)
        terminated = torch.tensor([slot.stop_reason in TERMINATED for slot in self._slots]).unsqueeze(-1)
        return {keys.DONE: done, keys.TERMINATED: terminated, keys.TRUNCATED: done & ~terminated}

    def _tensordict(self, values: dict[Any, Tensor]) -> TensorDict:
        result = TensorDict({}, batch_size=self.batch_size, device=self.device)
        for key, value in values.items():
            result.set(key, value)
        return result

    # ------------------------------------------------------------------ state

    def state_dict(self, *args: Any, **kwargs: Any) -> OrderedDict:
        """What :meth:`load_state_dict` needs: the counters, and each slot as its ticket and its responses so far."""
        slots = [
            {
                "index": slot.index,
                "stop_reason": int(slot.stop_reason),
                "responses": [list(ids) for ids in slot.responses],
            }
            for slot in self._slots
        ]
        counts = {"num_dealt": self.num_dealt, "faults": dict(self.faults)}
        return OrderedDict(tickets=asdict(self.tickets), slots=slots, **counts)

    def load_state_dict(self, state_dict: OrderedDict, *args: Any, **kwargs: Any) -> None:
        """Go on where :meth:`state_dict` was taken: running episodes are replayed; :meth:`observe` shows them.

        Finished slots come back finished, without their contexts. An empty state (TorchRL's own collectors save none)
        changes nothing and is logged.

        Raises:
            ValueError: the state is of an environment with other groups, mixture, stream, workers or number of slots.
        """
        if not state_dict:
            logger.warning(
                "GEMEnv got an empty state and deals on from ticket %d; save env.state_dict().", self.num_dealt
            )
            return
        saved, slots = type(self.tickets)(**state_dict["tickets"]), state_dict["slots"]
        running = {
            i: slot
            for i, slot in enumerate(slots)
            if slot["index"] is not None and slot["stop_reason"] == StopReason.RUNNING
        }
        same_seed = replace(saved, seed=self.tickets.seed, ids_by_seed=self.tickets.ids_by_seed)
        if same_seed != self.tickets or (running and len(slots) != len(self._slots)):
            raise ValueError(
                f"The state is of {saved} over {len(slots)} slots; this environment has {self.tickets} over "
                f"{len(self._slots)} slots. Make it with the same arguments (only the seed may differ)."
            )
        self.tickets, self.num_dealt = saved, state_dict["num_dealt"]
        self._first_seed = self._first_seed if saved.ids_by_seed else saved.seed
        self.faults = Counter(state_dict.get("faults", {}))  # a collector that plays single slots counts its own
        self._slots = [Slot(slot.games) for slot in self._slots]
        for slot, old in zip(self._slots, slots, strict=False):
            slot.stop_reason = StopReason(old["stop_reason"])
        self._begin({i: old["index"] for i, old in running.items()})
        for i, old in running.items():
            for response in map(list, old["responses"]):
                self.advance(i, response, self.answer(i, response))

    def observe(self) -> TensorDict:
        """The current observation of all slots, as a policy reads it (batch ``[N]``)."""
        return self._tensordict(self._observation() | self._done())

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Let the threads end; those of environments that hang are left behind."""
        if self._pool is not None:
            for thread in self._pool.close(_PATIENCE):
                revoke_global_rng(thread)
        super().close(raise_if_closed=raise_if_closed)
