"""The size law: a page of 64 groups of 8 episodes of 8 turns and 1,100 tokens is below 5 MB.

``benchmarks/run_page.py`` measures the time that it takes.
"""

import pytest
from recorded_runs import made_rows, write_metrics, write_result, write_rows

from torchrl_llm.report import write_report
from torchrl_llm.report.page import LIMIT


def record(run, recordings, groups=4, length=1100):
    for number in range(recordings):
        rows = made_rows(8 * groups, 8, length, first=8 * groups * number, groups=groups, seed=number, vocabulary=2000)
        write_rows(run, rows, f"iteration-{number:012d}", iteration=number)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of 500 iterations with 64 recorded groups, of noise, which compresses worse than any
    text."""
    folder = tmp_path_factory.mktemp("run")
    write_result(folder)
    names = ("rollout/reward", "policy/entropy", "policy/kl_old", "optim/grad_norm_actor", "time/update_s")
    write_metrics(folder, 500, **dict.fromkeys(names, 0.5))
    record(folder, 16)
    return folder


def test_a_long_run_fits(run):
    page = write_report(run)
    text = page.read_text()
    assert page.stat().st_size < LIMIT == 5_000_000
    assert 'id="block-63"' in text
    assert "left out" not in text


@pytest.mark.extra
def test_more_is_left_out_and_said_and_full_has_all(run):
    """Noise of four times as many tokens."""
    record(run, 16, length=4400)
    page = write_report(run)
    assert page.stat().st_size < LIMIT
    text = page.read_text()
    shown = text.count('<script type="text/plain" id="block-')
    assert 0 < shown < 64
    assert f"{shown} recorded groups are on this page and {64 - shown} are left out" in text
    full = write_report(run, full=True)
    assert full.stat().st_size > LIMIT
    text = full.read_text()
    assert text.count('<script type="text/plain" id="block-') == 64
    assert "left out" not in text
