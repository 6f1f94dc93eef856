"""On-policy batches of whole conversations: :class:`TurnCollector`.

Here lives how B tickets are played over N slots and put in order. The environment deals the tickets, the policy speaks,
``TurnsToSequence`` makes rows: this module computes nothing with tokens.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.envs import EnvBase, TransformedEnv

from torchrl_llm import keys
from torchrl_llm.collectors._base import MASK, PADDING, ConversationCollector
from torchrl_llm.envs.gem import FAILED


class TurnCollector(ConversationCollector):
    """Plays B tickets over N slots, each to its end, and delivers them in the order dealt.

    A slot is refilled as soon as its episode ends, until B tickets are dealt; then slots idle, and the batch is complete
    when the last episode is. Short and long episodes are therefore met as often as the policy plays them, one policy
    version plays the whole batch, groups are whole, and nothing is in flight between batches. ``B`` may be any multiple
    of the group size; ``B = 4 N`` keeps slots about 80 % busy, ``B = 8 N`` about 90 %.

    An episode whose environment failed has no true reward: its group is dropped and further tickets fill the batch, as
    :class:`~torchrl_llm.collectors.AsyncTurnCollector` does.

    Batches are ``[B, T]``, right-padded to the longest episode; ``("collector", "mask")`` ``[B, T]`` marks the steps that
    were played. Frames are turns. With a ``replay_buffer`` each batch extends it, and iteration yields ``None``.

    Args:
        env: an environment with batch size ``[N]`` that speaks :mod:`torchrl_llm.keys` and deals the next ticket at a
            partial reset, such as :class:`~torchrl_llm.envs.GEMEnv` with ``on_done="refill"``; or a function that makes it.
        policy: a :class:`~torchrl_llm.modules.policy.TurnPolicy`.
        batch_size: conversations B in a batch.
        total_frames: stop once this many turns are collected; default -1, no limit.
        total_batches: stop after this many batches; default -1, no limit.
        replay_buffer: extended by every batch; default none.
        postproc: called on every batch, before it is stored or yielded; default none.
        exploration_type: as in TorchRL; default ``ExplorationType.RANDOM``.
        max_faults: failed episodes tolerated for one batch; one more raises an ``EnvironmentFault``. Default 16. The
            environment's own ``max_faults``, in a row, holds too.
        keep_failed: deliver episodes whose environment failed as far as they were played, and replace none; so that they
            count where nothing is learnt from them, as in an evaluation. One that failed at its reset was not played: the
            next ticket fills the batch. Default False.
        policy_device: the policy reads its input on this device; default the environment's.
        weight_sync_schemes: by model id, what ``update_policy_weights_()`` sends weights with, such as
            ``{"policy": EngineWeightSync(...)}``; default none: the policy shares the trained weights.
        pre_collect_hook, post_collect_hook: called before and after every batch; default none.

    Raises:
        ValueError: ``batch_size`` is not a multiple of the environment's group size, or the environment has not exactly
            one batch dimension.
        EnvironmentFault: more than ``max_faults`` episodes of a batch failed.
        RuntimeError: the environment leaves slots empty at a partial reset, or deals tickets other than B whole groups.

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
        ...     print(batch["collector", "mask"].int().tolist())
        [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    """

    def __init__(
        self,
        env: EnvBase | Callable[[], EnvBase],
        policy: Callable[[TensorDictBase], TensorDictBase],
        *,
        batch_size: int,
        max_faults: int = 16,
        keep_failed: bool = False,
        policy_device: torch.device | str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(env, policy, batch_size=batch_size, **kwargs)
        self.policy_device = None if policy_device is None else torch.device(policy_device)
        if max_faults < 0:
            raise ValueError(f"TurnCollector: max_faults is {max_faults!r}; expected >= 0.")
        self.max_faults, self.keep_failed = max_faults, keep_failed
        self._carrier: TensorDictBase | None = None
        self._dropped: Counter[str] = Counter()

    @property
    def dropped(self) -> Counter[str]:
        """Episodes dealt and not delivered: of a group with a failed one ("error")."""
        return Counter(self._dropped)

    @property
    def faults(self) -> Counter[str]:
        """Episodes whose environment failed, by "error" and "timeout"."""
        return Counter(getattr(self.env, "faults", {}))

    # ------------------------------------------------------------------ playing

    def _collect(self) -> TensorDictBase:
        faults, dealt = self.faults.total(), getattr(self.env, "num_dealt", 0)
        steps = self._play(self.batch_size)
        while new := self.faults.total() - faults:
            if new > self.max_faults:
                fault: BaseException = self.env.last_fault
                fault.add_note(f"{new} episodes of one batch failed; max_faults={self.max_faults}.")
                raise fault
            if self.keep_failed:
                break
            steps, missing = self._whole(steps)
            if not missing:
                self._dropped["error"] += self.env.num_dealt - dealt - self.batch_size
                break
            steps += self._play(missing)
        return self._in_order(steps)

    def _whole(self, steps: list[TensorDictBase]) -> tuple[list[TensorDictBase], int]:
        """Leave out groups with a failed episode, and how many more have to be played.

        A member that failed at its reset was never seen: a group that lacks one is left out once a later group was dealt.
        """
        group = torch.cat([step[keys.GROUP_ID].flatten() for step in steps])
        first = torch.cat([step[keys.TURN].flatten() for step in steps]) == 0
        reason = torch.cat([step["next", keys.STOP_REASON].flatten() for step in steps])
        groups, members = group[first].unique(return_counts=True)
        torn = groups[(members < self.group_size) & (groups < groups.max())] if len(groups) else groups
        keep = ~torch.isin(group, torch.cat([torn, group[torch.isin(reason, torch.tensor(FAILED).to(reason))]]))
        parts = keep.split([len(step) for step in steps])
        kept = [step[part] for step, part in zip(steps, parts, strict=True) if part.any()]
        return kept, self.batch_size - int((keep & first).sum())

    def _play(self, count: int) -> list[TensorDictBase]:
        """Play tickets; return the steps that were played, a TensorDict ``[number of active slots]`` for each turn."""
        fresh = torch.arange(self.env.batch_size[0]) < count
        current = self._deal(self._carrier if self._carrier is not None else TensorDict({}, self.env.batch_size), fresh)
        active, left = fresh, count - int(fresh.sum())
        steps = []
        while active.any():
            current = self._speak(current, active)
            everyone = bool(active.all())
            if not everyone:
                current.set("_step", active.unsqueeze(-1).to(self.env.device))
            current = self.env.step(current)
            step = current.exclude("_step")
            steps.append(step if everyone else step[active])
            current = self.env.step_mdp(step)
            finished = active & current[keys.DONE].flatten().cpu()
            fresh = finished & (finished.cumsum(0) <= left)
            left -= int(fresh.sum())
            if fresh.any():
                current = self._deal(current, fresh)
            active = active & ~finished | fresh
        self._carrier = current
        return steps

    def _deal(self, current: TensorDictBase, slots: Tensor) -> TensorDictBase:
        reset = slots.unsqueeze(-1).to(self.env.device)
        current = self.env.reset(current.copy().set("_reset", reset))
        if not current[keys.PROMPT_LENGTH][reset].all():
            raise RuntimeError(
                "The environment left slots empty at a partial reset, so no more tickets can be dealt. "
                'Make it with on_done="refill" (on_done="idle" is for stock collectors).'
            )
        return current

    def _speak(self, current: TensorDictBase, active: Tensor) -> TensorDictBase:
        # Slots whose episode is over still show it; to the policy they idle.
        idle = ~active.unsqueeze(-1).to(self.env.device)
        current.set(keys.PROMPT_LENGTH, current[keys.PROMPT_LENGTH].masked_fill(idle, 0))
        if self.policy_device is None:
            return self.policy(current)
        return self.policy(current.to(self.policy_device)).to(self.env.device)

    def _in_order(self, steps: list[TensorDictBase]) -> TensorDictBase:
        """Sort steps into a batch ``[B, T]``: one indexed read a key, each freed as soon as it is read."""
        episode = torch.cat([step[keys.EPISODE_ID].flatten() for step in steps])
        turn = torch.cat([step[keys.TURN].flatten() for step in steps])
        group = torch.cat([step[keys.GROUP_ID].flatten() for step in steps])
        episodes, row = episode.unique(return_inverse=True)
        if not self.keep_failed:  # a group may lack a member that failed at its reset
            self._check_tickets(episodes, group[turn == 0])
        index = torch.zeros(self.batch_size, int(turn.max()) + 1, dtype=torch.int64, device=row.device)
        mask = torch.zeros_like(index, dtype=torch.bool)
        index[row, turn] = torch.arange(len(row), device=row.device)
        mask[row, turn] = True
        batch = TensorDict({MASK: mask}, batch_size=mask.shape, device=self.env.device)
        steps = [step.copy() for step in steps]
        for key in list(steps[0].keys(include_nested=True, leaves_only=True)):
            values = torch.cat([step.pop(key) for step in steps])[index]
            padding = ~mask.view(*mask.shape, *[1] * (values.ndim - 2))
            batch.set(key, values.masked_fill_(padding, PADDING.get(key, 0)))
        return batch

    # ------------------------------------------------------------------ state

    def state_dict(self) -> OrderedDict:
        """The counters and the environment's state. Nothing is in flight between batches."""
        env = _env_state(self.env)
        return OrderedDict(env_state_dict=env, frames=self._frames, iter=self._iter, dropped=dict(self._dropped))

    def load_state_dict(self, state_dict: OrderedDict, **kwargs: Any) -> None:
        """Go on with the ticket that comes next in ``state_dict``."""
        _load_env_state(self.env, state_dict["env_state_dict"])
        self._frames, self._iter = state_dict["frames"], state_dict["iter"]
        self._dropped = Counter(state_dict["dropped"])

    def shutdown(self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True) -> None:
        """Close the environment (unless ``close_env=False``); a second call does nothing. The policy stays open."""
        self._carrier = None
        super().shutdown(timeout, close_env, raise_on_error)


def _env_state(env: EnvBase) -> OrderedDict:
    if isinstance(env, TransformedEnv):
        return OrderedDict(base=_env_state(env.base_env), transform=env.transform.state_dict())
    return OrderedDict(env.state_dict())


def _load_env_state(env: EnvBase, state: OrderedDict) -> None:
    if isinstance(env, TransformedEnv):
        _load_env_state(env.base_env, state["base"])
        env.transform.load_state_dict(state["transform"])
    else:
        env.load_state_dict(state)
