"""The words of the package, its pages and its examples are the field's, in American spelling."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

OLD = {
    r"tickets?": "task (TaskSpec, TaskSampler)",
    r"ledgers?": "EpisodeQueue",
    r"torn": "incomplete group",
    r"vacat\w+": "release",
    r"canar(y|ies)": "parity check",
    r"at_hand": "LOCAL_PARAMETERS",
    r"silenced": "zero-weight rows",
    r"pupils?": "student model",
    r"lessons?": "examples",
    r"farewells?": "messages",
    r"whoever": "the caller",
    r"anew": "again",
    r"(slot|ray)players?": "RolloutExecutor, RayExecutor",
    r"here lives?": "a verb that says what it does",
    r"behaviours?": "behavior",
    r"(normal|initial|optim|token|serial|recogn|organ|quant|summar|minim|maxim)is(e|ed|es|er|ers|ing|ation)": "-ize",
    r"colours?": "color",
    r"favours?": "favor",
    r"neighbours?": "neighbor",
}
"""Pattern of a word, whatever its case -> what to say instead."""

WORD = re.compile("|".join(rf"(?<![A-Za-z])(?:{pattern})(?![A-Za-z])" for pattern in OLD), re.I)


def old_words(text: str) -> list[str]:
    """Each use of an old word, with its line."""
    lines = enumerate(text.splitlines(), 1)
    return [f"{number}: {match[0]!r} in {line.strip():.100}" for number, line in lines for match in WORD.finditer(line)]


def pages() -> list[Path]:
    patterns = (
        "README.md",
        "torchrl_llm/**/*.py",
        "examples/**/*.py",
        "examples/**/*.md",
        "examples/**/*.yaml",
        "docs/*.md",
        "docs/recipes/*.md",
    )
    return sorted(path for pattern in patterns for path in ROOT.glob(pattern))


def test_no_page_and_no_module_has_an_old_word():
    found = [f"{path.relative_to(ROOT)}:{use}" for path in pages() for use in old_words(path.read_text())]
    assert not found, "\n".join([*found, *(f"{pattern}: say {new}" for pattern, new in OLD.items())])


@pytest.mark.parametrize(
    "word", ["ticket", "Tickets", "_CANARY_LENGTH", "torn", "AT_HAND", "SlotPlayer", "normalised", "anew"]
)
def test_an_old_word_is_found(word):
    (use,) = old_words(f"x = 1\n# the {word}, say\n")
    assert use.startswith("2: ")


@pytest.mark.parametrize("word", ["tornado", "renewed", "canonical", "exercise", "precise", "normalize", "optimistic"])
def test_another_word_is_none(word):
    assert not old_words(word)
