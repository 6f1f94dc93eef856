"""The estimators' gradients against the true one, on batches from a language MDP that is small
enough to enumerate."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median, stdev
from typing import Any

import torch
from matplotlib.figure import Figure
from tensordict import TensorDict
from torch import Tensor
from torch.nn.functional import cosine_similarity

from credit_study.continuations import Continuations
from torchrl_llm import keys
from torchrl_llm.modules import TokenScorer, TurnCritic
from torchrl_llm.objectives import (
    GroupRelative,
    LLMGRPOLoss,
    LLMPPOLoss,
    LLMReinforceLoss,
    ReBN,
    TurnEstimator,
    TurnGAE,
    TurnLoss,
    TurnVine,
    write_loss_weights,
)
from torchrl_llm.testing.enumerable import (
    EnumerableMDP,
    Step,
    batch_gradient,
    flat_gradient,
    small_talk,
    tiny_lm,
)


def unequal(task: int, said: tuple[tuple[int, ...], ...]) -> Step:
    """:func:`~torchrl_llm.testing.enumerable.small_talk` with 3 more for whoever ends a
    conversation of task 1.

    Nobody can act upon that, and the true gradient is the same; but one task is now much easier
    than the other.
    """
    step = small_talk(task, said)
    return replace(step, reward=step.reward + 3.0) if task == 1 and said and step.limit is None else step


GAMES = {"equal tasks": small_talk, "unequal tasks": unequal}
GROUP = 4
PLAIN = {"kl_coeff": 0.0, "weighting": "constant", "weight_constant": 1.0}


@dataclass(frozen=True)
class Estimator:
    """One way to assign credit.

    Attributes:
        name: in tables and plots.
        algo: the loss.
        credit: makes the loss's estimator.
        options: of the loss.
        critic: whose values the rows carry: ``"exact"``, ``"random"``, values of a number of
            continuations of each state, or none.
    """

    name: str
    algo: type[TurnLoss]
    credit: Callable[[], TurnEstimator]
    options: dict[str, Any] = field(default_factory=dict)
    critic: str | int | None = None

    def build(self, actor: TokenScorer, critic: TurnCritic) -> TurnLoss:
        """The loss, with constant weights unless the options say otherwise."""
        options = PLAIN | self.options | {"estimator": self.credit()}
        if options["weighting"] != "constant":
            options.pop("weight_constant")
        return self.algo(actor, critic, **options) if self.algo is LLMPPOLoss else self.algo(actor, **options)


_GAE = partial(TurnGAE, gamma=1.0, whiten=False)
_GROUP = partial(GroupRelative, scale="none")
_RETURNS = partial(ReBN, gamma=1.0, normalize_over="none")

ESTIMATORS = [
    Estimator("returns to go", LLMReinforceLoss, _RETURNS),
    Estimator("returns to go, token weights", LLMReinforceLoss, _RETURNS, {"weighting": "token"}),
    Estimator("returns to go, sequence weights", LLMReinforceLoss, _RETURNS, {"weighting": "sequence"}),
    Estimator("ReBN", LLMReinforceLoss, partial(ReBN, gamma=1.0)),
    Estimator("group mean / std (GRPO)", LLMGRPOLoss, partial(_GROUP, baseline="mean", scale="std")),
    Estimator("group mean (Dr. GRPO)", LLMGRPOLoss, partial(_GROUP, baseline="mean")),
    Estimator("leave-one-out (RLOO)", LLMGRPOLoss, partial(_GROUP, baseline="leave_one_out")),
    Estimator("group mean, per turn", LLMGRPOLoss, partial(_GROUP, baseline="mean", credit="turn")),
    Estimator("GAE 1, exact critic", LLMPPOLoss, partial(_GAE, lmbda=1.0), critic="exact"),
    Estimator("GAE 0.95, exact critic", LLMPPOLoss, partial(_GAE, lmbda=0.95), critic="exact"),
    Estimator("GAE 0, exact critic", LLMPPOLoss, partial(_GAE, lmbda=0.0), critic="exact"),
    Estimator("GAE 0.95, exact critic, whitened", LLMPPOLoss, partial(_GAE, lmbda=0.95, whiten=True), critic="exact"),
    Estimator("GAE 1, random critic", LLMPPOLoss, partial(_GAE, lmbda=1.0), critic="random"),
    Estimator("GAE 0.95, random critic", LLMPPOLoss, partial(_GAE, lmbda=0.95), critic="random"),
    Estimator("GAE 0, random critic", LLMPPOLoss, partial(_GAE, lmbda=0.0), critic="random"),
    Estimator(
        'GAE 1, exact critic, value "mean"',
        LLMPPOLoss,
        partial(_GAE, lmbda=1.0, value_reduction="mean"),
        critic="exact",
    ),
    Estimator(
        'GAE 1, exact critic, value "last"',
        LLMPPOLoss,
        partial(_GAE, lmbda=1.0, value_reduction="last"),
        critic="exact",
    ),
    Estimator("continuations, 1", LLMReinforceLoss, TurnVine, critic=1),
    Estimator("continuations, 4", LLMReinforceLoss, TurnVine, critic=4),
]


def token_scores(mdp: EnumerableMDP, actor: TokenScorer) -> Tensor:
    """Gradient ``[n, L, P]`` of the log-probability of each token of each conversation; 0 off
    actions."""
    rows = mdp.rows()
    log_prob = actor(rows.clone())[keys.LOG_PROB]
    size = sum(parameter.numel() for parameter in actor.parameters())
    scores = log_prob.new_zeros(*log_prob.shape, size)
    for place in (rows[keys.TURN_IDS] >= 0).nonzero().tolist():
        scores[tuple(place)] = flat_gradient(actor(rows[place[:1]])[keys.LOG_PROB][0, place[1]], actor)
    return scores


def draw(
    mdp: EnumerableMDP, actor: TokenScorer, batches: int, size: int, generator: torch.Generator, group: int = GROUP
) -> Tensor:
    """Batches of whole groups: index ``[batches, size]`` into the conversations.

    The task of each group is drawn uniformly, then its conversations independently from the policy.
    """
    task, probability = mdp.rows()[keys.GROUP_ID], mdp.log_probability(actor).detach().exp()
    tasks = torch.randint(mdp.tasks, (batches * size // group,), generator=generator)
    given_task = torch.where(task == torch.arange(mdp.tasks).unsqueeze(1), probability, 0.0)
    return given_task[tasks].multinomial(group, replacement=True, generator=generator).view(batches, size)


def credit_of(loss: TurnLoss, batch: TensorDict) -> Tensor:
    """What multiplies each token's score in the gradient of one batch: weight times advantage,
    ``[B, L]``."""
    batch = write_loss_weights(loss.value_estimator(batch), loss)
    return (batch[keys.LOSS_WEIGHT].double() * batch[keys.ADVANTAGE]).where(batch[keys.TURN_IDS] >= 0, 0.0)


def batches_of(
    rows: TensorDict, index: Tensor, group: int = GROUP, sampled_value: Tensor | None = None
) -> Iterator[TensorDict]:
    """The rows of each batch of ``index [M, B]``, in groups, with their ``sampled_value [M, B, T]``
    if there is one."""
    rows = rows.exclude(keys.EPISODE_ID)
    for i, chosen in enumerate(index):
        batch = rows[chosen]
        batch[keys.GROUP_ID] = torch.arange(len(chosen)) // group
        if sampled_value is not None:
            batch[keys.SAMPLED_VALUE] = sampled_value[i]
        yield batch


def gradients_of(
    loss: TurnLoss,
    rows: TensorDict,
    scores: Tensor,
    index: Tensor,
    group: int = GROUP,
    sampled_value: Tensor | None = None,
) -> Tensor:
    """The ascent direction ``[M, P]`` that the loss gives on each batch of ``index [M, B]``.

    At ratio 1 the gradient of the loss is the sum of credit times score, so that one table of
    scores serves all batches. That this is the gradient of the real loss is checked by backward
    passes through the first three batches.
    """
    coefficients = scores.new_zeros(len(index), *scores.shape[:2])
    batches = batches_of(rows, index, group, sampled_value)
    for coefficient, chosen, batch in zip(coefficients, index, batches, strict=True):
        coefficient.index_add_(0, chosen, credit_of(loss, batch))
    gradients = coefficients.flatten(1) @ scores.flatten(0, 1)
    for gradient, batch in zip(gradients[:3], batches_of(rows, index, group, sampled_value), strict=False):
        torch.testing.assert_close(gradient, batch_gradient(loss, batch), rtol=1e-9, atol=1e-12)
    return gradients


def summary(gradients: Tensor, truth: Tensor, blocks: int = 20) -> dict[str, float]:
    """Bias and noise of gradients ``[M, P]`` against the true one ``[P]``.

    - ``cosine_mean``: cosine of the expected gradient and the truth. The mean of ``M`` gradients
      still has noise across the truth, which alone would turn it away; its expected square is
      subtracted, so that the figure can exceed 1 by its error. ``cosine_mean_se``: its jackknife
      standard error over ``blocks`` blocks.
    - ``cosine_batch``: mean cosine of one batch's gradient, 0 for a batch that gives none.
    - ``noise``: trace of the covariance of one batch's gradient over the squared length of the
      expected one.
    """
    direction = truth / truth.norm()
    along = gradients @ direction
    across = gradients - along.unsqueeze(1) * direction

    def cosine(chosen: Tensor) -> float:
        ahead, aside = along[chosen].mean(), across[chosen]
        stray = aside.mean(0).square().sum() - aside.var(0).sum() / len(aside)
        return float(ahead / (ahead.square() + stray).sqrt())

    everything = torch.arange(len(gradients))
    left_out = [cosine(everything[everything % blocks != block]) for block in range(blocks)]
    trace = gradients.var(0).sum()
    return {
        "cosine_mean": cosine(everything),
        "cosine_mean_se": stdev(left_out) * (blocks - 1) / blocks**0.5,
        "cosine_batch": float(cosine_similarity(gradients, truth.unsqueeze(0)).mean()),
        "noise": float(trace / (gradients.mean(0).square().sum() - trace / len(gradients))),
    }


def random_critic(seed: int) -> TurnCritic:
    """A value network that knows nothing of the game."""
    critic = TurnCritic(tiny_lm(seed))
    with torch.no_grad():
        critic.value_head.weight.normal_(generator=torch.Generator().manual_seed(seed))
    return critic


def compare_gradients(game: str, policy: int, batches: int, sizes: list[int]) -> list[dict]:
    """Every estimator on the same batches of one policy: ``{game, estimator, policy, size, batches,
    turns, **summary}`` each.

    ``turns`` is how many the policy samples for a batch, with the turns of continuations.
    """
    mdp = EnumerableMDP(game=GAMES[game], max_turns=None)
    actor, critic = TokenScorer(tiny_lm(policy)), random_critic(policy + 1000)
    rows, truth, scores = mdp.rows(actor), mdp.policy_gradient(actor), token_scores(mdp, actor)
    exact = rows.clone()
    exact[keys.STATE_VALUE], exact[keys.BOOTSTRAP_VALUE] = mdp.state_values(actor)
    with torch.no_grad():
        values = {"exact": exact, "random": critic(rows.clone()), None: rows}
    continuations = Continuations.of(mdp, actor)
    results = []
    for size in sizes:
        index = draw(mdp, actor, batches, size, torch.Generator().manual_seed(policy))
        own, continued = continuations.cost(index, GROUP)
        for estimator in ESTIMATORS:
            loss, turns, sampled_value = estimator.build(actor, critic), own, None
            if isinstance(estimator.critic, int):
                # Another seed than the batches have: with the same one the values would not be
                # independent of them.
                generator = torch.Generator().manual_seed(policy + 2000)
                sampled_value = continuations.sample(index, GROUP, estimator.critic, generator)
                turns += estimator.critic * continued
            carried = rows if isinstance(estimator.critic, int) else values[estimator.critic]
            found = gradients_of(loss, carried, scores, index, sampled_value=sampled_value)
            about = {"game": game, "estimator": estimator.name, "policy": policy, "size": size, "batches": batches}
            results.append(about | {"turns": turns} | summary(found, truth))
        print(f"{game}, policy {policy}, batches of {size}: done", flush=True)
    return results


def gradients(output: Path, policies: int, batches: int, sizes: list[int]) -> None:
    """Write ``gradients.json``."""
    pairs = [(game, policy) for game in GAMES for policy in range(policies)]
    results = [each for game, policy in pairs for each in compare_gradients(game, policy, batches, sizes)]
    output.mkdir(parents=True, exist_ok=True)
    (output / "gradients.json").write_text(json.dumps(results, indent=1) + "\n")


def _figures(results: list[dict], name: str, key: str, **where: Any) -> list[float]:
    """One figure of an estimator on every policy."""
    wanted = {"estimator": name, **where}
    return [result[key] for result in results if all(result[field] == value for field, value in wanted.items())]


def _spread(figures: list[float], places: str) -> str:
    return f"{median(figures):{places}} ({min(figures):{places}} to {max(figures):{places}})"


def gradient_table(results: list[dict], game: str) -> str:
    """One line an estimator: median over the policies, lowest and highest."""
    small, large = sorted({result["size"] for result in results})
    lines = [
        f"| | cosine of the mean, {small} | cosine of the mean, {large} | cosine of one batch of {large} | "
        f"noise-to-signal, {large} |",
        "|---|---|---|---|---|",
    ]
    for each in ESTIMATORS:
        cells = [
            _spread(_figures(results, each.name, key, game=game, size=size), places)
            for key, size, places in (
                ("cosine_mean", small, ".3f"),
                ("cosine_mean", large, ".3f"),
                ("cosine_batch", large, ".2f"),
                ("noise", large, ".2f"),
            )
        ]
        lines.append(f"| {each.name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def plot_gradients(results: list[dict], path: Path) -> None:
    """Bias of small batches and noise of large ones, for every estimator; a dot a policy."""
    small, large = sorted({result["size"] for result in results})
    names = [each.name for each in ESTIMATORS]
    figure = Figure(figsize=(9.5, 6.0), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for game, colour, shift in zip(GAMES, ["#0072b2", "#d55e00"], [-0.17, 0.17], strict=True):
        for axis, key, size in zip(axes, ["cosine_mean", "noise"], [small, large], strict=True):
            for at, name in enumerate(names):
                figures = _figures(results, name, key, game=game, size=size)
                axis.plot(figures, [at + shift] * len(figures), "o", color=colour, alpha=0.4, markersize=4)
                label = f"{game}, median" if at == 0 else None
                axis.plot(median(figures), at + shift, "|", color=colour, markersize=11, markeredgewidth=2, label=label)
    axes[0].set(title=f"Bias, batches of {small}", xlabel="cosine of the mean gradient to the true one")
    axes[1].set(title=f"Noise, batches of {large}", xlabel="noise-to-signal of one batch's gradient", xscale="log")
    axes[0].set_yticks(range(len(names)), names)
    axes[0].invert_yaxis()
    axes[0].legend(frameon=False, loc="lower left")
    ticks = (0.3, 1, 3, 10)
    axes[1].set_xticks(ticks, map(str, ticks))
    axes[1].minorticks_off()
    for axis in axes:
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=90)
