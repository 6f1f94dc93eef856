"""Records of files of demonstrations, in the shapes that people have them:
:func:`conversation_of`."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, NamedTuple

from torchrl_llm.envs.messages import is_empty, is_list, plain_messages
from torchrl_llm.episode import LARGEST_REWARD, is_reward

_REFUSED = {
    "rejected": "pairs of answers are for DPO, which is not here: give the conversation with the better answer as messages",
    **dict.fromkeys(
        ("tools", "available_tools", "functions"),
        "no tools are shown to the model: write what they are into the first message, or leave the field out",
    ),
    **dict.fromkeys(
        ("image", "images", "video", "videos", "audio", "audios"),
        "a message is text alone: leave the conversation out",
    ),
}
"""Fields of records that cannot be left out without a change of what is learned, and what to do."""

_PREFERENCES = ("label", "kto_tag")
"""Whether the answer of a record is one to imitate (TRL's and LLaMA-Factory's unpaired
preferences)."""

_SHAPE = '{"messages": [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}]}'

_OTHERS = {
    "instruction": f"Alpaca's fields: write instruction and input as the user's message and output as the assistant's, {_SHAPE}",
    "data": f"a list of texts: write them in turns, {_SHAPE}",
    "text": f"one text: write who says what, {_SHAPE}",
    "question": f"questions with answers: write them as messages, {_SHAPE}",
    "prompt": f"a prompt without a list of messages: write it and its answer as messages, {_SHAPE}",
}
"""Records without messages, by a field that they have, and how to write them."""


class Conversation(NamedTuple):
    """Messages and how they ended.

    Attributes:
        messages: of role and content.
        reward, success: of the episode.
        unread: the names of the fields that are left out.
    """

    messages: list[dict[str, str]]
    reward: float
    success: bool
    unread: set[str]


def conversation_of(record: Any) -> Conversation:
    """The messages of a record.

    Args:
        record: it has ``"messages"``, ``"conversations"`` and perhaps ``"system"`` (ShareGPT), or
            lists of messages as ``"prompt"`` and ``"completion"`` (TRL); and perhaps ``"reward"``
            and ``"success"``. Other fields are left out, unless they change what is learned.

    Raises:
        ValueError: it is something else; the message says what to write instead.

    Examples:
        >>> record = {"id": 7, "conversations": [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}]}
        >>> conversation_of(record)[1:]
        (0.0, False, {'id'})
    """
    if not isinstance(record, Mapping):
        raise ValueError(
            f"found {type(record).__name__}; expected an object with messages, and perhaps reward and success."
        )
    # A table has all columns in every row.
    read = ("messages", "reward", "success")
    given = {
        name: value for name, value in record.items() if not ((is_empty(value) and name not in read) or value is None)
    }
    for name, why in _REFUSED.items():
        if name in given:
            raise ValueError(f"it has {name}, and {why}.")
    for name in _PREFERENCES:
        if given.get(name) is False:
            raise ValueError(
                f"it has {name}: false, so that its answer is not one to imitate: leave the conversation out."
            )
    listed, used = _listed(given)
    messages, unread = plain_messages(listed)
    others = given.keys() - used - {"reward", "success"}
    for name in sorted(others):
        # A reward that is left out would be 0.
        if near := get_close_matches(name.lower(), ["reward", "success"], n=1, cutoff=0.8):
            raise ValueError(f"it has {name}, which is not a field. Did you mean {near[0]!r}?")
    return Conversation(messages, *_ending(given), unread | (others - {*_PREFERENCES}))


def _listed(given: Mapping[str, Any]) -> tuple[Any, set[str]]:
    """The messages of a record, as they are, and the fields that hold them."""
    system = [name for name in ("system", "system_prompt") if name in given]
    first = [{"role": "system", "content": given[name]} for name in system]
    for name in ("messages", "conversations"):
        if name in given:
            return ([*first, *given[name]] if is_list(given[name]) else given[name]), {name, *system}
    prompt, completion = given.get("prompt"), given.get("completion")
    if prompt is not None and is_list(prompt) and completion is not None:
        said = completion if is_list(completion) else [{"role": "assistant", "content": completion}]
        return [*first, *prompt, *said], {"prompt", "completion", *system}
    what = next((f"That looks like {what}" for name, what in _OTHERS.items() if name in given), f"Write it as {_SHAPE}")
    raise ValueError(
        f"found {sorted(given)}; expected an object with messages, and perhaps reward and success. {what}."
    )


def _ending(given: Mapping[str, Any]) -> tuple[float, bool]:
    reward, success = given.get("reward", 0.0), given.get("success", False)
    if type(reward) not in (int, float) or not is_reward(reward) or type(success) is not bool:
        raise ValueError(
            f"found {reward!r:.80} as reward and {success!r:.80} as success; expected a number of at most {LARGEST_REWARD:g} "
            "in size as reward and true or false as success."
        )
    return reward, success
