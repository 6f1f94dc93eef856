"""Turn-level credit as TorchRL value estimators: :class:`TurnGAE`, :class:`ReBN`, :class:`GroupRelative`.

They read and write rows (:mod:`torchrl_llm.keys`, row view): one conversation a row, turns along ``T``. What they
compute is in :mod:`torchrl_llm.objectives.functional`; here are only keys, options and the checks on what comes in. A
batch is estimated whole and once: its statistics must cover it all.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase, dispatch
from torch import Tensor
from torchrl.objectives import LossModule
from torchrl.objectives.value import ValueEstimatorBase

from torchrl_llm import keys
from torchrl_llm.keys import NestedKey
from torchrl_llm.objectives import functional as F

Granularity = Literal["turn", "token", "auto"]


class TurnEstimator(ValueEstimatorBase):
    """Base class of the estimators: the keys, and what every row must satisfy.

    A subclass implements :meth:`estimate`. Every row must be a conversation played to its end: its last turn terminated
    or truncated.
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

    _reads: tuple[str, ...] = ("reward", "mask", "terminated", "truncated", "turn_ids")
    _writes: tuple[str, ...] = ("advantage", "value_target", "turn_advantage", "turn_value_target")

    def __init__(self, *, value_network: TensorDictModuleBase | None = None, **options: Any) -> None:
        super().__init__(value_network=value_network, **options)

    @classmethod
    def for_loss(cls, loss_module: LossModule, **hyperparams: Any) -> TurnEstimator:
        """Build an estimator from the options that ``loss_module`` was given; ``hyperparams`` win over them."""
        known = inspect.signature(cls.__init__).parameters
        given = {"value_network": getattr(loss_module, "critic_network", None)}
        given |= getattr(loss_module, "estimator_options", {})
        if given.get("kl_coeff") and "kl_coeff" not in known:
            raise ValueError(
                f"{type(loss_module).__name__} leaves its KL (kl_coeff={given['kl_coeff']}) to the reward, but {cls.__name__} "
                'takes no kl_coeff: the KL would be lost. Use kl_in="loss", kl_coeff=0, or an estimator such as ReBN.'
            )
        return cls(**({name: value for name, value in given.items() if name in known} | hyperparams))

    @property
    def in_keys(self) -> list[NestedKey]:
        return [getattr(self.tensor_keys, name) for name in self._reads]

    @property
    def out_keys(self) -> list[NestedKey]:
        return [getattr(self.tensor_keys, name) for name in self._writes]

    def estimate(self, tensordict: TensorDictBase) -> dict[str, Tensor]:
        """The figures to write, under the names of ``_AcceptedKeys``."""
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
        self._check_finished(tensordict)
        for name, figure in self.estimate(tensordict).items():
            tensordict.set(getattr(self.tensor_keys, name), figure)
        return tensordict

    def value_estimate(self, tensordict: TensorDictBase, **kwargs: Any) -> Tensor:
        """The value target ``[B, L]``, without writing to ``tensordict``. Takes no further argument."""
        if any(value is not None for value in kwargs.values()):
            raise ValueError(f"{type(self).__name__}.value_estimate takes a tensordict only; got {sorted(kwargs)}.")
        return self.forward(tensordict.copy()).get(self.tensor_keys.value_target)

    def _get(self, tensordict: TensorDictBase, name: str, hint: str = "") -> Tensor:
        key = getattr(self.tensor_keys, name)
        value = tensordict.get(key, None)
        if value is None:
            raise KeyError(f"{type(self).__name__} needs {key!r}, which is not in the batch. {hint}".rstrip())
        return value

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

    def _check_finished(self, tensordict: TensorDictBase) -> None:
        ended = self._at_end(tensordict, "terminated") | self._at_end(tensordict, "truncated")
        open_rows = self._get(tensordict, "mask").any(1) & ~ended
        if bool(open_rows.any()):
            raise ValueError(
                f"Row(s) {open_rows.nonzero().flatten().tolist()} end in a turn that is neither terminated nor "
                "truncated. Credit needs conversations that were played to their end: collect whole episodes."
            )


