"""The estimator that compares the returns of a group: :class:`GroupRelative`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from torchrl_llm import functional as F
from torchrl_llm.keys import NestedKey
from torchrl_llm.objectives.estimators.returns import ReturnEstimator
from torchrl_llm.objectives.estimators.rows import extra_of, numbers_of
from torchrl_llm.objectives.options import ReturnOptions
from torchrl_llm.utils.options import Count, Finite, Idle, Natural, NonNegative, check_value

Credit = Literal["episode", "turn", "state"]


_STATES = "_states"
"""Where :class:`GroupRelative` keeps the states of the rows that it compares, in a copy of them."""


STATE_IDLE = Idle(("state", "fallback"), {"credit": ("episode", "turn")}, 'set credit to "state"')
"""What only counts where states are compared."""


POTENTIAL_IDLE = Idle(("potential",), {"credit": ("episode",)}, 'set credit to "turn" or "state"')
"""Over a whole episode shaping adds up to the potential of its first state, which a group
shares."""


@dataclass(kw_only=True, eq=False, repr=False)
class GroupOptions(ReturnOptions):
    """Options of :class:`GroupRelative`: which returns a group compares, and how."""

    idle = (*ReturnOptions.idle, STATE_IDLE, POTENTIAL_IDLE)

    credit: Credit = "episode"
    """Compare the returns of the "episode", those from each "turn" on, or those from each "state"
    on.

    With ``"episode"`` every turn of a row gets the same advantage. With ``"turn"`` it is not
    credited with what came before it, and an episode that has ended by then counts with 0. With
    ``"state"`` it is compared with other episodes of the group that were in the same state, at
    whichever turn; this needs ``baseline="leave_one_out", scale="none"``, for with either of the
    others it is biased.
    """
    state: str = "prefix"
    """With credit="state", what turns share: the "prefix", the "observation", or the text of an
    extra, by its name.

    The prefix are all tokens before the turn, the observation those since the last action token.
    """
    fallback: F.Fallback = "turn"
    """A turn whose state no other episode was in is compared with the others at the same "turn", or
    keeps its "return"."""
    baseline: F.Baseline = "mean"
    """The group's "mean", or "leave_one_out" (with scale="none").

    The latter is the mean of the others.
    """
    scale: F.Scale = "std"
    """Divide by the group's "std", that of the "batch", the group's "mean" (MaxRL), or "none".

    MaxRL (arXiv:2602.02710) is for episode returns that are not negative.
    """
    components: dict[str, float] | None = None
    """Further rewards, extras with their weights, each compared by itself and added: {format:
    0.5}.

    With the options here, so that one with a large spread does not drown the others (GDPO, Liu et
    al., 2026, arXiv:2601.05242, eqs. 4, 5). The reward itself has the weight 1; pay the main one as
    the reward and declare the others. A KL penalty is compared by itself, too, without scale.
    """
    whiten: bool = False
    """Whiten the advantages over the batch.

    Over what was compared, episodes or, with ``credit="turn"``, turns: the last step of GDPO, and
    with ``scale="none"`` REINFORCE++ with its baseline (Hu et al., 2025, arXiv:2501.03262).
    """


@dataclass(kw_only=True, eq=False, repr=False)
class GroupRelative(GroupOptions, ReturnEstimator):
    """Group-relative returns, of the whole episode, from each turn on, or from each state on.

    Reads ``("turn", reward / mask / terminated / truncated)`` ``[B, T]``, ``"turn_ids"`` ``[B, L]``
    and ``"group_id"`` ``[B]``; for states also ``"tokens"`` ``[B, L]`` or
    ``("turn", "extra", state)`` ``[B, T]``. Writes ``"advantage"``, ``"value_target"`` ``[B, L]``
    and ``("turn", advantage / value_target)`` ``[B, T]``; the target is the return of the reward
    that was compared. With states also ``("turn", num_compared)`` ``[B, T]``: how many turns of
    other episodes each was compared with.

    Rows that count as one (``("turn", "unit")`` ``[B, T]``, which such rows have) need
    ``baseline="leave_one_out"`` and ``scale="none"``: a turn is compared with rows of other units
    than its own.

    Keyword Args:
        **options: of :class:`GroupOptions`, and those of
            :class:`~torchrl_llm.objectives.ReturnEstimator`; ``potential`` and
            ``discounted_objective`` are for ``credit="turn"`` and ``"state"``.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> yes, no = torch.ones(2, 1, dtype=torch.bool), torch.zeros(2, 1, dtype=torch.bool)
        >>> turn = dict(reward=torch.tensor([[0.0], [2.0]]), mask=yes, terminated=yes, truncated=no)
        >>> rows = TensorDict({"turn": turn, "turn_ids": torch.tensor([[-1, 0], [-1, 0]])}, [2])
        >>> GroupRelative(scale="none")(rows.set("group_id", torch.tensor([7, 7])))["advantage"]
        tensor([[ 0., -1.],
                [ 0.,  1.]])
    """

    respects_units = True
    _reads = (*ReturnEstimator._reads, "group_id")

    ddof: Natural = 1
    """The variance divides by ``size - ddof``."""
    eps: NonNegative = 1e-6
    """Added to the standard deviation."""
    group_size: Count | None = None
    """Episodes in a group; None: as many as in the largest group of the batch."""
    partial: F.Partial = "error"
    """A group of another size is an "error", or "allow"-ed."""

    def __post_init__(self, value_network: TensorDictModuleBase | None) -> None:
        super().__post_init__(value_network)
        self._check_options()

    def _check_options(self) -> None:
        if self.discounted_objective and self.credit == "episode":
            raise ValueError(
                'credit="episode" is discounted from the first turn on; discounted_objective is for credit="turn" '
                'and "state".'
            )
        if self.credit == "state" and (self.baseline, self.scale) != ("leave_one_out", "none"):
            raise ValueError(
                f'credit="state" with baseline="{self.baseline}" and scale="{self.scale}" is biased; give '
                'baseline="leave_one_out" and scale="none".'
            )
        if self.whiten and self.baseline == "leave_one_out":
            raise ValueError(
                'baseline="leave_one_out" with whiten=True is biased; leave whiten out, or use baseline="mean".'
            )
        if self.scale == "mean" and self.credit != "episode":
            raise ValueError(
                f'scale="mean" is for the outcomes of episodes; give credit="episode", not {self.credit!r}.'
            )
        for name, weight in (self.components or {}).items():
            check_value(f"The weight of components[{name!r}]", weight, Finite)
        # A wrong option is an error now, not after the first rollout.
        F.group_relative(torch.empty(0), torch.empty(0, dtype=torch.int64), **self.options)

    @property
    def needs_nonnegative_rewards(self) -> str | None:
        """``scale="mean"``."""
        return 'scale="mean"' if self.scale == "mean" else None

    @property
    def out_keys(self) -> list[NestedKey]:
        return super().out_keys + ([self.tensor_keys.turn_num_compared] if self.credit == "state" else [])

    def estimate(self, tensordict: TensorDictBase) -> dict[str, Tensor]:
        if self.credit != "state":
            return super().estimate(tensordict)
        states, units = self.states(tensordict), self._units(tensordict)
        # In a shallow copy, so that they are found once: it takes longer than all the rest.
        estimated = super().estimate(tensordict.copy().set(_STATES, states))
        *_, acted = self._turns(tensordict)
        estimated["turn_num_compared"] = F.num_compared(states, self._get(tensordict, "group_id"), acted, units)
        return estimated

    def _units(self, tensordict: TensorDictBase) -> Tensor | None:
        """Which rows count as one, turn by turn, ``[B, T]``; ``None``: every row is a unit."""
        unit = tensordict.get(self.tensor_keys.unit, None)
        if unit is None:
            return None
        first = torch.stack([self._get(tensordict, "group_id"), unit[:, 0]], 1).unique(dim=0)[:, 0]
        if bool((first.unique(return_counts=True)[1] < 2).any()):
            raise ValueError(
                "A group is one unit, such as a single tree, and has nothing to be compared with: play at least two a task."
            )
        return unit

    @property
    def options(self) -> dict[str, Any]:
        """The options of :func:`~torchrl_llm.functional.group_relative`."""
        names = ("baseline", "scale", "ddof", "eps", "group_size", "partial")
        return {name: getattr(self, name) for name in names}

    def score(self, reward: Tensor, mask: Tensor, acted: Tensor) -> Tensor:
        if self.credit == "episode":
            return F.episode_return(reward, mask, self.gamma)
        if self.credit == "state":
            return F.turn_returns(reward, mask, self.gamma, acted=acted)
        # Without acted: where an episode has a turn without a response, the others are compared
        # with its return there, and not with 0.
        return F.turn_returns(reward, mask, self.gamma)

    def compare(self, tensordict: TensorDictBase, score: Tensor, penalty: Tensor, acted: Tensor) -> Tensor:
        group_id, units = self._get(tensordict, "group_id"), self._units(tensordict)
        scores = [(1.0, score), *self._component_scores(tensordict, acted)]
        if self.credit == "state":  # linear, so that the sum may be compared as well
            return F.state_relative(
                sum((weight * each for weight, each in scores), start=penalty),
                tensordict[_STATES],
                group_id,
                acted,
                self.fallback,
                unit=units,
                group_size=self.group_size,
                partial=self.partial,
            )
        # Rows that only keep ranks in step have no turn, and are not episodes of the batch.
        mask = acted if score.ndim == 2 else self._get(tensordict, "mask").any(1)
        # All of an episode has one advantage: its first unit is left out.
        unit = units if units is None or score.ndim == 2 else units[:, 0]

        def relative(each: Tensor, penalty: Tensor | None = None) -> Tensor:
            return F.group_relative(
                each, group_id, **self.options, penalty=penalty, mask=mask, unit=unit, process_group=self.process_group
            )

        if not self.components and not self.whiten:
            return relative(score, penalty=penalty)
        plain = sum((weight * relative(each) for weight, each in scores), start=torch.zeros_like(score))
        if self.components:
            # Scores that do not differ leave the penalty: centered, and without scale.
            total = plain + relative(torch.zeros_like(score), penalty=penalty)
        else:
            total = relative(score, penalty=penalty)
        if not self.whiten:
            return total
        compared = acted.any(1) if score.ndim == 1 else mask
        return F.standardize(plain, compared, self.ddof, self.eps, self.process_group, penalty=total - plain)

    def columns_read(self) -> Iterator[tuple[str, str, type]]:
        yield from super().columns_read()
        for name in self.components or {}:
            yield "components", name, float
        own = type(self).states is not GroupRelative.states  # which may read what it likes
        if self.credit == "state" and self.state not in ("prefix", "observation") and not own:
            yield "state", self.state, str

    def _component_scores(self, tensordict: TensorDictBase, acted: Tensor) -> list[tuple[float, Tensor]]:
        """The weight of each of ``components``, and what is compared of it, in the shape of the
        score."""
        mask, components = self._get(tensordict, "mask"), (self.components or {}).items()
        rewards = ((weight, numbers_of(tensordict, "components", name)) for name, weight in components)
        return [(weight, self.score(reward, mask, acted)) for weight, reward in rewards]

    def states(self, tensordict: TensorDictBase) -> Tensor:
        """The state before each turn, as a number ``[B, T]`` int64 that is equal for turns in the
        same state.

        Raises:
            KeyError: the rows have no extra of that name.
            TypeError: the extra is a number.
        """
        num_turns = self._get(tensordict, "mask").shape[1]
        numbered = {"prefix": F.prefix_states, "observation": F.observation_states}.get(self.state)
        if numbered is not None:
            return numbered(self._get(tensordict, "tokens"), self._get(tensordict, "turn_ids"), num_turns)
        instead = 'give one that the environment declares as text, "prefix" or "observation"'
        return extra_of(tensordict, self.state, str, option="state", instead=instead)
