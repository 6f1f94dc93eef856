"""Group-relative policy optimization over episodes: :class:`LLMGRPOLoss`."""

from __future__ import annotations

from dataclasses import dataclass

from torchrl_llm import functional as F
from torchrl_llm.objectives.estimators.group_relative import POTENTIAL_IDLE, STATE_IDLE, Credit, GroupRelative
from torchrl_llm.objectives.loss import TurnPolicyLoss
from torchrl_llm.utils.options import Count, NonNegative, Share


@dataclass(kw_only=True, eq=False, repr=False)
class LLMGRPOLoss(TurnPolicyLoss):
    """Group-relative policy optimization (Shao et al., 2024, arXiv:2402.03300), without a critic.

    :class:`~torchrl_llm.objectives.TurnPolicyLoss` with the group as the baseline. Related
    algorithms by options:

    - GSPO (arXiv:2507.18071): ``ratio_level="sequence", unit_weight="equal"``;
    - Dr. GRPO (arXiv:2503.20783): ``scale="none", weighting="constant", weight_constant=...``;
    - RLOO (arXiv:2402.14740): ``baseline="leave_one_out", scale="none"``;
    - REINFORCE++ with its baseline (arXiv:2501.03262): ``scale="none", whiten=True, kl_kind="k2"``;
    - MaxRL (arXiv:2602.02710): ``scale="mean"``;
    - GDPO (arXiv:2601.05242): ``components={"format": 1.0}, whiten=True``;
    - DAPO's clip (arXiv:2503.14476): ``clip_epsilon=(0.2, 0.28)``;
    - CISPO (arXiv:2506.13585): ``clipping="cispo", clip_epsilon=(1.0, 0.28)``.

    Args:
        actor: see :class:`~torchrl_llm.objectives.TurnPolicyLoss`.

    Keyword Args:
        gamma, credit, state, fallback, baseline, scale, components, whiten, potential, group_size,
            partial: see :class:`~torchrl_llm.objectives.GroupRelative`. Defaults: 1.0,
            ``"episode"``, ``"prefix"``, ``"turn"``, ``"mean"``, ``"std"``, ``None``, ``False``,
            ``None``, ``None``, ``"error"``.
        kl_coeff: weight of the KL to the reference. Default: 5e-4.
        **options: see :class:`~torchrl_llm.objectives.TurnPolicyLoss`.
    """

    default_value_estimator = GroupRelative
    idle = (*TurnPolicyLoss.idle, STATE_IDLE, POTENTIAL_IDLE)

    gamma: Share = 1.0
    """Discount per turn."""
    credit: Credit = "episode"
    """Compare the returns of the "episode", those from each "turn" on, or those from each "state"
    on."""
    state: str = "prefix"
    """With credit="state", what turns share: the "prefix", the "observation", or the text of an
    extra, by its name."""
    fallback: F.Fallback = "turn"
    """A turn whose state no other episode was in is compared with the others at the same "turn", or
    keeps its "return"."""
    baseline: F.Baseline = "mean"
    """The group's "mean", or "leave_one_out" (with scale="none")."""
    scale: F.Scale = "std"
    """Divide by the group's "std", the one of the "batch", the group's "mean" (MaxRL), or
    "none"."""
    components: dict[str, float] | None = None
    """Further rewards, extras with their weights, each compared by itself and added: {format:
    0.5}."""
    whiten: bool = False
    """Whiten the advantages over the batch."""
    potential: str | None = None
    """Shape rewards by this extra, the potential of the state before each turn: a baseline of
    returns."""
    group_size: Count | None = None
    partial: F.Partial = "error"
    kl_coeff: NonNegative = 5e-4
