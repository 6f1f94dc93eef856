"""Text environments as TorchRL environments: :class:`GEMEnv`, N of them as one ``EnvBase``.

Here lives the step from text worlds to TensorDicts: who plays which ticket, random numbers that no other code sees or
disturbs, why an episode ended, and constant-width tensors. Templates live in :mod:`~torchrl_llm.envs.chat`, tickets in
:mod:`~torchrl_llm.envs.tickets`; policies and credit are elsewhere.
"""

from __future__ import annotations

import difflib
import inspect
import logging
import math
import random
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, islice
from typing import Any, Literal, NamedTuple, Protocol, get_args, runtime_checkable

import numpy as np
import torch
from numpy.random import mtrand
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import Binary, Bounded, Categorical, Composite, Unbounded
from torchrl.envs import EnvBase
from transformers import PreTrainedTokenizerBase

from torchrl_llm import keys
from torchrl_llm.envs.chat import ChatFormatter, Role, Template, compose_message
from torchrl_llm.envs.tickets import Stream, Ticket, Tickets
from torchrl_llm.keys import StopReason

logger = logging.getLogger(__name__)

OnDone = Literal["refill", "idle"]

_NO_TICKET = Ticket(-1, -1, 0, 0)
_TERMINATED = (StopReason.WON, StopReason.LOST, StopReason.TURN_LIMIT)


@runtime_checkable
class TextEnv(Protocol):
    """What :class:`GEMEnv` plays: any object with these two methods (``reset`` may take no seed)."""

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """Start an episode; return ``(text, info)``."""

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Answer a response; return ``(text, reward, terminated, truncated, info)``."""


class UnknownEnvironmentError(ValueError):
    """No GEM environment has this id."""


class PromptTooLongError(ValueError):
    """The first context of an episode leaves no room for a response."""


class EnvironmentFault(RuntimeError):
    """An environment raised, or returned something that is not a step.

    Attributes:
        ticket: the :class:`~torchrl_llm.envs.tickets.Ticket` of the episode.
        turn: 0-based turn that failed; -1 is the reset.
        cause: the exception.
    """

    def __init__(self, name: str, ticket: Ticket, turn: int, cause: Exception) -> None:
        where = "at its reset" if turn < 0 else f"in turn {turn}"
        super().__init__(
            f"The environment {name!r} failed {where} (episode {ticket.episode_id}, group {ticket.group_id}, task seed "
            f"{ticket.seed}): {type(cause).__name__}: {cause}. To see it again, reset it with that seed and replay the turns."
        )
        self.name, self.ticket, self.turn, self.cause = name, ticket, turn, cause

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.name, self.ticket, self.turn, self.cause)


class TextStep(NamedTuple):
    """One checked answer of a text environment; ``message`` includes ``info``'s prefix and suffix."""

    message: str
    role: Role
    reward: float
    terminated: bool
    truncated: bool


def resolve_env(env: str | Callable[[], TextEnv]) -> tuple[str, Callable[[], TextEnv]]:
    """The name and the factory of an environment given as a GEM id or as a factory.

    Raises:
        UnknownEnvironmentError: the id is not registered; close matches are named.
    """
    if not isinstance(env, str):
        return getattr(env, "__name__", type(env).__name__), env
    import gem
    from gem.envs.registration import ENV_REGISTRY

    if env not in ENV_REGISTRY:
        close = difflib.get_close_matches(env, ENV_REGISTRY, n=5, cutoff=0.4)
        raise UnknownEnvironmentError(
            f"GEM has no environment {env!r}. "
            + (f"Did you mean one of {close}? " if close else "")
            + "gem.print_envs() lists them all; another environment can be passed as a factory."
        )
    return env, lambda: gem.make(env)


