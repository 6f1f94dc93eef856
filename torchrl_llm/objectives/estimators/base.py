"""What the advantage estimators share: keys, options, checks of the rows, and the critic.

Estimators read and write rows (:mod:`torchrl_llm.keys`, row view): one episode a row, turns along ``T``. What they compute is
in :mod:`torchrl_llm.objectives.functional`. A batch is estimated whole and once: its statistics must cover it all.
"""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase, dispatch
from torch import Tensor
from torchrl.objectives.value import ValueEstimatorBase

from torchrl_llm import keys
from torchrl_llm.keys import NestedKey
from torchrl_llm.objectives import functional as F
from torchrl_llm.objectives.rows import RowReader
from torchrl_llm.options import Checked, Count, Idle, NonNegative, Positive, Share


@dataclass(kw_only=True, eq=False, repr=False)
class TurnEstimator(Checked, RowReader, ValueEstimatorBase):
    """Base class of the estimators: the keys, the common options, and what every row must satisfy.

    A subclass implements :meth:`estimate`, and declares options of its own as fields of a dataclass; the rest holds for it without more. Every row must be an episode played to its end:
    its last turn terminated or truncated. Where the batch has ``"episode_id"``, an episode must be in it once; an
    estimator that compares groups also refuses a ``"group_id"`` that episodes of different tasks share.

    Args:
        value_network: the critic, where the estimator has one.

    Keyword Args:
        gamma: discount per step. Default: 1.0.
        kl_coeff: takes ``kl_coeff * (old - ref)``, the KL to the reference, from the reward of every action token, summed
            over the tokens of a turn at turn granularity. It is what ``kl_in="reward"`` of the losses sets; then
            ``"ref_log_prob"`` and ``"old_log_prob"`` (or, without it, ``"sample_log_prob"``) ``[B, L]`` are read too.
            Default: 0.0.
        discounted_objective: multiply the advantage of each step by ``gamma`` to the number of steps before it, as the gradient
            of the discounted return has it. Practice drops the factor: later turns then count as much as early ones, and
            the expected gradient is that of no objective (Thomas, 2014, "Bias in natural actor-critic algorithms"; Nota
            and Thomas, 2020, arXiv:1906.07073). Without effect at ``gamma = 1``. Default: ``False``.
        clip_advantage: bound advantages, normalized ones too, to this absolute value; ``None`` sets no bound. Default:
            ``None``.
        process_group: a batch is what all ranks of this group hold, where :meth:`estimate` takes statistics over it; ``None``:
            what this process holds. A trainer sets it. Default: ``None``.
        value_chunk_size: run the critic, where there is one, on this many rows at a time. Default: all.
    """

    @dataclass
    class _AcceptedKeys:
        advantage: NestedKey = keys.ADVANTAGE
        value_target: NestedKey = keys.VALUE_TARGET
        value: NestedKey = keys.STATE_VALUE
        bootstrap_value: NestedKey = keys.BOOTSTRAP_VALUE
        reward: NestedKey = keys.TURN_REWARD
        terminated: NestedKey = keys.TURN_TERMINATED
        truncated: NestedKey = keys.TURN_TRUNCATED
        mask: NestedKey = keys.TURN_MASK
        turn_ids: NestedKey = keys.TURN_IDS
        group_id: NestedKey = keys.GROUP_ID
        turn_value: NestedKey = keys.TURN_VALUE
        turn_advantage: NestedKey = keys.TURN_ADVANTAGE
        turn_value_target: NestedKey = keys.TURN_VALUE_TARGET
        sample_log_prob: NestedKey = keys.SAMPLE_LOG_PROB
        old_log_prob: NestedKey = keys.OLD_LOG_PROB
        ref_log_prob: NestedKey = keys.REF_LOG_PROB

    default_keys = _AcceptedKeys

    idle: ClassVar[tuple[Idle, ...]] = (Idle(("discounted_objective",), {"gamma": (1,)}, "discount (gamma below 1)"),)

    _reads: ClassVar[tuple[str, ...]] = ("reward", "mask", "terminated", "truncated", "turn_ids")
    _writes: ClassVar[tuple[str, ...]] = ("advantage", "value_target", "turn_advantage", "turn_value_target")

    corrects_sampler: ClassVar[bool] = False
    """Whether the advantage already holds the ratio of the present policy to the one that sampled."""

    granularity: ClassVar[str] = "turn"
    """What a step is: a ``"turn"``, or a ``"token"``."""

    value_reduction: ClassVar[F.ValueReduction] = "first"
    """Which of a turn's values is the state's."""

    # torch.nn.Module takes modules as attributes only after its own constructor: hence not a field.
    value_network: InitVar[TensorDictModuleBase | None] = field(default=None, kw_only=False)
    gamma: Share = 1.0
    kl_coeff: NonNegative = 0.0
    discounted_objective: bool = False
    clip_advantage: Positive | None = None
    process_group: dist.ProcessGroup | None = None
    value_chunk_size: Count | None = None

    def __post_init__(self, value_network: TensorDictModuleBase | None) -> None:
        super().__init__(value_network=value_network, value_chunk_size=self.value_chunk_size)

    @property
    def takes_kl(self) -> bool:
        """Whether :meth:`estimate` takes the KL from the rewards itself."""
        return False

    @property
    def in_keys(self) -> list[NestedKey]:
        penalized = ("sample_log_prob", "ref_log_prob") if self.kl_coeff else ()
        return [getattr(self.tensor_keys, name) for name in (*self._reads, *penalized)]

    @property
    def out_keys(self) -> list[NestedKey]:
        return [getattr(self.tensor_keys, name) for name in self._writes]

    def estimate(self, tensordict: TensorDictBase) -> dict[str, Tensor]:
        """The values to write, under the names of ``_AcceptedKeys``.

        ``"turn_advantage"`` and ``"turn_value_target"`` ``[B, T]`` are a must; every token gets its turn's, unless
        ``"advantage"`` and ``"value_target"`` ``[B, L]`` are given too. A KL is out of the rewards already (see
        ``takes_kl``); advantages are clipped and discounted afterwards.
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
        self._check_ids(tensordict)
        self._check_finished(tensordict)
        rows = tensordict
        if self.kl_coeff and not self.takes_kl:
            reward = self._get(tensordict, "reward") + self._turn_penalty(tensordict)
            rows = tensordict.copy().set(self.tensor_keys.reward, reward)
        for name, value in self._complete(tensordict, self.estimate(rows)).items():
            tensordict.set(getattr(self.tensor_keys, name), value)
        return tensordict

    def _complete(self, tensordict: TensorDictBase, estimated: dict[str, Tensor]) -> dict[str, Tensor]:
        """Clip and discount the advantages, and give every token its turn's."""
        turn_ids, mask = self._get(tensordict, "turn_ids"), self._get(tensordict, "mask")
        if "advantage" in estimated:
            return estimated | {"advantage": self._weighted(estimated["advantage"], turn_ids >= 0)}
        advantage = self._weighted(estimated["turn_advantage"], mask)
        return estimated | {
            "turn_advantage": advantage,
            "advantage": F.turn_to_token(advantage, turn_ids),
            "value_target": F.turn_to_token(estimated["turn_value_target"], turn_ids),
        }

    def value_estimate(self, tensordict: TensorDictBase, **kwargs: Any) -> Tensor:
        """The value target ``[B, L]``, without writing to ``tensordict``. Takes no further argument."""
        if any(value is not None for value in kwargs.values()):
            raise ValueError(f"{type(self).__name__}.value_estimate takes a tensordict only; got {sorted(kwargs)}.")
        return self.forward(tensordict.copy()).get(self.tensor_keys.value_target)

    def _turns(self, tensordict: TensorDictBase) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """reward ``[B, T]``, mask ``[B, T]``, turn ids ``[B, L]`` and acted ``[B, T]`` (turns with an action token)."""
        reward, mask, turn_ids = (self._get(tensordict, name) for name in ("reward", "mask", "turn_ids"))
        return reward, mask, turn_ids, mask & (F.turn_lengths(turn_ids, mask.shape[1]) > 0)

    def _at_end(self, tensordict: TensorDictBase, name: str) -> Tensor:
        """A flag of each row's last played turn, ``[B]``; False in a row that was never played."""
        flag, mask = self._get(tensordict, name), self._get(tensordict, "mask")
        order = torch.arange(mask.shape[1], device=mask.device).expand_as(mask)
        last = torch.where(mask, order, -1).amax(1, keepdim=True)
        return (flag.gather(1, last.clamp_min(0)) & (last >= 0)).squeeze(1)

    def _kl_penalty(self, tensordict: TensorDictBase) -> Tensor:
        """What the KL takes from each action token's reward, ``[B, L]``; 0 elsewhere, and without a KL."""
        turn_ids = self._get(tensordict, "turn_ids")
        if not self.kl_coeff:
            return torch.zeros_like(turn_ids, dtype=torch.float32)
        hint = "Score the reference, or set kl_coeff=0."
        old = self._get(tensordict, self._old_name(tensordict), hint)
        return torch.where(turn_ids >= 0, -self.kl_coeff * (old - self._get(tensordict, "ref_log_prob", hint)), 0.0)

    def _turn_penalty(self, tensordict: TensorDictBase) -> Tensor:
        """:meth:`_kl_penalty`, summed over each turn's tokens: ``[B, T]``."""
        num_turns = self._get(tensordict, "mask").shape[1]
        return F.turn_sum(self._kl_penalty(tensordict), self._get(tensordict, "turn_ids"), num_turns)

    def _weighted(self, advantage: Tensor, played: Tensor) -> Tensor:
        """The advantage of each step, clipped and discounted as asked; ``played`` marks the steps that took time."""
        if self.clip_advantage is not None:
            advantage = advantage.clamp(-self.clip_advantage, self.clip_advantage)
        if self.discounted_objective:
            advantage = advantage * F.discount(played, self.gamma).to(advantage.dtype)
        return advantage

    def _check_ids(self, tensordict: TensorDictBase) -> None:
        """Rows whose ids collide, as far as the batch has them, are refused: credit would merge what has nothing in common."""
        episode_id, fault = tensordict.get(keys.EPISODE_ID, None), None
        if episode_id is not None:
            fault = F.episode_fault(episode_id)
        if fault is None and "group_id" in self._reads:
            compared = (tensordict.get(key, None) for key in (keys.ENV_ID, keys.TOKENS, self.tensor_keys.turn_ids))
            fault = F.group_fault(self._get(tensordict, "group_id"), *compared)
        if fault is not None:
            raise ValueError(fault)

    def _check_finished(self, tensordict: TensorDictBase) -> None:
        ended = self._at_end(tensordict, "terminated") | self._at_end(tensordict, "truncated")
        open_rows = self._get(tensordict, "mask").any(1) & ~ended
        if bool(open_rows.any()):
            raise ValueError(
                f"Row(s) {open_rows.nonzero().flatten().tolist()} end in a turn that is neither terminated nor "
                "truncated. Credit needs episodes that were played to their end: collect whole episodes."
            )


