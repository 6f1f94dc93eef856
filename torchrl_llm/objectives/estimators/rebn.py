"""Return batch normalization: :class:`ReBN`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tensordict import TensorDictBase
from torch import Tensor

from torchrl_llm.objectives import functional as F
from torchrl_llm.objectives.estimators.base import ReturnEstimator
from torchrl_llm.options import Natural, NonNegative, Share

Population = Literal["batch", "none"]


@dataclass(kw_only=True, eq=False, repr=False)
class ReBN(ReturnEstimator):
    """Return batch normalization: the discounted return of each turn, normalized over all turns of the batch.

    No critic: after a truncated turn nothing follows (0). Reads ``("turn", reward / mask / terminated / truncated)``
    ``[B, T]`` and ``"turn_ids"`` ``[B, L]``; with ``kl_coeff`` also ``"ref_log_prob"`` and ``"old_log_prob"`` (or,
    without it, ``"sample_log_prob"``) ``[B, L]``. Writes ``"advantage"``, ``"value_target"`` ``[B, L]`` and
    ``("turn", advantage / value_target)`` ``[B, T]``; the target is the return, KL penalty included.

    Keyword Args:
        gamma: discount per turn. Default: 0.9.
        ddof: the variance divides by ``count - ddof``. Default: 1.
        eps: added to the standard deviation. Default: 1e-8.
        normalize_over: ``"batch"``: all turns of the batch; ``"none"``: the returns as they are (REINFORCE, Williams, 1992),
            which neither ``ddof`` nor ``eps`` touch. Default: ``"batch"``.
        kl_coeff, discounted_objective, clip_advantage, process_group: see :class:`~torchrl_llm.objectives.TurnEstimator`.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> yes, no = torch.ones(2, 1, dtype=torch.bool), torch.zeros(2, 1, dtype=torch.bool)
        >>> turn = dict(reward=torch.tensor([[0.0], [2.0]]), mask=yes, terminated=yes, truncated=no)
        >>> rows = TensorDict({"turn": turn, "turn_ids": torch.tensor([[-1, 0], [-1, 0]])}, [2])
        >>> ReBN(ddof=0)(rows)["advantage"]
        tensor([[ 0., -1.],
                [ 0.,  1.]])
    """

    gamma: Share = 0.9
    ddof: Natural = 1
    eps: NonNegative = 1e-8
    normalize_over: Population = "batch"

    def score(self, reward: Tensor, mask: Tensor, acted: Tensor) -> Tensor:
        return F.turn_returns(reward, mask, self.gamma, acted=acted)

    def compare(self, tensordict: TensorDictBase, score: Tensor, penalty: Tensor, acted: Tensor) -> Tensor:
        if self.normalize_over == "none":
            return score + penalty
        return F.rebn(score, acted, self.ddof, self.eps, self.process_group, penalty=penalty)
