"""Games whose episodes can all be listed, and a policy, a reference and a critic for them: what the
exact gradients are of."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable

import torch
from made_losses import made
from tensordict import TensorDict
from torch import Tensor, nn
from torch.nn.functional import pad

from torchrl_llm import functional as F
from torchrl_llm import keys
from torchrl_llm.modules import TokenScorer, TurnCritic
from torchrl_llm.objectives import (
    LLMGRPOLoss,
    LLMPPOLoss,
    LLMReinforceLoss,
    TurnPolicyLoss,
    TurnVine,
    total,
    write_loss_weights,
)
from torchrl_llm.testing.enumerable import EnumerableMDP, Step, flat_gradient, tiny_lm

PLAIN = {"weighting": "constant", "weight_constant": 1.0}
KL = 0.3

CUT = EnumerableMDP()
"""28 conversations, truncated after two turns."""
WHOLE = CUT.uncut
"""The same game to its end: 44 conversations."""
ONE = EnumerableMDP(tasks=1)
"""Its first task alone: 9 conversations."""


def spell(task: int, said: tuple[tuple[int, ...], ...]) -> Step:
    """One turn of up to four letters, the first of which decides most."""
    if not said:
        return Step(0.0, (task,), 4)
    worth = sum((1.0, -0.4, 0.2)[token] / (1 + place) ** 2 for place, token in enumerate(said[0]))
    return Step(worth, (), None)


LONG = EnumerableMDP(spell, tasks=1)
"""31 conversations of one turn."""


def walk(task: int, said: tuple[tuple[int, ...], ...]) -> Step:
    """Steps of one letter: 0 continues, 1 and 2 stay at different costs; so states are met again,
    at other turns too."""
    place = sum(each == (0,) for each in said)
    reward = (0.5 + place, -0.5, 0.25)[said[-1][0]] if said else 0.0
    return Step(reward, (place,), 1 if len(said) < 3 else None)


WALK = EnumerableMDP(walk, tasks=1)
"""9 conversations of two turns."""


def climb(task: int, said: tuple[tuple[int, ...], ...]) -> Step:
    """Up to three steps of one letter, as long as it is "a": most episodes end early."""
    reward = (0.5 * len(said) - 0.75, 1.0 - len(said), 0.25)[said[-1][0]] if said else 0.0
    on = len(said) < 3 and set(said) <= {(0,)}
    return Step(reward, (len(said) % 2,) if on else (), 1 if on else None)


CLIMB = EnumerableMDP(climb, tasks=1, max_turns=None)
"""7 conversations of one to three turns."""


def pair(task: int, said: tuple[tuple[int, ...], ...]) -> Step:
    """Two letters, one a turn: won, for a reward of 1 at the end, by "a" and then not "." (task 0),
    or by "bb" (task 1)."""
    won = said == ((1,), (1,)) if task else said[:1] == ((0,),) and said[1:] != ((2,),)
    return Step(float(len(said) == 2 and won), (task,), 1 if len(said) < 2 else None)


PAIR = EnumerableMDP(pair)
"""18 conversations of two turns, 2 and 1 of them won."""


class Study:
    """A policy, a reference, a critic that knows nothing of the game, and the losses with the bias
    options off.

    Args:
        seed: of the policy; reference and critic are always the same.
    """

    def __init__(self, seed: int) -> None:
        self.actor = TokenScorer(tiny_lm(seed), entropy=True)
        self.reference = TokenScorer(tiny_lm(1001))
        self.critic = TurnCritic(tiny_lm(1002))
        nn.init.normal_(self.critic.value_head.weight, generator=torch.Generator().manual_seed(0))

    def reinforce(self, kind: type[LLMReinforceLoss] = LLMReinforceLoss, **options) -> LLMReinforceLoss:
        default = {"gamma": 1.0, "kl_coeff": 0.0, "normalize_over": "none"}
        return made(kind, self.actor, **PLAIN | default | options)

    def grpo(self, **options) -> LLMGRPOLoss:
        default = {"kl_coeff": 0.0, "baseline": "leave_one_out", "scale": "none"}
        return made(LLMGRPOLoss, self.actor, **PLAIN | default | options)

    def vine(self, **options) -> LLMReinforceLoss:
        return self.reinforce().make_value_estimator(TurnVine, **options)

    def ppo(self, **options) -> LLMPPOLoss:
        default = {"gamma": 1.0, "lmbda": 1.0, "kl_coeff": 0.0, "whiten": False}
        return made(LLMPPOLoss, self.actor, self.critic, **PLAIN | default | options)

    def rows(self, mdp: EnumerableMDP, gamma: float = 1.0, *, exact: bool = True) -> TensorDict:
        """With the reference's log-probs, and the exact values or the critic's."""
        rows = mdp.rows(self.actor)
        with torch.no_grad():
            rows = self.critic(rows)
            rows[keys.REF_LOG_PROB] = self.reference(mdp.rows())[keys.LOG_PROB]
        if exact:
            rows[keys.STATE_VALUE], rows[keys.BOOTSTRAP_VALUE] = mdp.state_values(self.actor, gamma)
        return rows

    def truth(self, mdp: EnumerableMDP, gamma: float = 1.0, **options) -> Tensor:
        return mdp.policy_gradient(self.actor, mdp.returns(gamma), **options)

    def kl_gradient(self, mdp: EnumerableMDP) -> Tensor:
        """Of the KL of whole conversations: the expected sum over tokens of log pi/ref."""
        gap = mdp.log_probability(self.actor) - mdp.log_probability(self.reference).detach()
        return mdp.policy_gradient(self.actor, gap)

    def at_visited_states(self, mdp: EnumerableMDP, figure: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Gradient of the sum over visited states of a figure of the next-token distribution, the
        visits held fixed.

        ``figure`` maps the log-probs of policy and reference ``[n, L, V]`` to ``[n, L]``. Needs no
        scorer: the whole distributions come from the language models themselves.
        """
        rows = mdp.rows()
        policy, reference = (
            pad(each.model(rows[keys.TOKENS]).logits.log_softmax(-1)[:, :-1], (0, 0, 1, 0))
            for each in (self.actor, self.reference)
        )
        visits = mdp.log_probability(self.actor).exp().detach().unsqueeze(1) * (rows[keys.TURN_IDS] >= 0)
        return flat_gradient((visits * figure(policy, reference.detach())).sum(), self.actor)


