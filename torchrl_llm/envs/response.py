"""What a policy said, as environments and reward functions get it: :class:`Response`."""

from __future__ import annotations

from typing import Any, Self

import torch
import yaml

from torchrl_llm.envs.tool_calls import BadCall, ToolCall

Pair = tuple[str, str]
"""An opening and a closing marker, such as ``("<think>", "</think>")``."""

THINKING: Pair = ("<think>", "</think>")


class Response(str):
    """The text of a response: the string that it is, with the thinking and the answer beside it.

    As a string it is the whole response, without the token that ended it. It begins with the
    thought that the chat template opened for the assistant, if it did (``<think>\\n``), so that a
    rule about ``<think>...</think>`` sees both tags. It compares, slices, and is written to JSON
    and YAML as any string; parts of it are plain strings. Pickles and copies keep both, and
    ``torch.load(weights_only=True)`` reads them where this package is imported.

    Text environments, reward functions and games get it. Of one made by hand, ``text`` is the whole
    text and ``thinking`` is empty, unless they are given.

    Attributes:
        text: the answer: what stands behind the thinking, without white space before it. The whole
            text where there is no thinking; empty while the thought is not closed.
        thinking: what was thought before it, without its markers and the white space around it;
            of a thought that is not closed, all that there is.
        calls: of tools, in the answer; none unless the environment has tools.

    Examples:
        >>> response = Response("<think>\\nEasy.\\n</think>\\n\\n4", text="4", thinking="Easy.")
        >>> response.startswith("<think>"), response.text, response.thinking
        (True, '4', 'Easy.')
        >>> Response("4").text
        '4'
    """

    __slots__ = ("calls", "text", "thinking")

    text: str
    thinking: str
    calls: tuple[ToolCall | BadCall, ...]

    def __new__(
        cls,
        whole: str = "",
        *,
        text: str | None = None,
        thinking: str = "",
        calls: tuple[ToolCall | BadCall, ...] = (),
    ) -> Self:
        made = super().__new__(cls, whole)
        # str() of a response, for itself, would be a response.
        made.text = str.__str__(made) if text is None else text
        made.thinking, made.calls = thinking, calls
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return _response, (str.__str__(self), self.text, self.thinking, self.calls)


# Pickles of earlier versions have less.
def _response(whole: str, text: str, thinking: str = "", calls: tuple[ToolCall | BadCall, ...] = ()) -> Response:
    return Response(whole, text=text, thinking=thinking, calls=calls)


# They refuse every subclass of str that they are not told of.
torch.serialization.add_safe_globals([_response, ToolCall, BadCall])
# the last two are missing where PyYAML has no C
for _dumper in ("SafeDumper", "Dumper", "CSafeDumper", "CDumper"):
    if hasattr(yaml, _dumper):
        getattr(yaml, _dumper).add_representer(Response, lambda dumper, text: dumper.represent_str(str.__str__(text)))


def split_thinking(response: str, markers: Pair = THINKING, *, opened: bool = False) -> tuple[str, str]:
    """The thinking with which a response begins, and what stands behind it:
    :attr:`Response.thinking` and :attr:`Response.text`.

    Args:
        response: the response.
        markers: they enclose thinking.
        opened: the response begins within a thought, with its opening marker or without it.

    Examples:
        >>> split_thinking("<think>\\n5 or 7?\\n</think>\\n\\n5"), split_thinking("5 </think>")
        (('5 or 7?', '5'), ('', '5 </think>'))
        >>> split_thinking("<think>\\n5 or"), split_thinking("5?</think> 5", opened=True)
        (('5 or', ''), ('5?', '5'))
    """
    opening, closing = markers
    begun = response.lstrip()
    if not opened and not begun.startswith(opening):
        return "", response
    thinking, _, text = begun.removeprefix(opening).partition(closing)
    return thinking.strip(), text.lstrip()
