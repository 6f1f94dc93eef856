"""One text environment played in isolation: :class:`Game`, and who has the global random generators.

Here lives what stands between a text world and everyone else: the protocol (:class:`TextEnv`), where environments come
from, checked answers, faults, and random numbers that no other code sees or disturbs. Slots, tickets and tokens are
:mod:`~torchrl_llm.envs.gem`'s.
"""

from __future__ import annotations

import difflib
import inspect
import logging
import math
import os
import random
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import numpy as np
from numpy.random import mtrand

from torchrl_llm.envs.chat import Role, compose_message
from torchrl_llm.envs.tasks import Task, divide_rows, gem_kinds, task_of
from torchrl_llm.envs.tickets import Stream, Ticket
from torchrl_llm.interrupts import children_ignore_sigint
from torchrl_llm.keys import StopReason

logger = logging.getLogger(__name__)

_PATIENCE = 60.0  # seconds that a grader may take to start, and between two warnings that someone keeps the generators
_LONG_CALL = 0.2  # seconds; an environment that keeps others waiting for longer is told of `thread_safe`
_hinted: set[str] = set()


@runtime_checkable
class TextEnv(Protocol):
    """What :class:`~torchrl_llm.envs.GEMEnv` plays: any object with these two methods (``reset`` may take no seed).

    An environment may draw from the global generators of ``random`` and ``numpy.random``; they are its own during a call.
    There is one set of them in a process, so such environments are called one at a time, also from several threads. One
    that never touches them (it owns its generators, or asks a server) says so with the attribute ``thread_safe = True``;
    then its calls really run in parallel, and the global generators are neither seeded nor put back for it.

    Tasks are told apart by their first observations. An environment that hides a part of its task has a method
    ``hidden_state()``, which returns after a reset all that makes this task, as anything whose ``repr`` says it, such as the
    secret word and the rules; ``None`` says that nothing is hidden.
    """

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """Start an episode; return ``(text, info)``."""

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Answer a response; return ``(text, reward, terminated, truncated, info)``.

        ``info["success"]``, where it is given with the termination, says whether the episode is a success; without it the
        reward does.
        """


class UnknownEnvironmentError(ValueError):
    """No GEM environment has this id."""


class MissingGEMError(ImportError):
    """GEM cannot be imported."""


class EnvironmentUnavailableError(RuntimeError):
    """A GEM environment cannot be made: a package or data is missing, or it needs arguments.

    Attributes:
        env_id: its id.
        cause: the exception.
    """

    def __init__(self, env_id: str, needs: str, cause: BaseException) -> None:
        said = " ".join(str(cause).split())
        super().__init__(f"The environment {env_id!r} cannot be made. {needs} ({type(cause).__name__}: {said:.200})")
        self.env_id, self.needs, self.cause = env_id, needs, cause

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.env_id, self.needs, self.cause)


class EnvironmentFault(RuntimeError):
    """An environment raised, or returned something that is not a step.

    Attributes:
        ticket: the :class:`~torchrl_llm.envs.tickets.Ticket` of the episode.
        turn: 0-based turn that failed; -1 is the reset.
        cause: the exception.
    """

    def __init__(self, name: str, ticket: Ticket, turn: int, cause: BaseException) -> None:
        where = "at its reset" if turn < 0 else f"in turn {turn}"
        super().__init__(
            f"The environment {name!r} failed {where} (episode {ticket.episode_id}, group {ticket.group_id}, task seed "
            f"{ticket.seed}): {type(cause).__name__}: {cause}{_place(cause)}. To see it again, reset it with that seed and "
            "replay the turns."
        )
        self.name, self.ticket, self.turn, self.cause = name, ticket, turn, cause

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.name, self.ticket, self.turn, self.cause)

    @property
    def batched_call(self) -> object | None:
        """What it shares with the faults of other episodes that failed in one call of theirs; ``None``: nothing."""
        return getattr(self.cause, "batched_call", None)

    @property
    def stop_reason(self) -> StopReason:
        """``TIMEOUT`` for a ``TimeoutError``, ``ERROR`` for everything else."""
        return StopReason.TIMEOUT if isinstance(self.cause, TimeoutError) else StopReason.ERROR


def _place(error: BaseException) -> str:
    """Where an exception was first raised, unless that was here, for messages."""
    while error.__cause__ is not None:
        error = error.__cause__
    frames = traceback.extract_tb(error.__traceback__)
    if not frames or Path(frames[-1].filename).parent == Path(__file__).parent:
        return ""
    return f" ({frames[-1].filename}:{frames[-1].lineno})"


class TextStep(NamedTuple):
    """One checked answer of a text environment.

    Attributes:
        message: what it says, with ``info``'s prefix and suffix.
        role: of the message.
        reward: of the turn.
        terminated, truncated: whether the episode ends here, and how.
        success: what ``info["success"]`` says; ``None``: nothing.
    """

    message: str
    role: Role
    reward: float
    terminated: bool
    truncated: bool
    success: bool | None = None


PAYS_PROGRESS = ("Crosswords", "Game2048", "Hangman", "Mastermind", "Minesweeper", "Sudoku", "WordSearch", "Wordle")
"""GEM's games that pay each step towards the goal with its share of 1: who wins has a return of 1, and no reward of 1."""


