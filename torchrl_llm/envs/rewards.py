"""How the reward functions of :class:`~torchrl_llm.envs.PromptDatasetEnv` are called and checked.

A function grades one completion or a batch, synchronously or as a coroutine. In all cases
:class:`Grader` returns a finite number or a :class:`RewardError` for every completion, and
:class:`Question` is the text environment around it.
"""

from __future__ import annotations

import asyncio
import inspect
import numbers
import threading
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property, partial
from typing import Any, NamedTuple

from torchrl_llm.envs.isolation import Pool, kept_global_rng
from torchrl_llm.episode import LARGEST_REWARD, is_reward, plain_number
from torchrl_llm.utils.fingerprint import fingerprint

RewardFn = Callable[..., Any]
"""``reward_fn(completion, answer, question)``, with further columns by name; lists of them, if it
is batched."""

_GRACE = 5.0  # seconds beyond `reward_timeout` after which an event loop counts as blocked
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class Row(NamedTuple):
    """A question, its answer, and the further columns that the reward function names."""

    question: str
    answer: Any
    columns: Mapping[str, Any] = {}  # never written to; a read-only mapping could not be pickled


class WantedColumns(NamedTuple):
    """The columns that a reward function takes by name, beside completion, answer and question.

    Attributes:
        needed: those without a default.
        optional: those with one, which stays where the data has no such column.
        others: whether it takes all others too (``**kwargs``, and no ``*args``: a wrapper that
            passes on whatever it gets does not say what the function in it takes).
        positions: the names of its first three parameters, which no column can have.
    """

    needed: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    others: bool = False
    positions: tuple[str, ...] = ()

    @classmethod
    def of(cls, reward_fn: Any, *, batched: bool = False) -> WantedColumns:
        """What ``reward_fn`` names.

        Raises:
            TypeError: it cannot be called with a completion, an answer and a question.

        Examples:
            >>> WantedColumns.of(lambda completion, answer, question, tests, *, level=1: 0.0)[:3]
            (('tests',), ('level',), False)
        """
        signature = _signature(reward_fn, batched=batched)
        if signature is None:
            return cls()
        parameters = list(signature.parameters.values())
        first = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)][:3]
        named = [each for each in parameters if each not in first and each.kind in _BY_NAME]
        found = {each.kind for each in parameters}
        return cls(
            tuple(each.name for each in named if each.default is each.empty),
            tuple(each.name for each in named if each.default is not each.empty),
            inspect.Parameter.VAR_KEYWORD in found and inspect.Parameter.VAR_POSITIONAL not in found,
            tuple(each.name for each in first),
        )

    def among(self, columns: Iterable[str], *, used: Sequence[str]) -> tuple[str, ...]:
        """The columns to pass, of those that there are; ``used`` ones are passed by position.

        Examples:
            >>> WantedColumns(("tests",), ("level",), others=True).among(["q", "a", "tests", "source"], used=["q", "a"])
            ('tests', 'source')
        """
        columns = list(columns)
        named = (*self.needed, *(name for name in self.optional if name in columns))
        taken = {*named, *used, *self.positions}
        return (*named, *(name for name in columns if self.others and name not in taken))


class RewardError(RuntimeError):
    """A reward function raised, or returned something that is not a finite number.

    Attributes:
        batched_call: the same object for all rows of a batched call that failed as a whole;
            ``None``: this row failed alone.
    """

    batched_call: object | None = None


class RewardTimeoutError(RewardError, TimeoutError):
    """A reward function took longer than ``reward_timeout``."""


class _EventLoop:
    """An event loop in a thread of its own, made when it is first needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # One loop for all calls: an HTTP session belongs to the loop in which it was made.
        # asyncio.run() makes a new one, and fails inside a running loop, as in a notebook.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        # Locks and loops cannot be pickled; a copy makes its own.
        return type(self), ()

    def run(self, coroutine: Coroutine[Any, Any, Any], timeout: float) -> Any:
        """The result of ``coroutine``. Several threads may call it at once."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._loop.run_forever, name="reward_fn", daemon=True)
                self._thread.start()
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result(timeout)
        finally:
            # After a timeout the coroutine would continue to run.
            future.cancel()

    def close(self) -> None:
        """Stop the loop; a loop that is blocked is left to end with the process."""
        with self._lock:
            loop, self._loop = self._loop, None
        if loop is not None and self._thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            self._thread.join(_GRACE)
            if not self._thread.is_alive():
                loop.close()


