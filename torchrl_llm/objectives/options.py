"""The options that losses share, and those that estimators share: each with its default and what it
means, as ``--help`` prints it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torchrl_llm import functional as F
from torchrl_llm.utils.options import Bound, Checked, Idle, NonNegative, Positive, Ratio, Share

KLPlace = Literal["loss", "reward"]
UnitWeight = Literal["by_tokens", "equal"]
Clipping = Literal["ppo", "cispo", "none"]


# eq=False, in the options of all modules: a dataclass with == has no hash, which
# torch.nn.Module.modules() needs. repr=False keeps the module's own.
@dataclass(kw_only=True, eq=False, repr=False)
class TurnLossOptions(Checked):
    """Options of every loss: which tokens count how much, and the entropy bonus.

    The first paragraph of an option's docstring is its line in ``--help`` and in tables.
    """

    idle: ClassVar[tuple[Idle, ...]] = (
        Idle(("weight_constant",), {"weighting": ("token", "turn", "sequence")}, 'set weighting to "constant"'),
        Idle(("entropy_target",), {"entropy_coeff": (0,)}, "give the bonus a weight"),
    )

    weighting: F.WeightKind = "token"
    """What counts equally in the loss: "token", "turn", "sequence", or "constant".

    See :func:`~torchrl_llm.functional.loss_weights`.
    """
    weight_constant: Positive | None = None
    """Tokens per episode of weighting="constant"."""
    entropy_coeff: NonNegative = 0.0
    """Weight of the entropy bonus.

    Not 0 needs an actor that writes ``"entropy"``.
    """
    entropy_target: Positive | None = None
    """Entropy of a token, in nats, up to which the bonus pays for it; None sets no bound.

    Without one the bonus pays without bound for noise in the text. A trainer lowers it during a run
    (``min_entropy_fraction``).
    """


@dataclass(kw_only=True, eq=False, repr=False)
class PolicyLossOptions(TurnLossOptions):
    """Options of policy losses: the clipped ratio, the KL, and the sampler correction."""

    idle: ClassVar[tuple[Idle, ...]] = (
        *TurnLossOptions.idle,
        Idle(("clip_epsilon",), {"clipping": ("none",)}, 'set clipping to "ppo" or "cispo"'),
        Idle(("dual_clip",), {"clipping": ("cispo", "none")}, 'set clipping to "ppo"'),
        Idle(
            ("ratio_reduction", "unit_weight"), {"ratio_level": ("token",)}, 'set ratio_level to "turn" or "sequence"'
        ),
        Idle(("kl_kind",), {"kl_in": ("reward",)}, 'set kl_in to "loss"'),
        Idle(("kl_kind", "kl_in"), {"kl_coeff": (0,)}, "give the KL a weight"),
        Idle(("sampler_bounds", "sampler_level", "sampler_reduction"), {"sampler_correction": (None,)}, "choose one"),
        Idle(("sampler_reduction",), {"sampler_level": ("token",)}, 'set sampler_level to "turn" or "sequence"'),
    )

    clipping: Clipping = "ppo"
    """The objective: "ppo", "cispo" (every token keeps its gradient), or "none".

    ``"ppo"`` takes the gradient from a token whose ratio has left the bounds; ``"cispo"`` bounds
    the ratio as a weight; ``"none"`` is the plain importance-weighted objective.
    """
    clip_epsilon: NonNegative | tuple[NonNegative, NonNegative] = 0.2
    """How far the ratio may move from 1, one number or [low, high]."""
    dual_clip: Ratio | None = None
    """Ratio beyond which a negative advantage has no gradient either ("ppo"); None is off."""
    ratio_level: F.RatioLevel = "token"
    """Importance ratio per "token", "turn" or "sequence".

    The unit has one ratio, and is clipped as one.
    """
    ratio_reduction: F.RatioReduction = "mean"
    """A unit's log-ratio is the "sum" of its tokens' or their "mean"."""
    unit_weight: UnitWeight = "by_tokens"
    """A unit counts "by_tokens", or all units are "equal".

    By tokens it counts with the sum of its tokens' weights; with one token's under
    ``ratio_reduction="sum"``. Equal are those of GSPO, and of other libraries' turn-level clip.
    """
    kl_coeff: NonNegative = 0.0
    """Weight of the KL to the reference model (AgileRL's beta); 0 needs no reference.

    A trainer can lower it during a run (``kl_decay_fraction``).
    """
    kl_kind: F.KLKind = "k3"
    """The KL in the loss: "k3" or "k2".

    ``"k3"`` has the forward KL's gradient, ``"k2"`` the reverse KL's; ``"k1"``, whose gradient is
    zero in expectation, is refused. The term carries the (detached) ratio, so that it stays correct
    after the first epoch.
    """
    kl_in: KLPlace = "loss"
    """The KL in the "loss" or in the "reward".

    In the reward, the estimator subtracts it.
    """
    sampler_correction: F.SamplerCorrection | None = None
    """For samplers whose log-probs are not the trainer's: "truncate", "mask" or "reject"; None is
    off.

    Corrects objective and KL (Yao et al., 2025, "Your efficient RL framework secretly brings you
    off-policy RL training"), by weights of ``w = old / sample``: to ``min(w, cap)``, to 0 where
    ``w`` is out of bounds, or 1 or 0; see :func:`~torchrl_llm.functional.sampler_weights`. Needs
    ``"old_log_prob"``: without it the ratio is taken against the sampler itself.
    """
    sampler_bounds: Bound | tuple[Bound, Bound] | None = None
    """The correction's cap ("truncate"), or [low, high]."""
    sampler_level: F.RatioLevel = "token"
    """What has one such weight: "token", "turn" or "sequence"."""
    sampler_reduction: F.RatioReduction = "sum"
    """A unit's weight is computed from the "sum" or of the "mean" of its tokens' log-ratios."""


@dataclass(kw_only=True, eq=False, repr=False)
class EstimatorOptions(Checked):
    """Options of :class:`~torchrl_llm.objectives.TurnEstimator`, and so of nearly every estimator:
    discount and bound."""

    idle: ClassVar[tuple[Idle, ...]] = (Idle(("discounted_objective",), {"gamma": (1,)}, "discount (gamma below 1)"),)

    gamma: Share = 1.0
    """Discount per turn.

    At token granularity, per action token.
    """
    discounted_objective: bool = False
    """Weigh turn k by gamma^k, as the gradient of the discounted return does.

    Practice drops the factor: later turns then count as much as early ones, and the expected
    gradient is the gradient of no objective (Thomas, 2014, "Bias in natural actor-critic
    algorithms"; Nota and Thomas, 2020, arXiv:1906.07073).
    """
    clip_advantage: Positive | None = None
    """Bound on the absolute value of advantages; None sets none.

    Of normalized ones too.
    """


@dataclass(kw_only=True, eq=False, repr=False)
class ReturnOptions(EstimatorOptions):
    """Options of :class:`~torchrl_llm.objectives.ReturnEstimator`: those of every estimator, and
    the potential."""

    potential: str | None = None
    """Shape rewards by this extra, the potential of the state before each turn: a baseline of
    returns.

    A number that the environment declares and gives with every turn: the potential ``phi(s_k)`` of
    the state in which turn ``k`` was decided. Each turn is paid ``gamma * phi(s_{k+1}) - phi(s_k)``
    more, with 0 after the end, which changes no optimal policy (Ng et al., 1999, "Policy invariance
    under reward transformations"). Over the rest of an episode these payments add up to
    ``-phi(s_k)``: in a return the potential is a baseline that depends on the state alone, and the
    expected gradient stays the same. A turn without the number (NaN) counts as 0.
    """
