"""Objectives as other systems have them, to be compared with: subclasses that override
``objective``, and none is shipped."""

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


class WithRows(LLMReinforceLoss):
    """Keeps the rows' old log-probs and turn ids, which an objective beyond ratio and advantage
    reads."""

    def _old_log_prob(self, tensordict: TensorDictBase) -> tuple[Tensor, Tensor]:
        old, correction = super()._old_log_prob(tensordict)
        self.old, self.turn_ids = old, tensordict[self.tensor_keys.turn_ids]
        return old, correction


class DPPO(WithRows):
    """Divergence proximal policy optimization, binary total variation (2026, arXiv:2602.04879).

    A token is masked whose probability, and not ratio, has moved too far the way the advantage asks
    for.
    """

    bound = 0.2

    def objective(self, log_ratio: Tensor, advantage: Tensor) -> Tensor:
        moved = (self.old + log_ratio.detach()).exp() - self.old.exp()
        beyond = ((advantage > 0) & (moved > self.bound)) | ((advantage < 0) & (moved < -self.bound))
        return torch.where(beyond, 0.0, F.importance_ratio(log_ratio) * advantage)


class IPO(WithRows):
    """The symmetric mask: a token is masked whose probability has moved too far either way."""

    bound = 0.2

    def objective(self, log_ratio: Tensor, advantage: Tensor) -> Tensor:
        moved = (self.old + log_ratio.detach()).exp() - self.old.exp()
        return torch.where(moved.abs() > self.bound, 0.0, F.importance_ratio(log_ratio) * advantage)


class WholeReturn(ReBN):
    """The return of the whole episode for each of its turns."""

    def score(self, reward: Tensor, mask: Tensor, acted: Tensor) -> Tensor:
        return F.episode_return(reward, mask, self.gamma)


class GMPO(WithRows):
    """Geometric-mean policy optimization (2025, arXiv:2507.20673): log-ratios are clipped, then
    averaged.

    As there, all tokens of an episode have one advantage.
    """

    default_value_estimator = WholeReturn
    bound = 0.4

    def objective(self, log_ratio: Tensor, advantage: Tensor) -> Tensor:
        near = log_ratio.clamp(-self.bound, self.bound)
        clipped = torch.where(advantage > 0, torch.minimum(log_ratio, near), torch.maximum(log_ratio, near))
        return F.importance_ratio(F.pool_log_ratio(clipped, self.turn_ids, "sequence", "mean")) * advantage
