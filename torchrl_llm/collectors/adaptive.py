"""Which environments of a mixture are sampled next, by recent success: :func:`adapt_mixture`.

The rule is :class:`~torchrl_llm.envs.tasks.TaskSampler`'s.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tensordict import TensorDictBase

from torchrl_llm import keys
from torchrl_llm.collectors.collector import base_env
from torchrl_llm.envs.env import GEMEnv


def adapt_mixture(env: GEMEnv, batch: TensorDictBase, *, gather: Callable[[list], list] = list) -> None:
    """Update the success rates of a mixture's environments from a batch.

    Environments that are won about half of the time are sampled more often from the next batch on,
    by the rule of :class:`~torchrl_llm.envs.tasks.TaskSampler`. It is meant as the
    ``post_collect_hook=partial(adapt_mixture, env)`` of the collector that uses ``env``. The rates
    are part of the environment's state, so a resumed run continues exactly.

    Args:
        env: collected the batch, also beneath transforms; its ``task_sampler`` is replaced.
        batch: rows ``[B]`` that the collector delivered; of rows that count as one the first
            counts, which is not a continuation.
        gather: concatenates the lists of several processes, such as ``Distributed.all_gather`` of
            the trainer, so that all of them update alike. Default: there is one process.

    Raises:
        ValueError: ``env`` is not a mixture.
        RuntimeError: episodes are running (an :class:`~torchrl_llm.collectors.AsyncTurnCollector`
            with ``max_staleness``): tasks may change between batches only.

    Examples:
        >>> from functools import partial
        >>> from torchrl_llm.collectors import TurnCollector
        >>> from torchrl_llm.testing.environments import Echo, StopOrGo
        >>> from torchrl_llm.testing.policies import ScriptedPolicy
        >>> from torchrl_llm.testing.tokenizers import byte_tokenizer
        >>> tokenizer = byte_tokenizer()
        >>> env = GEMEnv([StopOrGo, Echo], tokenizer=tokenizer, num_envs=4, max_output_tokens=32)
        >>> policy = ScriptedPolicy(lambda episode, turn, context: "stop", tokenizer=tokenizer)
        >>> hook = partial(adapt_mixture, env)
        >>> _ = TurnCollector(env, policy, batch_size=64, post_collect_hook=hook).rollout()
        >>> [round(rate, 2) for rate in env.task_sampler.success]
        [0.82, 0.18]
    """
    if env.task_sampler.mixture_size < 2:
        raise ValueError(f"adapt_mixture: {env.names[0]!r} is the only environment; expected a mixture of two or more.")
    running = sum(slot.live for slot in env.slots)
    if running:
        raise RuntimeError(
            f"adapt_mixture: {running} episodes are running, whose tasks would change. Collect with max_staleness=0."
        )
    if (unit := batch.get(keys.TURN_UNIT, None)) is not None:
        batch = batch[unit[:, 0] == batch[keys.EPISODE_ID]]
    won = (batch[keys.TURN_SUCCESS] & batch[keys.TURN_MASK]).any(-1)
    env_ids, won = gather(batch[keys.ENV_ID].tolist()), gather(won.tolist())
    base: Any = base_env(env)
    base.task_sampler = base.task_sampler.learn(env_ids, won)
