"""The run report: one self-contained HTML page of a run's folder, see :func:`write_report`; and
runs side by side.

Both read files only, so that they can be written again at any time and anywhere, without the model.
:func:`run_and_report` builds a run, trains, and writes the report.
"""

from torchrl_llm.report.comparison import compare_runs, plot_runs
from torchrl_llm.report.page import write_report
from torchrl_llm.report.run_report import run_and_report

__all__ = ["compare_runs", "plot_runs", "run_and_report", "write_report"]