def pays_progress(env: str | Callable[[], TextEnv]) -> bool:
    """Whether an environment is a GEM id of :data:`PAYS_PROGRESS`."""
    return isinstance(env, str) and env.startswith("game:") and env[5:].partition("-")[0] in PAYS_PROGRESS


@contextmanager
def _no_warnings_of_cellpylib() -> Iterator[None]:
    """Without SyntaxWarnings of cellpylib, which GEM imports by way of reasoning_gym; all others are shown.

    It compares with literals by "is", of which Python warns when it compiles the files; a user can do nothing about it.
    """
    with warnings.catch_warnings():
        # The module of such a warning is the file's path.
        warnings.filterwarnings("ignore", category=SyntaxWarning, module=r".*[\\/]cellpylib[\\/]")
        yield


def import_gem(env_id: str) -> Any:
    """The module ``gem``, which an installation on Python 3.12.1 or later does not bring.

    Args:
        env_id: what it is wanted for, named in the error.

    Raises:
        MissingGEMError: it cannot be imported; the message says how to install it.
    """
    try:
        # Only the first time: filters belong to the process, and environments are made in threads too.
        with nullcontext() if "gem" in sys.modules else _no_warnings_of_cellpylib():
            import gem
            import gem.envs.registration
    except ImportError as error:
        raise MissingGEMError(
            f"{env_id!r} is an environment of GEM, which cannot be imported here ({error}); gem-llm declares Python <=3.12, "
            "and on later ones pip installs it only if told to: pip install --ignore-requires-python gem-llm==0.1.0. "
            "Environments of your own (pass a factory) and PromptDatasetEnv need no GEM."
        ) from error
    return gem


def resolve_env(env: str | Callable[[], TextEnv]) -> tuple[str, Callable[[], TextEnv]]:
    """The name and the factory of an environment given as a GEM id or as a factory.

    Raises:
        MissingGEMError: it is an id, and GEM cannot be imported.
        UnknownEnvironmentError: the id is not registered; close matches are named.
    """
    if not isinstance(env, str):
        return getattr(env, "__name__", type(env).__name__), env
    registry = import_gem(env).envs.registration.ENV_REGISTRY
    if env not in registry:
        close = difflib.get_close_matches(env, registry, n=5, cutoff=0.4)
        raise UnknownEnvironmentError(
            f"GEM has no environment {env!r}. "
            + (f"Did you mean one of {close}? " if close else "")
            + "gem.print_envs() lists them all; another environment can be passed as a factory."
        )
    return env, partial(_make, env)


