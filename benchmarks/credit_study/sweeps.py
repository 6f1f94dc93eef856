"""What one choice does to a gradient: lambda and the critic, group size, batch statistics,
staleness and its correction.

The games come from :mod:`credit_study.gradients`. Where conversations do not depend on each
other (a critic, old samples) every figure is exact: the gradient of each conversation, weighted by
its probability. Groups and batch statistics are drawn.
"""

import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from credit_study.branched import trees
from credit_study.gradients import (
    ESTIMATORS,
    GAMES,
    PLAIN,
    batches_of,
    credit_of,
    draw,
    gradients_of,
    random_critic,
    summary,
    token_scores,
)
from torchrl_llm import keys
from torchrl_llm.modules import TokenScorer, TurnCritic
from torchrl_llm.objectives import (
    GroupRelative,
    LLMGRPOLoss,
    LLMPPOLoss,
    LLMReinforceLoss,
    ReBN,
    TurnGAE,
    TurnLoss,
    TurnVTrace,
)
from torchrl_llm.testing.enumerable import EnumerableMDP, batch_gradient, tiny_lm

BATCH = 32
"""Conversations in a batch whose noise is told."""

LAMBDAS = (0.0, 0.5, 0.8, 0.95, 1.0)
ERRORS = (0.0, 0.5, 1.0, 2.0)
"""Errors of a critic, in standard deviations of the true values."""

GROUPS = (2, 4, 8, 16)
GROUPED = {
    "mean / std (GRPO)": {"baseline": "mean", "scale": "std"},
    "mean / batch's std": {"baseline": "mean", "scale": "batch"},
    "leave-one-out": {"baseline": "leave_one_out", "scale": "none"},
    "leave-one-out, per turn": {"baseline": "leave_one_out", "scale": "none", "credit": "turn"},
}

SIZES = (4, 8, 16, 32, 64)
WHITENED = [
    each
    for each in ESTIMATORS
    if each.name in ("returns to go", "ReBN", "GAE 0.95, exact critic", "GAE 0.95, exact critic, whitened")
]

UPDATES = (0, 1, 2, 4, 8, 16)
"""How many steps up the true gradient lie between the policy that sampled and the one that
learns."""
STEP = 0.05

_WIDE = 1e9


def _returns(**options: Any) -> Callable[[TokenScorer, TurnCritic], TurnLoss]:
    """A loss with returns to go."""
    estimator = functools.partial(ReBN, gamma=1.0, normalize_over="none")
    return lambda actor, _: LLMReinforceLoss(actor, **PLAIN | {"clipping": "none", "estimator": estimator()} | options)


def _weights(kind: str, bounds: Any, level: str) -> Callable[[TokenScorer, TurnCritic], TurnLoss]:
    return _returns(sampler_correction=kind, sampler_bounds=bounds, sampler_level=level)


def _vtrace(actor: TokenScorer, critic: TurnCritic) -> TurnLoss:
    return LLMPPOLoss(actor, critic, **PLAIN, clipping="none", estimator=TurnVTrace(gamma=1.0))


CORRECTIONS: dict[str, tuple[bool, Callable[[TokenScorer, TurnCritic], TurnLoss]]] = {
    # Whether "old_log_prob" is the learning policy's (the ratio is 1), or the ratio is taken
    # against the sampler.
    "none: as if on-policy": (True, _returns()),
    "PPO's clipped ratio (0.2)": (False, _returns(clipping="ppo")),
    "ratio of a token, unclipped": (False, _returns()),
    "CISPO (0.2)": (False, _returns(clipping="cispo")),
    "weight of a token, at most 2": (True, _weights("truncate", 2.0, "token")),
    "weight of a turn, at most 2": (True, _weights("truncate", 2.0, "turn")),
    "weight of a conversation, at most 2": (True, _weights("truncate", 2.0, "sequence")),
    "weight of a conversation, unbounded": (True, _weights("truncate", _WIDE, "sequence")),
    "tokens out of 0.5 to 2 left out": (True, _weights("mask", (0.5, 2.0), "token")),
    "conversations out of 0.5 to 2 left out": (True, _weights("reject", (0.5, 2.0), "sequence")),
    "V-trace (1), exact critic": (True, _vtrace),
}


