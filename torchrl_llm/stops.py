"""Which ids end a response: the one rule that policies, environments, scorers and collectors share.

A policy stops at :func:`response_end_ids`, unless ``SamplingConfig.stop_ids`` is set. Collectors
pass the policy's ids to the environment by :func:`share_stop_ids`, so that it leaves out of a
response's text exactly the token that ended it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol, get_args, runtime_checkable

from tokenizers import AddedToken

from torchrl_llm.rendering import ChatTemplateError, Message, Renderer, Role

__all__ = ["HasFormatter", "HasStopIds", "answer_end", "response_end_ids", "share_stop_ids"]

_QUESTION, _ANSWER, _REPLY = "q0\n0.", "a0\n0.", "q1\n1."


def response_end_ids(
    tokenizer: Any,
    model_ids: int | Sequence[int] | None = None,
    *,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> tuple[int, ...]:
    """The ids that end a response unless a caller names others.

    They are the tokens with which the chat template closes an assistant's message
    (:func:`answer_end`), the tokenizer's end-of-sequence id, and every end token of the model. Some
    models name their end of text only, and never the end of a turn.

    Args:
        tokenizer: a transformers tokenizer.
        model_ids: the ``eos_token_id`` of the model's ``generation_config``: an id, a list of ids,
            or ``None``.
        chat_template_kwargs: passed on to the template, which may end answers in another way for
            them.

    Returns:
        The ids, sorted; empty if there is none.

    Examples:
        >>> from torchrl_llm.testing.tokenizers import byte_tokenizer
        >>> response_end_ids(byte_tokenizer(), [0, 2])
        (0, 2)
    """
    return tuple(sorted(end_tokens(tokenizer, model_ids) | _template_ends(tokenizer, chat_template_kwargs or {})))


def end_tokens(tokenizer: Any, model_ids: int | Sequence[int] | None = None) -> set[int]:
    """The end tokens of a tokenizer and its model, whatever the chat template ends answers with;
    arguments as in :func:`response_end_ids`."""
    named = model_ids if isinstance(model_ids, Sequence) else [model_ids]
    return {*named, tokenizer.eos_token_id} - {None}


class HasFormatter(Protocol):
    """An environment whose formatter leaves the token that ended a response out of its text."""

    formatter: Any


@runtime_checkable
class HasStopIds(Protocol):
    """A policy that knows which ids end its responses; ``None``: it does not say."""

    @property
    def stop_ids(self) -> Sequence[int] | None:
        """The ids."""


def share_stop_ids(env: HasFormatter, policy: HasStopIds) -> None:
    """Set the stop ids of an environment to the ids of the policy that acts in it.

    Collectors, evaluations and :meth:`torchrl_llm.envs.GEMEnv.rollout` do so. It is for a loop of
    one's own, or a stock collector of TorchRL, with a policy that stops at ordinary tokens: special
    tokens are recognized without it.

    Args:
        env: an environment with a ``formatter``.
        policy: one with ``stop_ids``; where they are ``None`` nothing changes.

    Raises:
        AttributeError: one of the two has no such attribute.
    """
    ids = policy.stop_ids
    if ids is not None:
        env.formatter.stop_ids = tuple(ids)


def control_tokens(tokenizer: Any) -> dict[int, AddedToken]:
    """The added tokens that control the model: special ones, and those in the form of markup, such
    as ``<tool_call>``.

    Other added tokens are vocabulary: whitespace runs, words and phrases.
    """
    return {i: token for i, token in tokenizer.added_tokens_decoder.items() if _is_control(token)}


def token_pattern(names: Iterable[str]) -> re.Pattern[str]:
    """A pattern that finds any of these tokens, the longest first; it finds nothing if there are
    none."""
    # re takes the first alternative that matches, so a token must precede its own prefixes. An
    # empty pattern would match everywhere, (?!) nowhere.
    return re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))) or r"(?!)")


def answer_end(names: Collection[str], last: str, followed: str, answer: str, message: str) -> str | None:
    """The control token that ends an answer, from two renderings of a conversation.

    Most templates write it right behind the answer. Some write it with the next message only, or
    end an answer by the token that opens the next message: then it may be another one for each role
    of that message.

    Args:
        names: the control tokens.
        last: the conversation up to the answer.
        followed: the conversation with a message behind the answer.
        answer: the answer's text.
        message: the message's text.

    Returns:
        The first control token behind the last answer, if there is one; else the one that stands
        between the answer and the message, with nothing but white space before it. ``None``: the
        template ends answers by text.
    """
    tokens = token_pattern(names)
    match = tokens.search(last.rpartition(answer)[2]) if answer in last else None
    if match is None:
        between = followed.rpartition(message)[0].rpartition(answer)[2] if answer in followed else ""
        match = tokens.match(between.lstrip())
    return None if match is None else match.group()


def _template_ends(tokenizer: Any, chat_template_kwargs: Mapping[str, Any]) -> set[int]:
    """The ids with which the tokenizer's chat template closes an assistant's message, before a
    message of any role."""
    names = [str(token) for token in control_tokens(tokenizer).values()]
    asked, answered = Message("user", _QUESTION), Message("assistant", _ANSWER)
    ends = set()
    for role in get_args(Role):
        try:
            render = Renderer(tokenizer, chat_template_kwargs=chat_template_kwargs)
            last, followed = render([asked, answered], prompt=False), render([asked, answered, Message(role, _REPLY)])
        # the formatter reports a broken template; not every policy needs one
        except ChatTemplateError:
            continue
        ends.add(answer_end(names, last, followed, _ANSWER, _REPLY))
    return {int(tokenizer.convert_tokens_to_ids(token)) for token in ends if token is not None}


def _is_control(token: AddedToken) -> bool:
    return token.special or re.fullmatch(r"[<\[].*[>\]]", str(token).strip(), re.DOTALL) is not None
