"""Tasks of a run that continues with other processes, groups or environments than before:
:func:`reshard_state`."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

logger = logging.getLogger(__name__)


def reshard_state(old: Sequence[Mapping[str, Any]], new: Mapping[str, Any]) -> dict[str, Any]:
    """The state of an environment that continues a stream which other workers, or groups of another
    size, have sampled from.

    All new workers begin after the last group that any old worker has sampled, and with ids that
    none has given: no group is sampled twice, and a few groups may be left out.

    Args:
        old: the states of the earlier workers' environments (``GEMEnv.state_dict()``; of a
            transformed environment what is in ``"base"`` counts).
        new: the state of a new worker's fresh environment.

    Returns:
        The new state, with the first task to sample, and, for a mixture of as many environments,
        the success rates and the curriculum of the first of ``old``.

    Examples:
        >>> task_sampler = {"group_size": 2, "worker": 0, "num_workers": 1, "success": None, "stages": ()}
        >>> new = {"task_sampler": task_sampler | {"worker": 1, "num_workers": 2}, "num_sampled": 0}
        >>> reshard_state([{"task_sampler": task_sampler, "num_sampled": 5}], new)["num_sampled"]
        4
        >>> new = {"task_sampler": task_sampler | {"group_size": 1}, "num_sampled": 0}
        >>> reshard_state([{"task_sampler": task_sampler, "num_sampled": 5}], new)["num_sampled"]
        6
    """
    if "base" in new:
        return {**new, "base": reshard_state(old, new["base"])}
    states = [_innermost(state) for state in old]
    task_sampler, saved = new["task_sampler"], states[0]["task_sampler"]
    workers, size = task_sampler["num_workers"], task_sampler["group_size"]
    # A group's episodes are numbered from its own number times its size on.
    groups = max(map(_groups_sampled, states))
    groups = max(groups, -(-groups * saved["group_size"] // size))
    first = -(-groups // workers)
    logger.warning(
        "tasks continue from group %d, for other processes, groups or environments than before: not in the same bytes",
        first * workers,
    )
    same = saved.get("mixture_size") == task_sampler.get("mixture_size")
    # A checkpoint may be older than one of them.
    progress = {name: saved[name] for name in ("success", "stages") if name in saved} if same else {}
    return {**new, "task_sampler": {**task_sampler, **progress}, "num_sampled": first * size}


def same_tasks(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Whether the states of two environments are of the same stream of tasks, but for its seed and
    how far it is.

    Examples:
        >>> task_sampler = {"group_size": 2, "worker": 0, "num_workers": 1, "weights": None, "seed": 3, "success": None}
        >>> states = [{"task_sampler": task_sampler | other} for other in ({}, {"seed": 4}, {"group_size": 4})]
        >>> [same_tasks(states[0], state) for state in states]
        [True, True, False]
    """
    names = ("group_size", "mixture_size", "weights", "stream")
    given = (_innermost(state)["task_sampler"] for state in (old, new))
    mine, theirs = ([_plain(each.get(name)) for name in names] for each in given)
    return mine == theirs


def _plain(value: Any) -> Any:
    # Sequences are lists in a checkpoint.
    return list(value) if isinstance(value, tuple) else value


def _innermost(state: Mapping[str, Any]) -> Mapping[str, Any]:
    while "base" in state:
        state = state["base"]
    return state


def _groups_sampled(env: Mapping[str, Any]) -> int:
    """The number of all workers' groups up to the last one that ``env`` has sampled."""
    task_sampler = env["task_sampler"]
    local_groups = -(-env["num_sampled"] // task_sampler["group_size"])
    return max(0, task_sampler["worker"] + (local_groups - 1) * task_sampler["num_workers"] + 1)
