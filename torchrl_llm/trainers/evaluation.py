"""Evaluation on episodes that are used for nothing else: :func:`evaluate` and its result, :class:`Evaluation`."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.envs.utils import ExplorationType

from torchrl_llm import keys
from torchrl_llm.collectors import TurnCollector
from torchrl_llm.data import cat_rows, turns_to_rows
from torchrl_llm.envs.gem import FAILED
from torchrl_llm.envs.tickets import Tickets
from torchrl_llm.interrupts import interruptible
from torchrl_llm.modules.policy import TurnPolicy
from torchrl_llm.record import rollout_metrics, wilson_interval
from torchrl_llm.trainers.ranks import Ranks, silenced


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The result of :func:`evaluate`.

    Attributes:
        episodes: number of conversations, those included whose environment failed.
        success: share of them that ended in success; one whose environment failed did not.
        success_ci95: its 95 % Wilson interval.
        reward: mean return (undiscounted).
        turns: mean turns per episode.
        response_length: mean tokens per response.
        faults: episodes whose environment failed: cut where it did, without a reward for that turn. One that failed at its
            reset has no turns.
        environments: of a mixture, success, reward and turns of each environment that was played, as
            ``"success/<name>"``; empty for a single one.
        rows: the conversations, ``[episodes]`` rows in ticket order, without those that failed at their reset; ``None`` in
            one that was read from a file.
    """

    episodes: int
    success: float
    success_ci95: tuple[float, float]
    reward: float
    turns: float
    response_length: float
    faults: int = 0
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
            f"{prefix}/faults": float(self.faults),
            **{f"{prefix}/{name}": value for name, value in self.environments.items()},
        }


def evaluate(
    env: Any, policy: TurnPolicy, episodes: int, *, greedy: bool = False, ranks: Ranks | None = None
) -> Evaluation:
    """Play the first ``episodes`` tickets of ``env`` and summarise them.

    The tickets (and with them the tasks and the sampling noise) are the same at each call, so that two evaluations of
    different weights are paired. Give ``env`` a ticket stream of its own (``GEMEnv(..., stream="eval")``).

    An episode whose environment fails is not replaced: a policy that breaks the games it would lose must not look better
    for it. It counts, as not won, and in :attr:`Evaluation.faults`.

    Args:
        env: a :class:`~torchrl_llm.envs.GEMEnv` that refills its slots. Its ``max_faults`` is how many of the episodes may
            fail.
        policy: plays with its own sampling settings.
        episodes: number of conversations, >= 1.
        greedy: take the likeliest token instead of sampling.
        ranks: share the episodes out; ``env`` is then this rank's worker of ``num_workers=ranks.count``. Default: this
            process plays all of them.

    Returns:
        An :class:`Evaluation`.

    Raises:
        EnvironmentFault: more than ``env.max_faults`` of the episodes (that this rank plays) failed.
    """
    env.set_seed(env.tickets.seed)  # deals from the first ticket again
    mode = ExplorationType.DETERMINISTIC if greedy else ExplorationType.RANDOM
    # Every rank plays equally many, so that all of them have something to bring; what is too much is left out.
    share = episodes if ranks is None else -(-episodes // ranks.count)
    collector = TurnCollector(
        env, policy, batch_size=share, exploration_type=mode, max_faults=env.max_faults, keep_failed=True
    )
    collector.interruptible = partial(interruptible, ranks=ranks)
    rows = turns_to_rows(collector.rollout())
    if ranks is not None:
        rows = ranks.rows(rows)
    everyone = _with_unplayed(rows, env.tickets, episodes)
    rows = rows[rows[keys.EPISODE_ID] < env.tickets.base + episodes]
    figures = rollout_metrics(everyone, env.names)
    wins = int(everyone[keys.TURN_SUCCESS].logical_and(everyone[keys.TURN_MASK]).any(-1).sum())
    failed = torch.isin(rows[keys.TURN_STOP_REASON], torch.tensor(FAILED, device=rows.device)) & rows[keys.TURN_MASK]
    return Evaluation(
        episodes=episodes,
        success=wins / episodes,
        success_ci95=wilson_interval(wins, episodes),
        reward=figures["rollout/reward"],
        turns=figures["rollout/turns"],
        response_length=figures["rollout/response_length"],
        faults=int(failed.any(-1).sum()) + episodes - len(rows),
        environments={name.removeprefix("rollout/"): value for name, value in figures.items() if name.count("/") > 1},
        rows=rows,
    )


def _with_unplayed(rows: TensorDictBase, tickets: Tickets, episodes: int) -> TensorDictBase:
    """The first ``episodes`` tickets as rows; those that failed at their reset have a row without a turn."""
    played = rows[rows[keys.EPISODE_ID] < tickets.base + episodes]
    known = set(played[keys.EPISODE_ID].tolist())
    everyone = replace(tickets, worker=0, num_workers=1)
    missing = [ticket for i in range(episodes) if (ticket := everyone[i]).episode_id not in known]
    if not missing:
        return played
    empty = silenced(rows[[0] * len(missing)])
    for i, name in enumerate((keys.EPISODE_ID, keys.GROUP_ID, keys.ENV_ID)):
        empty[name] = torch.tensor([ticket[i] for ticket in missing], device=rows.device)
    return cat_rows([played, empty])
