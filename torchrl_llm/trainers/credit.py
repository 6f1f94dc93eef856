"""Scores and credit, before an update: :class:`Credit`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from accelerate import Accelerator
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torchrl.objectives.value import ValueEstimatorBase

from torchrl_llm import data, keys
from torchrl_llm.data.selection import unsampled
from torchrl_llm.modules.positions import prefix_cost
from torchrl_llm.objectives import TurnEstimator, TurnLoss
from torchrl_llm.objectives.checks import check_without_sampler
from torchrl_llm.objectives.joining import declared
from torchrl_llm.trainers.config import TrainerConfig
from torchrl_llm.trainers.distributed import Distributed
from torchrl_llm.utils.options import ConfigError


class Credit:
    """Scores rows with weights that do not change meanwhile, and credits them.

    Called with rows ``[B]`` of whole groups, it does both and returns them, on the device of the
    weights: the rows are what :class:`~torchrl_llm.trainers.Update` takes. The estimator is
    the loss's present one, with statistics over all processes.

    Args:
        loss: one of :mod:`torchrl_llm.objectives`, with its value estimator made.
        reference: writes the log-probs of the reference; default ``None``: there is no reference.
        config: ``old_log_probs``, ``max_tokens``, ``overlong_penalty`` and ``overlong_buffer`` are
            read. Default: ``TrainerConfig()``.
        distributed: the training processes. Default: accelerate's, whose device the weights must be
            on (:class:`~torchrl_llm.trainers.Update` moves the loss's weights there). With FSDP2 it
            must be the one that ``Update`` was made with, which sharded the weights.
        max_output_tokens: tokens of the longest response; only ``overlong_penalty`` needs it.
        logprobs_match_trainer: says whether the policy recorded the log-probs that the loss would
            compute with the weights before the update; ``old_log_probs="auto"`` scores them where
            it did not. Default: it did, unless mixed precision computes in another one here.
        around: entered around all computations, such as a timer. Default: nothing is.

    Raises:
        ConfigError: ``overlong_penalty`` without ``max_output_tokens``.

    Examples:
        >>> from torchrl_llm.modules import TokenScorer
        >>> from torchrl_llm.objectives import LLMReinforceLoss
        >>> from torchrl_llm.testing.enumerable import EnumerableMDP, tiny_lm
        >>> actor = TokenScorer(tiny_lm(0))
        >>> rows = EnumerableMDP().rows(actor)
        >>> credit = Credit(LLMReinforceLoss(actor, kl_coeff=0.0), distributed=Distributed.of(Accelerator(cpu=True)))
        >>> credit(rows)["advantage"].shape == rows["tokens"].shape
        True
    """

    def __init__(
        self,
        loss: TurnLoss,
        reference: TensorDictModuleBase | None = None,
        *,
        config: TrainerConfig | None = None,
        distributed: Distributed | None = None,
        max_output_tokens: int | None = None,
        logprobs_match_trainer: Callable[[], bool] | None = None,
        around: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.loss, self.reference, self.config = loss, reference, config or TrainerConfig()
        self.distributed = distributed or Distributed.of(Accelerator())
        self.max_output_tokens, self.around = max_output_tokens, around
        self.logprobs_match_trainer = logprobs_match_trainer or (lambda: not self.distributed.autocasts)
        if self.config.overlong_penalty and max_output_tokens is None:
            raise ConfigError(
                f"overlong_penalty={self.config.overlong_penalty} needs the tokens of the longest response: Credit(max_output_tokens=...)."
            )

    def __call__(self, rows: TensorDictBase) -> TensorDictBase:
        """:meth:`score` and :meth:`credit`; returns the rows ``[B]``, copies where they were on
        another device."""
        rows = self.distributed.on_device(rows)
        self.score(rows)
        return self.credit(rows)

    @property
    def estimator(self) -> ValueEstimatorBase:
        """The loss's value estimator, which takes its statistics over all ranks if it can."""
        # not kept: loss.make_value_estimator may replace it during a run
        estimator = self.loss.value_estimator
        if isinstance(estimator, TurnEstimator) and estimator.process_group is None:
            estimator.process_group = self.distributed.process_group
        return estimator

    @property
    def corrects_sampler(self) -> bool:
        """Whether the advantages hold the ratio of the policy to the sampler, for which old
        log-probs are scored."""
        return declared(self.loss.value_estimator).corrects_sampler

    @property
    def scores_old(self) -> bool:
        """Whether the log-probs that ratios are taken against are scored, and not the sampler's."""
        if self.loss.tensor_keys.sample_log_prob not in self.loss.in_keys:
            return False  # it takes no ratios
        if self.config.old_log_probs == "auto":
            return self.corrects_sampler or not self.logprobs_match_trainer()
        return self.config.old_log_probs == "scorer"

    @property
    def reads_reference(self) -> bool:
        """Whether the log-probs of the reference are read: a stock loss reads none once its KL's
        weight has fallen to 0."""
        loss = self.loss
        return loss.kl_fraction > 0 or loss.tensor_keys.ref_log_prob in loss.in_keys or self.credit_reads_reference

    @property
    def credit_reads_reference(self) -> bool:
        """Whether the estimator reads them: a stock one, while the KL that it takes out of the
        rewards has a weight."""
        return keys.REF_LOG_PROB in self.estimator.in_keys

    @contextmanager
    def _scoring(self) -> Iterator[None]:
        """The training's device and precision."""
        with self.around(), self.distributed.accelerator.autocast():
            yield

    @torch.no_grad()
    def score(self, batch: TensorDictBase) -> None:
        """Write the inputs of the loss that need frozen weights into rows ``[B]``: old and
        reference log-probs, values.

        Raises:
            KeyError: there is no ``"sample_log_prob"``, and a correction for the sampler needs it.
        """
        scores_old = self._lacks_log_probs(batch) or self.scores_old
        with self._scoring(), self.distributed.gathered_parameters():
            if scores_old:
                self._apply(self.loss.actor_network, batch)
                batch.rename_key_(keys.LOG_PROB, keys.OLD_LOG_PROB)
            if self.reference is not None and self.reads_reference:
                self._apply(self.reference, batch)
                batch.rename_key_(keys.LOG_PROB, keys.REF_LOG_PROB)
            if self.loss.critic_network is not None:
                self._apply(self.loss.critic_network, batch)

    def _apply(self, network: TensorDictModuleBase, batch: TensorDictBase) -> None:
        data.apply_in_micro_batches(network, batch, self.config.micro_batch_tokens, prefix_cost(network))

    def _lacks_log_probs(self, batch: TensorDictBase) -> bool:
        """Whether ratios are taken and rows have no log-probs to take them against: rows of other
        collectors may have none.

        Log-probs of conversations that nobody sampled are NaN; they are deleted then.
        """
        name = self.loss.tensor_keys.sample_log_prob
        if name not in self.loss.in_keys:
            return False
        lacks = name not in batch or bool(unsampled(batch[keys.TURN_IDS], batch[name]).any())
        if not self.distributed.all_reduce_max(lacks):
            return False
        check_without_sampler(self.loss, self.config.old_log_probs)
        if name in batch:
            batch.del_(name)
        return True

    def credit(self, batch: TensorDictBase) -> TensorDictBase:
        """Shape the rewards of scored rows ``[B]`` as the settings say, and write the estimator's
        credit into them."""
        coeff, limit = self.config.overlong_penalty, self.max_output_tokens
        if coeff and limit is not None:
            buffer = self.config.overlong_buffer or limit
            data.penalize_overlong(batch, coeff, max_response_length=limit, buffer=buffer)
        return self.estimate(batch)

    def estimate(self, batch: TensorDictBase) -> TensorDictBase:
        """Write the credit for the rewards as they are into scored rows ``[B]``."""
        with self._scoring():
            return self.estimator(batch)
