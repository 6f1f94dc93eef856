"""A word list of one's own for GEM's Wordle, Hangman and WordSearch, which read NLTK's otherwise.

Importing this module imports neither GEM nor NLTK.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import resources
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torchrl_llm.utils.options import ConfigError

SHIPPED = "reasoning_gym"
"""The list that needs no file: reasoning_gym, which GEM brings, ships 150,000 English words of 3 to
10 letters, rare ones too."""

READS_WORDS: dict[str, tuple[int, ...]] = {"HangmanEnv": (3, 5, 7), "WordSearchEnv": (), "WordleEnv": (3, 4, 5)}
"""GEM's classes that take their words from a list, and the lengths that they draw from where none
is given."""


def read_words(word_list: str | Path) -> tuple[str, ...]:
    """The words of a list, in its order, in small letters.

    Args:
        word_list: a text file in UTF-8 with one word a line, or :data:`SHIPPED`. A line with
            anything but the letters a to z is left out, and so is a word that came before.

    Raises:
        ConfigError: there is no such file, it is not a text, or no line is a word.

    Examples:
        >>> len(read_words("reasoning_gym")) > 100_000
        True
    """
    try:
        if word_list == SHIPPED:
            text = resources.files("reasoning_gym.data").joinpath("words3to10.txt").read_text(encoding="utf-8")
        else:
            text = Path(word_list).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, TypeError, ModuleNotFoundError) as error:
        raise ConfigError(
            f"word_list={str(word_list)!r} cannot be read ({error}); expected a text file with one word a line, or {SHIPPED!r}."
        ) from error
    lines = [line.strip().lower() for line in text.splitlines()]
    words = tuple(dict.fromkeys(line for line in lines if line.isascii() and line.isalpha()))
    if not words:
        raise ConfigError(
            f"word_list={str(word_list)!r} has {len(lines)} lines and none is a word of the letters a to z; expected one word a line."
        )
    return words


def check_lengths(words: Sequence[str], name: str, word_length: int | None, word_list: str | Path) -> None:
    """Refuse a list without a word of a length that a game of the class ``name`` may ask for.

    Raises:
        ConfigError: the message names the lengths.
    """
    lengths = {len(word) for word in words}
    needed = READS_WORDS[name] if word_length is None else (word_length,)
    if missing := sorted(set(needed) - lengths):
        raise ConfigError(
            f"word_list={str(word_list)!r} has no word of {' or '.join(map(str, missing))} letters, which {name} asks for; its "
            f"{len(words):,} words have {min(lengths)} to {max(lengths)}. Add some, or give another word_length."
        )


def class_reading(words: Sequence[str], maker: str) -> Callable[..., Any]:
    """One of GEM's classes that takes its words from ``words``, and from nowhere else.

    Args:
        words: for the hard games and the others alike.
        maker: module and name of the class, separated by a colon.
    """
    module_name, _, name = maker.partition(":")
    # The class reads the globals of its module. A copy of the module has its own, so that games
    # with other lists, in other threads too, stay as they are.
    spec = find_spec(module_name)
    assert spec is not None
    assert spec.loader is not None
    module: Any = module_from_spec(spec)
    spec.loader.exec_module(module)
    module.words = SimpleNamespace(words=lambda _: list(words))
    module.nltk = SimpleNamespace(download=lambda _: True)
    return getattr(module, name)