def _make(env_id: str) -> TextEnv:
    """Make a GEM environment.

    Raises:
        EnvironmentUnavailableError: it cannot be made; the message says what it lacks.
        MissingGEMError: GEM cannot be imported.
    """
    gem = import_gem(env_id)
    try:
        return cast(TextEnv, gem.make(env_id))
    except Exception as error:
        raise EnvironmentUnavailableError(env_id, _needs(env_id, error), error) from error


PACKAGES = {
    "CodeEnv": ("datasets",),
    "CrosswordsEnv": ("pandas",),
    "MathEnv": ("datasets", "pylatexenc"),
    "MathVisualEnv": ("datasets", "pylatexenc"),
    "QaEnv": ("datasets",),
}
"""By GEM's class, the packages that it imports and GEM's distribution does not bring."""


def packages(env_id: str) -> tuple[str, ...]:
    """The packages that a GEM id needs and an installation of this library does not bring."""
    registry = import_gem(env_id).envs.registration.ENV_REGISTRY
    return PACKAGES.get(str(registry[env_id].entry_point).rpartition(":")[2], ())


def _needs(env_id: str, error: Exception) -> str:
    """What is to be done about an error of ``gem.make``."""
    given = import_gem(env_id).envs.registration.ENV_REGISTRY[env_id].kwargs
    local = f"or pass local data with a factory: lambda: gem.make({env_id!r}, dataset=...), a datasets.Dataset"
    if isinstance(error, LookupError) and "NLTK" in str(error):
        return (
            'It reads NLTK\'s word list: nltk.download("words") fetches it once; without a network put it below a folder '
            "of NLTK_DATA as corpora/words/en, one word a line."
        )
    if isinstance(error, ImportError):
        named = getattr(error.__context__, "name", None) or error.name or "the package named below"
        package = " ".join(name for name in packages(env_id) if find_spec(name) is None) or named
        data = (
            f" Its data is {given['dataset_name']!r} of the Hugging Face hub, {local}."
            if "dataset_name" in given
            else ""
        )
        return f"It needs a package: pip install {package}.{data}"
    if "dataset_name" in given:
        return f"It loads {given['dataset_name']!r} from the Hugging Face hub: connect to it, {local}."
    return "It fails with its registered arguments; give others with a factory: lambda: gem.make(id, ...)."


def _mend(env: TextEnv, name: str) -> TextEnv:
    """Change in place what keeps an episode of GEM's own environments from depending on its task and responses alone.

    Raises:
        EnvironmentUnavailableError: its process for grading does not start.
    """
    gem_env: Any = getattr(env, "unwrapped", env)
    kinds = gem_kinds(env)
    if "ReasoningGymEnv" in kinds:
        gem_env.size = math.inf  # it deals new questions after `size` resets of an instance
    elif "QaEnv" in kinds:
        gem_env.extractor = partial(_answer_or_none, gem_env.extractor)
    elif "MathEnv" in kinds:
        _wait_for_grader(gem_env, name)
    return env


def _divide(env: TextEnv, stream: Stream, name: str) -> None:
    try:
        divide_rows(env, stream)
    except ValueError as error:
        needs = f"The streams of training and evaluation play different rows of it: {error}."
        raise EnvironmentUnavailableError(name, needs, error) from error


def _answer_or_none(extract: Callable[[str], str | None], response: str) -> str:
    """The answer in a response, or if there is none, where GEM would raise, one that is never right."""
    answer = extract(response)
    return "\0" if answer is None else answer


def _wait_for_grader(math_env: Any, name: str) -> None:
    """Let it grade once, which takes longer at first: GEM takes for wrong what is not graded within a second."""
    from multiprocessing import TimeoutError as NotGraded

    answer = r"\boxed{1}", "2"
    if not math_env.use_mp:
        math_env.check_correct(*answer)
        return
    try:
        math_env.mp_pool.apply_async(math_env.check_correct, answer).get(timeout=_PATIENCE)
    except NotGraded as error:
        math_env.mp_pool.terminate()
        needs = (
            f"The process that grades its answers has not started within {_PATIENCE:.0f} s. It imports the main script anew: "
            'what that runs belongs under `if __name__ == "__main__":`. Or grade in this process, with use_mp=False.'
        )
        raise EnvironmentUnavailableError(name, needs, error) from error


