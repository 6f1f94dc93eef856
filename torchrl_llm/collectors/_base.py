"""What collectors of whole conversations share: :class:`ConversationCollector`.

Here live limits, hooks, the replay buffer and what TorchRL asks of a collector. How conversations are played is the
subclasses' business.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.collectors import BaseCollector
from torchrl.data import ReplayBuffer
from torchrl.envs import EnvBase
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.weight_update import WeightSyncScheme

from torchrl_llm import keys
from torchrl_llm.interrupts import interruptible
from torchrl_llm.stops import share_stop_ids

logger = logging.getLogger(__name__)

MASK = keys.COLLECTOR_MASK

PADDING: dict[Any, int] = {
    key: spec.fill for name, spec in keys.TURN_VIEW.items() for key in (name, ("next", name)) if spec.fill
}
"""What the steps after an episode's end hold, where it is not 0."""


def _check_turn_end(env: EnvBase, policy: Any) -> None:
    """Say so if the policy stops at some ids, but not at the one that the environment's chat template ends a turn with."""
    formatter, stops = getattr(env, "formatter", None), getattr(policy, "stop_ids", None)
    if formatter is None or not stops or not formatter.end_of_turn_ids or formatter.end_of_turn_ids[0] in stops:
        return
    end, names = formatter.end_of_turn_ids[0], formatter.tokenizer.convert_ids_to_tokens
    logger.warning(
        "The chat template ends a turn with %r (id %d), where the policy does not stop: its stop ids are %s. Responses will "
        "run on to max_output_tokens. Pass SamplingConfig(stop_ids=%s).",
        names(end), end, dict(zip(stops, names(list(stops)), strict=True)), tuple(sorted({end, *stops})),
    )  # fmt: skip


class ConversationCollector(BaseCollector):
    """Delivers batches ``[B, T]`` of whole conversations, whole groups, in the order dealt; frames are turns.

    Subclasses implement :meth:`_collect` and the state. Their arguments that mean the same are documented at
    :class:`~torchrl_llm.collectors.TurnCollector`.
    """

    init_random_frames = 0
    interruptible: Callable[[Callable[[], TensorDictBase]], TensorDictBase] = staticmethod(interruptible)
    """Calls what plays a batch; a trainer of several ranks puts in what they agree by (:mod:`torchrl_llm.interrupts`)."""

    def __init__(
        self,
        env: EnvBase | Callable[[], EnvBase],
        policy: Callable[[TensorDictBase], TensorDictBase],
        *,
        batch_size: int,
        total_frames: int = -1,
        total_batches: int = -1,
        replay_buffer: ReplayBuffer | None = None,
        postproc: Callable[[TensorDictBase], TensorDictBase] | None = None,
        exploration_type: ExplorationType = ExplorationType.RANDOM,
        weight_sync_schemes: dict[str, WeightSyncScheme] | None = None,
        pre_collect_hook: Callable[[], None] | None = None,
        post_collect_hook: Callable[[TensorDictBase], None] | None = None,
    ) -> None:
        super().__init__(pre_collect_hook=pre_collect_hook, post_collect_hook=post_collect_hook)
        self.env: EnvBase = env if isinstance(env, EnvBase) else env()
        if len(self.env.batch_size) != 1:
            raise ValueError(f"The environment's batch size is {self.env.batch_size}; expected one dimension [N].")
        self.group_size = int(getattr(self.env, "group_size", 1))
        if batch_size < 1 or batch_size % self.group_size:
            raise ValueError(f"batch_size is {batch_size}; expected a multiple of the group size {self.group_size}.")
        self.policy = policy
        _check_turn_end(self.env, policy)
        share_stop_ids(self.env, policy)
        self.batch_size = batch_size
        self.total_frames = total_frames
        self.total_batches = total_batches
        self.requested_frames_per_batch = batch_size
        self.replay_buffer = replay_buffer
        self.postproc = postproc
        self.exploration_type = exploration_type
        self.closed = False
        self._frames = 0
        self._iter = -1
        self._weight_sync_schemes = weight_sync_schemes
        for model_id, scheme in (weight_sync_schemes or {}).items():
            if not scheme.initialized_on_sender:
                scheme.init_on_sender(model_id=model_id, context=self)
            if not scheme.synchronized_on_sender:
                scheme.connect()

    # ------------------------------------------------------------------ iteration

    def iterator(self) -> Iterator[TensorDictBase | None]:
        """Yield batches, or ``None`` for each batch written to the replay buffer, until a limit is reached."""
        while not self._reached_limit():
            batch = self.rollout()
            if self.replay_buffer is None:
                yield batch
            else:
                self.replay_buffer.extend(batch)
                yield None

    def rollout(self) -> TensorDictBase:
        """Collect one batch ``[B, T]`` (whatever the limits say) and return it; the replay buffer is left alone."""
        if self.closed:
            raise RuntimeError("The collector was shut down. Make a new one.")
        if self.pre_collect_hook is not None:
            self.pre_collect_hook()
        with torch.no_grad(), set_exploration_type(self.exploration_type):
            batch = self.interruptible(self._collect)
        self._frames += int(batch[MASK].sum())
        self._iter += 1
        if self.postproc is not None:
            batch = self.postproc(batch)
        if self.post_collect_hook is not None:
            self.post_collect_hook(batch)
        return batch

    def __len__(self) -> int:
        if self.total_batches < 0:
            raise TypeError("The number of batches is unknown; pass total_batches to fix it.")
        return self.total_batches

    def _reached_limit(self) -> bool:
        return 0 <= self.total_frames <= self._frames or 0 <= self.total_batches <= self._iter + 1

    @abstractmethod
    def _collect(self) -> TensorDictBase:
        """The next batch ``[B, T]``, B whole conversations."""

    def _check_tickets(self, episodes: Tensor, group: Tensor) -> None:
        sizes = group.unique(return_counts=True)[1]
        if len(episodes) != self.batch_size or not (sizes == self.group_size).all():
            raise RuntimeError(
                f"The environment dealt {len(episodes)} episodes in groups of {sorted(set(sizes.tolist()))}; expected "
                f"{self.batch_size} in groups of {self.group_size}. Was it reset by something else than this collector? "
                "A reset of all its slots keeps groups whole; a partial one may not."
            )

    # ------------------------------------------------------------------ what TorchRL asks of a collector

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed the environment's tickets; return the next seed, as TorchRL's collectors do."""
        return int(self.env.set_seed(seed, static_seed=static_seed))

    def getattr_rb(self, attr: str) -> Any:
        """An attribute of the replay buffer."""
        return getattr(self.replay_buffer, attr)

    @abstractmethod
    def state_dict(self) -> OrderedDict:
        """The counters and the environment's state."""

    @abstractmethod
    def load_state_dict(self, state_dict: OrderedDict, **kwargs: Any) -> None:
        """Go on with the ticket that comes next in ``state_dict``."""

    def shutdown(self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True) -> None:
        """Close the environment (unless ``close_env=False``); a second call does nothing. The policy stays open."""
        if not self.closed:
            self.closed = True
            if close_env and not self.env.is_closed:
                self.env.close(raise_if_closed=raise_on_error)

    def _maybe_fallback_update(self, policy_or_weights: Any = None, *, model_id: str | None = None) -> None:
        # The policy is in this process: without weights given it already has them.
        if policy_or_weights is not None:
            weights = self._extract_weights_if_needed(policy_or_weights, model_id or "policy")
            TensorDict.from_module(self.policy).data.update_(weights.data)
        if hasattr(self.policy, "weights_changed"):
            self.policy.weights_changed()
