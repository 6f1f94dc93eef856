"""The walks that docs/design.md shows are those that tests/walks.py counts."""

import re
from pathlib import Path

import pytest
import walks

PAGE = (Path(__file__).parents[1] / "docs" / "design.md").read_text()
TABLE = re.findall(r"^\| (?:`build_run\(config\)`|one reward), now \|(.*)\|$", PAGE, re.MULTILINE)


@pytest.fixture(scope="module")
def found():
    return walks.walks()


@pytest.mark.slow
def test_the_walk_of_a_reward_is_the_one_that_is_shown(found):
    shown = re.search(r"^a reward:\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)[1]
    picture = walks.picture(*found).partition("a reward:\n")[2]
    assert shown == f"{picture}\n", "docs/design.md: write there what `python tests/walks.py` prints"
    files, _, changes = (cell.strip() for cell in TABLE[1].split("|"))
    assert (int(files), int(changes)) == walks.counts(*found)[2:]


@pytest.mark.slow
def test_the_walk_of_build_run_is_about_as_long_as_is_written(found):
    """About: what is cached since another test is not entered again."""
    written = [int(cell) for cell in TABLE[0].split("|") if cell.strip()]
    assert written == pytest.approx(walks.counts(*found)[:2], rel=0.15)


def test_a_form_is_seen_in_containers_and_at_any_place():
    inner = walks.torch.tensor([[0.0, walks.REWARD], [1.0, 2.0], [0.0, 0.0]])
    assert [*walks.forms({"x": [inner, 1.0]})] == ["Tensor [N, T]"]
    assert [*walks.forms(([walks.REWARD], 0.5))] == ["list: float"]
    assert not [*walks.forms((0.5, True, "text", inner + 1e-3, walks.torch.empty(0)))]
