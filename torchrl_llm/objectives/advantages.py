"""Turn-level credit as TorchRL value estimators: :class:`TurnGAE`, :class:`ReBN`, :class:`GroupRelative`, :class:`TurnVTrace`.

They read and write rows (:mod:`torchrl_llm.keys`, row view): one conversation a row, turns along ``T``. What they
compute is in :mod:`torchrl_llm.objectives.functional`; here are only keys, options and the checks on what comes in. A
batch is estimated whole and once: its statistics must cover it all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

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
from torchrl_llm.options import Checked, Count, Idle, Natural, NonNegative, Positive, Share, options_of

Granularity = Literal["turn", "token", "auto"]
Credit = Literal["episode", "turn"]
Population = Literal["batch", "none"]


class TurnEstimator(Checked, ValueEstimatorBase):
    """Base class of the estimators: the keys, and what every row must satisfy.

    A subclass implements :meth:`estimate`; what is said below holds for it without more. Every row must be a conversation played
    to its end: its last turn terminated or truncated. Where the batch has ``"episode_id"``, an episode must be in it once; an
    estimator that compares groups also refuses a ``"group_id"`` that conversations of different tasks share.

    Args:
        value_network: the critic, where the estimator has one.

    Keyword Args:
        kl_coeff: takes ``kl_coeff * (old - ref)``, the KL to the reference, from the reward of every action token, summed
            over the tokens of a turn at turn granularity. It is what ``kl_in="reward"`` of the losses sets; then
            ``"ref_log_prob"`` and ``"old_log_prob"`` (or, without it, ``"sample_log_prob"``) ``[B, L]`` are read too.
            Default: 0.0.
        keep_discount: multiply the advantage of each step by ``gamma`` to the number of steps before it, as the gradient
            of the discounted return has it. Practice drops the factor: later turns then count as much as early ones, and
            the expected gradient is that of no objective (Thomas, 2014, "Bias in natural actor-critic algorithms"; Nota
            and Thomas, 2020, arXiv:1906.07073). Without effect at ``gamma = 1``. Default: ``False``.
        clip_advantage: bound advantages, normalised ones too, to this absolute value; ``None`` sets no bound. Default:
            ``None``.
        process_group: a batch is what all ranks of this group hold, where :meth:`estimate` takes statistics over it; ``None``:
            what this process holds. A trainer sets it. Default: ``None``.
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

    idle: ClassVar[tuple[Idle, ...]] = (Idle(("keep_discount",), {"gamma": (1,)}, "discount (gamma below 1)"),)

    _reads: tuple[str, ...] = ("reward", "mask", "terminated", "truncated", "turn_ids")
    _writes: tuple[str, ...] = ("advantage", "value_target", "turn_advantage", "turn_value_target")

    takes_kl: bool = False
    """Whether :meth:`estimate` takes the KL from the rewards itself."""

    corrects_sampler: bool = False
    """Whether the advantage already holds the ratio of the present policy to the one that played."""

    gamma: float

    def __init__(
        self,
        value_network: TensorDictModuleBase | None = None,
        *,
        kl_coeff: NonNegative = 0.0,
        keep_discount: bool = False,
        clip_advantage: Positive | None = None,
        process_group: dist.ProcessGroup | None = None,
        **options: Any,
    ) -> None:
        super().__init__(value_network=value_network, **options)
        self.kl_coeff = kl_coeff
        self.keep_discount = keep_discount
        self.clip_advantage = clip_advantage
        self.process_group = process_group

    @classmethod
    def for_loss(cls, loss_module: LossModule, **hyperparams: Any) -> TurnEstimator:
        """Build an estimator from the options that ``loss_module`` was given; ``hyperparams`` win over them."""
        given: dict[str, Any] = {"value_network": getattr(loss_module, "critic_network", None)}
        given |= getattr(loss_module, "estimator_options", {})
        # An option that the loss leaves None has the default of the estimator's own class.
        known = options_of(cls)
        return cls(
            **({name: value for name, value in given.items() if name in known and value is not None} | hyperparams)
        )

    @property
    def in_keys(self) -> list[NestedKey]:
        penalised = ("sample_log_prob", "ref_log_prob") if self.kl_coeff else ()
        return [getattr(self.tensor_keys, name) for name in (*self._reads, *penalised)]

    @property
    def out_keys(self) -> list[NestedKey]:
        return [getattr(self.tensor_keys, name) for name in self._writes]

    def estimate(self, tensordict: TensorDictBase) -> dict[str, Tensor]:
        """The figures to write, under the names of ``_AcceptedKeys``.

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
        if not self.takes_kl and (penalty := self._turn_penalty(tensordict)) is not None:
            rows = tensordict.copy().set(self.tensor_keys.reward, self._get(tensordict, "reward") + penalty)
        for name, figure in self._finished(tensordict, self.estimate(rows)).items():
            tensordict.set(getattr(self.tensor_keys, name), figure)
        return tensordict

    def _finished(self, tensordict: TensorDictBase, figures: dict[str, Tensor]) -> dict[str, Tensor]:
        """Clip and discount the advantages, and give every token its turn's."""
        turn_ids, mask = self._get(tensordict, "turn_ids"), self._get(tensordict, "mask")
        if "advantage" in figures:
            return figures | {"advantage": self._weighed(figures["advantage"], turn_ids >= 0)}
        advantage = self._weighed(figures["turn_advantage"], mask)
        return figures | {
            "turn_advantage": advantage,
            "advantage": F.turn_to_token(advantage, turn_ids),
            "value_target": F.turn_to_token(figures["turn_value_target"], turn_ids),
        }

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

    def _old_log_prob(self, tensordict: TensorDictBase, hint: str) -> Tensor:
        has_old = tensordict.get(self.tensor_keys.old_log_prob, None) is not None
        return self._get(tensordict, "old_log_prob" if has_old else "sample_log_prob", hint)

    def _kl_penalty(self, tensordict: TensorDictBase) -> Tensor | None:
        """What the KL takes from each action token's reward, ``[B, L]``, 0 elsewhere; None without a KL."""
        if not self.kl_coeff:
            return None
        hint = "Score the reference, or set kl_coeff=0."
        gap = self._old_log_prob(tensordict, hint) - self._get(tensordict, "ref_log_prob", hint)
        return torch.where(self._get(tensordict, "turn_ids") >= 0, -self.kl_coeff * gap, 0.0)

    def _turn_penalty(self, tensordict: TensorDictBase) -> Tensor | None:
        """:meth:`_kl_penalty`, summed over each turn's tokens: ``[B, T]``."""
        penalty = self._kl_penalty(tensordict)
        if penalty is None:
            return None
        return F.turn_sum(penalty, self._get(tensordict, "turn_ids"), self._get(tensordict, "mask").shape[1])

    def _weighed(self, advantage: Tensor, played: Tensor) -> Tensor:
        """The advantage of each step, clipped and discounted as asked; ``played`` marks the steps that took time."""
        if self.clip_advantage is not None:
            advantage = advantage.clamp(-self.clip_advantage, self.clip_advantage)
        if self.keep_discount:
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
                "truncated. Credit needs conversations that were played to their end: collect whole episodes."
            )


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
        names = ("value", "bootstrap_value")
        if tensordict.get(self.tensor_keys.value, None) is not None:
            return self._figures(tensordict, names)
        critic = self.value_network
        if critic is None:
            raise KeyError(
                f"{type(self).__name__} has no critic and the batch has no {self.tensor_keys.value!r}: give it either."
            )
        rows = self._get(tensordict, "turn_ids").shape[:1]
        inputs = TensorDict({key: tensordict.get(key) for key in critic.in_keys}, batch_size=rows)
        out = TensorDict.cat([critic(chunk) for chunk in self._split_value_net_input(inputs)])
        return self._figures(out, names)

    def _figures(self, tensordict: TensorDictBase, names: Sequence[str]) -> dict[str, Tensor]:
        found = {name: tensordict.get(getattr(self.tensor_keys, name), None) for name in names}
        return {name: figure for name, figure in found.items() if figure is not None}

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


