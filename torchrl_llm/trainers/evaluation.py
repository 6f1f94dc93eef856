"""Evaluation on tasks that are used for nothing else: :func:`evaluate`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.envs.utils import ExplorationType

from torchrl_llm import keys
from torchrl_llm.collectors import SelfPlayCollector, TurnCollector
from torchrl_llm.collectors.collector import base_env
from torchrl_llm.data import cat_rows
from torchrl_llm.envs import GEMEnv, SelfPlayEnv
from torchrl_llm.envs.rules import rules_of
from torchrl_llm.envs.seen_tasks import SeenTasks
from torchrl_llm.envs.slots import FAILED
from torchrl_llm.envs.tasks import STREAM_IDS, TaskSampler, TaskSpec
from torchrl_llm.metrics import Evaluation, named, rollout_metrics, success_interval
from torchrl_llm.modules.policy import TurnPolicy
from torchrl_llm.trainers.distributed import Distributed, zero_weight_rows
from torchrl_llm.utils.fingerprint import fingerprint
from torchrl_llm.utils.interrupts import interruptible


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
            chosen = base.first_of_each_task(episodes)
            base.task_sampler = _Chosen(all_tasks, chosen[rank::count], range(episodes + rank, STREAM_IDS, count))
        # Every rank collects equally many, because gathering rows needs some of each; surplus
        # episodes are left out.
        share = -(-len(chosen) // count) * players
        rows, texts = _collect(env, policy, share, greedy=greedy, distributed=distributed, opponent=opponent)
    finally:
        base.task_sampler = own
    if distributed is not None:
        rows, texts = distributed.all_gather_rows(rows), dict(distributed.all_gather([*texts.items()]))
    wanted = [all_tasks[i] for i in chosen]
    collected = rows[
        torch.isin(rows[keys.EPISODE_ID], torch.tensor([t.episode_id for t in wanted], device=rows.device))
    ]
    result = _summary(collected, _with_missing(collected, wanted, rows[:1]), env.names, seen_tasks)
    return replace(
        result,
        outcomes=_outcomes(collected, wanted),
        task_digest=_task_digest(base, opponent, wanted),
        beginnings=_beginnings(collected, wanted),
        texts=texts,
    )


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


class _Chosen:
    """A task sampler of chosen tasks, each a group of its own.

    Args:
        task_sampler: of all tasks.
        first: indices of the chosen tasks.
        others: indices of the tasks that replace those that failed at a reset.
    """

    group_size = 1

    def __init__(self, task_sampler: TaskSampler, first: Sequence[int], others: Sequence[int]) -> None:
        self.task_sampler, self.first, self.others = task_sampler, first, others

    def __getitem__(self, index: int) -> TaskSpec:
        late = index - len(self.first)
        return self.task_sampler[self.others[late] if late >= 0 else self.first[index]]


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


def _with_missing(collected: TensorDictBase, wanted: Sequence[TaskSpec], any_row: TensorDictBase) -> TensorDictBase:
    """Rows of all tasks ``wanted``; a task that failed at its reset has a row without a turn."""
    known = set(collected[keys.EPISODE_ID].tolist())
    missing = [task_spec for task_spec in wanted if task_spec.episode_id not in known]
    if not missing:
        return collected
    empty = zero_weight_rows(any_row[[0] * len(missing)])
    for i, name in enumerate((keys.EPISODE_ID, keys.GROUP_ID, keys.ENV_ID)):
        empty[name] = torch.tensor([task_spec[i] for task_spec in missing], device=collected.device)
    # The task was never seen. A seed is as good as its id, because no other task has it.
    empty[keys.TASK_ID] = torch.tensor([task_spec.seed for task_spec in missing], device=collected.device)
    return cat_rows([collected, empty])


def _summary(
    collected: TensorDictBase, expected: TensorDictBase, names: Sequence[str], seen_tasks: SeenTasks | None
) -> Evaluation:
    """The result of the ``expected`` rows, of which those ``collected`` were collected."""
    metrics = rollout_metrics(expected, names)
    won = _won(expected)
    failed = torch.isin(collected[keys.TURN_STOP_REASON], torch.tensor(FAILED, device=collected.device))
    tasks = expected[keys.TASK_ID]
    return Evaluation(
        episodes=len(expected),
        success=won.double().mean().item(),
        success_ci95=success_interval(won, tasks),
        reward=metrics["rollout/reward"],
        turns=metrics["rollout/turns"],
        response_length=metrics["rollout/response_length"],
        penalized=metrics["rollout/penalized"],
        faults=int((failed & collected[keys.TURN_MASK]).any(-1).sum()) + len(expected) - len(collected),
        tasks=len(tasks.unique()),
        task_overlap=None if seen_tasks is None or math.isnan(share := seen_tasks.overlap(tasks.cpu())) else share,
        environments={name.removeprefix("rollout/"): value for name, value in metrics.items() if name.count("/") > 1},
        rows=collected,
    )


def _won(rows: TensorDictBase) -> Tensor:
    return rows[keys.TURN_SUCCESS].logical_and(rows[keys.TURN_MASK]).any(-1)


def _outcomes(collected: TensorDictBase, wanted: Sequence[TaskSpec]) -> str:
    """:attr:`Evaluation.outcomes`: one character a task, so that a file that keeps them stays
    small."""
    won = set(collected[keys.EPISODE_ID][_won(collected)].tolist())
    return "".join("1" if task_spec.episode_id in won else "0" for task_spec in wanted)


def _task_digest(env: GEMEnv, opponent: TurnPolicy | None, wanted: Sequence[TaskSpec]) -> str:
    """:attr:`Evaluation.task_digest`."""
    # Not the ids of what was played: a task whose reset failed in one of two evaluations has none
    # there.
    tasks = [(env.names[task_spec.env_id], *task_spec) for task_spec in wanted]
    return fingerprint((rules_of(env), opponent, tasks))


def _beginnings(collected: TensorDictBase, wanted: Sequence[TaskSpec]) -> str:
    """:attr:`Evaluation.beginnings`."""
    acts = collected[keys.TURN_IDS] >= 0
    first = collected[keys.ATTENTION_MASK] & (acts.cumsum(-1) == 0)
    known = zip(*(collected[name].tolist() for name in (keys.EPISODE_ID, keys.TASK_ID)), strict=True)
    contexts = zip(known, collected[keys.TOKENS].cpu(), first.cpu(), strict=True)
    hashes = {
        episode: blake2b(repr((task, tokens[mask].tolist())).encode(), digest_size=4).hexdigest()
        for (episode, task), tokens, mask in contexts
    }
    return "".join(hashes.get(task_spec.episode_id, "-" * 8) for task_spec in wanted)


def checked_metrics(metrics: Mapping[str, Any], *, source: str = "evaluator") -> dict[str, float]:
    """The metrics of an evaluator, or of what else is the ``source``, as loggers and checkpoints
    take them.

    Raises:
        ValueError: a name is that of a metric of training.
        TypeError: a value is no number.
    """
    taken = sorted(name for name in metrics if named(name) and not name.startswith("evaluation"))
    if taken:
        raise ValueError(f"The {source} returned {taken}, which are metrics of training: give them names of their own.")
    numbers = {}
    for name, value in metrics.items():
        try:
            numbers[name] = float(value)
        except (TypeError, ValueError) as error:
            raise TypeError(f"{name!r} is {value!r}; expected a number, for it is a metric of the {source}.") from error
    return numbers
