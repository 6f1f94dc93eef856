"""What an update needs in its rows: :class:`RowScorer` writes scores and credit, and chooses rows by their credit."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.objectives.value import ValueEstimatorBase

from torchrl_llm import keys
from torchrl_llm.data import apply_in_micro_batches, nonzero_variance, penalize_overlong
from torchrl_llm.trainers.base import TrainerBase
from torchrl_llm.trainers.collector_view import corrects_sampler, credit_reads_scores, with_statistics_of


class RowScorer:
    """Scores rows with weights that do not change meanwhile, and credits them.

    Args:
        run: the trainer.
    """

    def __init__(self, run: TrainerBase) -> None:
        self.run = run

    @property
    def estimator(self) -> ValueEstimatorBase:
        """The loss's value estimator; looked up each time, for ``loss.make_value_estimator`` may replace it during a run."""
        return with_statistics_of(self.run.distributed.process_group, self.run.loss.value_estimator)

    @property
    def exact(self) -> bool:
        """Whether the sampler's log-probs are the trained model's own, so that none need be scored before the update."""
        everywhere = self.run.policy.exact and self.run.rollouts.logprobs_match_trainer
        return everywhere and self.run.accelerator.mixed_precision == "no"

    @property
    def scores_old(self) -> bool:
        """Whether the log-probs that ratios are taken against are scored, and not the sampler's."""
        if self.run.config.old_log_probs == "auto":
            return not self.exact or corrects_sampler(self.estimator) or self.run.rollouts.max_staleness > 0
        return self.run.config.old_log_probs == "scorer"

    # ------------------------------------------------------------------ scores and credit

    def score_and_credit(self, batch: TensorDictBase, *, score: bool = True) -> TensorDictBase:
        """:meth:`score`, unless told not to, and :meth:`credit` on the training's device and precision."""
        with self.run.timer("score"), self.run.accelerator.autocast():
            if score:
                with self.run.distributed.gathered_parameters():
                    self.score(batch)
            return self.credit(batch)

    @torch.no_grad()
    def score(self, batch: TensorDictBase) -> None:
        """Write what the loss needs from frozen weights: old and reference log-probs, values."""
        limit, loss = self.run.config.max_tokens, self.run.loss
        if self.scores_old:
            apply_in_micro_batches(loss.actor_network, batch, limit)
            batch.rename_key_(keys.LOG_PROB, keys.OLD_LOG_PROB)
        if self.run.reference is not None:
            apply_in_micro_batches(self.run.reference, batch, limit)
            batch.rename_key_(keys.LOG_PROB, keys.REF_LOG_PROB)
        if loss.critic_network is not None:
            apply_in_micro_batches(loss.critic_network, batch, limit)

    def credit(self, batch: TensorDictBase) -> TensorDictBase:
        """Shape the rewards of scored rows ``[B]`` as the settings say, and write the estimator's credit."""
        config, limit = self.run.config, self.run.policy.sampling.max_output_tokens
        if config.overlong_penalty:
            buffer = config.overlong_buffer or limit
            penalize_overlong(batch, config.overlong_penalty, max_response_length=limit, buffer=buffer)
        return self.estimator(batch)

    # ------------------------------------------------------------------ dynamic sampling

    def wanted(self, rows: TensorDictBase) -> int:
        """How many episodes an update is to have on all ranks, where the collector delivered ``rows`` in one batch."""
        own = self.run.rollouts.batch_size
        return int(self.run.distributed.all_reduce_sum(rows.shape[0] if own is None else own))

    def found(self, rows: TensorDictBase) -> int:
        """How many episodes of ``rows``, on all ranks, are in groups that get credit."""
        return int(self.run.distributed.all_reduce_sum(int(self._nonzero_variance(rows).sum())))

    def choose(self, rows: TensorDictBase) -> TensorDictBase:
        """The rows of groups that get credit: at most one batch's, the first in the order that one process plays them in."""
        chosen = rows[self._nonzero_variance(rows)]
        ids = zip(chosen[keys.GROUP_ID].tolist(), chosen[keys.EPISODE_ID].tolist(), strict=True)
        first = [episode for _, episode in sorted(self.run.distributed.all_gather(list(ids)))[: self.wanted(rows)]]
        return chosen[torch.isin(chosen[keys.EPISODE_ID], torch.tensor(first, dtype=torch.int64, device=rows.device))]

    def _nonzero_variance(self, rows: TensorDictBase) -> Tensor:
        """Which rows are of groups that the update would learn from, ``[B]`` bool: what the estimator really does decides."""
        return nonzero_variance(self.score_and_credit(rows.copy(), score=credit_reads_scores(self.run.loss)))