def exact_summary(gradients: Tensor, probability: Tensor, truth: Tensor, size: int = BATCH) -> dict[str, float]:
    """Bias and noise where a batch is a mean of independent conversations with
    ``gradients [n, P]``.

    Returns:
        ``cosine`` of the expected gradient and the true one, and ``noise``: trace of the covariance
        of the gradient of ``size`` conversations over the squared length of the expected one.
    """
    mean = probability @ gradients
    trace = (probability @ gradients.square()).sum() - mean.square().sum()
    cosine = mean @ truth / (mean.norm() * truth.norm())
    return {"cosine": float(cosine), "noise": float(trace / size / mean.square().sum())}


def _conversations(loss: TurnLoss, rows: TensorDict, scores: Tensor) -> Tensor:
    """The gradient ``[n, P]`` of each conversation, at ratio 1 and without statistics of the
    batch."""
    (batch,) = batches_of(rows, torch.arange(len(rows)).unsqueeze(0))
    credit = credit_of(loss, batch)
    return torch.einsum("nl,nlp->np", credit, scores)


def critics(game: str, policy: int) -> Iterator[dict]:
    """Lambda against the error of the critic."""
    mdp = EnumerableMDP(game=GAMES[game], max_turns=None)
    actor, critic = TokenScorer(tiny_lm(policy)), random_critic(policy + 1000)
    rows, truth, scores = mdp.rows(actor), mdp.policy_gradient(actor), token_scores(mdp, actor)
    probability = mdp.log_probability(actor).detach().exp()
    values, bootstrap = mdp.state_values(actor)
    acted = rows[keys.TURN_IDS] >= 0
    with torch.no_grad():
        # A function of the state, as a critic's error is; centered and scaled, so that 1 is as wide
        # as the true values.
        error = critic(rows.clone())[keys.STATE_VALUE].double()
    error = (error - error[acted].mean()) / error[acted].std() * values[acted].std()
    for lmbda in LAMBDAS:
        loss = LLMPPOLoss(actor, critic, **PLAIN, estimator=TurnGAE(gamma=1.0, lmbda=lmbda, whiten=False))
        for width in ERRORS:
            rows[keys.STATE_VALUE] = torch.where(acted, values + width * error, 0.0)
            rows[keys.BOOTSTRAP_VALUE] = bootstrap
            figures = exact_summary(_conversations(loss, rows, scores), probability, truth)
            yield {"row": f"{lmbda:g}", "column": f"{width:g}", **figures}


def groups(game: str, policy: int, batches: int) -> Iterator[dict]:
    """Group size against baseline and scale, in batches of :data:`BATCH`."""
    mdp, actor = EnumerableMDP(game=GAMES[game], max_turns=None), TokenScorer(tiny_lm(policy))
    rows, truth, scores = mdp.rows(actor), mdp.policy_gradient(actor), token_scores(mdp, actor)
    for group in GROUPS:
        index = draw(mdp, actor, batches, BATCH, torch.Generator().manual_seed(policy), group)
        for name, options in GROUPED.items():
            found = summary(
                gradients_of(
                    LLMGRPOLoss(actor, **PLAIN, estimator=GroupRelative(**options)), rows, scores, index, group
                ),
                truth,
            )
            yield {"row": name, "column": f"{group}", "cosine": found["cosine_mean"], "noise": found["noise"]}


def whitening(game: str, policy: int, batches: int) -> Iterator[dict]:
    """Statistics of the batch against its size; the noise is given for a batch of that size."""
    mdp = EnumerableMDP(game=GAMES[game], max_turns=None)
    actor, critic = TokenScorer(tiny_lm(policy)), random_critic(policy + 1000)
    rows, truth, scores = mdp.rows(actor), mdp.policy_gradient(actor), token_scores(mdp, actor)
    rows[keys.STATE_VALUE], rows[keys.BOOTSTRAP_VALUE] = mdp.state_values(actor)
    for size in SIZES:
        # Groups of one: every conversation has a task of its own.
        index = draw(mdp, actor, batches, size, torch.Generator().manual_seed(policy), 1)
        for each in WHITENED:
            found = summary(gradients_of(each.build(actor, critic), rows, scores, index, 1), truth)
            yield {"row": each.name, "column": f"{size}", "cosine": found["cosine_mean"], "noise": found["noise"]}


