"""Trees against episodes that do not branch, on games of three turns of which the first, all, or
the last decide."""

from collections.abc import Iterator
from functools import partial

import torch
from tensordict import TensorDict
from torch import Tensor

from credit_study.continuations import Continuations
from credit_study.gradients import PLAIN, credit_of, summary, token_scores
from torchrl_llm import functional as F
from torchrl_llm import keys
from torchrl_llm.modules import TokenScorer
from torchrl_llm.objectives import GroupRelative, LLMGRPOLoss
from torchrl_llm.testing.enumerable import EnumerableMDP, Step, tiny_lm

ROWS, TURNS = 8, 3
"""Episodes of a group, and turns of each."""
DECIDE = {"the first": (1.0, 0.1, 0.1), "all alike": (0.5, 0.5, 0.5), "the last": (0.1, 0.1, 1.0)}
"""How much each turn counts."""
FORMS: dict[str, tuple[int, list[int]]] = {
    "8 episodes": (8, []),
    "4 trees of 2, depth 1": (4, [1]),
    "4 trees of 2, depth 2": (4, [1, 2]),
    "4 trees of 2, before the last turn": (4, [2]),
    "2 trees of 4, before the last turn": (2, [2]),
}
"""Trees of a group, and the turns, counted from 0, before which they branch: each tree before one
of them."""


def three_turns(counts: tuple[float, ...], task: int, said: tuple[tuple[int, ...], ...]) -> Step:
    """One letter a turn, and a reward at the end for all of them."""
    if len(said) < TURNS:
        return Step(0.0, (len(said) % 2,), 1)
    return Step(sum(count * (1.0, -0.5, 0.2)[letter] for count, (letter,) in zip(counts, said, strict=True)), (), None)


def group_rows(rows: TensorDict, index: Tensor, turn: Tensor | None) -> TensorDict:
    """The trees of ``index [M, size]``, which branch before ``turn [M]``, as rows in groups;
    ``None``: single episodes."""
    batch = rows.exclude(keys.EPISODE_ID)[index.flatten()]
    number, size = torch.arange(index.numel()), index.shape[1]
    batch[keys.GROUP_ID] = number // ROWS
    if turn is not None:
        root, apart_from = number - number % size, turn.repeat_interleave(size)
        batch[keys.TURN_UNIT] = F.tree_units(number, root, apart_from, batch[keys.TURN_MASK].shape[1])
        batch[keys.ROW_WEIGHT] = torch.full(number.shape, 1 / size)
    return batch


def trees(_: str, policy: int, batches: int) -> Iterator[dict]:
    """Cosine, and the noise of as many groups as sample the turns of one that does not branch."""
    generator = torch.Generator().manual_seed(policy)
    for column, counts in DECIDE.items():
        mdp = EnumerableMDP(game=partial(three_turns, counts), tasks=1, max_turns=None)
        actor = TokenScorer(tiny_lm(policy))
        rows, truth, scores = mdp.rows(actor), mdp.policy_gradient(actor), token_scores(mdp, actor)
        follows, probability = Continuations.of(mdp, actor), mdp.log_probability(actor).detach().exp()
        loss = LLMGRPOLoss(
            actor, **PLAIN, estimator=GroupRelative(credit="state", baseline="leave_one_out", scale="none")
        )
        for name, (roots, turns) in FORMS.items():
            index, turn = probability.expand(batches * roots, -1).multinomial(1, True, generator=generator), None
            if turns:
                turn = torch.tensor(turns)[torch.randint(len(turns), (len(index),), generator=generator)]
                after = follows.share[follows.state[index[:, 0], turn]]
                index = torch.cat([index, after.multinomial(ROWS // roots - 1, True, generator=generator)], 1)
            credit = credit_of(loss, group_rows(rows, index, turn))
            gradients = torch.einsum("bl,blp->bp", credit, scores[index.flatten()]).view(batches, ROWS, -1).sum(1)
            found = summary(gradients, truth)
            sampled = ROWS * TURNS - (ROWS - roots) * (sum(turns) / len(turns) if turns else 0)
            noise = found["noise"] * sampled / (ROWS * TURNS)
            yield {"row": name, "column": column, "cosine": found["cosine_mean"], "noise": noise}
