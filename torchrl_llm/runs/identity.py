"""What must be the same for a run to continue in the same bytes: versions, code, what was given in
Python, settings."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from torchrl_llm.envs.env_spec import EnvSpec
from torchrl_llm.envs.tool_env import ToolEnvMaker


def environment() -> dict[str, Any]:
    """Versions, threads and git revision: what must be the same for a run to continue in the same
    bytes."""
    packages = ("torch", "torchrl", "tensordict", "transformers", "peft", "accelerate", "torchrl_llm")
    versions = {}
    for name in packages:
        # Such as this package, where it runs from a checkout and is not installed.
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    # The number of threads decides in which order floats are added.
    return {"versions": versions, "threads": torch.get_num_threads(), "git_revision": git_revision()}


@cache
def git_revision() -> str | None:
    """The commit of this library, where it runs from its own repository (and not from one that it
    is installed in).

    It is the commit at the first call in this process: what is checked out later is not what runs.
    """
    here = Path(__file__)

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(here.parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", here.name)
        return git("rev-parse", "HEAD")
    except (OSError, subprocess.SubprocessError):
        return None


def names_of_parts(**parts: Any) -> dict[str, str]:
    """The name of each object that a run was given besides its settings: by its name another one is
    noticed in a resume.

    Args:
        parts: functions, classes, partials of them (whose arguments do not count), an
            :class:`~torchrl_llm.envs.EnvSpec` (name and maker count), other objects (of which the
            class counts), ids as text, lists of these; ``None``: not given.

    Examples:
        >>> from functools import partial
        >>> names_of_parts(env=[partial(Path, "a"), "game:Wordle-v0"], make_loss=names_of_parts, make_env=None)
        {'env': 'pathlib:Path, game:Wordle-v0', 'make_loss': 'torchrl_llm.runs.identity:names_of_parts'}
        >>> names_of_parts(env=EnvSpec("mine", Path))
        {'env': 'mine (pathlib:Path)'}
    """
    return {name: _qualified(part) for name, part in parts.items() if part is not None}


def _qualified(part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, list | tuple):
        return ", ".join(map(_qualified, part))
    if isinstance(part, partial):
        return _qualified(part.func)
    if isinstance(part, ToolEnvMaker):
        return f"{_qualified(part.make)} with {', '.join(part.names)}"
    if isinstance(part, EnvSpec):
        return f"{part.name} ({_qualified(part.make)})"
    named = part if hasattr(part, "__qualname__") else type(part)
    return f"{named.__module__}:{named.__qualname__}"


def config_changes(
    saved: Mapping[str, Any], present: Mapping[str, Any], *, ignore: Sequence[str] = ()
) -> dict[str, tuple[Any, Any]]:
    """The settings that differ: name -> (saved, present). A setting that only one of them has
    counts as ``None``.

    ``max_tokens=None`` differs from no number: one was chosen when the saved run was built, and
    ``build_run`` takes it again. So it is with ``num_envs`` and ``template_date``.
    ``granularity="auto"`` is compared by its meaning, when the environment is known.

    Examples:
        >>> config_changes({"seed": 1, "output_dir": "a"}, {"seed": 2, "output_dir": "b"}, ignore=["output_dir"])
        {'seed': (1, 2)}
        >>> config_changes({"max_tokens": 4096}, {"max_tokens": None})
        {}
    """
    decided_later = {"max_tokens": None, "num_envs": None, "template_date": None, "granularity": "auto"}
    same = [*ignore, *(name for name, value in decided_later.items() if present.get(name) == value)]
    names = [name for name in {**saved, **present} if name not in same]
    return {name: (saved.get(name), present.get(name)) for name in names if saved.get(name) != present.get(name)}
