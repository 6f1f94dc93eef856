"""Base class of the policy losses: :class:`TurnPolicyLoss`.

A loss is a **weighted sum** over tokens, and the weights belong to the optimizer batch
(:mod:`~torchrl_llm.objectives.micro_batches`). The maths is in :mod:`torchrl_llm.functional`; the
three algorithms are in ``ppo.py``, ``reinforce.py`` and ``grpo.py``.
"""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field, fields
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase, dispatch
from torch import Tensor
from torchrl.objectives import LossModule
from torchrl.objectives.utils import ValueEstimators
from torchrl.objectives.value import ValueEstimatorBase

from torchrl_llm import functional as F
from torchrl_llm import keys
from torchrl_llm.keys import NestedKey
from torchrl_llm.objectives.checks import check_objective
from torchrl_llm.objectives.estimators.base import RowReader, TurnEstimator
from torchrl_llm.objectives.estimators.critic import TurnGAE
from torchrl_llm.objectives.estimators.imitation import NoCredit
from torchrl_llm.objectives.estimators.returns import ReBN
from torchrl_llm.objectives.sampler import SamplerRule
from torchrl_llm.utils.options import Bound, Checked, Idle, NonNegative, Positive, Ratio, options_of

UnitWeight = Literal["by_tokens", "equal"]
Clipping = Literal["ppo", "cispo", "none"]
KLPlace = Literal["loss", "reward"]