@contextmanager
def kept_global_rng() -> Iterator[None]:
    """Leave the global generators of ``random`` and ``numpy.random`` as they were found.

    Examples:
        >>> state = random.getstate()
        >>> with kept_global_rng():
        ...     _ = random.random()
        >>> random.getstate() == state
        True
    """
    python, bits, numpy = random.getstate(), mtrand.get_bit_generator(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        mtrand.set_bit_generator(bits)
        np.random.set_state(numpy)


class Game:
    """A text environment with generators of its own in place of the global ones. Call it inside :func:`kept_global_rng`.

    Args:
        factory: makes the environment; called at the first reset.
    """

    def __init__(self, factory: Callable[[], TextEnv]) -> None:
        self._factory = factory
        self._env: TextEnv | None = None
        self._takes_seed = True
        self._python: Any = None
        self._numpy = np.random.MT19937(0)

    def reset(self, seed: int) -> str:
        """Start the task that ``seed`` names and return the first message."""
        mtrand.set_bit_generator(self._numpy)
        self._seed(seed)
        if self._env is None:
            self._env = self._factory()
            self._takes_seed = "seed" in inspect.signature(self._env.reset).parameters
            self._seed(seed)
        result = self._env.reset(seed=seed) if self._takes_seed else self._env.reset()
        self._python = random.getstate()
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], str)):
            raise TypeError(f"reset() returned {result!r:.200}; expected (text, info)")
        return compose_message(*result)

    def step(self, action: str) -> TextStep:
        """Play one turn."""
        assert self._env is not None
        mtrand.set_bit_generator(self._numpy)
        random.setstate(self._python)
        result = self._env.step(action)
        self._python = random.getstate()
        if not (isinstance(result, tuple) and len(result) == 5 and isinstance(result[0], str)):
            raise TypeError(f"step() returned {result!r:.200}; expected (text, reward, terminated, truncated, info)")
        text, reward, terminated, truncated, info = result
        if not math.isfinite(reward):
            raise ValueError(f"step() returned the reward {reward!r}; expected a finite number")
        role: Role = "tool" if (info or {}).get("use_tool") else "user"
        return TextStep(compose_message(text, info), role, float(reward), bool(terminated), bool(truncated))

    @staticmethod
    def _seed(seed: int) -> None:
        random.seed(seed)
        np.random.seed(seed)


@dataclass
class _Slot:
    """One row of the batch. ``index`` is the place of the ticket among the tickets; ``None``: the slot idles."""

    games: dict[int, Game]
    index: int | None = None
    ticket: Ticket = _NO_TICKET
    turn: int = 0
    length: int = 0
    stop_reason: StopReason = StopReason.RUNNING
    responses: list[list[int]] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        return self.stop_reason != StopReason.RUNNING

    @property
    def live(self) -> bool:
        return self.index is not None and not self.finished