STUDY = Study(0)


def prefix_parity(rows: TensorDict) -> Tensor:
    """Whether the tokens before each turn add up to an even number, ``[B, T]`` int64: a poor
    state."""
    before = rows[keys.TOKENS].cumsum(1) - rows[keys.TOKENS]
    return F.turn_first(before, rows[keys.TURN_IDS], rows[keys.TURN_MASK].shape[1]).long() % 2 + 1


def graded(mdp: EnumerableMDP, actor: TokenScorer) -> TensorDict:
    """Rows with a number beside the reward, ``"grade"``: half the first token of each turn, at
    most 1."""
    rows = mdp.rows(actor)
    first = F.turn_first(rows[keys.TOKENS].double(), rows[keys.TURN_IDS], rows[keys.TURN_MASK].shape[1])
    rows[keys.turn_extra("grade")] = first / 2
    return rows


def two_groups(mdp: EnumerableMDP, policy_loss: TurnPolicyLoss, rows: TensorDict) -> Tensor:
    """:meth:`EnumerableMDP.expected_gradient` over all batches of two groups of two."""
    actor = policy_loss.actor_network
    groups, probability = mdp.batches(actor, 2, same_task=True)
    pairs = torch.combinations(torch.arange(len(groups)), with_replacement=True)
    chance = probability[pairs].prod(1) * torch.where(pairs[:, 0] == pairs[:, 1], 1.0, 2.0)
    batches = []
    for batch in rows.exclude(keys.EPISODE_ID)[groups[pairs].flatten(1)].unbind(0):
        batch[keys.GROUP_ID] = torch.tensor([0, 0, 1, 1])
        batches.append(write_loss_weights(policy_loss.value_estimator(batch), policy_loss))
    everything = TensorDict.cat(batches)
    weight = everything[keys.LOSS_WEIGHT].double() * chance.repeat_interleave(4).unsqueeze(1)
    return -flat_gradient(total(policy_loss(everything.set(keys.LOSS_WEIGHT, weight))), actor)


