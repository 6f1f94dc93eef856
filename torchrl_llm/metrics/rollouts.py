"""Every metric's name and meaning (:data:`METRICS`), and the pure functions that compute them from
rows.

The losses compute their own metrics (KL, clip fraction, ...); here these only get their names.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_llm import keys, turn_columns
from torchrl_llm.functional import explained_variance, turn_lengths

METRICS: dict[str, str] = {
    "rollout/reward": "return of an episode (undiscounted sum of rewards), mean over the batch",
    "rollout/success": "share of episodes that ended in success",
    "rollout/turns": "turns per episode",
    "rollout/penalized": "share of turns with a negative reward: in GEM's games, turns in no legal format",
    "rollout/response_length": "tokens per response",
    "rollout/thinking_length": "tokens of thinking per response, where the chat template knows thinking",
    "rollout/thinking_open": "share of turns whose thinking was not closed: max_output_tokens cut it off, or the response ended in it",
    "rollout/truncated": "share of episodes that were truncated (context, step budget) instead of terminated",
    "rollout/episodes": "episodes collected in training so far",
    "rollout/steps": "turns collected in training so far",
    "loss/objective": "the policy's term of the loss",
    "loss/nll": "negative log-likelihood per action token, nats, whatever its weight (SFT)",
    "loss/imitated": "share of the action tokens that is imitated (SFT)",
    "loss/critic": "the critic's term of the loss (LLMPPO)",
    "loss/entropy": "the entropy bonus' term of the loss",
    "loss/kl": "the reference KL's term of the loss; none once its weight has fallen to 0 (kl_decay_fraction)",
    "policy/entropy": "entropy per action token, nats",
    "policy/first_turn_entropy": "entropy of the first response, nats, estimated by the tokens sampled; none of demonstrations",
    "policy/kl_reference": "KL to the reference per action token, nats, estimated on the sampled tokens; none once the KL's weight has fallen to 0",
    "policy/kl_reference_start": "the same before the update, on its first optimizer batch",
    "policy/kl_old": "KL between the policies before and during the update per action token, nats (k3)",
    "policy/kl_update": "KL between the policies before and after the update per action token, nats (k3; with target_kl)",
    "policy/clip_fraction": "share of action tokens whose ratio was clipped",
    "policy/ESS": "effective sample size of the importance ratios, as a share of the action tokens",
    "policy/sampler_rejected": "share of action tokens that sampler_correction leaves out",
    "policy/sampler_weight": "weight that sampler_correction gives an action token, mean",
    "policy/log_ratio": "mean |log ratio| of new to old policy per action token",
    "policy/log_prob_gap": "mean |scorer - sampler| log-prob of the sampled tokens before the update, nats",
    "policy/version": "number of weight updates the policy has received",
    "policy/parity_gap": "largest |trainer - engine| log-prob on the parity check's prompts after the weight sync, nats (vLLM, Ray)",
    "credit/largest": "largest |advantage| of an action token",
    "credit/top_percent": "share of the sum of |advantage| that is on the hundredth of the action tokens that have most",
    "credit/valued": "share of turns whose state continuations have valued (branches)",
    "credit/alone": 'share of turns whose state no other episode of the group was in (GRPO with credit="state")',
    "credit/num_compared": 'turns of other episodes that a turn was compared with, mean over those that had any (GRPO with credit="state")',
    "credit/branched": "share of trees that branched; the episodes of the others had ended before (tree_branches)",
    "critic/explained_variance": "1 - Var[target - value] / Var[target] over turns, before the update",
    "critic/value_return_correlation": "Pearson correlation of value and value target over turns",
    "critic/clip_fraction": "share of turns whose value left the clip range around the old value",
    "optim/grad_norm_actor": "2-norm of the actor's gradient before clipping, mean over the optimizer steps that were taken",
    "optim/grad_norm_loss": "the same of parameters that loss or estimator have of their own",
    "optim/grad_norm_critic": "2-norm of the critic's gradient before clipping, mean over the optimizer steps that were taken",
    "optim/skipped_steps": "optimizer steps that were skipped, because a gradient was not finite",
    "optim/lr_actor": "learning rate of the actor",
    "optim/lr_critic": "learning rate of the critic",
    "optim/lr_loss": "learning rate of parameters that loss or estimator have of their own",
    "optim/entropy_target": "entropy of a token up to which the bonus pays for it, nats",
    "optim/kl_fraction": "share of kl_coeff that counted (kl_decay_fraction)",
    "optim/step_share": "share of an optimizer step that was kept, less than 1 where it reached target_kl",
    "data/padding_share": "share of padding in the training micro-batches; where rows share prefixes, most of it is not computed",
    "data/frac_nonzero_variance": "share of the collected episodes that the update learns from; 1 without dynamic_sampling",
    "data/staleness": "updates between the weights a token was sampled with and those it trains, mean over tokens",
    "data/dropped": "episodes started and not delivered so far: stale (async collector), or of a group with a failed one",
    "data/passed": "episodes so far whose seat never got to move, because its game had ended (self-play)",
    "data/continuations": "continuations played so far, to value states (branches)",
    "data/replayed_turns": "turns sampled once that further rows repeat, which rollout/steps counts in each (tree_branches)",
    "data/continued_turns": "turns sampled in continuations so far, which rollout/steps does not count (branches)",
    "data/faults": "episodes whose environment failed so far",
    "data/lost_workers": "workers on Ray that were lost and replaced so far",
    "data/tool_calls": "calls of tools in the batch, malformed ones too, where the environment has tools",
    "data/tool_faults": "those that were malformed, unknown, with wrong arguments, or refused by the tool (ToolEnv)",
    "data/tokens": "tokens in the rows of the batch, padding excluded",
    "data/action_share": "share of action tokens in the rows",
    "time/rollout_s": "seconds of collecting the batch",
    "time/score_s": "seconds of old and reference log-probs, values, and credit",
    "time/update_s": "seconds of the optimizer steps",
    "time/sync_s": "seconds of the weight sync to the engine (vLLM)",
    "time/evaluation_s": "seconds of evaluation in this iteration",
    "time/rollout_tokens_per_s": "sampled tokens per second of collecting",
    "time/update_tokens_per_s": "row tokens per second of score and update; a row counts once, whatever the epochs",
    **{
        f"{phase}/{name}": meaning.format(how)
        for phase, how in (("evaluation", "sampled as in training"), ("evaluation_greedy", "greedy decoding"))
        for name, meaning in {
            "success": "success rate on the tasks of evaluation, {}",
            "success_low": "lower end of its 95 % interval (Wilson's, clustered by task)",
            "success_high": "upper end of its 95 % interval (Wilson's, clustered by task)",
            "reward": "return on the tasks of evaluation, {}",
            "turns": "turns per episode on the tasks of evaluation, {}",
            "penalized": "share of their turns with a negative reward: in GEM's games, turns in no legal format",
            "faults": "episodes of the evaluation whose environment failed; they count as not won",
            "tasks": "different tasks among its episodes, by first observation and hidden state",
            "task_overlap": "share of its episodes whose task was trained on, by this run or before it (init_from); not logged where that is unknown",
        }.items()
    },
}
"""Name -> meaning of every metric that the trainer logs; an evaluator may add others under names of
their own."""


COUNTS = tuple(
    f"data/{name}"
    for name in ("dropped", "passed", "continuations", "replayed_turns", "continued_turns", "faults", "lost_workers")
)
"""The metrics of collectors that several processes add up."""


ROLLOUT_KEYS = (
    keys.TURN_IDS,
    keys.ATTENTION_MASK,
    keys.POLICY_VERSION,
    keys.EPISODE_ID,
    keys.ENV_ID,
    keys.TASK_ID,
    keys.TURN_MASK,
    keys.TURN_REWARD,
    keys.TURN_SUCCESS,
    keys.TURN_TERMINATED,
    keys.TURN_TRUNCATED,
    keys.ROW_WEIGHT,
    *(keys.row_key(column.name) for column in (*turn_columns.THINKING_COLUMNS, *turn_columns.TOOL_COLUMNS)),
    keys.row_key(turn_columns.TOOL_FAULTS),
)
"""The keys of rows that :func:`rollout_metrics`, :func:`staleness` and :func:`throughput` read."""


CREDIT_KEYS = (
    keys.ATTENTION_MASK,
    keys.EPISODE_ID,
    keys.TURN_IDS,
    keys.SAMPLE_LOG_PROB,
    keys.ADVANTAGE,
    keys.TURN_MASK,
    keys.TURN_VALUE,
    keys.TURN_VALUE_TARGET,
    keys.SAMPLED_VALUE,
    keys.TURN_NUM_COMPARED,
    keys.ROW_WEIGHT,
    keys.TURN_UNIT,
)
"""The keys of rows that :func:`credit_metrics` reads."""


PER_ENVIRONMENT = ("reward", "success", "turns")
"""Metrics of ``rollout/``, ``evaluation/`` and ``evaluation_greedy/`` that are also reported for
each environment of a mixture, as ``<metric>/<name>``."""


LOSS_METRICS: dict[str, str] = {
    "loss_objective": "loss/objective",
    "loss_critic": "loss/critic",
    "loss_entropy": "loss/entropy",
    "loss_kl": "loss/kl",
    "entropy": "policy/entropy",
    "kl": "policy/kl_reference",
    "kl_approx": "policy/kl_old",
    "clip_fraction": "policy/clip_fraction",
    "ESS": "policy/ESS",
    "log_ratio": "policy/log_ratio",
    "sampler_rejected": "policy/sampler_rejected",
    "sampler_weight": "policy/sampler_weight",
    "value_clip_fraction": "critic/clip_fraction",
    "nll": "loss/nll",
    "imitated": "loss/imitated",
}
"""Output key of a loss -> its name in :data:`METRICS`; averaged over the optimizer steps of an
iteration."""

_UNLOGGED = ("weight", "explained_variance")
"""Outputs that others are computed from, and what is logged of the whole batch instead."""


def loss_metric(key: str) -> str | None:
    """The name under which a loss's output is logged; ``None``: it is not. What a loss adds of its
    own is ``"loss/..."``.

    Raises:
        ValueError: the name is another output's.

    Examples:
        >>> loss_metric("kl_approx"), loss_metric("loss_diversity"), loss_metric("margin"), loss_metric("weight")
        ('policy/kl_old', 'loss/diversity', 'loss/margin', None)
    """
    if key in _UNLOGGED or key in LOSS_METRICS:
        return LOSS_METRICS.get(key)
    name = f"loss/{key.removeprefix('loss_')}"
    if name in METRICS:
        raise ValueError(
            f"The loss's output {key!r} would be logged as {name!r}, which is another: give it a name of its own."
        )
    return name


def wilson_interval(successes: float, trials: float, z: float = 1.959964) -> tuple[float, float]:
    """Confidence interval of a success rate (Wilson, 1927), 95 % by default.

    Args:
        successes: number of successes, 0 <= successes <= trials. A rate times an effective number
            of trials need not be whole.
        trials: number of trials, >= 1.
        z: normal quantile of the two-sided level.

    Returns:
        Lower and upper end, within [0, 1].

    Raises:
        ValueError: if the counts are out of range.

    Examples:
        >>> low, high = wilson_interval(50, 100)
        >>> round(low, 3), round(high, 3)
        (0.404, 0.596)
    """
    if not 0 <= successes <= trials or trials < 1:
        raise ValueError(f"{successes} successes of {trials} trials; expected 0 <= successes <= trials, trials >= 1.")
    # Not the normal approximation, whose interval has no width at 0 and at 1.
    rate, z2n = successes / trials, z * z / trials
    center = (rate + z2n / 2) / (1 + z2n)
    half = z / (1 + z2n) * (rate * (1 - rate) / trials + z2n / (4 * trials)) ** 0.5
    # Rounding may leave [0, 1] by a digit.
    return max(0.0, center - half), min(1.0, center + half)


def success_interval(won: Tensor, task: Tensor) -> tuple[float, float]:
    """95 % interval of a success rate whose episodes share tasks: Wilson's, for the effective
    number of episodes.

    Episodes of one task are not independent samples of tasks. With the variance of the rate,
    clustered by task, ``V = sum_g (sum_{i in g} (won_i - rate))**2 / n**2`` (Miller, *Adding Error
    Bars to Evals*, 2024, arXiv:2411.00640), they are worth ``rate (1 - rate) / V`` independent
    ones, at most ``n``; where all were won, or none, one a task. With a single task the interval
    covers the rate on this task only.

    Args:
        won: ``[n]`` bool.
        task: ``[n]`` int64, equal for episodes of the same task.

    Examples:
        >>> won = torch.tensor([True, False] * 10)
        >>> apart = success_interval(won, torch.arange(20))
        >>> repeated = success_interval(won.repeat(10), torch.arange(20).repeat(10))
        >>> [round(end, 2) for end in (*apart, *repeated)]
        [0.3, 0.7, 0.3, 0.7]
    """
    n, rate = len(won), won.double().mean().item()
    labels, group = task.unique(return_inverse=True)
    groups = len(labels)
    sums = torch.zeros(groups, dtype=torch.float64, device=won.device).index_add_(0, group, won.double() - rate)
    spread, variance = rate * (1 - rate), sums.square().sum().item() / n**2
    if spread == 0 and groups > 1:
        # All were won, or none: the variance is 0, and says nothing of how alike the episodes of a
        # task are. So each task counts once.
        effective = float(groups)
    else:
        # At most n: a variance below that of independent episodes is chance.
        effective = spread / variance if variance * n > spread else float(n)
    return wilson_interval(rate * effective, max(1.0, effective))


def named(metric: str) -> bool:
    """Whether a metric is in :data:`METRICS`, or is one of them for one environment of a mixture.

    Examples:
        >>> named("rollout/success/game:Wordle-v0-easy"), named("evaluation/turns/Echo"), named("rollout/luck"), named("elo")
        (True, True, False, False)
    """
    phase, _, rest = metric.partition("/")
    statistic, _, environment = rest.partition("/")
    shared = phase in ("rollout", "evaluation", "evaluation_greedy") and statistic in PER_ENVIRONMENT
    return metric in METRICS or (shared and environment != "")


def checked_metrics(metrics: Mapping[str, Any], *, source: str = "evaluator") -> dict[str, float]:
    """The metrics of an evaluator, or of what else is the ``source``, as loggers and checkpoints
    take them.

    Raises:
        ValueError: a name belongs to a metric of training.
        TypeError: a value is not a number.
    """
    taken = sorted(name for name in metrics if named(name) and not name.startswith("evaluation"))
    if taken:
        raise ValueError(f"The {source} returned {taken}, which are metrics of training: give them names of their own.")
    numbers = {}
    for name, value in metrics.items():
        try:
            # Tensors and NumPy's numbers are taken; loggers and JSON want Python's own.
            numbers[name] = float(value)
        except (TypeError, ValueError) as error:
            raise TypeError(f"{name!r} is {value!r}; expected a number, for it is a metric of the {source}.") from error
    return numbers


def rollout_metrics(rows: TensorDictBase, env_names: Sequence[str] = ()) -> dict[str, float]:
    """Statistics of episodes: return, success, turns, lengths, from rows ``[B]``.

    Args:
        rows: one episode each, counted by its ``"row_weight"``: in a tree, more rows last to the
            branch than episodes of the policy do.
        env_names: of the environments of a mixture, such as ``GEMEnv.names``. If there are several,
            :data:`PER_ENVIRONMENT` is also reported as ``rollout/<metric>/<name>`` for each that
            occurs; environments of the same name count together.
    """
    result = _rollout_metrics(rows)
    if len(env_names) > 1:
        for name in dict.fromkeys(env_names):
            ids = torch.tensor([i for i, other in enumerate(env_names) if other == name], device=rows.device)
            chosen = torch.isin(rows[keys.ENV_ID], ids)
            if chosen.any():
                own = _rollout_metrics(rows[chosen])
                result |= {f"rollout/{statistic}/{name}": own[f"rollout/{statistic}"] for statistic in PER_ENVIRONMENT}
    return result


def _row_weights(rows: TensorDictBase) -> Tensor:
    """How much each row counts in a mean over episodes, ``[B]``, 1 on average."""
    weight = rows.get(keys.ROW_WEIGHT, None)
    return torch.ones(len(rows), device=rows.device) if weight is None else weight / weight.mean()


def _rollout_metrics(rows: TensorDictBase) -> dict[str, float]:
    mask, weight = rows[keys.TURN_MASK], _row_weights(rows)
    actions = rows[keys.TURN_IDS] >= 0
    turns, valid = (mask.sum(-1) * weight).sum(), rows[keys.ATTENTION_MASK].sum()
    truncated = rows[keys.TURN_TRUNCATED] & ~rows[keys.TURN_TERMINATED] & mask
    penalized = (rows[keys.TURN_REWARD] < 0) & mask
    means = {
        "rollout/reward": (rows[keys.TURN_REWARD] * mask).sum(-1),
        "rollout/success": rows[keys.TURN_SUCCESS].logical_and(mask).any(-1),
        "rollout/truncated": truncated.any(-1),
        "rollout/turns": mask.sum(-1),
    }
    return (
        {name: (each * weight).mean().item() for name, each in means.items()}
        | _thinking_metrics(rows, weight)
        | _tool_metrics(rows)
        | {
            "rollout/penalized": ((penalized.sum(-1) * weight).sum() / turns).item(),
            "rollout/response_length": ((actions.sum(-1) * weight).sum() / turns).item(),
            "data/tokens": float(valid),
            "data/action_share": (actions.sum() / valid).item(),
        }
    )


def _thinking_metrics(rows: TensorDictBase, weight: Tensor) -> dict[str, float]:
    """Means over the turns of which thinking was counted."""
    mask, metrics = rows[keys.TURN_MASK], {}
    extras = turn_columns.declared_columns(rows.get(keys.row_key("extra"), None))
    for key in (turn_columns.THINKING_LENGTH, turn_columns.THINKING_OPEN):
        if key in extras and (counted := mask & ~extras[key].isnan()).any():
            total = (extras[key].where(counted, 0.0).sum(-1) * weight).sum()
            metrics[f"rollout/{key[-1]}"] = (total / (counted.sum(-1) * weight).sum()).item()
    return metrics


def _tool_metrics(rows: TensorDictBase) -> dict[str, float]:
    """Sums over the turns of which calls were counted."""
    mask, metrics = rows[keys.TURN_MASK], {}
    extras = turn_columns.declared_columns(rows.get(keys.row_key("extra"), None))
    for key in (turn_columns.TOOL_CALLS, turn_columns.TOOL_FAULTS):
        if key in extras and extras[key].is_floating_point():
            metrics[f"data/{key[-1]}"] = extras[key].where(mask, 0.0).nansum().item()
    return metrics


def credit_metrics(rows: TensorDictBase) -> dict[str, float]:
    """How the advantages of rows ``[B]`` are spread; with a critic, how well its values predict
    their targets."""
    turn_ids = rows[keys.TURN_IDS]
    size = rows[keys.ADVANTAGE][turn_ids >= 0].double().abs().sort(descending=True).values
    top = size[: math.ceil(len(size) / 100)]
    metrics = {
        # 0 where every prompt filled the context and nothing was sampled
        "credit/largest": size[:1].sum().item(),
        "credit/top_percent": (top.sum() / size.sum()).item() if size.any() else float("nan"),
    }
    known = set(rows.keys(include_nested=True))
    metrics |= _first_turn_entropy(rows) if keys.SAMPLE_LOG_PROB in known else {}
    metrics |= _critic_metrics(rows) if keys.TURN_VALUE in known else {}
    return metrics | _state_metrics(rows, known)


def _first_turn_entropy(rows: TensorDictBase) -> dict[str, float]:
    # -log p of sampled tokens estimates their entropy without bias, and needs no forward.
    surprisal = torch.where(rows[keys.TURN_IDS] == 0, -rows[keys.SAMPLE_LOG_PROB].double(), 0.0).sum(-1)
    sampled = ~surprisal.isnan()  # demonstrations have no log-probs
    if not bool(sampled.any()):
        return {}
    return {"policy/first_turn_entropy": (surprisal[sampled] * _row_weights(rows[sampled])).mean().item()}


def _state_metrics(rows: TensorDictBase, known: set[keys.NestedKey]) -> dict[str, float]:
    """What states had to be compared with: continuations, or turns of other episodes."""
    metrics = {}
    if keys.TURN_UNIT in known:  # trees are of one size, so that rows may be counted
        apart = (rows[keys.TURN_UNIT] != rows[keys.TURN_UNIT][:, :1]) & rows[keys.TURN_MASK]
        metrics["credit/branched"] = apart.any(1).double().mean().item()
    for key in (keys.SAMPLED_VALUE, keys.TURN_NUM_COMPARED):
        if key not in known:
            continue
        decided = turn_lengths(rows[keys.TURN_IDS], rows[key].shape[1]) > 0
        found = rows[key][decided].double()
        if key == keys.SAMPLED_VALUE:
            metrics["credit/valued"] = 1.0 - found.isnan().double().mean().item()
        else:
            metrics["credit/alone"] = (found == 0).double().mean().item()
            metrics["credit/num_compared"] = found[found > 0].mean().item() if found.any() else 0.0
    return metrics


def _critic_metrics(rows: TensorDictBase) -> dict[str, float]:
    mask = rows[keys.TURN_MASK]
    value, target = rows[keys.TURN_VALUE][mask].double(), rows[keys.TURN_VALUE_TARGET][mask].double()
    # Both are undefined when the targets do not vary, the correlation also when the values do not:
    # nan says so.
    explained = correlation = float("nan")
    if target.var() > 0:
        explained = explained_variance(value, target, torch.ones_like(target)).item()
        if value.var() > 0:
            correlation = torch.corrcoef(torch.stack([value, target]))[0, 1].item()
    return {"critic/explained_variance": explained, "critic/value_return_correlation": correlation}


def staleness(rows: TensorDictBase, policy_version: int) -> float:
    """Weight updates between sampling and ``policy_version``, mean over the action tokens of rows
    ``[B]``."""
    versions = rows[keys.POLICY_VERSION]
    return (policy_version - versions[versions >= 0]).double().mean().item()


class Timer:
    """Adds up wall-clock seconds by phase.

    Examples:
        >>> timer = Timer()
        >>> with timer("rollout"):
        ...     pass
        >>> sorted(timer.read())
        ['time/rollout_s']
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Around a phase, or as a decorator of a function."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[f"time/{phase}_s"] += time.perf_counter() - start

    def read(self) -> dict[str, float]:
        """Seconds by phase, as metrics, since the last :meth:`read`."""
        seconds, self._seconds = dict(self._seconds), defaultdict(float)
        return seconds


def throughput(rows: TensorDictBase, seconds: Mapping[str, float]) -> dict[str, float]:
    """Tokens per second of an iteration with rows ``[B]`` that took ``seconds``
    (:meth:`Timer.read`)."""
    metrics = {"time/rollout_tokens_per_s": (rows[keys.TURN_IDS] >= 0).sum().item() / seconds["time/rollout_s"]}
    learning = seconds.get("time/score_s", 0.0) + seconds.get("time/update_s", 0.0)
    if learning:
        metrics["time/update_tokens_per_s"] = rows[keys.ATTENTION_MASK].sum().item() / learning
    return metrics
