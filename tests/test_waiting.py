"""No test depends on the speed of the machine: tests wait for events (``waiting.py``), and
``benchmarks/`` measures time."""

import ast
import tomllib
from pathlib import Path

import pytest
from waiting import LIMIT

TESTS = Path(__file__).parent
CLOCKS = {"time", "monotonic", "perf_counter", "process_time", "thread_time", "monotonic_ns", "perf_counter_ns"}
WAITS = {
    "wait",
    "join",
    "result",
    "get",
    "communicate",
    "run",
    "check_output",
    "check_call",
    "Barrier",
    "timeout",
    "pause",
}
"""What waits for so many seconds: the first argument, or ``timeout``."""
FIRST = {"wait", "join", "result", "timeout"}


def seconds(call: ast.Call) -> list[ast.expr]:
    """What says how long a call waits."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if name not in WAITS:
        return []
    return [*(call.args[:1] if name in FIRST else []), *(each.value for each in call.keywords if each.arg == "timeout")]


def hasty(source: str) -> list[str]:
    """The lines that read a clock, wait for a short time, or sleep in a test instead of waiting for
    something."""
    tree, lines = ast.parse(source), source.splitlines()
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "time":
            found |= {node.lineno} if node.attr in CLOCKS else set()
        if isinstance(node, ast.Call):
            short = [each.value for each in seconds(node) if isinstance(each, ast.Constant)]
            found |= {node.lineno} if any(isinstance(s, int | float) and 0 < s < LIMIT for s in short) else set()
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            found |= set(sleeps(node.body))
    # What must not happen cannot be waited for.
    return [f"{line}: {lines[line - 1].strip()}" for line in sorted(found) if "however long" not in lines[line - 1]]


def sleeps(body: list[ast.stmt]) -> list[int]:
    """Lines of ``time.sleep`` in a test itself, and not in an environment or a policy that is made
    there."""
    found, nodes = [], [*body]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Lambda):
            continue
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "time.sleep":
            found.append(node.lineno)
        nodes.extend(ast.iter_child_nodes(node))
    return found


def test_no_test_counts_on_the_machine_being_quick():
    files = [path for path in TESTS.rglob("*.py") if path.name not in ("waiting.py", "test_waiting.py")]
    assert len(files) > 200
    found = {str(path.relative_to(TESTS)): hasty(path.read_text()) for path in files}
    assert not {path: lines for path, lines in found.items() if lines}


@pytest.mark.parametrize(
    "line",
    [
        "start = time.monotonic()",
        "subprocess.run(command, timeout=60)",
        "assert released.wait(5.0)",
        "queue.get(timeout=30)",
        "threading.Barrier(2, timeout=60)",
        "pytest.mark.timeout(280)",
        "def test_it():\n    time.sleep(0.2)",
    ],
)
def test_what_it_would_find(line):
    assert hasty(line)


def test_pytest_ends_only_what_hangs():
    options = tomllib.loads((TESTS.parent / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["addopts"]
    (limit,) = [float(each.removeprefix("--timeout=")) for each in options.split() if each.startswith("--timeout=")]
    assert limit >= 3 * LIMIT
