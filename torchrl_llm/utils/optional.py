"""Packages that not everybody needs: :func:`import_extra`, :func:`running_ray`."""

from __future__ import annotations

from importlib import import_module
from typing import Any


class MissingExtraError(ImportError):
    """A package that not everybody needs is not installed."""


class RayNotRunningError(RuntimeError):
    """Ray is installed, and does not run."""


def import_extra(package: str, *, extra: str, what: str) -> Any:
    """The module ``package``.

    Args:
        package: a module that an extra of this package brings.
        extra: its name.
        what: what needs it, for the error.

    Raises:
        MissingExtraError: it is not installed; the message says how to.

    Examples:
        >>> import_extra("no_such_package", extra="cli", what="Completion")
        Traceback (most recent call last):
        torchrl_llm.utils.optional.MissingExtraError: Completion needs 'no_such_package': pip install 'torchrl-llm[cli]'.
    """
    try:
        return import_module(package)
    except ImportError as error:
        name = package.partition(".")[0]
        raise MissingExtraError(f"{what} needs {name!r}: pip install 'torchrl-llm[{extra}]'.") from error


def import_ray() -> Any:
    """The module ``ray``.

    Raises:
        MissingExtraError: it is not installed; the message says how to.
    """
    return import_extra("ray", extra="ray", what="A rollout on Ray")


def running_ray() -> Any:
    """The module ``ray``, connected to a Ray that runs; it is not started here.

    Raises:
        MissingExtraError: it is not installed.
        RayNotRunningError: it does not run.
    """
    ray = import_ray()
    # Ray's calls start a local Ray by themselves otherwise, also where a cluster was meant.
    if not ray.is_initialized():
        raise RayNotRunningError(
            "Ray is not running: call ray.init() first, or ray.init(address='auto') on a cluster. examples/multiturn_ray.py "
            "does so."
        )
    return ray
