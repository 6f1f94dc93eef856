"""What the run report costs: the page of the size law (tests/report/test_page_size.py), 64 groups
of 8 episodes of 8 turns.

    OMP_NUM_THREADS=1 python benchmarks/run_page.py

Prints one JSON object: CPU-seconds that the page takes, its size, and how many times as long as a
page of a quarter of the recordings it takes: 4 where the work is proportional. The aim is 10
seconds.
"""

import json
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "report"))

from test_page_size import record, write_result

from torchrl_llm.report import write_report


def measured(folder: Path, recordings: int) -> tuple[float, int]:
    """CPU-seconds and bytes of a page with so many recordings of four groups."""
    write_result(folder)
    record(folder, recordings)
    start = time.process_time()
    page = write_report(folder)
    return time.process_time() - start, page.stat().st_size


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as quarter, tempfile.TemporaryDirectory() as whole:
        less, _ = measured(Path(quarter), 4)
        seconds, size = measured(Path(whole), 16)
    print(json.dumps({"cpu_seconds": round(seconds, 2), "bytes": size, "of_a_quarter": round(seconds / less, 2)}))