class TurnGAE(CriticEstimator):
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
        whiten: normalise advantages to mean 0 and variance 1 over the steps of the batch (see ``process_group``). Default:
            ``True``.
        value_chunk_size: run the critic on this many rows at a time. Default: all.
        kl_coeff, keep_discount, clip_advantage, process_group: see :class:`TurnEstimator`.

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

    idle = (
        *TurnEstimator.idle,
        Idle(("keep_discount",), {"granularity": ("token",), "gamma": (None,)}, "discount (gamma below 1)"),
        Idle(("single_turn",), {"granularity": ("turn", "token")}, 'set granularity to "auto"'),
    )

    def __init__(
        self,
        value_network: TensorDictModuleBase | None = None,
        *,
        gamma: Share | None = None,
        lmbda: Share = 0.95,
        granularity: Granularity = "turn",
        single_turn: bool | None = None,
        value_reduction: F.ValueReduction = "first",
        whiten: bool = True,
        **shared: Any,
    ) -> None:
        super().__init__(value_network, **shared)
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

    def estimate(self, tensordict: TensorDictBase) -> dict[str, Tensor]:
        reward, mask, turn_ids, acted = self._turns(tensordict)
        values = self._values(tensordict)
        bootstrap, num_turns = self._bootstrap(tensordict, values), mask.shape[1]
        turn_value = F.turn_reduce(values["value"], turn_ids, num_turns, self.value_reduction)
        figures = {**values, "turn_value": turn_value}
        if self.granularity == "turn":
            advantage, target = F.turn_gae(reward, turn_value, mask, self.gamma, self.lmbda, bootstrap, acted=acted)
            return figures | {"turn_advantage": self._whitened(advantage, acted), "turn_value_target": target}
        advantage, target = F.token_gae(
            reward,
            values["value"],
            turn_ids,
            mask,
            self.gamma,
            self.lmbda,
            bootstrap,
            penalty=self._kl_penalty(tensordict),
        )
        advantage = self._whitened(advantage, turn_ids >= 0)
        figures |= {"advantage": advantage, "value_target": target}
        return figures | {
            f"turn_{name}": F.turn_reduce(figures[name], turn_ids, num_turns, self.value_reduction)
            for name in ("advantage", "value_target")
        }

    @property
    def takes_kl(self) -> bool:  # type: ignore[override]
        """At token granularity: the KL belongs to the tokens."""
        return self.granularity == "token"

    def _whitened(self, advantage: Tensor, mask: Tensor) -> Tensor:
        return F.masked_whiten(advantage, mask, process_group=self.process_group) if self.whiten else advantage


