"""The text of recorded episodes, of bounded length, for pages of Markdown and for trackers:
:func:`episode_texts`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice, zip_longest
from typing import Any, Literal, NamedTuple

from torchrl_llm.keys import StopReason
from torchrl_llm.runs.outputs import NEXT_SEGMENT, fenced, outcome
from torchrl_llm.runs.pieces import join_pieces
from torchrl_llm.runs.recorded_groups import CUT, SEEN, groups_of, spans
from torchrl_llm.runs.recording import Recording
from torchrl_llm.utils.terminal import visible

MOST_CHARACTERS = 8_000
"""Of an episode's text; of a longer one beginning and end are kept, and a note says what is left
out."""


class Message(NamedTuple):
    """What one side wrote: ``"user"`` is the environment, with what the chat template adds,
    ``"assistant"`` the model."""

    role: Literal["user", "assistant"]
    text: str


@dataclass(frozen=True, kw_only=True)
class EpisodeText:
    """An episode as a reader wants it.

    Attributes:
        task: the number of its task, equal in all recordings.
        env: the name of its environment.
        outcome: how it ended, and its rewards.
        turns: how many it has.
        reward: its return, undiscounted.
        messages: who wrote what; characters that cannot be seen stand as their numbers.
    """

    task: int
    env: str
    outcome: str
    turns: int
    reward: float
    messages: tuple[Message, ...]


def episode_texts(recording: Recording, count: int, *, most: int = MOST_CHARACTERS) -> list[EpisodeText]:
    """Some episodes of a recording: the first of each task, then the second of each, and so on.

    Args:
        recording: the episodes.
        count: how many at most.
        most: characters of an episode's text.
    """
    groups = [[(group.task, row) for row in group.rows] for group in groups_of(recording, 0)]
    in_turn = (each for each in chain.from_iterable(zip_longest(*groups)) if each is not None)
    return [_episode(recording, task, row, most) for task, row in islice(in_turn, count)]


def _episode(recording: Recording, task: int, row: int, most: int) -> EpisodeText:
    arrays, env = recording.arrays, int(recording.arrays["env_id"][row])
    turns = int(arrays["turn.mask"][row].sum())
    rewards = arrays["turn.reward"][row, :turns].tolist()
    stop = StopReason(int(arrays["turn.stop_reason"][row, turns - 1])) if turns else StopReason.ERROR
    return EpisodeText(
        task=task,
        env=recording.env_names[env] if env < len(recording.env_names) else "",
        outcome=outcome(stop, rewards),
        turns=turns,
        reward=sum(rewards),
        messages=tuple(shortened(list(_messages(recording, row)), most)),
    )


def _messages(recording: Recording, row: int) -> Iterator[Message]:
    tokens, start = recording.arrays["tokens"][row].tolist(), 0
    for turn, length in spans(recording, row):
        ids, start = tokens[start : start + length], start + length
        if turn == CUT:
            yield Message("user", NEXT_SEGMENT)
        elif turn == SEEN:
            yield Message("user", f"[{length} tokens from before]\n")
        else:
            text = "".join(join_pieces([recording.pieces[each] for each in ids]))
            yield Message("assistant" if turn >= 0 else "user", visible(text))


def shortened(messages: Sequence[Message], most: int) -> list[Message]:
    """The messages, of which the middle is left out if they have more than ``most`` characters
    together.

    Examples:
        >>> messages = [Message("user", "Guess a number."), Message("assistant", "Is it 5?"), Message("user", "Yes, you win.")]
        >>> [text for _, text in shortened(messages, 24)]
        ['Guess a numb[... 12 characters left out ...]', 'es, you win.']
    """
    total, start, kept = sum(len(text) for _, text in messages), 0, []
    if total <= most:
        return list(messages)
    first, last = most // 2, total - most // 2
    for role, text in messages:
        note = f"[... {last - first:,} characters left out ...]" if start <= first < start + len(text) else ""
        short = text[: max(0, first - start)] + note + text[max(0, last - start) :]
        kept += [Message(role, short)] if short else []
        start += len(text)
    return kept


def markdown(recording: Recording, texts: Sequence[EpisodeText]) -> str:
    """Episodes of a recording; what environment and model wrote stands in code blocks, where it is
    neither Markdown nor HTML."""
    if recording.kind == "training":
        parts = [f"# Episodes of iteration {recording.iteration}, {recording.steps:,} turns"]
    else:
        parts = [f"# Episodes {recording.kind} training"]
    for number, each in enumerate(texts, 1):
        parts.append(f"## Episode {number}, task {each.task}: {each.outcome}")
        parts += [f"{_WRITERS[role]}:\n\n{fenced(text)}" for role, text in each.messages]
    return "\n\n".join(parts) + "\n"


_WRITERS = {"user": "Environment", "assistant": "Model"}

COLUMNS = ("iteration", "steps", "task", "environment", "outcome", "turns", "return", "text")
"""Of a table of episodes, see :func:`table_rows`."""


def table_rows(recording: Recording, texts: Sequence[EpisodeText]) -> list[list[Any]]:
    """A row of :data:`COLUMNS` for each episode."""
    rows: list[list[Any]] = []
    for each in texts:
        text = "\n\n".join(f"[{_WRITERS[role]}]\n{text}" for role, text in each.messages)
        # The task as text: a table's numbers are floats elsewhere, which would round it.
        about = (str(each.task), each.env, each.outcome, each.turns, each.reward)
        rows.append([recording.iteration, recording.steps, *about, text])
    return rows
