"""Group-in-group policy optimization as it was published, to be compared with (Feng et al., 2025,
arXiv:2505.10978, eq. 3 to 8)."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_llm import functional as F
from torchrl_llm.objectives import GroupRelative


class GiGPO(GroupRelative):
    """The episode's advantage plus the advantage of each turn among the turns of its group with the
    same observation.

    The turn's own return is in the mean and the standard deviation that it is compared with, and a
    turn that is alone in its state gets no advantage. ``scale="none"`` is the published F_norm = 1.
    """

    def compare(self, tensordict: TensorDictBase, score: Tensor, penalty: Tensor, acted: Tensor) -> Tensor:
        reward, mask = (self._get(tensordict, name) for name in ("reward", "mask"))
        group_id = self._get(tensordict, "group_id")
        states = F.observation_states(tensordict["tokens"], self._get(tensordict, "turn_ids"), mask.shape[1])
        returns = F.turn_returns(reward, mask, self.gamma, acted=acted)
        steps = torch.zeros_like(returns)
        for label in {(int(g), int(s)) for g, row in zip(group_id, states, strict=True) for s in row}:
            here = acted & (group_id == label[0]).unsqueeze(1) & (states == label[1])
            if int(here.sum()) > 1:
                each = returns[here]
                spread = each.std() + self.eps if self.scale == "std" else 1.0
                steps[here] = (each - each.mean()) / spread
        return super().compare(tensordict, score, penalty, acted).unsqueeze(1) + steps
