"""Weights shared out over processes with FSDP2: what :class:`~torchrl_llm.trainers.ranks.Ranks` needs for it.

One root holds everything that computes with the weights (:class:`Sharded`), so that one forward gathers what actor, critic and
heads need. accelerate's settings say how; its own wrapping takes a bare model for the root, and runs on GPUs only.
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
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, distribute_tensor

from torchrl_llm.modules import TurnCritic
from torchrl_llm.trainers.config import ConfigError


def check_plugin(plugin: FullyShardedDataParallelPlugin) -> None:
    """Refuse settings of accelerate that would be ignored, or do harm.

    Raises:
        ConfigError: names the setting and what to use instead.
    """
    instead = {
        "version": (plugin.fsdp_version != 2, "2"),
        "offload_params": (isinstance(plugin.cpu_offload, CPUOffloadPolicy), "false"),
        "cpu_ram_efficient_loading": (plugin.cpu_ram_efficient_loading, "false: every process reads the weights"),
        "activation_checkpointing": (plugin.activation_checkpointing, "false: the run has gradient_checkpointing"),
    }
    for name, (refused, expected) in instead.items():
        if refused:
            raise ConfigError(f"accelerate's fsdp_{name} is not supported as given; expected {expected}.")


class Sharded(nn.Module):
    """The root of all sharded weights; computes ``loss``.

    Every process calls it equally often: a forward, and its backward, gather weights.

    Args:
        loss: its actor and critic are trained.
        *others: what computes with weights without being trained, such as a reference.
        plugin: accelerate's settings.
        mesh: the processes.
    """

    def __init__(
        self, loss: nn.Module, *others: nn.Module, plugin: FullyShardedDataParallelPlugin, mesh: DeviceMesh
    ) -> None:
        super().__init__()
        # The loss is no submodule: those of TorchRL list their parameters in a way of their own.
        self._loss = (loss,)
        self.networks = nn.ModuleList([*loss.children(), *others])
        self._reshard = bool(plugin.reshard_after_forward)
        given = plugin.mixed_precision_policy
        # Gradients are sums of many terms, losses and log-probs are no activations: both keep their precision.
        half = MixedPrecisionPolicy() if given is None else MixedPrecisionPolicy(given.param_dtype, torch.float32)
        for layer in _layers(self, plugin.transformer_cls_names_to_wrap):
            fully_shard(layer, mesh=mesh, mp_policy=half, reshard_after_forward=self._reshard)
        # Trainable weights that are gathered together have one dtype; a value head has its own.
        for critic in [module for module in self.modules() if isinstance(module, TurnCritic)]:
            fully_shard(critic.value_head, mesh=mesh, reshard_after_forward=self._reshard)
        root: Any = fully_shard(self, mesh=mesh, mp_policy=half, reshard_after_forward=False)
        # The first that runs is taken for the root: it must not be a layer.
        register_fsdp_forward_method(self, "_be_root")
        self._be_root()
        root.reshard()

    def _be_root(self) -> None:
        pass

    def __call__(self, rows: TensorDictBase) -> TensorDictBase:
        """The loss of ``rows``."""
        return TensorDict(super().__call__(rows))

    def forward(self, rows: TensorDictBase) -> dict[str, Tensor]:
        """The same as a ``dict``: FSDP2 looks for tensors in the containers of Python."""
        return dict(self._loss[0](rows).items())

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Inside, this process has all weights on its device, and forwards without a graph wait for nobody."""
        root: Any = self
        units = [module for module in self.modules() if isinstance(module, FSDPModule)]
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
    def exported(self, *, here: bool = True, keep: bool = False, frozen: bool = True) -> Iterator[None]:
        """Inside, the parameters are whole tensors in the host's memory, to be written to files or read from them.

        Nothing can compute inside: forwards would take the shards.

        Args:
            here: whether this process gets them; the others only take part.
            keep: take over what is written to the parameters inside, which has to be the same on all processes.
            frozen: those that are not trained too; otherwise they stay shards.
        """
        places: list[tuple[nn.Module, str, Any]] = [
            (module, name, parameter)
            for module in self.modules()
            for name, parameter in module._parameters.items()
            if isinstance(parameter, DTensor) and (frozen or parameter.requires_grad)
        ]
        whole: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
        for _, _, parameter in places:
            if id(parameter) not in whole:
                full = on_host(parameter)
                whole[id(parameter)] = parameter, nn.Parameter(full, parameter.requires_grad) if here else parameter
        # After a load_state_dict FSDP2 would look for its shards.
        hooks = {module: module._load_state_dict_post_hooks for module, _, _ in places}
        for module, name, parameter in places:
            module._parameters[name] = whole[id(parameter)][1]
            module._load_state_dict_post_hooks = OrderedDict()
        try:
            yield
        finally:
            for module, name, parameter in places:
                module._parameters[name] = parameter
                module._load_state_dict_post_hooks = hooks[module]
        if keep:
            with torch.no_grad():
                for own, full in whole.values():
                    own.copy_(shard_like(own, full))


def _layers(root: nn.Module, names: list[str] | None) -> list[nn.Module]:
    """The transformer blocks, which are gathered one at a time: those named, or those that transformers never splits."""
    wanted = set(names or ())
    if not wanted:
        wanted = {name for module in root.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    found = [module for module in root.modules() if type(module).__name__ in wanted]
    if not found:
        raise ConfigError(
            f"No module is a {' or '.join(sorted(wanted)) or 'block that transformers names'}: give the class of the model's "
            "blocks as accelerate's fsdp_transformer_layer_cls_to_wrap."
        )
    return found


def adopt(optimizer: torch.optim.Optimizer, old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> None:
    """Give an optimizer that has not stepped yet the ``new`` parameters for those of the same names in ``old``."""
    found = {id(parameter): new[name] for name, parameter in old.items()}
    for group in optimizer.param_groups:
        group["params"] = [found[id(parameter)] for parameter in group["params"]]


@torch.no_grad()
def on_host(value: Any) -> Any:
    """A tensor as a whole in the host's memory if it is shared out, else as it is; all processes call this."""
    return value.full_tensor().cpu() if isinstance(value, DTensor) else value


def shard_like(parameter: Tensor, full: Tensor) -> Tensor:
    """This process's part of a tensor that all of them have, shared out as ``parameter`` is."""
    if not isinstance(parameter, DTensor) or full.shape != parameter.shape:
        return full
    mesh = parameter.device_mesh
    return distribute_tensor(full.to(mesh.device_type), mesh, parameter.placements, src_data_rank=None)
