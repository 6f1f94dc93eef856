"""Group-relative policy optimization over episodes: :class:`LLMGRPOLoss`."""

from __future__ import annotations

from dataclasses import dataclass

from torchrl_llm.objectives.estimators.group_relative import GroupRelative
from torchrl_llm.objectives.loss import TurnPolicyLoss
from torchrl_llm.objectives.options import PolicyLossOptions
from torchrl_llm.utils.options import NonNegative


@dataclass(kw_only=True, eq=False, repr=False)
class GRPOOptions(PolicyLossOptions):
    """Options of :class:`LLMGRPOLoss`: those of the policy loss, with defaults of its own."""

    kl_coeff: NonNegative = 5e-4


@dataclass(kw_only=True, eq=False, repr=False)
class LLMGRPOLoss(GRPOOptions, TurnPolicyLoss):
    """Group-relative policy optimization (Shao et al., 2024, arXiv:2402.03300), without a critic.

    :class:`~torchrl_llm.objectives.TurnPolicyLoss` with the group as the baseline. Related
    algorithms by options, of the loss and of ``estimator=GroupRelative(...)``:

    - GSPO (arXiv:2507.18071): ``ratio_level="sequence", unit_weight="equal"``;
    - Dr. GRPO (arXiv:2503.20783): ``weighting="constant", weight_constant=...`` and
      ``GroupRelative(scale="none")``;
    - RLOO (arXiv:2402.14740): ``GroupRelative(baseline="leave_one_out", scale="none")``;
    - REINFORCE++ with its baseline (arXiv:2501.03262): ``kl_kind="k2"`` and
      ``GroupRelative(scale="none", whiten=True)``;
    - MaxRL (arXiv:2602.02710): ``GroupRelative(scale="mean")``;
    - GDPO (arXiv:2601.05242): ``GroupRelative(components={"format": 1.0}, whiten=True)``;
    - DAPO's clip (arXiv:2503.14476): ``clip_epsilon=(0.2, 0.28)``;
    - CISPO (arXiv:2506.13585): ``clipping="cispo", clip_epsilon=(1.0, 0.28)``.

    Args:
        actor: see :class:`~torchrl_llm.objectives.TurnPolicyLoss`.

    Keyword Args:
        estimator: Default: :class:`~torchrl_llm.objectives.GroupRelative`.
        **options: those of :class:`~torchrl_llm.objectives.TurnPolicyLoss`.
    """

    default_value_estimator = GroupRelative
