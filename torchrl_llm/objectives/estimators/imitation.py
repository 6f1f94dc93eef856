"""Which turns are imitated, and how much: :class:`ImitationWeights`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_llm.objectives import functional as F
from torchrl_llm.objectives.estimators.base import TurnEstimator
from torchrl_llm.options import ConfigError, Finite, Share

Imitated = Literal["all", "success", "return"]


@dataclass(kw_only=True, eq=False, repr=False)
class ImitationWeights(TurnEstimator):
    """The weight with which each turn is imitated, written as its advantage.

    Reads ``("turn", reward / mask / terminated / truncated / success)`` ``[B, T]`` and ``"turn_ids"`` ``[B, L]``. Writes
    ``"advantage"``, ``"value_target"`` ``[B, L]`` and ``("turn", advantage / value_target)`` ``[B, T]``; the target is the
    return from the turn on.

    Keyword Args:
        imitate: ``"all"`` turns with weight 1; ``"success"``: those of episodes that ended in success, the others with 0 (filtered
            behavior cloning; on the policy's own episodes rejection sampling, as in RAFT, arXiv:2304.06767, and STaR,
            arXiv:2203.14465); ``"return"``: each with its return from there on, which must not be negative where ``min_return`` lets it
            through (reward-weighted regression; Peters and Schaal, 2007). Default: ``"all"``.
        min_return: turns whose return from there on is less get the weight 0; ``None`` sets no bound. Default: ``None``.
        gamma: discount per turn, of returns. Default: 1.0.

    Raises:
        ConfigError: ``imitate="return"`` and a return is negative: its text would be made less likely without bound.

    Examples:
        >>> from tensordict import TensorDict
        >>> yes, no = torch.ones(2, 1, dtype=torch.bool), torch.zeros(2, 1, dtype=torch.bool)
        >>> won = torch.tensor([[True], [False]])
        >>> turn = dict(reward=won.float(), mask=yes, terminated=yes, truncated=no, success=won)
        >>> rows = TensorDict({"turn": turn, "turn_ids": torch.tensor([[-1, 0], [-1, 0]])}, [2])
        >>> ImitationWeights(imitate="success")(rows)["advantage"]
        tensor([[0., 1.],
                [0., 0.]])
    """

    _reads: ClassVar[tuple[str, ...]] = (*TurnEstimator._reads, "success")

    imitate: Imitated = "all"
    min_return: Finite | None = None
    gamma: Share = 1.0

    def estimate(self, tensordict: TensorDictBase) -> dict[str, Tensor]:
        reward, mask, _, acted = self._turns(tensordict)
        returns = F.turn_returns(reward, mask, self.gamma, acted=acted)
        weight = returns if self.imitate == "return" else torch.ones_like(returns)
        if self.imitate == "success":
            weight = weight * self._at_end(tensordict, "success").unsqueeze(1)
        if self.min_return is not None:
            weight = weight * (returns >= self.min_return)
        self._check(weight, acted)
        written = {"turn_advantage": weight, "turn_value_target": returns}
        return {name: torch.where(acted, value, 0.0) for name, value in written.items()}

    @staticmethod
    def _check(weight: Tensor, acted: Tensor) -> None:
        lowest = weight[acted].min().item() if bool(acted.any()) else 0.0
        if lowest < 0:
            raise ConfigError(
                f'imitate="return" weighs by returns, and one is {lowest:.3g}: what has a negative weight would be made less likely '
                'without bound. Leave such turns out with min_return=0, use imitate="success", or an algorithm of reinforcement '
                "learning."
            )


@dataclass(kw_only=True, eq=False, repr=False)
class NoCredit(TurnEstimator):
    """Advantages of 0: nothing is learned from rewards, and what the loss has beside them is all: the KL to a teacher.

    Reads ``("turn", reward / mask / terminated / truncated)`` ``[B, T]`` and ``"turn_ids"`` ``[B, L]``; writes what
    :class:`~torchrl_llm.objectives.TurnEstimator` writes, the target as the return from the turn on.

    Keyword Args:
        gamma: discount per turn, of the targets. Default: 1.0.

    Examples:
        >>> from tensordict import TensorDict
        >>> yes, no = torch.ones(1, 1, dtype=torch.bool), torch.zeros(1, 1, dtype=torch.bool)
        >>> turn = dict(reward=yes.float(), mask=yes, terminated=yes, truncated=no)
        >>> NoCredit()(TensorDict({"turn": turn, "turn_ids": torch.tensor([[-1, 0]])}, [1]))["advantage"]
        tensor([[0., 0.]])
    """

    takes_trees = True

    gamma: Share = 1.0

    def estimate(self, tensordict: TensorDictBase) -> dict[str, Tensor]:
        reward, mask, _, acted = self._turns(tensordict)
        returns = F.turn_returns(reward, mask, self.gamma, acted=acted)
        return {"turn_advantage": torch.zeros_like(returns), "turn_value_target": returns}