def updated(mdp: EnumerableMDP, policy: int, updates: int) -> TokenScorer:
    """The policy after ``updates`` steps of length :data:`STEP` up the true gradient."""
    actor = TokenScorer(tiny_lm(policy))
    for _ in range(updates):
        gradient = mdp.policy_gradient(actor)
        at = torch.nn.utils.parameters_to_vector(actor.parameters())
        moved = at + STEP * gradient / gradient.norm()
        torch.nn.utils.vector_to_parameters(moved.detach(), actor.parameters())
    return actor


def staleness(game: str, policy: int) -> Iterator[dict]:
    """Age of the samples against the correction of the loss."""
    mdp = EnumerableMDP(game=GAMES[game], max_turns=None)
    sampler, critic = updated(mdp, policy, 0), random_critic(policy + 1000)
    probability = mdp.log_probability(sampler).detach().exp()
    for updates in UPDATES:
        actor = updated(mdp, policy, updates)
        truth = mdp.policy_gradient(actor)
        distance = probability @ (probability.log() - mdp.log_probability(actor).detach())
        rows = mdp.rows(sampler)
        rows[keys.STATE_VALUE], rows[keys.BOOTSTRAP_VALUE] = mdp.state_values(actor)
        for name, (learning, make) in CORRECTIONS.items():
            loss = make(actor, critic)
            old = (mdp.rows(actor) if learning else rows)[keys.SAMPLE_LOG_PROB]
            batch = rows.clone()
            batch[keys.OLD_LOG_PROB] = old
            gradients = torch.stack([batch_gradient(loss, batch[i : i + 1]) for i in range(len(batch))])
            figures = exact_summary(gradients, probability, truth)
            yield {"row": name, "column": f"{updates}", "kl": float(distance), **figures}


SWEEPS = {"critics": critics, "groups": groups, "whitening": whitening, "staleness": staleness, "trees": trees}
DRAWN = ("groups", "whitening", "trees")
OWN = {"trees": ["three turns"]}
"""Sweeps with games of their own."""
HEADINGS = {
    "critics": ("lambda", "error of the critic: {}"),
    "groups": ("", "groups of {}"),
    "whitening": ("", "batches of {}"),
    "staleness": ("correction", "updates: {}"),
    "trees": ("", "what decides: {}"),
}


def sweeps(output: Path, policies: int, batches: int) -> None:
    """Write ``sweeps.json``."""
    results = []
    for name, sweep in SWEEPS.items():
        for game in OWN.get(name, [*GAMES]):
            for policy in range(policies):
                found = sweep(game, policy, batches) if name in DRAWN else sweep(game, policy)
                results += [{"sweep": name, "game": game, "policy": policy} | each for each in found]
            print(f"{name}, {game}: done", flush=True)
    output.mkdir(parents=True, exist_ok=True)
    (output / "sweeps.json").write_text(json.dumps(results, indent=1) + "\n")


def sweep_table(results: list[dict], name: str, game: str) -> str:
    """Cosine and noise of each pair, medians over the policies."""
    chosen = [each for each in results if (each["sweep"], each["game"]) == (name, game)]
    rows, columns = ([*dict.fromkeys(each[field] for each in chosen)] for field in ("row", "column"))
    corner, heading = HEADINGS[name]

    def middle(key: str, **where: str) -> float:
        return median(each[key] for each in chosen if all(each[field] == value for field, value in where.items()))

    titles = [heading.format(column) for column in columns]
    if name == "staleness":
        titles = [
            f"{title} ({middle('kl', column=column):.2g} nats)" for title, column in zip(titles, columns, strict=True)
        ]
    lines = [f"| {corner} | {' | '.join(titles)} |", "|---" * (len(columns) + 1) + "|"]
    for row in rows:
        cells = [
            f"{middle('cosine', row=row, column=column):.3f}, {middle('noise', row=row, column=column):.2f}"
            for column in columns
        ]
        lines.append(f"| {row} | {' | '.join(cells)} |")
    return "\n".join(lines)