class TurnGAE(TurnEstimator):
    """Generalized advantage estimation over turns (or over action tokens), with a critic.

    Runs the critic under ``no_grad`` unless the batch already has its ``"state_value"``. After the last turn the next
    value is 0 if the episode terminated, and ``"bootstrap_value"`` if it was only truncated.

    Reads ``("turn", reward / mask / terminated / truncated)`` ``[B, T]``, ``"turn_ids"`` ``[B, L]`` and what the
    critic reads (or ``"state_value"`` ``[B, L]`` and ``"bootstrap_value"`` ``[B]``). Writes ``"advantage"`` and
    ``"value_target"`` ``[B, L]`` and ``("turn", value / advantage / value_target)`` ``[B, T]``; at token granularity
    the latter are the token figures, reduced by ``value_reduction``.

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
        whiten: normalise advantages to mean 0 and variance 1 over the steps of the batch. Default: ``True``.
        process_group: whiten over all ranks of this group; ``None`` is this process only.
        value_chunk_size: run the critic on this many rows at a time. Default: all.

    Examples:
        >>> from tensordict import TensorDict
        >>> yes, no = torch.tensor([[True, True]]), torch.tensor([[False, False]])
        >>> reward, last = torch.tensor([[0.0, 1.0]]), torch.tensor([[False, True]])
        >>> turn = dict(reward=reward, mask=yes, terminated=last, truncated=no)
        >>> ids = torch.tensor([[-1, 0, 0, -1, 1]])
        >>> rows = TensorDict({"turn": turn, "turn_ids": ids, "state_value": torch.zeros(1, 5)}, [1])
        >>> TurnGAE(gamma=0.5, lmbda=1.0, whiten=False)(rows)["advantage"]
        tensor([[0.0000, 0.5000, 0.5000, 0.0000, 1.0000]])
    """

    _writes = (*TurnEstimator._writes, "turn_value")

    def __init__(
        self,
        value_network: TensorDictModuleBase | None = None,
        *,
        gamma: float | None = None,
        lmbda: float = 0.95,
        granularity: Granularity = "turn",
        single_turn: bool | None = None,
        value_reduction: F.ValueReduction = "first",
        whiten: bool = True,
        process_group: dist.ProcessGroup | None = None,
        value_chunk_size: int | None = None,
    ) -> None:
        super().__init__(value_network=value_network, value_chunk_size=value_chunk_size)
        F.check_choice("granularity", granularity, Granularity)
        F.check_choice("value_reduction", value_reduction, F.ValueReduction)
        if granularity == "auto":
            if single_turn is None:
                raise ValueError(
                    'granularity="auto" needs single_turn: whether the environment only asks for one turn.'
                )
            granularity = "token" if single_turn else "turn"
        self.granularity: Literal["turn", "token"] = granularity
        self.gamma = gamma if gamma is not None else (1.0 if granularity == "token" else 0.99)
        self.lmbda = lmbda
        self.value_reduction = value_reduction
        self.whiten = whiten
        self.process_group = process_group

    @property
    def in_keys(self) -> list[NestedKey]:
        critic = self.value_network
        values = [self.tensor_keys.value] if critic is None else critic.in_keys
        return list(dict.fromkeys([*super().in_keys, *values]))

    def estimate(self, tensordict: TensorDictBase) -> dict[str, Tensor]:
        self._ensure_values(tensordict)
        reward, mask, turn_ids, acted = self._turns(tensordict)
        value, bootstrap = self._get(tensordict, "value"), self._bootstrap(tensordict)
        num_turns = mask.shape[1]

        def per_turn(x: Tensor) -> Tensor:
            return F.turn_reduce(x, turn_ids, num_turns, self.value_reduction)

        turn_value = per_turn(value)
        if self.granularity == "token":
            advantage, target = F.token_gae(reward, value, turn_ids, mask, self.gamma, self.lmbda, bootstrap)
            advantage = self._whitened(advantage, turn_ids >= 0)
            turn_advantage, turn_target = per_turn(advantage), per_turn(target)
        else:
            turn_advantage, turn_target = F.turn_gae(
                reward, turn_value, mask, self.gamma, self.lmbda, bootstrap, acted=acted
            )
            turn_advantage = self._whitened(turn_advantage, acted)
            advantage, target = F.turn_to_token(turn_advantage, turn_ids), F.turn_to_token(turn_target, turn_ids)
        return {
            "advantage": advantage,
            "value_target": target,
            "turn_advantage": turn_advantage,
            "turn_value_target": turn_target,
            "turn_value": turn_value,
        }

    def _whitened(self, advantage: Tensor, mask: Tensor) -> Tensor:
        return F.masked_whiten(advantage, mask, process_group=self.process_group) if self.whiten else advantage

    def _ensure_values(self, tensordict: TensorDictBase) -> None:
        if tensordict.get(self.tensor_keys.value, None) is not None:
            return
        critic = self.value_network
        if critic is None:
            raise KeyError(f"TurnGAE has no critic and the batch has no {self.tensor_keys.value!r}: give it either.")
        rows = self._get(tensordict, "turn_ids").shape[:1]
        inputs = TensorDict({key: tensordict.get(key) for key in critic.in_keys}, batch_size=rows)
        out = TensorDict.cat([critic(chunk) for chunk in self._split_value_net_input(inputs)])
        for key in (self.tensor_keys.value, self.tensor_keys.bootstrap_value):
            if (figure := out.get(key, None)) is not None:
                tensordict.set(key, figure)

    def _bootstrap(self, tensordict: TensorDictBase) -> Tensor | None:
        needed = self._at_end(tensordict, "truncated") & ~self._at_end(tensordict, "terminated")
        if tensordict.get(self.tensor_keys.bootstrap_value, None) is None and not bool(needed.any()):
            return None
        hint = "It is the value of a row whose last turn was truncated; the critic writes it."
        return torch.where(needed, self._get(tensordict, "bootstrap_value", hint), 0.0)