class Continued(EnumerableMDP):
    """A game whose episodes come with every outcome of the continuations of their states."""

    log_chance: Tensor

    def log_probability(self, actor, *, frozen_from=None):
        return super().log_probability(actor, frozen_from=frozen_from) + self.log_chance


Choice = Callable[[int, int], bool]
"""Whether the state before turn k of n turns is valued."""


def continued(
    mdp: EnumerableMDP, actor: TokenScorer, count: int | None, choice: Choice = lambda k, n: True
) -> Continued:
    """The game with ``("turn", "sampled_value")``: a row for each episode and all that ``count``
    continuations of its chosen states return.

    A continuation is an episode with the same task and the same tokens before the turn, as probable
    as it is given these. ``None`` stands for any number of them: the value is exact.
    """
    rows, chance = mdp.rows(), mdp.log_probability(actor).exp().tolist()
    to_go = rows[keys.TURN_REWARD].flip(1).cumsum(1).flip(1).tolist()
    played = rows[keys.TURN_MASK].sum(1).tolist()
    spoken, tokens, task = (rows[key].tolist() for key in (keys.TURN_IDS, keys.TOKENS, keys.GROUP_ID))

    def state(i: int, k: int) -> tuple | None:
        return (task[i], *tokens[i][: spoken[i].index(k)]) if k in spoken[i] else None

    def outcomes(i: int, k: int) -> list[tuple[float, float]]:
        """The mean return of the continuations of a state, and the probability of each."""
        if state(i, k) is None or not choice(k, played[i]):
            return [(math.nan, 1.0)]
        alike = [j for j in range(len(rows)) if state(j, k) == state(i, k)]
        share = {j: chance[j] / sum(chance[j] for j in alike) for j in alike}
        if count is None:
            return [(sum(share[j] * to_go[j][k] for j in alike), 1.0)]
        found = []
        for each in itertools.combinations_with_replacement(alike, count):
            orders = math.factorial(count) / math.prod(map(math.factorial, Counter(each).values()))
            found.append((sum(to_go[j][k] for j in each) / count, orders * math.prod(share[j] for j in each)))
        return found

    index, values, log_chance = [], [], []
    for i in range(len(rows)):
        for found in itertools.product(*(outcomes(i, k) for k in range(len(to_go[i])))):
            index.append(i)
            values.append([value for value, _ in found])
            log_chance.append(math.log(math.prod(p for _, p in found)))
    game = Continued(mdp.game, mdp.tasks, mdp.vocabulary, mdp.end_of_turn, mdp.max_turns)
    expanded = rows[torch.tensor(index)].clone()
    expanded[keys.SAMPLED_VALUE] = torch.tensor(values, dtype=torch.float64)
    game.__dict__ |= {"_rows": expanded, "log_chance": torch.tensor(log_chance, dtype=torch.float64)}
    return game


def grown(mdp: EnumerableMDP, actor: TokenScorer, turn: int) -> list[tuple[int, int, bool, float]]:
    """All trees of a root and one more episode: the two, whether it was continued before ``turn``,
    and the probability.

    A root that has ended by then has another episode of its task beside it.
    """
    rows, chance = mdp.rows(), mdp.log_probability(actor).exp().tolist()
    spoken, tokens = rows[keys.TURN_IDS].tolist(), rows[keys.TOKENS].tolist()

    def state(i: int) -> list[int] | None:
        return tokens[i][: spoken[i].index(turn)] if turn in spoken[i] else None

    found = []
    for root in range(len(rows)):
        alike = [i for i in range(len(rows)) if state(root) is None or state(i) == state(root)]
        whole = sum(chance[i] for i in alike)
        found += [(root, i, state(root) is not None, chance[root] * chance[i] / whole) for i in alike]
    return found


