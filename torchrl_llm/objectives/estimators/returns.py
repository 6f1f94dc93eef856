"""Estimators of returns, without a critic: :class:`ReturnEstimator` and :class:`ReBN`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, cast

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from torchrl_llm import functional as F
from torchrl_llm.objectives.estimators.base import TurnEstimator
from torchrl_llm.objectives.estimators.granularity import SINGLE_TURN_IDLE, TOKEN_IDLE, Granularity, step_of
from torchrl_llm.objectives.estimators.rows import numbers_of
from torchrl_llm.objectives.options import ReturnOptions
from torchrl_llm.utils.options import Natural, NonNegative, Share

Population = Literal["batch", "none"]


@dataclass(kw_only=True, eq=False, repr=False)
class ReturnEstimator(ReturnOptions, TurnEstimator):
    """Base class of the estimators that compare returns, without a critic.

    The KL is scored like the rewards and added; whether scores differ at all is judged without it.

    Keyword Args:
        **options: of :class:`ReturnOptions`, and those of
            :class:`~torchrl_llm.objectives.TurnEstimator`.
    """

    @property
    def takes_kl(self) -> bool:
        """Always: the return is normalized with the KL."""
        return True

    def score(self, reward: Tensor, mask: Tensor, acted: Tensor) -> Tensor:
        """The return to compare, of each turn ``[B, T]`` (each token ``[B, L]``) or each episode
        ``[B]``."""
        raise NotImplementedError

    def compare(self, tensordict: TensorDictBase, score: Tensor, penalty: Tensor, acted: Tensor) -> Tensor:
        """The advantage, in the shape of ``score``; ``penalty`` is the score of the KL."""
        raise NotImplementedError

    def estimate(self, tensordict: TensorDictBase) -> dict[str, Tensor]:
        reward, mask, _, acted = self._turns(tensordict)
        # Kept apart, because the spread is judged on the score alone: a KL that differs between
        # equal returns must not be blown up to unit variance.
        score, penalty = (self.score(r, mask, acted) for r in (reward, self._turn_penalty(tensordict)))
        if self.potential is not None:
            # The payments of the rest of the episode add up to -phi(s_k), so no reward needs to be
            # shaped.
            penalty = penalty - self._potential(tensordict)
        advantage = self.compare(tensordict, score, penalty, acted)
        written = {"turn_advantage": advantage, "turn_value_target": score + penalty}
        return {name: torch.where(acted, x if x.ndim == 2 else x.unsqueeze(1), 0.0) for name, x in written.items()}

    def columns_read(self) -> Iterator[tuple[str, str, type]]:
        """The extras that it reads: the option that names each, its name, and ``float`` or ``str``.
        A run is refused whose environment does not declare them."""
        if self.potential is not None:
            yield "potential", self.potential, float

    def _potential(self, tensordict: TensorDictBase) -> Tensor:
        """The potential of the state before each turn, ``[B, T]``: what its shaped return lacks; 0
        off the mask."""
        potential = numbers_of(tensordict, "potential", cast(str, self.potential))
        return torch.where(self._get(tensordict, "mask"), potential, 0.0)


@dataclass(kw_only=True, eq=False, repr=False)
class ReBNOptions(ReturnOptions):
    """Options of :class:`ReBN`: what a step is, and what returns are normalized over."""

    idle = (*ReturnOptions.idle, TOKEN_IDLE)

    gamma: Share | None = None  # type: ignore[assignment]
    """Discount per turn.

    At token granularity, per action token. ``None`` takes 0.9 per turn, 1.0 per token.
    """
    granularity: Granularity = "turn"
    """Credit per "turn" or per "token"; "auto" is per token where the environment ends every
    episode with its first response."""
    normalize_over: Population = "batch"
    """Normalize returns over the "batch", or "none".

    ``"none"`` are the plain returns (REINFORCE, Williams, 1992), without use of ``ddof`` and
    ``eps``.
    """


@dataclass(kw_only=True, eq=False, repr=False)
class ReBN(ReBNOptions, ReturnEstimator):
    """Return batch normalization: the discounted return of each turn, normalized over all turns of
    the batch; or of each token.

    There is no critic: the value after a truncated turn is 0. Reads
    ``("turn", reward / mask / terminated / truncated)`` ``[B, T]`` and ``"turn_ids"`` ``[B, L]``;
    with ``kl_coeff`` also ``"ref_log_prob"`` and ``"old_log_prob"`` (or, without it,
    ``"sample_log_prob"``) ``[B, L]``. Writes ``"advantage"``, ``"value_target"`` ``[B, L]`` and
    ``("turn", advantage / value_target)`` ``[B, T]``; the target is the return, KL penalty
    included. At token granularity the reward lies on the turn's last token, and the values of a
    turn are taken at its first one.

    Keyword Args:
        **options: of :class:`ReBNOptions`, and those of
            :class:`~torchrl_llm.objectives.ReturnEstimator`.

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

    idle = (*ReBNOptions.idle, SINGLE_TURN_IDLE)
    respects_units = True

    single_turn: bool | None = None
    """Whether episodes have one turn only; needed by (and only by) ``granularity="auto"``."""
    ddof: Natural = 1
    """The variance divides by ``count - ddof``."""
    eps: NonNegative = 1e-8
    """Added to the standard deviation."""

    def __post_init__(self, value_network: TensorDictModuleBase | None) -> None:
        super().__post_init__(value_network)
        self.granularity = step_of(self.granularity, self.single_turn)
        if self.gamma is None:
            # Per token, 0.9 would leave half a percent of a reward 50 tokens before it.
            self.gamma = 1.0 if self.granularity == "token" else 0.9

    def estimate(self, tensordict: TensorDictBase) -> dict[str, Tensor]:
        if self.granularity == "turn":
            return super().estimate(tensordict)
        reward, mask, turn_ids, _ = self._turns(tensordict)
        acted, rewards = turn_ids >= 0, F.token_rewards(reward, turn_ids, mask)
        # An action token is a step; prompts and feedback are neither time nor decisions.
        score, penalty = (self.score(r, acted, acted) for r in (rewards, self._kl_penalty(tensordict)))
        if self.potential is not None:
            penalty = penalty - F.turn_to_token(self._potential(tensordict), turn_ids)
        advantage = self.compare(tensordict, score, penalty, acted)
        written = {"advantage": torch.where(acted, advantage, 0.0), "value_target": score + penalty}
        turns = {f"turn_{name}": F.turn_first(value, turn_ids, mask.shape[1]) for name, value in written.items()}
        return written | turns

    def score(self, reward: Tensor, mask: Tensor, acted: Tensor) -> Tensor:
        return F.turn_returns(reward, mask, cast(float, self.gamma), acted=acted)

    def compare(self, tensordict: TensorDictBase, score: Tensor, penalty: Tensor, acted: Tensor) -> Tensor:
        if self.normalize_over == "none":
            return score + penalty
        return F.standardize(score, acted, self.ddof, self.eps, self.process_group, penalty=penalty)