class ReBN(TurnEstimator):
    """Return batch normalisation: the discounted return of each turn, normalised over all turns of the batch.

    No critic: after a truncated turn nothing follows (0). Reads ``("turn", reward / mask / terminated / truncated)``
    ``[B, T]`` and ``"turn_ids"`` ``[B, L]``; with ``kl_coeff`` also ``"ref_log_prob"`` and ``"old_log_prob"`` (or,
    without it, ``"sample_log_prob"``) ``[B, L]``. Writes ``"advantage"``, ``"value_target"`` ``[B, L]`` and
    ``("turn", advantage / value_target)`` ``[B, T]``; the target is the return, KL penalty included.

    Keyword Args:
        gamma: discount per turn. Default: 0.9.
        ddof: the variance divides by ``count - ddof``. Default: 1.
        eps: added to the standard deviation. Default: 1e-8.
        normalise_over: ``"batch"``: all turns of the batch; ``"none"``: the returns as they are (REINFORCE, Williams, 1992),
            which neither ``ddof`` nor ``eps`` touch. Default: ``"batch"``.
        kl_coeff, keep_discount, clip_advantage, process_group: see :class:`TurnEstimator`.

    Examples:
        >>> from tensordict import TensorDict
        >>> yes, no = torch.ones(2, 1, dtype=torch.bool), torch.zeros(2, 1, dtype=torch.bool)
        >>> turn = dict(reward=torch.tensor([[0.0], [2.0]]), mask=yes, terminated=yes, truncated=no)
        >>> rows = TensorDict({"turn": turn, "turn_ids": torch.tensor([[-1, 0], [-1, 0]])}, [2])
        >>> ReBN(ddof=0)(rows)["advantage"]
        tensor([[ 0., -1.],
                [ 0.,  1.]])
    """

    takes_kl = True

    def __init__(
        self,
        *,
        gamma: Share = 0.9,
        ddof: Natural = 1,
        eps: NonNegative = 1e-8,
        normalise_over: Population = "batch",
        **shared: Any,
    ) -> None:
        super().__init__(**shared)
        self.gamma = gamma
        self.normalise_over = normalise_over
        self.ddof = ddof
        self.eps = eps

    def estimate(self, tensordict: TensorDictBase) -> dict[str, Tensor]:
        reward, mask, _, acted = self._turns(tensordict)
        returns = F.turn_returns(reward, mask, self.gamma, acted=acted)
        penalty = self._turn_penalty(tensordict)
        penalty = None if penalty is None else F.turn_returns(penalty, mask, self.gamma, acted=acted)
        target = returns if penalty is None else returns + penalty
        advantage = target
        if self.normalise_over == "batch":
            advantage = F.rebn(returns, acted, self.ddof, self.eps, self.process_group, penalty=penalty)
        return {"turn_advantage": advantage, "turn_value_target": target}