class GEMEnv(EnvBase):
    """N text environments as one TorchRL environment of batch size ``[N]``; a turn is a step.

    Observations (:mod:`torchrl_llm.keys`): the whole context so far ``("tokens", "prompt")`` ``[N, max_model_len]``
    int64, right-padded with 0, and its length, ``"turn"``, ``"episode_id"``, ``"group_id"``, ``"env_id"``,
    ``"success"`` and ``"stop_reason"``, all ``[N, 1]``. Action: ``("tokens", "response")`` ``[N, max_output_tokens]``
    int64 and ``("tokens", "response_mask")`` bool. The last observation of an episode holds its last response and,
    as far as it fits, the environment's last words.

    Each slot plays tickets (:class:`~torchrl_llm.envs.tickets.Tickets`): the same seed gives the same games, whatever else
    draws random numbers and however many slots there are. Environments see the global generators of ``random`` and
    ``numpy.random`` seeded by their ticket, and leave them untouched for everyone else. A partial-step mask ``"_step"``
    ``[N]`` is honoured: slots outside it keep their state.

    An episode ends as ``terminated`` when its environment says so (also at its own turn limit), and as ``truncated`` by
    our budgets: ``max_turns``, or when the next response would not fit into ``max_model_len``.

    Args:
        env: a GEM id, a factory of any object with ``reset`` and ``step`` (:class:`TextEnv`), or a list of these: a mixture,
            dealt in turn.
        tokenizer: the tokenizer of the policy's model.
        num_envs: slots N; default 1. A multiple of ``group_size``.
        max_model_len: width of the context in tokens; default 1024.
        max_output_tokens: width of a response in tokens; default 64.
        max_turns: our turn budget; default none.
        group_size: episodes that share a task; default 1.
        system_prompt, template, chat_template_kwargs: see :class:`~torchrl_llm.envs.chat.ChatFormatter`.
        success_reward: an episode is a success if it terminates with a last reward of at least this; default 1.0.
        on_done: what a partial reset does to a finished slot: ``"refill"`` (default) deals the next ticket; ``"idle"``
            leaves it empty (``prompt_length`` 0, reward 0, no environment call) until a reset of the whole environment.
        stream, seed, worker, num_workers: see :class:`~torchrl_llm.envs.tickets.Tickets`.
        device: device of the tensors; default CPU.

    Raises:
        UnknownEnvironmentError: no GEM environment has this id.
        PromptTooLongError: at a reset, the first context leaves no room for a response.
        EnvironmentFault: an environment raised or returned something malformed, such as a NaN reward.

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
        group_size: int = 1,
        system_prompt: str | None = None,
        template: Template = "chat",
        chat_template_kwargs: dict[str, Any] | None = None,
        success_reward: float = 1.0,
        on_done: OnDone = "refill",
        stream: Stream = "train",
        seed: int = 0,
        worker: int = 0,
        num_workers: int = 1,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(device=device or "cpu", batch_size=(num_envs,))
        envs = [env] if isinstance(env, str) or callable(env) else list(env)
        self._check_sizes(envs, num_envs, group_size, max_model_len, max_output_tokens, max_turns, on_done)
        self.names, self._factories = zip(*map(resolve_env, envs), strict=True)
        self.formatter = ChatFormatter(
            tokenizer, template=template, system_prompt=system_prompt, chat_template_kwargs=chat_template_kwargs
        )
        self.tickets = Tickets(
            seed=seed,
            stream=stream,
            group_size=group_size,
            num_tasks=len(envs),
            worker=worker,
            num_workers=num_workers,
        )
        self.num_dealt = 0
        self.max_model_len, self.max_output_tokens, self.max_turns = max_model_len, max_output_tokens, max_turns
        self.success_reward, self.on_done = success_reward, on_done
        self._slots = [_Slot({}) for _ in range(num_envs)]
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
                keys.SUCCESS: Binary(1, shape=(n, 1), dtype=torch.bool),
                keys.STOP_REASON: Bounded(low=0, high=max(StopReason), **size),
            },
            shape=(n,),
            device=self.device,
        )
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

    @property
    def group_size(self) -> int:
        """Episodes that share a task."""
        return self.tickets.group_size

    # ------------------------------------------------------------------ TorchRL's private methods

    def _set_seed(self, seed: int | None) -> None:
        """Name the tasks by ``seed`` and deal them from the first again; running episodes go on."""
        if seed is not None:
            self.tickets = replace(self.tickets, seed=seed)
            self.num_dealt = 0

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        mask = tensordict.get("_reset", None) if tensordict is not None else None
        chosen = list(range(len(self._slots))) if mask is None else mask.flatten().nonzero().flatten().tolist()
        if mask is not None and self.on_done == "idle":
            for i in chosen:
                self._slots[i] = _Slot(self._slots[i].games)
        else:
            self._begin({i: self.num_dealt + k for k, i in enumerate(chosen)})
            self.num_dealt += len(chosen)
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
        rewards = torch.zeros(len(self._slots), 1)
        appended: dict[int, Sequence[int]] = {}
        with kept_global_rng():
            for i in active:
                appended[i], rewards[i, 0] = self._play(self._slots[i], responses[i])
        self._append(appended)
        return self._tensordict(self._observation() | self._done() | {keys.REWARD: rewards})

    # ------------------------------------------------------------------ episodes

    def _begin(self, indices: dict[int, int]) -> None:
        """Deal the tickets ``indices`` (slot -> index of its ticket) and start their episodes."""
        contexts = {}
        with kept_global_rng():
            for i, index in indices.items():
                games, ticket = self._slots[i].games, self.tickets[index]
                if ticket.env_id not in games:
                    games[ticket.env_id] = Game(self._factories[ticket.env_id])
                contexts[i] = self._first_context(games[ticket.env_id], ticket)
                self._slots[i] = _Slot(games, index=index, ticket=ticket)
        self._prompt[list(indices)] = 0
        self._append(contexts)

    def _first_context(self, game: Game, ticket: Ticket) -> tuple[int, ...]:
        name = self.names[ticket.env_id]
        try:
            context = self.formatter.start(game.reset(ticket.seed))
        except Exception as error:
            raise EnvironmentFault(name, ticket, -1, error) from error
        if len(context) + self.max_output_tokens > self.max_model_len:
            raise PromptTooLongError(
                f"The first prompt of {name!r} (episode {ticket.episode_id}) has {len(context)} tokens; with a response of "
                f"max_output_tokens={self.max_output_tokens} it does not fit into max_model_len={self.max_model_len}. Raise "
                "max_model_len, lower max_output_tokens, or shorten the system prompt."
            )
        return context

    def _play(self, slot: _Slot, response: list[int]) -> tuple[list[int], float]:
        """Play one turn; return what it adds to the context, cut at ``max_model_len``, and the reward."""
        ticket = slot.ticket
        try:
            step = slot.games[ticket.env_id].step(self.formatter.decode(response))
        except Exception as error:
            raise EnvironmentFault(self.names[ticket.env_id], ticket, slot.turn, error) from error
        added = [*response, *self.formatter.feedback(response, step.message, role=step.role)]
        slot.responses.append(response)
        slot.turn += 1
        length = slot.length + len(added)
        slot.stop_reason = self._stop_reason(step, slot.turn, length)
        return added[: self.max_model_len - slot.length], step.reward

    def _stop_reason(self, step: TextStep, turn: int, length: int) -> StopReason:
        if step.terminated:
            if step.reward >= self.success_reward:
                return StopReason.WON
            # GEM's own turn limit sets both flags. The limit stands in the prompt: it is part of the task.
            return StopReason.TURN_LIMIT if step.truncated else StopReason.LOST
        if step.truncated:
            return StopReason.ENV_TRUNCATED
        if turn == self.max_turns:
            return StopReason.MAX_TURNS
        if length + self.max_output_tokens > self.max_model_len:
            return StopReason.CONTEXT
        return StopReason.RUNNING

    # ------------------------------------------------------------------ tensors

    def _responses(self, tensordict: TensorDictBase) -> list[list[int]]:
        mask = tensordict[keys.RESPONSE_MASK].bool()
        flat = iter(tensordict[keys.RESPONSE][mask].tolist())
        return [list(islice(flat, length)) for length in mask.sum(-1).tolist()]

    def _append(self, added: Mapping[int, Sequence[int]]) -> None:
        """Write ids behind the context of each slot, in one indexed write."""
        slots = [self._slots[i] for i in added]
        sizes = [len(ids) for ids in added.values()]
        rows = np.repeat(list(added), sizes)
        starts = np.array([slot.length for slot in slots]) - np.cumsum([0, *sizes[:-1]])[: len(slots)]
        columns = np.arange(sum(sizes)) + np.repeat(starts, sizes)
        values = np.fromiter(chain.from_iterable(added.values()), np.int64, sum(sizes))
        self._prompt.numpy()[rows.astype(np.int64), columns.astype(np.int64)] = values
        for slot, size in zip(slots, sizes, strict=True):
            slot.length += size

    def _observation(self) -> dict[Any, Tensor]:
        slots = self._slots
        columns = torch.tensor(
            [[s.length, s.turn, *s.ticket[:3], s.stop_reason, s.stop_reason == StopReason.WON] for s in slots]
        ).unsqueeze(-1)
        length, turn, episode, group, env, reason, success = columns.unbind(1)
        return {
            keys.PROMPT: self._prompt.masked_fill(length == 0, 0),
            keys.PROMPT_LENGTH: length,
            keys.TURN: turn,
            keys.EPISODE_ID: episode,
            keys.GROUP_ID: group,
            keys.ENV_ID: env,
            keys.STOP_REASON: reason,
            keys.SUCCESS: success.bool(),
        }

    def _done(self) -> dict[Any, Tensor]:
        done = torch.tensor([slot.finished for slot in self._slots]).unsqueeze(-1)
        terminated = torch.tensor([slot.stop_reason in _TERMINATED for slot in self._slots]).unsqueeze(-1)
        return {keys.DONE: done, keys.TERMINATED: terminated, keys.TRUNCATED: done & ~terminated}

    def _tensordict(self, values: dict[Any, Tensor]) -> TensorDict:
        result = TensorDict({}, batch_size=self.batch_size, device=self.device)
        for key, value in values.items():
            result.set(key, value)
        return result

    # ------------------------------------------------------------------ state

    def state_dict(self, *args: Any, **kwargs: Any) -> OrderedDict:
        """What :meth:`load_state_dict` needs: the counter, and each slot as its ticket and its responses so far."""
        slots = [
            {
                "index": slot.index,
                "stop_reason": int(slot.stop_reason),
                "responses": [list(ids) for ids in slot.responses],
            }
            for slot in self._slots
        ]
        return OrderedDict(tickets=asdict(self.tickets), num_dealt=self.num_dealt, slots=slots)

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
        saved, slots = Tickets(**state_dict["tickets"]), state_dict["slots"]
        running = {
            i: slot
            for i, slot in enumerate(slots)
            if slot["index"] is not None and slot["stop_reason"] == StopReason.RUNNING
        }
        if replace(saved, seed=self.tickets.seed) != self.tickets or (running and len(slots) != len(self._slots)):
            raise ValueError(
                f"The state is of {saved} over {len(slots)} slots; this environment has {self.tickets} over "
                f"{len(self._slots)} slots. Make it with the same arguments (only the seed may differ)."
            )
        self.tickets, self.num_dealt = saved, state_dict["num_dealt"]
        self._slots = [_Slot(slot.games) for slot in self._slots]
        for slot, old in zip(self._slots, slots, strict=False):
            slot.stop_reason = StopReason(old["stop_reason"])
        self._begin({i: old["index"] for i, old in running.items()})
        with kept_global_rng():
            for i, old in running.items():
                for response in old["responses"]:
                    self._append({i: self._play(self._slots[i], list(response))[0]})

    def observe(self) -> TensorDict:
        """The current observation of all slots, as a policy reads it (batch ``[N]``)."""
        return self._tensordict(self._observation() | self._done())
