"""Returns against those of the same group: :class:`GroupRelative`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from torchrl_llm.objectives import functional as F
from torchrl_llm.objectives.estimators.base import ReturnEstimator
from torchrl_llm.options import Count, Natural, NonNegative

Credit = Literal["episode", "turn"]


@dataclass(kw_only=True, eq=False, repr=False)
class GroupRelative(ReturnEstimator):
    """The return against those of the same group: of the whole episode, or from each turn on.

    Reads ``("turn", reward / mask / terminated / truncated)`` ``[B, T]``, ``"turn_ids"`` ``[B, L]`` and ``"group_id"``
    ``[B]``. Writes ``"advantage"``, ``"value_target"`` ``[B, L]`` and ``("turn", advantage / value_target)``
    ``[B, T]``; the target is the return that was compared.

    Keyword Args:
        gamma: discount per turn. Default: 1.0.
        credit: ``"episode"`` compares the returns of whole episodes, and every turn of a row gets the same advantage;
            ``"turn"`` compares, turn by turn, the returns from there on, so that a turn is not credited with what came
            before it. A member whose episode is over by then counts with 0. Default: ``"episode"``.
        baseline: ``"mean"`` of the group, or ``"leave_one_out"``: the mean of the others. Default: ``"mean"``.
        scale: divide by the group's standard deviation (``"std"``) or not (``"none"``). Default: ``"std"``.
        ddof: the variance divides by ``size - ddof``. Default: 1.
        eps: added to the standard deviation. Default: 1e-6.
        group_size: episodes in a group; ``None``: as many as in the largest group of the batch.
        partial: a group of another size is an ``"error"``, or ``"allow"``-ed. Default: ``"error"``.
        kl_coeff, discounted_objective, clip_advantage, process_group: see :class:`~torchrl_llm.objectives.TurnEstimator`;
            ``discounted_objective`` is for ``credit="turn"``.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> yes, no = torch.ones(2, 1, dtype=torch.bool), torch.zeros(2, 1, dtype=torch.bool)
        >>> turn = dict(reward=torch.tensor([[0.0], [2.0]]), mask=yes, terminated=yes, truncated=no)
        >>> rows = TensorDict({"turn": turn, "turn_ids": torch.tensor([[-1, 0], [-1, 0]])}, [2])
        >>> GroupRelative(scale="none")(rows.set("group_id", torch.tensor([7, 7])))["advantage"]
        tensor([[ 0., -1.],
                [ 0.,  1.]])
    """

    _reads = (*ReturnEstimator._reads, "group_id")

    credit: Credit = "episode"
    baseline: F.Baseline = "mean"
    scale: F.Scale = "std"
    ddof: Natural = 1
    eps: NonNegative = 1e-6
    group_size: Count | None = None
    partial: F.Partial = "error"

    def __post_init__(self, value_network: TensorDictModuleBase | None) -> None:
        super().__post_init__(value_network)
        if self.discounted_objective and self.credit == "episode":
            raise ValueError(
                'credit="episode" is discounted from the first turn on; discounted_objective is for credit="turn".'
            )
        # A wrong option is an error now, not after the first rollout.
        F.group_relative(torch.empty(0), torch.empty(0, dtype=torch.int64), **self.options)

    @property
    def options(self) -> dict[str, Any]:
        """The options of :func:`~torchrl_llm.objectives.functional.group_relative`."""
        names = ("baseline", "scale", "ddof", "eps", "group_size", "partial")
        return {name: getattr(self, name) for name in names}

    def score(self, reward: Tensor, mask: Tensor, acted: Tensor) -> Tensor:
        if self.credit == "episode":
            return F.episode_return(reward, mask, self.gamma)
        return F.turn_returns(reward, mask, self.gamma)

    def compare(self, tensordict: TensorDictBase, score: Tensor, penalty: Tensor, acted: Tensor) -> Tensor:
        return F.group_relative(score, self._get(tensordict, "group_id"), **self.options, penalty=penalty)
