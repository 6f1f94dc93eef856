"""The protocol of text environments: :class:`TextEnv`, and what it returns, checked:
:class:`TextStep`.

Any object with ``reset`` and ``step`` is a text environment. How one fails is in
:mod:`~torchrl_llm.envs.faults`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

from torchrl_llm.envs.chat import compose_message
from torchrl_llm.envs.columns import NO_EXTRAS, ExtraKinds, Extras
from torchrl_llm.episode import LARGEST_REWARD, is_reward, plain_number
from torchrl_llm.keys import REWARD, NestedKey, extra
from torchrl_llm.rendering import Role

SuccessBy = Literal["last", "return"]


@runtime_checkable
class TextEnv(Protocol):
    """What :class:`~torchrl_llm.envs.GEMEnv` runs: any object with these two methods (``reset`` may
    take no seed).

    An environment may draw from the global generators of ``random`` and ``numpy.random``; they are
    its own during a call. There is one set of them in a process, so such environments are called
    one at a time, also from several threads. An environment that never uses them (it owns its
    generators, or asks a server) has the attribute ``thread_safe = True``; then its calls run in
    parallel, and the global generators are neither seeded nor restored for it.

    Tasks are told apart by their first observations. An environment that hides a part of its task
    has a method ``hidden_state()``, which returns after a reset everything that defines this task,
    as an object with a telling ``repr``, such as the secret word and the rules; ``None`` says that
    nothing is hidden.

    A class may declare ``extras = {"regret": float, "state": str}``: numbers and texts that it
    returns in the ``info`` of every step, and that reach rows and reports
    (:mod:`~torchrl_llm.envs.columns`). It may declare ``single_turn = True`` (or ``False``):
    whether every episode ends with its first response, which the setting ``granularity="auto"``
    asks.
    """

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """Start an episode; return ``(text, info)``."""

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Process a response, a :class:`~torchrl_llm.envs.Response`; return
        ``(text, reward, terminated, truncated, info)``.

        ``action`` is the whole response, with the thought that the chat template opened for it;
        ``action.text`` is the answer behind the thinking.

        ``info["success"]``, where it is given with the termination, says whether the episode is a
        success; without it the reward decides.
        """


class TextStep(NamedTuple):
    """The checked result of a text environment's ``step``.

    Attributes:
        message: its text, with ``info``'s prefix and suffix.
        role: of the message.
        reward: of the turn.
        terminated, truncated: whether the episode ends here, and how.
        success: ``info["success"]``; ``None``: not given.
        extras: the declared ones of ``info``.
        results: ``info["tool_results"]``, if they are the lines of the message: the output of
            several tools.
    """

    message: str
    role: Role
    reward: float
    terminated: bool
    truncated: bool
    success: bool | None = None
    extras: Extras = NO_EXTRAS
    results: tuple[str, ...] = ()

    @classmethod
    def read(cls, result: Any, kinds: ExtraKinds | None = None) -> TextStep:
        """Check what ``step`` returned.

        Args:
            result: what it returned.
            kinds: the extras that the environment declares; default none.

        Raises:
            TypeError, ValueError: it is not a step, its reward is not finite or too large
                (:data:`~torchrl_llm.episode.LARGEST_REWARD`), or a declared extra is missing.
        """
        if not (isinstance(result, tuple) and len(result) == 5 and isinstance(result[0], str)):
            raise TypeError(
                f"step() returned {result!r:.200}; expected (text, reward, terminated, truncated, info){_of_coroutine(result)}"
            )
        text, info = result[0], _read_info("step", result[4])
        # Numbers of numpy and torch are accepted; text that could be parsed as a number is not.
        reward, terminated, truncated = map(plain_number, result[1:4])
        if isinstance(reward, str) or getattr(reward, "shape", None) or not hasattr(reward, "__float__"):
            raise TypeError(f"step() returned the reward {reward!r:.50}; expected a number")
        if not is_reward(reward):
            raise ValueError(
                f"step() returned the reward {reward!r:.50}; expected a finite number of at most {LARGEST_REWARD:g} in size"
            )
        if not (_is_flag(terminated) and _is_flag(truncated)):
            raise TypeError(f"step() returned {terminated=!r:.50}, {truncated=!r:.50}; expected booleans")
        success, tool = (plain_number(info.get(name)) for name in ("success", "use_tool"))
        # Of an environment that declares an extra of this name, a turn of calls has NaN.
        if tool and success != success:
            success = None
        for name, flag in (("success", success), ("use_tool", tool)):
            if flag is not None and not _is_flag(flag):
                raise TypeError(f"step() returned the info[{name!r}] {flag!r:.50}; expected a boolean, or none")
        role: Role = "tool" if tool else "user"
        said = None if success is None else bool(success)
        extras = Extras.read(info, kinds) if kinds else NO_EXTRAS
        message, parts = compose_message(text, info), info.get("tool_results")
        # Others may use the name for something else.
        results = tuple(each for each in parts if isinstance(each, str)) if isinstance(parts, list | tuple) else ()
        results = results if "\n".join(results) == message else ()
        return cls(message, role, float(reward), bool(terminated), bool(truncated), said, extras, results)

    def with_extras(self, more: Extras) -> TextStep:
        """The same step with further extras; those that it has already stay."""
        own = self.extras
        return self._replace(extras=Extras(more.values | own.values, more.texts | own.texts)) if more.values else self

    @property
    def values(self) -> dict[NestedKey, float]:
        """What it has of each column of the turn, by name."""
        return {REWARD: self.reward, **{extra(name): value for name, value in self.extras.values.items()}}

    @property
    def texts(self) -> dict[int, str]:
        """The texts behind the hashes among :attr:`values`."""
        return self.extras.texts


NO_STEP = TextStep("", "user", 0.0, terminated=False, truncated=False)
"""What there is before the first step, and of a step that failed."""


def read_reset(result: Any) -> tuple[str, str]:
    """Check what ``reset`` returned; return its text, and the message with ``info``'s prefix and
    suffix.

    Raises:
        TypeError: it is not ``(text, info)``.
    """
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], str)):
        raise TypeError(f"reset() returned {result!r:.200}; expected (text, info){_of_coroutine(result)}")
    return result[0], compose_message(result[0], _read_info("reset", result[1]))


def _read_info(method: str, info: Any) -> Mapping[str, Any]:
    """Check what an environment returned as its ``info``; ``None`` is nothing, and so is an empty
    list, tuple or text."""
    if not (info is None or isinstance(info, Mapping) or (isinstance(info, list | tuple | str) and not info)):
        raise TypeError(f"{method}() returned the info {info!r:.80}; expected a dictionary, such as {{}}")
    info = info or {}
    for name in ("prefix", "suffix"):
        if not isinstance(info.get(name) or "", str):
            raise TypeError(f"{method}() returned the info[{name!r}] {info[name]!r:.80}; expected text")
    return info


def _is_flag(value: Any) -> bool:
    """Whether this is a boolean, or 0 or 1."""
    return isinstance(value, int | float) and value in (True, False)


def _of_coroutine(result: Any) -> str:
    if not inspect.isawaitable(result):
        return ""
    if inspect.iscoroutine(result):
        result.close()  # or Python warns that nobody awaited it
    return ": environments are called by threads, so that it has to be an ordinary method (asyncio.run inside will do)"
