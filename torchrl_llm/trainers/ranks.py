"""Several training processes as one: :class:`Ranks`, what each of them has to know of the others.

A thin layer over accelerate. Losses are weighted sums whose weights count the tokens of all ranks, so gradients are summed;
whatever decides how a run goes on is the same number on every rank, so that all of them take the same steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from tensordict import TensorDictBase
from torch import nn

from torchrl_llm import keys
from torchrl_llm.data import cat_rows


class Ranks:
    """Sums, gathers and agreement over the processes of an ``Accelerator``; with one process all of them do nothing.

    Every method is collective: all ranks call it at the same place.

    Args:
        accelerator: knows the processes.

    Attributes:
        index: this process, 0-based.
        count: number of processes.
        first: whether this is process 0: the one that logs and saves.
        process_group: of all ranks, as estimators and weights take it; ``None`` with one process.

    Examples:
        >>> ranks = Ranks(Accelerator(cpu=True))
        >>> ranks.count, ranks.process_group, ranks.gather(["a"])
        (1, None, ['a'])
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.index, self.count = accelerator.process_index, accelerator.num_processes
        self.first = accelerator.is_main_process
        self.process_group: dist.ProcessGroup | None = dist.group.WORLD if self.count > 1 else None

    def wrap(self, module: nn.Module) -> nn.Module:
        """``module``, its gradients averaged over the ranks in every ``backward`` outside of :meth:`alone`."""
        return self.accelerator.prepare_model(module) if self.count > 1 else module

    def alone(self, module: nn.Module) -> AbstractContextManager[Any]:
        """Around forward and backward of all micro-batches but the last: gradients add up here before they are averaged."""
        return self.accelerator.no_sync(module) if self.count > 1 else nullcontext()

    def sum(self, value: float) -> float:
        """The sum of a number over the ranks."""
        if self.count == 1:
            return value
        total = torch.tensor(value, dtype=torch.float64, device=self.accelerator.device)
        return float(self.accelerator.reduce(total, "sum"))

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        return self.sum(float(flag)) > 0

    def agree(self, value: Any) -> Any:
        """The value of rank 0, on every rank."""
        return value if self.count == 1 else broadcast_object_list([value])[0]

    def gather(self, values: list[Any]) -> list[Any]:
        """The lists of all ranks, one after the other."""
        return values if self.count == 1 else gather_object(values)

    def rows(self, rows: TensorDictBase, names: Sequence[keys.NestedKey] | None = None) -> TensorDictBase:
        """The rows of all ranks in the order of their episodes, with the keys ``names`` (default: all) that they have."""
        if self.count == 1:
            return rows
        parts = self.gather([(rows if names is None else rows.select(*names, strict=False)).cpu()])
        everyone = cat_rows(parts)
        return everyone[everyone[keys.EPISODE_ID].argsort()].to(rows.device)


def silenced(rows: TensorDictBase) -> TensorDictBase:
    """A copy of rows in which nobody said anything: without weight in any sum, for a rank that has nothing to add.

    Args:
        rows: ``[B]``, with ``"turn_ids"`` and ``("turn", "mask")``.

    Examples:
        >>> from tensordict import TensorDict
        >>> turn = dict(mask=torch.tensor([[True]]), reward=torch.ones(1, 1))
        >>> silent = silenced(TensorDict(turn=turn, turn_ids=torch.zeros(1, 3).long(), batch_size=[1]))
        >>> silent["turn_ids"].tolist(), silent["turn", "mask"].tolist(), silent["turn", "reward"].tolist()
        ([[-1, -1, -1]], [[False]], [[0.0]])
    """
    silent = rows.clone()
    silent[keys.TURN_IDS] = torch.full_like(silent[keys.TURN_IDS], -1)
    for key in (keys.TURN_MASK, keys.TURN_REWARD):
        silent[key] = torch.zeros_like(silent[key])
    return silent
