"""The training processes: :class:`Distributed` is one process; :class:`DDP` and :class:`FSDP2` are
several, with its interface.

The loop calls the same methods for one process and for many, and they keep the ranks in step:
losses are weighted sums whose weights count the tokens of all ranks, so gradients are summed; every
rank takes part in every backward pass; a number that decides how a run continues is the same on
every rank. Communication is accelerate's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin, broadcast_object_list, gather_object
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from torchrl_llm import keys
from torchrl_llm.data import cat_rows, zero_weight_rows
from torchrl_llm.metrics.rollouts import COUNTS
from torchrl_llm.objectives import TurnLoss, merge
from torchrl_llm.objectives.steps import own_parameters
from torchrl_llm.trainers.fsdp import ShardedModule, full_on_cpu, replace_parameters
from torchrl_llm.utils.accelerated import check_accumulation, check_plugin, device_of, fsdp_plugin, picklable, place
from torchrl_llm.utils.options import ConfigError
from torchrl_llm.weight_update import LOCAL_PARAMETERS, ParameterGather

T = TypeVar("T")
Prepared = tuple[nn.Module, torch.optim.Optimizer]


class Distributed:
    """One training process, and the interface of several. Make it with :meth:`of`.

    Every method is collective: all ranks call it at the same place. With one process they return
    what they are given.

    Args:
        accelerator: knows the processes; its ``gradient_accumulation_steps`` must be 1.

    Raises:
        ConfigError: accelerate would divide the gradient.

    Attributes:
        device: of this process's rows and weights, with its index.
        load_device: where models are loaded before :meth:`prepare`.
        rank: this process, 0-based.
        world_size: number of processes.
        is_main: whether this is rank 0, which logs and saves.
        process_group: all ranks, as estimators and loss weights take it; ``None`` with one process.
        sharded: whether weights, gradients and optimizer are sharded (FSDP2).
        saves_alone: whether this process can save a run without the others, as it must after an
            error that they may not have.
        parameter_gather: how weight syncs read the trained weights.

    Examples:
        >>> distributed = Distributed.of(Accelerator(cpu=True))
        >>> distributed.world_size, distributed.process_group, distributed.all_gather(["a"])
        (1, None, ['a'])
    """

    process_group: dist.ProcessGroup | None = None
    sharded = False
    saves_alone = True
    parameter_gather: ParameterGather = LOCAL_PARAMETERS

    def __init__(self, accelerator: Accelerator) -> None:
        check_accumulation(accelerator)
        self.accelerator, self.device = accelerator, device_of(accelerator)
        self.load_device = self.device
        self.rank, self.world_size = accelerator.process_index, accelerator.num_processes
        self.is_main = accelerator.is_main_process

    @staticmethod
    def of(accelerator: Accelerator) -> Distributed:
        """The class for the processes and settings of ``accelerator``."""
        if accelerator.num_processes == 1:
            return Distributed(accelerator)
        plugin = fsdp_plugin(accelerator)
        return DDP(accelerator) if plugin is None else FSDP2(accelerator, plugin)

    # ---------------------------------------- training

    @property
    def autocasts(self) -> bool:
        """Whether forwards compute in another precision than the weights have (mixed
        precision), and so than a policy that samples with them."""
        return self.accelerator.mixed_precision != "no"

    def prepare(self, loss: nn.Module, optimizer: torch.optim.Optimizer, *others: nn.Module) -> Prepared:
        """The module that computes ``loss`` on all ranks, and the optimizer of its parameters.

        All weights are on accelerate's device afterwards, as rows are.

        Args:
            loss: the loss to train.
            optimizer: of parameters of ``loss``; it has not stepped.
            *others: modules that compute with weights and are not trained; sharded with the weights
                of ``loss``.

        Raises:
            ConfigError: weights are on another device, and accelerate is not to move them.
        """
        place(self.accelerator, loss, *others)
        # accelerate's wrapper steps through the gradient scaler of float16.
        return loss, self.accelerator.prepare_optimizer(optimizer)

    def check_replaceable(self) -> None:
        """Refuse to :meth:`prepare` an optimizer of new parameters where gradients of the old ones
        are averaged."""

    def no_sync(self, module: nn.Module) -> AbstractContextManager[Any]:
        """For all micro-batches but the last: inside, gradients add up on this rank and are not
        averaged yet (DDP).

        FSDP2 averages each time: unsharded gradients would take the memory that sharding saves.
        """
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradient of ``loss``, which is summed over the ranks."""
        self.accelerator.backward(loss * self.world_size)  # wrapped modules average gradients

    def reach_all_parameters(self, loss: Tensor, everything: Tensor) -> Tensor:
        """``loss``, which reaches a part of the parameters, where backward needs a gradient of each
        (DDP).

        Args:
            loss: the term to minimize.
            everything: a scalar that all trainable parameters reach.
        """
        return loss

    def on_device(self, rows: TensorDictBase) -> TensorDictBase:
        """The rows on this process's device; the same object where they are there."""
        # Not rows.to() alone, which copies rows that name no device: the caller's would stay
        # without credit.
        return rows if rows[keys.TOKENS].device == self.device else rows.to(self.device)

    def nonempty(self, rows: TensorDictBase, spare: TensorDictBase, count: int = 1) -> TensorDictBase:
        """``rows``, or zero-weight copies of the first ``count`` of ``spare`` on a rank that has
        none and takes the step with the others."""
        return rows

    def own_rows(self, rows: TensorDictBase) -> TensorDictBase:
        """``rows`` without those that :meth:`nonempty` has lent, which count nowhere; they may be
        none."""
        return rows

    def equal_count(self, parts: list[TensorDictBase]) -> list[TensorDictBase]:
        """Micro-batches, padded with zero-weight rows to as many as the rank with most has."""
        return parts

    def merge_outputs(self, outputs: Sequence[TensorDictBase]) -> TensorDictBase:
        """The statistics of an optimizer batch from the loss's outputs for its micro-batches on all
        ranks."""
        return merge(outputs)

    # ---------------------------------------- weights

    def gathered_parameters(self) -> AbstractContextManager[None]:
        """Inside, every rank has all trained weights, to score and sample without waiting for
        another."""
        return nullcontext()

    def full_state_on_cpu(self, *, read: bool = False) -> AbstractContextManager[None]:
        """Inside, the trained weights can be written to files by rank 0, or read by all ranks;
        nothing can compute."""
        return nullcontext()

    def full_state(self, tree: Any) -> Any:
        """The tensors in nested containers, full and on the CPU of rank 0 where they are
        sharded."""
        return tree

    # ---------------------------------------- values

    def all_gather(self, values: list[T]) -> list[T]:
        """The concatenated lists of all ranks."""
        return values

    def broadcast(self, value: T) -> T:
        """The value of rank 0, on every rank."""
        return value

    def all_reduce_sum(self, value: float) -> float:
        """The sum of a number over the ranks."""
        return sum(self.all_gather([value]))

    def all_reduce_mean(self, values: Tensor) -> float:
        """The mean of all values of all ranks, summed in float64; 0 if there are none."""
        return self.all_reduce_sum(values.double().sum().item()) / max(1, self.all_reduce_sum(values.numel()))

    def all_reduce_max(self, value: int) -> int:
        """The largest of a number over the ranks."""
        return max(self.all_gather([value]))

    def all_reduce_counts(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """The metrics of a collector: :data:`~torchrl_llm.metrics.rollouts.COUNTS` summed over the
        ranks, of others the mean."""
        found: dict[str, list[float]] = {}
        for name, value in (item for each in self.all_gather([metrics]) for item in each.items()):
            found.setdefault(name, []).append(value)
        return {name: sum(each) / (1 if name in COUNTS else len(each)) for name, each in found.items()}

    def on_main(self, function: Callable[[], T]) -> T:
        """What ``function`` returns on rank 0, which alone calls it; what it raises there is raised
        on all ranks."""
        return function()

    def all_gather_rows(self, rows: TensorDictBase, names: Sequence[keys.NestedKey] | None = None) -> TensorDictBase:
        """The rows of all ranks in the order of their episodes, with the keys ``names`` (default:
        all) that they have.

        Keys are selected with one process too, so that reading one that is not named fails for any
        number of them.
        """
        return rows if names is None else rows.select(*names, strict=False)


class Several(Distributed):
    """Several processes; :class:`DDP` and :class:`FSDP2` say where the weights are."""

    saves_alone = False

    def __init__(self, accelerator: Accelerator) -> None:
        super().__init__(accelerator)
        self.process_group = dist.group.WORLD

    def check_replaceable(self) -> None:
        raise ConfigError(
            f"New parameters (replace_optimizer(), load_checkpoint(merge_lora_configs=True)) with {self.world_size} processes, which "
            "average the gradients of the old ones: make another trainer, or start a run with init_from and merge_lora_configs."
        )

    def nonempty(self, rows: TensorDictBase, spare: TensorDictBase, count: int = 1) -> TensorDictBase:
        return rows if rows.shape[0] else zero_weight_rows(spare[:count])

    def own_rows(self, rows: TensorDictBase) -> TensorDictBase:
        return rows[rows[keys.TURN_MASK].any(1)]

    def equal_count(self, parts: list[TensorDictBase]) -> list[TensorDictBase]:
        missing = self.all_reduce_max(len(parts)) - len(parts)
        narrowest = min(parts, key=lambda part: part[keys.ATTENTION_MASK].shape[1])
        return parts + [zero_weight_rows(narrowest[:1])] * missing

    def merge_outputs(self, outputs: Sequence[TensorDictBase]) -> TensorDictBase:
        # On the CPU: a pickled CUDA tensor is loaded onto the GPU that it came from.
        return merge(self.all_gather([merge(outputs).cpu()]))

    def all_gather(self, values: list[T]) -> list[T]:
        return gather_object(values)

    def broadcast(self, value: T) -> T:
        return broadcast_object_list([value])[0]

    def on_main(self, function: Callable[[], T]) -> T:
        result: Any = None
        error: Exception | None = None
        if self.is_main:
            try:
                result = function()
            except Exception as raised:  # noqa: BLE001, any error: the other ranks would wait for ever
                error = raised
        result, sent = self.broadcast((result, None if error is None else picklable(error)))
        if error is not None:
            raise error  # itself, with its traceback
        if sent is not None:
            raise sent
        return result

    def all_gather_rows(self, rows: TensorDictBase, names: Sequence[keys.NestedKey] | None = None) -> TensorDictBase:
        own = super().all_gather_rows(rows, names)
        gathered = cat_rows(self.all_gather([own.cpu()]))
        return gathered[gathered[keys.EPISODE_ID].argsort()].to(rows.device)


class DDP(Several):
    """Several processes, each with a copy of the weights."""

    def prepare(self, loss: nn.Module, optimizer: torch.optim.Optimizer, *others: nn.Module) -> Prepared:
        loss, optimizer = super().prepare(loss, optimizer, *others)
        return self.accelerator.prepare_model(loss), optimizer

    def no_sync(self, module: nn.Module) -> AbstractContextManager[Any]:
        return self.accelerator.no_sync(module)

    def reach_all_parameters(self, loss: Tensor, everything: Tensor) -> Tensor:
        # DDP waits for a gradient of every parameter. find_unused_parameters would search the graph
        # in each forward instead.
        return loss + 0.0 * everything


class FSDP2(Several):
    """Several processes, each with a shard of weights, gradients and optimizer state.

    Args:
        accelerator: knows the processes.
        plugin: accelerate's settings for FSDP.

    Raises:
        ConfigError: settings of accelerate that are not supported.
    """

    sharded = True
    _prepared: ShardedModule | None = None

    def __init__(self, accelerator: Accelerator, plugin: FullyShardedDataParallelPlugin) -> None:
        super().__init__(accelerator)
        check_plugin(plugin)
        self._plugin = plugin
        # Sharding moves one block at a time to the device, which may have no room for all weights
        # in float32.
        self.load_device = torch.device("cpu")

    @property
    def _root(self) -> ShardedModule:
        if self._prepared is None:
            raise ConfigError(
                "Nothing is sharded here: give each part the Distributed that Update was made with, after it was made."
            )
        return self._prepared

    def prepare(self, loss: nn.Module, optimizer: torch.optim.Optimizer, *others: nn.Module) -> Prepared:
        if isinstance(loss, TurnLoss) and (own := own_parameters(loss)):
            raise ConfigError(
                f"{type(loss).__name__} or its estimator has {len(own)} parameters of its own, which FSDP2 does not train: use DDP, or "
                "one process."
            )
        # Sharding replaces the parameters that the optimizer was made with.
        old = dict(loss.named_parameters())
        mesh = init_device_mesh(self.accelerator.device.type, (self.world_size,))
        self._prepared = ShardedModule(loss, *others, plugin=self._plugin, mesh=mesh)
        replace_parameters(optimizer, old, dict(loss.named_parameters()))
        self.parameter_gather = ParameterGather(
            lambda frozen: self._root.full_parameters(frozen=frozen), self._root.gathered
        )
        return self._root, self.accelerator.prepare_optimizer(optimizer)

    def gathered_parameters(self) -> AbstractContextManager[None]:
        return self._root.gathered()

    def full_state_on_cpu(self, *, read: bool = False) -> AbstractContextManager[None]:
        return self._root.full_parameters(here=self.is_main or read, keep=read)

    def full_state(self, tree: Any) -> Any:
        if isinstance(tree, dict):
            return {key: self.full_state(value) for key, value in tree.items()}
        if isinstance(tree, list):
            return [self.full_state(value) for value in tree]
        full = full_on_cpu(tree)
        # The first rank writes: the others free each tensor before the next one is gathered.
        return full if full is tree or self.is_main else full.new_empty(0)
