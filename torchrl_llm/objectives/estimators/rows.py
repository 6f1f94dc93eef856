"""How losses and estimators read rows: :class:`RowReader`, :func:`extra_of`; what estimators refuse
of them: :func:`check_ids`, :func:`check_no_units`, :func:`check_finished`, :func:`check_finite`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from torchrl_llm import functional as F
from torchrl_llm import keys, turn_columns
from torchrl_llm.keys import NestedKey


@dataclass
class RowKeys:
    """The keys of rows that estimators read and write, by the names under which ``set_keys`` takes
    others."""

    advantage: NestedKey = keys.ADVANTAGE
    value_target: NestedKey = keys.VALUE_TARGET
    value: NestedKey = keys.STATE_VALUE
    bootstrap_value: NestedKey = keys.BOOTSTRAP_VALUE
    reward: NestedKey = keys.TURN_REWARD
    terminated: NestedKey = keys.TURN_TERMINATED
    truncated: NestedKey = keys.TURN_TRUNCATED
    success: NestedKey = keys.TURN_SUCCESS
    mask: NestedKey = keys.TURN_MASK
    turn_ids: NestedKey = keys.TURN_IDS
    tokens: NestedKey = keys.TOKENS
    group_id: NestedKey = keys.GROUP_ID
    unit: NestedKey = keys.TURN_UNIT
    row_weight: NestedKey = keys.ROW_WEIGHT
    sampled_value: NestedKey = keys.SAMPLED_VALUE
    turn_value: NestedKey = keys.TURN_VALUE
    turn_num_compared: NestedKey = keys.TURN_NUM_COMPARED
    turn_advantage: NestedKey = keys.TURN_ADVANTAGE
    turn_value_target: NestedKey = keys.TURN_VALUE_TARGET
    sample_log_prob: NestedKey = keys.SAMPLE_LOG_PROB
    old_log_prob: NestedKey = keys.OLD_LOG_PROB
    ref_log_prob: NestedKey = keys.REF_LOG_PROB


class RowReader:
    """Base class of losses and estimators: reads rows ``[B]`` by the names in ``_AcceptedKeys``;
    errors name what is missing."""

    tensor_keys: Any

    def _get(self, tensordict: TensorDictBase, name: str, hint: str = "") -> Tensor:
        key = getattr(self.tensor_keys, name)
        value = tensordict.get(key, None)
        if value is None:
            raise KeyError(f"{type(self).__name__} needs {key!r}, which is not in the batch. {hint}".rstrip())
        return value

    def _frozen(self, tensordict: TensorDictBase, name: str, hint: str = "") -> Tensor:
        """A value ``[B, L]`` without gradient, 0 off actions."""
        action = self._get(tensordict, "turn_ids") >= 0
        return torch.where(action, self._get(tensordict, name, hint).detach(), 0.0)

    def _old_name(self, tensordict: TensorDictBase) -> str:
        """Which log-prob is the old policy's: ``"old_log_prob"`` if it was scored, else
        ``"sample_log_prob"``."""
        scored = tensordict.get(self.tensor_keys.old_log_prob, None) is not None
        return "old_log_prob" if scored else "sample_log_prob"

    def _inputs(self, network: TensorDictModuleBase, tensordict: TensorDictBase) -> TensorDict:
        """Copy the network's inputs into a new tensordict, so that the caller's is not written
        to."""
        rows = self._get(tensordict, "turn_ids").shape[:1]
        return TensorDict({key: tensordict.get(key) for key in network.in_keys}, batch_size=rows)

    def _at_end(self, tensordict: TensorDictBase, name: str) -> Tensor:
        """A flag of each row's last turn, ``[B]``; False in a row without turns."""
        flag, mask = self._get(tensordict, name), self._get(tensordict, "mask")
        order = torch.arange(mask.shape[1], device=mask.device).expand_as(mask)
        last = torch.where(mask, order, -1).amax(1, keepdim=True)
        # A row without turns has -1 here, which is not an index.
        return (flag.gather(1, last.clamp_min(0)) & (last >= 0)).squeeze(1)

    def _cut_off(self, tensordict: TensorDictBase) -> Tensor:
        """The rows that a value follows, ``[B]``: an environment that sets both flags has ended."""
        return self._at_end(tensordict, "truncated") & ~self._at_end(tensordict, "terminated")


def extra_of(rows: TensorDictBase, name: str, kind: type, *, option: str, instead: str) -> Tensor:
    """The extra ``name`` of rows ``[B]``, which its environment declares as ``kind``: ``[B, T]``.

    Args:
        rows: ``[B]``.
        name: of the extra.
        kind: ``float`` or ``str``.
        option: which asks for it, for the errors.
        instead: what to do without one, for the errors.

    Raises:
        KeyError: the rows have no extra of that name.
        TypeError: the extra is of the other kind.
        ValueError: turns in which a tool was called do not have it.
    """
    extras = keys.turn_extras(rows)
    if name not in extras:
        raise KeyError(
            f"{option} names {name!r}, which is not an extra of these rows, which have {sorted(extras)}: {instead}."
        )
    if extras[name].is_floating_point() is not (kind is float):
        given, wanted = ("text", "number") if kind is float else ("number", "text")
        raise TypeError(
            f"{option}: {name!r} is a {given}; expected one that is declared as a {wanted} ({kind.__name__})."
        )
    _check_turns_of_calls(rows, extras, name, option)
    return extras[name]


