"""The memory of the host, or of the container that this process runs in: :func:`host_memory`,
:func:`free_memory`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import psutil


def host_memory(root: Path = Path("/")) -> int:
    """Bytes of the host's memory that this process may have: the machine's, or the limit of its
    container if that is less.

    Args:
        root: the folder of ``proc`` and ``sys``.

    Examples:
        >>> 2**20 < host_memory() <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        True
    """
    return min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *_limits_of_cgroups(root)])


def free_memory() -> int:
    """Bytes of the host's memory that this process may still take. An estimate: it does not know of
    other processes in a container.

    Examples:
        >>> 2**20 < free_memory() < host_memory()
        True
    """
    return min(psutil.virtual_memory().available, host_memory() - psutil.Process().memory_info().rss)


def _limits_of_cgroups(root: Path) -> Iterator[int]:
    """The limits of this process's cgroup, of version 1 or 2, and of those around it, which hold
    too."""
    listed = root / "proc" / "self" / "cgroup"
    for line in listed.read_text().splitlines() if listed.is_file() else ():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        place, name = ("memory", "memory.limit_in_bytes") if controllers else ("", "memory.max")
        parts = Path(path).parts[1:]
        # A container may see its own cgroup at the top, and still the path that it has outside,
        # which is not there then.
        for file in (root / Path("sys/fs/cgroup", place, *parts[:depth], name) for depth in range(len(parts) + 1)):
            limit = file.read_text().strip() if file.is_file() else "max"
            if limit != "max":
                yield int(limit)