class ReturnEstimator(TurnEstimator):
    """Base class of the estimators that compare returns, without a critic.

    The KL is scored like the rewards and added; whether scores differ at all is judged without it.
    """

    @property
    def takes_kl(self) -> bool:
        """Always: what is normalized is the return with the KL."""
        return True

    def score(self, reward: Tensor, mask: Tensor, acted: Tensor) -> Tensor:
        """What is compared: a return of each turn ``[B, T]``, or of each episode ``[B]``."""
        raise NotImplementedError

    def compare(self, tensordict: TensorDictBase, score: Tensor, penalty: Tensor, acted: Tensor) -> Tensor:
        """The advantage, in the shape of ``score``; ``penalty`` is the score of the KL."""
        raise NotImplementedError

    def estimate(self, tensordict: TensorDictBase) -> dict[str, Tensor]:
        reward, mask, _, acted = self._turns(tensordict)
        score, penalty = (self.score(r, mask, acted) for r in (reward, self._turn_penalty(tensordict)))
        advantage = self.compare(tensordict, score, penalty, acted)
        written = {"turn_advantage": advantage, "turn_value_target": score + penalty}
        return {
            name: torch.where(acted, value if value.ndim == 2 else value.unsqueeze(1), 0.0)
            for name, value in written.items()
        }


class CriticEstimator(TurnEstimator):
    """Base class of the estimators with a critic: runs it under ``no_grad`` unless its values are in the batch."""

    _writes = (*TurnEstimator._writes, "turn_value")

    @property
    def in_keys(self) -> list[NestedKey]:
        critic = self.value_network
        values = [self.tensor_keys.value] if critic is None else critic.in_keys
        return list(dict.fromkeys([*super().in_keys, *values]))

    def _values(self, tensordict: TensorDictBase) -> dict[str, Tensor]:
        """``"value"`` ``[B, L]`` and, if there is one, ``"bootstrap_value"`` ``[B]``: from the batch, or the critic."""
        source, critic = tensordict, self.value_network
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
        needed = self._at_end(tensordict, "truncated") & ~self._at_end(tensordict, "terminated")
        if "bootstrap_value" in values:
            return torch.where(needed, values["bootstrap_value"], 0.0)
        if bool(needed.any()):
            raise KeyError(
                f"{type(self).__name__} needs {self.tensor_keys.bootstrap_value!r}, which is not in the batch. It is the "
                "value of a row whose last turn was truncated; the critic writes it."
            )
        return None
