"""Evaluation on tasks that are used for nothing else: :func:`evaluate`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.envs.utils import ExplorationType

from torchrl_llm import keys
from torchrl_llm.collectors import SelfPlayCollector, TurnCollector
from torchrl_llm.collectors.collector import base_env
from torchrl_llm.data.batching import with_missing
from torchrl_llm.envs import SelfPlayEnv
from torchrl_llm.envs.seen_tasks import SeenTasks
from torchrl_llm.envs.tasks import STREAM_IDS, ChosenTasks
from torchrl_llm.metrics import Evaluation
from torchrl_llm.metrics.evaluated import summarize
from torchrl_llm.modules.policy import TurnPolicy
from torchrl_llm.trainers.distributed import Distributed
from torchrl_llm.utils.interrupts import interruptible

Evaluator = Callable[[], Mapping[str, Any]]
"""Collects episodes of evaluation and returns metrics, under names that training does not use;
``evaluation/success`` decides which checkpoint is best."""


def evaluate(
    env: Any,
    policy: TurnPolicy,
    episodes: int,
    *,
    greedy: bool = False,
    distributed: Distributed | None = None,
    seen_tasks: SeenTasks | None = None,
    opponent: TurnPolicy | None = None,
) -> Evaluation:
    """Collect the first ``episodes`` tasks of ``env`` and summarize them.

    The tasks (and with them the sampling noise) are the same at each call, so that two evaluations
    of different weights are paired. Give ``env`` a task stream of its own
    (``GEMEnv(..., stream="eval")``).

    An episode whose environment fails is not replaced: a policy must not gain by breaking the
    environments in which it would lose. It counts as not won, and in :attr:`Evaluation.faults`.

    Args:
        env: a :class:`~torchrl_llm.envs.GEMEnv` that refills its slots, also beneath transforms.
            Its ``max_faults`` is how many of the episodes may fail.
        policy: samples with its own sampling settings.
        episodes: number of episodes, >= 1.
        greedy: take the likeliest token instead of sampling. A task whose hidden state is known is
            then evaluated once, however often it is sampled: the result would be the same.
        distributed: divide the episodes; ``env`` is then this rank's worker of
            ``num_workers=distributed.world_size``. Default: this process collects all of them.
        seen_tasks: the tasks of training so far, such as :attr:`LLMTrainer.seen_tasks`; default
            none: :attr:`Evaluation.task_overlap` stays unknown.
        opponent: of a :class:`~torchrl_llm.envs.SelfPlayEnv`, who has the other seats. The policy
            has the seat ``n % players`` in the n-th game; an episode is its side of a game, and a
            success a game that it won.

    Returns:
        An :class:`Evaluation`.

    Raises:
        EnvironmentFault: more than ``env.max_faults`` of the episodes (of this rank) failed.
        ValueError: games are evaluated without an opponent or greedily, or an opponent is given for
            something else.
    """
    players = _players(env, opponent, greedy=greedy)
    env.set_seed(env.task_sampler.seed)  # back to the first task
    # a TransformedEnv reads attributes of the environment beneath it, and sets its own
    base: Any = base_env(env)
    own, all_tasks = base.task_sampler, replace(base.task_sampler, worker=0, num_workers=1)
    rank, count = (0, 1) if distributed is None else (distributed.rank, distributed.world_size)
    chosen = [game * players + game % players for game in range(episodes)]
    try:
        if greedy:
            # All tasks and not this rank's: two ranks might find the same one.
            base.task_sampler = all_tasks
            chosen = base.lockstep.first_of_each_task(episodes)
            base.task_sampler = ChosenTasks(all_tasks, chosen[rank::count], range(episodes + rank, STREAM_IDS, count))
        # Every rank collects equally many, because gathering rows needs some of each; surplus
        # episodes are left out.
        share = -(-len(chosen) // count) * players
        rows, texts = _collect(env, policy, share, greedy=greedy, distributed=distributed, opponent=opponent)
    finally:
        base.task_sampler = own
    if distributed is not None:
        rows, texts = distributed.all_gather_rows(rows), dict(distributed.all_gather([*texts.items()]))
    wanted = [all_tasks[i] for i in chosen]
    ids = torch.tensor([task_spec.episode_id for task_spec in wanted], device=rows.device)
    collected = rows[torch.isin(rows[keys.EPISODE_ID], ids)]
    expected = with_missing(collected, wanted, rows[:1])
    return summarize(collected, expected, wanted, env=base, opponent=opponent, seen_tasks=seen_tasks, texts=texts)


def _players(env: Any, opponent: TurnPolicy | None, *, greedy: bool) -> int:
    """The seats of a game; 1 for what is none."""
    if not isinstance(env, SelfPlayEnv):
        if opponent is not None:
            raise ValueError(
                f"An opponent is for games of several players; expected a SelfPlayEnv, got a {type(env).__name__}."
            )
        return 1
    if opponent is None or greedy:
        raise ValueError(
            f"{env.names[0]!r} is a game of {env.group_size} players: evaluate(..., opponent=policy) says who has the other seats, and "
            "samples (greedy=False), for players that always do the same play the same game again and again."
        )
    return env.group_size


def _collect(
    env: Any,
    policy: TurnPolicy,
    episodes: int,
    *,
    greedy: bool,
    distributed: Distributed | None,
    opponent: TurnPolicy | None,
) -> tuple[TensorDictBase, dict[int, str]]:
    collector: SelfPlayCollector | TurnCollector
    if opponent is not None:
        # A game that fails is dropped, and counts as missing: those that fill the batch in its
        # place are not wanted.
        collector = SelfPlayCollector(env, policy, batch_size=episodes, opponent=opponent, max_faults=env.max_faults)
    else:
        mode = ExplorationType.DETERMINISTIC if greedy else ExplorationType.RANDOM
        collector = TurnCollector(
            env, policy, batch_size=episodes, exploration_type=mode, max_faults=env.max_faults, keep_failed=True
        )
    all_reduce_max = None if distributed is None else distributed.all_reduce_max
    collector.interruptible = partial(interruptible, all_reduce_max=all_reduce_max)
    return collector.rollout(), collector.texts
