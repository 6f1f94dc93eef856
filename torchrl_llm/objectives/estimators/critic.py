"""Estimators with a critic: :class:`TurnGAE` and :class:`TurnVTrace`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from torchrl_llm import functional as F
from torchrl_llm.keys import NestedKey
from torchrl_llm.objectives.estimators.base import TurnEstimator
from torchrl_llm.objectives.estimators.granularity import SINGLE_TURN_IDLE, TOKEN_IDLE, Granularity, step_of
from torchrl_llm.objectives.options import EstimatorOptions
from torchrl_llm.utils.options import NonNegative, Share


class CriticEstimator(TurnEstimator):
    """Base class of the estimators with a critic, which runs under ``no_grad`` unless its values
    are in the batch."""

    _writes = (*TurnEstimator._writes, "turn_value")

    @property
    def in_keys(self) -> list[NestedKey]:
        values = [self.tensor_keys.value] if self.value_network is None else self.value_network.in_keys
        return list(dict.fromkeys([*super().in_keys, *values]))

    def _values(self, tensordict: TensorDictBase) -> dict[str, Tensor]:
        """``"value"`` ``[B, L]`` and, if there is one, ``"bootstrap_value"`` ``[B]``: from the
        batch, or the critic."""
        source, critic = tensordict, self.value_network
        # Values in the batch win: a trainer scores them beforehand, in micro-batches that fit into
        # memory.
        if tensordict.get(self.tensor_keys.value, None) is None:
            if critic is None:
                raise KeyError(
                    f"{type(self).__name__} has no critic and the batch has no {self.tensor_keys.value!r}: give it either."
                )
            inputs = self._inputs(critic, tensordict)
            source = TensorDict.cat([critic(chunk) for chunk in self._split_value_net_input(inputs)])
        found = {name: source.get(getattr(self.tensor_keys, name), None) for name in ("value", "bootstrap_value")}
        return {name: value for name, value in found.items() if value is not None}

    def _bootstrap(self, tensordict: TensorDictBase, values: dict[str, Tensor]) -> Tensor | None:
        needed = self._cut_off(tensordict)
        if "bootstrap_value" in values:
            return torch.where(needed, values["bootstrap_value"], 0.0)
        if bool(needed.any()):
            raise KeyError(
                f"{type(self).__name__} needs {self.tensor_keys.bootstrap_value!r}, which is not in the batch. It is the "
                "value of a row whose last turn was truncated; the critic writes it."
            )
        return None


@dataclass(kw_only=True, eq=False, repr=False)
class GAEOptions(EstimatorOptions):
    """Options of :class:`TurnGAE`: bias against variance, and what a step and its value are."""

    idle = (*EstimatorOptions.idle, TOKEN_IDLE)

    gamma: Share | None = None  # type: ignore[assignment]
    """Discount per turn.

    At token granularity, per action token. ``None`` takes 0.99 per turn, 1.0 per token.
    """
    lmbda: Share = 0.95
    """Lambda of the turn-level GAE.

    The trade-off of bias against variance, per step.
    """
    granularity: Granularity = "turn"
    """Credit per "turn" or per "token"; "auto" is per token where the environment ends every
    episode with its first response."""
    value_reduction: F.ValueReduction = "first"
    """The value of a turn: "first" (unbiased), "mean" or "last".

    ``"first"`` alone keeps the policy gradient unbiased; ``"mean"`` and ``"last"`` depend on the
    action; use them for comparisons only.
    """
    whiten: bool = True
    """Whiten the advantages over the batch."""


@dataclass(kw_only=True, eq=False, repr=False)
class TurnGAE(GAEOptions, CriticEstimator):
    """Generalized advantage estimation over turns (or over action tokens), with a critic.

    Runs the critic under ``no_grad`` unless the batch already has its ``"state_value"``. After the
    last turn the next value is 0 if the episode terminated, and ``"bootstrap_value"`` if it was
    only truncated.

    Reads ``("turn", reward / mask / terminated / truncated)`` ``[B, T]``, ``"turn_ids"`` ``[B, L]``
    and what the critic reads (or ``"state_value"`` ``[B, L]`` and ``"bootstrap_value"`` ``[B]``).
    Writes ``"advantage"`` and ``"value_target"`` ``[B, L]`` and
    ``("turn", value / advantage / value_target)`` ``[B, T]``; at token granularity the latter are
    reduced from the tokens' by ``value_reduction``.

    Args:
        value_network: the critic, writing ``"state_value"`` and ``"bootstrap_value"``; ``None`` if
            they are always there.

    Keyword Args:
        **options: of :class:`GAEOptions`, and those of
            :class:`~torchrl_llm.objectives.TurnEstimator`.

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

    idle = (*GAEOptions.idle, SINGLE_TURN_IDLE)
    respects_units = True

    single_turn: bool | None = None
    """Whether episodes have one turn only; needed by (and only by) ``granularity="auto"``."""

    def __post_init__(self, value_network: TensorDictModuleBase | None) -> None:
        super().__post_init__(value_network)
        self.granularity = step_of(self.granularity, self.single_turn)
        if self.gamma is None:
            # Per token, 0.99 would leave 5 % of the credit 300 tokens before the reward.
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
        penalty = self._kl_penalty(tensordict)
        advantage, target = F.token_gae(
            reward, values["value"], turn_ids, mask, gamma, self.lmbda, bootstrap, penalty=penalty
        )
        advantage = self._whitened(advantage, turn_ids >= 0)
        estimated |= {"advantage": advantage, "value_target": target}
        for name in ("advantage", "value_target"):
            estimated[f"turn_{name}"] = F.turn_reduce(estimated[name], turn_ids, num_turns, self.value_reduction)
        return estimated

    @property
    def takes_kl(self) -> bool:
        """At token granularity: the KL is a reward of tokens."""
        return self.granularity == "token"

    def _whitened(self, advantage: Tensor, mask: Tensor) -> Tensor:
        return F.standardize(advantage, mask, process_group=self.process_group) if self.whiten else advantage


