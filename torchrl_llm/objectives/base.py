"""Base class of the losses: :class:`TurnLoss`.

A loss is a **weighted sum** over tokens, and the weights belong to the optimizer batch:
:func:`write_loss_weights` writes them once, before the batch is split. The gradient then does not
depend on how the rows are cut into micro-batches, padded or ordered. The maths is in
:mod:`torchrl_llm.functional`.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import InitVar, dataclass, field
from typing import Any, ClassVar, Self

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
from torchrl_llm.objectives.checks import check_loss_options, check_names, check_terms
from torchrl_llm.objectives.estimators.base import TurnEstimator
from torchrl_llm.objectives.estimators.rows import RowKeys, RowReader
from torchrl_llm.objectives.joining import estimator_of, join_keys, serve, shared_keys
from torchrl_llm.objectives.options import KLPlace, TurnLossOptions


@dataclass(kw_only=True, eq=False, repr=False)
class TurnLoss(TurnLossOptions, RowReader, LossModule):
    """Base class of the losses over episodes: which tokens count how much, the entropy bonus, and
    the estimator.

    A loss scores the rows with its actor, and :meth:`terms` says what is minimized and reported.
    Losses that compare with another policy are :class:`~torchrl_llm.objectives.TurnPolicyLoss`.

    Reads rows (``[B]``, :mod:`torchrl_llm.keys`): what the actor reads, ``"turn_ids"``,
    ``"advantage"`` and ``"loss_weight"``; without the last, the rows are taken to be the whole
    optimizer batch. Returns scalars, differentiable where the name starts with ``loss_`` and
    detached otherwise:

    - ``loss_entropy`` (``entropy_coeff`` not 0), times its coefficient;
    - ``entropy`` (if the actor writes it); ``weight``: the sum of the weights, 1 for a whole batch
      (but for ``weighting="constant"``, on whose scale all these are).

    They are weighted sums: over the micro-batches of a batch they add up to the batch's value.

    Args:
        actor: reads ``"tokens"``, ``"attention_mask"``, ``"turn_ids"`` and writes ``"log_prob"``
            ``[B, L]`` and optionally ``"entropy"`` ``[B, L]``. It is held as a plain submodule.

    Keyword Args:
        estimator: of the advantages, an instance or a class, see :meth:`make_value_estimator`.
            Default: ``default_value_estimator``, the algorithm's own.
        **options: of :class:`TurnLossOptions`.
    """

    @dataclass
    class _AcceptedKeys(RowKeys):
        log_prob: NestedKey = keys.LOG_PROB
        entropy: NestedKey = keys.ENTROPY
        loss_weight: NestedKey = keys.LOSS_WEIGHT
        critic_weight: NestedKey = keys.CRITIC_WEIGHT

    default_keys = _AcceptedKeys
    default_value_estimator: ClassVar[type[TurnEstimator]]

    _weight_names: ClassVar[tuple[str, ...]] = ("loss_weight",)

    # No fields: only losses that compare with another policy have them as options.
    kl_coeff = 0.0
    kl_in: ClassVar[KLPlace] = "loss"

    def __new__(cls, *args: Any, **options: Any) -> Self:
        check_names(cls, options)
        return super().__new__(cls, *args, **options)

    # torch.nn.Module takes modules as attributes only after its own constructor: hence not fields.
    actor: InitVar[TensorDictModuleBase] = field(kw_only=False)
    critic: InitVar[TensorDictModuleBase | None] = field(default=None, kw_only=False)
    estimator: InitVar[ValueEstimatorBase | type[ValueEstimatorBase] | None] = None

    def __post_init__(self, actor: TensorDictModuleBase, critic: TensorDictModuleBase | None, estimator: Any) -> None:
        LossModule.__init__(self)  # super() is the constructor of the options
        self.actor_network = actor
        self.critic_network: Any = critic  # None without one
        # Of entropy_target and kl_coeff; a trainer sets them before each update.
        self.entropy_fraction = self._kl_fraction = 1.0
        check_loss_options(self)
        self.make_value_estimator(estimator)

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
        names = [self.tensor_keys.turn_ids, self.tensor_keys.advantage]
        return list(dict.fromkeys([*self.actor_network.in_keys, *names]))

    @property
    def out_keys(self) -> list[NestedKey]:
        out: list[NestedKey] = ["loss_objective", "weight"]
        if self._writes_entropy:
            out += ["loss_entropy", "entropy"] if self.entropy_coeff else ["entropy"]
        return out

    def _forward_value_estimator_keys(self, **kwargs: Any) -> None:
        if (estimator := self._value_estimator) is not None:
            estimator.set_keys(**{name: kwargs[name] for name in shared_keys(self, estimator) & kwargs.keys()})

    def make_value_estimator(
        self,
        value_type: type[ValueEstimatorBase] | ValueEstimatorBase | ValueEstimators | None = None,
        **hyperparams: Any,
    ) -> Self:
        """Choose the advantage estimator.

        The loss gives a :class:`~torchrl_llm.objectives.TurnEstimator` its critic, if it has one
        and the estimator has none, and with ``kl_in="reward"`` its ``kl_coeff``.

        Args:
            value_type: a ``ValueEstimatorBase``, or its class, which is made with ``hyperparams``;
                ``ValueEstimators.GAE``, which means ``TurnGAE``; or ``None``: the algorithm's own.
            **hyperparams: options of the estimator's class.

        Returns:
            The loss itself.
        """
        value_type, hyperparams = estimator_of(self, value_type, hyperparams)
        with ExitStack() as refused:
            refused.callback(setattr, self, "_value_estimator", self._value_estimator)
            super().make_value_estimator(value_type, **hyperparams)
            refused.callback(serve(self, self.value_estimator))
            self._check_estimator()
            join_keys(self, self.value_estimator)
            refused.pop_all()
        return self

    def _check_estimator(self) -> None:
        """Refuse an estimator that does not go with the loss; a subclass adds its reasons."""

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
        """The :meth:`terms` of the rows in ``tensordict``, see the class; ``tensordict`` is not
        changed."""
        turn_ids = self._get(tensordict, "turn_ids")
        weights = self._read_weights(tensordict, turn_ids)
        rows = tensordict.copy().update({getattr(self.tensor_keys, name): each for name, each in weights.items()})
        scored = self._score(tensordict)
        for name in ("log_prob", "entropy") if self._writes_entropy else ("log_prob",):
            value = self._get(scored, name, "The actor must write it.")
            # An actor of your own may write anything off actions, and it must reach no sum.
            scored.set(getattr(self.tensor_keys, name), torch.where(turn_ids >= 0, value, 0.0))
        terms = check_terms(type(self).__name__, self.terms(rows, scored))
        if "weight" not in terms:  # a subclass may leave it out
            terms["weight"] = self._get(rows, "loss_weight").sum()
        return TensorDict(terms)

    @property
    def corrects_sampler(self) -> bool:
        """Whether the loss corrects for samplers whose log-probs are not the trainer's."""
        return False

    def clipped(self, rows: TensorDictBase) -> Tensor:
        """The tokens that have no gradient, or a bounded one, because their ratio is clipped;
        ``[B, L]`` bool.

        Args:
            rows: ``[B]``, with ``"log_prob"`` as scored now.
        """
        return torch.zeros_like(self._get(rows, "turn_ids"), dtype=torch.bool)

    def _score(self, tensordict: TensorDictBase) -> TensorDictBase:
        return self.actor_network(self._inputs(self.actor_network, tensordict))

    def terms(self, rows: TensorDictBase, scored: TensorDictBase) -> dict[str, Tensor]:
        """What is minimized, and what is reported. Override it for further terms and metrics, or
        for other ones.

        Args:
            rows: ``[B]``: what the loss was given, and ``"loss_weight"`` ``[B, L]`` (LLMPPO:
                ``"critic_weight"`` too), 0 off actions. Not to be changed.
            scored: ``"log_prob"`` and, if the actor writes it, ``"entropy"`` ``[B, L]``, with
                gradient, 0 off actions.

        Returns:
            Scalars. Those whose names start with ``loss_`` are added up and minimized, the others
            are metrics, which the loss detaches. Each is a sum over tokens with ``"loss_weight"``,
            so that micro-batches add up to the batch.

        Examples:
            A loss that counts tokens of high entropy alone, and reports their share:

            >>> from torchrl_llm.objectives import LLMGRPOLoss
            >>> class SurprisedLoss(LLMGRPOLoss):
            ...     def terms(self, rows, scored):
            ...         surprised = (scored["entropy"] > 1.0).float()
            ...         weighted = rows.copy().set("loss_weight", rows["loss_weight"] * surprised)
            ...         share = (rows["loss_weight"] * surprised).sum()
            ...         return super().terms(weighted, scored) | {"surprised": share}
        """
        weight = self._get(rows, "loss_weight")
        terms = {"weight": weight.sum()}
        if self._writes_entropy:
            entropy = self._get(scored, "entropy")
            terms["entropy"] = (weight * entropy).sum().detach()
            if self.entropy_coeff:
                # Each token: a bound on the batch's mean lets a few have it all, and the one that
                # decides none.
                paid = entropy if self.entropy_bound is None else entropy.clamp(max=self.entropy_bound)
                terms["loss_entropy"] = -self.entropy_coeff * (weight * paid).sum()
        return terms

    def _read_weights(self, tensordict: TensorDictBase, turn_ids: Tensor) -> dict[str, Tensor]:
        """The weights in the rows; without any, the weights of the rows taken as a whole batch."""
        written = {name: tensordict.get(getattr(self.tensor_keys, name), None) for name in self._weight_names}
        missing = [getattr(self.tensor_keys, name) for name, weight in written.items() if weight is None]
        if len(missing) == len(written):
            return self.weights(turn_ids, row_weight=tensordict.get(self.tensor_keys.row_weight, None))
        if missing:
            raise KeyError(f"The rows have a loss weight but no {missing}: write all of them with write_loss_weights.")
        return {name: torch.where(turn_ids >= 0, weight, 0.0) for name, weight in written.items()}


def write_loss_weights(
    batch: TensorDictBase, loss_module: TurnLoss, process_group: dist.ProcessGroup | None = None
) -> TensorDictBase:
    """Write every weight that ``loss_module`` reads into an optimizer batch, before it is split
    into micro-batches.

    Args:
        batch: ``[B]`` rows with ``"turn_ids"``, and ``"row_weight"`` if they count differently: all
            rows of one optimizer step on this rank.
        loss_module: the loss, which computes its weights (``"loss_weight"``; ``"critic_weight"``
            too for PPO).
        process_group: count over all ranks of this group; losses are then summed over the ranks.

    Returns:
        ``batch``.
    """
    names = loss_module.tensor_keys
    weights = loss_module.weights(batch.get(names.turn_ids), process_group, batch.get(names.row_weight, None))
    return batch.update({getattr(names, name): weight for name, weight in weights.items()})
