"""What more workers gain: rollouts on Ray with an engine of fixed speed.

    OMP_NUM_THREADS=1 python benchmarks/scaling.py --output runs/scaling.json

Every worker has an engine that sleeps (:class:`~torchrl_llm.testing.policies.SleepingPolicy`): a
step takes 20 ms for any number of requests up to 8 slots, and adds a token to each. So two CPUs do
for eight workers, and what is measured is everything but the engine: dealing, messages, collating,
and slots that wait. Conversations have 1 to 4 turns of 8 to 16 tokens, which their task tells. The
worlds:

- ``on_policy``: ``max_staleness=0``, a batch of 16 conversations for each slot: 128 with one
  worker, 1,024 with eight. Nothing is in flight between batches, so at the end of each batch slots
  run dry;
- ``same_batch``: the same, but 256 conversations for any number of workers, 8 for each slot of
  four: more workers have less to do each, and the end of a batch weighs more;
- ``in_process``: ``on_policy`` with ``AsyncTurnCollector`` in this process instead of one worker:
  what Ray costs at all;
- ``stale``: ``max_staleness=1``, a batch of 4 conversations for each slot, and an update of 0.2 s
  after each, in which the caller sleeps and then sends new weights.

One number of workers plays after the other, all rounds, so that no other workers take memory (0.4
GB each). Of each number: tokens per second of the wall clock, ``of_linear`` (its tokens per second
over the rate of one worker times their number), ``of_engine`` (the share of the tokens that engines
could have said whose slots are never free), and ``driver_cpu_ms``, the milliseconds of CPU that an
episode takes in the process that collects. Medians over the rounds, each of figures of one round.

Prints one JSON object.
"""

import argparse
import json
import os
import statistics
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray

from torchrl_llm import keys
from torchrl_llm.collectors import AsyncTurnCollector, RayTurnCollector
from torchrl_llm.envs import GEMEnv
from torchrl_llm.testing.environments import StopOrGo
from torchrl_llm.testing.simulation import Costs, Versions, simulate, uniform_lengths
from torchrl_llm.testing.tokenizers import byte_tokenizer

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from costs import TimedPolicy, measured_costs  # noqa: E402
from report import machine  # noqa: E402

TARGETS = {"on_policy": 0.95, "same_batch": 0.9, "stale": 0.95}
"""Of linear, with four workers; for ``same_batch`` of what is simulated, for its end weighs more
with each worker."""
TURNS, TOKENS = (1, 4), (8, 16)


@dataclass(frozen=True)
class Setting:
    """What is the same for everyone.

    Attributes:
        workers: numbers of workers.
        slots: of each worker.
        step_s: seconds of an engine's step.
        per_slot: conversations for each slot in a batch of ``on_policy``.
        same_batch: conversations in a batch of ``same_batch``.
        stale_per_slot: of ``stale``.
        stale_batches: batches that are measured in ``stale``, after one that is not.
        update_s: seconds of an update in ``stale``.
        rounds: how often everyone plays.
    """

    workers: tuple[int, ...] = (1, 2, 4, 8)
    slots: int = 8
    step_s: float = 0.02
    per_slot: int = 16
    same_batch: int = 256
    stale_per_slot: int = 4
    stale_batches: int = 4
    update_s: float = 0.2
    rounds: int = 5


lengths = uniform_lengths(TURNS, TOKENS)


def script(episode: int, turn: int, _: str) -> str:
    """A response; with its end-of-turn token it has as many tokens as it has to."""
    tokens = lengths(episode)
    return ("stop" if turn == len(tokens) - 1 else "go").ljust(tokens[turn] - 1, ".")


def make_env(slots: int, rank: int = 0, ranks: int = 1) -> GEMEnv:
    """What workers play: the tasks of one training process."""
    return GEMEnv(
        StopOrGo,
        tokenizer=byte_tokenizer(),
        num_envs=slots,
        max_output_tokens=TOKENS[1],
        max_model_len=512,
        worker=rank,
        num_workers=ranks,
    )


