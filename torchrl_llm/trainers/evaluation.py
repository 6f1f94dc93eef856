"""Evaluation on episodes that are used for nothing else: :func:`evaluate` and its result, :class:`Evaluation`."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

from tensordict import TensorDictBase
from torchrl.envs.utils import ExplorationType

from torchrl_llm import keys
from torchrl_llm.collectors import TurnCollector
from torchrl_llm.data import turns_to_rows
from torchrl_llm.interrupts import interruptible
from torchrl_llm.modules.policy import TurnPolicy
from torchrl_llm.record import rollout_metrics, wilson_interval
from torchrl_llm.trainers.ranks import Ranks


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The result of :func:`evaluate`.

    Attributes:
        episodes: number of conversations.
        success: share of them that ended in success.
        success_ci95: its 95 % Wilson interval.
        reward: mean return (undiscounted).
        turns: mean turns per episode.
        response_length: mean tokens per response.
        environments: of a mixture, success, reward and turns of each environment that was played, as
            ``"success/<name>"``; empty for a single one.
        rows: the conversations, ``[episodes]`` rows in ticket order; ``None`` in one that was read from a file.
    """

    episodes: int
    success: float
    success_ci95: tuple[float, float]
    reward: float
    turns: float
    response_length: float
    environments: dict[str, float] = field(default_factory=dict)
    rows: TensorDictBase | None = None

    def figures(self) -> dict[str, Any]:
        """All but the conversations: ``Evaluation(**figures)`` makes it again."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name != "rows"}

    def metrics(self, prefix: str) -> dict[str, float]:
        """The figures under the names of :data:`torchrl_llm.record.METRICS`."""
        return {
            f"{prefix}/success": self.success,
            f"{prefix}/success_low": self.success_ci95[0],
            f"{prefix}/success_high": self.success_ci95[1],
            f"{prefix}/reward": self.reward,
            f"{prefix}/turns": self.turns,
            **{f"{prefix}/{name}": value for name, value in self.environments.items()},
        }


def evaluate(
    env: Any, policy: TurnPolicy, episodes: int, *, greedy: bool = False, ranks: Ranks | None = None
) -> Evaluation:
    """Play the first ``episodes`` tickets of ``env`` and summarise them.

    The tickets (and with them the tasks and the sampling noise) are the same at each call, so that two evaluations of
    different weights are paired. Give ``env`` a ticket stream of its own (``GEMEnv(..., stream="eval")``).

    Args:
        env: a :class:`~torchrl_llm.envs.GEMEnv` that refills its slots.
        policy: plays with its own sampling settings.
        episodes: number of conversations, >= 1.
        greedy: take the likeliest token instead of sampling.
        ranks: share the episodes out; ``env`` is then this rank's worker of ``num_workers=ranks.count``. Default: this
            process plays all of them.

    Returns:
        An :class:`Evaluation`.
    """
    env.set_seed(env.tickets.seed)  # deals from the first ticket again
    mode = ExplorationType.DETERMINISTIC if greedy else ExplorationType.RANDOM
    # Every rank plays equally many, so that all of them have something to bring; what is too much is left out.
    share = episodes if ranks is None else -(-episodes // ranks.count)
    collector = TurnCollector(env, policy, batch_size=share, exploration_type=mode)
    collector.interruptible = partial(interruptible, ranks=ranks)
    rows = turns_to_rows(collector.rollout())
    if ranks is not None:
        rows = ranks.rows(rows)[:episodes]
    figures = rollout_metrics(rows, env.names)
    wins = int(rows[keys.TURN_SUCCESS].logical_and(rows[keys.TURN_MASK]).any(-1).sum())
    return Evaluation(
        episodes=episodes,
        success=wins / episodes,
        success_ci95=wilson_interval(wins, episodes),
        reward=figures["rollout/reward"],
        turns=figures["rollout/turns"],
        response_length=figures["rollout/response_length"],
        environments={name.removeprefix("rollout/"): value for name, value in figures.items() if name.count("/") > 1},
        rows=rows,
    )
