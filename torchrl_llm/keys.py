"""Every TensorDict key of the library, as data: its name, axis, dtype, fill value, writer and
meaning.

Two views of the same episodes. ``N`` environment slots, ``T`` turns, ``B`` episodes, ``L`` tokens
of context, ``A`` tokens of the longest response.

- :data:`TURN_VIEW`, written by environments and policies: batch ``[N]`` per step, ``[N, T]`` (or
  ``[B, T]``) collected.
- :data:`ROW_VIEW`, stored, sampled and fed to losses: batch ``[B]``, one episode a row.

Padding, trimming and the tables of the documentation come from these two. Floats are float32, or
the input's dtype if wider. Keys of your own that follow tokens or turns are added by
:func:`declare_row_key`. What comes with each turn beside its tokens is the same in both views: a
:class:`~torchrl_llm.keys.TurnColumn` (:mod:`torchrl_llm.turn_columns`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal, TypeVar

import torch

# Some for those who use the keys: what names a column is a key too.
from torchrl_llm.turn_columns import TURN, NestedKey, TurnColumn, extra, row_key, turn_extra, turn_extras  # noqa: F401

Axis = Literal["step", "context", "response", "row", "turn", "token"]
_K = TypeVar("_K", str, tuple[str, str])

SHAPES: dict[Axis, str] = {
    "step": "[N, 1]",
    "context": "[N, L]",
    "response": "[N, A]",
    "row": "[B]",
    "turn": "[B, T]",
    "token": "[B, L]",
}
"""The shape of a key by its axis; the first three are of the turn view."""


@dataclass(frozen=True)
class KeySpec:
    """Declaration of a key.

    Attributes:
        name: the key.
        axis: what the last dimension counts, see :data:`SHAPES`.
        dtype: of its tensor; ``torch.float32`` may be wider.
        writer: the component that writes it: an environment ("env"), a "policy", the "sequence"
            (rows made of episodes), a "critic", ...
        meaning: one line for the documentation.
        fill: the value of padding.
    """

    name: NestedKey
    axis: Axis
    dtype: torch.dtype
    writer: str
    meaning: str
    fill: int = 0


COLUMNS: dict[str, TurnColumn] = {}
"""The columns that all turns have, by name; an environment may declare more
(:mod:`torchrl_llm.envs.columns`)."""

TURN_VIEW: dict[NestedKey, KeySpec] = {}
"""The turn view, by name."""

ROW_VIEW: dict[NestedKey, KeySpec] = {}
"""The row view, by name."""


def _turn(name: _K, axis: Axis, dtype: torch.dtype, writer: str, meaning: str, fill: int = 0) -> _K:
    TURN_VIEW[name] = KeySpec(name, axis, dtype, writer, meaning, fill)
    return name


def _row(name: _K, axis: Axis, dtype: torch.dtype, writer: str, meaning: str, fill: int = 0) -> _K:
    ROW_VIEW[name] = KeySpec(name, axis, dtype, writer, meaning, fill)
    return name


def _column(name: str, kind: type, meaning: str) -> str:
    COLUMNS[name] = column = TurnColumn(name, kind, meaning)
    return _turn(name, "step", column.dtype, "env", meaning)


_INT, _BOOL, _FLOAT = torch.int64, torch.bool, torch.float32

# The turn view, in the order of the documentation's table.
PROMPT = _turn(("tokens", "prompt"), "context", _INT, "env", "the whole context so far, right-padded")
PROMPT_LENGTH = _turn(("tokens", "prompt_length"), "step", _INT, "env", "tokens of the prompt; 0: the slot idles")
_turn(TURN, "step", _INT, "env", "0-based turn of the episode")
SEGMENT = _turn("segment", "step", _INT, "env", "how often the context was cut and rebuilt; only if it can be")
EPISODE_ID = _turn("episode_id", "step", _INT, "env", "unique over the run", -1)
GROUP_ID = _turn("group_id", "step", _INT, "env", "unique over the run; same group, same task", -1)
ENV_ID = _turn("env_id", "step", _INT, "env", "index into the mixture of environments")
TASK_ID = _turn("task_id", "step", _INT, "env", "hash of the task's content; optional", -1)
RESPONSE = _turn(("tokens", "response"), "response", _INT, "policy", "the sampled ids, end of turn included")
RESPONSE_MASK = _turn(("tokens", "response_mask"), "response", _BOOL, "policy", "True on sampled tokens")
RESPONSE_LOG_PROBS = _turn(
    ("tokens", "log_probs"), "response", _FLOAT, "policy", "log-prob under the sampled distribution"
)
TURN_IDS = _turn("turn_ids", "response", _INT, "policy", "the turn of each token; -1 off the mask", -1)
POLICY_VERSION = _turn("policy_version", "response", _INT, "policy", "the weights that sampled it; -1 off the mask", -1)
REWARD = _column("reward", float, "reward of the turn")
DONE = _turn("done", "step", _BOOL, "env", "terminated or truncated")
TERMINATED = _column("terminated", bool, "the environment ended the episode here")
TRUNCATED = _column("truncated", bool, "a budget or a failure ended the episode here")
SUCCESS = _column("success", bool, "the episode ended in success here")
STOP_REASON = _column("stop_reason", int, "a StopReason")

COLLECTOR_MASK = _turn(("collector", "mask"), "step", _BOOL, "collector", "True on steps that were taken; optional")

# The row view.
TOKENS = _row("tokens", "token", _INT, "sequence", "the episode's tokens, right-padded")
ATTENTION_MASK = _row("attention_mask", "token", _BOOL, "sequence", "True on the episode; a gap starts a segment")
_row(TURN_IDS, "token", _INT, "sequence", "-1: not an action; the action mask is turn_ids >= 0", -1)
_row(POLICY_VERSION, "token", _INT, "sequence", "the weights that sampled it; -1: not an action", -1)
SAMPLE_LOG_PROB = _row("sample_log_prob", "token", _FLOAT, "sequence", "index i: log p(token i given those before i)")
TURN_REWARD, TURN_TERMINATED, TURN_TRUNCATED, TURN_SUCCESS, TURN_STOP_REASON = (
    _row((TURN, name), "turn", column.dtype, "sequence", column.meaning) for name, column in COLUMNS.items()
)
TURN_MASK = _row(("turn", "mask"), "turn", _BOOL, "sequence", "True on turns that were taken")
for _name in (EPISODE_ID, GROUP_ID, ENV_ID, TASK_ID):
    _row(_name, "row", _INT, "sequence", TURN_VIEW[_name].meaning)
TURN_UNIT = _row(
    ("turn", "unit"), "turn", _INT, "collector", "equal for rows that count as one at a turn; optional", -1
)
"""Rows that depend on one action are a unit at its turn, and none is compared with another.