def gradient_of_trees(
    mdp: EnumerableMDP, policy_loss: TurnPolicyLoss, rows: TensorDict, turns: tuple[int, int], *forgotten: str
) -> tuple[Tensor, float]:
    """Expected gradient of groups of two trees that branch at ``turns``, of two episodes each; and
    the number that it should be multiplied by.

    Args:
        rows: of ``mdp``, of one task.
        forgotten: keys that the rows lack, to see that they are needed.
    """
    actor = policy_loss.actor_network
    ways = [*itertools.product(*(grown(mdp, actor, turn) for turn in turns))]
    index = torch.tensor([[*one[:2], *other[:2]] for one, other in ways])
    chance = torch.tensor([one[3] * other[3] for one, other in ways], dtype=torch.float64)
    branched = torch.tensor([[one[2]] * 2 + [other[2]] * 2 for one, other in ways])
    batch = rows.exclude(keys.EPISODE_ID)[index.flatten()].clone()
    batch[keys.GROUP_ID] = torch.arange(len(ways)).repeat_interleave(4)
    number, at = torch.arange(index.numel()), torch.tensor([turns[0]] * 2 + [turns[1]] * 2)
    apart_from = torch.where(branched, at, -1).flatten()
    batch[keys.TURN_UNIT] = F.tree_units(number, number - number % 2, apart_from, batch[keys.TURN_MASK].shape[1])
    batch[keys.ROW_WEIGHT] = torch.where(branched, 0.5, 1.0).flatten()
    batch = write_loss_weights(policy_loss.value_estimator(batch.exclude(*forgotten)), policy_loss)
    # Each group by itself is the batch.
    batch[keys.LOSS_WEIGHT] = batch[keys.LOSS_WEIGHT].double() * len(ways) * chance.repeat_interleave(4).unsqueeze(1)
    counted = float((chance.unsqueeze(1) * torch.where(branched, 0.5, 1.0)).sum()) / 4
    return -flat_gradient(total(policy_loss(batch)), actor), 1 / counted


def gradient_of_one(mdp: EnumerableMDP, policy_loss: TurnPolicyLoss) -> Tensor:
    """:meth:`EnumerableMDP.expected_gradient` of batches of one episode, at once, for an estimator
    that compares none."""
    rows, chance = mdp.rows().exclude(keys.EPISODE_ID), mdp.log_probability(policy_loss.actor_network).exp().detach()
    rows = write_loss_weights(policy_loss.value_estimator(rows), policy_loss)
    # Each weight belongs to one episode of all.
    rows[keys.LOSS_WEIGHT] = len(rows) * rows[keys.LOSS_WEIGHT].double() * chance.unsqueeze(1)
    rows[keys.SAMPLE_LOG_PROB] = policy_loss.actor_network(rows.clone())[keys.LOG_PROB].detach()
    return -flat_gradient(total(policy_loss(rows)), policy_loss.actor_network)


def noise(mdp: EnumerableMDP, policy_loss: TurnPolicyLoss, rows: TensorDict) -> float:
    """Variance of the gradient on one episode, summed over parameters, in units of the squared
    length of its mean."""
    chance = mdp.log_probability(policy_loss.actor_network).exp().detach()
    rows = write_loss_weights(policy_loss.value_estimator(rows.exclude(keys.EPISODE_ID)), policy_loss)
    # A gradient is linear in the advantages of its turns, and equal episodes have equal gradients
    # of turns.
    tokens, place = torch.cat([rows[keys.TOKENS], rows[keys.TURN_IDS]], 1).unique(dim=0, return_inverse=True)
    first = [int((place == i).nonzero()[0]) for i in range(len(tokens))]
    # [n, T, P]
    turns = torch.stack([_of_turns(policy_loss.actor_network, rows[i : i + 1]) for i in first])
    gradients = torch.einsum("bt,btp->bp", rows[keys.TURN_ADVANTAGE], turns[place])
    mean = chance @ gradients
    return float(chance @ gradients.square().sum(1) / mean.square().sum()) - 1


def _of_turns(actor: TokenScorer, row: TensorDict) -> Tensor:
    """The gradient of the log-probability of each turn ``[T, P]``."""
    turns = range(row[keys.TURN_MASK].shape[1])
    said = (((actor(row.clone())[keys.LOG_PROB] * (row[keys.TURN_IDS] == k)).sum()) for k in turns)
    return torch.stack([flat_gradient(each, actor) for each in said])