# ---------------------------------------------------------------------- who has the global generators


class _Loan:
    """The global generators are with one thread, which may lend to itself again; ``state`` is what to put back."""

    def __init__(self, outer: _Loan | None, *, to_games: bool) -> None:
        self.thread = threading.get_ident()
        self.outer, self.to_games = outer, to_games
        self.wanted = self.revoked = False
        self.state = random.getstate(), mtrand.get_bit_generator(), np.random.get_state()

    def put_back(self) -> None:
        python, bits, numpy = self.state
        random.setstate(python)
        mtrand.set_bit_generator(bits)
        np.random.set_state(numpy)


_lending = threading.Condition()
_loan: _Loan | None = None


@contextmanager
def kept_global_rng(*, for_games: bool = False) -> Iterator[None]:
    """Leave the global generators of ``random`` and ``numpy.random`` as they were found.

    One thread of the process has them at a time; others wait here. The same thread may enter again.

    Args:
        for_games: only :class:`Game` draws inside; then nothing is put back between one game and the next. Default False.

    Examples:
        >>> state = random.getstate()
        >>> with kept_global_rng():
        ...     _ = random.random()
        >>> random.getstate() == state
        True
    """
    loan = _borrow(to_games=for_games)
    try:
        yield
    finally:
        _give_back(loan)


def _borrow(*, to_games: bool) -> _Loan:
    global _loan
    with _lending:
        while _loan is not None and _loan.thread != threading.get_ident():
            _loan.wanted = True
            if not _lending.wait(_PATIENCE):
                logger.warning("Waiting for the global random generators: an environment has kept them for long.")
        _loan = _Loan(_loan, to_games=to_games)
        return _loan


def _give_back(loan: _Loan) -> None:
    global _loan
    with _lending:
        if not loan.revoked:
            loan.put_back()
            _loan = loan.outer
            _lending.notify()


def revoke_global_rng(thread: int) -> bool:
    """Take the global generators from a thread that does not come back, and put them back as it found them.

    Args:
        thread: its ``threading.get_ident()``.

    Returns:
        Whether the thread had them.
    """
    global _loan
    with _lending:
        if _loan is None or _loan.thread != thread:
            return False
        while _loan is not None:
            _loan.revoked, last, _loan = True, _loan, _loan.outer
        last.put_back()
        _lending.notify_all()
    logger.warning(
        "An environment that hangs had the global generators of random and numpy.random; they were taken from it. If it "
        "ever goes on, it draws from everyone's, and later episodes may not be reproducible."
    )
    return True


_spare: list[np.random.MT19937] = []
"""Generators of games that are gone, for new ones. None is ever freed: numpy crashes if its global generator is exchanged,
and the old one freed, while another thread is in the middle of reading it."""


def _new_generator(owner: object) -> np.random.MT19937:
    generator = _spare.pop() if _spare else np.random.MT19937(0)
    weakref.finalize(owner, _spare.append, generator).atexit = False
    return generator


# ---------------------------------------------------------------------- one game


