"""On-policy batches of whole episodes, a turn of all slots at a time: :class:`TurnCollector`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.envs import EnvBase, TransformedEnv

from torchrl_llm.collectors._lockstep import LockstepExecutor
from torchrl_llm.collectors.collector import EpisodeCollector


class TurnCollector(EpisodeCollector):
    """Plays B tasks over N slots, a turn of all slots at a time, and delivers them in the order dealt.

    A slot is refilled as soon as its episode ends, until B tasks are dealt; then slots idle, and the batch is complete
    when the last episode is. Short and long episodes are therefore met as often as the policy plays them, one policy
    version plays the whole batch, groups are whole, and nothing is in flight between batches. ``B`` may be any multiple
    of the group size; ``B = 4 N`` keeps slots about 80 % busy, ``B = 8 N`` about 90 %.

    An episode whose environment failed has no true reward: its group is dropped and further tasks fill the batch, as
    :class:`~torchrl_llm.collectors.AsyncTurnCollector` does.

    Batches are rows ``[B]``, one episode each (:mod:`torchrl_llm.keys`). Frames are turns. With a ``replay_buffer`` each batch
    extends it, and iteration yields ``None``.

    Environments are played through ``env.step`` and ``env.reset``, so any ``EnvBase`` will do, transforms included.

    Args:
        env: an environment with batch size ``[N]`` that speaks :mod:`torchrl_llm.keys` and deals the next task at a
            partial reset, such as :class:`~torchrl_llm.envs.GEMEnv` with ``on_done="refill"``; or a function that makes it.
        policy: a :class:`~torchrl_llm.modules.policy.TurnPolicy`.
        batch_size: episodes B of a batch.
        total_frames: stop once this many turns are collected; default -1, no limit.
        total_batches: stop after this many batches; default -1, no limit.
        replay_buffer: extended by every batch; default none.
        postproc: called on every batch, before it is stored or yielded; default none.
        exploration_type: as in TorchRL; default ``ExplorationType.RANDOM``.
        max_faults: failed episodes tolerated for one batch; one more raises an ``EnvironmentFault``. Default 16. The
            environment's own ``max_faults``, in a row, holds too.
        keep_failed: deliver episodes whose environment failed as far as they were played, and replace none; so that they
            count where nothing is learnt from them, as in an evaluation. One that failed at its reset was not played: the
            next task fills the batch. Default False.
        policy_device: the policy reads its input on this device; default the environment's.
        weight_sync_schemes: by model id, what ``update_policy_weights_()`` sends weights with, such as
            ``{"policy": EngineWeightSync(...)}``; default none: the policy shares the trained weights.
        pre_collect_hook, post_collect_hook: called before and after every batch; default none.

    Raises:
        ValueError: ``batch_size`` is not a multiple of the environment's group size, or the environment has not exactly
            one batch dimension.
        EnvironmentFault: more than ``max_faults`` episodes of a batch failed.
        RuntimeError: the environment leaves slots empty at a partial reset, or deals tasks other than B whole groups.

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
        batch_size: int,
        policy_device: torch.device | str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(env, policy, batch_size=batch_size, **kwargs)
        device = None if policy_device is None else torch.device(policy_device)
        self._executor = LockstepExecutor(self.env, policy, self._queue, policy_device=device)

    def _after_error(self, error: BaseException) -> None:
        # Nothing is in flight, so a later rollout may deal on.
        self._forget()

    def _env_state(self) -> OrderedDict:
        return _env_state(self.env)

    def _load_env_state(self, state: OrderedDict) -> None:
        _load_env_state(self.env, state)


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
