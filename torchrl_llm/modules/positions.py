"""Where the action tokens of a batch of rows stand, and the base class of what computes at them.

The scorer and the critic both read the hidden state *before* each action token and write one number
*at* it. This module finds these places, once per forward.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import NamedTuple

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn

from torchrl_llm import keys
from torchrl_llm.modules.lm import embedding_of, is_checkpointed
from torchrl_llm.modules.prefix_attention import PrefixSharing
from torchrl_llm.modules.prefixes import PrefixCost
from torchrl_llm.modules.segments import Segments


class RowError(ValueError):
    """A batch of rows that is not right-padded, or whose ``turn_ids`` mark tokens that cannot be
    actions."""


class ActionPositions(NamedTuple):
    """The ``M`` action tokens of rows ``[B, L]``, in row-major order.

    Attributes:
        rows: ``[M]`` int64, the row of each action token.
        columns: ``[M]`` int64 >= 1, its index in the row.
        lengths: ``[B]`` int64, valid tokens of each row.
        longest: the largest of ``lengths``.
        last_action: the largest of ``columns``; 0 if there is no action token at all.
        shape: ``(B, L)``.
    """

    rows: Tensor
    columns: Tensor
    lengths: Tensor
    longest: int
    last_action: int
    shape: torch.Size

    def last_actions(self) -> Tensor:
        """``[B]`` int64: the column of each row's last action token, which is the number of tokens
        before it; at least 1."""
        return self.lengths.new_ones(self.shape[0]).scatter_reduce(0, self.rows, self.columns, "amax")

    def scatter(self, values: Tensor) -> Tensor:
        """Put ``values`` ``[M]`` at the action tokens of a ``[B, L]`` tensor of zeros."""
        flat = values.new_zeros(self.shape.numel())
        return flat.index_copy(0, self.rows * self.shape[1] + self.columns, values).view(self.shape)

    def index_in_turn(self, turn_ids: Tensor) -> Tensor:
        """How many action tokens of the same turn precede each action token: ``[M]`` int64.

        Args:
            turn_ids: ``[B, L]`` int64, -1 off-action; the tokens of a turn are contiguous.
        """
        places = torch.arange(turn_ids.shape[1], device=turn_ids.device)
        changes = turn_ids != torch.nn.functional.pad(turn_ids[:, :-1], (1, 0), value=-1)
        starts = torch.where(changes, places, 0).cummax(dim=1).values
        return self.columns - starts[self.rows, self.columns]


_FAULTS = (
    "attention_mask has a zero before a one: rows are right-padded. Move the padding to the right.",
    "attention_mask has a row without any token. Drop empty rows before scoring.",
    "turn_ids marks the first token of a row as an action, but no token precedes it. Rows start with a prompt.",
    "turn_ids marks padding as an action (turn_ids >= 0 where attention_mask is 0). Off-action entries must be -1.",
)
"""What :func:`action_positions` looks for, in its order."""


def action_positions(attention_mask: Tensor, turn_ids: Tensor) -> ActionPositions:
    """Find the action tokens of right-padded rows.

    Args:
        attention_mask: ``[B, L]`` bool or int, ones followed by zeros in every row.
        turn_ids: ``[B, L]`` int64, -1 where the token is not an action.

    Raises:
        RowError: a row is padded on the left, is empty, starts with an action token (nothing
            precedes it), or has an action token in its padding.

    Examples:
        >>> mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
        >>> places = action_positions(mask, torch.tensor([[-1, 0, 0, -1], [-1, 0, -1, 1]]))
        >>> places.rows.tolist(), places.columns.tolist(), places.longest, places.last_action
        ([0, 0, 1, 1], [1, 2, 1, 3], 4, 3)
    """
    if attention_mask.shape != turn_ids.shape or turn_ids.ndim != 2:
        raise RowError(
            f"attention_mask {tuple(attention_mask.shape)} and turn_ids {tuple(turn_ids.shape)} must both be [B, L]."
        )
    mask, actions = attention_mask.bool(), turn_ids >= 0
    lengths = mask.sum(-1)
    places = torch.arange(mask.shape[1], device=mask.device)
    faults = mask != (places < lengths.unsqueeze(-1)), lengths == 0, actions[:, :1], actions & ~mask
    # One synchronization with the accelerator for all numbers that Python needs.
    largest = [lengths.amax(), torch.where(actions, places, 0).amax()]
    longest, last_action, *found = torch.stack([*largest, *(fault.any() for fault in faults)]).tolist()
    for message, fault in zip(_FAULTS, found, strict=True):
        if fault:
            raise RowError(message)
    rows, columns = actions.nonzero(as_tuple=True)
    return ActionPositions(rows, columns, lengths, longest, last_action, mask.shape)


class RowModule(TensorDictModuleBase):
    """Base class of the scorer and the critic: one forward over rows, one number at each action
    token.

    A gap in ``attention_mask`` starts a segment, which is computed as a row of its own
    (:mod:`torchrl_llm.modules.segments`).
    """

    def __init__(
        self, model: nn.Module, adapter: str | None, prefixes: PrefixSharing | None, out_keys: list[keys.NestedKey]
    ) -> None:
        super().__init__()
        self.model, self.adapter, self.prefixes = model, adapter, prefixes
        self.in_keys = [keys.TOKENS, keys.ATTENTION_MASK, keys.TURN_IDS]
        self.out_keys = out_keys

    @property
    def prefix_cost(self) -> PrefixCost | None:
        """What decides which rows share a forward; ``None``: each is computed by itself."""
        if self.prefixes is None:
            return None
        return self.prefixes.cost(embedding_of(self.model).device, recomputed=is_checkpointed(self.model))

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write what is computed from ``tensordict``, batch ``[B]``, into it and return it."""
        results = self._compute(*(tensordict[key] for key in self.in_keys))
        for key, result in zip(self.out_keys, results, strict=True):
            tensordict.set(key, result)
        return tensordict

    def _compute(self, tokens: Tensor, attention_mask: Tensor, turn_ids: Tensor) -> tuple[Tensor, ...]:
        segments = Segments.find(attention_mask)
        if segments is None:
            return self._compute_rows(tokens, attention_mask, turn_ids)
        # Padding of a segment is not an action: -1, where 0 would be a turn.
        split = segments.split(tokens), segments.split(attention_mask), segments.split(turn_ids, fill=-1)
        results = self._compute_rows(*split)
        return tuple(segments.join(x) if x.ndim == 2 else x[segments.last()] for x in results)

    @abstractmethod
    def _compute_rows(self, tokens: Tensor, attention_mask: Tensor, turn_ids: Tensor) -> tuple[Tensor, ...]:
        """The results ``[B, L]`` or ``[B]``, in the order of ``out_keys``, of rows ``[B, L]`` of
        one segment each."""


def prefix_cost(*modules: nn.Module) -> PrefixCost | None:
    """The :attr:`RowModule.prefix_cost` of modules that run on the same rows; ``None`` if one of
    them shares nothing."""
    costs = [module.prefix_cost if isinstance(module, RowModule) else None for module in modules]
    return None if None in costs else costs[0]