@dataclass(kw_only=True, eq=False, repr=False)
class TurnPolicyLoss(Checked, RowReader, LossModule):
    """Policy loss over episodes: advantage x ratio level x clipping x weights x KL x entropy x
    sampler correction.

    ``loss_objective = -sum(loss_weight * correction * objective(log_ratio, advantage))``, where
    ``log_ratio`` is the new log-prob minus ``"old_log_prob"`` (or ``"sample_log_prob"`` where there
    is none), pooled over ``ratio_level``. To try another objective, subclass and override
    :meth:`objective`; nothing else is needed.

    Reads rows (``[B]``, :mod:`torchrl_llm.keys`): what the actor reads, ``"turn_ids"``,
    ``"advantage"``, ``"sample_log_prob"``, and, as options ask, ``"old_log_prob"``,
    ``"ref_log_prob"``, ``"loss_weight"``. Without ``"loss_weight"`` the rows are taken to be the
    whole optimizer batch. Returns scalars, differentiable where the name starts with ``loss_`` and
    detached otherwise:

    - ``loss_objective``; ``loss_kl`` (KL in the loss); ``loss_entropy`` (``entropy_coeff`` not 0);
      each times its coefficient;
    - ``kl_approx``: KL from the old policy to the new one; ``log_ratio``: mean absolute log-ratio
      per token; ``clip_fraction``: share of tokens whose clip binds; ``kl``: KL from the policy to
      the reference (``kl_coeff`` and ``kl_fraction`` not 0); ``entropy`` (if the actor writes it);
      ``weight``: the sum of the weights, 1 for a whole batch (but for ``weighting="constant"``, on
      whose scale all these are);
    - ``ESS``: the effective sample size of the pooled ratios, in (0, 1];
    - ``sampler_rejected``: share of tokens that ``sampler_correction`` leaves out;
      ``sampler_weight``: the mean of its weights.

    All but the last three are weighted sums: over the micro-batches of a batch they add up to the
    batch's value.

    Args:
        actor: reads ``"tokens"``, ``"attention_mask"``, ``"turn_ids"`` and writes ``"log_prob"``
            ``[B, L]`` and optionally ``"entropy"`` ``[B, L]``. It is held as a plain submodule.

    Keyword Args:
        clipping: ``"ppo"`` takes the gradient from a token whose ratio has left the bounds;
            ``"cispo"`` bounds the ratio as a weight and keeps every token's gradient; ``"none"`` is
            the plain importance-weighted objective. Default: ``"ppo"``.
        clip_epsilon: how far the ratio may move from 1: a float, or ``(low, high)``. Default: 0.2.
        dual_clip: with ``clipping="ppo"``, the ratio beyond which a negative advantage has no
            gradient either, such as 3.0; ``None`` is off. Default: ``None``.
        ratio_level: the unit that has one ratio and is clipped as one: ``"token"``, ``"turn"`` or
            ``"sequence"``. Default: ``"token"``.
        ratio_reduction: a unit's log-ratio is the ``"sum"`` of its tokens' or their ``"mean"``.
            Default: ``"mean"``.
        unit_weight: a unit counts ``"by_tokens"`` (with the sum of its tokens' weights; with one
            token's under ``ratio_reduction="sum"``), or all units are ``"equal"``: GSPO, other
            libraries' turn-level clip. Default: ``"by_tokens"``.
        weighting: what counts equally in the loss, see
            :func:`~torchrl_llm.functional.loss_weights`; not with ``unit_weight="equal"``, which
            decides it. Default: ``"token"``.
        weight_constant: tokens per episode of ``weighting="constant"``.
        kl_coeff: weight of the KL to the reference policy; 0 is off. A trainer can lower it during
            a run (``kl_decay_fraction``). Default: 0.0.
        kl_kind: the KL in the loss: ``"k3"`` has the forward KL's gradient, ``"k2"`` the reverse
            KL's; ``"k1"``, whose gradient is zero in expectation, is refused. The term carries the
            (detached) ratio, so that it stays correct after the first epoch. Default: ``"k3"``.
        kl_in: ``"loss"``, or ``"reward"``: the estimator subtracts it. Default: ``"loss"``.
        entropy_coeff: weight of the entropy bonus; not 0 needs an actor that writes ``"entropy"``.
            Default: 0.0.
        entropy_target: the entropy of a token, in nats, counts up to this in the bonus, which else
            pays without bound for noise in the text. A trainer lowers it during a run
            (``min_entropy_fraction``). Default: ``None``, without bound.
        sampler_correction: corrects objective and KL for an engine whose log-probs are not the
            trainer's (Yao et al., 2025, "Your efficient RL framework secretly brings you off-policy
            RL training"), by weights of ``w = old / sample``: ``"truncate"`` to ``min(w, cap)``,
            ``"mask"`` to 0 where ``w`` is out of bounds, or ``"reject"``: 1 or 0; see
            :func:`~torchrl_llm.functional.sampler_weights`. Needs ``"old_log_prob"``: without it
            the ratio is taken against the sampler itself. Default: ``None``.
        sampler_bounds: the cap of ``"truncate"``, ``(low, high)`` of ``"mask"`` and ``"reject"``.
        sampler_level, sampler_reduction: the same as ``ratio_level`` and ``ratio_reduction``, of
            ``w``. Defaults: ``"token"``, ``"sum"``.
        discounted_objective, clip_advantage: options of the estimator, see
            :class:`~torchrl_llm.objectives.TurnEstimator`. Defaults: ``False``, ``None``.

    Examples:
        >>> from tensordict.nn import TensorDictModule
        >>> class Actor(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.logit = torch.nn.Parameter(torch.zeros(()))
        ...     def forward(self, turn_ids):
        ...         return torch.where(turn_ids >= 0, torch.nn.functional.logsigmoid(self.logit), 0.0)
        >>> policy_loss = TurnPolicyLoss(TensorDictModule(Actor(), in_keys=["turn_ids"], out_keys=["log_prob"]))
        >>> ids = torch.tensor([[-1, 0, 0, -1, 1]])
        >>> old = torch.where(ids >= 0, torch.tensor(0.5).log(), 0.0)
        >>> rows = TensorDict({"turn_ids": ids, "sample_log_prob": old, "advantage": (ids >= 0).float()}, [1])
        >>> out = policy_loss(rows)
        >>> out["loss_objective"].backward()
        >>> out["loss_objective"].item(), policy_loss.actor_network.module.logit.grad.item()
        (-1.0, -0.5)
    """

    @dataclass
    class _AcceptedKeys(TurnEstimator._AcceptedKeys):
        log_prob: NestedKey = keys.LOG_PROB
        entropy: NestedKey = keys.ENTROPY
        loss_weight: NestedKey = keys.LOSS_WEIGHT
        critic_weight: NestedKey = keys.CRITIC_WEIGHT

    default_keys = _AcceptedKeys
    default_value_estimator: ClassVar[type[TurnEstimator]] = ReBN

    idle: ClassVar[tuple[Idle, ...]] = (
        Idle(("clip_epsilon",), {"clipping": ("none",)}, 'set clipping to "ppo" or "cispo"'),
        Idle(("dual_clip",), {"clipping": ("cispo", "none")}, 'set clipping to "ppo"'),
        Idle(
            ("ratio_reduction", "unit_weight"), {"ratio_level": ("token",)}, 'set ratio_level to "turn" or "sequence"'
        ),
        Idle(("weight_constant",), {"weighting": ("token", "turn", "sequence")}, 'set weighting to "constant"'),
        Idle(("kl_kind",), {"kl_in": ("reward",)}, 'set kl_in to "loss"'),
        Idle(("entropy_target",), {"entropy_coeff": (0,)}, "give the bonus a weight"),
        Idle(("kl_kind", "kl_in"), {"kl_coeff": (0,)}, "give the KL a weight"),
        Idle(("sampler_bounds", "sampler_level", "sampler_reduction"), {"sampler_correction": (None,)}, "choose one"),
        Idle(("sampler_reduction",), {"sampler_level": ("token",)}, 'set sampler_level to "turn" or "sequence"'),
        Idle(("discounted_objective",), {"gamma": (1,)}, "discount (gamma below 1)"),
    )

    _weight_names: ClassVar[tuple[str, ...]] = ("loss_weight",)

    # torch.nn.Module takes modules as attributes only after its own constructor: hence not fields.
    actor: InitVar[TensorDictModuleBase] = field(kw_only=False)
    critic: InitVar[TensorDictModuleBase | None] = field(default=None, kw_only=False)
    clipping: Clipping = "ppo"
    """The objective: "ppo", "cispo" (every token keeps its gradient), or "none"."""
    clip_epsilon: NonNegative | tuple[NonNegative, NonNegative] = 0.2
    """How far the ratio may move from 1, one number or [low, high]."""
    dual_clip: Ratio | None = None
    """Ratio beyond which a negative advantage has no gradient either ("ppo"); None is off."""
    ratio_level: F.RatioLevel = "token"
    """Importance ratio per "token", "turn" or "sequence"."""
    ratio_reduction: F.RatioReduction = "mean"
    """A unit's log-ratio is the "sum" of its tokens' or their "mean"."""
    unit_weight: UnitWeight = "by_tokens"
    """A unit counts "by_tokens", or all units are "equal"."""
    weighting: F.WeightKind = "token"
    """What counts equally in the loss: "token", "turn", "sequence", or "constant"."""
    weight_constant: Positive | None = None
    """Tokens per episode of weighting="constant"."""
    kl_coeff: NonNegative = 0.0
    """Weight of the KL to the reference model (AgileRL's beta); 0 needs no reference."""
    kl_kind: F.KLKind = "k3"
    """The KL in the loss: "k3" or "k2"."""
    kl_in: KLPlace = "loss"
    """The KL in the "loss" or in the "reward"."""
    entropy_coeff: NonNegative = 0.0
    """Weight of the entropy bonus."""
    entropy_target: Positive | None = None
    """Entropy of a token, in nats, up to which the bonus pays for it; None sets no bound."""
    sampler_correction: F.SamplerCorrection | None = None
    """For samplers whose log-probs are not the trainer's: "truncate", "mask" or "reject"; None is
    off."""
    sampler_bounds: Bound | tuple[Bound, Bound] | None = None
    """The correction's cap ("truncate"), or [low, high]."""
    sampler_level: F.RatioLevel = "token"
    """What has one such weight: "token", "turn" or "sequence"."""
    sampler_reduction: F.RatioReduction = "sum"
    """A unit's weight is computed from the "sum" or of the "mean" of its tokens' log-ratios."""
    discounted_objective: bool = False
    """Weigh turn k by gamma^k, as the gradient of the discounted return does."""
    clip_advantage: Positive | None = None
    """Bound on the absolute value of advantages; None sets none."""

    def __post_init__(self, actor: TensorDictModuleBase, critic: TensorDictModuleBase | None) -> None:
        super().__init__()
        self.actor_network = actor
        self.critic_network: Any = critic  # None without one
        # Of entropy_target and kl_coeff; a trainer sets them before each update.
        self.entropy_fraction = self._kl_fraction = 1.0
        bounds = self.clip_epsilon
        self.clip_low, self.clip_high = bounds if isinstance(bounds, tuple | list) else (bounds, bounds)
        self._check_options()
        sampler = self.sampler_bounds, self.sampler_level, self.sampler_reduction
        self._sampler_rule = self.sampler_correction and SamplerRule(self.sampler_correction, *sampler)
        self.make_value_estimator()

    def _check_options(self) -> None:
        if self.kl_kind == "k1" and self.kl_in == "loss":
            raise ValueError('kl_kind="k1" has no gradient in expectation; use "k2", "k3", or kl_in="reward".')
        if self.weighting == "constant" and self.weight_constant is None and self.unit_weight != "equal":
            raise ValueError('weighting="constant" takes a constant: set weight_constant, in tokens per episode.')
        if self.unit_weight == "equal":
            if self.weighting not in ("token", self.ratio_level):
                raise ValueError(
                    f'unit_weight="equal" weighs by {self.ratio_level}; leave weighting={self.weighting!r} out.'
                )
            self.weighting = self.ratio_level
        if self.entropy_coeff and not self._writes_entropy:
            raise ValueError(
                f"entropy_coeff is {self.entropy_coeff}, but the actor writes {list(self.actor_network.out_keys)}; "
                f"expected {self.tensor_keys.entropy!r} among them (TokenScorer(..., entropy=True))."
            )
        self.surrogate(torch.zeros(1, 1), torch.zeros(1, 1))  # raises on invalid bounds

    @property
    def functional(self) -> bool:
        """Always ``False``: actor and critic are plain submodules."""
        # With LoRA, functional parameters make a forward 25 % slower, and they conflict with FSDP.
        return False

    @property
    def entropy_bound(self) -> float | None:
        """Entropy of a token, in nats, up to which the bonus pays for it now; ``None``: no
        bound."""
        return None if self.entropy_target is None else self.entropy_fraction * self.entropy_target

    @property
    def kl_fraction(self) -> float:
        """The share of ``kl_coeff`` that counts now, in the loss and in the estimator, 1 unless it
        is set."""
        return self._kl_fraction

    @kl_fraction.setter
    def kl_fraction(self, share: float) -> None:
        self._kl_fraction = share
        if isinstance(self._value_estimator, TurnEstimator):
            self._value_estimator.kl_fraction = share

    @property
    def _writes_entropy(self) -> bool:
        return self.tensor_keys.entropy in self.actor_network.out_keys

    @property
    def learns_without_credit(self) -> bool:
        """Whether the actor has a gradient where all advantages are 0; a loss of your own may have
        one from a term of its own."""
        return bool(self.kl_coeff or self.entropy_coeff) or not type(self).__module__.startswith("torchrl_llm.")

    @property
    def in_keys(self) -> list[NestedKey]:
        reference = ["ref_log_prob"] if self.kl_coeff and self.kl_fraction else []
        names = ["turn_ids", "advantage", "sample_log_prob", *reference]
        return list(dict.fromkeys([*self.actor_network.in_keys, *(getattr(self.tensor_keys, name) for name in names)]))

    @property
    def out_keys(self) -> list[NestedKey]:
        out: list[NestedKey] = ["loss_objective", "kl_approx", "log_ratio", "clip_fraction", "ESS", "weight"]
        if self.sampler_correction is not None:
            out += ["sampler_rejected", "sampler_weight"]
        if self.kl_coeff and self.kl_fraction:
            out += ["loss_kl", "kl"] if self.kl_in == "loss" else ["kl"]
        if self._writes_entropy:
            out += ["loss_entropy", "entropy"] if self.entropy_coeff else ["entropy"]
        return out

    def _forward_value_estimator_keys(self, **kwargs: Any) -> None:
        if (estimator := self._value_estimator) is not None:
            # TorchRL's own estimators have other names; forward those that both have.
            known, own = ({field.name for field in fields(each._AcceptedKeys)} for each in (estimator, self))
            estimator.set_keys(**{name: getattr(self.tensor_keys, name) for name in known & own})

    def make_value_estimator(
        self,
        value_type: type[ValueEstimatorBase] | ValueEstimatorBase | ValueEstimators | None = None,
        **hyperparams: Any,
    ) -> TurnPolicyLoss:
        """Choose the advantage estimator.

        Args:
            value_type: a :class:`~torchrl_llm.objectives.TurnEstimator` class, built from this
                loss's own options and ``hyperparams``; ``ValueEstimators.GAE``, which means
                ``TurnGAE``; any other ``ValueEstimatorBase`` class or instance; or ``None``: the
                algorithm's own.
            **hyperparams: options of the estimator's class; they win over the loss's.

        Returns:
            The loss itself.
        """
        value_type = TurnGAE if value_type is ValueEstimators.GAE else value_type or self.default_value_estimator
        if isinstance(value_type, ValueEstimators):
            raise NotImplementedError(f"{type(self).__name__} has no {value_type}: pass .GAE of these, or a class.")
        if isinstance(value_type, ValueEstimatorBase) and hyperparams:
            raise ValueError(f"An estimator instance takes no hyperparameters; got {sorted(hyperparams)}.")
        if isinstance(value_type, type) and issubclass(value_type, TurnEstimator):
            options = {each.name: getattr(self, each.name) for each in fields(self)}
            kl_coeff = self.kl_coeff if self.kl_in == "reward" else None
            options |= {"kl_coeff": kl_coeff, "value_network": self.critic_network}
            # An option that the loss leaves None has the default of the estimator's own class.
            own = options.keys() & options_of(value_type)
            given = {name: options[name] for name in own if options[name] is not None}
            value_type, hyperparams = value_type(**(given | hyperparams)), {}
        super().make_value_estimator(value_type, **hyperparams)
        self._check_estimator()
        self.kl_fraction = self._kl_fraction  # the new estimator's too
        self._forward_value_estimator_keys()
        return self

    @property
    def _declared(self) -> TurnEstimator | type[TurnEstimator]:
        """The estimator's declarations; TorchRL's own estimators have none, so our defaults hold
        for them."""
        estimator = self.value_estimator
        return estimator if isinstance(estimator, TurnEstimator) else TurnEstimator

    def _check_estimator(self) -> None:
        declared, name = self._declared, type(self.value_estimator).__name__
        if self.kl_coeff and self.kl_in == "reward" and not declared.kl_coeff:
            raise ValueError(
                f"{type(self).__name__} leaves its KL (kl_coeff={self.kl_coeff}) to the reward, but {name} takes none out "
                'of it: the KL would be lost. Use kl_in="loss", kl_coeff=0, or a TurnEstimator with a kl_coeff.'
            )
        # Not isinstance: a subclass may give credit of its own.
        none = getattr(type(self.value_estimator), "estimate", None) is NoCredit.estimate
        if none and not (declared.kl_coeff or self.learns_without_credit):
            raise ValueError(
                f"{name} gives no credit for rewards, and {type(self).__name__} has no KL and no entropy bonus (kl_coeff and "
                "entropy_coeff are 0): nothing would be learned. Give the KL a weight, or use another estimator."
            )
        if declared.corrects_sampler and (self.clipping != "none" or self.sampler_correction):
            raise ValueError(
                f"The advantages of the estimator {name} hold the ratio to the sampler already: with clipping={self.clipping!r} and "
                f'sampler_correction={self.sampler_correction!r} it would count twice. Use clipping="none" and no correction.'
            )

    # Not called objective_loss, say: TorchRL wraps every public attribute whose name ends in
    # "loss".
    def objective(self, log_ratio: Tensor, advantage: Tensor) -> Tensor:
        """The objective of each token, to be maximized, by ``clipping``. Override this method for
        another objective.

        Args:
            log_ratio: ``[B, L]``, new minus old log-prob, pooled over ``ratio_level``; 0 off
                actions. It has the gradient of the log-prob.
            advantage: ``[B, L]``; 0 off actions.

        Returns:
            ``[B, L]``.
        """
        return self.surrogate(log_ratio, advantage)[0]

    def surrogate(self, log_ratio: Tensor, advantage: Tensor) -> tuple[Tensor, Tensor]:
        """The stock :meth:`objective`, and a mask of the tokens whose ratio is clipped; ``[B, L]``
        each."""
        if self.clipping == "none":
            return F.importance_ratio(log_ratio) * advantage, torch.zeros_like(log_ratio, dtype=torch.bool)
        if self.clipping == "cispo":
            return F.cispo_objective(log_ratio, advantage, self.clip_low, self.clip_high)
        return F.clipped_objective(log_ratio, advantage, self.clip_low, self.clip_high, self.dual_clip)

    def weights(
        self, turn_ids: Tensor, process_group: dist.ProcessGroup | None = None, row_weight: Tensor | None = None
    ) -> dict[str, Tensor]:
        """The weights of an optimizer batch, ``[B, L]`` each, under their names in
        ``_AcceptedKeys``.

        Args:
            turn_ids: ``[B, L]`` int64 of the whole batch (of this rank), -1 off actions.
            process_group, row_weight: see :func:`~torchrl_llm.functional.loss_weights`.
        """
        weight = F.loss_weights(turn_ids, self.weighting, self.weight_constant, process_group, row_weight)
        return {"loss_weight": weight}

    @dispatch(auto_batch_size=False)
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """The losses and diagnostics of the rows in ``tensordict``, see the class; ``tensordict``
        is not changed."""
        turn_ids = self._get(tensordict, "turn_ids")
        action = turn_ids >= 0
        weights = self._read_weights(tensordict, turn_ids)
        weight = weights["loss_weight"]
        scored = self._score(tensordict)
        # An actor of your own may write anything off actions, and it must reach no sum.
        log_prob = torch.where(action, self._get(scored, "log_prob", "The actor must write it."), 0.0)
        old, correction = self._old_log_prob(tensordict)
        token_ratio = log_prob - old
        log_ratio = F.pool_log_ratio(token_ratio, turn_ids, self.ratio_level, self.ratio_reduction)
        advantage = self._frozen(tensordict, "advantage", "Run the value estimator first.")
        objective = check_objective(type(self).__name__, self.objective(log_ratio, advantage), log_ratio)
        gain = self._unit_weight(weight, turn_ids) * correction * objective
        # A sum and not a mean: the micro-batches of a batch then add up to its gradient, however it
        # is cut.
        out = TensorDict({"loss_objective": -gain.sum()})
        self._diagnose(out, weight, token_ratio.detach(), log_ratio.detach(), advantage)
        if self._sampler_rule is not None:
            out.update(self._sampler_rule.metrics(correction, weight))
        if self.kl_coeff and self.kl_fraction:
            # Samples of the old policy stand for samples of the present one.
            sampled = weight * correction * F.importance_ratio(token_ratio.detach())
            ref = self._frozen(tensordict, "ref_log_prob", "Score the reference, or set kl_coeff=0.")
            self._kl_terms(out, sampled, log_prob, ref)
        if self._writes_entropy:
            entropy = torch.where(action, self._get(scored, "entropy"), 0.0)
            out["entropy"] = (weight * entropy).sum().detach()
            if self.entropy_coeff:
                # Each token: a bound on the batch's mean lets a few have it all, and the one that
                # decides none.
                paid = entropy if self.entropy_bound is None else entropy.clamp(max=self.entropy_bound)
                out["loss_entropy"] = -self.entropy_coeff * (weight * paid).sum()
        self._add_terms(out, tensordict, scored, weights)
        return out

    def _score(self, tensordict: TensorDictBase) -> TensorDictBase:
        return self.actor_network(self._inputs(self.actor_network, tensordict))

    def _add_terms(
        self, out: TensorDictBase, tensordict: TensorDictBase, scored: TensorDictBase, weights: dict[str, Tensor]
    ) -> None:
        """Write further terms into ``out``; a subclass overrides it. ``scored`` is of
        :meth:`_score`."""

    def _read_weights(self, tensordict: TensorDictBase, turn_ids: Tensor) -> dict[str, Tensor]:
        """The weights in the rows; without any, the weights of the rows taken as a whole batch."""
        written = {name: tensordict.get(getattr(self.tensor_keys, name), None) for name in self._weight_names}
        missing = [getattr(self.tensor_keys, name) for name, weight in written.items() if weight is None]
        if len(missing) == len(written):
            return self.weights(turn_ids, row_weight=tensordict.get(self.tensor_keys.row_weight, None))
        if missing:
            raise KeyError(f"The rows have a loss weight but no {missing}: write all of them with write_loss_weights.")
        return {name: torch.where(turn_ids >= 0, weight, 0.0) for name, weight in written.items()}

    def _unit_weight(self, weight: Tensor, turn_ids: Tensor) -> Tensor:
        """Under sum pooling a unit counts with one token's weight, else with the sum of its tokens'
        weights."""
        if self.ratio_level == "token" or self.ratio_reduction == "mean" or self.unit_weight == "equal":
            return weight
        return weight / F.pool_log_ratio(torch.ones_like(weight), turn_ids, self.ratio_level, "sum").clamp_min(1.0)

    def _old_log_prob(self, tensordict: TensorDictBase) -> tuple[Tensor, Tensor]:
        """The old log-prob, the denominator of ratios, and the sampler correction; ``[B, L]``
        each."""
        old = self._frozen(tensordict, self._old_name(tensordict))
        if self._sampler_rule is None:
            return old, torch.ones_like(old)
        sample, turn_ids = self._frozen(tensordict, "sample_log_prob"), self._get(tensordict, "turn_ids")
        return old, self._sampler_rule.weights(old, sample, turn_ids)

    def _kl_terms(self, out: TensorDictBase, weight: Tensor, log_prob: Tensor, ref: Tensor) -> None:
        # Always k3, which is never negative and makes runs of different kl_kind comparable.
        out["kl"] = (weight * F.kl_estimate(log_prob.detach(), ref, "k3")).sum()
        if self.kl_in == "loss":
            estimate = F.kl_estimate(log_prob, ref, self.kl_kind)
            out["loss_kl"] = self.kl_fraction * self.kl_coeff * (weight * estimate).sum()

    @torch.no_grad()
    def _diagnose(
        self, out: TensorDictBase, weight: Tensor, token_ratio: Tensor, log_ratio: Tensor, advantage: Tensor
    ) -> None:
        clipped = self.surrogate(log_ratio, advantage)[1]
        # The tokens are the old policy's, so this is KL(old || new).
        out["kl_approx"] = (weight * F.kl_estimate(torch.zeros_like(token_ratio), token_ratio, "k3")).sum()
        out["log_ratio"] = (weight * token_ratio.abs()).sum()
        out["clip_fraction"] = (weight * clipped).sum()
        out["ESS"] = F.effective_sample_size(log_ratio, weight)
        out["weight"] = weight.sum()
