"""What an update needs in its rows: :class:`RowScorer` writes log-probs and values from frozen weights, and credit."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from torchrl.objectives.value import ValueEstimatorBase

from torchrl_llm import keys
from torchrl_llm.data import apply_in_micro_batches, penalise_overlong
from torchrl_llm.modules import TokenScorer
from torchrl_llm.modules.policy import TurnPolicy
from torchrl_llm.objectives import TurnPolicyLoss
from torchrl_llm.trainers.collector_view import (
    CollectorView,
    corrects_sampler,
    credit_reads_scores,
    with_statistics_of,
)
from torchrl_llm.trainers.config import TrainerConfig
from torchrl_llm.trainers.distributed import Distributed


class RowScorer:
    """Scores rows and credits them, before an update changes the weights.

    Args:
        loss: its networks score old log-probs and values; its value estimator credits.
        reference: scores the reference log-probs; ``None``: the loss needs none.
        policy: sampled the rows.
        rollouts: the collector that they come from.
        config: which log-probs are scored, in which micro-batches, and how rewards are shaped.
        distributed: the training processes.
    """

    def __init__(
        self,
        loss: TurnPolicyLoss,
        reference: TokenScorer | None,
        *,
        policy: TurnPolicy,
        rollouts: CollectorView,
        config: TrainerConfig,
        distributed: Distributed,
    ) -> None:
        self.loss, self.reference, self.policy, self.rollouts = loss, reference, policy, rollouts
        self.config, self.distributed, self.accelerator = config, distributed, distributed.accelerator

    @property
    def estimator(self) -> ValueEstimatorBase:
        """The loss's value estimator; looked up each time, for ``loss.make_value_estimator`` may replace it during a run."""
        return with_statistics_of(self.distributed.process_group, self.loss.value_estimator)

    @property
    def exact(self) -> bool:
        """Whether the sampler's log-probs are the trained model's own, so that none need be scored before the update."""
        everywhere = self.policy.exact and self.rollouts.logprobs_match_trainer
        return everywhere and self.accelerator.mixed_precision == "no"

    @property
    def scores_old(self) -> bool:
        """Whether the log-probs that ratios are taken against are scored, and not the sampler's."""
        if self.config.old_log_probs == "auto":
            return not self.exact or corrects_sampler(self.estimator) or self.rollouts.max_staleness > 0
        return self.config.old_log_probs == "scorer"

    @property
    def max_output_tokens(self) -> int:
        """The length at which a response is overlong."""
        return self.policy.sampling.max_output_tokens

    def run(self, batch: TensorDictBase) -> TensorDictBase:
        """Score and credit rows ``[B]``, in place."""
        with self.accelerator.autocast():
            with self.distributed.gathered_parameters():
                self.score(batch)
            return self.credit(batch)

    def preview(self, rows: TensorDictBase) -> TensorDictBase:
        """Credit a copy of rows ``[B]``, scored first only if the credit depends on it."""
        if credit_reads_scores(self.loss):
            return self.run(rows.copy())
        with self.accelerator.autocast():
            return self.credit(rows.copy())

    @torch.no_grad()
    def score(self, batch: TensorDictBase) -> None:
        """Write what the loss needs from frozen weights: old and reference log-probs, values."""
        limit, loss = self.config.max_tokens, self.loss
        if self.scores_old:
            apply_in_micro_batches(loss.actor_network, batch, limit)
            batch.rename_key_(keys.LOG_PROB, keys.OLD_LOG_PROB)
        if self.reference is not None:
            apply_in_micro_batches(self.reference, batch, limit)
            batch.rename_key_(keys.LOG_PROB, keys.REF_LOG_PROB)
        if loss.critic_network is not None:
            apply_in_micro_batches(loss.critic_network, batch, limit)

    def credit(self, batch: TensorDictBase) -> TensorDictBase:
        """Shape the rewards of scored rows ``[B]`` as the settings say, and write the estimator's credit."""
        config, limit = self.config, self.max_output_tokens
        if config.overlong_penalty:
            buffer = config.overlong_buffer or limit
            penalise_overlong(batch, config.overlong_penalty, max_response_length=limit, buffer=buffer)
        return self.estimator(batch)
