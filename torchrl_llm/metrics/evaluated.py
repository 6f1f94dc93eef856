"""The result of an evaluation: :class:`Evaluation`."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from tensordict import TensorDictBase


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
        texts: hash -> text of the extras in the rows (:mod:`torchrl_llm.envs.extras`).
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
