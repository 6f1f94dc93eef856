"""What a loss and its estimator keep from one iteration to the next, beside the networks:
:class:`LossState`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torchrl.checkpoint import CheckpointError
from torchrl.objectives.value import ValueEstimatorBase

from torchrl_llm.objectives import TurnLoss
from torchrl_llm.runs.states import Held, states_of
from torchrl_llm.trainers import Callback, Distributed, LLMTrainer

logger = logging.getLogger(__name__)

_EXTRA = "_extra_state"
"""What PyTorch calls the entry of ``get_extra_state`` in a ``state_dict``."""


class LossState(Callback):
    """The state of a loss and its estimator as one component of a checkpoint: their ``state_dict``
    without the networks'.

    Buffers, parameters and what ``get_extra_state`` returns belong to it: a baseline or a
    coefficient that is learned, say.

    As a callback it ends loading when training begins: an estimator that was made since then gets
    its state, and what has no place is named.

    Args:
        loss: with its estimator.
        distributed: all ranks; each calls :meth:`gather` before the first one saves, and loads.
    """

    def __init__(self, loss: TurnLoss, distributed: Distributed) -> None:
        self.loss, self.distributed = loss, distributed
        self._state: dict[str, Any] = {}
        # The estimator for which a state was loaded, and the state; None once training has begun.
        self._loaded: tuple[ValueEstimatorBase, dict[str, Any]] | None = None

    def gather(self) -> None:
        """Gather the state on the first rank.

        Raises:
            CheckpointError: a checkpoint cannot hold a part of it.
        """
        own = own_state(self.loss)
        check_state(self.loss, own)
        self._state = self.distributed.full_state(own)

    def state_dict(self) -> dict[str, Any]:
        """The state that :meth:`gather` found; empty for the losses of this library."""
        return self._state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what the loss and its estimator have a place for; :meth:`on_start` warns of the
        rest."""
        _load(self.loss, state_dict)
        self._loaded = (self.loss.value_estimator, dict(state_dict))

    def on_start(self, trainer: LLMTrainer) -> None:
        """End loading.

        Raises:
            CheckpointError: see :func:`check_state`; so that a run does not end with its first
                checkpoint.
        """
        if trainer.checkpoints is not None:
            check_state(self.loss, own_state(self.loss))
        if self._loaded is None:
            return
        (estimator, state), self._loaded = self._loaded, None
        if self.loss.value_estimator is not estimator:
            _load(self.loss, state)
        if left := sorted((own_state(self.loss).keys() | state.keys()) - _fitting(self.loss, state).keys()):
            logger.warning(
                "the checkpoint's state of %s and its estimator is not that of the one here: %s begin as new",
                type(self.loss).__name__,
                ", ".join(left),
            )


def own_state(loss: TurnLoss) -> dict[str, Any]:
    """The ``state_dict`` of ``loss`` and its estimator, without the weights and buffers of actor
    and critic."""
    networks = [network for network in (loss.actor_network, loss.critic_network) if network is not None]
    inside = {id(module) for network in networks for module in network.modules()}
    prefixes = tuple(f"{name}." for name, module in loss.named_modules(remove_duplicate=False) if id(module) in inside)
    # By identity too: a loss may hold the networks' tensors under further names, as the loss of a
    # shared trunk does.
    shared = {id(tensor) for network in networks for tensor in (*network.parameters(), *network.buffers())}
    found = loss.state_dict(keep_vars=True).items()
    own = {name: value for name, value in found if not name.startswith(prefixes) and id(value) not in shared}
    return {name: value.detach() if torch.is_tensor(value) else value for name, value in own.items()}


def check_state(loss: TurnLoss, state: Mapping[str, Any]) -> None:
    """Refuse a state that a checkpoint cannot hold, by the name of its module.

    Raises:
        CheckpointError: names the module, and what would do.
    """
    tried = {name: _without_values(value) for name, value in state.items()}
    if not tried or _error_of_saving(tried) is None:
        return
    for name, value in tried.items():
        if (error := _error_of_saving({name: value})) is None:
            continue
        module, what = type(_module(loss, name)).__name__, name.rpartition(".")[2]
        if what == _EXTRA:
            given = f"get_extra_state of {module} returns {state[name]!r:.80}"
            instead = "return numbers, texts and tensors, and lists, tuples and dictionaries of them"
        else:
            given = f"{what!r} of {module} is a tensor of {state[name].layout} and {state[name].dtype} on {state[name].device.type!r}"
            instead = "keep its values in dense tensors of common dtypes, or make it a buffer with persistent=False"
        raise CheckpointError(
            f"{given}, which a checkpoint cannot hold ({type(error).__name__}: {error}): {instead}."
        ) from error


def _without_values(value: Any) -> Any:
    """For an ordinary tensor, which may be large or sharded, an empty one of its dtype; another
    value as it is."""
    ordinary = torch.is_tensor(value) and value.layout == torch.strided
    if not ordinary or value.is_quantized or value.is_nested or value.is_meta:
        return value
    return torch.empty(0, dtype=value.dtype)


def _error_of_saving(state: Mapping[str, Any]) -> Exception | None:
    part = Held()
    part.state = dict(state)
    try:
        # what can be saved is for the checkpoint's own code to say
        with TemporaryDirectory() as folder:
            states_of(part=part).save(folder)
    except (TypeError, ValueError, RuntimeError, LookupError) as error:
        return error
    except OSError:  # the disk, and not the state: for the checkpoint itself to say
        return None
    return None


def _module(loss: TurnLoss, name: str) -> torch.nn.Module:
    """The module that an entry of the ``state_dict`` is of."""
    return loss.get_submodule(name.rpartition(".")[0])


def _fitting(loss: TurnLoss, state: Mapping[str, Any]) -> dict[str, Any]:
    """The parts of ``state`` that have a place in ``loss``."""
    own = own_state(loss)
    return {name: value for name, value in state.items() if name in own and _fits(loss, name, value, own[name])}


def _fits(loss: TurnLoss, name: str, value: Any, own: Any) -> bool:
    if not name.endswith(_EXTRA):
        return getattr(value, "shape", None) == getattr(own, "shape", None)
    # It may be anything, such as a tensor that grows. A module that does not set it loses it
    # without a word from PyTorch.
    return type(_module(loss, name)).set_extra_state is not torch.nn.Module.set_extra_state


def _load(loss: TurnLoss, state: Mapping[str, Any]) -> None:
    # Not strict: the networks' weights are read from files of their own.
    loss.load_state_dict(_fitting(loss, state), strict=False)
