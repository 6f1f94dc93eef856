"""What comes with each turn beside its tokens: :class:`~torchrl_llm.keys.TurnColumn`, and the
columns that the library counts itself.

What an environment declares is read in :mod:`torchrl_llm.envs.columns`. The names of columns are
keys as others are: :mod:`torchrl_llm.keys` has :func:`extra`, :func:`turn_extra`,
:func:`turn_extras` and :func:`row_key` too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from tensordict import TensorDictBase, is_tensor_collection
from torch import Tensor

NestedKey = str | tuple[str, ...]

TURN = "turn"
"""In the turn view the number of a turn; in rows what all columns are below."""


@dataclass(frozen=True)
class TurnColumn:
    """A number, text or flag that comes with each turn beside its tokens.

    It has one name from the environment to the report: below ``"next"`` in the turn view, below
    ``"turn"`` in rows, after ``"turn."`` in recordings, and by itself in an
    :class:`~torchrl_llm.episode.Episode`. What knows none of them by name passes all of them on.

    Attributes:
        name: the key; that of an environment's own is an :func:`~torchrl_llm.turn_columns.extra`.
        kind: ``float`` for a number, ``str`` for a text, whose hash travels, ``bool`` or ``int``.
        meaning: one line for the documentation.

    Examples:
        >>> regret = TurnColumn(extra("regret"), float)
        >>> row_key(regret.name), regret.dtype, regret.blank
        (('turn', 'extra', 'regret'), torch.float32, nan)
    """

    name: NestedKey
    kind: type
    meaning: str = ""

    @property
    def dtype(self) -> torch.dtype:
        """Of its tensors."""
        return torch.float32 if self.kind is float else torch.bool if self.kind is bool else torch.int64

    @property
    def blank(self) -> float:
        """The value of a turn that has none; padding is 0."""
        return math.nan if self.kind is float else 0


def extra(name: str) -> tuple[str, str]:
    """The key of an extra in the turn view, below ``"next"`` as the reward: ``[N, 1]`` float32, or
    int64 for the hash of a text."""
    return "extra", name


THINKING_LENGTH, THINKING_OPEN = extra("thinking_length"), extra("thinking_open")
THINKING_COLUMNS = (
    TurnColumn(THINKING_LENGTH, float, "tokens of the response's thinking, with what closes it"),
    TurnColumn(THINKING_OPEN, float, "1: the thinking was not closed, 0: it was, or there was none"),
)
"""What is counted of each response, where the chat template knows thinking."""

EMPTY_TEXT = -5426141060434712860
"""What stands for an empty text among the extras, :func:`torchrl_llm.envs.text_key` of it."""

TOOL_CALLS, TOOL_CALLS_JSON, TOOL_FAULTS = extra("tool_calls"), extra("tool_calls_json"), extra("tool_faults")
TOOL_COLUMNS = (
    TurnColumn(TOOL_CALLS, float, "calls of tools in the response, malformed ones too"),
    TurnColumn(TOOL_CALLS_JSON, str, "these calls as a list of JSON; empty where there are none"),
)
"""What is known of each response, where the environment has tools; of the faults among the calls
those environments know that execute them (:class:`~torchrl_llm.envs.tool_env.ToolEnv`)."""


def turn_extra(name: str) -> tuple[str, str, str]:
    """The key of an extra in the row view: ``[B, T]`` float, or int64 for the hash of a text.

    A turn without a value has NaN, or 0 for a text; padding is 0.
    """
    return TURN, *extra(name)


def turn_extras(rows: TensorDictBase) -> dict[str, Tensor]:
    """The extras of rows ``[B]``: name -> ``[B, T]``.

    Examples:
        >>> from tensordict import TensorDict
        >>> turn_extras(TensorDict({turn_extra("regret"): torch.zeros(1, 2)}, [1]))
        {'regret': tensor([[0., 0.]])}
    """
    return {name[-1]: value for name, value in declared_columns(rows.get((TURN, "extra"), None)).items()}


def declared_columns(extras: Any) -> dict[NestedKey, Tensor]:
    """The columns that environments declare, by name.

    Args:
        extras: what is at ``"extra"``, below ``"next"`` in the turn view, or below ``"turn"`` in
            rows; ``None``: nothing.
    """
    # An environment of another kind may have a key of its own in their place.
    found = extras.items() if is_tensor_collection(extras) else ()
    return {extra(name): x for name, x in found if isinstance(x, Tensor)}


@cache
def row_key(name: NestedKey) -> NestedKey:
    """The key in the row view of a column.

    Examples:
        >>> row_key("reward"), row_key(extra("regret"))
        (('turn', 'reward'), ('turn', 'extra', 'regret'))
    """
    return TURN, *((name,) if isinstance(name, str) else name)
