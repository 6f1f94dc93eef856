"""FSDP2 for models with heads: :class:`ShardedModule`, the parts of
:class:`~torchrl_llm.trainers.distributed.FSDP2`.

One root holds everything that computes with the weights, so that one forward gathers what actor,
critic and heads need. accelerate's settings say how. Its own wrapping is not used: it takes a bare
model for the root and runs on GPUs only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import FullyShardedDataParallelPlugin
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

from torchrl_llm.modules import TurnCritic
from torchrl_llm.utils.options import ConfigError


class ShardedModule(nn.Module):
    """The root of all sharded weights; computes ``loss``.

    Every process calls it equally often: a forward and its backward gather weights.

    Args:
        loss: its actor and critic are trained.
        *others: modules that compute with weights and are not trained, such as a reference.
        plugin: accelerate's settings.
        mesh: the processes.
    """

    def __init__(
        self, loss: nn.Module, *others: nn.Module, plugin: FullyShardedDataParallelPlugin, mesh: DeviceMesh
    ) -> None:
        super().__init__()
        # In a tuple, so that the loss is not a submodule: TorchRL's losses list their parameters in
        # their own way.
        self._loss = (loss,)
        self.networks = nn.ModuleList([*loss.children(), *others])
        self._reshard = bool(plugin.reshard_after_forward)
        given = plugin.mixed_precision_policy
        # Reduced and returned in float32: gradients are sums of many terms, and losses and
        # log-probs are not activations.
        dtypes = {} if given is None else {"param_dtype": given.param_dtype, "reduce_dtype": torch.float32}
        half = fsdp.MixedPrecisionPolicy(**dtypes)
        for layer in _layers(self, plugin.transformer_cls_names_to_wrap):
            fsdp.fully_shard(layer, mesh=mesh, mp_policy=half, reshard_after_forward=self._reshard)
        # A unit of its own: trainable weights of one unit must share a dtype, and a value head is
        # float32.
        for critic in [module for module in self.modules() if isinstance(module, TurnCritic)]:
            fsdp.fully_shard(critic.value_head, mesh=mesh, reshard_after_forward=self._reshard)
        # The root keeps its own weights after a forward, because the backward pass begins with
        # them.
        root: Any = fsdp.fully_shard(self, mesh=mesh, mp_policy=half, reshard_after_forward=False)
        # FSDP2 takes the first module that runs for the root. Without this call that could be a
        # layer (while scoring).
        fsdp.register_fsdp_forward_method(self, "_become_root")
        self._become_root()
        root.reshard()

    def _become_root(self) -> None:
        pass

    def __call__(self, rows: TensorDictBase) -> TensorDictBase:
        """The loss of ``rows``."""
        return TensorDict(super().__call__(rows))

    def forward(self, rows: TensorDictBase) -> dict[str, Tensor]:
        """The loss as a ``dict``: FSDP2 finds tensors in Python's containers only."""
        return dict(self._loss[0](rows).items())

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Inside, this process has all weights on its device, and forwards without a graph need no
        other process."""
        root: Any = self
        units = [module for module in self.modules() if isinstance(module, fsdp.FSDPModule)]
        # Otherwise a forward drops its weights, and the next one gathers them together with ranks
        # that may be at another turn.
        root.set_reshard_after_forward(False)
        for unit in units:
            unit.unshard()
        try:
            yield
        finally:
            root.set_reshard_after_forward(self._reshard)
            root.set_reshard_after_forward(False, recurse=False)
            for unit in units:
                unit.reshard()

    @contextmanager
    def full_parameters(self, *, here: bool = True, keep: bool = False, frozen: bool = True) -> Iterator[None]:
        """Inside, the parameters are full tensors on the CPU, to be written to files or read from
        them.

        Nothing can compute inside: forwards would use the shards.

        Args:
            here: whether this process gets them; the others only take part in gathering.
            keep: take over what is written to the parameters inside, which must be the same on all
                processes.
            frozen: include parameters that are not trained; otherwise they stay shards.
        """
        places = [
            (module, name, parameter)
            for module in self.modules()
            for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
            if isinstance(parameter, DTensor) and (frozen or parameter.requires_grad)
        ]
        full: dict[Any, Any] = {}
        for _, _, shard in places:
            if shard not in full:  # a tied parameter is gathered once, and stays tied
                gathered = full_on_cpu(shard)
                full[shard] = nn.Parameter(gathered, shard.requires_grad) if here else shard
        # FSDP2 resets its shards in a hook after load_state_dict, and finds none here. PyTorch has
        # no public way to take a hook out without its handle.
        hooks = {module: module._load_state_dict_post_hooks for module, _, _ in places}
        for module, name, shard in places:
            setattr(module, name, full[shard])
            module._load_state_dict_post_hooks = OrderedDict()
        try:
            yield
        finally:
            for module, name, shard in places:
                setattr(module, name, shard)
                module._load_state_dict_post_hooks = hooks[module]
        if keep:
            with torch.no_grad():
                for shard, tensor in full.items():
                    shard.copy_(shard_like(shard, tensor))


def _layers(root: nn.Module, names: list[str] | None) -> list[nn.Module]:
    """The transformer blocks, which are gathered one at a time: those named, or those that
    transformers never splits."""
    wanted = set(names or ())
    if not wanted:
        # accelerate and transformers themselves find the blocks by this attribute; there is no
        # public one.
        wanted = {name for module in root.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    found = [module for module in root.modules() if type(module).__name__ in wanted]
    if not found:
        raise ConfigError(
            f"No module is a {' or '.join(sorted(wanted)) or 'block that transformers names'}: give the class of the model's "
            "blocks as accelerate's fsdp_transformer_layer_cls_to_wrap."
        )
    return found


def replace_parameters(optimizer: torch.optim.Optimizer, old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> None:
    """Give an optimizer that has not stepped the ``new`` parameters for the parameters of the same
    names in ``old``."""
    found = {id(parameter): new[name] for name, parameter in old.items()}
    for group in optimizer.param_groups:
        group["params"] = [found[id(parameter)] for parameter in group["params"]]


@torch.no_grad()
def full_on_cpu(value: Any) -> Any:
    """A sharded tensor as a full one on the CPU, anything else as it is; collective."""
    return value.full_tensor().cpu() if isinstance(value, DTensor) else value


def shard_like(parameter: Tensor, full: Tensor) -> Tensor:
    """This process's shard of a tensor that all processes have, sharded as ``parameter`` is."""
    if not isinstance(parameter, DTensor) or full.shape != parameter.shape:
        return full
    mesh = parameter.device_mesh
    # src_data_rank=None: all ranks have the whole tensor, so nothing is sent.
    return distribute_tensor(full.to(mesh.device_type), mesh, parameter.placements, src_data_rank=None)
