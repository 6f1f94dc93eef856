"""Which credit assignment should I use? The estimators on identical data, and what they teach a model.

    python benchmarks/credit.py gradients --output-dir runs/credit
    python benchmarks/credit.py learning --env guess --output-dir runs/credit
    python benchmarks/credit.py learning --env early --output-dir runs/credit
    python benchmarks/credit.py report --output-dir runs/credit

``gradients`` draws batches from a language MDP that is small enough to enumerate and compares the gradient of each
estimator's loss with the true one. ``learning`` trains LLMPPO, LLMREINFORCE and GRPO with several seeds, on GuessTheNumber
(:mod:`learning`'s runs) or on :class:`~torchrl_llm.testing.environments.EarlyDecision`, where each algorithm first chooses its
learning rate and entropy bonus from the same grid, on seeds that are not reported. A run that is finished (it has a ``result.json``) is not
run again. ``report`` writes the tables and plots of ``docs/results/credit.md``.
"""

import argparse
import csv
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import torch
from matplotlib.figure import Figure
from tensordict import TensorDict
from torch import Tensor
from torch.nn.functional import cosine_similarity

from torchrl_llm import keys
from torchrl_llm.modules import TokenScorer, TurnCritic
from torchrl_llm.objectives import (
    LLMGRPOLoss,
    LLMPPOLoss,
    LLMReinforceLoss,
    TurnPolicyLoss,
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
from torchrl_llm.testing.environments import EarlyDecision
from torchrl_llm.testing.tiny import random_model
from torchrl_llm.testing.tokenizers import word_tokenizer
from torchrl_llm.trainers import RunConfig, build_run

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from report import fill, machine  # noqa: E402

PAGE = ROOT / "docs" / "results" / "credit.md"
PLOTS = ROOT / "docs" / "results" / "credit"


# ---------------------------------------------------------------------------------------------------------------------
# Gradients
# ---------------------------------------------------------------------------------------------------------------------


def unequal(task: int, said: tuple[tuple[int, ...], ...]) -> Step:
    """:func:`~torchrl_llm.testing.enumerable.small_talk` with 3 more for whoever ends a conversation of task 1.

    Nobody can act upon that, and the true gradient is the same; but one task is now much easier than the other.
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
        options: of the loss.
        critic: whose values the rows carry: ``"exact"``, ``"random"``, or none.
    """

    name: str
    algo: type[TurnPolicyLoss]
    options: dict[str, Any] = field(default_factory=dict)
    critic: str | None = None

    def build(self, actor: TokenScorer, critic: TurnCritic) -> TurnPolicyLoss:
        """The loss, with constant weights unless the options say otherwise."""
        options = PLAIN | self.options
        if options["weighting"] != "constant":
            options.pop("weight_constant")
        return self.algo(actor, critic, **options) if self.algo is LLMPPOLoss else self.algo(actor, **options)


def _gae(lmbda: float, **options: Any) -> dict[str, Any]:
    return {"gamma": 1.0, "lmbda": lmbda, "whiten": False} | options


def _group(baseline: str, scale: str = "none", **options: Any) -> dict[str, Any]:
    return {"baseline": baseline, "scale": scale, **options}


_RETURNS = {"gamma": 1.0, "normalize_over": "none"}

ESTIMATORS = [
    Estimator("returns to go", LLMReinforceLoss, _RETURNS),
    Estimator("returns to go, token weights", LLMReinforceLoss, _RETURNS | {"weighting": "token"}),
    Estimator("returns to go, sequence weights", LLMReinforceLoss, _RETURNS | {"weighting": "sequence"}),
    Estimator("ReBN", LLMReinforceLoss, {"gamma": 1.0}),
    Estimator("group mean / std (GRPO)", LLMGRPOLoss, _group("mean", "std")),
    Estimator("group mean (Dr. GRPO)", LLMGRPOLoss, _group("mean")),
    Estimator("leave-one-out (RLOO)", LLMGRPOLoss, _group("leave_one_out")),
    Estimator("group mean, per turn", LLMGRPOLoss, _group("mean", credit="turn")),
    Estimator("GAE 1, exact critic", LLMPPOLoss, _gae(1.0), "exact"),
    Estimator("GAE 0.95, exact critic", LLMPPOLoss, _gae(0.95), "exact"),
    Estimator("GAE 0, exact critic", LLMPPOLoss, _gae(0.0), "exact"),
    Estimator("GAE 0.95, exact critic, whitened", LLMPPOLoss, _gae(0.95, whiten=True), "exact"),
    Estimator("GAE 1, random critic", LLMPPOLoss, _gae(1.0), "random"),
    Estimator("GAE 0.95, random critic", LLMPPOLoss, _gae(0.95), "random"),
    Estimator("GAE 0, random critic", LLMPPOLoss, _gae(0.0), "random"),
    Estimator('GAE 1, exact critic, value "mean"', LLMPPOLoss, _gae(1.0, value_reduction="mean"), "exact"),
    Estimator('GAE 1, exact critic, value "last"', LLMPPOLoss, _gae(1.0, value_reduction="last"), "exact"),
]


def token_scores(mdp: EnumerableMDP, actor: TokenScorer) -> Tensor:
    """Gradient ``[n, L, P]`` of the log-probability of each token of each conversation; 0 off actions."""
    rows = mdp.rows()
    log_prob = actor(rows.clone())[keys.LOG_PROB]
    size = sum(parameter.numel() for parameter in actor.parameters())
    scores = log_prob.new_zeros(*log_prob.shape, size)
    for place in (rows[keys.TURN_IDS] >= 0).nonzero().tolist():
        scores[tuple(place)] = flat_gradient(actor(rows[place[:1]])[keys.LOG_PROB][0, place[1]], actor)
    return scores


def draw(mdp: EnumerableMDP, actor: TokenScorer, batches: int, size: int, generator: torch.Generator) -> Tensor:
    """Batches of whole groups: index ``[batches, size]`` into the conversations.

    The task of each group of :data:`GROUP` is drawn uniformly, then its conversations independently from the policy.
    """
    task, probability = mdp.rows()[keys.GROUP_ID], mdp.log_probability(actor).detach().exp()
    tasks = torch.randint(mdp.tasks, (batches * size // GROUP,), generator=generator)
    given_task = torch.where(task == torch.arange(mdp.tasks).unsqueeze(1), probability, 0.0)
    return given_task[tasks].multinomial(GROUP, replacement=True, generator=generator).view(batches, size)


def credit_of(loss: TurnPolicyLoss, rows: TensorDict, index: Tensor) -> Tensor:
    """What multiplies each token's score in the gradient of one batch: weight times advantage, ``[B, L]``."""
    batch = write_loss_weights(loss.value_estimator(_batch(rows, index)), loss)
    return (batch[keys.LOSS_WEIGHT].double() * batch[keys.ADVANTAGE]).where(batch[keys.TURN_IDS] >= 0, 0.0)


def _batch(rows: TensorDict, index: Tensor) -> TensorDict:
    """The rows ``index`` as a batch of groups."""
    batch = rows.exclude(keys.EPISODE_ID)[index]
    batch[keys.GROUP_ID] = torch.arange(len(index)) // GROUP
    return batch


def gradients_of(loss: TurnPolicyLoss, rows: TensorDict, scores: Tensor, index: Tensor) -> Tensor:
    """The ascent direction ``[M, P]`` that the loss gives on each batch of ``index [M, B]``.

    At ratio 1 the gradient of the loss is the sum of credit times score, so that one table of scores serves all batches.
    That this is the gradient of the real loss is checked by backward passes through the first three batches.
    """
    coefficients = scores.new_zeros(len(index), *scores.shape[:2])
    for coefficient, chosen in zip(coefficients, index, strict=True):
        coefficient.index_add_(0, chosen, credit_of(loss, rows, chosen))
    gradients = coefficients.flatten(1) @ scores.flatten(0, 1)
    for gradient, chosen in zip(gradients[:3], index, strict=False):
        torch.testing.assert_close(gradient, batch_gradient(loss, _batch(rows, chosen)), rtol=1e-9, atol=1e-12)
    return gradients


def summary(gradients: Tensor, truth: Tensor, blocks: int = 20) -> dict[str, float]:
    """Bias and noise of gradients ``[M, P]`` against the true one ``[P]``.

    - ``cosine_mean``: cosine of the expected gradient and the truth. The mean of ``M`` gradients still has noise across the
      truth, which alone would turn it away; its expected square is subtracted, so that the figure can exceed 1 by its
      error. ``cosine_mean_se``: its jackknife standard error over ``blocks`` blocks.
    - ``cosine_batch``: mean cosine of one batch's gradient, 0 for a batch that gives none.
    - ``noise``: trace of the covariance of one batch's gradient over the squared length of the expected one.
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
    """Every estimator on the same batches of one policy: ``{game, estimator, policy, size, batches, **summary}`` each."""
    mdp = EnumerableMDP(game=GAMES[game], max_turns=None)
    actor, critic = TokenScorer(tiny_lm(policy)), random_critic(policy + 1000)
    rows, truth, scores = mdp.rows(actor), mdp.policy_gradient(actor), token_scores(mdp, actor)
    exact = rows.clone()
    exact[keys.STATE_VALUE], exact[keys.BOOTSTRAP_VALUE] = mdp.state_values(actor)
    with torch.no_grad():
        values = {"exact": exact, "random": critic(rows.clone()), None: rows}
    results = []
    for size in sizes:
        index = draw(mdp, actor, batches, size, torch.Generator().manual_seed(policy))
        for estimator in ESTIMATORS:
            loss = estimator.build(actor, critic)
            figures = summary(gradients_of(loss, values[estimator.critic], scores, index), truth)
            about = {"game": game, "estimator": estimator.name, "policy": policy, "size": size, "batches": batches}
            results.append(about | figures)
        print(f"{game}, policy {policy}, batches of {size}: done", flush=True)
    return results


def gradients(output: Path, policies: int, batches: int, sizes: list[int]) -> None:
    """Write ``gradients.json``."""
    pairs = [(game, policy) for game in GAMES for policy in range(policies)]
    results = [each for game, policy in pairs for each in compare_gradients(game, policy, batches, sizes)]
    output.mkdir(parents=True, exist_ok=True)
    (output / "gradients.json").write_text(json.dumps(results, indent=1) + "\n")


# ---------------------------------------------------------------------------------------------------------------------
# Learning
# ---------------------------------------------------------------------------------------------------------------------

ALGORITHMS: dict[str, dict[str, Any]] = {
    "LLMREINFORCE": {"algo": "LLMREINFORCE"},
    "LLMPPO": {"algo": "LLMPPO", "lmbda": 0.95},
    "GRPO": {"algo": "GRPO", "group_size": 8},
    "GRPO per turn": {"algo": "GRPO", "group_size": 8, "credit": "turn"},
}
"""What sets them apart on EarlyDecision. The last one tells what is the group's from what is the credit's."""
COMPARED = {"guess": list(ALGORITHMS)[:3], "early": list(ALGORITHMS)}
TUNED = [{"lr_actor": lr, "entropy_coeff": entropy} for entropy in (0.01, 0.03) for lr in (1.5e-3, 3e-3, 6e-3)]
"""What each algorithm may choose from on EarlyDecision."""
TUNING_SEEDS = (100, 101)
EARLY = {
    "dtype": "float32",
    "device": "cpu",
    "lora_r": 0,
    "num_envs": 128,
    "batch_size": 128,
    "max_model_len": 64,
    "max_output_tokens": 1,
    "epochs": 2,
    "gamma": 1.0,
    "kl_coeff": 0.0,
    "schedule": "constant",
    "max_iterations": 200,
    "max_steps": 10**9,
    "evaluation_interval": 0,
    "final_episodes": 512,
    "save_checkpoints": False,
    "progress": False,
}
"""Settings that all algorithms have in common on EarlyDecision."""


def train_early(name: str, seed: int, chosen: dict[str, float], output: Path) -> None:
    """One run on EarlyDecision from random weights; writes ``result.json``."""
    started = time.process_time()
    tokenizer = word_tokenizer(EarlyDecision.WORDS)
    random_model(tokenizer, seed=seed).save_pretrained(output / "model")
    tokenizer.save_pretrained(output / "tokenizer")
    options = EARLY | ALGORITHMS[name] | chosen | {"seed": seed}
    paths = {"model_path": str(output / "model"), "tokenizer_path": str(output / "tokenizer"), "output_dir": output}
    run = build_run(RunConfig(**options, **paths), env=EarlyDecision)
    before = run.final_evaluation()
    run.trainer.train()
    after = run.final_evaluation()
    result = {
        "algo": name,
        "seed": seed,
        "env_name": "EarlyDecision",
        **chosen,
        "success_before": before.success,
        "success_after": after.success,
        "reward_before": before.reward,
        "reward_after": after.reward,
        "episodes": run.trainer.episodes,
        "iterations": run.trainer.iteration,
        "cpu_s": round(time.process_time() - started, 1),
    }
    (output / "result.json").write_text(json.dumps(result, indent=2) + "\n")


def train_guess(name: str, seed: int, output: Path) -> None:
    """One run on GuessTheNumber-easy, by ``benchmarks/learning.py``."""
    script = [sys.executable, str(ROOT / "benchmarks" / "learning.py"), "--progress=false"]
    subprocess.run([*script, f"--algo={name}", f"--seed={seed}", f"--output-dir={output}"], check=True)


def once(output: Path, train: Callable[[Path], None]) -> dict:
    """The result of a run, which is made only if it is not there."""
    path = output / "result.json"
    if not path.exists():
        train(output)
        result = json.loads(path.read_text())
        print(f"{output}: success {result['success_before']:.3f} -> {result['success_after']:.3f}", flush=True)
    return json.loads(path.read_text())


def tuned(name: str, folder: Path) -> dict[str, float]:
    """The settings of :data:`TUNED` with the highest success over all training batches, on the tuning seeds."""
    return max(TUNED, key=lambda chosen: tuning_score(name, chosen, folder))


def tuning_score(name: str, chosen: dict[str, float], folder: Path) -> float:
    """Mean success over all training batches of the tuning seeds."""
    scores = []
    for seed in TUNING_SEEDS:
        output = folder / "tuning" / "-".join([name, *(f"{value:g}" for value in chosen.values()), str(seed)])
        once(output, partial(train_early, name, seed, chosen))
        scores.append(fmean(success_curve(output)[1]))
    return fmean(scores)


def learn(env: str, seeds: list[int], folder: Path) -> None:
    """Every run of ``env`` that is not there yet."""
    for seed in seeds:
        for name in COMPARED[env]:
            output = folder / env / f"{name}-{seed}"
            if env == "guess":
                once(output, partial(train_guess, name, seed))
            else:
                once(output, partial(train_early, name, seed, tuned(name, folder)))


def success_curve(run: Path) -> tuple[list[float], list[float]]:
    """Games played and success rate of each training batch."""
    scalars = run / "csv" / "scalars" / "rollout"
    games, wins = (
        [float(row[1]) for row in csv.reader((scalars / f"{name}.csv").open())] for name in ("episodes", "success")
    )
    return games, wins


def smooth(curve: list[float], width: int = 5) -> list[float]:
    """Mean of the last ``width`` figures."""
    return [fmean(curve[max(0, i - width + 1) : i + 1]) for i in range(len(curve))]


# ---------------------------------------------------------------------------------------------------------------------
# Report
# ---------------------------------------------------------------------------------------------------------------------

TITLES = {"guess": "GuessTheNumber-easy", "early": "EarlyDecision"}
GOAL = 0.9
COLOURS = dict(zip(ALGORITHMS, ["#0072b2", "#d55e00", "#009e73", "#cc79a7"], strict=True))
T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""97.5 % quantiles of Student's t with 1, 2, ... degrees of freedom."""


def mean_interval(figures: list[float]) -> tuple[float, float]:
    """Mean over seeds and half the width of its 95 % interval (Student's t)."""
    return fmean(figures), T95[len(figures) - 2] * stdev(figures) / len(figures) ** 0.5


def runs_of(env: str, name: str, folder: Path) -> list[Path]:
    """The finished runs, by seed."""
    found = [path.parent for path in (folder / env).glob(f"{name}-*/result.json")]
    return sorted(found, key=lambda run: int(run.name.rsplit("-", 1)[1]))


def games_to_goal(run: Path) -> float | None:
    """Games until the mean success of five batches reaches :data:`GOAL`; ``None``: never."""
    games, wins = success_curve(run)
    return next((at for at, win in zip(games, smooth(wins), strict=True) if win >= GOAL), None)


def learning_table(env: str, folder: Path) -> str:
    """One line an algorithm."""
    runs = {name: runs_of(env, name, folder) for name in COMPARED[env]}
    common = min(success_curve(run)[0][-1] for each in runs.values() for run in each)
    lines = [
        f"| | after training | by seed | mean over {common:,.0f} games | games to {GOAL:.0%}: median (seeds) | CPU-s |",
        "|---|---|---|---|---|---|",
    ]
    for name, each in runs.items():
        results = [json.loads((run / "result.json").read_text()) for run in each]
        curves = [success_curve(run) for run in each]
        final, final_half = mean_interval([result["success_after"] for result in results])
        area, area_half = mean_interval(
            [fmean(win for at, win in zip(*curve, strict=True) if at <= common) for curve in curves]
        )
        reached = [at for at in map(games_to_goal, each) if at is not None]
        when = f"{median(reached):,.0f} ({len(reached)} of {len(each)})" if reached else f"never (0 of {len(each)})"
        seeds = ", ".join(f"{result['success_after']:.2f}" for result in results)
        lines.append(
            f"| {name} | {final:.3f} ± {final_half:.3f} | {seeds} | {area:.3f} ± {area_half:.3f} | {when} | "
            f"{fmean(result['cpu_s'] for result in results):.0f} |"
        )
    return "\n".join(lines)


def tuning_table(folder: Path) -> str:
    """Mean success over training on the tuning seeds, one line an algorithm; the best one bold."""
    heads = [f"lr {chosen['lr_actor']:g}, entropy {chosen['entropy_coeff']:g}" for chosen in TUNED]
    lines = [f"| | {' | '.join(heads)} |", "|---|" + "---|" * len(TUNED)]
    for name in COMPARED["early"]:
        scores = [tuning_score(name, chosen, folder) for chosen in TUNED]
        cells = [f"**{score:.3f}**" if score == max(scores) else f"{score:.3f}" for score in scores]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


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


def plot_learning(folder: Path, path: Path) -> None:
    """Success over games: mean over seeds and its 95 % interval."""
    figure = Figure(figsize=(9.5, 4.0), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for env, axis in zip(TITLES, axes, strict=True):
        for name in COMPARED[env]:
            curves = [success_curve(run) for run in runs_of(env, name, folder)]
            length = min(len(games) for games, _ in curves)
            wins = zip(*(smooth(win)[:length] for _, win in curves), strict=True)
            mean, half = torch.tensor([mean_interval(list(each)) for each in wins]).unbind(1)
            thousands = [at / 1000 for at in curves[0][0][:length]]
            axis.plot(thousands, mean, color=COLOURS[name], label=name, linewidth=1.5)
            axis.fill_between(thousands, mean - half, mean + half, color=COLOURS[name], alpha=0.15, linewidth=0)
        axis.set(title=f"{TITLES[env]}, {len(curves)} seeds", xlabel="thousand games played", ylim=(0, 1.02))
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("success rate of training batches\n(mean of the last 5)")
    figure.legend(*axes[1].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, dpi=85)


def write_report(folder: Path) -> None:
    """Fill the tables of the page and draw its plots."""
    results = json.loads((folder / "gradients.json").read_text())
    PLOTS.mkdir(exist_ok=True)
    plot_gradients(results, PLOTS / "gradients.png")
    plot_learning(folder, PLOTS / "learning.png")
    for game in GAMES:
        fill(PAGE, f"gradients, {game}", gradient_table(results, game))
    for env in TITLES:
        fill(PAGE, f"learning {env}", learning_table(env, folder))
    fill(PAGE, "tuning", tuning_table(folder))
    fill(PAGE, "machine", f"| machine |\n|---|\n| {machine()} |")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    compare = commands.add_parser("gradients", help="bias and noise of the estimators' gradients")
    compare.add_argument("--policies", type=int, default=5, help="random language models that play; default 5")
    compare.add_argument("--batches", type=int, default=2000, help="batches of each size; default 2000")
    compare.add_argument(
        "--sizes",
        type=int,
        nargs=2,
        default=[8, 32],
        help="conversations in a batch, a smaller and a larger number; default 8 32",
    )
    train = commands.add_parser("learning", help="learning curves")
    train.add_argument("--env", choices=list(COMPARED), required=True)
    train.add_argument("--seeds", type=int, nargs="+", default=list(range(5)), help="default 0 1 2 3 4")
    report = commands.add_parser("report", help="tables and plots of docs/results/credit.md")
    for command in (compare, train, report):
        command.add_argument("--output-dir", type=Path, default=Path("runs/credit"), help="default: runs/credit")
    arguments = parser.parse_args()
    if arguments.command == "gradients":
        gradients(arguments.output_dir, arguments.policies, arguments.batches, arguments.sizes)
    elif arguments.command == "learning":
        learn(arguments.env, arguments.seeds, arguments.output_dir)
    else:
        write_report(arguments.output_dir)


if __name__ == "__main__":
    main()
