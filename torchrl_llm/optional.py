"""Packages that not everybody needs: :func:`running_ray`."""

from __future__ import annotations

from typing import Any


def import_ray() -> Any:
    """The module ``ray``.

    Raises:
        ImportError: it is not installed; the message says how to.
    """
    try:
        import ray
    except ImportError as error:
        raise ImportError("Rollouts on Ray need it: pip install 'torchrl-llm[ray]'.") from error
    return ray


def running_ray() -> Any:
    """The module ``ray``, connected to a Ray that runs; it is not started here.

    Raises:
        ImportError: it is not installed.
        RuntimeError: it does not run.
    """
    ray = import_ray()
    # Ray's calls start a local Ray by themselves otherwise, also where a cluster was meant.
    if not ray.is_initialized():
        raise RuntimeError(
            "Ray is not running: call ray.init() first, or ray.init(address='auto') on a cluster. examples/multiturn_ray.py "
            "does so."
        )
    return ray
