"""The text of single tokens: :class:`TokenTexts`, and :func:`join_pieces`, which puts characters of
several tokens together."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING

from transformers.convert_slow_tokenizer import bytes_to_unicode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TokenTexts:
    """The text of each token of a tokenizer, kept once it is known.

    A token may be a part of a character: bytes that are not text alone are lone surrogates
    (``errors="surrogateescape"``), which JSON keeps, and :func:`join_pieces` puts together.

    Args:
        tokenizer: of the model; byte-level, or with byte fallback (``<0xE2>``).
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def of(self, ids: Iterable[int]) -> dict[int, str]:
        """The text of each of these tokens."""
        return {each: self._text(each) for each in ids}

    def _text(self, token: int) -> str:
        if token not in self._known:
            self._known[token] = self._decode(token)
        return self._known[token]

    def _decode(self, token: int) -> str:
        text, name = str(self.tokenizer.decode([token])), self.tokenizer.convert_ids_to_tokens(token)
        if name is None:  # beyond the tokenizer's vocabulary, which a model's may exceed
            return text
        if name.startswith("<0x") and name.endswith(">") and len(name) == 6:
            return _escaped(bytes([int(name[3:5], 16)]))
        if "\ufffd" in text and all(each in _byte_of() for each in name):
            return _escaped(bytes(_byte_of()[each] for each in name))
        # SentencePiece drops the space at the beginning of a text, and a token alone is one.
        return f" {text}" if name.startswith("\u2581") and not text.startswith(" ") else text


_NO_BYTE = re.compile("[\ud800-\udc7f\udd00-\udfff]")


@cache
def _byte_of() -> dict[str, int]:
    """The byte that each character of a byte-level token stands for."""
    return {character: byte for byte, character in bytes_to_unicode().items()}


def _escaped(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def join_pieces(pieces: Sequence[str]) -> list[str]:
    """The pieces with characters put together: one of several tokens stands at the last of them.

    Bytes that are not a character with those after them become the replacement character.

    Examples:
        >>> join_pieces(["a", "\\udcc3", "\\udca9", "b"])
        ['a', '', 'é', 'b']
        >>> join_pieces(["\\udcc3", "b"])
        ['', '\\ufffdb']
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    last = len(pieces) - 1
    # Other surrogates are not bytes: no tokenizer writes them, and a stranger's file may hold them.
    known = [_NO_BYTE.sub("\ufffd", piece).encode("utf-8", "surrogateescape") for piece in pieces]
    return [decoder.decode(piece, i == last) for i, piece in enumerate(known)]
