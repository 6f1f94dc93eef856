"""Messages of files as people have them, as mappings of role and content:
:func:`plain_messages`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

_ROLES = {
    "human": "user",
    **dict.fromkeys(("gpt", "chatgpt", "model", "bot"), "assistant"),
    **dict.fromkeys(("observation", "function"), "tool"),
    "developer": "system",
}
"""Names of roles in files of ShareGPT, LLaMA-Factory, Gemini and OpenAI."""

_ALIKE = "answers of one conversation count alike: leave the conversation out, or end it before the answer"

_MEANS_SOMETHING = {
    **dict.fromkeys(
        ("tool_calls", "function_call"),
        "calls of tools are read from the text of an answer: write the call into content as the model writes it",
    ),
    **dict.fromkeys(
        ("reasoning_content", "reasoning", "thinking"),
        "thinking is part of an answer: write it into content as the model writes it, such as <think>...</think>",
    ),
    **dict.fromkeys(("image", "images", "audio", "video"), "a message is text alone"),
}
"""Fields of messages that cannot be left out without a change of what is said or learned, and what
to do."""

_LEARNED = {"weight": True, "train": True, "training": True, "loss": True, "mask": False}
"""Fields that say whether an answer is learned, and their value where it is."""


class Messages(NamedTuple):
    """Messages of role and content.

    Attributes:
        messages: mappings with ``"role"`` and ``"content"`` alone.
        unread: the names of the fields that are left out.
    """

    messages: list[dict[str, str]]
    unread: set[str]


def plain_messages(given: Any) -> Messages:
    """A list of messages as mappings of role and content.

    Args:
        given: messages with ``"role"`` and ``"content"``, or with ``"from"`` and ``"value"``
            (ShareGPT). Content may be a list of parts of text. Other fields are left out, unless
            they change what is said.

    Raises:
        ValueError: it is not a list of messages, or one holds what cannot be written as its text.

    Examples:
        >>> plain_messages([{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}]).messages
        [{'role': 'user', 'content': '2 + 2?'}, {'role': 'assistant', 'content': '4'}]
    """
    if isinstance(given, str):
        raise ValueError(f"{given!r:.80} is text; expected a list of messages (json.loads reads one from its text).")
    if not is_list(given):
        raise ValueError(f"{given!r:.80} is not a list of messages.")
    read = [_plain_message(each) for each in given]
    return Messages([message for message, _ in read], set().union(*(unread for _, unread in read)))


def is_list(value: Any) -> bool:
    """Whether a value is a list, as JSON, Arrow and pandas give them."""
    return isinstance(value, list | tuple | np.ndarray)


def is_empty(value: Any) -> bool:
    """Whether a field says nothing: ``None``, or a text or a list of nothing."""
    if isinstance(value, str):
        return value.strip() in ("", "[]", "{}", "null")
    return value is None or ((is_list(value) or isinstance(value, Mapping)) and len(value) == 0)


def _plain_message(given: Any) -> tuple[dict[str, str], set[str]]:
    if not isinstance(given, Mapping):
        raise ValueError(f"{given!r:.80} is not a message; expected texts as role and content.")
    names = ("from", "value") if "from" in given and "role" not in given else ("role", "content")
    # A table gives every message the fields that one of them has.
    others = {name: value for name, value in given.items() if name not in names and not is_empty(value)}
    for name, why in _MEANS_SOMETHING.items():
        if name in others:
            raise ValueError(f"{given!r:.80} has {name}, and {why}.")
    role, content = given.get(names[0]), _text(given.get(names[1]))
    if not isinstance(role, str) or not isinstance(content, str):
        parts = "; of a list of parts only text is read" if is_list(content) else ""
        raise ValueError(f"{given!r:.80} is not a message; expected texts as {names[0]} and {names[1]}{parts}.")
    if role == "function_call":
        raise ValueError(f"{given!r:.80} has the role {role}, and {_MEANS_SOMETHING[role]}.")
    role = _ROLES.get(role, role)
    for name in sorted(_LEARNED.keys() & others.keys()) if role == "assistant" else ():
        if others[name] != _LEARNED[name]:
            raise ValueError(f"{given!r:.80} has {name}, and {_ALIKE}.")
    return {"role": role, "content": content}, {*others} - _LEARNED.keys()


def _text(content: Any) -> Any:
    """The text of a content that is a list of parts of text; another content as it is."""
    if not is_list(content):
        return content
    texts = [part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None for part in content]
    known = [text for text in texts if isinstance(text, str)]
    return "".join(known) if texts and len(known) == len(texts) else content
