"""The report of a run on other systems than this one; what it says is tested with the scripts in
examples/."""

import sys
from importlib.util import find_spec, module_from_spec
from types import SimpleNamespace

import pytest

from torchrl_llm.runs import RunSettings


@pytest.mark.parametrize(
    ("platform", "ru_maxrss", "expected"),
    [("linux", 300 * 2**10, 300), ("darwin", 300 * 2**20, 300), ("win32", None, None)],
)
def test_peak_memory_is_in_megabytes_where_the_system_tells_it(tmp_path, monkeypatch, platform, ru_maxrss, expected):
    usage = SimpleNamespace(ru_maxrss=ru_maxrss)
    known = SimpleNamespace(RUSAGE_SELF=0, getrusage=lambda who: usage)
    monkeypatch.setattr(sys, "platform", platform)
    # None in sys.modules is what a module that cannot be imported looks like.
    monkeypatch.setitem(sys.modules, "resource", None if ru_maxrss is None else known)
    spec = find_spec("torchrl_llm.report.run_report")
    report = module_from_spec(spec)
    spec.loader.exec_module(report)
    trainer = SimpleNamespace(distributed=SimpleNamespace(is_main=True), history=[], episodes=0, iteration=0)
    open_folder = SimpleNamespace(info={"started": "now"})
    run = SimpleNamespace(config=RunSettings.from_values(output_dir=tmp_path), trainer=trainer, open_folder=open_folder)
    assert report.RunReport(print).write(run, "stopped")["peak_rss_mb"] == expected
