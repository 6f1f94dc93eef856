"""Hierarchy-of-groups policy optimization as it was published, to be compared with (He et al.,
2026, arXiv:2602.22817)."""

from __future__ import annotations

from collections import defaultdict

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_llm import functional as F
from torchrl_llm.objectives import GroupRelative

HISTORY = 2
"""Observations before the present one that the deepest groups share (the paper's K)."""


class HGPO(GroupRelative):
    """Each turn among the turns of its group with the same observation, and with the same one or
    two observations before it.

    The turn's own return is in the mean and the standard deviation (over the number of turns) that
    it is compared with. The advantages of the depths ``k`` are weighted by ``k + 1``; as in the
    authors' code, those that are 0 are left out of the weights, and a turn that is alone in its
    state gets no advantage. ``scale="none"`` leaves out the division.
    """

    def compare(self, tensordict: TensorDictBase, score: Tensor, penalty: Tensor, acted: Tensor) -> Tensor:
        reward, mask = (self._get(tensordict, name) for name in ("reward", "mask"))
        group_id = self._get(tensordict, "group_id").tolist()
        seen = F.observation_states(tensordict["tokens"], self._get(tensordict, "turn_ids"), mask.shape[1]).tolist()
        returns = F.turn_returns(reward, mask, self.gamma, acted=acted)
        groups = defaultdict(list)
        for row, turn in acted.nonzero().tolist():
            for depth in range(min(HISTORY, turn) + 1):
                groups[group_id[row], tuple(seen[row][turn - depth : turn + 1])].append((row, turn))
        found = defaultdict(list)
        for (_, shared), members in groups.items():
            each = torch.stack([returns[member] for member in members])
            spread = each.std(correction=0) + self.eps if self.scale == "std" else 1.0
            for member, advantage in zip(members, (each - each.mean()) / spread, strict=True):
                if len(members) > 1 and advantage != 0:
                    found[member].append((len(shared), advantage))
        advantages = torch.zeros_like(returns)
        for member, parts in found.items():
            advantages[member] = sum(weight * advantage for weight, advantage in parts) / sum(
                weight for weight, _ in parts
            )
        return advantages
