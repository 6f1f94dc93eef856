"""Episodes from conversations that somebody wrote: :func:`episode_from_messages`, :func:`read_transcripts`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from torchrl_llm.envs.chat import ChatFormatter
from torchrl_llm.episode import LARGEST_REWARD, Episode, Turn, is_reward
from torchrl_llm.keys import StopReason

_FIELDS, _PARTS = {"messages", "reward", "success"}, {"role", "content"}


class TranscriptError(ValueError):
    """A conversation that cannot be imitated."""


def episode_from_messages(
    messages: Sequence[Mapping[str, str]],
    formatter: ChatFormatter,
    *,
    reward: float = 0.0,
    success: bool = False,
    index: int = 0,
) -> Episode:
    """A conversation as an episode whose turns are the assistant's messages, rendered as contexts of environments are.

    The log-probs are ``nan``: nobody sampled them.

    Args:
        messages: dictionaries with ``"role"`` and ``"content"``: perhaps a system message, which must be the formatter's, then
            ``"user"`` (or ``"tool"``) and ``"assistant"`` in turns, the assistant last or a closing message after it.
        formatter: renders them.
        reward: of the last turn, the others get 0.
        success: whether the episode ended in success.
        index: its ids.

    Raises:
        TranscriptError: the roles are others, the system message is not the formatter's, or an answer is empty.

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
    context = formatter.start(spoken[0]["content"])
    for i in range(1, len(spoken), 2):
        follows = spoken[i + 1]["role"] if i + 1 < len(spoken) else "user"
        ids = formatter.answer(spoken[i]["content"], role=follows)  # type: ignore[arg-type]
        unknown = np.full(len(ids), np.nan, np.float32)
        episode.add(Turn(len(context), 0, np.array(ids), unknown, np.zeros(len(ids), np.int64)))
        context = (*context, *ids)
        if i + 1 < len(spoken):
            context = (*context, *formatter.feedback(ids, spoken[i + 1]["content"], role=follows))  # type: ignore[arg-type]
    episode.rewards = [0.0] * (len(episode.turns) - 1) + [reward]
    reason = StopReason.WON if success else StopReason.LOST
    episode.end(np.array(context), reason, terminated=True, truncated=False, success=success)
    return episode


def read_transcripts(path: Path, formatter: ChatFormatter) -> list[Episode]:
    """The episodes of a file of JSON lines: ``{"messages": [...], "reward": 1.0, "success": true}``, the last two optional.

    Args:
        path: the file; empty lines are skipped.
        formatter: see :func:`episode_from_messages`.

    Raises:
        TranscriptError: a line is no such object, or there is none; the message names it.
        OSError: the file cannot be read.
    """
    episodes: list[Episode] = []
    with path.open("rb") as lines:  # so that bytes that are no text have a line too
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    given = _checked(json.loads(line.decode("utf-8-sig")))
                    episodes.append(episode_from_messages(formatter=formatter, index=len(episodes), **given))
                # The last two: a number of 400 digits, brackets 100,000 deep.
                except (ValueError, OverflowError, RecursionError) as error:
                    raise TranscriptError(f"{path}, line {number}: {error}") from error
    if not episodes:
        raise TranscriptError(f"{path} has no line: expected one conversation a line.")
    return episodes


def _checked(given: Any) -> dict[str, Any]:
    """An object of a file of conversations, whose fields have the right types."""
    if not isinstance(given, dict) or "messages" not in given or given.keys() - _FIELDS:
        shown = sorted(given) if isinstance(given, dict) else type(given).__name__
        raise TranscriptError(f"found {shown}; expected an object with messages, and perhaps reward and success.")
    messages = given["messages"]
    for message in messages if isinstance(messages, list) else [messages]:
        if not isinstance(message, dict) or message.keys() != _PARTS or {*map(type, message.values())} != {str}:
            raise TranscriptError(
                f"{message!r:.80} is no message; expected texts as role and content, and nothing else."
            )
    reward, success = given.get("reward", 0.0), given.get("success", False)
    if type(reward) not in (int, float) or not is_reward(reward) or type(success) is not bool:
        raise TranscriptError(
            f"found {reward!r:.80} as reward and {success!r:.80} as success; expected a number of at most {LARGEST_REWARD:g} "
            "in size as reward and true or false as success."
        )
    return given


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
