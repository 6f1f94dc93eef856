"""The states in a checkpoint besides weights: optimizer, collectors, tasks; and how a checkpoint
holds a state."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import tensordict
import torch
from torchrl.checkpoint import Checkpoint, CheckpointError, StateDictCheckpointAdapter

from torchrl_llm.envs.resharding import reshard_state, same_tasks
from torchrl_llm.trainers.distributed import Distributed
from torchrl_llm.trainers.fsdp import shard_like


class State(StateDictCheckpointAdapter):
    """Saves a ``state_dict`` as JSON and one archive of tensors, and reads nothing else.

    An archive, because it is written and not mapped: where a disk is full, writing to a mapped file
    ends the process (SIGBUS).
    """

    def __init__(self) -> None:
        super().__init__("archive")

    def load(self, component: Any, path: Path, **options: Any) -> None:
        """Read them into ``component``.

        Raises:
            CheckpointError: there are other files, which TorchRL would read instead.
            RuntimeError: the archive holds a pickle.
        """
        expected = {self.state_archive, self.schema_filename}
        found = {file.name for file in path.iterdir()}
        if found != expected:
            raise CheckpointError(f"{path} holds {sorted(found)}; expected {sorted(expected)}.")
        # TorchRL's own call allows them
        tensordict.load(path / self.state_archive, allow_pickle=False)
        super().load(component, path, **options)


class Held:
    """A state as a component: it takes the state of another one, to be looked at before anything is
    changed."""

    state: Any = None

    def state_dict(self) -> dict[str, Any]:
        """The state."""
        return self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state."""
        self.state = state_dict


def read_states(path: str | Path, *names: str) -> dict[str, Any]:
    """The states of the components ``names`` of a checkpoint; nothing is loaded."""
    held = {name: Held() for name in names}
    states_of(**held).load(path)
    return {name: each.state for name, each in held.items()}


class Optimizer:
    """The optimizer of all ranks as one component of a checkpoint, in the same format however its
    state is sharded.

    Args:
        optimizer: this rank's.
        distributed: all ranks; each calls :meth:`gather` before the first one saves, and loads.
        keep: options of the parameter groups, such as ``"weight_decay"``, that stay as they are
            when a state is loaded.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, distributed: Distributed, *, keep: Collection[str] = ()
    ) -> None:
        self.optimizer, self.distributed, self.keep = optimizer, distributed, keep
        self._state: dict[str, Any] = {}

    def gather(self) -> None:
        """Gather the state on the first rank."""
        self._state = self.distributed.full_state(self.optimizer.state_dict())

    def state_dict(self) -> dict[str, Any]:
        """The state that :meth:`gather` found."""
        return self._state

    def check(self, state_dict: dict[str, Any]) -> None:
        """Refuse the state of an optimizer of other parameters.

        Raises:
            CheckpointError: the parameter groups are not as many or not as large as those here.
        """
        both = state_dict["param_groups"], self.optimizer.param_groups
        theirs, ours = ([len(group["params"]) for group in groups] for groups in both)
        if theirs != ours:
            raise CheckpointError(
                f"The checkpoint's optimizer has parameter groups of {theirs} tensors; expected {ours}, as the one here has (of actor, "
                "critic and the loss, as far as there are any). Give the run the algorithm, networks and loss of the checkpoint, "
                "start another run from its weights with init_from, or load them alone (load_optimizer=False)."
            )
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        for index, values in state_dict["state"].items():
            shape = parameters[int(index)].shape
            shapes = [value.shape for value in values.values() if torch.is_tensor(value) and value.ndim]
            if wrong := [each for each in shapes if each != shape]:
                raise CheckpointError(
                    f"The checkpoint's optimizer has the state of a parameter of shape {[*wrong[0]]}, which has the shape {[*shape]} "
                    "here. Give the run the networks and the loss of the checkpoint, or start another run from its weights with "
                    "init_from."
                )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state, or this rank's shard of it."""
        self.check(state_dict)
        groups = self.optimizer.param_groups
        parameters = [parameter for group in groups for parameter in group["params"]]
        kept = [{name: group[name] for name in self.keep if name in group} for group in groups]
        state = {
            index: {name: shard_like(parameters[int(index)], value) for name, value in values.items()}
            for index, values in state_dict["state"].items()
        }
        self.optimizer.load_state_dict(state_dict | {"state": state})
        for group, own in zip(self.optimizer.param_groups, kept, strict=True):
            group |= own


class Collectors:
    """The collectors of all ranks as one component of a checkpoint.

    Args:
        collector: this rank's.
        distributed: all ranks; each calls :meth:`gather` before the first one saves, and loads.
        state: what to save instead of the collector's state now; ``None``: that.
    """

    def __init__(self, collector: Any, distributed: Distributed, state: dict[str, Any] | None = None) -> None:
        self.collector, self.distributed, self.state = collector, distributed, state
        self._states: list[dict[str, Any]] = []

    def gather(self) -> None:
        """Gather the states on the first rank."""
        self._states = self.distributed.all_gather([self.collector.state_dict() if self.state is None else self.state])

    def state_dict(self) -> dict[str, Any]:
        """The states that :meth:`gather` found, by rank."""
        return {str(rank): state for rank, state in enumerate(self._states)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue with this rank's next task; where ranks, groups or the mixture are others, with
        one that no rank has sampled."""
        states, own = list(state_dict.values()), self.collector.state_dict()
        if len(states) == self.distributed.world_size and _continues(states[0], own):
            state = state_dict[str(self.distributed.rank)]
        else:
            state = sampled_further(states, own)
        self.collector.load_state_dict(state)


def _continues(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Whether the states of two collectors are of the same stream of tasks, as far as they hold
    one."""
    mine, theirs = (state.get("env_state_dict") for state in (old, new))
    return not mine or not theirs or same_tasks(mine, theirs)


def sampled_further(old: Sequence[Mapping[str, Any]], new: Mapping[str, Any]) -> dict[str, Any]:
    """The state of a fresh collector that continues the collectors of another number of processes.

    Args:
        old: states of all collectors of the earlier run.
        new: the state of one of this run.

    Returns:
        The new state, with the first task to sample and the success rates of the old ones
        (``envs.resharding.reshard_state``).
    """
    env = reshard_state([state["env_state_dict"] for state in old], new["env_state_dict"])
    return {**new, "env_state_dict": env, "iter": old[0]["iter"]}


def states_of(**components: Any) -> Checkpoint:
    """A checkpoint of components with a ``state_dict``; no pickle is read."""
    checkpoint = Checkpoint()
    for name, component in components.items():
        checkpoint.register(name, component, adapter=State())
    return checkpoint
