"""Constraints for pip with which it installs the oldest versions that ``pyproject.toml`` allows:
``make test-lower``.

python tests/lower_bounds.py > constraints.txt
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

from packaging.requirements import Requirement

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"


def lower_bounds(requirements: Iterable[str]) -> Iterator[str]:
    """A line ``name==version`` for each requirement: the version that is its lower bound.

    Args:
        requirements: lines of ``dependencies``.

    Raises:
        ValueError: a requirement has neither a lower bound nor a single version.

    Examples:
        >>> list(lower_bounds(["torch>=2.11,<2.14", "gem-llm==0.1.0; python_version < '3.12'"]))
        ['torch==2.11', 'gem-llm==0.1.0']
    """
    for line in requirements:
        requirement = Requirement(line)
        lowest = [each.version for each in requirement.specifier if each.operator in (">=", "==")]
        if len(lowest) != 1:
            raise ValueError(
                f"The dependency {line!r} has no lower bound; expected one, such as {requirement.name}>=1."
            )
        yield f"{requirement.name}=={lowest[0]}"


if __name__ == "__main__":
    print("\n".join(lower_bounds(tomllib.loads(PYPROJECT.read_text())["project"]["dependencies"])))