def make_policy(step_s: float) -> TimedPolicy:
    """The engine."""
    return TimedPolicy(script, tokenizer=byte_tokenizer(), max_output_tokens=TOKENS[1], seconds_per_step=step_s)


def make_collector(
    setting: Setting, workers: int, *, per_slot: int, max_staleness: int, rank: int = 0, ranks: int = 1
) -> RayTurnCollector:
    """The collector of a training process on so many workers."""
    policy = make_policy(setting.step_s)
    return RayTurnCollector(
        partial(make_env, setting.slots, rank, ranks),
        policy,
        make_policy=partial(make_policy, setting.step_s),
        num_workers=workers,
        batch_size=per_slot * setting.slots * workers,
        max_staleness=max_staleness,
        worker_options={"num_cpus": 0},
        weight_sync_schemes={"policy": Versions(policy)},
    )


# ---------------------------------------- rounds


@dataclass
class Run:
    """What one contender did in one round."""

    tokens: int
    episodes: int
    wall_s: float
    cpu_s: float


class Clock:
    """From when it is made: what was delivered, and how long it took."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()
        self.tokens = self.episodes = 0

    def hear(self, batch: Any) -> None:
        """Count a batch."""
        self.tokens += int((batch[keys.TURN_IDS] >= 0).sum())
        self.episodes += len(batch)

    def stop(self) -> Run:
        """What it was."""
        wall, cpu = time.perf_counter() - self._wall, time.process_time() - self._cpu
        return Run(self.tokens, self.episodes, wall, cpu)


def play_on_policy(collector: AsyncTurnCollector | RayTurnCollector, batch_size: int) -> Run:
    """One batch."""
    collector.batch_size = batch_size
    clock = Clock()
    clock.hear(collector.rollout())
    return clock.stop()


def play_stale(collector: RayTurnCollector, batches: int, update_s: float) -> Run:
    """Some batches in a row, with updates between them; nothing is in flight before and after."""
    # Two: the first may have been ready before, and then the engines are empty.
    collector.rollout()
    collector.rollout()
    clock = Clock()
    for _ in range(batches):
        time.sleep(update_s)
        collector.update_policy_weights_()
        clock.hear(collector.rollout())
    run = clock.stop()
    while collector.in_flight:
        time.sleep(0.05)
    return run


Rounds = list[dict[str, dict[int, Run]]]
"""Of each round, by world and number of workers."""


def play(setting: Setting) -> Rounds:
    """All rounds of everyone, one after the other."""
    size = setting.per_slot * setting.slots
    rounds: Rounds = [{"on_policy": {}, "same_batch": {}, "stale": {}, "in_process": {}} for _ in range(setting.rounds)]
    with ExitStack() as stack:
        alone = AsyncTurnCollector(make_env(setting.slots), make_policy(setting.step_s), batch_size=size)
        stack.callback(alone.shutdown)
        for each in rounds:
            each["in_process"][1] = play_on_policy(alone, size)
    for n in setting.workers:
        with ExitStack() as stack:
            direct = make_collector(setting, n, per_slot=setting.per_slot, max_staleness=0)
            stack.callback(direct.shutdown)
            play_on_policy(direct, setting.slots * n)  # a worker's first steps take longer
            for each in rounds:
                each["on_policy"][n] = play_on_policy(direct, size * n)
                each["same_batch"][n] = play_on_policy(direct, setting.same_batch)
        with ExitStack() as stack:
            stale = make_collector(setting, n, per_slot=setting.stale_per_slot, max_staleness=1)
            stack.callback(stale.shutdown)
            for each in rounds:
                each["stale"][n] = play_stale(stale, setting.stale_batches, setting.update_s)
        for world in ("on_policy", "same_batch", "stale"):
            speed = statistics.median(each[world][n].tokens / each[world][n].wall_s for each in rounds)
            print(f"{world}, {n} workers: {speed:.0f} tokens/s", file=sys.stderr)
    return rounds


def digest(rounds: list[dict[int, Run]], setting: Setting) -> dict[str, dict[str, float]]:
    """Medians of a world's figures, by number of workers."""
    result = {}
    for n in sorted(rounds[0]):
        speed = [runs[n].tokens / runs[n].wall_s for runs in rounds]
        linear = [n * runs[1].tokens / runs[1].wall_s for runs in rounds]
        figures = {
            "tokens_per_s": speed,
            "of_linear": [mine / theirs for mine, theirs in zip(speed, linear, strict=True)],
            "of_engine": [mine * setting.step_s / (n * setting.slots) for mine in speed],
            "wall_s": [runs[n].wall_s for runs in rounds],
            "driver_cpu_ms": [1000 * runs[n].cpu_s / runs[n].episodes for runs in rounds],
        }
        medians = {name: round(statistics.median(values), 3) for name, values in figures.items()}
        result[str(n)] = medians | {"episodes": rounds[0][n].episodes, "tokens": rounds[0][n].tokens}
    return result


