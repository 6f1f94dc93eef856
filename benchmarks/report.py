"""Tables and plots of ``docs/results/`` from the JSON files of the benchmarks.

    python benchmarks/report.py --learning runs/learning/final-2
    python benchmarks/report.py --learning runs/learning/final-3-coins
    python benchmarks/report.py --iteration runs/iteration
    python benchmarks/report.py --rollout runs/rollout
    python benchmarks/report.py --scaling runs/scaling.json runs/ranks.json

Reads what ``learning.py --seeds`` summarized, ``<iteration>/*.json``, ``<rollout>/*.json`` and the
results of ``scaling.py`` and ``ranks.py``; writes the tables and plots of
``docs/results/learning.md``, ``docs/results/iteration.md``, ``docs/results/rollout.md``,
``docs/results/scaling.md``, and the tables of ``README.md``.
"""

import argparse
import json
import platform
import re
import shutil
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"
ALGORITHMS = ["LLMREINFORCE", "LLMPPO", "GRPO"]


def machine() -> str:
    """What the figures were taken on."""
    cpu = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.processor(),
    )
    return f"{cpu}, one thread, Python {platform.python_version()}, torch {torch.__version__}"


def iteration_summary(results: list[dict]) -> str:
    """One line an algorithm: ratios."""
    lines = [
        "| | rollout, of raw | learn, of raw | rollout, of AgileRL | learn, of AgileRL | peak memory, of AgileRL |",
        "|---|---|---|---|---|---|",
    ]
    for r in results:
        lines.append(
            f"| {r['algo']} | {r['rollout_of_raw']:.2f} | {r['learn_of_raw']:.2f} | {r['rollout_ratio']:.1f} | "
            f"{r['learn_ratio']:.1f} | {r['peak_rss_ratio']:.2f} |"
        )
    return "\n".join(lines)


def iteration_table(results: list[dict]) -> str:
    """One line a figure."""
    names = {
        "rollout_tok_cpu_s": "rollout, sampled tokens per CPU-s",
        "raw_rollout_tok_cpu_s": "raw limit: `model.generate` of the same batches",
        "peer_rollout_tok_cpu_s": "AgileRL 2.9.1",
        "learn_tok_cpu_s": "learn, row tokens per CPU-s",
        "raw_learn_tok_cpu_s": "raw limit: forward and backward only",
        "peer_learn_tok_cpu_s": "AgileRL 2.9.1",
        "cpu_s_per_iteration": "CPU-s per iteration",
        "peak_rss_mb": "peak memory, MB",
        "peer_peak_rss_mb": "AgileRL 2.9.1",
        "padding_share": "padding share",
        "turns": "turns per conversation",
        "row_tokens": "tokens per conversation",
    }
    lines = [f"| | {' | '.join(r['algo'] for r in results)} |", "|---|" + "---|" * len(results)]
    lines += [f"| {text} | {' | '.join(f'{r[name]:,.4g}' for r in results)} |" for name, text in names.items()]
    return "\n".join(lines)


def rollout_targets(result: dict) -> str:
    """One line a target."""
    names = {
        "policy_over_raw": "overhead of `VLLMPolicy` over the raw engine",
        "async_over_barrier": "`async` over `barrier`",
        "async_of_bound": "`async`, share of the bound",
    }
    lines = ["| | target | measured | met |", "|---|---|---|---|"]
    for name, verdict in result["targets"].items():
        world, ratio = name.split("/")
        met = "yes" if verdict["met"] else "**no**"
        lines.append(f"| {names[ratio]}, {world} | {verdict['target']} | {verdict['value']:.2f} | {met} |")
    return "\n".join(lines)


def rollout_table(result: dict) -> str:
    """One line a contender of each world."""
    lines = ["| | wall s | CPU-s | policy s | engine s | tokens per s |", "|---|---|---|---|---|---|"]
    for world in ("instant", "slow"):
        for name, figures in result[world]["contenders"].items():
            parts = " | ".join(f"{figures[part]:.2f}" if part in figures else "" for part in ("policy_s", "engine_s"))
            lines.append(
                f"| {world}: {name} | {figures['wall_s']:.2f} | {figures['cpu_s']:.2f} | {parts} | "
                f"{figures['tokens_per_s']:,} |"
            )
    return "\n".join(lines)


