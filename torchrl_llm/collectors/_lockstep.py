"""All slots a turn at a time, through ``env.step`` and ``env.reset``: :class:`LockstepExecutor`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.envs import EnvBase, TransformedEnv

from torchrl_llm import keys
from torchrl_llm.collectors._queue import EpisodeQueue, reason_of
from torchrl_llm.data.sequence import new_episodes, record_turns
from torchrl_llm.envs.env import GEMEnv
from torchrl_llm.envs.slots import FAILED
from torchrl_llm.episode import Episode
from torchrl_llm.keys import StopReason


def base_env(env: EnvBase) -> EnvBase:
    """The environment beneath transforms."""
    while isinstance(env, TransformedEnv):
        env = env.base_env
    return env


class LockstepExecutor:
    """Plays any environment of batch size ``[N]`` that speaks :mod:`torchrl_llm.keys`, transforms included.

    The environment deals by itself at a partial reset, and contains its own faults; those of a
    :class:`~torchrl_llm.envs.GEMEnv` (also beneath transforms) are counted.

    Args:
        env: played by nothing else meanwhile.
        policy: answers a turn of all slots.
        queue: takes the episodes.
        policy_device: the policy reads its input on this device; default the environment's.
    """

    def __init__(
        self,
        env: EnvBase,
        policy: Callable[[TensorDictBase], TensorDictBase],
        queue: EpisodeQueue,
        *,
        policy_device: torch.device | None = None,
    ) -> None:
        self._env, self._policy, self._queue, self._policy_device = env, policy, queue, policy_device
        base = base_env(env)
        self._gem = base if isinstance(base, GEMEnv) else None
        self._slots: list[Episode | None] = [None] * env.batch_size[0]
        self._current: TensorDictBase = TensorDict({}, env.batch_size)

    @property
    def in_flight(self) -> int:
        """Episodes that run."""
        return sum(episode is not None for episode in self._slots)

    def step(self) -> bool:
        """Fill the free slots, and play a turn of all that run."""
        self._fill()
        playing = {slot: episode for slot, episode in enumerate(self._slots) if episode is not None}
        if not playing:
            return False
        active = torch.zeros(len(self._slots), dtype=torch.bool)
        active[list(playing)] = True
        everyone, (faults, _) = len(playing) == len(self._slots), self._counts()
        current = self._respond(active)
        if not everyone:
            current.set("_step", active.unsqueeze(-1).to(self._env.device))
        step = self._env.step(current).exclude("_step")
        record_turns(list(playing.values()), step if everyone else step[active])
        self._current = self._env.step_mdp(step)
        for slot, episode in playing.items():
            if episode.finished:
                self._slots[slot] = None
            if episode.stop_reason in FAILED and not self._queue.faults.keep_failed:
                self._queue.drop(episode.group_id, StopReason(episode.stop_reason).name.lower())
        self._record_faults(faults)
        return True

    def release(self, episode: Episode) -> None:
        """Free the slot of ``episode``, if it has one."""
        if episode in self._slots:
            slot = self._slots.index(episode)
            self._slots[slot] = None
            if self._gem is not None:
                self._gem.renew(slot)

    def clear(self) -> None:
        """Free all slots."""
        for episode in [each for each in self._slots if each is not None]:
            self.release(episode)

    def wake(self) -> None:
        """Nothing: steps do not wait."""

    def close(self, timeout: float) -> None:
        """Forget the last observation."""
        self._current = TensorDict({}, self._env.batch_size)

    # ------------------------------------------------------------------ dealing

    def _fill(self) -> None:
        while (free := [i for i, episode in enumerate(self._slots) if episode is None]) and self._queue.room:
            chosen, (faults, dealt) = free[: self._queue.room], self._counts()
            self._reset(chosen)
            found = zip(chosen, new_episodes(self._current[chosen]), strict=True)
            # Where a reset failed, a slot got a later task than the slots after it.
            for slot, episode in sorted(found, key=lambda item: item[1].episode_id):
                if self._queue.add(episode):
                    self._slots[slot] = episode
            self._record_faults(faults, unseen=self._counts()[1] - dealt - len(chosen))

    def _reset(self, slots: list[int]) -> None:
        chosen = torch.zeros(len(self._slots), 1, dtype=torch.bool, device=self._env.device)
        chosen[slots] = True
        self._current = self._env.reset(self._current.copy().set("_reset", chosen))
        if not self._current[keys.PROMPT_LENGTH][chosen].all():
            raise RuntimeError(
                "The environment left slots empty at a partial reset, so no more tasks can be dealt. "
                'Make it with on_done="refill" (on_done="idle" is for stock collectors).'
            )

    def _respond(self, active: Tensor) -> TensorDictBase:
        # Slots whose episode is over still show it; for the policy they idle.
        current, idle = self._current, ~active.unsqueeze(-1).to(self._env.device)
        current.set(keys.PROMPT_LENGTH, current[keys.PROMPT_LENGTH].masked_fill(idle, 0))
        if self._policy_device is None:
            return self._policy(current)
        return self._policy(current.to(self._policy_device)).to(self._env.device)

    # ------------------------------------------------------------------ faults

    def _counts(self) -> tuple[int, int]:
        """How many episodes failed, and how many tasks were dealt, as far as the environment says so."""
        return (0, 0) if self._gem is None else (self._gem.faults.total(), self._gem.num_sampled)

    def _record_faults(self, before: int, unseen: int = 0) -> None:
        """Take note of failures since there were ``before``; ``unseen`` tasks failed at their reset."""
        fault = None if self._gem is None else self._gem.last_fault
        if fault is None:
            return
        if unseen:
            self._queue.dropped[reason_of(fault)] += unseen
        for _ in range(self._counts()[0] - before):
            self._queue.faults.record(fault)