class Grader:
    """Calls the reward function and checks what it returns.

    Args:
        reward_fn, batched, timeout: see :class:`~torchrl_llm.envs.PromptDatasetEnv`.
        rows: the dataset.
    """

    def __init__(self, reward_fn: RewardFn, rows: Sequence[Row], *, batched: bool, timeout: float) -> None:
        self.reward_fn, self.rows, self.batched, self.timeout = reward_fn, rows, batched, timeout
        call = getattr(reward_fn, "__call__", None)  # noqa: B004
        self.is_async = inspect.iscoroutinefunction(reward_fn) or inspect.iscoroutinefunction(call)
        self.thread_safe = self.is_async or getattr(reward_fn, "thread_safe", False)
        self.loop = _EventLoop()
        self._ahead: dict[tuple[int, str], list[float | RewardError]] = {}

    def fingerprint(self) -> str:
        """What tells it from others: its reward function, and the answers that it expects."""
        return fingerprint((self.reward_fn, self.batched, self._answers))

    @cached_property
    def _answers(self) -> str:
        return fingerprint([row.answer for row in self.rows])

    def __call__(self, row: int, completion: str) -> float:
        """The reward of a response to the question in ``row``."""
        ahead = self._ahead.get((row, completion))
        reward = ahead.pop(0) if ahead else self._grade([(row, completion)])[0]
        if isinstance(reward, RewardError):
            raise reward
        return reward

    @contextmanager
    def ahead(self, asked: list[tuple[int, str]], step_timeout: float | None) -> Iterator[None]:
        """Grade ``asked``, pairs of row and completion, all together; inside, single calls return
        these rewards.

        Args:
            asked: what to grade.
            step_timeout: seconds that it may take; ``None``: as long as it takes, in this thread.
        """
        rewards = self._graded_within(asked, step_timeout) if asked else []
        self._ahead = defaultdict(list)
        for pair, reward in zip(asked, rewards, strict=True):
            # A list: members of a group may give the same answer, and each was graded by itself.
            self._ahead[pair].append(reward)
        try:
            yield
        finally:
            self._ahead = {}

    def _graded_within(self, asked: list[tuple[int, str]], seconds: float | None) -> list[float | RewardError]:
        if seconds is None:
            return self._graded(asked)
        # A thread for each step: one that hangs in a reward function is left behind, with its pool.
        pool, start = Pool(1), time.monotonic()
        call = pool.submit(0, partial(self._graded, asked))
        pool.wait({0: call}, lambda _: start, seconds)
        pool.close(0.0)
        return call.result if call.error is None else self._all_checked(asked, [call.error] * len(asked))

    def _graded(self, asked: list[tuple[int, str]]) -> list[float | RewardError]:
        with nullcontext() if self.thread_safe else kept_global_rng():
            return self._grade(asked)

    def _grade(self, asked: list[tuple[int, str]]) -> list[float | RewardError]:
        try:
            results = self._call(asked)
        except Exception as error:  # noqa: BLE001 - becomes the fault of every row of the call
            results = [error] * len(asked)
        return self._all_checked(asked, results)

    def _all_checked(self, asked: list[tuple[int, str]], results: list[Any]) -> list[float | RewardError]:
        call = object() if self.batched and isinstance(results[0], BaseException) else None
        return [self._checked(row, result, call) for (row, _), result in zip(asked, results, strict=True)]

    def _call(self, asked: list[tuple[int, str]]) -> list[Any]:
        calls = self._calls(asked)
        if self.is_async:
            results = self.loop.run(self._gather(calls), self.timeout + _GRACE)
        else:
            results = [call() for call in calls]
            # Of a decorator, or a lambda, around a coroutine function: its kind shows in what it
            # returns alone.
            if any(map(inspect.isawaitable, results)):
                waits = [partial(_awaitable, each) for each in results]
                results = self.loop.run(self._gather(waits), self.timeout + _GRACE)
        if not self.batched:
            return results
        if isinstance(results[0], BaseException):
            return results * len(asked)
        rewards = results[0]
        if hasattr(rewards, "tolist"):  # an array or a tensor; reward models return one of [n, 1]
            rewards = (rewards.reshape(-1) if rewards.shape[1:] == (1,) else rewards).tolist()
        if not isinstance(rewards, Sequence) or len(rewards) != len(asked):
            raise TypeError(f"it returned {rewards!r:.80} for {len(asked)} completions; expected as many numbers")
        return list(rewards)

    def _calls(self, asked: list[tuple[int, str]]) -> list[Callable[[], Any]]:
        """One for all that is asked, if the function is batched, else one for each."""
        rows, completions = [self.rows[index] for index, _ in asked], [completion for _, completion in asked]
        if not self.batched:
            pairs = zip(completions, rows, strict=True)
            return [partial(self.reward_fn, text, row.answer, row.question, **row.columns) for text, row in pairs]
        columns = {name: [row.columns[name] for row in rows] for name in rows[0].columns}
        answers, questions = [row.answer for row in rows], [row.question for row in rows]
        return [partial(self.reward_fn, completions, answers, questions, **columns)]

    async def _gather(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        waits: list[Awaitable[Any]] = [asyncio.wait_for(call(), self.timeout) for call in calls]
        # Otherwise the first exception would be the result of all rows.
        return await asyncio.gather(*waits, return_exceptions=True)

    def _checked(self, row: int, result: Any, call: object | None) -> float | RewardError:
        reward = plain_number(result)
        if isinstance(reward, numbers.Real) and is_reward(reward):
            return float(reward)
        if isinstance(result, TimeoutError):
            what = f"took too long ({str(result) or f'reward_timeout={self.timeout} s'})"
        elif isinstance(result, BaseException):
            what = f"failed with {type(result).__name__}: {result}"
        else:
            expected = f"a finite number of at most {LARGEST_REWARD:g} in size{self._advice(reward)}"
            what = f"returned {reward!r:.80}; expected {expected}"
        kind = RewardTimeoutError if isinstance(result, TimeoutError) else RewardError
        error = kind(f"The reward function {what} (row {row}, question {self.rows[row].question!r:.80}).")
        error.__cause__ = result if isinstance(result, BaseException) else None
        error.batched_call = call
        return error

    def _advice(self, reward: Any) -> str:
        """What may have been meant by something that is not a number."""
        if isinstance(reward, Mapping | tuple):
            return ": the number alone, of parts their sum"
        is_list = isinstance(reward, list) or hasattr(reward, "tolist")
        return ": one that takes and returns lists is given with batched=True" if is_list and not self.batched else ""


async def _awaitable(result: Any) -> Any:
    return await result if inspect.isawaitable(result) else result


_ROLES = {
    "completion": ("completion", "response", "solution_str", "generation", "output", "prediction"),
    "answer": ("answer", "ground_truth", "reference_answer", "target", "label", "gold"),
    "question": ("question", "prompt", "query", "problem"),
    "column": ("data_source", "extra_info", "completion_id", "trainer_state", "log_extra", "log_metric"),
}
"""What other libraries call what a reward function gets; in the plural too. The last are of the
data, or nobody's here."""


def _role(name: str) -> str | None:
    return next((role for role, names in _ROLES.items() if name in names or name.removesuffix("s") in names), None)


def _check_names(name: str, signature: inspect.Signature, expected: str, plural: str) -> None:
    """Refuse a function whose arguments are named for another order: TRL's and verl's are not ours.

    Raises:
        TypeError: with a function around it that has our order.
    """
    roles = {each: role for each in signature.parameters if (role := _role(each))}
    first = zip(signature.parameters, ("completion", "answer", "question"), strict=False)
    wrong = [(each, role) for each, role in first if roles.get(each, role) != role]
    # An "answer" that comes first may be the model's; what else is out of order tells.
    if not [each for each, role in wrong if (roles[each], role) != ("answer", "completion")]:
        return
    own = [each for each, role in roles.items() if role != "column"]
    needed = (each for each in signature.parameters.values() if each.kind in _BY_NAME and each.default is each.empty)
    columns = [each.name for each in needed if each.name not in own]
    given = [*(f"{each}={roles[each]}{plural}" for each in own), *(f"{each}={each}" for each in columns)]
    ours = ", ".join([f"completion{plural}", f"answer{plural}", f"question{plural}", *columns])
    raise TypeError(
        f"reward_fn is {name}{signature}, whose argument {wrong[0][0]!r} would be given the {wrong[0][1]}{plural}: it is called as "
        f"{expected}, by position. Give lambda {ours}: {name}({', '.join(given)}), whose further arguments are columns of the data."
    )


def _signature(reward_fn: Any, *, batched: bool) -> inspect.Signature | None:
    """The signature, which takes a completion, an answer and a question by position; ``None``: it
    is not known."""
    plural = "s" if batched else ""
    expected = f"reward_fn(completion{plural}, answer{plural}, question{plural})"
    if not callable(reward_fn):
        raise TypeError(f"reward_fn is {reward_fn!r:.80}; expected a function, called as {expected}.")
    try:
        signature = inspect.signature(reward_fn)
    except ValueError:  # some built-in functions do not tell
        return None
    name = getattr(reward_fn, "__name__", type(reward_fn).__name__)
    _check_names(name, signature, expected, plural)
    further = [*signature.parameters.values()][3:]  # these are passed by name
    unnamed = [each.name for each in further if each.kind is each.POSITIONAL_ONLY and each.default is each.empty]
    try:
        signature.bind_partial("", "", "")
        if unnamed:
            raise TypeError(f"{unnamed[0]!r} cannot be passed by name")
    except TypeError as error:
        raise TypeError(
            f"reward_fn is {name}{signature}; expected one that can be called as {expected}, with three positional "
            f"arguments ({error})."
        ) from None
    return signature


class Question:
    """A row as a text environment of one turn; its task seed is the row."""

    def __init__(self, grader: Grader) -> None:
        self._grader, self._row = grader, 0
        self.thread_safe = grader.thread_safe

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        assert seed is not None
        self._row = seed
        return self._grader.rows[self._row].question, {}

    def hidden_state(self) -> None:
        """Nothing: the task is the question."""

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "", self._grader(self._row, action), True, False, {}
