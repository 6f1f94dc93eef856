"""What is wrong with settings that contradict each other, and what to do: of self-play and of
episodes that are continued.

Settings that merely do nothing are in :mod:`torchrl_llm.runs.idle_settings`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torchrl_llm.keys import TurnColumn, extra
from torchrl_llm.objectives import GroupRelative, TurnLoss
from torchrl_llm.objectives.estimators.returns import ReturnEstimator
from torchrl_llm.runs.settings import TurnRollouts
from torchrl_llm.utils.options import options_of


def missing_columns(estimator: Any, columns: Iterable[TurnColumn]) -> Iterator[str]:
    """What is wrong with the columns of turns that an estimator reads and its environment does not
    declare, and what to do.

    Args:
        estimator: of the run.
        columns: those that the environment declares.

    Examples:
        >>> next(missing_columns(GroupRelative(credit="turn", potential="phi"), [TurnColumn(extra("floor"), str)]))
        "potential='phi' is not an extra that the environment declares as a float; it declares floor (str)."
    """
    kinds = {column.name: column.kind for column in columns}
    declared = ", ".join(f"{name[-1]} ({kind.__name__})" for name, kind in kinds.items()) or "none"
    for option, name, kind in estimator.columns_read() if isinstance(estimator, ReturnEstimator) else ():
        if kinds.get(extra(name)) is not kind:
            yield f"{option}={name!r} is not an extra that the environment declares as a {kind.__name__}; it declares {declared}."


def idle_kl(config: Any, loss: TurnLoss) -> Iterator[str]:
    """What is wrong with a reference that is what the actor is wherever the KL is read, and what to
    do.

    Args:
        config: of the run.
        loss: made of its settings.
    """
    if config.model.refresh_reference != 1 or not loss.kl_coeff:
        return
    refreshed = f"refresh_reference=1 makes the reference what the actor is at the start of every update, and kl_coeff={loss.kl_coeff}"
    instead = "refresh it every 2 iterations or more, or set kl_coeff to 0"
    if loss.kl_in == "reward":
        yield f'{refreshed} with kl_in="reward" reads the KL there, where it is 0: {instead}, or kl_in to "loss".'
    elif config.trainer.epochs == 1 and config.trainer.minibatch_size in (None, config.rollouts.batch_size):
        yield (
            f"{refreshed} does nothing in an update of one optimizer step, before which the KL and its gradient are 0: {instead}, or "
            "take more steps (epochs, minibatch_size)."
        )


def wrong_self_play(config: Any) -> Iterator[str]:
    """What is wrong with the settings of a run with ``collector="self_play"``, and what to do."""
    if config.algo == "GRPO":
        yield (
            "GRPO compares the episodes of one task, and the seats of a game have different ones, of which one wins what another "
            'loses: use algo="LLMREINFORCE" with estimator="RoleRelative", or another algorithm.'
        )
    if config.trainer.dynamic_sampling:
        yield (
            f"dynamic_sampling={config.trainer.dynamic_sampling} compares the episodes of one task, and the seats of a game have different "
            "ones: leave it out."
        )
    if config.evaluation.evaluation_greedy:
        yield "evaluation_greedy plays each task once, and games against an opponent are none that repeat: leave it out."


def wrong_branches(config: Any) -> Iterator[str]:
    """What is wrong with the settings of continuations and of what reads them, and what to do."""
    needed = config.loss.estimator_type().needs_branches
    branches = config.rollouts.branches if isinstance(config.rollouts, TurnRollouts) else 0
    if branches and not needed:
        yield f'branches={branches} value states, and no estimator reads that: set estimator to "TurnVine", or leave them out.'
    if needed and not branches:
        where = "" if isinstance(config.rollouts, TurnRollouts) else f', and collector="turn", not {config.collector!r}'
        yield f"estimator={config.loss.estimator!r} values states by continuations, and branches=0: say how many, such as branches=4{where}."
    if needed and config.algo not in ("LLMREINFORCE", "GRPO"):
        yield f'estimator={config.loss.estimator!r} has no critic and no demonstrations: use algo="LLMREINFORCE" or "GRPO", not {config.algo!r}.'
    if branches and config.trainer.overlong_penalty:
        yield (
            f"overlong_penalty={config.trainer.overlong_penalty} is taken from the rewards of a batch, and the continuations of "
            f"branches={branches} do not pay it: leave one of them out."
        )


def wrong_trees(config: Any) -> Iterator[str]:
    """What is wrong with the settings of trees and of what reads their rows, and what to do."""
    if not (isinstance(config.rollouts, TurnRollouts) and (branches := config.rollouts.tree_branches)):
        return
    kind = config.loss.estimator_type()
    size, group = 1 + branches, config.rollouts.group_size
    if config.rollouts.branches:
        yield (
            f"tree_branches={branches} trains on continuations, and branches={config.rollouts.branches} values states by further ones: leave one of "
            "them out."
        )
    elif not kind.respects_units:
        yield f"tree_branches={branches} makes rows that begin with the same turns, and {kind.__name__} takes none: leave one of them out."
    elif issubclass(kind, GroupRelative):
        if getattr(config.loss, "baseline", options_of(kind)["baseline"].default) != "leave_one_out":
            yield f'tree_branches={branches} with the mean of the group as baseline is biased: use baseline="leave_one_out" and scale="none".'
        if group == size:
            yield (
                f"tree_branches={branches} and group_size={group} are one tree a task, and trees are compared: set group_size to "
                f"{2 * group} or more."
            )
    if group % size:
        yield (
            f"tree_branches={branches} makes trees of {size} episodes, and group_size={group} is not a multiple of that: set group_size to "
            f"{max(1, group // size) * size} or another multiple."
        )
