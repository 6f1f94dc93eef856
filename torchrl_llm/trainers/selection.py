"""Which rows an update learns from: :class:`RowSelection`, dynamic sampling and the filter of overlong episodes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_llm import keys
from torchrl_llm.data import informative
from torchrl_llm.trainers.collector_view import CollectorView
from torchrl_llm.trainers.distributed import Distributed


class RowSelection:
    """Dynamic sampling: learn only from groups that the estimator gives an advantage.

    Args:
        rollouts: knows how many episodes a batch has.
        distributed: a batch is what all ranks have.
        preview: makes a copy of rows ``[B]`` with the estimator's advantages.
    """

    def __init__(
        self,
        rollouts: CollectorView,
        distributed: Distributed,
        preview: Callable[[TensorDictBase], TensorDictBase],
    ) -> None:
        self.rollouts, self.distributed, self.preview = rollouts, distributed, preview

    def wanted(self, rows: TensorDictBase) -> int:
        """How many episodes an update is to have, if one batch of the collector is ``rows``."""
        own = self.rollouts.batch_size
        return int(self.distributed.all_reduce_sum(rows.shape[0] if own is None else own))

    def found(self, rows: TensorDictBase) -> int:
        """How many episodes of ``rows`` are in groups that get credit."""
        return int(self.distributed.all_reduce_sum(int(self._informative(rows).sum())))

    def choose(self, rows: TensorDictBase) -> TensorDictBase:
        """The rows of groups that get credit: at most one batch's, the first in the order that one process plays them in."""
        chosen = rows[self._informative(rows)]
        ids = zip(chosen[keys.GROUP_ID].tolist(), chosen[keys.EPISODE_ID].tolist(), strict=True)
        first = [episode for _, episode in sorted(self.distributed.all_gather(list(ids)))[: self.wanted(rows)]]
        return chosen[torch.isin(chosen[keys.EPISODE_ID], torch.tensor(first, dtype=torch.int64, device=rows.device))]

    def _informative(self, rows: TensorDictBase) -> Tensor:
        """Which rows the update would learn from, ``[B]`` bool. The estimator decides; no rule here repeats its own."""
        return informative(self.preview(rows))
