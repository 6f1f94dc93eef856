"""Episodes from conversations that somebody wrote: :func:`episode_from_messages`,
:func:`read_transcripts`."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from torchrl_llm.data.conversations import conversation_of
from torchrl_llm.envs.chat import ChatFormatter
from torchrl_llm.envs.contexts import Append, ContextRule, RequestingRule, Span, ids_of, num_tokens, selected
from torchrl_llm.envs.record_files import read_records
from torchrl_llm.episode import Episode, Turn
from torchrl_llm.keys import StopReason

logger = logging.getLogger(__name__)


class TranscriptError(ValueError):
    """A conversation that cannot be imitated."""


def episode_from_messages(
    messages: Sequence[Mapping[str, str]],
    formatter: ChatFormatter,
    *,
    reward: float = 0.0,
    success: bool = False,
    index: int = 0,
    context_rule: ContextRule | None = None,
) -> Episode:
    """A conversation as an episode whose turns are the assistant's messages, rendered as contexts
    of environments are.

    The log-probs are ``nan``: nobody sampled them.

    Args:
        messages: dictionaries with ``"role"`` and ``"content"``: perhaps a system message, which
            must be the formatter's, then ``"user"`` (or ``"tool"``) and ``"assistant"`` in turns,
            the assistant last or a closing message after it.
        formatter: renders them.
        reward: of the last turn, the others get 0.
        success: whether the episode ended in success.
        index: its ids.
        context_rule: of the environment, see :class:`~torchrl_llm.envs.GEMEnv`.

    Raises:
        TranscriptError: the roles are others, the system message is not the formatter's, an
            answer is empty, or the context rule asks for a summary.

    Examples:
        >>> from torchrl_llm.testing.tokenizers import byte_tokenizer
        >>> messages = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
        >>> episode = episode_from_messages(messages, ChatFormatter(byte_tokenizer()), reward=1.0)
        >>> len(episode.turns), episode.rewards
        (1, [1.0])
        >>> byte_tokenizer().decode(episode.contexts[0])
        '<|im_start|>user\\n2 + 2?<|im_end|>\\n<|im_start|>assistant\\n4<|im_end|>'
    """
    spoken = _without_system(messages, formatter)
    _check_roles(spoken)
    _check_answers(spoken)
    episode = Episode(index, index, index, 0)
    rules = (formatter.rule, context_rule or Append())
    spans = context = formatter.first_spans(spoken[0]["content"])
    for turn, answer in enumerate(spoken[1::2]):
        follows: Any = spoken[2 * turn + 2] if 2 * turn + 2 < len(spoken) else {"role": "user"}
        ids = formatter.answer(answer["content"], role=follows["role"])
        unknown = np.full(len(ids), np.nan, np.float32)
        segment = len(episode.contexts)
        episode.add(Turn(num_tokens(context), segment, np.array(ids), unknown, np.zeros(len(ids), np.int64)))
        if "content" in follows:
            said = formatter.decode(ids)
            new = formatter.turn_spans(ids, follows["content"], turn, role=follows["role"], said=said)
        else:
            new = [Span(ids, turn, "answer")]
        spans, before, context = [*spans, *new], context, [*context, *new]
        # What comes after the last answer is read by no turn.
        if 2 * turn + 3 < len(spoken) and context != (shown := [*selected(rules, spans, formatter)]):
            episode.end_segment(np.array(ids_of(before)))
            context = shown
        if isinstance(context_rule, RequestingRule) and 2 * turn + 3 < len(spoken) and context_rule.request(context):
            raise TranscriptError(
                f"Behind answer {turn}, the context rule {context_rule!r:.80} asks for what the conversation does not have: give shorter "
                "ones, or another rule."
            )
    episode.rewards = [0.0] * (len(episode.turns) - 1) + [reward]
    reason = StopReason.WON if success else StopReason.LOST
    episode.end(np.array(ids_of(context)), reason, terminated=True, truncated=False, success=success)
    return episode


def read_transcripts(path: Path, formatter: ChatFormatter, context_rule: ContextRule | None = None) -> list[Episode]:
    """The episodes of a file of conversations.

    A record is ``{"messages": [...], "reward": 1.0, "success": true}``, the last two optional; or
    one of the shapes of ShareGPT and TRL (:mod:`torchrl_llm.data.conversations`). Fields that are
    not read are logged.

    Args:
        path: JSON lines, an array of JSON, or a parquet file
            (:mod:`torchrl_llm.envs.record_files`).
        formatter, context_rule: see :func:`episode_from_messages`.

    Raises:
        TranscriptError: the file cannot be read, a record is not such an object, or there is none;
            the message names it.
        OSError: the file cannot be opened.
    """
    episodes: list[Episode] = []
    unread: set[str] = set()
    try:
        for place, record in read_records(path):
            try:
                given = conversation_of(record)
                ending: Any = {"reward": given.reward, "success": given.success, "index": len(episodes)}
                episodes.append(episode_from_messages(given.messages, formatter, context_rule=context_rule, **ending))
                unread |= given.unread
            # The last two: a number of 400 digits, and brackets so deep that they cannot be shown.
            except (ValueError, OverflowError, RecursionError) as error:
                raise TranscriptError(f"{place}: {error}") from error
    except ValueError as error:
        raise error if isinstance(error, TranscriptError) else TranscriptError(str(error)) from error
    if not episodes:
        raise TranscriptError(f"{path} has no line: expected one conversation a line.")
    if unread:
        logger.warning("%s: the fields %s are not read.", path, ", ".join(sorted(map(repr, unread))))
    return episodes


def _without_system(messages: Sequence[Mapping[str, str]], formatter: ChatFormatter) -> Sequence[Mapping[str, str]]:
    if not messages or messages[0]["role"] != "system":
        return messages
    if messages[0]["content"] != formatter.system_prompt:
        raise TranscriptError(
            f"its system message is {messages[0]['content']!r:.80}, and the run's is {formatter.system_prompt!r:.80}: set "
            "system_prompt to it, or leave it out."
        )
    return messages[1:]


def _check_roles(messages: Sequence[Mapping[str, str]]) -> None:
    roles = [message["role"] for message in messages]
    others = [role == "assistant" if i % 2 == 0 else role != "assistant" for i, role in enumerate(roles)]
    if len(roles) < 2 or any(others) or roles[0] != "user" or {*roles} - {"user", "tool", "assistant"}:
        raise TranscriptError(f"its roles are {roles}; expected user and assistant in turns (tool after the first).")


def _check_answers(messages: Sequence[Mapping[str, str]]) -> None:
    for turn, answer in enumerate(messages[1::2]):
        if not answer["content"].strip():
            raise TranscriptError(
                f"its answer in turn {turn} is {answer['content']!r:.80}: to imitate it is to learn to say nothing. Give its text, "
                "or leave the conversation out."
            )
