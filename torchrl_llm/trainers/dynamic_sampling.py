"""Dynamic sampling: updates on groups that get credit, :class:`DynamicSampling`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_llm import data, keys
from torchrl_llm.trainers.credit import Credit


class DynamicSampling:
    """Collects until enough groups get credit, and chooses those to learn from (DAPO, Yu et al.,
    2025, arXiv:2503.14476, sec. 3.2).

    Where advantages depend on log-probs or values, the rows are scored (:meth:`score`) before they
    are asked for: once, because weights do not change meanwhile.

    Args:
        credit: of the run; its ``config.dynamic_sampling`` is the most batches of an update.

    Examples:
        >>> from accelerate import Accelerator
        >>> from torchrl_llm.modules import TokenScorer
        >>> from torchrl_llm.objectives import LLMGRPOLoss
        >>> from torchrl_llm.testing.enumerable import EnumerableMDP, tiny_lm
        >>> from torchrl_llm.trainers import Distributed
        >>> actor = TokenScorer(tiny_lm(0))
        >>> rows = EnumerableMDP().rows(actor)
        >>> rows = rows[rows["group_id"] == 0]
        >>> credit = Credit(LLMGRPOLoss(actor, kl_coeff=0.0), distributed=Distributed.of(Accelerator(cpu=True)))
        >>> len(DynamicSampling(credit).choose(rows, 4))
        4
    """

    def __init__(self, credit: Credit) -> None:
        self.credit, self.distributed = credit, credit.distributed

    @property
    def reads_scores(self) -> bool:
        """Whether advantages depend on log-probs or values that are scored; if not, only rows to
        learn from are scored."""
        credit = self.credit
        return credit.credit_reads_reference or credit.corrects_sampler or credit.loss.critic_network is not None

    def score(self, rows: TensorDictBase) -> None:
        """:meth:`Credit.score` one batch of the collector, if its advantages depend on it."""
        if self.reads_scores:
            self.credit.score(rows)

    def fill(self, rows: TensorDictBase, wanted: int, more: Callable[[], TensorDictBase | None]) -> TensorDictBase:
        """Add batches to ``rows`` until ``wanted`` episodes are in groups that get credit.

        Args:
            rows: ``[B]``, the first batch.
            wanted: episodes, on all ranks.
            more: returns a further batch, or ``None``: there is no more. It is called until all are
                ``config.dynamic_sampling`` batches. Its rows are scored (:meth:`score`), as the
                first are.

        Returns:
            All rows; :meth:`choose` takes those to learn from.
        """
        for _ in range(self.credit.config.dynamic_sampling - 1):
            if self.found(rows) >= wanted or (batch := more()) is None:
                break
            rows = data.cat_rows([rows, batch])
        return rows

    def found(self, rows: TensorDictBase) -> int:
        """How many episodes of ``rows``, on all ranks, are in groups that get credit."""
        return int(self.distributed.all_reduce_sum(int(self._nonzero_variance(rows).sum())))

    def choose(self, rows: TensorDictBase, wanted: int) -> TensorDictBase:
        """The rows of groups that get credit: at most ``wanted`` on all ranks, the first in the
        order in which one process collects them.

        Args:
            rows: ``[B]``, whole groups, at least one on each rank, scored (:meth:`score`).
            wanted: episodes; of several groups the last may be cut.

        Returns:
            The rows. With one process they are none where :meth:`found` is 0. With several a rank
            that has none of them gets a group of ``rows`` with zero weight, because it takes the
            steps with the others: :meth:`Distributed.own_rows` leaves it out.
        """
        chosen = rows[self._nonzero_variance(rows)]
        ids = zip(chosen[keys.GROUP_ID].tolist(), chosen[keys.EPISODE_ID].tolist(), strict=True)
        first = [episode for _, episode in sorted(self.distributed.all_gather(list(ids)))[:wanted]]
        own = chosen[keys.EPISODE_ID]
        chosen = chosen[torch.isin(own, torch.tensor(first, dtype=torch.int64, device=own.device))]
        # A whole group, because GroupRelative refuses a part of one.
        group = rows[rows[keys.GROUP_ID] == rows[keys.GROUP_ID][:1]]
        return self.distributed.nonempty(chosen, group, len(group))

    def _nonzero_variance(self, rows: TensorDictBase) -> Tensor:
        """Which rows are of groups that the update would learn from, ``[B]`` bool: what the
        estimator makes of the score decides."""
        # In a copy: the rows that are chosen are credited again, as one batch. Without
        # `overlong_penalty`: it would find every group whose answers differ in length, also where
        # all of them lost (DAPO judges its groups by the answers alone).
        return data.nonzero_variance(self.credit.estimate(rows.copy()))
