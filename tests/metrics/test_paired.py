"""Paired comparison: against the p-values of SciPy, and what is compared with what."""

import json
import re
from dataclasses import replace

import pytest

from torchrl_llm.metrics import Evaluation, PairedComparison, mcnemar_p_value, paired_comparison
from torchrl_llm.runs.outputs import comparison_table, write_json

BEFORE = Evaluation(
    episodes=6,
    success=0.5,
    success_ci95=(0.19, 0.81),
    reward=0.5,
    turns=2.0,
    response_length=8.0,
    penalized=0.25,
    tasks=6,
    outcomes="001110",
    task_digest="1f",
    beginnings="0000aaaa" * 6,
)
AFTER = replace(BEFORE, success=4 / 6, outcomes="111100")


class TestMcNemar:
    # scipy.stats.binomtest of SciPy 1.17, here and below.
    @pytest.mark.parametrize(
        ("gained", "lost", "rounded"),
        [(1, 7, "0.0703"), (6, 16, "0.0525"), (2, 9, "0.06543"), (150, 86, "3.716e-05")],
    )
    def test_rounded_values(self, gained, lost, rounded):
        digits = len(rounded.split("e")[0].removeprefix("0.").replace(".", "").lstrip("0"))
        for pair in ((gained, lost), (lost, gained)):
            assert float(f"{mcnemar_p_value(*pair):.{digits - 1}e}") == float(rounded)

    @pytest.mark.parametrize(
        ("gained", "lost", "expected"), [(98, 12, 6.156273065927667e-18), (40, 23, 0.04295654552438921), (0, 5, 0.0625)]
    )
    def test_against_scipy(self, gained, lost, expected):
        assert mcnemar_p_value(gained, lost) == pytest.approx(expected, rel=1e-12)

    @pytest.mark.parametrize("count", [0, 1, 7, 2000])
    def test_as_many_in_each_direction_is_no_change(self, count):
        assert mcnemar_p_value(count, count) == 1.0

    def test_very_small(self):
        assert mcnemar_p_value(1000, 0) == 2.0**-999
        everything = PairedComparison(episodes=5000, gained=5000, lost=0, p_value=mcnemar_p_value(5000, 0))
        assert str(everything) == "of 5000 episodes 5000 gained, 0 lost (McNemar p < 1e-300)"

    def test_wrong_counts(self):
        with pytest.raises(ValueError, match="-1 gained and 2 lost; expected counts >= 0"):
            mcnemar_p_value(-1, 2)


class TestComparison:
    def test_episode_by_episode(self):
        found = paired_comparison(BEFORE, AFTER)
        assert found == PairedComparison(episodes=6, gained=2, lost=1, p_value=1.0)
        assert (found.gained - found.lost) / found.episodes == pytest.approx(AFTER.success - BEFORE.success)
        assert paired_comparison(AFTER, BEFORE) == replace(found, gained=1, lost=2)

    def test_other_tasks_are_refused(self):
        other = replace(AFTER, episodes=7, outcomes="1111001", task_digest="2e")
        with pytest.raises(ValueError, match="of 6 and 7 episodes are not of the same games"):
            paired_comparison(BEFORE, other)

    def test_only_episodes_that_began_alike_are_pairs(self):
        other = replace(AFTER, beginnings="0000aaaa" * 3 + "0000bbbb" * 2 + "-" * 8)
        found = paired_comparison(BEFORE, other)
        assert found == PairedComparison(episodes=4, gained=2, lost=0, p_value=0.5, left_out=2)
        assert str(found) == "of 4 episodes 2 gained, 0 lost (McNemar p = 0.5); 2 more began otherwise"
        with pytest.raises(ValueError, match="None of 6 episodes began alike"):
            paired_comparison(BEFORE, replace(AFTER, beginnings="0000bbbb" * 6))

    def test_from_a_file(self, tmp_path):
        write_json(BEFORE.statistics(), tmp_path / "before.json")
        content = json.loads((tmp_path / "before.json").read_text())
        assert paired_comparison(Evaluation(**content), AFTER) == paired_comparison(BEFORE, AFTER)
        # As an earlier version wrote it.
        for name in ("outcomes", "task_digest", "beginnings", "penalized"):
            del content[name]
        assert paired_comparison(Evaluation(**content), AFTER) is None
        assert paired_comparison(AFTER, Evaluation(**content)) is None


class TestTable:
    def test_columns_are_below_their_names(self):
        unknown = replace(BEFORE, penalized=None, tasks=None, success=0.0)
        lines = comparison_table({"before": BEFORE, "after": unknown, "x": replace(AFTER, penalized=float("nan"))})
        head, *rows = lines.splitlines()
        end = re.search("penalized", head).end()
        assert [row[:end].split()[-1] for row in rows] == ["25.0%", "-", "-"]
        assert {len(row) for row in rows} == {len(head)}

    def test_penalized_is_a_metric_where_it_is_known(self):
        assert BEFORE.metrics("evaluation")["evaluation/penalized"] == 0.25
        assert "evaluation/penalized" not in replace(BEFORE, penalized=None).metrics("evaluation")
