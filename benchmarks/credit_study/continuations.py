"""What continuations of the states of drawn batches would have returned, for an
:class:`~torchrl_llm.testing.enumerable.EnumerableMDP`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from torchrl_llm import keys
from torchrl_llm.testing.enumerable import EnumerableMDP


@dataclass(frozen=True)
class Continuations:
    """The states of a game, and what follows each of them under a policy.

    A state is the task and the tokens before a turn that has some, as in
    :func:`~torchrl_llm.collectors.value_states`. The probabilities of what follows are exact, so
    that drawing an episode of the state is the same as continuing one from there.

    Args:
        state: ``[n, T]`` int64, the state before each turn of each episode; -1 where the turn has
            no token.
        share: ``[S, n]``, the probability of each episode in each state; 0 for those that do not
            pass it.
        to_go: ``[S, n]``, the return of each episode from the state on.
        turns: ``[S, n]``, the turns that the policy samples from the state on.
    """

    state: Tensor
    share: Tensor
    to_go: Tensor
    turns: Tensor

    @classmethod
    def of(cls, mdp: EnumerableMDP, actor: TensorDictModuleBase) -> Continuations:
        """Of all states of a game."""
        rows, probability = mdp.rows(), mdp.log_probability(actor).detach().exp()
        ids, tokens, task = (rows[key].tolist() for key in (keys.TURN_IDS, keys.TOKENS, keys.GROUP_ID))
        state = torch.full(rows[keys.TURN_MASK].shape, -1)
        number: dict[tuple, int] = {}
        for i, turn in ((i, turn) for i, spoken in enumerate(ids) for turn in set(spoken) - {-1}):
            start = ids[i].index(turn)
            before = task[i], *tokens[i][:start], *ids[i][:start]
            state[i, turn] = number.setdefault(before, len(number))
        passes = state == torch.arange(len(number)).view(-1, 1, 1)  # [S, n, T]
        share = passes.any(-1) * probability
        values = (rows[keys.TURN_REWARD].double(), (state >= 0).double())
        to_go, turns = (torch.einsum("snt,nt->sn", passes.double(), x.flip(1).cumsum(1).flip(1)) for x in values)
        return cls(state, share / share.sum(1, keepdim=True), to_go, turns)

    def sample(self, index: Tensor, group: int, count: int, generator: torch.Generator) -> Tensor:
        """Values of the states that batches pass: the mean return of continuations.

        Episodes of a group that pass the same state share its value, as in
        :func:`~torchrl_llm.collectors.value_states`.

        Args:
            index: ``[M, B]`` int64, the episodes of each batch, group by group.
            group: episodes in a group.
            count: continuations of a state.
            generator: of their noise.

        Returns:
            ``[M, B, T]``, NaN where a turn has no token.
        """
        groups = index.numel() // group
        means = [
            to_go[share.multinomial(groups * count, replacement=True, generator=generator)].view(groups, count).mean(1)
            for share, to_go in zip(self.share, self.to_go, strict=True)
        ]
        state = self.state[index.view(groups, -1)]
        value = torch.stack(means, 1).gather(1, state.clamp_min(0).flatten(1)).view_as(state)
        return value.where(state >= 0, torch.nan).view(*index.shape, -1)

    def cost(self, index: Tensor, group: int) -> tuple[float, float]:
        """Turns of a batch, and of one more continuation of each of its states: means over the
        batches.

        Args:
            index, group: see :meth:`sample`.
        """
        state = self.state[index.view(index.numel() // group, -1)].flatten(1)
        passed = torch.zeros(len(state), len(self.share) + 1).scatter_(1, state + 1, 1.0)[:, 1:]
        expected = (self.share * self.turns).sum(1)
        own = (state >= 0).sum()
        return float(own) / len(index), float((passed.double() @ expected).sum()) / len(index)