class ReBN(TurnEstimator):
    """Return batch normalisation: the discounted return of each turn, normalised over all turns of the batch.

    No critic: after a truncated turn nothing follows (0). Reads ``("turn", reward / mask / terminated / truncated)``
    ``[B, T]`` and ``"turn_ids"`` ``[B, L]``; with ``kl_coeff`` also ``"ref_log_prob"`` and ``"old_log_prob"`` (or,
    without it, ``"sample_log_prob"``) ``[B, L]``. Writes ``"advantage"``, ``"value_target"`` ``[B, L]`` and
    ``("turn", advantage / value_target)`` ``[B, T]``; the target is the return, KL penalty included.

    Keyword Args:
        gamma: discount per turn. Default: 0.9.
        kl_coeff: takes ``kl_coeff * sum over the turn's tokens of (old - ref)`` from each turn's reward. Default: 0.0.
        ddof: the variance divides by ``count - ddof``. Default: 1.
        eps: added to the standard deviation. Default: 1e-8.
        process_group: take the statistics over all ranks of this group; ``None`` is this process only.

    Examples:
        >>> from tensordict import TensorDict
        >>> yes, no = torch.ones(2, 1, dtype=torch.bool), torch.zeros(2, 1, dtype=torch.bool)
        >>> turn = dict(reward=torch.tensor([[0.0], [2.0]]), mask=yes, terminated=yes, truncated=no)
        >>> rows = TensorDict({"turn": turn, "turn_ids": torch.tensor([[-1, 0], [-1, 0]])}, [2])
        >>> ReBN(ddof=0)(rows)["advantage"]
        tensor([[ 0., -1.],
                [ 0.,  1.]])
    """

    def __init__(
        self,
        *,
        gamma: float = 0.9,
        kl_coeff: float = 0.0,
        ddof: int = 1,
        eps: float = 1e-8,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        self.gamma = gamma
        self.kl_coeff = kl_coeff
        self.ddof = ddof
        self.eps = eps
        self.process_group = process_group

    @property
    def in_keys(self) -> list[NestedKey]:
        penalised = ("sample_log_prob", "ref_log_prob") if self.kl_coeff else ()
        return [*super().in_keys, *(getattr(self.tensor_keys, name) for name in penalised)]

    def estimate(self, tensordict: TensorDictBase) -> dict[str, Tensor]:
        reward, mask, turn_ids, acted = self._turns(tensordict)
        returns = F.turn_returns(reward, mask, self.gamma, acted=acted)
        penalty = self._penalty(tensordict, mask, turn_ids, acted) if self.kl_coeff else None
        advantage = F.rebn(returns, acted, self.ddof, self.eps, self.process_group, penalty=penalty)
        target = returns if penalty is None else returns + penalty
        return {
            "advantage": F.turn_to_token(advantage, turn_ids),
            "value_target": F.turn_to_token(target, turn_ids),
            "turn_advantage": advantage,
            "turn_value_target": target,
        }

    def _penalty(self, tensordict: TensorDictBase, mask: Tensor, turn_ids: Tensor, acted: Tensor) -> Tensor:
        """The discounted KL still to be paid, as a return ``[B, T]``."""
        hint = "Score the reference, or set kl_coeff=0."
        has_old = tensordict.get(self.tensor_keys.old_log_prob, None) is not None
        old = self._get(tensordict, "old_log_prob" if has_old else "sample_log_prob", hint)
        gap = old - self._get(tensordict, "ref_log_prob", hint)
        paid = -self.kl_coeff * F.turn_sum(gap, turn_ids, mask.shape[1])
        return F.turn_returns(paid, mask, self.gamma, acted=acted)


class GroupRelative(TurnEstimator):
    """The episode's return against those of its group; every action token of the row gets the same advantage.

    Reads ``("turn", reward / mask / terminated / truncated)`` ``[B, T]``, ``"turn_ids"`` ``[B, L]`` and ``"group_id"``
    ``[B]``. Writes ``"advantage"``, ``"value_target"`` ``[B, L]`` and ``("turn", advantage / value_target)``
    ``[B, T]``; the target is the episode's return.

    Keyword Args:
        gamma: discount per turn in the episode's return. Default: 1.0.
        baseline: ``"mean"`` of the group, or ``"leave_one_out"``: the mean of the others. Default: ``"mean"``.
        scale: divide by the group's standard deviation (``"std"``) or not (``"none"``). Default: ``"std"``.
        ddof: the variance divides by ``size - ddof``. Default: 1.
        eps: added to the standard deviation. Default: 1e-6.
        group_size: conversations in a group; ``None``: as many as in the largest group of the batch.
        partial: a group of another size is an ``"error"``, or ``"allow"``-ed. Default: ``"error"``.

    Examples:
        >>> from tensordict import TensorDict
        >>> yes, no = torch.ones(2, 1, dtype=torch.bool), torch.zeros(2, 1, dtype=torch.bool)
        >>> turn = dict(reward=torch.tensor([[0.0], [2.0]]), mask=yes, terminated=yes, truncated=no)
        >>> rows = TensorDict({"turn": turn, "turn_ids": torch.tensor([[-1, 0], [-1, 0]])}, [2])
        >>> GroupRelative(scale="none")(rows.set("group_id", torch.tensor([7, 7])))["advantage"]
        tensor([[ 0., -1.],
                [ 0.,  1.]])
    """

    _reads = (*TurnEstimator._reads, "group_id")

    def __init__(
        self,
        *,
        gamma: float = 1.0,
        baseline: F.Baseline = "mean",
        scale: F.Scale = "std",
        ddof: int = 1,
        eps: float = 1e-6,
        group_size: int | None = None,
        partial: F.Partial = "error",
    ) -> None:
        super().__init__()
        self.gamma = gamma
        self.options: dict[str, Any] = {
            "baseline": baseline,
            "scale": scale,
            "ddof": ddof,
            "eps": eps,
            "group_size": group_size,
            "partial": partial,
        }
        # A wrong option is an error now, not after the first rollout.
        F.group_relative(torch.empty(0), torch.empty(0, dtype=torch.int64), **self.options)

    def estimate(self, tensordict: TensorDictBase) -> dict[str, Tensor]:
        reward, mask, turn_ids, acted = self._turns(tensordict)
        score = F.episode_return(reward, mask, self.gamma)
        advantage = F.group_relative(score, self._get(tensordict, "group_id"), **self.options)
        turn_advantage = torch.where(acted, advantage.unsqueeze(1), 0.0)
        turn_target = torch.where(acted, score.unsqueeze(1), 0.0)
        return {
            "advantage": F.turn_to_token(turn_advantage, turn_ids),
            "value_target": F.turn_to_token(turn_target, turn_ids),
            "turn_advantage": turn_advantage,
            "turn_value_target": turn_target,
        }
