"""PPO over episodes: :class:`LLMPPOLoss`."""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from torchrl_llm import functional as F
from torchrl_llm.keys import NestedKey
from torchrl_llm.objectives.estimators.critic import TurnGAE
from torchrl_llm.objectives.joining import declared
from torchrl_llm.objectives.loss import TurnPolicyLoss
from torchrl_llm.objectives.options import PolicyLossOptions
from torchrl_llm.utils.options import NonNegative


@dataclass(kw_only=True, eq=False, repr=False)
class PPOOptions(PolicyLossOptions):
    """Options of :class:`LLMPPOLoss`: those of the policy loss, and the critic's term."""

    critic_coeff: NonNegative = 0.5
    """Weight of the critic's term."""
    clip_value: NonNegative | None = 0.2
    """How far a value may move from the old one; None or 0 sets no bound."""
    kl_coeff: NonNegative = 0.01


@dataclass(kw_only=True, eq=False, repr=False)
class LLMPPOLoss(PPOOptions, TurnPolicyLoss):
    """Proximal policy optimization with a critic (Schulman et al., 2017, arXiv:1707.06347) and
    turn-level GAE.

    Adds to :class:`~torchrl_llm.objectives.TurnPolicyLoss` the critic's term ``critic_coeff *
    mean(0.5 * max((V - R)^2, (V_clip - R)^2))`` over the turns of the optimizer batch (its action
    tokens at token granularity); ``V`` is pooled as in the estimator, ``V_clip`` stays within
    ``clip_value`` of the estimator's. Also reads ``"value_target"``, ``"state_value"`` ``[B, L]``
    and, if present, ``"critic_weight"``. Also returns ``loss_critic``, and, detached,
    ``explained_variance`` of these rows and ``value_clip_fraction``.

    Args:
        actor: see :class:`~torchrl_llm.objectives.TurnPolicyLoss`.
        critic: writes ``"state_value"`` ``[B, L]``, index i the value of the prefix before token i,
            and ``"bootstrap_value"`` ``[B]``.
        joint: writes what actor and critic write at action tokens, ``"bootstrap_value"`` excepted,
            in one forward: ``models.joint`` of a critic that shares the actor's trunk. The loss
            then calls it and neither of the two. Default: ``None``.

    Keyword Args:
        estimator: Default: :class:`~torchrl_llm.objectives.TurnGAE`.
        **options: of :class:`PPOOptions`, which are those of
            :class:`~torchrl_llm.objectives.TurnPolicyLoss` and further ones.
    """

    default_value_estimator = TurnGAE

    _weight_names = ("loss_weight", "critic_weight")

    critic: InitVar[TensorDictModuleBase] = field(kw_only=False)
    joint: InitVar[TensorDictModuleBase | None] = None

    def __post_init__(
        self, actor: TensorDictModuleBase, critic: TensorDictModuleBase | None, estimator: Any, joint: Any
    ) -> None:
        super().__post_init__(actor, critic, estimator)
        self.joint_network = joint
        self.clip_value = self.clip_value or None

    @property
    def in_keys(self) -> list[NestedKey]:
        own = [*self.critic_network.in_keys, self.tensor_keys.value_target, self.tensor_keys.value]
        return list(dict.fromkeys([*super().in_keys, *own]))

    @property
    def out_keys(self) -> list[NestedKey]:
        return [*super().out_keys, "loss_critic", "explained_variance", "value_clip_fraction"]

    @property
    def _token_granularity(self) -> bool:
        return declared(self.value_estimator).granularity == "token"

    def weights(self, turn_ids: Tensor, *counted: Any, **named: Any) -> dict[str, Tensor]:
        """The policy's weights, and the critic's: ``1/K`` for each of ``K`` turns (or ``1/N`` for
        each token)."""
        kind: F.WeightKind = "token" if self._token_granularity else "turn"
        critic = F.loss_weights(turn_ids, kind, None, *counted, **named)
        return {**super().weights(turn_ids, *counted, **named), "critic_weight": critic}

    def _pool(self, value: Tensor, turn_ids: Tensor) -> Tensor:
        """Each action token's value, or its turn's, as the estimator reads it; ``[B, L]``."""
        if self._token_granularity:
            return torch.where(turn_ids >= 0, value, 0.0)
        turn_value = F.turn_reduce(
            value, turn_ids, F.count_turns(turn_ids), declared(self.value_estimator).value_reduction
        )
        return F.turn_to_token(turn_value, turn_ids)

    def _score(self, tensordict: TensorDictBase) -> TensorDictBase:
        if self.joint_network is not None:
            return self.joint_network(self._inputs(self.joint_network, tensordict))
        values = self.critic_network(self._inputs(self.critic_network, tensordict))
        return super()._score(tensordict).update(values.select(self.tensor_keys.value, strict=False))

    def terms(self, rows: TensorDictBase, scored: TensorDictBase) -> dict[str, Tensor]:
        hint = "Run the value estimator first."
        turn_ids, weight = self._get(rows, "turn_ids"), self._get(rows, "critic_weight")
        value = self._pool(self._get(scored, "value"), turn_ids)
        target = self._frozen(rows, "value_target", hint)
        error = (value - target).square()
        clipped = torch.zeros_like(turn_ids, dtype=torch.bool)
        if self.clip_value is not None:
            # Pooled as the new values are; otherwise values of different tokens would be compared.
            old = self._pool(self._frozen(rows, "value", hint), turn_ids)
            near = old + (value - old).clamp(-self.clip_value, self.clip_value)
            # The larger error, as in OpenAI's baselines; the paper itself has no clip of values.
            error, clipped = torch.maximum(error, (near - target).square()), (value - old).abs() > self.clip_value
        return super().terms(rows, scored) | {
            "loss_critic": self.critic_coeff * (weight * 0.5 * error).sum(),
            "explained_variance": F.explained_variance(value.detach(), target, weight),
            "value_clip_fraction": (weight * clipped).sum(),
        }
