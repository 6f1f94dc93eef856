"""What of an episode each turn sees: :class:`ContextRule`, and the rules that there are.

An episode is a list of :class:`Span`: messages, what the prompt opens for the assistant, thinking
and answers, each with ids that were sampled or rendered once and are never tokenized again. A rule
selects from the spans so far those that the next turn sees. A context that does not extend the last
one opens a new segment of the same episode (:mod:`torchrl_llm.modules.segments`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

from torchrl_llm.rendering import Role


class Span(NamedTuple):
    """A part of an episode.

    Attributes:
        ids: its tokens.
        turn: the turn of a response, of what the prompt opens for it, and of the message that
            follows it; -1: the first message.
        kind: a message of the environment; what the prompt opens for the assistant, such as
            ``<think>``; or of a response, its thinking up to the answer (an empty thought is a kind
            of its own), the rest, and the token that ended it, if the template ends no earlier
            answer by it. A summary is what answers a request of a rule (:class:`RequestingRule`).
        role: of a message.
    """

    ids: Sequence[int]
    turn: int
    kind: Literal["message", "opening", "thinking", "empty", "answer", "summary", "end"]
    role: Role = "user"


_ANSWERS = ("answer", "summary")

Thought = Literal["none", "empty", "some"]
"""What an answer has thought before it."""


class ShowsAnswers(Protocol):
    """What rules ask of a :class:`~torchrl_llm.envs.ChatFormatter`."""

    def written_before(self, roles: tuple[Role, ...], thoughts: tuple[Thought, ...]) -> Sequence[Sequence[int] | None]:
        """The ids that the template writes before each answer of a conversation, in the place of
        what the prompt opened and of its thought; ``None``: these stand there.

        Args:
            roles: of the messages, one more than there are answers.
            thoughts: of each answer.
        """
        ...


class ContextRule(Protocol):
    """Which spans of an episode its next turn sees: a function of the spans, so that an episode can
    be replayed."""

    def __call__(self, spans: Sequence[Span], formatter: ShowsAnswers, room: int) -> Sequence[Span]:
        """The spans of the next context.

        Args:
            spans: all so far, or what an earlier rule left of them: the first message, then each
                response and the message that follows it; before each response, and at the end, what
                the prompt opens for it, if that is anything.
            formatter: of the environment.
            room: the most tokens that the context may have; where it has more, the episode ends.
        """
        ...


@runtime_checkable
class RequestingRule(ContextRule, Protocol):
    """A rule that may ask something of the policy before the episode continues, in a turn of its
    own: the answer is sampled and trained as others, earns no reward itself, and the environment
    does not see it."""

    def request(self, context: Sequence[Span]) -> str | None:
        """What is asked; ``None``: nothing.

        Args:
            context: of the next turn, if nothing is asked. The request stands behind its last
                message, which the turn after the answer gets once more.
        """
        ...


def num_tokens(spans: Sequence[Span]) -> int:
    """How many tokens spans have together."""
    return sum([len(span.ids) for span in spans])


def ids_of(spans: Sequence[Span]) -> list[int]:
    """The tokens of spans."""
    return [*chain.from_iterable([span.ids for span in spans])]


def selected(
    rules: Iterable[ContextRule], spans: Sequence[Span], formatter: ShowsAnswers, room: int = sys.maxsize
) -> Sequence[Span]:
    """What rules select, each from what the one before it left.

    Raises:
        ValueError: a rule returned something else than spans, or no token.
    """
    for rule in rules:
        given, spans = spans, [*(rule([*spans], formatter, room) or ())]
        if spans != given:
            _check(rule, spans, given)
    return spans


def _check(rule: ContextRule, spans: Sequence[Span], given: Sequence[Span]) -> None:
    known = {id(span) for span in given}
    wrong = [span for span in spans if id(span) not in known and not _is_span(span)]
    if wrong or not any(len(span.ids) for span in spans):
        found = f"{wrong[0]!r:.80}" if wrong else "no token"
        raise ValueError(
            f"The context rule {rule!r:.80} returned {found}; expected a list of spans (torchrl_llm.envs.Span), of those that it got or "
            "of its own, with ids >= 0."
        )


def _is_span(span: Any) -> bool:
    return isinstance(span, Span) and all(isinstance(i, int) and i >= 0 for i in span.ids)


@dataclass(frozen=True)
class Append:
    """Every context is the last one, the response, and the message that follows it."""

    def __call__(self, spans: Sequence[Span], formatter: ShowsAnswers, room: int) -> Sequence[Span]:
        return spans


@dataclass(frozen=True)
class AsTemplate(Append):
    """Every context is what the chat template shows of the conversation. Most templates of models
    that think leave the thinking of earlier answers out.

    The template says of which answers (some keep it up to the next message of a user, across the
    output of tools), and what it writes in the place of a thought. All other ids stay as they are.
    """

    def __call__(self, spans: Sequence[Span], formatter: ShowsAnswers, room: int) -> Sequence[Span]:
        turns = [span.turn for span in spans if span.kind in _ANSWERS]
        roles = tuple(span.role for span in spans if span.kind == "message")
        kinds: dict[str, Thought] = {"thinking": "some", "empty": "empty"}
        thoughts = {span.turn: kinds[span.kind] for span in spans if span.kind in kinds}
        written = formatter.written_before(roles, tuple(thoughts.get(turn, "none") for turn in turns))
        instead = {turn: ids for turn, ids in zip(turns, written, strict=True) if ids is not None}
        shown = []
        for span in spans:
            if span.kind == "end":
                continue
            if span.turn not in instead or span.kind == "message":
                shown.append(span)
            elif span.kind in _ANSWERS:
                ids = instead[span.turn]
                shown += [Span(ids, span.turn, "opening"), span] if ids else [span]
        return shown


@dataclass(frozen=True)
class KeepLast(Append):
    """The first message and the last turns.

    Attributes:
        turns: how many, >= 1.

    Raises:
        ValueError: ``turns`` is less.

    Examples:
        >>> said = [Span([1, 2], -1, "message")]
        >>> for turn in range(3):
        ...     said += [Span([3], turn, "answer"), Span([4, 5], turn, "message")]
        >>> [span.turn for span in KeepLast(1)(said, None, room=100)]
        [-1, 2, 2]
    """

    turns: int

    def __post_init__(self) -> None:
        if self.turns < 1:
            raise ValueError(f"KeepLast: turns is {self.turns!r}; expected at least 1.")

    def __call__(self, spans: Sequence[Span], formatter: ShowsAnswers, room: int) -> Sequence[Span]:
        return _since(spans, _last_turn(spans) + 1 - self.turns)


@dataclass(frozen=True)
class Summarize(Append):
    """A summary takes the place of what was said, whenever that has become long.

    Where a context has more than ``at_tokens`` tokens, the policy is asked for a summary (see
    :class:`RequestingRule`). The turns after it see the first message, the summary, and what
    follows it. A context that has no room for the request is left as it is.

    Attributes:
        prompt: the request.
        at_tokens: >= 1.

    Raises:
        ValueError: ``prompt`` is empty, or ``at_tokens`` is less.

    Examples:
        >>> rule = Summarize("Sum up what you know.", at_tokens=6)
        >>> said = [Span([1, 2], -1, "message"), Span([3], 0, "answer"), Span([4, 5, 6, 7], 0, "message")]
        >>> rule.request(said)
        'Sum up what you know.'
        >>> said += [Span([8], 1, "summary"), Span([4, 5], 1, "message")]
        >>> [span.ids for span in rule(said, None, room=100)]
        [[1, 2], [8], [4, 5]]
    """

    prompt: str
    at_tokens: int

    def __post_init__(self) -> None:
        if not self.prompt.strip() or self.at_tokens < 1:
            raise ValueError(f"{self!r:.200}; expected a request, such as 'Sum up what you know.', and at_tokens >= 1.")

    def request(self, context: Sequence[Span]) -> str | None:
        return self.prompt if num_tokens(context) > self.at_tokens else None

    def __call__(self, spans: Sequence[Span], formatter: ShowsAnswers, room: int) -> Sequence[Span]:
        return _since(spans, max((span.turn for span in spans if span.kind == "summary"), default=0))


@dataclass(frozen=True)
class Slide(Append):
    """Where a context is full, its oldest turns leave it: all but the first message, and as much as
    fills half of the room behind it, so that not every turn cuts it.

    Examples:
        >>> said = [Span([1, 2], -1, "message")]
        >>> for turn in range(3):
        ...     said += [Span([3], turn, "answer"), Span([4, 5], turn, "message")]
        >>> [span.turn for span in Slide()(said, None, room=10)]
        [-1, 2, 2]
    """

    def __call__(self, spans: Sequence[Span], formatter: ShowsAnswers, room: int) -> Sequence[Span]:
        last = _last_turn(spans)
        sizes = [0] * (last + 2)
        for span in spans:
            # What the prompt opens for the next response is there in any case.
            sizes[span.turn if span.turn <= last else -1] += len(span.ids)
        room -= sizes.pop()
        ends = [0, *accumulate(sizes)]
        first = 0
        for turn, size in enumerate(sizes):  # as the contexts of the earlier turns were cut
            if ends[turn + 1] - ends[first] > room >= size:
                kept = max(size, room // 2)
                first = next(i for i in range(first, turn + 1) if ends[turn + 1] - ends[i] <= kept)
        return _since(spans, first)


def _last_turn(spans: Sequence[Span]) -> int:
    """The turn of the last message."""
    return next(span.turn for span in reversed(spans) if span.kind == "message")


def _since(spans: Sequence[Span], turn: int) -> Sequence[Span]:
    """The first message, and what is of ``turn`` or later."""
    return [span for span in spans if span.turn < 0 or span.turn >= turn] if turn > 0 else spans
