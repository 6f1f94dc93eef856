"""Turn-level GRPO as it was published, to be compared with (MT-GRPO, Zeng et al., 2025,
arXiv:2505.11821, sec. 4)."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_llm.objectives import GroupRelative


class MTGRPO(GroupRelative):
    """The outcome, the reward of the last turn, compared in the group, for every turn; and for each
    turn before, its own reward.

    A turn's own reward is compared with the rewards of the group at the same turn and credited to
    that turn only. ``scale="none"`` leaves out the divisions.
    """

    def compare(self, tensordict: TensorDictBase, score: Tensor, penalty: Tensor, acted: Tensor) -> Tensor:
        reward, group_id = self._get(tensordict, "reward"), self._get(tensordict, "group_id")
        turn = torch.arange(acted.shape[1])
        last = torch.where(acted, turn, -1).amax(1)
        outcome = reward[torch.arange(len(reward)), last]
        advantage = torch.zeros_like(reward)
        for label in group_id.unique():
            group = group_id == label
            advantage[group] += self._normalized(outcome[group]).unsqueeze(1)
            for k in turn:
                here = group & acted[:, k] & (k < last)
                advantage[here, k] += self._normalized(reward[here, k])
        return advantage

    def _normalized(self, x: Tensor) -> Tensor:
        spread = x.std() + self.eps if self.scale == "std" and len(x) > 1 else 1.0
        return (x - x.mean()) / spread if len(x) else x
