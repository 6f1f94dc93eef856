"""Which ids end a response: the one rule that policies, environments, scorers and collectors share.

A policy stops at :func:`response_end_ids`, unless ``SamplingConfig.stop_ids`` is set. Collectors pass the policy's ids to the
environment by :func:`share_stop_ids`, so that it leaves out of a response's text exactly the token that ended it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

from jinja2 import TemplateError
from tokenizers import AddedToken

__all__ = ["HasFormatter", "HasStopIds", "response_end_ids", "share_stop_ids"]

_ANSWER = "a0\n0."


def response_end_ids(tokenizer: Any, model_ids: int | Sequence[int] | None = None) -> tuple[int, ...]:
    """The ids that end a response unless a caller names others.

    They are the token with which the chat template closes an assistant's message, the tokenizer's end-of-sequence id,
    and every end token of the model. Some models name their end of text only, and never that of a turn.

    Args:
        tokenizer: a transformers tokenizer.
        model_ids: the ``eos_token_id`` of the model's ``generation_config``: an id, a list of ids, or ``None``.

    Returns:
        The ids, sorted; empty if there is none.

    Examples:
        >>> from torchrl_llm.testing.tokenizers import byte_tokenizer
        >>> response_end_ids(byte_tokenizer(), [0, 2])
        (0, 2)
    """
    named = model_ids if isinstance(model_ids, Sequence) else [model_ids]
    return tuple(sorted({*named, tokenizer.eos_token_id, _turn_end_id(tokenizer)} - {None}))


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
    """Set the stop ids of an environment to those of the policy that acts in it.

    Collectors, evaluations and :meth:`torchrl_llm.envs.GEMEnv.rollout` do so. It is for a loop of one's own, or a stock
    collector of TorchRL, with a policy that stops at ordinary tokens: special tokens are recognized without it.

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
    """The added tokens that control the model: special ones, and those in the form of markup, such as ``<tool_call>``.

    Other added tokens are vocabulary: whitespace runs, words and phrases.
    """
    return {i: token for i, token in tokenizer.added_tokens_decoder.items() if _is_control(token)}


def token_pattern(names: Iterable[str]) -> re.Pattern[str]:
    """A pattern that finds any of these tokens, the longest first; it finds nothing if there are none."""
    # re takes the first alternative that matches, so a token must precede its own prefixes. An empty pattern would
    # match everywhere, (?!) nowhere.
    return re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))) or r"(?!)")


def closing_token(names: Collection[str], rendered: str, answer: str) -> str | None:
    """The first of the control tokens ``names`` behind ``answer`` in a rendered conversation; ``None`` without one."""
    _, found, after = rendered.rpartition(answer)
    match = token_pattern(names).search(after) if found else None
    return None if match is None else match.group()


def _turn_end_id(tokenizer: Any) -> int | None:
    """The id with which the tokenizer's chat template closes an assistant's message; ``None`` if there is none."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": _ANSWER}]
    try:
        rendered = str(tokenizer.apply_chat_template(messages, tokenize=False))
    except (TemplateError, ValueError):  # the formatter reports a broken template; not every policy needs one
        return None
    token = closing_token([str(token) for token in control_tokens(tokenizer).values()], rendered, _ANSWER)
    return None if token is None else int(tokenizer.convert_tokens_to_ids(token))


def _is_control(token: AddedToken) -> bool:
    return token.special or re.fullmatch(r"[<\[].*[>\]]", str(token).strip(), re.DOTALL) is not None
