"""The result of an evaluation: :class:`Evaluation`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from hashlib import blake2b
from types import MappingProxyType
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_llm import keys
from torchrl_llm.envs.rules import rules_of
from torchrl_llm.envs.seen_tasks import SeenTasks
from torchrl_llm.envs.slots import FAILED
from torchrl_llm.envs.tasks import TaskSpec
from torchrl_llm.metrics.rollouts import rollout_metrics, success_interval
from torchrl_llm.utils.fingerprint import fingerprint


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The result of :func:`torchrl_llm.trainers.evaluate`.

    Printed, it is one line of its numbers: what has an entry for each episode is left out.

    Attributes:
        episodes: number of episodes, including those whose environment failed.
        success: share of them that ended in success; an episode whose environment failed did not.
        success_ci95: its 95 % interval, clustered by task
            (:func:`~torchrl_llm.metrics.success_interval`).
        reward: mean return (undiscounted).
        turns: mean turns per episode.
        response_length: mean tokens per response.
        penalized: share of the turns whose reward is negative: in GEM's games, turns in no legal
            format. ``nan`` without a turn; ``None``: unknown, in a file of an earlier version.
        tasks: different tasks among them, by first observation and hidden state
            (:class:`~torchrl_llm.envs.TaskIdentity`).
        task_overlap: share of the episodes whose task was trained on; ``None``: unknown.
        faults: episodes whose environment failed: truncated there, without a reward for that turn.
            An episode whose reset failed has no turns.
        environments: success, reward and turns of each environment of a mixture that occurs, as
            ``"success/<name>"``; empty for a single environment.
        outcomes: "1" for each episode that was won and "0" for each other, in task order; ``None``:
            unknown, in a file of an earlier version.
        task_digest: hash of the rules (:func:`~torchrl_llm.envs.rules.rules_of`), the opponent, and
            the tasks' environments, ids and seeds: equal for two evaluations of the same games in
            the same order, which :func:`~torchrl_llm.metrics.paired_comparison` compares by
            ``outcomes``. ``None``: unknown, as above.
        beginnings: how each episode began, in task order: eight hexadecimal digits of a hash of its
            hidden state and its first context, or ``"--------"`` where its reset failed. The same
            seed need not give the same task, if code or data of the environment change. ``None``:
            unknown, as above.
        rows: the episodes, ``[episodes]`` in task order, without those that failed at their reset;
            ``None`` in an evaluation that was read from a file.
        texts: hash -> text of the columns that are texts (:mod:`torchrl_llm.envs.columns`).
    """

    episodes: int
    success: float
    success_ci95: tuple[float, float]
    reward: float
    turns: float
    response_length: float
    penalized: float | None = None
    faults: int = 0
    tasks: int | None = None
    task_overlap: float | None = None
    environments: dict[str, float] = field(default_factory=dict)
    outcomes: str | None = field(default=None, repr=False)
    task_digest: str | None = field(default=None, repr=False)
    beginnings: str | None = field(default=None, repr=False)
    rows: TensorDictBase | None = field(default=None, repr=False)
    texts: dict[int, str] = field(default_factory=dict, repr=False)

    def statistics(self) -> dict[str, Any]:
        """All fields but the rows and their texts: ``Evaluation(**statistics)`` restores it."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name not in ("rows", "texts")}

    def metrics(self, prefix: str) -> dict[str, float]:
        """The results under the names of :data:`torchrl_llm.metrics.METRICS`."""
        low, high = self.success_ci95
        names = ("success", "reward", "turns", "penalized", "faults", "tasks", "task_overlap")
        values = {name: getattr(self, name) for name in names} | {"success_low": low, "success_high": high}
        values |= self.environments
        return {f"{prefix}/{name}": float(value) for name, value in values.items() if value is not None}


def summarize(
    collected: TensorDictBase,
    expected: TensorDictBase,
    wanted: Sequence[TaskSpec],
    *,
    env: Any,
    opponent: Any = None,
    seen_tasks: SeenTasks | None = None,
    texts: Mapping[int, str] = MappingProxyType({}),
) -> Evaluation:
    """The result of an evaluation.

    Args:
        collected: ``[n]``, the episodes.
        expected: ``[N]``, the same and a row without a turn for each that failed at its reset.
        wanted: the tasks of all, in their order.
        env: the environment, of which names and rules are read.
        opponent: has the other seats of games; default ``None``: nobody.
        seen_tasks: the tasks of training; default ``None``: :attr:`Evaluation.task_overlap` stays
            unknown.
        texts: :attr:`Evaluation.texts`.
    """
    metrics = rollout_metrics(expected, env.names)
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
        outcomes=_outcomes(collected, wanted),
        # Not the ids of what was played: a task whose reset failed in one of two evaluations has
        # none there.
        task_digest=fingerprint((rules_of(env), opponent, [(env.names[each.env_id], *each) for each in wanted])),
        beginnings=_beginnings(collected, wanted),
        rows=collected,
        texts=dict(texts),
    )


def _won(rows: TensorDictBase) -> Tensor:
    return rows[keys.TURN_SUCCESS].logical_and(rows[keys.TURN_MASK]).any(-1)


def _outcomes(collected: TensorDictBase, wanted: Sequence[TaskSpec]) -> str:
    """:attr:`Evaluation.outcomes`: one character a task, so that a file that keeps them stays
    small."""
    won = set(collected[keys.EPISODE_ID][_won(collected)].tolist())
    return "".join("1" if task_spec.episode_id in won else "0" for task_spec in wanted)


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