class GroupRelative(TurnEstimator):
    """The return against those of the same group: of the whole episode, or from each turn on.

    Reads ``("turn", reward / mask / terminated / truncated)`` ``[B, T]``, ``"turn_ids"`` ``[B, L]`` and ``"group_id"``
    ``[B]``. Writes ``"advantage"``, ``"value_target"`` ``[B, L]`` and ``("turn", advantage / value_target)``
    ``[B, T]``; the target is the return that was compared.

    Keyword Args:
        gamma: discount per turn. Default: 1.0.
        credit: ``"episode"`` compares the returns of whole episodes, and every turn of a row gets the same advantage;
            ``"turn"`` compares, turn by turn, the returns from there on, so that a turn is not credited with what came
            before it. A member whose episode is over by then counts with 0. Default: ``"episode"``.
        baseline: ``"mean"`` of the group, or ``"leave_one_out"``: the mean of the others. Default: ``"mean"``.
        scale: divide by the group's standard deviation (``"std"``) or not (``"none"``). Default: ``"std"``.
        ddof: the variance divides by ``size - ddof``. Default: 1.
        eps: added to the standard deviation. Default: 1e-6.
        group_size: conversations in a group; ``None``: as many as in the largest group of the batch.
        partial: a group of another size is an ``"error"``, or ``"allow"``-ed. Default: ``"error"``.
        kl_coeff, keep_discount, clip_advantage, process_group: see :class:`TurnEstimator`; ``keep_discount`` is for ``credit="turn"``.

    Examples:
        >>> from tensordict import TensorDict
        >>> yes, no = torch.ones(2, 1, dtype=torch.bool), torch.zeros(2, 1, dtype=torch.bool)
        >>> turn = dict(reward=torch.tensor([[0.0], [2.0]]), mask=yes, terminated=yes, truncated=no)
        >>> rows = TensorDict({"turn": turn, "turn_ids": torch.tensor([[-1, 0], [-1, 0]])}, [2])
        >>> GroupRelative(scale="none")(rows.set("group_id", torch.tensor([7, 7])))["advantage"]
        tensor([[ 0., -1.],
                [ 0.,  1.]])
    """

    takes_kl = True

    _reads = (*TurnEstimator._reads, "group_id")

    def __init__(
        self,
        *,
        gamma: Share = 1.0,
        credit: Credit = "episode",
        baseline: F.Baseline = "mean",
        scale: F.Scale = "std",
        ddof: Natural = 1,
        eps: NonNegative = 1e-6,
        group_size: Count | None = None,
        partial: F.Partial = "error",
        **shared: Any,
    ) -> None:
        super().__init__(**shared)
        if self.keep_discount and credit == "episode":
            raise ValueError(
                'credit="episode" is discounted from the first turn on; keep_discount is for credit="turn".'
            )
        self.gamma = gamma
        self.credit = credit
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
        reward, mask, _, acted = self._turns(tensordict)
        penalty = self._turn_penalty(tensordict)
        score = self._score(reward, mask)
        paid = None if penalty is None else self._score(penalty, mask)
        group_id = self._get(tensordict, "group_id")
        advantage = F.group_relative(score, group_id, **self.options, penalty=paid)
        target = score if paid is None else score + paid
        if self.credit == "episode":
            advantage, target = (x.unsqueeze(1).expand_as(mask) for x in (advantage, target))
        return {
            "turn_advantage": torch.where(acted, advantage, 0.0),
            "turn_value_target": torch.where(acted, target, 0.0),
        }

    def _score(self, reward: Tensor, mask: Tensor) -> Tensor:
        compared = F.episode_return if self.credit == "episode" else F.turn_returns
        return compared(reward, mask, self.gamma)