def scaling_table(result: dict) -> str:
    """One line a number of workers of each world."""
    lines = [
        "| | workers | conversations | wall s | tokens per s | of linear | of the engines | of the simulation | CPU-ms here, per conversation |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for world in ("on_policy", "same_batch", "stale"):
        for workers, r in result["worlds"][world].items():
            lines.append(
                f"| {world} | {workers} | {r['episodes']} | {r['wall_s']:.1f} | {r['tokens_per_s']:,.0f} | "
                f"{r['of_linear']:.2f} | {r['of_engine']:.2f} | {r['of_simulated']:.2f} | {r['driver_cpu_ms']:.1f} |"
            )
    alone = result["worlds"]["in_process"]["1"]
    lines.append(
        f"| in_process | none | {alone['episodes']} | {alone['wall_s']:.1f} | {alone['tokens_per_s']:,.0f} | | "
        f"{alone['of_engine']:.2f} | | {alone['driver_cpu_ms']:.1f} |"
    )
    return "\n".join(lines)


def ranks_table(result: dict) -> str:
    """One line a number of training processes of each world."""
    lines = [
        "| | processes | conversations per s | tokens per s | of linear | waiting for others | CPU-ms here, per conversation | CPU-ms of the worker | of the CPUs |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for world, numbers in result["worlds"].items():
        for processes, r in numbers.items():
            lines.append(
                f"| {world} | {processes} | {r['episodes_per_s']:.1f} | {r['tokens_per_s']:,.0f} | {r['of_linear']:.2f} | "
                f"{r['waiting']:.3f} | {r['rank_cpu_ms']:.1f} | {r['worker_cpu_ms']:.1f} | {r['cpu']:.2f} |"
            )
    return "\n".join(lines)


def scaling_targets(result: dict) -> str:
    """One line a target."""
    lines = ["| | target | measured | met |", "|---|---|---|---|"]
    for world, verdict in result["targets"].items():
        met = "yes" if verdict["met"] else "**no**"
        lines.append(f"| {world} | {verdict['target']} | {verdict['value']:.2f} | {met} |")
    return "\n".join(lines)


def fill(path: Path, marker: str, table: str) -> None:
    """Put ``table`` behind the comment ``<!-- marker -->``, in place of the table that stood
    there."""
    text = path.read_text()
    pattern = re.compile(rf"(<!-- {marker} -->\n)(\n\|(?:.*\n)*?(?=\n|\Z))?", re.MULTILINE)
    if not pattern.search(text):
        raise ValueError(f"{path} has no line <!-- {marker} -->.")
    path.write_text(pattern.sub(lambda match: f"{match[1]}\n{table}\n", text, count=1))


def main() -> None:
    """Write the pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--learning", type=Path)
    parser.add_argument("--iteration", type=Path)
    parser.add_argument("--rollout", type=Path)
    parser.add_argument("--scaling", type=Path, nargs=2, metavar=("WORKERS", "PROCESSES"))
    arguments = parser.parse_args()
    if arguments.learning:
        write_learning(arguments.learning)
    if arguments.iteration:
        write_iteration(arguments.iteration)
    if arguments.rollout:
        write_rollout(arguments.rollout)
    if arguments.scaling:
        write_scaling(*arguments.scaling)


def write_learning(folder: Path) -> None:
    """Plot and tables of what ``learning.py --seeds`` wrote to ``folder``: of the README's game, or
    of the world in its name."""
    names = ("coins", "key-and-door", "tally", "coding-tools")
    world = next((f"-{world}" for world in names if folder.name.endswith(f"-{world}")), "")
    figures, seeds = (folder / "summary.md").read_text().split("\n\n")[:2]
    shutil.copy(folder / "learning.png", RESULTS / f"learning{world}.png")
    shutil.copy(folder / "runs.json", RESULTS / "data" / f"{folder.name}.json")
    fill(RESULTS / "learning.md", f"learning{world}", figures)
    fill(RESULTS / "learning.md", f"seeds{world}", seeds.rstrip("\n"))
    if not world:
        fill(ROOT / "README.md", "learning", figures)


def write_iteration(folder: Path) -> None:
    """The page and the README's table."""
    iteration = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    iteration.sort(key=lambda r: ALGORITHMS.index(r["algo"]))
    (RESULTS / "iteration.md").write_text(
        ITERATION.format(machine=machine(), summary=iteration_summary(iteration), table=iteration_table(iteration))
    )
    fill(ROOT / "README.md", "iteration", iteration_summary(iteration))


def write_rollout(folder: Path) -> None:
    """The page."""
    results = {kind: json.loads((folder / f"{kind}.json").read_text()) for kind in ("varied", "short")}
    varied, short = results["varied"], results["short"]
    text = ROLLOUT.format(
        machine=varied["machine"],
        slots=varied["slots"],
        episodes=varied["episodes"],
        rounds=varied["rounds"],
        length=mean_length(varied),
        short_length=mean_length(short),
        targets=rollout_targets(varied),
        table=rollout_table(varied),
        short_targets=rollout_targets(short),
        short_table=rollout_table(short),
    )
    (RESULTS / "rollout.md").write_text(text)


def write_scaling(workers: Path, processes: Path) -> None:
    """The page."""
    result, ranks = json.loads(workers.read_text()), json.loads(processes.read_text())
    tables = {"table": scaling_table(result), "targets": scaling_targets(result)}
    tables |= {"ranks_table": ranks_table(ranks), "ranks_targets": scaling_targets(ranks)}
    numbers = {name: 1000 * result["costs"][name] for name in ("step", "turn", "request")}
    numbers |= {"step_ms": 1000 * result["step_s"], "gap": result["largest_gap_to_simulation"]}
    numbers |= {"ranks_rounds": ranks["rounds"], "ranks_per_slot": ranks["per_slot"]}
    (RESULTS / "scaling.md").write_text(SCALING.format(**result | tables | numbers))


def mean_length(result: dict) -> str:
    """Tokens of a response."""
    barrier = result["instant"]["contenders"]["barrier"]
    return f"{barrier['tokens'] / barrier['turns']:.1f}"


ITERATION = """# How fast is an iteration?

```bash
OMP_NUM_THREADS=1 python benchmarks/iteration.py --algo LLMPPO --model-dir DIR --peer-cmd "COMMAND"
```

A random Qwen2 of 0.66 M parameters, 16 conversations of GuessTheNumber in which any text is a legal guess, 32 forced tokens a turn, two
epochs, micro-batches of at most 2,048 tokens, LoRA of rank 16 on the attention's projections, KL to the reference, float32, one thread. The peer is AgileRL 2.9.1's own training
function with the same model, game and settings, run between our iterations.

Ratios, above 1 is better but for memory:

{summary}

Figures (tokens per CPU-second):

{table}

The raw limits are measured on the same conversations in the same process. Rollout: one batched `model.generate` a turn for the same
contexts; it encodes each context anew, which is why keeping the KV cache between turns can beat it. Learn: forward and backward of the same rows,
as often as the algorithm trains on them (actor, and critic if there is one), LM head on action positions only; ours also scores the reference
and, for LLMPPO, the values. It computes the tokens that rows share [once](learn.md), which the raw limit does not.

Peak memory is measured over two iterations, before any raw limit runs: a process's mark never falls, and the raw limit of learning holds the activations
of all rows at once.

Machine: {machine}. Absolute figures depend on it and on its load; the ratios are of one run.
"""

ROLLOUT = """# How fast is a rollout with vLLM?

```bash
OMP_NUM_THREADS=1 python benchmarks/rollout.py --output runs/rollout/varied.json
OMP_NUM_THREADS=1 python benchmarks/rollout.py --responses short --output runs/rollout/short.json
python benchmarks/report.py --rollout runs/rollout
```

{episodes} episodes of GuessTheNumber over {slots} slots, the same tasks for everyone, in turns on one machine; prefix caches are dropped
before each, and all vLLM contenders delivered the same ids, which the script checks. *instant* is the game itself; in *slow* each of its
calls takes 30 ms on average, log-normal with sigma 1.

| | |
|---|---|
| raw | the engine alone, `add_request` and `step`, with the requests of `barrier` in the same batches |
| policy | `VLLMPolicy` with the same, asked batch by batch in turns with `raw` |
| stock | `VLLMPolicy` in TorchRL's `Collector`: finished slots idle until the batch of {slots} is complete, environments are called one by one |
| barrier | `TurnCollector`: slots are refilled; in *slow* environments are called in threads, and all wait for the slowest |
| async | `AsyncTurnCollector(max_staleness=0)`; in *slow* with its default threads, in *instant* without threads |
| hf | `barrier` with `HFPolicy`; it draws other responses from the same distribution |

The bound is the larger of two times: what the engine was busy in `async`, and the longest episode played alone (its latencies, and its tokens at
the speed of an only request). A larger engine time by smaller batches would flatter it: compare the engine's seconds in the table.

## Responses of varied lengths

A random Qwen2 of 0.66 M parameters; any text is a legal guess. A response ends with each token with a probability of one in twelve, after
48 tokens at the latest: {length} tokens on average.

{targets}

{table}

## Short responses of one length

The small model of the package, which has learned to answer in one format: {short_length} tokens on average, nearly all alike. The targets are
listed for comparison; this is where they are hardest to meet. Nobody waits for a longer response, so with instant environments there is nothing that
doing without the barrier could gain, and a turn's fixed costs are spread over few tokens.

{short_targets}

{short_table}

Medians of {rounds} rounds (`stock` and `hf` in *slow*: one round); ratios are medians of the rounds' ratios, seconds are seconds per round. Machine: {machine}.
Absolute figures depend on it and on its load. On a GPU a step takes nearly as long for one response as for many, so that a batch which waits for its
longest response wastes more than it does here.
"""

SCALING = """# What do more workers gain?

```bash
OMP_NUM_THREADS=1 python benchmarks/scaling.py --output runs/scaling.json
OMP_NUM_THREADS=1 python benchmarks/ranks.py --output runs/ranks.json
python benchmarks/report.py --scaling runs/scaling.json runs/ranks.json
```

Rollouts on Ray with {{py:class}}`~torchrl_llm.collectors.RayTurnCollector`, on one machine with two cores. Every worker has an engine that
only sleeps: a step takes {step_ms:.0f} ms for any number of requests up to {slots} slots, and adds a token to each. So workers do not take
each other's CPUs, and what is measured is everything but the engine: dealing, messages, collating, slots that wait. Conversations have 1 to 4 turns of 8 to 16
tokens with an environment that answers at once.

| | |
|---|---|
| on_policy | `max_staleness=0`, {per_slot} conversations for each slot in a batch, so more workers play larger batches; nothing is in flight between batches |
| same_batch | `max_staleness=0`, {same_batch} conversations for any number of workers: strong scaling |
| stale | `max_staleness=1`, {stale_per_slot} conversations for each slot in a batch, an update of {update_s} s after each |
| in_process | on_policy with `AsyncTurnCollector` in one process: what Ray costs at all |

With four workers: `on_policy` and `stale` tokens per second over four times the rate with one, `same_batch` over the rate of the simulation:

{targets}

{table}

*Of the engines*: the share of the tokens that the engines could have said if no slot had ever been free. What is missing is the sleep's
own inaccuracy, the Python between two steps (a GPU engine has it too), and slots without work at the end of a batch. The more
conversations a slot plays in a batch, the less its end weighs: {per_slot} in on_policy for any number of workers, but in same_batch fewer with each
worker more. On-policy batches with one or two conversations a slot take as long as their longest conversation, here as anywhere;
`max_staleness` is for these.

*Of the simulation*: tokens per second over the rate of {{py:mod}}`torchrl_llm.testing.simulation`. It is given no throughput, and what these cost,
each measured alone (`benchmarks/costs.py`): a step of the engine ({step:.2f} ms), what the worker's process does for a turn while
its engine waits ({turn:.1f} ms, in one process without Ray), and what it does between an answer and the next request, which is there
({request:.1f} ms, with an actor of Ray that only sleeps). The largest difference is {gap:.0%}.

*CPU-ms here*: what a conversation costs in the process that collects. With few workers nearly
every conversation has a message of its own; with many they share one (see [how far it scales](../scaling.md)).

Medians of {rounds} rounds; ratios are medians of the rounds' ratios. Machine: {machine}.

## More training processes

Each training process has a collector and workers of its own, so what a conversation costs the process that collects it bounds one
process, not all of them. Processes of `torch.distributed` (gloo) with a worker each, {ranks_per_slot} conversations a slot and iteration, an
update of 0.2 s in which they sleep, and a sum of 1 MB of gradients with all others:

{ranks_targets}

{ranks_table}

*Waiting for others*: in the exchange of gradients, which the process with the longest batch reaches last. *Of the CPUs*: of both cores, by all
processes and workers; Ray's own processes are not counted. Rounds: {ranks_rounds}.
"""

if __name__ == "__main__":
    main()
