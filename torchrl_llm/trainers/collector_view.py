"""What the training loop asks of collectors and value estimators, answered for those of TorchRL too.

These know nothing of groups, staleness and ranks: here is what the loop takes them for. A collector that declares the
attributes of :class:`CollectorView` itself needs no view.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch.distributed as dist
from torchrl.collectors import BaseCollector
from torchrl.objectives.value import ValueEstimatorBase

from torchrl_llm.collectors import EpisodeCollector, RayTurnCollector
from torchrl_llm.interrupts import interruptible
from torchrl_llm.objectives import TurnEstimator, TurnPolicyLoss
from torchrl_llm.trainers.distributed import Distributed


class CollectorView:
    """A collector as the loop sees it; of another kind than ours it has one task a group and plays with the present weights.

    Args:
        collector: of this library, or TorchRL's.
        distributed: the ranks, which agree on whether a signal ends a rollout.
    """

    def __init__(self, collector: BaseCollector, distributed: Distributed) -> None:
        self._collector: Any = collector
        self._ours = isinstance(collector, EpisodeCollector)
        if self._ours:
            self._collector.interruptible = partial(interruptible, distributed=distributed)

    @property
    def batch_size(self) -> int | None:
        """Episodes of a batch on this rank; ``None``: unknown."""
        return getattr(self._collector, "batch_size", None)

    @property
    def group_size(self) -> int:
        """Episodes that share a task."""
        return getattr(self._collector, "group_size", 1)

    @property
    def max_staleness(self) -> int:
        """Weight updates between sampling and training, at most."""
        return getattr(self._collector, "max_staleness", 0)

    @property
    def runs_here(self) -> bool:
        """Whether it plays with the policy of this process."""
        return not isinstance(self._collector, RayTurnCollector)

    @property
    def logprobs_match_trainer(self) -> bool:
        """Whether a scorer computes the log-probs that its workers record."""
        return getattr(self._collector, "logprobs_match_trainer", True)

    @property
    def env_names(self) -> tuple[str, ...]:
        """The environments of a mixture."""
        return getattr(getattr(self._collector, "env", None), "names", ())

    def metrics(self) -> dict[str, float]:
        """Counts so far: episodes dropped and failed, and what there is to say of workers."""
        counts = {name: getattr(self._collector, name, None) for name in ("dropped", "faults")}
        metrics = {f"data/{name}": float(sum(n.values())) for name, n in counts.items() if n is not None}
        if not self.runs_here:
            metrics["data/lost_workers"] = float(self._collector.lost_workers)
            metrics["policy/parity_gap"] = self._collector.parity_gap
        return metrics

    def state_before_playing(self) -> dict[str, Any] | None:
        """Its state, where what is played from here on can be dropped; ``None``: what it has then is as good."""
        # A collector with a thread samples what was in flight again anyway, and asking for its state pauses it.
        asked = self._ours and not getattr(self._collector, "background", False)
        return self._collector.state_dict() if asked else None


def with_statistics_of(process_group: dist.ProcessGroup | None, estimator: ValueEstimatorBase) -> ValueEstimatorBase:
    """``estimator``, which takes its statistics over all ranks of a group if it can."""
    if isinstance(estimator, TurnEstimator) and estimator.process_group is None:
        estimator.process_group = process_group
    return estimator


def corrects_sampler(estimator: ValueEstimatorBase) -> bool:
    """Whether the advantages hold the ratio of the policy to the sampler, for which old log-probs are scored."""
    return isinstance(estimator, TurnEstimator) and estimator.corrects_sampler


def credit_reads_scores(loss: TurnPolicyLoss) -> bool:
    """Whether the loss's estimator reads log-probs or values that are scored first."""
    estimator = loss.value_estimator
    penalized = isinstance(estimator, TurnEstimator) and estimator.kl_coeff != 0
    return penalized or corrects_sampler(estimator) or loss.critic_network is not None