class TurnVTrace(CriticEstimator):
    """V-trace over turns, for conversations that an older policy played (Espeholt et al., 2018, arXiv:1802.01561).

    The ratio of a turn is that of its probabilities under the model at the start of the update (``"old_log_prob"``, which
    must have been scored) and under the policy that sampled (``"sample_log_prob"``). The advantage holds it already, so
    the losses take this estimator with ``clipping="none"`` and without a sampler correction only.

    Reads and writes what :class:`TurnGAE` does at turn granularity, and reads those two.

    Args:
        value_network: as in :class:`TurnGAE`.

    Keyword Args:
        gamma: discount per turn. Default: 0.99.
        rho_clip: cap of the ratio in the advantage and in the target's temporal differences. Default: 1.0.
        c_clip: cap of the ratio on the way back. Default: 1.0.
        value_chunk_size: run the critic on this many rows at a time. Default: all.
        kl_coeff, keep_discount, clip_advantage, process_group: see :class:`TurnEstimator`.

    Examples:
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

    _reads = (*TurnEstimator._reads, "old_log_prob", "sample_log_prob")

    def __init__(
        self,
        value_network: TensorDictModuleBase | None = None,
        *,
        gamma: Share | None = None,
        rho_clip: NonNegative = 1.0,
        c_clip: NonNegative = 1.0,
        **shared: Any,
    ) -> None:
        super().__init__(value_network, **shared)
        self.gamma = 0.99 if gamma is None else gamma
        self.rho_clip = rho_clip
        self.c_clip = c_clip

    def estimate(self, tensordict: TensorDictBase) -> dict[str, Tensor]:
        reward, mask, turn_ids, acted = self._turns(tensordict)
        values = self._values(tensordict)
        value = F.turn_first(values["value"], turn_ids, mask.shape[1])
        old = self._get(tensordict, "old_log_prob", "Score the model at the start of the update.")
        log_rho = F.turn_sum(old - self._get(tensordict, "sample_log_prob"), turn_ids, mask.shape[1])
        bootstrap, clips = self._bootstrap(tensordict, values), {"rho_clip": self.rho_clip, "c_clip": self.c_clip}
        advantage, target = F.turn_vtrace(reward, value, log_rho, mask, self.gamma, bootstrap, acted=acted, **clips)
        return {**values, "turn_value": value, "turn_advantage": advantage, "turn_value_target": target}
