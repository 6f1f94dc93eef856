"""Evaluation on tickets that are used for nothing else: :func:`evaluate` and its result, :class:`Evaluation`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.envs.utils import ExplorationType

from torchrl_llm import keys
from torchrl_llm.collectors import TurnCollector
from torchrl_llm.data import cat_rows
from torchrl_llm.envs.gem import FAILED
from torchrl_llm.envs.tasks import SeenTasks
from torchrl_llm.envs.tickets import STREAM_IDS, Ticket, Tickets
from torchrl_llm.interrupts import interruptible
from torchrl_llm.modules.policy import TurnPolicy
from torchrl_llm.record import rollout_metrics, success_interval
from torchrl_llm.trainers.ranks import Ranks, silenced


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The result of :func:`evaluate`.

    Attributes:
        episodes: number of conversations, those included whose environment failed.
        success: share of them that ended in success; one whose environment failed did not.
        success_ci95: its 95 % interval, clustered by task (:func:`~torchrl_llm.record.success_interval`).
        reward: mean return (undiscounted).
        turns: mean turns per episode.
        response_length: mean tokens per response.
        tasks: different tasks among them, by first observation and hidden state (:class:`~torchrl_llm.envs.Task`).
        task_overlap: share of the episodes whose task training has played; ``None``: unknown.
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
    tasks: int | None = None
    task_overlap: float | None = None
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
            **({} if self.tasks is None else {f"{prefix}/tasks": float(self.tasks)}),
            **({} if self.task_overlap is None else {f"{prefix}/task_overlap": self.task_overlap}),
            **{f"{prefix}/{name}": value for name, value in self.environments.items()},
        }


def evaluate(
    env: Any,
    policy: TurnPolicy,
    episodes: int,
    *,
    greedy: bool = False,
    ranks: Ranks | None = None,
    seen_tasks: SeenTasks | None = None,
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
        greedy: take the likeliest token instead of sampling. A task whose hidden state is known is then played once, however
            often the tickets name it: again it would go the same way.
        ranks: share the episodes out; ``env`` is then this rank's worker of ``num_workers=ranks.count``. Default: this
            process plays all of them.
        seen_tasks: what training has played, such as :attr:`LLMTrainer.seen_tasks`; default none:
            :attr:`Evaluation.task_overlap` stays unknown.

    Returns:
        An :class:`Evaluation`.

    Raises:
        EnvironmentFault: more than ``env.max_faults`` of the episodes (that this rank plays) failed.
    """
    env.set_seed(env.tickets.seed)  # deals from the first ticket again
    own, everyone = env.tickets, replace(env.tickets, worker=0, num_workers=1)
    rank, count = (0, 1) if ranks is None else (ranks.index, ranks.count)
    chosen = range(episodes)
    try:
        if greedy:
            env.tickets = everyone
            chosen = env.first_of_each_task(episodes)
            env.tickets = _Chosen(everyone, chosen[rank::count], range(episodes + rank, STREAM_IDS, count))
        # Every rank plays equally many, so that all of them have something to bring; what is too much is left out.
        rows = _play(env, policy, -(-len(chosen) // count), greedy=greedy, ranks=ranks)
    finally:
        env.tickets = own
    rows = rows if ranks is None else ranks.rows(rows)
    wanted = [everyone[i] for i in chosen]
    played = rows[torch.isin(rows[keys.EPISODE_ID], torch.tensor([t.episode_id for t in wanted], device=rows.device))]
    return _summary(played, _with_unplayed(played, wanted, rows[:1]), env.names, seen_tasks)


class _Chosen:
    """Some tickets, each a group of its own, and after them others.

    Args:
        tickets: all of them.
        first: indices of those that come first.
        others: indices of those that come then, for whoever failed at a reset.
    """

    group_size = 1

    def __init__(self, tickets: Tickets, first: Sequence[int], others: Sequence[int]) -> None:
        self.tickets, self.first, self.others = tickets, first, others

    def __getitem__(self, index: int) -> Ticket:
        late = index - len(self.first)
        return self.tickets[self.others[late] if late >= 0 else self.first[index]]


def _play(env: Any, policy: TurnPolicy, episodes: int, *, greedy: bool, ranks: Ranks | None) -> TensorDictBase:
    mode = ExplorationType.DETERMINISTIC if greedy else ExplorationType.RANDOM
    collector = TurnCollector(
        env, policy, batch_size=episodes, exploration_type=mode, max_faults=env.max_faults, keep_failed=True
    )
    collector.interruptible = partial(interruptible, ranks=ranks)
    return collector.rollout()


def _with_unplayed(played: TensorDictBase, wanted: Sequence[Ticket], any_row: TensorDictBase) -> TensorDictBase:
    """Rows of all the tickets ``wanted``; those that failed at their reset have a row without a turn."""
    known = set(played[keys.EPISODE_ID].tolist())
    missing = [ticket for ticket in wanted if ticket.episode_id not in known]
    if not missing:
        return played
    empty = silenced(any_row[[0] * len(missing)])
    for i, name in enumerate((keys.EPISODE_ID, keys.GROUP_ID, keys.ENV_ID)):
        empty[name] = torch.tensor([ticket[i] for ticket in missing], device=played.device)
    # What its task is was never seen; no other ticket has this seed.
    empty[keys.TASK_ID] = torch.tensor([ticket.seed for ticket in missing], device=played.device)
    return cat_rows([played, empty])


def _summary(
    played: TensorDictBase, everyone: TensorDictBase, names: Sequence[str], seen_tasks: SeenTasks | None
) -> Evaluation:
    """The result of the rows that were ``played``, among ``everyone`` that should have been."""
    figures = rollout_metrics(everyone, names)
    won = everyone[keys.TURN_SUCCESS].logical_and(everyone[keys.TURN_MASK]).any(-1)
    failed = torch.isin(played[keys.TURN_STOP_REASON], torch.tensor(FAILED, device=played.device))
    tasks = everyone[keys.TASK_ID]
    return Evaluation(
        episodes=len(everyone),
        success=won.double().mean().item(),
        success_ci95=success_interval(won, tasks),
        reward=figures["rollout/reward"],
        turns=figures["rollout/turns"],
        response_length=figures["rollout/response_length"],
        faults=int((failed & played[keys.TURN_MASK]).any(-1).sum()) + len(everyone) - len(played),
        tasks=len(tasks.unique()),
        task_overlap=None if seen_tasks is None else seen_tasks.overlap(tasks.cpu()),
        environments={name.removeprefix("rollout/"): value for name, value in figures.items() if name.count("/") > 1},
        rows=played,
    )
