"""Supervised fine-tuning on episodes: :class:`LLMSFTLoss`."""

from __future__ import annotations

from dataclasses import dataclass

from tensordict import TensorDictBase
from torch import Tensor

from torchrl_llm.keys import NestedKey
from torchrl_llm.objectives.base import TurnLoss
from torchrl_llm.objectives.checks import check_objective
from torchrl_llm.objectives.estimators.base import TurnEstimator
from torchrl_llm.objectives.estimators.critic import CriticEstimator
from torchrl_llm.objectives.estimators.imitation import ImitationWeights, NoCredit
from torchrl_llm.objectives.estimators.returns import ReturnEstimator
from torchrl_llm.objectives.estimators.vine import TurnVine


@dataclass(kw_only=True, eq=False, repr=False)
class LLMSFTLoss(TurnLoss):
    """Supervised fine-tuning: the negative log-likelihood of the action tokens of episodes,
    weighted by turn.

    ``loss_objective = -sum(loss_weight * advantage * log_prob)`` over the action tokens
    (``turn_ids >= 0``), where the advantage is the weight of
    :class:`~torchrl_llm.objectives.ImitationWeights`: all turns of demonstrations (warm start),
    turns of episodes that were won (rejection sampling, expert iteration), or weighted by return.
    The episodes may be anybody's: no ratio is taken and ``"sample_log_prob"`` is not read.

    Reads rows ``[B]``: what the actor reads, ``"turn_ids"``, ``"advantage"`` and, optionally,
    ``"loss_weight"``. Returns ``loss_objective``, ``loss_entropy`` (``entropy_coeff`` not 0), and,
    detached, ``nll``: nats per action token, whatever its weight; ``imitated``: the share of the
    tokens that has one; ``entropy`` and ``weight``. Over micro-batches they add up.

    Args:
        actor: see :class:`~torchrl_llm.objectives.TurnLoss`.

    Keyword Args:
        estimator: Default: :class:`~torchrl_llm.objectives.ImitationWeights`.
        **options: those of :class:`~torchrl_llm.objectives.TurnLoss`. The weights of
            ``weighting`` count all action tokens of the batch, also those that are not imitated:
            the fewer are, the smaller the gradient.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from tensordict.nn import TensorDictModule
        >>> actor = TensorDictModule(lambda ids: torch.full(ids.shape, -2.0), in_keys=["turn_ids"], out_keys=["log_prob"])
        >>> ids = torch.tensor([[-1, 0, 0, -1, 1]])
        >>> rows = TensorDict({"turn_ids": ids, "advantage": (ids == 0).float()}, [1])
        >>> out = LLMSFTLoss(actor)(rows)
        >>> [round(out[name].item(), 3) for name in ("loss_objective", "nll", "imitated")]
        [1.333, 2.0, 0.667]
    """

    default_value_estimator = ImitationWeights

    @property
    def out_keys(self) -> list[NestedKey]:
        return [*super().out_keys, "nll", "imitated"]

    def objective(self, log_prob: Tensor, advantage: Tensor) -> Tensor:
        """The log-probs, weighted; ``[B, L]`` each. Override this method for another objective."""
        return advantage * log_prob

    def terms(self, rows: TensorDictBase, scored: TensorDictBase) -> dict[str, Tensor]:
        weight, log_prob = self._get(rows, "loss_weight"), self._get(scored, "log_prob")
        weights = self._frozen(rows, "advantage", "Run the value estimator first.")
        objective = check_objective(type(self).__name__, self.objective(log_prob, weights), log_prob)
        return {
            "loss_objective": -(weight * objective).sum(),
            "nll": -(weight * log_prob.detach()).sum(),
            "imitated": (weight * (weights != 0)).sum(),
        } | super().terms(rows, scored)

    def _check_estimator(self) -> None:
        others = (CriticEstimator, NoCredit, ReturnEstimator, TurnVine)
        if isinstance(self.value_estimator, others) or not isinstance(self.value_estimator, TurnEstimator):
            name = type(self.value_estimator).__name__
            raise ValueError(
                f"The estimator {name} writes advantages, and LLMSFTLoss takes weights: where they are negative, text would be made "
                "less likely without bound, and where they are 0, nothing is imitated. Use ImitationWeights or one of your own (the "
                "option estimator), or an algorithm of reinforcement learning."
            )
        weights = self.value_estimator
        if isinstance(weights, ImitationWeights) and weights.gamma != 1 and not weights.reads_rewards:
            raise ValueError(
                f"gamma={weights.gamma} does nothing with imitate={weights.imitate!r} and min_return=None: leave it out, or weigh or choose "
                'by returns (imitate="return", min_return).'
            )
