"""Credit from continuations of the states of an episode: :class:`TurnVine`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_llm import functional as F
from torchrl_llm.functional._common import all_sum
from torchrl_llm.objectives.estimators.base import TurnEstimator
from torchrl_llm.utils.options import Share


@dataclass(kw_only=True, eq=False, repr=False)
class TurnVine(TurnEstimator):
    """The value of a state is the mean return of episodes continued from it: VinePPO, with turns
    for its steps.

    Kazemnejad et al., 2024, "VinePPO: Refining Credit Assignment in RL Training of LLMs",
    arXiv:2410.01679: ``A_k = r_k + gamma * V(s_{k+1}) - V(s_k)``, where ``V`` is the mean over the
    continuations, and 0 after the last turn. There is no critic. The continuations of a state do
    not know what the episode did there, so that the expected gradient is the true one, for any
    number of them (:func:`~torchrl_llm.collectors.value_states`).

    A state may be left without continuations. Then the decision before it is credited with the
    rewards up to the next state that has some, or to the end. The decision in it gets its return to
    go, minus the mean of the other episodes' from the same turn on (of its group; of the whole
    batch, where groups are of one episode), which is unbiased too. Alone in a batch it gets 0.

    Reads ``("turn", sampled_value / reward / mask / terminated / truncated)`` ``[B, T]``, NaN in
    ``sampled_value`` where there is no value; ``"turn_ids"`` ``[B, L]`` and ``"group_id"`` ``[B]``.
    Writes ``"advantage"`` and ``"value_target"`` ``[B, L]`` and
    ``("turn", advantage / value_target)`` ``[B, T]``; the target is what the value was compared
    with. A KL in the reward (``kl_coeff``) is not continued: each turn pays its own and what
    follows in its episode.

    Keyword Args:
        **options: those of :class:`~torchrl_llm.objectives.TurnEstimator`, and the following; the
            values must have been sampled with the same ``gamma``.

    Examples:
        >>> from tensordict import TensorDict
        >>> yes, no = torch.tensor([[True, True]]), torch.tensor([[False, False]])
        >>> reward, value = torch.tensor([[0.0, 1.0]]), torch.tensor([[0.25, 0.75]])
        >>> turn = dict(reward=reward, mask=yes, terminated=~no, truncated=no, sampled_value=value)
        >>> rows = TensorDict({"turn": turn, "turn_ids": torch.tensor([[-1, 0, -1, 1]]), "group_id": torch.tensor([0])}, [1])
        >>> TurnVine()(rows)["turn", "advantage"]
        tensor([[0.5000, 0.2500]])
    """

    needs_branches = True
    _reads = (*TurnEstimator._reads, "sampled_value", "group_id")

    lmbda: Share = 0.0
    """As in :class:`~torchrl_llm.objectives.TurnGAE`: 0 takes what follows a turn from the
    continuations, 1 from the episode itself.

    No choice is biased.
    """

    @property
    def takes_kl(self) -> bool:
        """Always: continuations have none, so that it must not be in the rewards that their values
        are compared with."""
        return True

    def estimate(self, tensordict: TensorDictBase) -> dict[str, Tensor]:
        reward, mask, _, acted = self._turns(tensordict)
        value = self._get(tensordict, "sampled_value", "Collect with TurnCollector(branches=Branches(...)).")
        valued = acted & ~value.isnan()
        # A state without a value is folded into the decision before it, as a turn without a token
        # is.
        advantage, target = F.turn_gae(reward, value, mask, self.gamma, self.lmbda, acted=valued)
        returns = F.turn_returns(reward, mask, self.gamma)
        advantage = torch.where(valued, advantage, self._against_others(tensordict, returns, mask.any(1)))
        penalty = F.turn_returns(self._turn_penalty(tensordict), mask, self.gamma, acted=acted)
        written = {"turn_advantage": advantage, "turn_value_target": torch.where(valued, target, returns)}
        return {name: torch.where(acted, x + penalty, 0.0) for name, x in written.items()}

    def _against_others(self, tensordict: TensorDictBase, returns: Tensor, counted: Tensor) -> Tensor:
        group = self._get(tensordict, "group_id").unsqueeze(1)
        single = (group.unique(return_counts=True)[1] == 1).sum()
        if all_sum(single, self.process_group) == 0:
            return F.leave_one_out(returns, group, counted)[0]  # no process cuts a group
        return F.leave_one_out(returns, torch.zeros_like(group), counted, self.process_group)[0]
