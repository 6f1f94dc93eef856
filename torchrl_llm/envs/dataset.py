"""Questions of a dataset as one-turn episodes: :class:`PromptDatasetEnv`.

It is a :class:`~torchrl_llm.envs.GEMEnv` over the rows of a dataset. This module reads rows,
assigns them to tasks, and makes prompts of questions. Reward functions are called in
:mod:`~torchrl_llm.envs.rewards`; episodes, groups, tokens and saved states are handled in
:mod:`~torchrl_llm.envs.env`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tensordict import TensorDictBase
from transformers import PreTrainedTokenizerBase

from torchrl_llm.envs.chat import ChatFormatter
from torchrl_llm.envs.contexts import ids_of, selected
from torchrl_llm.envs.env import GEMEnv
from torchrl_llm.envs.env_spec import EnvSpec
from torchrl_llm.envs.messages import is_empty, is_list, plain_messages
from torchrl_llm.envs.record_files import read_records
from torchrl_llm.envs.rewards import Grader, Question, RewardFn, Row, WantedColumns
from torchrl_llm.envs.tasks import Stream, TaskSampler, TaskSpec
from torchrl_llm.envs.tensors import chosen_slots, responses_of
from torchrl_llm.utils.named import find_named
from torchrl_llm.utils.options import Positive, options_of

SPLITS: dict[Stream, tuple[str, ...]] = {"train": ("train",), "eval": ("validation", "test"), "test": ("test",)}
"""The splits that a stream may read; it reads the first one there is."""

PLACEHOLDER = "{question}"
_MEDIA = {"image", "images", "video", "videos", "audio", "audios"}
# of the features of a Hugging Face Dataset, in lists too
_MEDIA_TYPE = re.compile(r"\b(Image|Video|Audio)\(")
QUESTION_ONLY = ({"role": "user", "content": PLACEHOLDER},)


# ---------------------------------------- rows


def read_rows(
    dataset: Any,
    *,
    question: str = "question",
    answer: str = "answer",
    wanted: WantedColumns | None = None,
    system_prompt: str | None = None,
) -> tuple[Row, ...]:
    """The rows of a dataset: a list of dicts, a Hugging Face ``Dataset``, or the path of a file.

    Args:
        dataset: anything with a length that yields mappings, or the path of a file: JSON lines, an
            array of JSON, parquet or CSV (:mod:`torchrl_llm.envs.record_files`).
        question, answer: the columns. A question is text, or (TRL's ``prompt``) a list of messages:
            the user's alone, or behind the system message ``system_prompt``.
        wanted: further columns to keep; which there are is read from the first row. Default none.
        system_prompt: the system message of the environment; default none.

    Raises:
        ValueError: the dataset is empty or has no length, or a row lacks a column or has another
            question; or a column holds images, videos or sounds, which no model would see, and
            ``wanted`` does not name it.

    Examples:
        >>> rows = [{"question": "1 + 1?", "answer": "2", "level": 1, "source": "x"}]
        >>> [(row.question, row.answer, dict(row.columns)) for row in read_rows(rows, wanted=WantedColumns(("level",)))]
        [('1 + 1?', '2', {'level': 1})]
    """
    if isinstance(dataset, str | Path):
        records: Iterable[tuple[str, Any]] = read_records(Path(dataset))
    elif isinstance(dataset, Mapping) or not hasattr(dataset, "__len__") or hasattr(dataset, "iloc"):
        raise ValueError(
            f"The dataset is a {type(dataset).__name__}; expected a list of dicts, a datasets.Dataset or the path of a file, one "
            'for each split. Load a streaming dataset into a list first; a table of pandas is table.to_dict("records").'
        )
    else:
        records = ((f"Row {i}", record) for i, record in enumerate(dataset))
    wanted, names, rows = wanted or WantedColumns(), None, list[Row]()
    features = getattr(dataset, "features", None) or {}
    typed = [name for name, kind in features.items() if _MEDIA_TYPE.search(repr(kind))]
    for place, record in records:
        if not isinstance(record, Mapping):
            raise ValueError(f"{place} is {record!r:.80}; expected a mapping from column names to values.")
        _check_media(place, record, typed, (question, answer, *wanted.needed, *wanted.optional))
        names = wanted.among(record, used=(question, answer)) if names is None else names
        rows.append(_read_row(place, record, question, answer, names, system_prompt))
    if not rows:
        raise ValueError("The dataset has no rows; expected at least one.")
    return tuple(rows)


def _check_media(place: str, record: Mapping[str, Any], typed: Sequence[str], used: Sequence[str]) -> None:
    named = [name for name, value in record.items() if str(name).lower() in _MEDIA and not is_empty(value)]
    media = [name for name in record if (name in typed or name in named) and name not in used]
    if media:
        raise ValueError(
            f"{place} has the column {media[0]!r}, and a prompt is text alone: the model would answer without it. Remove the "
            "column if the questions can be answered so; a parameter of reward_fn with its name gets it."
        )


_COLUMNS = {
    "question": ("prompt", "problem", "query", "instruction", "input"),
    "answer": ("solution", "ground_truth", "reward_model", "target", "completion", "response", "output"),
}
"""What question and answer are called in datasets of others."""


def _read_row(
    place: str, record: Mapping[str, Any], question: str, answer: str, names: Sequence[str], system_prompt: str | None
) -> Row:
    if missing := [name for name in (question, answer, *names) if name not in record]:
        near = {use: next(filter(record.__contains__, _COLUMNS[use]), None) for use in _COLUMNS if use in missing}
        such = ", ".join(f"{use}={name!r}" for use, name in near.items() if name is not None)
        raise ValueError(
            f"{place} has no column {missing}; its columns are {list(record)}. Name the right ones with question= and "
            f"answer=, and as parameters of reward_fn{such and f': such as {such}'}."
        )
    try:
        asked = _asked_in(record[question], system_prompt)
    except ValueError as error:
        raise ValueError(f"{place} has the question {record[question]!r:.80}; {error}") from error
    return Row(asked, record[answer], {name: record[name] for name in names})


def _asked_in(question: Any, system_prompt: str | None) -> str:
    """The text of a question, or of the user's message in a list of messages."""
    if isinstance(question, str):
        return question
    if not is_list(question):
        raise ValueError("expected text, or a list of messages.")
    messages = plain_messages(question).messages
    roles = [message["role"] for message in messages]
    if roles not in (["user"], ["system", "user"]):
        raise ValueError(
            f"its roles are {roles}, and expected is a user's message, perhaps behind a system message. Turns before it that all "
            "questions have are the conversation_template; episodes of several turns are those of a GEMEnv."
        )
    if roles[0] == "system" and messages[0]["content"] != system_prompt:
        raise ValueError(
            f"its system message is {messages[0]['content']!r:.80}, and the environment's is {system_prompt!r:.80}: set "
            "system_prompt to it, or leave it out."
        )
    return messages[-1]["content"]


def train_test_split(dataset: Any, *, test_size: float, seed: int = 0) -> dict[str, list[Any]]:
    """Divide a dataset into ``{"train": [...], "test": [...]}`` at random.

    Args:
        dataset: a list of dicts, a Hugging Face ``Dataset``, or the path of a file
            (:func:`read_rows`).
        test_size: share of the rows that are held out, in (0, 1); at least one row goes to either
            side.
        seed: of the division.

    Examples:
        >>> splits = train_test_split([{"question": str(i), "answer": i} for i in range(10)], test_size=0.2)
        >>> len(splits["train"]), len(splits["test"])
        (8, 2)
    """
    if isinstance(dataset, Mapping):
        raise ValueError(f"The dataset is a mapping with {list(dataset)}; expected rows: divide one of its splits.")
    is_path = isinstance(dataset, str | Path)
    records = [record for _, record in read_records(Path(dataset))] if is_path else list(dataset)
    held_out = round(test_size * len(records))
    if not (0 < test_size < 1 and 0 < held_out < len(records)):
        raise ValueError(
            f"test_size is {test_size!r} of {len(records)} rows; expected a share in (0, 1) that leaves rows on both sides."
        )
    order = np.random.default_rng(seed).permutation(len(records))
    parts = {"train": order[held_out:], "test": order[:held_out]}
    return {name: [records[i] for i in sorted(part)] for name, part in parts.items()}


def _rows_of(dataset: Any, stream: Stream, columns: dict[str, Any]) -> tuple[Row, ...]:
    """The rows of ``stream``; rows of other splits are read only to check that none is in two
    splits."""
    splits = dataset if isinstance(dataset, Mapping) else {"train": dataset}
    name = next((name for name in SPLITS[stream] if name in splits), None)
    if name is None:
        columns_alone = " Rows of columns are datasets.Dataset.from_dict(columns)." * (columns["question"] in splits)
        raise ValueError(
            f"The stream {stream!r} reads the split {' or '.join(map(repr, SPLITS[stream]))}; the dataset has "
            f"{list(splits)}. Pass a mapping such as {{'train': ..., 'test': ...}}, of rows or files; train_test_split makes one.{columns_alone}"
        )
    rows = read_rows(splits[name], **columns)
    if stream == "train":
        trained = {row.question for row in rows}
        for other in (other for other in SPLITS["eval"] if other in splits):
            shared = [row.question for row in read_rows(splits[other], **columns) if row.question in trained]
            if shared:
                raise ValueError(
                    f"{len(shared)} questions of the split {other!r} are in 'train' too, such as {shared[0]!r:.80}: training "
                    "would see their answers. Remove them from one of the two."
                )
    return rows


# ---------------------------------------- the row of a task


@dataclass(frozen=True, kw_only=True)
class RowTaskSampler(TaskSampler):
    """Tasks whose seed is the row of a dataset: each epoch has each row in one group.

    The order is a function of (seed, epoch) and of nothing else. Evaluation streams keep the order
    of the dataset, so that n episodes are its first n rows.

    Args:
        num_rows: rows of the dataset.
        shuffle: permute the rows in every epoch of the stream ``"train"``; default True.

    Examples:
        >>> task_sampler = RowTaskSampler(num_rows=3, group_size=2, seed=1)
        >>> [task_sampler[i].seed for i in range(12)]
        [0, 0, 1, 1, 2, 2, 2, 2, 0, 0, 1, 1]
    """

    num_rows: int
    shuffle: bool = True

    def __getitem__(self, index: int) -> TaskSpec:
        task_spec = super().__getitem__(index)
        epoch, row = divmod(task_spec.group_id - self.base, self.num_rows)
        if self.shuffle and self.stream == "train":
            row = int(_permutation(self.seed, epoch, self.num_rows)[row])
        return task_spec._replace(seed=row)


@lru_cache(maxsize=4)  # every task reads it, and tasks of two epochs may be in flight
def _permutation(seed: int, epoch: int, num_rows: int) -> npt.NDArray[np.int64]:
    return np.random.default_rng([seed, epoch]).permutation(num_rows)


# ---------------------------------------- prompts


class PromptFormatter(ChatFormatter):
    """Renders a question through a conversation template, and that through the tokenizer's chat
    template.

    Args:
        tokenizer: a transformers tokenizer.
        conversation_template: messages ``{"role": ..., "content": ...}``: a system message or none,
            then user and assistant in turn (worked examples), with ``{question}`` in a user
            message. A last message of the assistant is the beginning of the response; it is part of
            the prompt, and the reward function does not get it. Answers are written as
            :meth:`~torchrl_llm.envs.ChatFormatter.answer` writes them.
        system_prompt: the system message, if the conversation template has none.
        kwargs: see :class:`~torchrl_llm.envs.chat.ChatFormatter`.

    Raises:
        ValueError: the roles are in another order, or no user message holds ``{question}``.
        MissingThinkingError: an answer does not close the thought that the template opens.

    Examples:
        >>> from torchrl_llm.testing.tokenizers import byte_tokenizer
        >>> tokenizer = byte_tokenizer()
        >>> template = [{"role": "user", "content": "{question} = ?"}, {"role": "assistant", "content": "It is"}]
        >>> formatter = PromptFormatter(tokenizer, conversation_template=template)
        >>> tokenizer.decode(formatter.start("1 + 1"))
        '<|im_start|>user\\n1 + 1 = ?<|im_end|>\\n<|im_start|>assistant\\nIt is'
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        conversation_template: Sequence[Mapping[str, str]] = QUESTION_ONLY,
        system_prompt: str | None = None,
        **kwargs: Any,
    ) -> None:
        messages = [(message["role"], message["content"]) for message in conversation_template]
        if messages and messages[0][0] == "system":
            if system_prompt is not None:
                raise ValueError("conversation_template has a system message, and system_prompt is another: give one.")
            system_prompt = messages.pop(0)[1]
        self._check(messages)
        contents = [content for _, content in messages]
        prefill = contents.pop() if len(contents) % 2 == 0 else ""
        # Until the template is known, which is tried with plain messages.
        self._message, self._examples = PLACEHOLDER, list[tuple[tuple[int, ...], str]]()
        self._prefill: tuple[int, ...] = ()
        super().__init__(tokenizer, system_prompt=system_prompt, **kwargs)
        answers = [self.encode_answer(self._form(answer)) for answer in contents[1::2]]
        self._message, self._examples = contents[0], list(zip(answers, contents[2::2], strict=True))
        begun = self._form.beginning(prefill)
        self._prefill, self._begins_in_thought = self.encode_answer(begun), self._form.is_open(begun)

    @staticmethod
    def _check(messages: list[tuple[str, str]]) -> None:
        roles = [role for role, _ in messages]
        if not roles or roles != (["user", "assistant"] * len(roles))[: len(roles)]:
            raise ValueError(
                f"conversation_template has the roles {roles} (after the system message, if any); expected user and "
                "assistant in turn, the user first."
            )
        if not any(PLACEHOLDER in content for role, content in messages if role == "user"):
            raise ValueError(f"conversation_template has no user message with {PLACEHOLDER!r}: add it.")

    def start(self, message: str) -> tuple[int, ...]:
        """The ids of the prompt that asks the question ``message``."""
        spans = self._with_opening(super().start(self._message.replace(PLACEHOLDER, message)), -1, "user")
        for turn, (answer, question) in enumerate(self._examples):
            said = self._said(answer, in_thought=self._in_thought)
            spans += self.turn_spans(answer, question.replace(PLACEHOLDER, message), turn, said=said)
        return (*ids_of(selected([self.rule], spans, self)), *self._prefill)


_ONE_TURN: dict[str, tuple[tuple[Any, ...], str]] = {
    "max_turns": ((None, 1), "an episode is one turn"),
    "overflow": (("truncate",), "a context of one turn has nothing to drop"),
    "context_rule": ((None,), "a context of one turn has nothing to drop"),
    "success_by": ((None,), "the return of one turn is its reward"),
    "weights": ((None,), "there is one dataset, and every row is sampled once an epoch"),
}


def _check_options(options: Mapping[str, Any]) -> None:
    for name, (expected, why) in _ONE_TURN.items():
        if name in options and options[name] not in expected:
            raise ValueError(
                f"PromptDatasetEnv: {name} is {options[name]!r}, but {why}; expected "
                f"{' or '.join(map(repr, expected))}, or leave it out."
            )


# ---------------------------------------- the environment


class PromptDatasetEnv(GEMEnv):
    """N questions of a dataset as one TorchRL environment: a :class:`~torchrl_llm.envs.GEMEnv` of
    one-turn episodes.

    A task is a row: a group of G episodes is one row G times, the order of an epoch depends on
    (seed, epoch), and the counter of tasks, which ``state_dict`` has, is the place in the epoch. An
    episode terminates after its response, and is a success if its reward is at least
    ``success_reward``.

    The stream ``"train"`` reads the split ``"train"``, ``"test"`` reads ``"test"``, and ``"eval"``
    reads ``"validation"``, or ``"test"`` if there is none. An environment keeps the answers of its
    own split only.

    Args:
        dataset: a mapping from split to rows (such as a ``datasets.DatasetDict``), or rows alone:
            the split ``"train"``. Rows are a list of dicts, a Hugging Face ``Dataset``, or the path
            of a file (:func:`read_rows`).
        reward_fn: ``reward_fn(completion, answer, question) -> float``, or its name, as
            ``"package.module:name"``. ``completion`` is the
            :class:`~torchrl_llm.envs.Response`: a string without its end-of-turn token, with the
            answer behind the thinking as its ``text``; ``answer`` is what the dataset has. Further
            parameters are columns, passed by name: those that it names (one with a default may be
            missing), and all others if it has ``**kwargs`` and no ``*args``. If it is an
            ``async def``, the calls of a step run concurrently in one event loop, which lives as
            long as the environment. A plain function sees the global generators seeded by the row,
            and is called from one thread at a time unless it has the attribute
            ``thread_safe = True``; one that is batched or async must not draw from them.
        tokenizer: the tokenizer of the policy's model.
        question, answer: the columns; default ``"question"`` and ``"answer"``.
        conversation_template: see :class:`PromptFormatter`; default one user message, the question.
        batched: ``reward_fn`` takes lists and returns as many rewards (a list, array or tensor):
            the responses of a step in one call. A collector that runs slots one by one calls it
            with one at a time. Default False.
        reward_timeout: seconds that a call of an ``async def`` may take; default 60.
        shuffle: a new order in every epoch of training; default True. Evaluation keeps the order of
            the dataset.
        num_envs: slots N; default 1. A multiple of ``group_size``.
        stream: ``"train"`` (default), ``"eval"`` or ``"test"``.
        system_prompt, template, contexts, chat_template_kwargs, missing_thinking, template_date:
            see :class:`~torchrl_llm.envs.chat.ChatFormatter`.
        options: see :class:`~torchrl_llm.envs.GEMEnv`. What means nothing to questions of one turn
            is refused: ``max_turns`` other than 1, ``overflow="slide"``, ``context_rule``,
            ``success_by``, ``weights``.

    Raises:
        TypeError: ``reward_fn`` cannot be called with three positional arguments.
        ValueError: an option means nothing to questions of one turn; the dataset lacks the split or
            a column, such as one that ``reward_fn`` names, or a question of an evaluation split is
            in ``"train"`` too.
        EnvironmentFault: the reward function raised, took too long or returned no finite number, in
            more than ``max_faults`` episodes in a row; the cause is a :class:`RewardError` that
            names the row. Until then such an episode is cut (:class:`~torchrl_llm.envs.GEMEnv`). A
            batched call that fails counts once, however many rows it had.

    Examples:
        >>> from torchrl_llm.testing.policies import ScriptedPolicy
        >>> from torchrl_llm.testing.tokenizers import byte_tokenizer
        >>> tokenizer = byte_tokenizer()
        >>> rows = [{"question": "1 + 1?", "answer": "2"}, {"question": "1 + 2?", "answer": "3"}]
        >>> env = PromptDatasetEnv(
        ...     rows, lambda completion, answer, question: completion == answer, tokenizer=tokenizer, num_envs=2
        ... )
        >>> policy = ScriptedPolicy(lambda episode, turn, context: "2", tokenizer=tokenizer, max_output_tokens=64)
        >>> env.rollout(1, policy)["next", "reward"].flatten().sum()
        tensor(1.)
    """

    def __init__(
        self,
        dataset: Any,
        reward_fn: RewardFn | str,
        *,
        tokenizer: PreTrainedTokenizerBase,
        question: str = "question",
        answer: str = "answer",
        conversation_template: Sequence[Mapping[str, str]] = QUESTION_ONLY,
        batched: bool = False,
        reward_timeout: Positive = 60.0,
        shuffle: bool = True,
        num_envs: int = 1,
        stream: Stream = "train",
        **options: Any,
    ) -> None:
        _check_options(options)
        reward: RewardFn = find_named("reward_fn", reward_fn, "a function") if isinstance(reward_fn, str) else reward_fn
        rendering = {name: options.pop(name) for name in options_of(ChatFormatter) if name in options}
        formatter = PromptFormatter(tokenizer, conversation_template=conversation_template, **rendering)
        wanted = WantedColumns.of(reward, batched=batched)
        columns = {"question": question, "answer": answer, "wanted": wanted, "system_prompt": formatter.system_prompt}
        rows = _rows_of(dataset, stream, columns)
        grader = Grader(reward, rows, batched=batched, timeout=reward_timeout)
        env = EnvSpec(type(self).__name__, partial(Question, grader), single_turn=True)
        super().__init__(env, tokenizer=tokenizer, num_envs=num_envs, stream=stream, **rendering, **options)
        # GEMEnv's constructor has made these two for environments of several turns.
        self.formatter = formatter
        self.task_sampler = RowTaskSampler(**asdict(self.task_sampler), num_rows=len(rows), shuffle=shuffle)
        self._grader = grader

    @property
    def rows(self) -> Sequence[Row]:
        """The rows of this environment's split."""
        return self._grader.rows

    @property
    def epoch(self) -> int:
        """Finished passes over the dataset, of all workers together."""
        groups = self.num_sampled // self.group_size * self.task_sampler.num_workers
        return groups // len(self.rows)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        if not (self._grader.batched or self._grader.is_async):
            return super()._step(tensordict)
        with self._grader.ahead(self._asked(tensordict), self.step_timeout):
            return super()._step(tensordict)

    def _asked(self, tensordict: TensorDictBase) -> list[tuple[int, str]]:
        """Row and completion of the slots that are stepped."""
        slots, responses = self.slots, responses_of(tensordict)
        live = [i for i in chosen_slots(tensordict, "_step", len(slots)) if slots[i].live]
        return [(slots[i].task_spec.seed, self.formatter.decode(responses[i])) for i in live]

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Stop the event loop of an ``async def`` reward function, and close as any environment."""
        self._grader.loop.close()
        super().close(raise_if_closed=raise_if_closed)
