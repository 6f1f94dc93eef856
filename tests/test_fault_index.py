"""``INDEX.md``: every fault has a row, and the tests that it names are there."""

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
ROWS = re.findall(r"^\| (\d\.\d+) \| (.+) \| (.+) \| `(\w{7,})` \|$", (TESTS / "INDEX.md").read_text(), re.M)


NUMBERS = {1: 10, 2: 17, 3: 6, 4: 4, 5: 9, 6: 5, 7: 10}
"""Faults of each subject."""


def test_every_fault_has_a_row():
    wanted = [f"{subject}.{number}" for subject, count in NUMBERS.items() for number in range(1, count + 1)]
    assert list(dict.fromkeys(row[0] for row in ROWS)) == wanted


def test_every_line_of_the_table_is_a_row():
    lines = [line for line in (TESTS / "INDEX.md").read_text().splitlines() if re.match(r"\| \d", line)]
    assert len(lines) == len(ROWS), "a row is: | 1.1 | what was wrong | `file.py::Class::test` | `efd5924` |"


@pytest.mark.parametrize(("number", "tests"), [(row[0], row[2]) for row in ROWS], ids=[row[0] for row in ROWS])
def test_the_tests_of_a_row_are_there(number, tests):
    named = re.findall(r"`([\w/]+\.py)((?:::\w+)*)`", tests)
    assert named, f"{number} names no test"
    for path, inside in named:
        text = (TESTS / path).read_text()
        for name in inside.split("::")[1:]:
            assert re.search(rf"\b(class|def) {name}\b", text), f"{number}: {path}::{name}"
