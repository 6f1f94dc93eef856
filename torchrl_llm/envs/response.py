"""What a policy said, as environments and reward functions get it: :class:`Response`."""

from __future__ import annotations

from typing import Any, Self

import torch
import yaml

Pair = tuple[str, str]
"""An opening and a closing marker, such as ``("<think>", "</think>")``."""

THINKING: Pair = ("<think>", "</think>")


class Response(str):
    """The text of a response: the string that it is, with the answer apart from the thinking beside
    it.

    As a string it is the whole response, without the token that ended it. It begins with the
    thought that the chat template opened for the assistant, if it did (``<think>\\n``), so that a
    rule about ``<think>...</think>`` sees both tags. It compares, slices, and is written to JSON
    and YAML as any string; parts of it are plain strings. Pickles and copies keep both, and
    ``torch.load(weights_only=True)`` reads them where this package is imported.

    Text environments, reward functions and games get it. Of one made by hand, ``text`` is the whole
    text unless it is given.

    Attributes:
        text: the answer: what stands behind the thinking, without white space before it. The whole
            text where there is no thinking; empty while the thought is not closed.

    Examples:
        >>> response = Response("<think>\\nEasy.\\n</think>\\n\\n4", text="4")
        >>> response.startswith("<think>"), response.text, response == "<think>\\nEasy.\\n</think>\\n\\n4"
        (True, '4', True)
        >>> Response("4").text
        '4'
    """

    __slots__ = ("text",)

    text: str

    def __new__(cls, whole: str = "", *, text: str | None = None) -> Self:
        made = super().__new__(cls, whole)
        # str() of a response, for itself, would be a response.
        made.text = str.__str__(made) if text is None else text
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return _response, (str.__str__(self), self.text)


def _response(whole: str, text: str) -> Response:
    return Response(whole, text=text)


# They refuse every subclass of str that they are not told of.
torch.serialization.add_safe_globals([_response])
# the last two are missing where PyYAML has no C
for _dumper in ("SafeDumper", "Dumper", "CSafeDumper", "CDumper"):
    if hasattr(yaml, _dumper):
        getattr(yaml, _dumper).add_representer(Response, lambda dumper, text: dumper.represent_str(str.__str__(text)))


def text_behind_thinking(response: str, markers: Pair = THINKING, *, opened: bool = False) -> str:
    """What stands behind the thinking with which a response begins: :attr:`Response.text`.

    Args:
        response: the response.
        markers: they enclose thinking.
        opened: the response begins within a thought, whose opening marker is not a part of it.

    Examples:
        >>> text_behind_thinking("<think>\\n5 or 7?\\n</think>\\n\\n5"), text_behind_thinking("5 </think>")
        ('5', '5 </think>')
        >>> text_behind_thinking("<think>\\n5 or"), text_behind_thinking("5?</think> 5", opened=True)
        ('', '5')
    """
    opening, closing = markers
    if not opened and not response.lstrip().startswith(opening):
        return response
    return response.partition(closing)[2].lstrip()