A number stands for the same rows in every column, and rows that have come apart stay apart. In the
first column it is the id of one of the unit's episodes, which stands for all of them.
"""
ROW_WEIGHT = _row("row_weight", "row", _FLOAT, "collector", "how much the row counts in the loss; optional: 1")
STATE_VALUE = _row("state_value", "token", _FLOAT, "critic", "index i: value of the prefix before token i")
BOOTSTRAP_VALUE = _row("bootstrap_value", "row", _FLOAT, "critic", "value of the whole row")
SAMPLED_VALUE = _row(
    ("turn", "sampled_value"),
    "turn",
    _FLOAT,
    "collector",
    "mean return of continuations of each turn's state; NaN: none",
)
TURN_VALUE = _row(("turn", "value"), "turn", _FLOAT, "estimator", "value of each turn's state")
TURN_ADVANTAGE = _row(("turn", "advantage"), "turn", _FLOAT, "estimator", "advantage of each turn")
TURN_VALUE_TARGET = _row(("turn", "value_target"), "turn", _FLOAT, "estimator", "target of each turn's value")
TURN_NUM_COMPARED = _row(
    ("turn", "num_compared"), "turn", _INT, "estimator", "turns of other episodes that each was compared with; optional"
)
ADVANTAGE = _row("advantage", "token", _FLOAT, "estimator", "broadcast by turn_ids, 0 elsewhere")
VALUE_TARGET = _row("value_target", "token", _FLOAT, "estimator", "broadcast by turn_ids, 0 elsewhere")
LOG_PROB = _row("log_prob", "token", _FLOAT, "scorer", "of the model being trained")
ENTROPY = _row("entropy", "token", _FLOAT, "scorer", "of the model being trained; optional")
OLD_LOG_PROB = _row("old_log_prob", "token", _FLOAT, "trainer", "of the model before the update; optional")
REF_LOG_PROB = _row("ref_log_prob", "token", _FLOAT, "trainer", "of the reference model; optional")
LOSS_WEIGHT = _row("loss_weight", "token", _FLOAT, "trainer", "the weight of each token in the loss's sum")
CRITIC_WEIGHT = _row("critic_weight", "token", _FLOAT, "trainer", "the same for the critic's term")


def declare_row_key(spec: KeySpec) -> None:
    """Add a key of your own to the row view, so that it is padded and trimmed with the rows.

    Needed for a key whose second dimension counts tokens. Keys under ``"turn"`` count turns without
    it.

    Raises:
        ValueError: the axis is one of the turn view, or the key is declared otherwise already.

    Examples:
        >>> declare_row_key(KeySpec("my_score", "token", torch.float32, "me", "a score of each token"))
    """
    if spec.axis not in ("row", "turn", "token"):
        raise ValueError(f"{spec.name!r} has the axis {spec.axis!r}; expected 'row', 'turn' or 'token'.")
    if ROW_VIEW.setdefault(spec.name, spec) != spec:
        raise ValueError(f"{spec.name!r} is declared already, as {ROW_VIEW[spec.name]}. Choose another name.")


def row_axis(name: NestedKey, shape: Sequence[int]) -> Axis:
    """The axis of an entry of rows.

    Args:
        name: its key.
        shape: of its tensor, ``[B, ...]``.

    Raises:
        KeyError: the key is not declared, so that its second dimension may count tokens or turns.
    """
    # The row view first: turn_ids and policy_version are in both, and count tokens of a response in
    # the other.
    spec = ROW_VIEW.get(name) or TURN_VIEW.get(name)
    if spec is not None:
        return spec.axis
    if isinstance(name, tuple) and name[0] == TURN:
        return "turn"
    if len(shape) == 1:
        return "row"
    raise KeyError(
        f"{name!r} {tuple(shape)} is not a key of the library, and whether its second dimension counts tokens or turns is "
        "not known. Declare it: torchrl_llm.keys.declare_row_key(KeySpec(name, axis, dtype, writer, meaning))."
    )


def row_fill(name: NestedKey) -> int:
    """The value that pads an entry of rows; 0 for keys that are not declared."""
    return ROW_VIEW[name].fill if name in ROW_VIEW else 0


class StopReason(IntEnum):
    """Why an episode ended. ``RUNNING`` marks a turn that is not the last one."""

    RUNNING = 0
    WON = 1
    """Terminated in success."""
    LOST = 2
    """Terminated without success, before the turn limit (a format error, a defeat)."""
    TURN_LIMIT = 3
    """The environment's own turn limit: termination, for the limit is part of the task."""
    MAX_TURNS = 4
    """Our step budget ``max_turns``: truncation."""
    CONTEXT = 5
    """The next response would not fit into ``max_model_len``: truncation."""
    ERROR = 6
    """The environment raised or returned a malformed result: truncation."""
    TIMEOUT = 7
    """The environment did not answer in time: truncation."""
    ENV_TRUNCATED = 8
    """The environment itself reported truncated and not terminated."""
