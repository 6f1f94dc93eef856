"""Which turns are imitated, and how much: :class:`ImitationWeights`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_llm import functional as F
from torchrl_llm.objectives.estimators.base import TurnEstimator
from torchrl_llm.utils.options import Checked, ConfigError, Finite, Share

Imitated = Literal["all", "success", "return"]


@dataclass(kw_only=True, eq=False, repr=False)
class ImitationOptions(Checked):
    """Options of :class:`ImitationWeights`: which turns are imitated, and how much."""

    imitate: Imitated = "all"
    """Imitate "all" turns, turns of episodes that ended in "success", or each with the weight of
    its "return".

    ``"all"`` have the weight 1; with ``"success"`` the others have 0 (filtered behavior cloning; on
    the policy's own episodes rejection sampling, as in RAFT, arXiv:2304.06767, and STaR,
    arXiv:2203.14465); ``"return"`` is the return from there on, which must not be negative where
    ``min_return`` lets it through (reward-weighted regression; Peters and Schaal, 2007).
    """
    min_return: Finite | None = None
    """Do not imitate turns whose return from there on is less; None sets no bound."""
    gamma: Share = 1.0
    """Discount per turn."""


@dataclass(kw_only=True, eq=False, repr=False)
class ImitationWeights(ImitationOptions, TurnEstimator):
    """The weight with which each turn is imitated, written as its advantage.

    Reads ``("turn", reward / mask / terminated / truncated / success)`` ``[B, T]`` and
    ``"turn_ids"`` ``[B, L]``. Writes ``"advantage"``, ``"value_target"`` ``[B, L]`` and
    ``("turn", advantage / value_target)`` ``[B, T]``; the target is the return from the turn on.

    Keyword Args:
        **options: of :class:`ImitationOptions`.

    Raises:
        ConfigError: ``imitate="return"`` and a return is negative: its text would be made less
            likely without bound.

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

    # No arguments: a weight of 0 or 1 has no place for a KL, and a return less a KL may be
    # negative.
    kl_coeff: float = field(init=False, default=0.0)
    discounted_objective: bool = field(init=False, default=False)
    clip_advantage: float | None = field(init=False, default=None)

    @property
    def reads_rewards(self) -> bool:
        """Whether returns weigh or choose turns."""
        return self.imitate == "return" or self.min_return is not None

    @property
    def needs_nonnegative_rewards(self) -> str | None:
        """``imitate="return"``, unless ``min_return`` leaves negative ones out."""
        bounded = self.min_return is not None and self.min_return >= 0
        return None if self.imitate != "return" or bounded else 'imitate="return"'

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
    """Nothing is learned from rewards: what counts is the KL to a teacher, in the loss or in the
    reward.

    With the KL in the reward (``kl_coeff``) the advantage of a turn is its return of the KL alone,
    less the mean over the turns of the batch: what :class:`~torchrl_llm.objectives.ReBN` makes of
    rewards that do not differ. Without it advantages are 0.

    Reads ``("turn", reward / mask / terminated / truncated)`` ``[B, T]`` and ``"turn_ids"``
    ``[B, L]``, and with a KL the log-probs; writes what
    :class:`~torchrl_llm.objectives.TurnEstimator` writes, the target as the return from the turn
    on.

    Keyword Args:
        **options: those of :class:`~torchrl_llm.objectives.TurnEstimator`.

    Examples:
        >>> from tensordict import TensorDict
        >>> yes, no = torch.ones(2, 1, dtype=torch.bool), torch.zeros(2, 1, dtype=torch.bool)
        >>> turn = dict(reward=torch.tensor([[0.0], [5.0]]), mask=yes, terminated=yes, truncated=no)
        >>> rows = TensorDict({"turn": turn, "turn_ids": torch.tensor([[-1, 0], [-1, 0]])}, [2])
        >>> NoCredit()(rows)["advantage"].tolist()
        [[0.0, 0.0], [0.0, 0.0]]
        >>> rows["sample_log_prob"], rows["ref_log_prob"] = torch.tensor([[0.0, -1.0], [0.0, -1.0]]), torch.tensor([[0.0, -1.0], [0.0, -3.0]])
        >>> NoCredit(kl_coeff=0.5)(rows)["advantage"].tolist()
        [[0.0, 0.5], [0.0, -0.5]]
    """

    respects_units = True

    gamma: Share = 1.0

    @property
    def reads_rewards(self) -> bool:
        """Never."""
        return False

    @property
    def takes_kl(self) -> bool:
        """Always: it is all that a turn is credited with."""
        return True

    def estimate(self, tensordict: TensorDictBase) -> dict[str, Tensor]:
        reward, mask, _, acted = self._turns(tensordict)
        paid = (reward, self._turn_penalty(tensordict))
        returns, penalty = (F.turn_returns(each, mask, self.gamma, acted=acted) for each in paid)
        nothing = torch.zeros_like(returns)
        advantage = F.standardize(nothing, acted, process_group=self.process_group, penalty=penalty)
        return {"turn_advantage": advantage, "turn_value_target": returns + penalty}