def simulated(setting: Setting, costs: Costs) -> dict[str, dict[str, float]]:
    """Tokens per second of each world on simulated workers, by their number."""
    result: dict[str, dict[str, float]] = {"on_policy": {}, "same_batch": {}, "stale": {}}
    on = partial(simulate, costs, lengths, slots=setting.slots)
    for n in setting.workers:
        stale = setting.stale_per_slot * setting.slots * n
        runs = {
            "on_policy": on(workers=n, batch_size=setting.per_slot * setting.slots * n, batches=8),
            "same_batch": on(workers=n, batch_size=setting.same_batch, batches=8),
            "stale": on(workers=n, batch_size=stale, batches=32, max_staleness=1, update=setting.update_s),
        }
        for world, run in runs.items():
            result[world][str(n)] = round(run.tokens_per_s, 1)
    return result


def verdict(value: float, target: float) -> dict[str, Any]:
    """Whether a target is met."""
    return {"value": round(value, 3), "target": f">= {target}", "met": value >= target}


def run(setting: Setting) -> dict[str, Any]:
    """All rounds."""
    costs = measured_costs(
        make_env(setting.slots), make_policy(setting.step_s), episodes=setting.per_slot * setting.slots
    )
    expected = simulated(setting, costs)
    rounds = play(setting)
    worlds = {world: digest([each[world] for each in rounds], setting) for world in rounds[0]}
    for world, figures in expected.items():
        for n, tokens_per_s in figures.items():
            worlds[world][n]["simulated"] = tokens_per_s
            worlds[world][n]["of_simulated"] = round(worlds[world][n]["tokens_per_s"] / tokens_per_s, 3)
    most = str(min(4, max(setting.workers)))
    measure = {"on_policy": "of_linear", "same_batch": "of_simulated", "stale": "of_linear"}
    targets = {world: verdict(worlds[world][most][measure[world]], target) for world, target in TARGETS.items()}
    gap = max(abs(each["of_simulated"] - 1) for world in expected for each in worlds[world].values())
    return {
        "machine": f"{machine()}, Ray {ray.__version__}",
        **asdict(setting),
        "costs": asdict(costs),
        "worlds": worlds,
        "targets": targets,
        "largest_gap_to_simulation": round(gap, 3),
    }


def main() -> None:
    """Measure and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=Setting.rounds)
    parser.add_argument("--workers", type=int, nargs="+", default=Setting.workers, help="numbers, 1 among them")
    parser.add_argument(
        "--quick", action="store_true", help="one and two workers, small batches, one round: does it run?"
    )
    parser.add_argument("--output", type=Path, help="write the JSON here too")
    arguments = parser.parse_args()
    setting = Setting(workers=tuple(arguments.workers), rounds=arguments.rounds)
    if arguments.quick:
        setting = Setting(workers=(1, 2), per_slot=2, same_batch=32, stale_per_slot=1, stale_batches=1, rounds=1)
    # Ray's workers are nice to others by default. Here they are what is measured.
    os.environ.setdefault("RAY_worker_niceness", "0")
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        results = run(setting)
    finally:
        ray.shutdown()
    print(json.dumps(results, indent=2))
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
