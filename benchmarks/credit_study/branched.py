"""Trees against episodes that do not branch, on games of three turns of which the first, all, or the last decide."""

from collections.abc import Iterator
from functools import partial

import torch
from tensordict import TensorDict
from torch import Tensor

from credit_study.continuations import Continuations
from credit_study.gradients import PLAIN, credit_of, summary, token_scores
from torchrl_llm import keys
from torchrl_llm.modules import TokenScorer
from torchrl_llm.objectives import LLMGRPOLoss
from torchrl_llm.testing.enumerable import EnumerableMDP, Step, tiny_lm

ROWS, TURNS = 8, 3
"""Episodes of a group, and turns of each."""
DECIDE = {"the first": (1.0, 0.1, 0.1), "all alike": (0.5, 0.5, 0.5), "the last": (0.1, 0.1, 1.0)}
"""How much each turn counts."""
FORMS = {
    "8 episodes": (8, 0),
    "4 trees of 2, from turn 1": (4, 1),
    "4 trees of 2, from turn 2": (4, 2),
    "2 trees of 4, from turn 2": (2, 2),
}
"""Trees of a group, and the turn, counted from 0, before which they branch."""


def three_turns(counts: tuple[float, ...], task: int, said: tuple[tuple[int, ...], ...]) -> Step:
    """One letter a turn, and a reward at the end for all of them."""
    if len(said) < TURNS:
        return Step(0.0, (len(said) % 2,), 1)
    return Step(sum(count * (1.0, -0.5, 0.2)[letter] for count, (letter,) in zip(counts, said, strict=True)), (), None)


def group_rows(rows: TensorDict, index: Tensor, trees: int, turn: int) -> TensorDict:
    """Groups of ``index [M, ROWS]``, each of ``trees`` trees, as rows."""
    batch = rows.exclude(keys.EPISODE_ID)[index.flatten()]
    number = torch.arange(index.numel())
    batch[keys.GROUP_ID] = number // ROWS
    if turn:
        size = ROWS // trees
        batch[keys.TREE_ID] = number // size
        batch[keys.BRANCH_TURN] = torch.full_like(number, turn)
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
        loss = LLMGRPOLoss(actor, **PLAIN, credit="state", baseline="leave_one_out", scale="none")
        for name, (roots, turn) in FORMS.items():
            index = probability.expand(batches * roots, -1).multinomial(1, replacement=True, generator=generator)
            if turn:
                after = follows.share[follows.state[index[:, 0], turn]]
                more = after.multinomial(ROWS // roots - 1, replacement=True, generator=generator)
                index = torch.cat([index, more], 1)
            index = index.view(batches, ROWS)
            credit = credit_of(loss, group_rows(rows, index, roots, turn))
            gradients = torch.einsum("bl,blp->bp", credit, scores[index.flatten()]).view(batches, ROWS, -1).sum(1)
            found = summary(gradients, truth)
            sampled = ROWS * TURNS - (ROWS - roots) * turn
            noise = found["noise"] * sampled / (ROWS * TURNS)
            yield {"row": name, "column": column, "cosine": found["cosine_mean"], "noise": noise}