def numbers_of(rows: TensorDictBase, option: str, name: str) -> Tensor:
    """The extra ``name``, a number, that an ``option`` asks for: ``[B, T]``; 0 for a turn that has
    none. Raises: see :func:`extra_of`."""
    instead = "give one that the environment declares as a number"
    return extra_of(rows, name, float, option=option, instead=instead).nan_to_num(0.0)


def _check_turns_of_calls(rows: TensorDictBase, extras: dict[str, Tensor], name: str, option: str) -> None:
    """Refuse a state that is not known where the response has called a tool, and only there: credit
    would depend on whether it does."""
    calls = extras.get(turn_columns.TOOL_CALLS[-1])
    if calls is None or option == "components":
        return
    value = extras[name]
    blank = value.isnan() if value.is_floating_point() else (value == 0) | (value == turn_columns.EMPTY_TEXT)
    if bool((blank & (calls > 0)).any()):
        raise ValueError(
            f"{option} names {name!r}, which turns that call tools do not have (ToolEnv executes the call, and the environment is not "
            f"asked): leave {option} out, or let the environment execute the calls and say it."
        )


def check_ids(rows: TensorDictBase, turn_ids: Tensor, group_id: Tensor | None) -> None:
    """Refuse rows ``[B]`` whose ids collide: credit would mix unrelated episodes.

    Args:
        rows: of a batch, with ids of episodes or without.
        turn_ids: ``[B, L]``, of the rows.
        group_id: ``[B]``, if rows of one group are compared.

    Raises:
        ValueError: an episode is there twice, or episodes of different tasks share a group.
    """
    episode_id = rows.get(keys.EPISODE_ID, None)
    fault = None if episode_id is None else F.episode_fault(episode_id)
    if fault is None and group_id is not None:
        fault = F.group_fault(group_id, rows.get(keys.ENV_ID, None), rows.get(keys.TOKENS, None), turn_ids)
    if fault is not None:
        raise ValueError(fault)


def check_no_units(name: str, rows: TensorDictBase, unit: NestedKey) -> None:
    """Refuse rows of which some count as one, for an estimator that does not know which.

    Args:
        name: of the estimator, for messages.
        rows: of a batch.
        unit: the key that says which rows count as one.

    Raises:
        ValueError: the rows have it.
    """
    if rows.get(unit, None) is not None:
        raise ValueError(
            f"Some of the rows count as one ({unit!r}), such as those of a tree, and {name} does not know "
            "which. Collect without them, or use GroupRelative, ReBN or TurnGAE; an estimator of your own that reads "
            "units, or compares no rows, says respects_units = True."
        )


def check_finished(mask: Tensor, ended: Tensor) -> None:
    """Refuse rows with turns, ``mask`` ``[B, T]``, of which the last has not ended the episode
    (``ended`` ``[B]``).

    Raises:
        ValueError: names the rows.
    """
    open_rows = mask.any(1) & ~ended
    if bool(open_rows.any()):
        raise ValueError(
            f"Row(s) {open_rows.nonzero().flatten().tolist()} end in a turn that is neither terminated nor "
            "truncated. Credit needs finished episodes: collect whole episodes."
        )


def where_read(action: Tensor, mask: Tensor, cut: Tensor) -> dict[str, Tensor]:
    """Where each number that estimators read or find counts, by name; inputs come first.

    Args:
        action: ``[B, L]`` bool.
        mask: ``[B, T]`` bool, the turns that were taken.
        cut: ``[B]`` bool, the rows that a value follows.
    """
    inputs = {"reward": mask} | dict.fromkeys(("old_log_prob", "sample_log_prob", "ref_log_prob", "value"), action)
    return inputs | {"bootstrap_value": cut, "advantage": action, "value_target": action}


def check_finite(name: str, numbers: dict[NestedKey, tuple[Tensor, Tensor]]) -> None:
    """Refuse NaN and infinite numbers: they would pass as equal scores, or hide their cause until
    the step.

    Args:
        name: of the estimator, for messages.
        numbers: ``[B, ...]`` by key, each with a mask of where it counts.

    Raises:
        ValueError: a number is NaN or infinite where it counts; the first in ``numbers`` is named.
    """
    wrong = {
        key: (~value.isfinite() & place).unsqueeze(-1).flatten(1).any(1) for key, (value, place) in numbers.items()
    }
    if bool(torch.stack([*wrong.values()]).any()):  # one wait for the device
        key, rows = next((key, rows.nonzero().flatten().tolist()) for key, rows in wrong.items() if rows.any())
        raise ValueError(
            f"{name}: {key!r} of row(s) {rows} is NaN or infinite, and nothing can be learned from it. Correct what computes it."
        )
