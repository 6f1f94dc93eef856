"""Generalized advantage estimation over turns: :class:`TurnGAE`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast

from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from torchrl_llm.objectives import functional as F
from torchrl_llm.objectives.estimators.base import CriticEstimator, TurnEstimator
from torchrl_llm.options import Idle, Share

Granularity = Literal["turn", "token", "auto"]


@dataclass(kw_only=True, eq=False, repr=False)
class TurnGAE(CriticEstimator):
    """Generalized advantage estimation over turns (or over action tokens), with a critic.

    Runs the critic under ``no_grad`` unless the batch already has its ``"state_value"``. After the last turn the next
    value is 0 if the episode terminated, and ``"bootstrap_value"`` if it was only truncated.

    Reads ``("turn", reward / mask / terminated / truncated)`` ``[B, T]``, ``"turn_ids"`` ``[B, L]`` and what the
    critic reads (or ``"state_value"`` ``[B, L]`` and ``"bootstrap_value"`` ``[B]``). Writes ``"advantage"`` and
    ``"value_target"`` ``[B, L]`` and ``("turn", value / advantage / value_target)`` ``[B, T]``; at token granularity
    the latter are those of the tokens, reduced by ``value_reduction``.

    Args:
        value_network: the critic, writing ``"state_value"`` and ``"bootstrap_value"``; ``None`` if they are always
            there.

    Keyword Args:
        gamma: discount per step, i.e. per turn or per action token. Default: 0.99 per turn, 1.0 per token.
        lmbda: the trade-off of bias against variance, per step. Default: 0.95.
        granularity: what a step is. ``"auto"`` is ``"token"`` if ``single_turn``, else ``"turn"``. Default: ``"turn"``.
        single_turn: whether the environment only ever asks for one turn; needed by (and only by) ``"auto"``.
        value_reduction: which of a turn's values is the state's. ``"first"`` alone keeps the policy gradient unbiased;
            ``"mean"`` and ``"last"`` look at the action, and are there for comparison. Default: ``"first"``.
        whiten: normalize advantages to mean 0 and variance 1 over the steps of the batch (see ``process_group``). Default:
            ``True``.
        value_chunk_size: run the critic on this many rows at a time. Default: all.
        kl_coeff, discounted_objective, clip_advantage, process_group: see :class:`~torchrl_llm.objectives.TurnEstimator`.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> yes, no = torch.tensor([[True, True]]), torch.tensor([[False, False]])
        >>> reward, last = torch.tensor([[0.0, 1.0]]), torch.tensor([[False, True]])
        >>> turn = dict(reward=reward, mask=yes, terminated=last, truncated=no)
        >>> ids = torch.tensor([[-1, 0, 0, -1, 1]])
        >>> rows = TensorDict({"turn": turn, "turn_ids": ids, "state_value": torch.zeros(1, 5)}, [1])
        >>> TurnGAE(gamma=0.5, lmbda=1.0, whiten=False)(rows)["advantage"]
        tensor([[0.0000, 0.5000, 0.5000, 0.0000, 1.0000]])
    """

    idle = (
        *TurnEstimator.idle,
        Idle(("discounted_objective",), {"granularity": ("token",), "gamma": (None,)}, "discount (gamma below 1)"),
        Idle(("single_turn",), {"granularity": ("turn", "token")}, 'set granularity to "auto"'),
    )

    gamma: Share | None = None  # type: ignore[assignment]
    lmbda: Share = 0.95
    granularity: Granularity = "turn"  # type: ignore[misc]
    single_turn: bool | None = None
    value_reduction: F.ValueReduction = "first"  # type: ignore[misc]
    whiten: bool = True

    def __post_init__(self, value_network: TensorDictModuleBase | None) -> None:
        super().__post_init__(value_network)
        if self.granularity == "auto":
            if self.single_turn is None:
                raise ValueError(
                    'granularity="auto" needs single_turn: whether the environment only asks for one turn.'
                )
            self.granularity = "token" if self.single_turn else "turn"
        if self.gamma is None:
            self.gamma = 1.0 if self.granularity == "token" else 0.99

    def estimate(self, tensordict: TensorDictBase) -> dict[str, Tensor]:
        reward, mask, turn_ids, acted = self._turns(tensordict)
        gamma = cast(float, self.gamma)
        values = self._values(tensordict)
        bootstrap, num_turns = self._bootstrap(tensordict, values), mask.shape[1]
        turn_value = F.turn_reduce(values["value"], turn_ids, num_turns, self.value_reduction)
        estimated = {**values, "turn_value": turn_value}
        if self.granularity == "turn":
            advantage, target = F.turn_gae(reward, turn_value, mask, gamma, self.lmbda, bootstrap, acted=acted)
            return estimated | {"turn_advantage": self._whitened(advantage, acted), "turn_value_target": target}
        advantage, target = F.token_gae(
            reward,
            values["value"],
            turn_ids,
            mask,
            gamma,
            self.lmbda,
            bootstrap,
            penalty=self._kl_penalty(tensordict),
        )
        advantage = self._whitened(advantage, turn_ids >= 0)
        estimated |= {"advantage": advantage, "value_target": target}
        return estimated | {
            f"turn_{name}": F.turn_reduce(estimated[name], turn_ids, num_turns, self.value_reduction)
            for name in ("advantage", "value_target")
        }

    @property
    def takes_kl(self) -> bool:
        """At token granularity: the KL belongs to the tokens."""
        return self.granularity == "token"

    def _whitened(self, advantage: Tensor, mask: Tensor) -> Tensor:
        return F.masked_whiten(advantage, mask, process_group=self.process_group) if self.whiten else advantage