@dataclass(kw_only=True, eq=False, repr=False)
class TurnVTrace(CriticEstimator):
    """V-trace over turns, for episodes of an older policy (Espeholt et al., 2018,
    arXiv:1802.01561).

    The ratio of a turn is its probability under the model at the start of the update
    (``"old_log_prob"``, which must be scored) over its probability under the policy that sampled
    (``"sample_log_prob"``). The advantage already holds this ratio, so the losses accept this
    estimator only with ``clipping="none"`` and without a sampler correction.

    Reads and writes the keys of :class:`~torchrl_llm.objectives.TurnGAE` at turn granularity, and
    reads these two.

    Args:
        value_network: as in :class:`~torchrl_llm.objectives.TurnGAE`.

    Keyword Args:
        **options: those of :class:`~torchrl_llm.objectives.TurnEstimator`, and the following.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> yes, no = torch.ones(1, 1, dtype=torch.bool), torch.zeros(1, 1, dtype=torch.bool)
        >>> turn = dict(reward=torch.tensor([[1.0]]), mask=yes, terminated=yes, truncated=no)
        >>> ids, zeros = torch.tensor([[-1, 0]]), torch.zeros(1, 2)
        >>> old = torch.tensor([[0.0, 0.5]]).log()
        >>> rows = dict(turn=turn, turn_ids=ids, state_value=zeros, sample_log_prob=zeros, old_log_prob=old)
        >>> TurnVTrace()(TensorDict(rows, [1]))["advantage"]
        tensor([[0.0000, 0.5000]])
    """

    corrects_sampler = True
    respects_units = True

    _reads = (*CriticEstimator._reads, "old_log_prob", "sample_log_prob")

    gamma: Share = 0.99
    """Discount per turn."""
    rho_clip: NonNegative = 1.0
    """Cap of the ratio in the advantage and in the target's temporal differences."""
    c_clip: NonNegative = 1.0
    """Cap of the ratio on the way back."""

    def estimate(self, tensordict: TensorDictBase) -> dict[str, Tensor]:
        reward, mask, turn_ids, acted = self._turns(tensordict)
        values = self._values(tensordict)
        value = F.turn_first(values["value"], turn_ids, mask.shape[1])
        old = self._get(tensordict, "old_log_prob", "Score the model at the start of the update.")
        log_rho = F.turn_sum(old - self._get(tensordict, "sample_log_prob"), turn_ids, mask.shape[1])
        bootstrap, clips = self._bootstrap(tensordict, values), {"rho_clip": self.rho_clip, "c_clip": self.c_clip}
        advantage, target = F.turn_vtrace(reward, value, log_rho, mask, self.gamma, bootstrap, acted=acted, **clips)
        return {**values, "turn_value": value, "turn_advantage": advantage, "turn_value_target": target}
