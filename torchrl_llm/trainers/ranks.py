"""Several training processes as one: :class:`Ranks`, what each of them has to know of the others.

A thin layer over accelerate. Losses are weighted sums whose weights count the tokens of all ranks, so gradients are summed;
whatever decides how a run goes on is the same number on every rank, so that all of them take the same steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import (
    FullyShardedDataParallelPlugin,
    broadcast_object_list,
    gather_object,
    parse_flag_from_env,
)
from tensordict import TensorDictBase
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from torchrl_llm import keys
from torchrl_llm.data import cat_rows
from torchrl_llm.trainers.config import ConfigError
from torchrl_llm.trainers.sharding import Sharded, adopt, check_plugin, on_host
from torchrl_llm.weight_update.tensors import AT_HAND, Access


class Ranks:
    """Sums, gathers and agreement over the processes of an ``Accelerator``; with one process all of them do nothing.

    Every method is collective: all ranks call it at the same place.

    Args:
        accelerator: knows the processes; its ``gradient_accumulation_steps`` must be 1.

    Raises:
        ConfigError: accelerate would divide the gradient.

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
        check_accumulation(accelerator)
        self.accelerator = accelerator
        self.index, self.count = accelerator.process_index, accelerator.num_processes
        self.first = accelerator.is_main_process
        self.process_group: dist.ProcessGroup | None = dist.group.WORLD if self.count > 1 else None
        self._plugin = _sharding(accelerator) if self.count > 1 else None
        self._root: Sharded | None = None

    @property
    def sharded(self) -> bool:
        """Whether weights, gradients and optimizer are shared out (FSDP2), and not copied to every rank (DDP)."""
        return self._plugin is not None

    def wrap(
        self, loss: nn.Module, optimizer: torch.optim.Optimizer, *others: nn.Module
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """``loss``, its gradients averaged over the ranks, and the optimizer of its parameters, which has not stepped yet.

        Args:
            loss: what is trained.
            optimizer: of parameters of ``loss``.
            *others: what computes with weights without being trained; shared out with those of ``loss``.
        """
        if self._plugin is None:
            module = self.accelerator.prepare_model(loss) if self.count > 1 else loss
        else:
            old = dict(loss.named_parameters())
            mesh = init_device_mesh(self.accelerator.device.type, (self.count,))
            module = self._root = Sharded(loss, *others, plugin=self._plugin, mesh=mesh)
            adopt(optimizer, old, dict(loss.named_parameters()))
        return module, self.accelerator.prepare_optimizer(optimizer)

    def alone(self, module: nn.Module) -> AbstractContextManager[Any]:
        """Around forward and backward of all micro-batches but the last: gradients add up here before they are averaged.

        Sharded ones are averaged each time, for whole ones would take the memory that sharding saves.
        """
        return self.accelerator.no_sync(module) if self.count > 1 and not self.sharded else nullcontext()

    def weights_here(self) -> AbstractContextManager[None]:
        """Around scoring and playing with the trained weights: every rank has all of them, and none waits for another."""
        return nullcontext() if self._root is None else self._root.gathered()

    def weights_in_files(self, *, read: bool = False) -> AbstractContextManager[None]:
        """Around writing the trained weights to files on the first rank, or reading them on all; nothing can compute inside."""
        return nullcontext() if self._root is None else self._root.exported(here=self.first or read, keep=read)

    @property
    def access(self) -> Access:
        """How weight syncs get at the trained weights: every rank copies all of them."""
        root = self._root
        if root is None:
            return AT_HAND
        return Access(lambda everything: root.exported(frozen=everything), root.gathered)

    def whole(self, tree: Any) -> Any:
        """The tensors in nested containers whole and in the host's memory, on the first rank, where they are shared out."""
        return tree_map_only(DTensor, lambda shard: on_host(shard) if self.first else on_host(shard).new_empty(0), tree)

    def sum(self, value: float) -> float:
        """The sum of a number over the ranks."""
        if self.count == 1:
            return value
        total = torch.tensor(value, dtype=torch.float64, device=self.accelerator.device)
        return float(self.accelerator.reduce(total, "sum"))

    def most(self, value: int) -> int:
        """The largest of a number over the ranks."""
        return value if self.count == 1 else max(self.gather([value]))

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        return self.sum(float(flag)) > 0

    def agree(self, value: Any) -> Any:
        """The value of rank 0, on every rank."""
        return value if self.count == 1 else broadcast_object_list([value])[0]

    def on_first(self, do: Callable[[], Any]) -> Any:
        """What ``do`` returns on the first rank, which alone calls it; what it raises there is raised on all."""
        result, error = None, None
        if self.first:
            try:
                result = do()
            except Exception as raised:
                if self.count == 1:
                    raise
                error = raised
        result, error = self.agree((result, error))
        if error is not None:
            raise error
        return result

    def gather(self, values: list[Any]) -> list[Any]:
        """The lists of all ranks, one after the other."""
        return values if self.count == 1 else gather_object(values)

    def rows(self, rows: TensorDictBase, names: Sequence[keys.NestedKey] | None = None) -> TensorDictBase:
        """The rows of all ranks in the order of their episodes, with the keys ``names`` (default: all) that they have.

        One process has no other keys than several: what reads one that is not named fails in both, or in neither.
        """
        rows = rows if names is None else rows.select(*names, strict=False)
        if self.count == 1:
            return rows
        parts = self.gather([rows.cpu()])
        everyone = cat_rows(parts)
        return everyone[everyone[keys.EPISODE_ID].argsort()].to(rows.device)


def check_accumulation(accelerator: Accelerator) -> None:
    """Refuse gradient accumulation: ``Accelerator.backward`` divides by its steps, and losses here are sums that add up.

    accelerate keeps the number for the whole process, so that any ``Accelerator`` made later changes it.

    Raises:
        ConfigError: the number is not 1.
    """
    steps = accelerator.gradient_accumulation_steps
    if steps != 1:
        raise ConfigError(
            f"accelerate has gradient_accumulation_steps={steps} (an argument, a plugin, or the environment variable "
            f"ACCELERATE_GRADIENT_ACCUMULATION_STEPS), which would divide every gradient by {steps}. Leave it at 1: "
            "minibatch_size says how many conversations an optimizer step has, and max_tokens how many tokens a backward pass."
        )


def _sharding(accelerator: Accelerator) -> FullyShardedDataParallelPlugin | None:
    """accelerate's settings for FSDP, if it was started with any; on CPUs it does not look at them itself."""
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is None and parse_flag_from_env("ACCELERATE_USE_FSDP"):
        plugin = FullyShardedDataParallelPlugin()
        if accelerator.mixed_precision != "no":
            plugin.set_mixed_precision(accelerator.mixed_precision)
    if plugin is not None:
        check_plugin(plugin)
    return plugin


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
