"""Base class of the policy losses: :class:`TurnPolicyLoss`.

The three algorithms are in ``ppo.py``, ``reinforce.py`` and ``grpo.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from torchrl_llm import functional as F
from torchrl_llm.keys import NestedKey
from torchrl_llm.objectives.base import TurnLoss
from torchrl_llm.objectives.checks import check_estimator, check_objective, check_policy_options
from torchrl_llm.objectives.estimators.base import TurnEstimator
from torchrl_llm.objectives.estimators.returns import ReBN
from torchrl_llm.objectives.options import PolicyLossOptions
from torchrl_llm.objectives.sampler import SamplerRule


@dataclass(kw_only=True, eq=False, repr=False)
class TurnPolicyLoss(PolicyLossOptions, TurnLoss):
    """Policy loss over episodes: advantage x ratio level x clipping x weights x KL x entropy x
    sampler correction.

    ``loss_objective = -sum(loss_weight * correction * objective(log_ratio, advantage))``, where
    ``log_ratio`` is the new log-prob minus ``"old_log_prob"`` (or ``"sample_log_prob"`` where there
    is none), pooled over ``ratio_level``. To try another objective, subclass and override
    :meth:`objective`; for one that needs more than these two, or further terms,
    :meth:`~torchrl_llm.objectives.TurnLoss.terms`.

    Beside what :class:`~torchrl_llm.objectives.TurnLoss` reads: ``"sample_log_prob"`` and, as
    options ask, ``"old_log_prob"`` and ``"ref_log_prob"``. Beside what it returns:

    - ``loss_objective``; ``loss_kl`` (KL in the loss), times its coefficient;
    - ``kl_approx``: KL from the old policy to the new one; ``log_ratio``: mean absolute log-ratio
      per token; ``clip_fraction``: share of tokens whose clip binds; ``kl``: KL from the policy to
      the reference (``kl_coeff`` and ``kl_fraction`` not 0);
    - ``ESS``: the effective sample size of the pooled ratios, in (0, 1];
    - ``sampler_rejected``: share of tokens that ``sampler_correction`` leaves out;
      ``sampler_weight``: the mean of its weights.

    All but the last three are weighted sums, as those of ``TurnLoss`` are.

    Args:
        actor: see :class:`~torchrl_llm.objectives.TurnLoss`.

    Keyword Args:
        **options: of :class:`PolicyLossOptions`. ``unit_weight="equal"`` decides ``weighting``.

    Examples:
        >>> from tensordict import TensorDict
        >>> from tensordict.nn import TensorDictModule
        >>> class Actor(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.logit = torch.nn.Parameter(torch.zeros(()))
        ...     def forward(self, turn_ids):
        ...         return torch.where(turn_ids >= 0, torch.nn.functional.logsigmoid(self.logit), 0.0)
        >>> policy_loss = TurnPolicyLoss(TensorDictModule(Actor(), in_keys=["turn_ids"], out_keys=["log_prob"]))
        >>> ids = torch.tensor([[-1, 0, 0, -1, 1]])
        >>> old = torch.where(ids >= 0, torch.tensor(0.5).log(), 0.0)
        >>> rows = TensorDict({"turn_ids": ids, "sample_log_prob": old, "advantage": (ids >= 0).float()}, [1])
        >>> out = policy_loss(rows)
        >>> out["loss_objective"].backward()
        >>> out["loss_objective"].item(), policy_loss.actor_network.module.logit.grad.item()
        (-1.0, -0.5)
    """

    default_value_estimator: ClassVar[type[TurnEstimator]] = ReBN

    def __post_init__(self, actor: TensorDictModuleBase, critic: TensorDictModuleBase | None, estimator: Any) -> None:
        bounds = self.clip_epsilon
        self.clip_low, self.clip_high = bounds if isinstance(bounds, tuple | list) else (bounds, bounds)
        sampler = self.sampler_bounds, self.sampler_level, self.sampler_reduction
        self._sampler_rule = self.sampler_correction and SamplerRule(self.sampler_correction, *sampler)
        check_policy_options(self)
        if self.unit_weight == "equal":
            self.weighting = self.ratio_level
        super().__post_init__(actor, critic, estimator)
        self.surrogate(torch.zeros(1, 1), torch.zeros(1, 1))  # raises on invalid bounds

    @property
    def in_keys(self) -> list[NestedKey]:
        reference = ["ref_log_prob"] if self.kl_coeff and self.kl_fraction else []
        names = ["turn_ids", "advantage", "sample_log_prob", *reference]
        return list(dict.fromkeys([*self.actor_network.in_keys, *(getattr(self.tensor_keys, name) for name in names)]))

    @property
    def out_keys(self) -> list[NestedKey]:
        out = [*super().out_keys, "kl_approx", "log_ratio", "clip_fraction", "ESS"]
        if self.sampler_correction is not None:
            out += ["sampler_rejected", "sampler_weight"]
        if self.kl_coeff and self.kl_fraction:
            out += ["loss_kl", "kl"] if self.kl_in == "loss" else ["kl"]
        return out

    def _check_estimator(self) -> None:
        check_estimator(self)

    # Not called objective_loss, say: TorchRL wraps every public attribute whose name ends in
    # "loss".
    def objective(self, log_ratio: Tensor, advantage: Tensor) -> Tensor:
        """The objective of each token, to be maximized, by ``clipping``. Override this method for
        another objective.

        Args:
            log_ratio: ``[B, L]``, new minus old log-prob, pooled over ``ratio_level``; 0 off
                actions. It has the gradient of the log-prob.
            advantage: ``[B, L]``; 0 off actions.

        Returns:
            ``[B, L]``.
        """
        return self.surrogate(log_ratio, advantage)[0]

    def surrogate(self, log_ratio: Tensor, advantage: Tensor) -> tuple[Tensor, Tensor]:
        """The stock :meth:`objective`, and a mask of the tokens whose ratio is clipped; ``[B, L]``
        each."""
        if self.clipping == "none":
            return F.importance_ratio(log_ratio) * advantage, torch.zeros_like(log_ratio, dtype=torch.bool)
        if self.clipping == "cispo":
            return F.cispo_objective(log_ratio, advantage, self.clip_low, self.clip_high)
        return F.clipped_objective(log_ratio, advantage, self.clip_low, self.clip_high, self.dual_clip)

    def terms(self, rows: TensorDictBase, scored: TensorDictBase) -> dict[str, Tensor]:
        turn_ids, weight = self._get(rows, "turn_ids"), self._get(rows, "loss_weight")
        log_prob, old = self._get(scored, "log_prob"), self.old_log_prob(rows)
        advantage = self._frozen(rows, "advantage", "Run the value estimator first.")
        correction = self._correction(rows, old)
        token_ratio = log_prob - old
        log_ratio = F.pool_log_ratio(token_ratio, turn_ids, self.ratio_level, self.ratio_reduction)
        objective = check_objective(type(self).__name__, self.objective(log_ratio, advantage), log_ratio)
        gain = self._unit_weight(weight, turn_ids) * correction * objective
        # A sum and not a mean: micro-batches add up to the batch's gradient, however it is cut.
        terms = {"loss_objective": -gain.sum()}
        clipped = self.surrogate(log_ratio.detach(), advantage)[1]
        terms |= F.ratio_diagnostics(weight, token_ratio.detach(), log_ratio.detach(), clipped)
        if self._sampler_rule is not None:
            terms |= self._sampler_rule.metrics(correction, weight)
        if self.kl_coeff and self.kl_fraction:
            # Samples of the old policy stand for samples of the present one.
            sampled = weight * correction * F.importance_ratio(token_ratio.detach())
            ref = self._frozen(rows, "ref_log_prob", "Score the reference, or set kl_coeff=0.")
            terms |= self._kl_terms(sampled, log_prob, ref)
        return terms | super().terms(rows, scored)

    def old_log_prob(self, rows: TensorDictBase) -> Tensor:
        """The log-probs that ratios are taken against, ``[B, L]``, without gradient, 0 off actions:
        ``"old_log_prob"``, or ``"sample_log_prob"`` where rows have none."""
        return self._frozen(rows, self._old_name(rows))

    def _unit_weight(self, weight: Tensor, turn_ids: Tensor) -> Tensor:
        """Under sum pooling a unit counts with one token's weight, else with the sum of its tokens'
        weights."""
        if self.ratio_level == "token" or self.ratio_reduction == "mean" or self.unit_weight == "equal":
            return weight
        return weight / F.pool_log_ratio(torch.ones_like(weight), turn_ids, self.ratio_level, "sum").clamp_min(1.0)

    @property
    def corrects_sampler(self) -> bool:
        """Whether there is a ``sampler_correction``."""
        return self.sampler_correction is not None

    def clipped(self, rows: TensorDictBase) -> Tensor:
        turn_ids = self._get(rows, "turn_ids")
        token_ratio = self._frozen(rows, "log_prob") - self.old_log_prob(rows)
        log_ratio = F.pool_log_ratio(token_ratio, turn_ids, self.ratio_level, self.ratio_reduction)
        return self.surrogate(log_ratio, self._frozen(rows, "advantage"))[1] & (turn_ids >= 0)

    def _correction(self, rows: TensorDictBase, old: Tensor) -> Tensor:
        """The weights of the sampler correction, ``[B, L]``; 1 without one."""
        if self._sampler_rule is None:
            return torch.ones_like(old)
        return self._sampler_rule.weights(old, self._frozen(rows, "sample_log_prob"), self._get(rows, "turn_ids"))

    def _kl_terms(self, weight: Tensor, log_prob: Tensor, ref: Tensor) -> dict[str, Tensor]:
        # Always k3, which is never negative and makes runs of different kl_kind comparable.
        terms = {"kl": (weight * F.kl_estimate(log_prob.detach(), ref, "k3")).sum()}
        if self.kl_in == "loss":
            estimate = F.kl_estimate(log_prob, ref, self.kl_kind)
            terms["loss_kl"] = self.kl_fraction * self.kl_coeff * (weight * estimate).sum()
        return terms
