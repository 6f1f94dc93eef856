"""On-policy batches of whole episodes, a turn of all slots at a time: :class:`TurnCollector`,
:class:`LockstepExecutor`."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.envs import EnvBase, TransformedEnv

from torchrl_llm import keys
from torchrl_llm.collectors._queue import EpisodeQueue, RolloutExecutor
from torchrl_llm.collectors.async_turn import slots_of
from torchrl_llm.collectors.branching import FAULT_SCOPE, Branches, value_states
from torchrl_llm.collectors.collector import EpisodeCollector, base_env
from torchrl_llm.collectors.trees import Trees, grow, mark_trees
from torchrl_llm.data.sequence import new_episodes, record_turns
from torchrl_llm.envs.env import GEMEnv
from torchrl_llm.envs.faults import FaultCounter
from torchrl_llm.envs.slots import FAILED
from torchrl_llm.episode import Episode
from torchrl_llm.keys import StopReason


class TurnCollector(EpisodeCollector):
    """Runs B tasks over N slots, a turn of all slots at a time, and delivers the episodes in the
    order sampled.

    A slot is refilled as soon as its episode ends, until B tasks are sampled; then slots idle, and
    the batch is complete when the last episode ends. Short and long episodes therefore occur as
    often as under the policy, one policy version collects the whole batch, groups are whole, and
    nothing is in flight between batches. ``B`` may be any multiple of the group size; ``B = 4 N``
    keeps slots about 80 % busy, ``B = 8 N`` about 90 %.

    An episode whose environment failed has no true reward: its group is dropped and further tasks
    fill the batch, as :class:`~torchrl_llm.collectors.AsyncTurnCollector` does.

    Batches are rows ``[B]``, one episode each (:mod:`torchrl_llm.keys`). Frames are turns. With a
    ``replay_buffer`` each batch extends it, and iteration yields ``None``.

    Environments are used through ``env.step`` and ``env.reset``, so any ``EnvBase`` works,
    transforms included.

    Args:
        env: an environment with batch size ``[N]`` that has the keys of :mod:`torchrl_llm.keys` and
            starts the next task at a partial reset, such as :class:`~torchrl_llm.envs.GEMEnv` with
            ``on_done="refill"``; or a function that makes it.
        policy: a :class:`~torchrl_llm.modules.policy.TurnPolicy`.
        batch_size: episodes B of a batch.
        total_frames: stop once this many turns are collected; default -1, no limit.
        total_batches: stop after this many batches; default -1, no limit.
        replay_buffer: extended by every batch; default none.
        postproc: called on every batch, before it is stored or yielded; default none.
        exploration_type: as in TorchRL; default ``ExplorationType.RANDOM``.
        max_faults: failed episodes tolerated for one batch; one more raises an
            ``EnvironmentFault``. Default 16. The environment's own ``max_faults``, in a row, holds
            too. With ``trees``, of the continuations as many more.
        keep_failed: deliver episodes whose environment failed as far as they were collected, and
            replace none, so that they count where nothing is trained on them, as in an evaluation.
            One that failed at its reset never began: the next task fills the batch. Default False.
        branches: play continuations of the states of every batch, and write what they return to
            ``("turn", "sampled_value")`` ``[B, T]`` (:func:`~torchrl_llm.collectors.value_states`);
            for a GEMEnv and a TurnPolicy. Default none.
        trees: continue some of the episodes from the middle and deliver all that comes of it, rows
            with ``("turn", "unit")``, which of them count as one at each turn, and
            ``"row_weight"``, how much each counts (:class:`~torchrl_llm.collectors.Trees`); for a
            GEMEnv and a TurnPolicy. ``batch_size`` counts all rows; a group has the rows of all its
            trees. Default none.
        policy_device: the policy reads its input on this device; default the environment's.
        weight_sync_schemes: by model id, what ``update_policy_weights_()`` sends weights with, such
            as ``{"policy": EngineWeightSync(...)}``; default none: the policy shares the trained
            weights.
        pre_collect_hook, post_collect_hook: called before and after every batch; default none.

    Raises:
        ValueError: ``batch_size`` is not a multiple of the environment's group size, or the
            environment has not exactly one batch dimension.
        EnvironmentFault: more than ``max_faults`` episodes of a batch failed.
        RuntimeError: the environment leaves slots empty at a partial reset, or samples tasks other
            than B whole groups.

    Examples:
        >>> from torchrl_llm.envs import GEMEnv
        >>> from torchrl_llm.testing.environments import StopOrGo
        >>> from torchrl_llm.testing.policies import ScriptedPolicy
        >>> from torchrl_llm.testing.tokenizers import byte_tokenizer
        >>> tokenizer = byte_tokenizer()
        >>> env = GEMEnv(StopOrGo, tokenizer=tokenizer, num_envs=2, max_output_tokens=32)
        >>> policy = ScriptedPolicy(lambda episode, turn, _: "stop" if turn == episode else "go", tokenizer=tokenizer)
        >>> collector = TurnCollector(env, policy, batch_size=3, total_batches=1)
        >>> for batch in collector:
        ...     print(batch["turn", "mask"].int().tolist())
        [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    """

    def __init__(
        self,
        env: EnvBase | Callable[[], EnvBase],
        policy: Callable[[TensorDictBase], TensorDictBase],
        *,
        keep_failed: bool = False,
        branches: Branches | None = None,
        trees: Trees | None = None,
        policy_device: torch.device | str | None = None,
        **kwargs: Any,
    ) -> None:
        if trees is not None and (branches is not None or keep_failed):
            raise ValueError(
                "trees cannot go with branches or keep_failed: their continuations are rows, and must not fail."
            )
        super().__init__(env, policy, 0, keep_failed, False, 1 if trees is None else trees.size, **kwargs)
        self._executor = LockstepExecutor(self.env, policy, self._queue, policy_device)
        self.branches, self.trees, self._played = branches, trees, Counter[str]()
        if branches is not None or trees is not None:
            slots_of(self.env)  # or raise

    def metrics(self) -> dict[str, float]:
        return super().metrics() | {f"data/{name}": float(n) for name, n in self._played.items()}

    def state_dict(self) -> OrderedDict:
        return super().state_dict() | ({"branches": dict(self._played)} if self._played else {})

    def load_state_dict(self, state_dict: OrderedDict, **kwargs: Any) -> None:
        super().load_state_dict(state_dict, **kwargs)
        self._played = Counter(state_dict.get("branches", {}))

    def _next_batch(self) -> list[Episode]:
        if self.trees is None:
            return super()._next_batch()
        episodes: list[Episode] = []
        counted = self._queue.faults
        faults = FaultCounter(counted.max_faults, FAULT_SCOPE, counted.counts)  # of all rounds
        while len(episodes) < self.batch_size:
            self._num_wanted = (self.batch_size - len(episodes)) // self.trees.size
            roots = super()._next_batch()
            grown = grow(self.env, self.policy, roots, self.trees, greedy=self._greedy, max_faults=faults)
            self._count_dropped(roots, grown, faults)
            episodes += grown
        return episodes

    def _count_dropped(self, roots: list[Episode], grown: list[Episode], faults: FaultCounter) -> None:
        """Count the episodes of groups that are left out because a continuation failed."""
        assert self.trees is not None
        kept = {episode.group_id for episode in grown}
        reasons = {fault.task_spec.group_id: fault.reason for fault in faults.recent}
        for root in roots:
            if root.group_id not in kept:
                self._queue.dropped[reasons[root.group_id]] += self.trees.size

    def _rows(self, episodes: list[Episode]) -> TensorDict:
        rows = super()._rows(episodes)
        if self.trees is not None:
            self._played.update(replayed_turns=mark_trees(rows, episodes, self.trees))
        if self.branches is not None:
            limit = self._queue.faults.max_faults
            found = value_states(self.env, self.policy, episodes, self.branches, greedy=self._greedy, max_faults=limit)
            rows[keys.SAMPLED_VALUE] = found.values
            self._played.update(continuations=found.continuations, continued_turns=found.turns)
        return rows

    def _after_error(self, error: BaseException) -> None:
        # Nothing is in flight, so a later rollout may sample further tasks.
        self._forget()

    def _env_state(self) -> OrderedDict:
        return _env_state(self.env)


def _env_state(env: EnvBase) -> OrderedDict:
    if isinstance(env, TransformedEnv):
        return OrderedDict(base=_env_state(env.base_env), transform=env.transform.state_dict())
    return OrderedDict(env.state_dict())


class LockstepExecutor(RolloutExecutor):
    """Runs any environment of batch size ``[N]`` with the keys of :mod:`torchrl_llm.keys`,
    transforms included.

    The environment samples tasks itself at a partial reset, and contains its own faults; faults of
    a :class:`~torchrl_llm.envs.GEMEnv` (also beneath transforms) are counted.

    Args:
        env: used by nothing else meanwhile.
        policy: answers a turn of all slots.
        queue: gets the episodes.
        policy_device: the policy reads its input on this device; ``None``: on the environment's.
    """

    def __init__(
        self,
        env: EnvBase,
        policy: Callable[[TensorDictBase], TensorDictBase],
        queue: EpisodeQueue,
        policy_device: torch.device | str | None,
    ) -> None:
        self._env, self._policy, self._queue, self._policy_device = env, policy, queue, policy_device
        base = base_env(env)
        self._base = base if isinstance(base, GEMEnv) else None
        self._episodes: list[Episode | None] = [None] * env.batch_size[0]
        self._current: TensorDictBase = TensorDict({}, env.batch_size)

    @property
    def in_flight(self) -> int:
        return sum(episode is not None for episode in self._episodes)

    def step(self) -> bool:
        self._fill()
        active_episodes = {slot: episode for slot, episode in enumerate(self._episodes) if episode is not None}
        if not active_episodes:
            return False
        active = torch.zeros(len(self._episodes), dtype=torch.bool)
        active[[*active_episodes]] = True
        current = self._respond(active)
        if not active.all():
            current.set("_step", active.unsqueeze(-1).to(self._env.device))
        # The mask is of this step: the next one has other slots.
        step = self._env.step(current).exclude("_step")
        record_turns([*active_episodes.values()], step if active.all() else step[active])
        self._current = self._env.step_mdp(step)
        for slot, episode in active_episodes.items():
            if self._base is not None:
                episode.texts |= self._base.slots[slot].steps[-1].texts
            if episode.finished:
                self._episodes[slot] = None
            if episode.stop_reason in FAILED and not self._queue.keep_failed:
                self._queue.drop(episode.group_id, StopReason(episode.stop_reason).name.lower())
        self._record_faults()
        return True

    def release(self, episode: Episode) -> None:
        if episode in self._episodes:
            slot = self._episodes.index(episode)
            self._episodes[slot] = None
            if self._base is not None:
                self._base.slots.renew(slot)

    def clear(self) -> None:
        for episode in filter(None, [*self._episodes]):
            self.release(episode)

    def close(self, timeout: float) -> None:
        self._current = TensorDict({}, self._env.batch_size)

    def _fill(self) -> None:
        while (free := [i for i, episode in enumerate(self._episodes) if episode is None]) and self._queue.room:
            # No more than the batch lacks: an environment samples a task for each slot that it
            # resets.
            chosen = free[: self._queue.room]
            self._reset(chosen)
            found = zip(chosen, new_episodes(self._current[chosen]), strict=True)
            # Where a reset failed, a slot got a later task than the slots after it.
            for slot, episode in sorted(found, key=lambda item: item[1].episode_id):
                if self._queue.add(episode):
                    self._episodes[slot] = episode
            self._record_faults()

    def _reset(self, slots: list[int]) -> None:
        chosen = torch.zeros(len(self._episodes), 1, dtype=torch.bool, device=self._env.device)
        chosen[slots] = True
        self._current = self._env.reset(self._current.copy().set("_reset", chosen))
        if not self._current[keys.PROMPT_LENGTH][chosen].all():
            raise RuntimeError(
                "The environment left slots empty at a partial reset, so no more tasks can be sampled. "
                'Make it with on_done="refill" (on_done="idle" is for stock collectors).'
            )

    def _respond(self, active: Tensor) -> TensorDictBase:
        # Slots whose episode is over still show it; for the policy they idle.
        current, idle = self._current, ~active.unsqueeze(-1).to(self._env.device)
        current.set(keys.PROMPT_LENGTH, current[keys.PROMPT_LENGTH].masked_fill(idle, 0))
        if self._policy_device is None:
            return self._policy(current)
        return self._policy(current.to(self._policy_device)).to(self._env.device)

    def _record_faults(self) -> None:
        """Count the failures of the last reset or step; a task whose reset failed never got to the
        queue."""
        for fault in [] if self._base is None else self._base.new_faults:
            if fault.turn < 0:
                self._queue.dropped[fault.reason] += 1
            self._queue.faults.record(fault)
