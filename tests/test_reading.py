"""The order of reading in docs/reading.md: its files, and how much of them there is to read."""

import re
from pathlib import Path

from test_structure import code_lines

ROOT = Path(__file__).parents[1]
ROW = re.compile(r"^\| (?:`([\w/.]+)`|together) \| (\d+) \| (\d+) \|", re.MULTILINE)


def test_the_files_are_as_long_as_the_page_says():
    """Within a tenth, so that not every change of a file is one of the page."""
    *rows, (_, lines, code) = ROW.findall((ROOT / "docs" / "reading.md").read_text())
    texts = {path: (ROOT / path).read_text() for path, *_ in rows}
    found = {path: (len(text.splitlines()), len(code_lines(text))) for path, text in texts.items()}
    wrong = [
        f"{path}: {shown} lines are written, {counted} are there"
        for path, *written in rows
        for shown, counted in zip(map(int, written), found[path], strict=True)
        if abs(shown - counted) > max(5, counted / 10)
    ]
    assert not wrong, "\n".join(wrong)
    assert (int(lines), int(code)) == tuple(sum(int(row[i]) for row in rows) for i in (1, 2))
    assert len(rows) <= 19
    total = [sum(each) for each in zip(*found.values(), strict=True)]
    assert total[0] <= LINES, f"{total[0]} lines: split a file by what an update needs of it"
    assert total[1] <= CODE, f"{total[1]} lines of code: split a file by what an update needs of it"


LINES, CODE = 2_900, 1_460
