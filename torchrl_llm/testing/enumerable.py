"""A language environment small enough to list every episode: :class:`EnumerableMDP`.

With all episodes and their probabilities known, expectations are sums, not samples: the true policy
gradient, the value of every state, and the gradient that a loss gives on average over all batches
are exact, in float64. Whether a loss is unbiased is then a comparison of two vectors. The language
model is real (a GPT-2 of transformers), and so are the scorer, the estimator and the loss; only the
sampling is replaced by summing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations_with_replacement

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import GPT2Config, GPT2LMHeadModel

from torchrl_llm import keys
from torchrl_llm.objectives import TurnLoss, total, write_loss_weights

Response = tuple[int, ...]

LETTERS = "ab."
"""The token ids 0, 1 and 2 of :func:`small_talk`; the full stop ends a turn."""

MOST_TURNS, MOST_EPISODES = 32, 5000


@dataclass(frozen=True)
class Step:
    """The answer of a game.

    Attributes:
        reward: of the last turn; unused at the start.
        feedback: the token ids that the game appends to the context; at the start, the prompt.
        limit: most tokens of the next turn; 0 is a turn without an action; ``None``: the game is
            over.
    """

    reward: float
    feedback: Response
    limit: int | None


Game = Callable[[int, tuple[Response, ...]], Step]
"""Maps the task and the responses so far to a :class:`Step`; a pure function, so that every episode
can be listed."""

_LIMITS = (
    {"": 1, "a": 2, "b": 0, "a aa": 1, "a ab": 1, "a ba": 1, "a bb": 1, "b ": 1},
    {"": 2, "a.": 1, "b.": 2, "ab": 1, "ba": 1, "a. .": 0, "ab a": 1, "ab b": 1, "ab .": 1},
)


def small_talk(task: int, responses: tuple[Response, ...]) -> Step:
    """A game of two tasks and 44 episodes: up to three turns of 0, 1 or 2 tokens, a reward on every
    turn.

    Most episodes end early. A reward depends on the task, the turn, its tokens, and on whether it
    begins like the turn before.

    Examples:
        >>> small_talk(0, ())
        Step(reward=0.0, feedback=(0,), limit=1)
        >>> small_talk(0, ((1,),)).limit  # "b": no action in the second turn
        0
        >>> small_talk(1, ((2,),)).limit is None  # ".": the end
        True
    """
    text = " ".join("".join(LETTERS[token] for token in response) for response in responses)
    limit = _LIMITS[task].get(text)
    if not responses:
        return Step(0.0, (task,), limit)
    turn, last = len(responses), responses[-1]
    worth = sum((1.0, -0.4, 0.2)[token] * (1.5 - place) for place, token in enumerate(last))
    echo = 0.8 if turn > 1 and last[:1] == responses[-2][:1] else 0.0
    feedback = () if limit is None else ((turn + task) % 2,) * (1 + (turn == 2))
    return Step(0.6 * task - 0.3 * turn + worth * (1 - 1.5 * task) + echo, feedback, limit)


def tiny_lm(seed: int, *, vocabulary: int = 3, scale: float = 0.5) -> GPT2LMHeadModel:
    """A GPT-2 of one layer and 8 dimensions in float64, without dropout.

    GPT-2, because it is float64 all through; Qwen2 and Llama take norms and the softmax in float32.

    Args:
        seed: of its weights; the global random state is left alone.
        vocabulary: number of tokens.
        scale: standard deviation of the weights; at the default its probabilities are far from
            uniform.

    Examples:
        >>> tiny_lm(0)(torch.tensor([[0, 1, 2]])).logits.dtype
        torch.float64
    """
    config = GPT2Config(
        vocab_size=vocabulary,
        n_embd=8,
        n_inner=8,
        n_layer=1,
        n_head=2,
        n_positions=32,
        attn_pdrop=0.0,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        model = GPT2LMHeadModel._from_config(config, attn_implementation="eager", dtype=torch.float64).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=scale, generator=generator)
    return model


@torch.no_grad()
def make_dyadic(model: GPT2LMHeadModel) -> GPT2LMHeadModel:
    """Set ``model`` so that in every context token i has probability 2^-(i+1) (the last one, the
    same as the one before).

    Every episode then occurs an integer number of times in a batch of 2^k, see
    :meth:`EnumerableMDP.population`. The gradient still depends on the context.

    Examples:
        >>> make_dyadic(tiny_lm(0))(torch.tensor([[0, 1]])).logits.softmax(-1)
        tensor([[[0.5000, 0.2500, 0.2500],
                 [0.5000, 0.2500, 0.2500]]], dtype=torch.float64, grad_fn=<SoftmaxBackward0>)
    """
    norm, head = model.transformer.ln_f, model.lm_head.weight
    norm.weight.zero_()
    norm.bias.zero_()[0] = 1.0
    order = torch.arange(1, len(head) + 1, dtype=head.dtype).clamp_max(len(head) - 1)
    head[:, 0] = -order * math.log(2.0)
    return model


def flat_gradient(objective: Tensor, module: nn.Module) -> Tensor:
    """Gradient ``[P]`` of a scalar for all parameters of ``module``, in their order; 0 where it
    does not depend on them."""
    gradients = torch.autograd.grad(objective, list(module.parameters()), allow_unused=True, materialize_grads=True)
    return torch.cat([gradient.flatten() for gradient in gradients])


def cosine(gradient: Tensor, truth: Tensor) -> float:
    """Cosine of the angle between two vectors ``[P]``: 1 is the same direction.

    Examples:
        >>> round(cosine(torch.tensor([0.0, 2.0]), torch.tensor([3.0, 4.0])), 4)
        0.8
    """
    return float(gradient @ truth / (gradient.norm() * truth.norm()))


def relative_error(gradient: Tensor, truth: Tensor) -> float:
    """Length of the difference of two vectors ``[P]``, in units of ``truth``.

    Examples:
        >>> relative_error(torch.tensor([0.0, 5.0]), torch.tensor([0.0, 4.0]))
        0.25
    """
    return float((gradient - truth).norm() / truth.norm())


def batch_gradient(loss_module: TurnLoss, batch: TensorDictBase) -> Tensor:
    """What one optimizer step climbs: minus the gradient ``[P]`` of the loss for the actor, on one
    whole batch.

    Args:
        loss_module: with its value estimator.
        batch: rows ``[B]``, before the estimator; not changed.
    """
    batch = write_loss_weights(loss_module.value_estimator(batch.clone()), loss_module)
    return -flat_gradient(total(loss_module(batch)), loss_module.actor_network)


@dataclass(frozen=True)
class EnumerableMDP:
    """A game with all its episodes, and exact expectations over them under a policy.

    A policy is an ``actor``: a module that writes ``"log_prob"`` ``[n, L]`` into rows, such as
    :class:`~torchrl_llm.modules.scorer.TokenScorer`. It samples each token of a turn from the whole
    vocabulary until the end-of-turn token or the turn's limit. The task is uniform. There are ``n``
    episodes of at most ``L`` tokens and ``T`` turns.

    Args:
        game: the rules. Default: :func:`small_talk`.
        tasks: how many tasks the game has. Default: 2.
        vocabulary: how many tokens. Default: 3.
        end_of_turn: the id that ends a turn. Default: 2.
        max_turns: the step budget: a game that would go on is truncated there. ``None``: every
            episode runs to its end. Default: 2, with 28 episodes, 9 of them truncated.

    Raises:
        ValueError: ``max_turns < 1``, or a game with too many turns or episodes to list (from
            :meth:`rows`).

    Examples:
        Is leave-one-out unbiased in groups of two? And divided by the response's length?

        >>> from torchrl_llm.modules import TokenScorer
        >>> from torchrl_llm.objectives import GroupRelative, LLMGRPOLoss
        >>> mdp, actor = EnumerableMDP(), TokenScorer(tiny_lm(seed=0))
        >>> def error(**weighting):
        ...     estimator = GroupRelative(baseline="leave_one_out", scale="none")
        ...     loss = LLMGRPOLoss(actor, estimator=estimator, kl_coeff=0.0, **weighting)
        ...     return relative_error(mdp.expected_gradient(loss, size=2, same_task=True), mdp.policy_gradient(actor))
        >>> error(weighting="constant", weight_constant=1.0) < 1e-6
        True
        >>> error(weighting="sequence") > 0.1
        True
    """

    game: Game = small_talk
    tasks: int = 2
    vocabulary: int = 3
    end_of_turn: int = 2
    max_turns: int | None = 2

    def __post_init__(self) -> None:
        if self.max_turns is not None and self.max_turns < 1:
            raise ValueError(f"max_turns is {self.max_turns}; expected at least 1, or None.")

    @cached_property
    def uncut(self) -> EnumerableMDP:
        """The same game without the step budget."""
        return replace(self, max_turns=None)

    def rows(self, actor: TensorDictModuleBase | None = None) -> TensorDict:
        """All episodes as rows ``[n]`` (:mod:`torchrl_llm.keys`), floats in float64.

        ``"episode_id"`` counts them, ``"group_id"`` is the task. With an ``actor`` also its
        ``"sample_log_prob"``.
        """
        rows = self._rows.clone()
        if actor is not None:
            with torch.no_grad():
                rows[keys.SAMPLE_LOG_PROB] = actor(self._rows.clone())[keys.LOG_PROB]
        return rows

    def log_probability(self, actor: TensorDictModuleBase, *, frozen_from: int | None = None) -> Tensor:
        """Log-probability ``[n]`` of each episode, its task included; differentiable.

        Args:
            actor: the policy.
            frozen_from: turns from this one on are sampled by a frozen copy of the policy, without
                gradient.
        """
        rows = self.rows()
        log_prob = actor(rows)[keys.LOG_PROB]
        if frozen_from is not None:
            log_prob = torch.where(rows[keys.TURN_IDS] >= frozen_from, log_prob.detach(), log_prob)
        return log_prob.sum(1) - math.log(self.tasks)

    def returns(self, gamma: float = 1.0, bootstrap: Tensor | None = None) -> Tensor:
        """Return ``[n]`` of each episode, discounted per turn.

        Args:
            gamma: discount per turn.
            bootstrap: ``[n]``, counted as one more reward after the last turn of a truncated
                episode.
        """
        played, cut = self._rows[keys.TURN_MASK].double().sum(1), self._rows[keys.TURN_TRUNCATED].any(1)
        final = 0.0 if bootstrap is None else torch.where(cut, gamma**played * bootstrap, 0.0)
        return _to_go(self._rows[keys.TURN_REWARD], gamma)[:, 0] + final

    def objective(
        self, actor: TensorDictModuleBase, returns: Tensor | None = None, *, frozen_from: int | None = None
    ) -> Tensor:
        """The expected return, a scalar: the sum of probability times return; differentiable.

        Args:
            actor: the policy.
            returns: ``[n]``, with or without a graph. Default: :meth:`returns`.
            frozen_from: see :meth:`log_probability`.
        """
        returns = self.returns() if returns is None else returns
        return (self.log_probability(actor, frozen_from=frozen_from).exp() * returns).sum()

    def policy_gradient(
        self, actor: TensorDictModuleBase, returns: Tensor | None = None, *, frozen_from: int | None = None
    ) -> Tensor:
        """The true gradient ``[P]`` of :meth:`objective` for the parameters of ``actor``."""
        return flat_gradient(self.objective(actor, returns, frozen_from=frozen_from), actor)

    @torch.no_grad()
    def state_values(self, actor: TensorDictModuleBase, gamma: float = 1.0) -> tuple[Tensor, Tensor]:
        """The exact values, by summing over all continuations: what a perfect critic writes.

        The game continues after the cut: values include the rewards of :attr:`uncut` there.

        Args:
            actor: the policy.
            gamma: discount per turn, from the turn of the state on.

        Returns:
            ``state_value`` ``[n, L]``, index i the value of the prefix before action token i (0 off
            actions), and ``bootstrap_value`` ``[n]``, the value of the whole row (0 where the game
            is over).
        """
        whole, rows = self.uncut._rows, self._rows
        probability = self.uncut.log_probability(actor).exp()
        width = rows[keys.TOKENS].shape[1]
        # continues[i, j, t]: the first t tokens of row i equal those of the whole episode j, for
        # t = 0 ... L. The padding of j is never mistaken for tokens of i: a finished episode is not
        # a prefix of a longer one.
        equal = (rows[keys.TOKENS].unsqueeze(1) == whole[keys.TOKENS][:, :width]).long().cumprod(-1)
        continues = torch.cat([torch.ones_like(equal[..., :1]), equal], -1).to(probability.dtype)
        to_go = _to_go(whole[keys.TURN_REWARD], gamma)
        weight = continues * probability.view(1, -1, 1)
        values = torch.einsum("ijt,jk->itk", weight, to_go) / weight.sum(1).unsqueeze(-1)
        turn_ids = rows[keys.TURN_IDS]
        state_value = values[:, :-1].gather(-1, turn_ids.clamp_min(0).unsqueeze(-1)).squeeze(-1)
        length, played = rows[keys.ATTENTION_MASK].sum(1), rows[keys.TURN_MASK].sum(1)
        after = values[torch.arange(len(rows)), length, played.clamp_max(to_go.shape[1] - 1)]
        cut = rows[keys.TURN_TRUNCATED].any(1)
        return torch.where(turn_ids >= 0, state_value, 0.0), torch.where(cut, after, 0.0)

    @torch.no_grad()
    def batches(self, actor: TensorDictModuleBase, size: int, *, same_task: bool = False) -> tuple[Tensor, Tensor]:
        """All batches of independent episodes, up to their order, with their probabilities.

        There are (n + size - 1 choose size): 406 pairs and 4,060 triples of 28 episodes.

        Args:
            actor: the policy.
            size: episodes in a batch.
            same_task: a batch is one group: one task, which all its episodes share.

        Returns:
            ``index`` ``[M, size]`` int64 into :meth:`rows`, and ``probability`` ``[M]``, which sums
            to 1.
        """
        task, log_p = self._rows[keys.GROUP_ID], self.log_probability(actor)
        episodes = torch.arange(len(task))
        pools = [episodes[task == label] for label in range(self.tasks)] if same_task else [episodes]
        sets = [each for pool in pools for each in combinations_with_replacement(pool.tolist(), size)]
        orders = [math.factorial(size) / math.prod(map(math.factorial, Counter(each).values())) for each in sets]
        index = torch.tensor(sets)
        log_batch = log_p[index].sum(1) + (size - 1) * math.log(self.tasks) * same_task
        return index, log_batch.exp() * log_p.new_tensor(orders)

    def expected_gradient(
        self,
        loss_module: TurnLoss,
        size: int = 1,
        *,
        same_task: bool = False,
        rows: TensorDictBase | None = None,
    ) -> Tensor:
        """What an optimizer step climbs on average over all batches: minus the expected gradient of
        the loss, ``[P]``.

        The loss's own estimator and weights see each batch by itself. As a loss is a weighted sum,
        the expectation is then one backward pass over the rows of all batches, their weights times
        the probability of their batch.

        Args:
            loss_module: whose ``actor_network`` is the policy that samples. With
                ``weighting="constant"`` and ``weight_constant=1.0`` an unbiased loss gives
                :meth:`policy_gradient`.
            size, same_task: see :meth:`batches`.
            rows: :meth:`rows` with what else the loss reads, such as ``"state_value"`` or
                ``"ref_log_prob"``.
        """
        actor = loss_module.actor_network
        rows = self.rows(actor) if rows is None else rows
        index, probability = self.batches(actor, size, same_task=same_task)
        drawn = rows.exclude(keys.EPISODE_ID)[index]  # an episode may occur twice, with equal ids
        batches = [write_loss_weights(loss_module.value_estimator(batch), loss_module) for batch in drawn.unbind(0)]
        everything, share = TensorDict.cat(batches), probability.repeat_interleave(size).unsqueeze(1)
        for name in loss_module.weights(everything[keys.TURN_IDS]):
            key = getattr(loss_module.tensor_keys, name)
            everything[key] = everything[key].double() * share
        return -flat_gradient(total(loss_module(everything)), actor)

    def population(self, actor: TensorDictModuleBase, size: int) -> TensorDict:
        """A batch of ``size`` rows in which every episode is as frequent as it is probable.

        Its statistics are expectations under the policy: the limit of large batches. It has no
        ``"episode_id"``: an episode may occur twice.

        Raises:
            ValueError: a probability is not a multiple of ``1 / size``, see :func:`make_dyadic`.
        """
        rows = self.rows(actor)
        share = self.log_probability(actor).detach().exp() * size
        count = share.round()
        if bool(((share - count).abs() > 1e-6).any()):
            raise ValueError(f"Probabilities are not multiples of 1/{size}: make the policy dyadic, or size larger.")
        return rows.exclude(keys.EPISODE_ID)[torch.arange(len(rows)).repeat_interleave(count.long())]

    @cached_property
    def _rows(self) -> TensorDict:
        episodes = []
        for episode in (each for task in range(self.tasks) for each in self._episodes(task)):
            episodes.append(episode)
            if len(episodes) > MOST_EPISODES:
                raise ValueError(f"The game has more than {MOST_EPISODES} episodes: too many to list.")
        attention = _padded([[True] * len(c.tokens) for c in episodes], False)
        turn_ids = _padded([c.turn_ids for c in episodes], -1)
        mask = _padded([[True] * len(c.rewards) for c in episodes], False)
        ended = mask & (mask.flip(1).cumsum(1).flip(1) == 1)
        over = torch.tensor([[c.over] for c in episodes])
        won = torch.tensor([[c.rewards[-1] > 0] for c in episodes]) & ended & over
        stop = torch.full(mask.shape, int(keys.StopReason.RUNNING))
        stop[ended & over], stop[won] = int(keys.StopReason.LOST), int(keys.StopReason.WON)
        stop[ended & ~over] = int(keys.StopReason.MAX_TURNS)
        turn = {
            "reward": _padded([c.rewards for c in episodes], 0.0),
            "mask": mask,
            "terminated": ended & over,
            "truncated": ended & ~over,
            "success": won,
            "stop_reason": stop,
        }
        values = {
            keys.TOKENS: _padded([c.tokens for c in episodes], 0),
            keys.ATTENTION_MASK: attention,
            keys.TURN_IDS: turn_ids,
            keys.POLICY_VERSION: turn_ids.clamp_max(0),
            keys.EPISODE_ID: torch.arange(len(episodes)),
            keys.GROUP_ID: torch.tensor([c.task for c in episodes]),
            keys.ENV_ID: torch.zeros(len(episodes), dtype=torch.int64),
            "turn": turn,
        }
        return TensorDict(values, batch_size=[len(episodes)])

    def _episodes(
        self,
        task: int,
        responses: tuple[Response, ...] = (),
        tokens: Response = (),
        turn_ids: Response = (),
        rewards: tuple[float, ...] = (),
    ) -> Iterator[_Conversation]:
        """Every continuation of an episode."""
        if len(responses) > MOST_TURNS:
            raise ValueError(f"The game goes on for more than {MOST_TURNS} turns: give it a max_turns.")
        step = self.game(task, responses)
        tokens, turn_ids = tokens + step.feedback, turn_ids + (-1,) * len(step.feedback)
        if responses:
            rewards = (*rewards, step.reward)
        if step.limit is None or len(responses) == self.max_turns:
            yield _Conversation(task, tokens, turn_ids, rewards, over=step.limit is None)
            return
        for response in self._responses(step.limit):
            ids = turn_ids + (len(responses),) * len(response)
            yield from self._episodes(task, (*responses, response), tokens + response, ids, rewards)

    def _responses(self, limit: int) -> Iterator[Response]:
        """Every response of a turn of at most ``limit`` tokens."""
        if limit == 0:
            yield ()
            return
        for token in range(self.vocabulary):
            rest = [()] if token == self.end_of_turn else self._responses(limit - 1)
            yield from ((token, *more) for more in rest)


@dataclass(frozen=True)
class _Conversation:
    task: int
    tokens: Response
    turn_ids: Response
    rewards: tuple[float, ...]
    over: bool


def _padded(rows: list, value: float) -> Tensor:
    dtype = torch.float64 if isinstance(value, float) else None
    return pad_sequence([torch.tensor(row, dtype=dtype) for row in rows], batch_first=True, padding_value=value)


def _to_go(reward: Tensor, gamma: float) -> Tensor:
    """Discounted sum ``[n, T]`` of the rewards ``[n, T]`` from each turn on, by its definition."""
    turn = torch.arange(reward.shape[1], dtype=reward.dtype)
    ahead = turn - turn.unsqueeze(1)
    return reward @ torch.where(ahead >= 0, gamma ** ahead.clamp_min(0), 0.0).T
