"""Supervised fine-tuning on episodes: :class:`LLMSFTLoss`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_llm import functional as F
from torchrl_llm.keys import NestedKey
from torchrl_llm.objectives.estimators.critic import CriticEstimator
from torchrl_llm.objectives.estimators.imitation import Imitated, ImitationWeights, NoCredit
from torchrl_llm.objectives.estimators.returns import ReturnEstimator
from torchrl_llm.objectives.loss import Clipping, KLPlace, TurnPolicyLoss, UnitWeight
from torchrl_llm.utils.options import Finite, Idle, Share


@dataclass(kw_only=True, eq=False, repr=False)
class LLMSFTLoss(TurnPolicyLoss):
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
        actor: see :class:`~torchrl_llm.objectives.TurnPolicyLoss`.

    Keyword Args:
        imitate, min_return, gamma: see :class:`~torchrl_llm.objectives.ImitationWeights`. Defaults:
            ``"all"``, ``None``, 1.0.
        weighting, weight_constant, entropy_coeff, entropy_target: see
            :class:`~torchrl_llm.objectives.TurnPolicyLoss`. The weights count all action tokens of
            the batch, also those that are not imitated: the fewer are, the smaller the gradient.

    Examples:
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

    idle: ClassVar[tuple[Idle, ...]] = (
        *TurnPolicyLoss.idle,
        Idle(
            ("gamma",),
            {"imitate": ("all", "success"), "min_return": (None,)},
            'weigh or choose by returns (imitate="return", min_return)',
        ),
    )
    imitate: Imitated = "all"
    """Imitate "all" turns, turns of episodes that ended in "success", or each with the weight of
    its "return"."""
    min_return: Finite | None = None
    """Do not imitate turns whose return from there on is less; None sets no bound."""
    gamma: Share = 1.0
    """Discount per turn."""

    # No arguments: they compare with another policy, which imitation does not.
    clipping: Clipping = field(init=False, default="none")
    clip_epsilon: Any = field(init=False, default=0.0)
    dual_clip: Any = field(init=False, default=None)
    ratio_level: F.RatioLevel = field(init=False, default="token")
    ratio_reduction: F.RatioReduction = field(init=False, default="mean")
    unit_weight: UnitWeight = field(init=False, default="by_tokens")
    kl_coeff: float = field(init=False, default=0.0)
    kl_kind: F.KLKind = field(init=False, default="k3")
    kl_in: KLPlace = field(init=False, default="loss")
    sampler_correction: F.SamplerCorrection | None = field(init=False, default=None)
    sampler_bounds: Any = field(init=False, default=None)
    sampler_level: F.RatioLevel = field(init=False, default="token")
    sampler_reduction: F.RatioReduction = field(init=False, default="sum")
    discounted_objective: bool = field(init=False, default=False)
    clip_advantage: Any = field(init=False, default=None)

    @property
    def in_keys(self) -> list[NestedKey]:
        names = [self.tensor_keys.turn_ids, self.tensor_keys.advantage]
        return list(dict.fromkeys([*self.actor_network.in_keys, *names]))

    @property
    def out_keys(self) -> list[NestedKey]:
        out: list[NestedKey] = ["loss_objective", "nll", "imitated", "weight"]
        if self._writes_entropy:
            out += ["loss_entropy", "entropy"] if self.entropy_coeff else ["entropy"]
        return out

    def objective(self, log_ratio: Tensor, advantage: Tensor) -> Tensor:
        """The log-probs, which are ratios to nothing here, weighted; ``[B, L]``."""
        return advantage * log_ratio

    def _old_log_prob(self, tensordict: TensorDictBase) -> tuple[Tensor, Tensor]:
        advantage = self._frozen(tensordict, "advantage")
        return torch.zeros_like(advantage), torch.ones_like(advantage)

    def _check_estimator(self) -> None:
        if isinstance(self.value_estimator, (CriticEstimator, NoCredit, ReturnEstimator)):
            name = type(self.value_estimator).__name__
            raise ValueError(
                f"The estimator {name} writes advantages, and LLMSFTLoss takes weights: where they are negative, text would be made "
                "less likely without bound, and where they are 0, nothing is imitated. Use ImitationWeights or one of your own (the "
                "option estimator), or an algorithm of reinforcement learning."
            )
        super()._check_estimator()

    @torch.no_grad()
    def _diagnose(
        self, out: TensorDictBase, weight: Tensor, token_ratio: Tensor, log_ratio: Tensor, advantage: Tensor
    ) -> None:
        out["nll"] = -(weight * log_ratio).sum()
        out["imitated"] = (weight * (advantage != 0)).sum()
        out["weight"] = weight.sum()
