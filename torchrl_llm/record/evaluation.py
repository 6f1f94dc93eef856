"""The result of an evaluation: :class:`Evaluation`."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from tensordict import TensorDictBase


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The result of :func:`torchrl_llm.trainers.evaluate`.

    Attributes:
        episodes: number of episodes, those whose environment failed included.
        success: share of them that ended in success; an episode whose environment failed did not.
        success_ci95: its 95 % interval, clustered by task (:func:`~torchrl_llm.record.success_interval`).
        reward: mean return (undiscounted).
        turns: mean turns per episode.
        response_length: mean tokens per response.
        tasks: different tasks among them, by first observation and hidden state (:class:`~torchrl_llm.envs.TaskIdentity`).
        task_overlap: share of the episodes whose task training has played; ``None``: unknown.
        faults: episodes whose environment failed: cut where it did, without a reward for that turn. One that failed at its
            reset has no turns.
        environments: of a mixture, success, reward and turns of each environment that was played, as
            ``"success/<name>"``; empty for a single one.
        rows: the episodes, ``[episodes]`` in task order, without those that failed at their reset; ``None`` in an
            evaluation that was read from a file.
    """

    episodes: int
    success: float
    success_ci95: tuple[float, float]
    reward: float
    turns: float
    response_length: float
    faults: int = 0
    tasks: int | None = None
    task_overlap: float | None = None
    environments: dict[str, float] = field(default_factory=dict)
    rows: TensorDictBase | None = None

    def statistics(self) -> dict[str, Any]:
        """All but the rows: ``Evaluation(**statistics)`` makes it again."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name != "rows"}

    def metrics(self, prefix: str) -> dict[str, float]:
        """The results under the names of :data:`torchrl_llm.record.METRICS`."""
        return {
            f"{prefix}/success": self.success,
            f"{prefix}/success_low": self.success_ci95[0],
            f"{prefix}/success_high": self.success_ci95[1],
            f"{prefix}/reward": self.reward,
            f"{prefix}/turns": self.turns,
            f"{prefix}/faults": float(self.faults),
            **({} if self.tasks is None else {f"{prefix}/tasks": float(self.tasks)}),
            **({} if self.task_overlap is None else {f"{prefix}/task_overlap": self.task_overlap}),
            **{f"{prefix}/{name}": value for name, value in self.environments.items()},
        }
