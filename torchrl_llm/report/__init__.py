"""The run report: one self-contained HTML page of a run's folder, see :func:`write_report`; and runs side by side.

It reads files only, so that it can be written again at any time and anywhere, without the model.
"""

from torchrl_llm.report.comparison import compare_runs, plot_runs
from torchrl_llm.report.page import write_report

__all__ = ["compare_runs", "plot_runs", "write_report"]