class Game:
    """A text environment with generators of its own in place of the global ones.

    Games may be called from several threads, each game from one at a time. Unless its environment is ``thread_safe``
    (:class:`TextEnv`), a call waits until no other game runs.

    Args:
        factory: makes the environment; called at the first reset.
        name: of the environment, for messages.
        rows: whose rows it plays, of one of GEM's data sets (:func:`~torchrl_llm.envs.divide_rows`); default ``None``:
            all.

    Attributes:
        task: what the last reset started; ``None`` before the first.
        busy_since: ``time.monotonic()`` when the running call reached the environment; ``None``: no call is there.

    Examples:
        >>> from torchrl_llm.testing.environments import StopOrGo
        >>> game = Game(StopOrGo)
        >>> game.reset(0), game.step("stop").reward
        ('Say stop or go on.', 1.0)
    """

    def __init__(self, factory: Callable[[], TextEnv], name: str = "", *, rows: Stream | None = None) -> None:
        self.busy_since: float | None = None
        self.task: Task | None = None
        self._factory, self._name, self._rows = factory, name, rows
        self._env: TextEnv | None = None
        self._takes_seed = True
        self._python: Any = None
        self._numpy = _new_generator(self)

    @property
    def env(self) -> TextEnv | None:
        """The environment; ``None`` before the first reset."""
        return self._env

    def reset(self, seed: int) -> str:
        """Start the task that ``seed`` names and return the first message."""
        if self._env is None:
            with (
                self._calling(0),
                children_ignore_sigint(),
            ):  # what it draws when it is made must not depend on the first task of its slot
                self._env = _mend(self._factory(), self._name)
                if self._rows is not None:
                    _divide(self._env, self._rows, self._name)
            self._takes_seed = "seed" in inspect.signature(self._env.reset).parameters
        with self._calling(seed):
            result = self._env.reset(seed=seed) if self._takes_seed else self._env.reset()
            if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], str)):
                raise TypeError(f"reset() returned {result!r:.200}; expected (text, info)")
            self.task = task_of(self._env, result[0])
        return compose_message(*result)

    def step(self, action: str) -> TextStep:
        """Play one turn."""
        assert self._env is not None
        with self._calling():
            result = self._env.step(action)
        if not (isinstance(result, tuple) and len(result) == 5 and isinstance(result[0], str)):
            raise TypeError(f"step() returned {result!r:.200}; expected (text, reward, terminated, truncated, info)")
        text, reward, terminated, truncated, info = result
        # Numbers of numpy and torch are rewards too; text that reads as a number is none.
        if reward is None or isinstance(reward, str) or not hasattr(reward, "__float__"):
            raise TypeError(f"step() returned the reward {reward!r:.50}; expected a number")
        if not math.isfinite(reward):
            raise ValueError(f"step() returned the reward {reward!r}; expected a finite number")
        if terminated not in (True, False) or truncated not in (True, False):
            raise TypeError(f"step() returned {terminated=!r:.50}, {truncated=!r:.50}; expected booleans")
        role: Role = "tool" if (info or {}).get("use_tool") else "user"
        success = (info or {}).get("success")
        if success not in (None, True, False):
            raise TypeError(f"step() returned the info['success'] {success!r:.50}; expected a boolean, or none")
        success = None if success is None else bool(success)
        return TextStep(compose_message(text, info), role, float(reward), bool(terminated), bool(truncated), success)

    @contextmanager
    def _calling(self, seed: int | None = None) -> Iterator[None]:
        """Around a call of the environment: its generators are the global ones, from ``seed`` or from where they were."""
        isolated = not getattr(self._env, "thread_safe", False)
        process = os.getpid()
        with self._generators() if isolated else nullcontext():
            self.busy_since = time.monotonic()
            if isolated:
                self._swap_in(seed)
            try:
                yield
            finally:
                if os.getpid() != process:
                    os._exit(1)  # a child that the environment forked; it must not play on as a second run
                self.busy_since = None
            if isolated:
                self._python = random.getstate()

    @contextmanager
    def _generators(self) -> Iterator[None]:
        current = _loan
        if current is not None and current.to_games and current.thread == threading.get_ident():
            yield
            return
        loan = _borrow(to_games=True)
        start = time.monotonic()
        try:
            yield
        finally:
            _give_back(loan)
            if loan.wanted and self._env is not None and time.monotonic() - start > _LONG_CALL:
                self._hint()

    def _swap_in(self, seed: int | None) -> None:
        mtrand.set_bit_generator(self._numpy)
        if seed is None:
            random.setstate(self._python)
        else:
            random.seed(seed)
            np.random.seed(seed)

    def _hint(self) -> None:
        if self._name not in _hinted:
            _hinted.add(self._name)
            logger.warning(
                "A call of the environment %r took more than %s s while others waited: environments that may draw from "
                "the global generators run one at a time. If it never does, set its attribute thread_safe = True.",
                self._name,
                _LONG_CALL,
            )
