"""Objectives as other systems have them, to be compared with: subclasses that override
``objective`` or ``terms``, and none is shipped."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_llm import functional as F
from torchrl_llm.objectives import LLMReinforceLoss, ReBN


class SAPO(LLMReinforceLoss):
    """Soft adaptive policy optimization (Gao et al., 2025, arXiv:2511.20347): a sigmoid of the
    ratio in place of the clip."""

    temperatures = 1.0, 1.05
    """Where the advantage is positive, and where it is not."""

    def objective(self, log_ratio: Tensor, advantage: Tensor) -> Tensor:
        tau = torch.where(advantage > 0, *map(advantage.new_tensor, self.temperatures))
        return 4 / tau * torch.sigmoid(tau * (F.importance_ratio(log_ratio) - 1)) * advantage


class Masked(LLMReinforceLoss):
    """The importance-weighted objective without the tokens that are ``beyond`` a bound."""

    def beyond(self, moved: Tensor, advantage: Tensor) -> Tensor:
        """Which tokens are left out; ``moved`` is how far the probability of each has moved,
        ``[B, L]``."""
        raise NotImplementedError

    def terms(self, rows: TensorDictBase, scored: TensorDictBase) -> dict[str, Tensor]:
        log_prob, old, advantage = scored["log_prob"], self.old_log_prob(rows), rows["advantage"]
        beyond = self.beyond(log_prob.detach().exp() - old.exp(), advantage)
        objective = torch.where(beyond, 0.0, F.importance_ratio(log_prob - old) * advantage)
        return super().terms(rows, scored) | {"loss_objective": -(rows["loss_weight"] * objective).sum()}


class DPPO(Masked):
    """Divergence proximal policy optimization, binary total variation (2026, arXiv:2602.04879).

    A token is masked whose probability, and not ratio, has moved too far the way the advantage asks
    for.
    """

    bound = 0.2

    def beyond(self, moved: Tensor, advantage: Tensor) -> Tensor:
        return ((advantage > 0) & (moved > self.bound)) | ((advantage < 0) & (moved < -self.bound))


class IPO(Masked):
    """The symmetric mask: a token is masked whose probability has moved too far either way."""

    bound = 0.2

    def beyond(self, moved: Tensor, advantage: Tensor) -> Tensor:
        return moved.abs() > self.bound


class WholeReturn(ReBN):
    """The return of the whole episode for each of its turns."""

    def score(self, reward: Tensor, mask: Tensor, acted: Tensor) -> Tensor:
        return F.episode_return(reward, mask, self.gamma)


class GMPO(LLMReinforceLoss):
    """Geometric-mean policy optimization (2025, arXiv:2507.20673): log-ratios are clipped, then
    averaged.

    As there, all tokens of an episode have one advantage.
    """

    default_value_estimator = WholeReturn
    bound = 0.4

    def terms(self, rows: TensorDictBase, scored: TensorDictBase) -> dict[str, Tensor]:
        log_ratio, advantage = scored["log_prob"] - self.old_log_prob(rows), rows["advantage"]
        near = log_ratio.clamp(-self.bound, self.bound)
        clipped = torch.where(advantage > 0, torch.minimum(log_ratio, near), torch.maximum(log_ratio, near))
        ratio = F.importance_ratio(F.pool_log_ratio(clipped, rows["turn_ids"], "sequence", "mean"))
        return super().terms(rows, scored) | {"loss_objective": -(rows["loss_weight"] * ratio * advantage).sum()}
