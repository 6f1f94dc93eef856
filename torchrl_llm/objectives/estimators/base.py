"""Base class of the advantage estimators: keys, options and checks of the rows.

Estimators read and write rows (:mod:`torchrl_llm.keys`, row view): one episode a row, turns along
``T``. The formulas are in :mod:`torchrl_llm.functional`. Estimate a whole batch at once: its
statistics must cover all of it.
"""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase, dispatch
from torch import Tensor
from torchrl.objectives.value import ValueEstimatorBase

from torchrl_llm import functional as F
from torchrl_llm.keys import NestedKey
from torchrl_llm.objectives.estimators.granularity import Granularity
from torchrl_llm.objectives.estimators.rows import (
    RowKeys,
    RowReader,
    check_finished,
    check_finite,
    check_ids,
    check_no_units,
    where_read,
)
from torchrl_llm.objectives.options import EstimatorOptions
from torchrl_llm.utils.options import Count, NonNegative


@dataclass(kw_only=True, eq=False, repr=False)
class TurnEstimator(EstimatorOptions, RowReader, ValueEstimatorBase):
    """Base class of the estimators: the keys, the common options, and what every row must satisfy.

    A subclass implements :meth:`estimate` and declares its own options as dataclass fields. Every
    row must be a finished episode: its last turn terminated or truncated. Where the batch has
    ``"episode_id"``, an episode must be in it once; an estimator that compares groups also refuses
    a ``"group_id"`` that episodes of different tasks share.

    Args:
        value_network: the critic, where the estimator has one.

    Keyword Args:
        **options: of :class:`EstimatorOptions`, and the following.
    """

    _AcceptedKeys = RowKeys
    default_keys = RowKeys

    _reads: ClassVar[tuple[str, ...]] = ("reward", "mask", "terminated", "truncated", "turn_ids")
    _writes: ClassVar[tuple[str, ...]] = ("advantage", "value_target", "turn_advantage", "turn_value_target")

    corrects_sampler: ClassVar[bool] = False
    """Whether the advantage already holds the ratio of the present policy to the one that
    sampled."""

    needs_branches: ClassVar[bool] = False
    """Whether it reads ``("turn", "sampled_value")``, which a collector writes that continues
    episodes from their states."""

    respects_units: ClassVar[bool] = False
    """Whether no row is compared with another of its unit (``("turn", "unit")``), because units are
    read, or because no rows are compared. Otherwise rows with units are refused. Not inherited: a
    subclass may compare otherwise, and says it itself."""

    granularity: ClassVar[Granularity] = "turn"
    """The step of the estimator: a ``"turn"`` or a ``"token"``."""

    value_reduction: ClassVar[F.ValueReduction] = "first"
    """Which of a turn's token values is the value of the state."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.respects_units = vars(cls).get("respects_units", False)

    # torch.nn.Module takes modules as attributes only after its own constructor: hence not a field.
    value_network: InitVar[TensorDictModuleBase | None] = field(default=None, kw_only=False)
    kl_coeff: NonNegative = 0.0
    """Subtracts ``kl_coeff * (old - ref)``, the KL to the reference, from the reward of every
    action token, summed over the tokens of a turn at turn granularity.

    ``kl_in="reward"`` of the losses sets it. Then ``"ref_log_prob"`` and ``"old_log_prob"`` (or,
    without it, ``"sample_log_prob"``) ``[B, L]`` are read too.
    """
    process_group: dist.ProcessGroup | None = None
    """Statistics over a batch include all ranks of this group; None: this process only.

    A trainer sets it.
    """
    value_chunk_size: Count | None = None
    """Run the critic, where there is one, on this many rows at a time; None: on all."""

    def __post_init__(self, value_network: TensorDictModuleBase | None) -> None:
        # super() is the constructor of the options
        ValueEstimatorBase.__init__(self, value_network=value_network, value_chunk_size=self.value_chunk_size)
        self.kl_fraction = 1.0  # of kl_coeff; the loss sets it
        # What a loss gave to it.
        self.serves: tuple[TensorDictModuleBase | None, float] | None = None

    @property
    def takes_kl(self) -> bool:
        """Whether :meth:`estimate` subtracts the KL from the rewards itself."""
        return False

    @property
    def reads_rewards(self) -> bool:
        """Whether advantages depend on the rewards."""
        return True

    @property
    def needs_nonnegative_rewards(self) -> str | None:
        """The option that takes no negative returns, such as ``'scale="mean"'``; ``None``: they may
        have any sign."""
        return None

    @property
    def in_keys(self) -> list[NestedKey]:
        penalized = ("sample_log_prob", "ref_log_prob") if self.kl_coeff and self.kl_fraction else ()
        return [getattr(self.tensor_keys, name) for name in (*self._reads, *penalized)]

    @property
    def out_keys(self) -> list[NestedKey]:
        return [getattr(self.tensor_keys, name) for name in self._writes]

    def estimate(self, tensordict: TensorDictBase) -> dict[str, Tensor]:
        """The values to write, under the names of ``_AcceptedKeys``.

        ``"turn_advantage"`` and ``"turn_value_target"`` ``[B, T]`` are required; every token gets
        the values of its turn, unless ``"advantage"`` and ``"value_target"`` ``[B, L]`` are
        returned too. The KL is already subtracted from the rewards (unless ``takes_kl``);
        advantages are clipped and discounted afterwards.
        """
        raise NotImplementedError

    @dispatch(auto_batch_size=False)
    @torch.no_grad()
    def forward(
        self,
        tensordict: TensorDictBase,
        *,
        params: TensorDictBase | None = None,
        target_params: TensorDictBase | None = None,
    ) -> TensorDictBase:
        """Write advantages and value targets into ``tensordict`` (rows, ``[B]``) and return it."""
        if params is not None or target_params is not None:
            raise ValueError(f"{type(self).__name__} runs plain modules; params and target_params must be None.")
        self._check_rows(tensordict)
        rows = tensordict
        if self.kl_coeff and not self.takes_kl:
            reward = self._get(tensordict, "reward") + self._turn_penalty(tensordict)
            # In a shallow copy: in the batch itself, a second estimate would subtract the KL again.
            rows = tensordict.copy().set(self.tensor_keys.reward, reward)
        credit = self._complete(tensordict, self.estimate(rows))
        self._check_numbers(tensordict, credit)
        for name, value in credit.items():
            tensordict.set(getattr(self.tensor_keys, name), value)
        return tensordict

    def _complete(self, tensordict: TensorDictBase, estimated: dict[str, Tensor]) -> dict[str, Tensor]:
        """Clip and discount the advantages, and give every token the values of its turn."""
        turn_ids, mask = self._get(tensordict, "turn_ids"), self._get(tensordict, "mask")
        if "advantage" in estimated:
            # The estimator has credited tokens itself; its values of turns are a summary of them.
            return estimated | {"advantage": self._weighted(estimated["advantage"], turn_ids >= 0)}
        advantage = self._weighted(estimated["turn_advantage"], mask)
        return estimated | {
            "turn_advantage": advantage,
            "advantage": F.turn_to_token(advantage, turn_ids),
            "value_target": F.turn_to_token(estimated["turn_value_target"], turn_ids),
        }

    def value_estimate(self, tensordict: TensorDictBase, **kwargs: Any) -> Tensor:
        """The value target ``[B, L]``, without writing to ``tensordict``. Takes no further
        argument."""
        if any(value is not None for value in kwargs.values()):
            raise ValueError(f"{type(self).__name__}.value_estimate takes a tensordict only; got {sorted(kwargs)}.")
        return self.forward(tensordict.copy()).get(self.tensor_keys.value_target)

    def _turns(self, tensordict: TensorDictBase) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """reward ``[B, T]``, mask ``[B, T]``, turn ids ``[B, L]`` and acted ``[B, T]`` (turns with
        an action token)."""
        reward, mask, turn_ids = (self._get(tensordict, name) for name in ("reward", "mask", "turn_ids"))
        return reward, mask, turn_ids, mask & (F.turn_lengths(turn_ids, mask.shape[1]) > 0)

    def _kl_penalty(self, tensordict: TensorDictBase) -> Tensor:
        """The KL penalty added to each action token's reward, ``[B, L]``; 0 elsewhere, and where
        the KL has no weight."""
        turn_ids = self._get(tensordict, "turn_ids")
        weight = self.kl_fraction * self.kl_coeff
        if not weight:
            return torch.zeros_like(turn_ids, dtype=torch.float32)
        hint = "Score the reference, or set kl_coeff=0."
        old = self._get(tensordict, self._old_name(tensordict), hint)
        # k1, whose expectation is the KL. Its gradient as a loss would be 0 in expectation, but a
        # reward needs none.
        return torch.where(turn_ids >= 0, -weight * (old - self._get(tensordict, "ref_log_prob", hint)), 0.0)

    def _turn_penalty(self, tensordict: TensorDictBase) -> Tensor:
        """:meth:`_kl_penalty`, summed over each turn's tokens: ``[B, T]``."""
        num_turns = self._get(tensordict, "mask").shape[1]
        return F.turn_sum(self._kl_penalty(tensordict), self._get(tensordict, "turn_ids"), num_turns)

    def _weighted(self, advantage: Tensor, taken: Tensor) -> Tensor:
        """The advantage of each step, clipped and discounted; ``taken`` marks the steps that count
        as time."""
        # Clipped first: the bound is on the advantage, and not on what discounting leaves of it.
        if self.clip_advantage is not None:
            advantage = advantage.clamp(-self.clip_advantage, self.clip_advantage)
        if self.discounted_objective:
            advantage = advantage * F.discount(taken, self.gamma).to(advantage.dtype)
        return advantage

    def _check_rows(self, tensordict: TensorDictBase) -> None:
        group_id = self._get(tensordict, "group_id") if "group_id" in self._reads else None
        check_ids(tensordict, self._get(tensordict, "turn_ids"), group_id)
        if not self.respects_units:
            check_no_units(type(self).__name__, tensordict, self.tensor_keys.unit)
        ended = self._at_end(tensordict, "terminated") | self._at_end(tensordict, "truncated")
        check_finished(self._get(tensordict, "mask"), ended)

    def _check_numbers(self, tensordict: TensorDictBase, credit: dict[str, Tensor]) -> None:
        """Refuse what is not finite among the numbers that were read and found."""
        action, mask = self._get(tensordict, "turn_ids") >= 0, self._get(tensordict, "mask")
        places = where_read(action, mask, self._cut_off(tensordict))
        penalized = {self._old_name(tensordict), "ref_log_prob"} if self.kl_coeff and self.kl_fraction else set()
        read = {name: self._get(tensordict, name) for name in penalized.union(self._reads) & places.keys()} | credit
        numbers = {name: (read[name], place) for name, place in places.items() if name in read}
        check_finite(type(self).__name__, {getattr(self.tensor_keys, name): each for name, each in numbers.items()})
