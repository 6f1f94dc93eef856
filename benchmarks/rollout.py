"""What a barrier between turns costs, and what the library costs on top of the engine: rollouts
with vLLM.

    OMP_NUM_THREADS=1 python benchmarks/rollout.py --output runs/rollout/varied.json
    OMP_NUM_THREADS=1 python benchmarks/rollout.py --responses short \\
        --output runs/rollout/short.json

Everyone plays the same 256 tasks of GuessTheNumber, float32, over 32 slots, in turns on one
machine; prefix caches are dropped before each:

- ``stock``: :class:`VLLMPolicy` in TorchRL's ``Collector``: batches of 32 whose finished slots
  idle, environments called one after the other;
- ``barrier``: ``TurnCollector``: slots are refilled, environments are called in threads, and all
  wait for one another each turn;
- ``async``: ``AsyncTurnCollector(max_staleness=0)``: no barrier;
- ``hf``: ``barrier`` with :class:`HFPolicy` instead. It draws other responses from the same
  distribution;
- ``raw`` and ``policy``: the turns of ``barrier`` once more, batch by batch, asked of the engine
  alone (``add_request`` and ``step``, with requests made before) and of ``VLLMPolicy``, one after
  the other. Each has cached prefixes of its own.

All of them but ``hf`` must deliver the same ids, or the script fails. Two worlds: ``instant`` is
the game itself, ``slow`` is the game whose every call takes 30 ms on average, log-normal with
sigma 1. Without latencies threads only cost, so in ``instant`` nobody has any.

``--responses varied`` is a random model whose responses end with each token with a probability of
one in twelve, after 48 tokens at the latest. ``short`` is the small model of the package, whose
responses are nearly all of the same few tokens: a barrier has nobody to wait for, and there are few
tokens to spread a turn's fixed costs over.

Of each contender: wall and CPU seconds of the process; ``engine_s``, the seconds inside vLLM's
``add_request`` and ``step``; ``policy_s``, those inside the policy, the engine included;
``waits_s``, seconds of waiting for environments with nothing else to do. The ratios are medians
over the rounds, each of figures of one round:

- ``policy_over_raw``: the seconds of ``policy`` over the seconds of ``raw``, less 1;
- ``async_over_barrier``: how many times faster ``async`` is;
- ``async_of_bound``: the bound over the seconds of ``async``. The bound is the larger of two times:
  the engine's (``engine_s`` of ``async``) and ``longest_s``, the longest episode's, played alone:
  the latencies of its calls, and its tokens at the speed at which the engine answers an only
  request. Smaller batches raise the engine's time, so it is to be compared with the time of the
  other contenders.

Prints one JSON object.
"""

import argparse
import functools
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.collectors import Collector
from transformers import AutoModelForCausalLM, AutoTokenizer

from torchrl_llm import keys
from torchrl_llm.collectors import AsyncTurnCollector, TurnCollector
from torchrl_llm.data import is_row_view
from torchrl_llm.envs import GEMEnv
from torchrl_llm.modules import HFPolicy, SamplingConfig, VLLMPolicy
from torchrl_llm.modules.policy import TurnRequest
from torchrl_llm.stops import share_stop_ids
from torchrl_llm.testing.environments import Slow
from torchrl_llm.testing.tiny import tiny_model_path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from iteration import AnyGuess, make_model  # noqa: E402
from report import machine  # noqa: E402

GAME = "game:GuessTheNumber-v0-easy"
MAX_TURNS = 4  # the game's own limit
STOP_EVERY = 12  # every n-th id of the vocabulary ends a response
VOCABULARY = 2048
LATENCY = {"mean": 0.03, "sigma": 1.0}
TARGETS = {
    "instant": {"policy_over_raw": ("<=", 0.10), "async_over_barrier": (">=", 1.3), "async_of_bound": (">=", 0.8)},
    "slow": {"async_over_barrier": (">=", 1.6), "async_of_bound": (">=", 0.8)},
}

Responses = dict[tuple[int, int], tuple[int, ...]]
"""(episode id, turn) -> the ids of the response."""


# ---------------------------------------- what is measured


class Clock:
    """Seconds spent in the functions it times, by name."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()

    def time(self, owner: Any, method: str, name: str) -> None:
        """Count the seconds in ``owner.method`` under ``name``."""
        function = getattr(owner, method)

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[name] += time.perf_counter() - start

        setattr(owner, method, timed)


@dataclass
class Round:
    """What a contender did in one round."""

    wall_s: float
    cpu_s: float
    parts: dict[str, float]
    responses: Responses = field(repr=False)


def measure(play: Callable[[], Iterable[TensorDictBase]], clock: Clock) -> Round:
    """Play the tasks once."""
    clock.seconds.clear()
    wall, cpu = time.perf_counter(), time.process_time()
    played = play()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return Round(wall, cpu, dict(clock.seconds), responses_of(played))


def responses_of(batches: Iterable[TensorDictBase]) -> Responses:
    """The sampled ids of each turn, from rows or turns."""
    responses = {}
    for batch in batches:
        responses |= dict(responses_in_rows(batch) if is_row_view(batch) else responses_in_turns(batch))
    return responses


def responses_in_rows(rows: TensorDictBase) -> Iterator[tuple[tuple[int, int], tuple[int, ...]]]:
    """The turns of rows ``[B]``."""
    columns = (rows[key] for key in (keys.EPISODE_ID, keys.TURN_IDS, keys.TOKENS))
    for episode, turn_ids, tokens in zip(*columns, strict=True):
        for turn in range(int(turn_ids.max()) + 1):
            yield (int(episode), turn), tuple(tokens[turn_ids == turn].tolist())


def responses_in_turns(turns: TensorDictBase) -> Iterator[tuple[tuple[int, int], tuple[int, ...]]]:
    """The turns of a collector's batch ``[N, T]``, or of one answer of a policy ``[N]``."""
    mask = turns[keys.RESPONSE_MASK]
    acted = mask.any(-1)
    columns = (turns[key][acted] for key in (keys.EPISODE_ID, keys.TURN, keys.RESPONSE))
    for episode, turn, ids, valid in zip(*columns, mask[acted], strict=True):
        yield (int(episode), int(turn)), tuple(ids[valid].tolist())


# ---------------------------------------- who plays


class Stock:
    """TorchRL's ``Collector``, one batch of N whole conversations after the other."""

    def __init__(self, env: GEMEnv, policy: VLLMPolicy, *, batch_size: int) -> None:
        n = env.batch_size[0]
        if batch_size % n:
            raise ValueError(f"{batch_size} episodes are not a multiple of {n} slots, which the stock collector needs.")
        self._batches = batch_size // n
        share_stop_ids(env, policy)  # the other collectors do so
        # trust_policy: the policy is handed over as it is.
        self._collector = Collector(
            env, policy, frames_per_batch=n * MAX_TURNS, total_frames=-1, reset_at_each_iter=True, trust_policy=True
        )
        self._iterator = iter(self._collector)
        next(self._iterator)  # the first batch resets twice

    def set_seed(self, seed: int) -> None:
        """Deal from the first task again."""
        self._collector.set_seed(seed)

    def rollouts(self) -> list[TensorDictBase]:
        """The batches of one round."""
        return [next(self._iterator).clone() for _ in range(self._batches)]

    def shutdown(self) -> None:
        """Close the collector and its environment."""
        self._collector.shutdown()


class Recorded:
    """The turns that a collector asked of a policy: a TensorDict ``[N]`` each."""

    def __init__(self, policy: VLLMPolicy, play: Callable[[], Any]) -> None:
        self._policy, forward = policy, policy.forward
        self.turns: list[TensorDictBase] = []

        def recorded(tensordict: TensorDictBase) -> TensorDictBase:
            self.turns.append(tensordict.select(*policy.in_keys).clone())
            return forward(tensordict)

        policy.forward = recorded
        play()
        del policy.forward

    def requests(self, turn: TensorDictBase) -> list[TurnRequest]:
        """The turn's live rows, one by one."""
        columns = [turn[key].flatten().tolist() for key in (keys.PROMPT_LENGTH, keys.EPISODE_ID, keys.TURN)]
        rows = zip(turn[keys.PROMPT].numpy(), *columns, strict=True)
        return [TurnRequest(i, ids[:n], episode, k) for i, (ids, n, episode, k) in enumerate(rows) if n]

    def play_twice(self) -> dict[str, Round]:
        """Ask policy and engine by turns, and take the time of each. Who comes first changes."""
        seconds, said = {"policy": [0.0, 0.0], "raw": [0.0, 0.0]}, {"policy": {}, "raw": {}}
        for number, turn in enumerate(self.turns):
            prepared = {"policy": turn.clone(), "raw": self._prepared(number, turn)}
            ask = {"policy": self._policy, "raw": self._ask_engine}
            for name in sorted(ask, reverse=bool(number % 2)):
                wall, cpu = time.perf_counter(), time.process_time()
                answer = ask[name](prepared[name])
                seconds[name][0] += time.perf_counter() - wall
                seconds[name][1] += time.process_time() - cpu
                said[name] |= responses_of([answer]) if name == "policy" else answer
        return {name: Round(*seconds[name], {}, said[name]) for name in seconds}

    def _prepared(self, number: int, turn: TensorDictBase) -> list[tuple[TurnRequest, tuple[Any, ...]]]:
        from vllm.inputs.engine import tokens_input

        # The salt keeps the two from using each other's cached prefixes.
        return [
            (
                request,
                (
                    f"raw-{number}-{row}",
                    tokens_input(request.prompt.tolist(), cache_salt="raw"),
                    self._policy._params(request),
                ),
            )
            for row, request in enumerate(self.requests(turn))
        ]

    def _ask_engine(self, requests: list[tuple[TurnRequest, tuple[Any, ...]]]) -> Responses:
        engine, outputs = self._policy.llm.llm_engine, []
        for _, arguments in requests:
            engine.add_request(*arguments)
        while engine.has_unfinished_requests():
            outputs += engine.step()
        of = {arguments[0]: (request.episode_id, request.turn) for request, arguments in requests}
        return {of[output.request_id]: tuple(output.outputs[0].token_ids) for output in outputs}

    def lone_token_seconds(self, count: int = 16) -> float:
        """Seconds a token of a request that has the engine to itself: the median of ``count``
        requests."""
        figures = []
        for request in self.requests(self.turns[0])[:count]:
            start = time.perf_counter()
            self._policy.submit(request)
            while not (answers := self._policy.poll()):
                pass
            figures.append((time.perf_counter() - start) / len(answers[0].tokens))
        return statistics.median(figures)


@dataclass
class Work:
    """What is played: a model and its game."""

    path: Path
    game: str | Callable[[], Any]
    sampling: SamplingConfig
    max_model_len: int

    def make_env(self, factory: Any, *, slots: int, **kwargs: Any) -> GEMEnv:
        """The environment that all contenders play."""
        return GEMEnv(
            factory,
            tokenizer=AutoTokenizer.from_pretrained(self.path),
            num_envs=slots,
            max_model_len=self.max_model_len,
            max_output_tokens=self.sampling.max_output_tokens,
            **kwargs,
        )

    def make_policies(self, slots: int) -> tuple[VLLMPolicy, HFPolicy]:
        """The two policies, of the same weights."""
        tokenizer = AutoTokenizer.from_pretrained(self.path)
        policy = VLLMPolicy(
            self.path,
            tokenizer,
            self.sampling,
            dtype="float32",
            max_model_len=self.max_model_len,
            max_num_seqs=slots,
            kv_cache_memory_bytes=256 * 2**20,  # for the prefixes of two: see Recorded
        )
        model = AutoModelForCausalLM.from_pretrained(self.path, dtype="float32").eval()
        return policy, HFPolicy(model, tokenizer, self.sampling)


def make_work(responses: str, folder: Path) -> Work:
    """The model and game of ``--responses``; a model that is made lies in ``folder``."""
    if responses == "short":
        return Work(tiny_model_path(), GAME, SamplingConfig(max_output_tokens=16), 256)
    make_model(folder)
    stop_ids = tuple(range(0, VOCABULARY, STOP_EVERY))
    return Work(folder, AnyGuess, SamplingConfig(max_output_tokens=48, stop_ids=stop_ids), 1024)


@dataclass
class World:
    """One world and who plays in it."""

    name: str
    factory: Callable[[], Any] | str
    collectors: dict[str, Any]
    seeds: list[int]

    def longest(self, responses: Responses, token_seconds: float) -> float:
        """Seconds of the longest episode, played alone."""
        seconds: Counter[int] = Counter()
        for (episode, _), ids in responses.items():
            seconds[episode] += len(ids) * token_seconds
        if self.name == "slow":
            game = self.factory()
            for episode, turn in responses:
                seconds[episode] += game.latency(self.seeds[episode], turn)
                seconds[episode] += game.latency(self.seeds[episode], -1) if turn == 0 else 0.0
        return max(seconds.values())


def make_world(
    name: str, work: Work, policies: tuple[VLLMPolicy, HFPolicy], clock: Clock, *, slots: int, episodes: int
) -> World:
    """The contenders of a world, in the order of the report."""
    slow, (policy, hf) = name == "slow", policies
    factory = functools.partial(Slow, work.game, **LATENCY) if slow else work.game
    make_env = functools.partial(work.make_env, factory, slots=slots)
    threads = slots if slow else 0
    size = {"batch_size": episodes}
    collectors = {
        "stock": Stock(make_env(on_done="idle"), policy, **size),
        "barrier": TurnCollector(make_env(num_threads=threads), policy, **size),
        "async": AsyncTurnCollector(make_env(), policy, num_threads=None if slow else 0, **size),
        "hf": TurnCollector(make_env(num_threads=threads), hf, **size),
    }
    clock.time(collectors["async"]._executor.pool, "finished", "waits")
    task_sampler = collectors["async"].env.task_sampler
    return World(name, factory, collectors, [task_sampler[i].seed for i in range(episodes)])


def play(collector: Any) -> list[TensorDictBase]:
    """The batches of all tasks, from the first."""
    collector.set_seed(0)
    return collector.rollouts() if isinstance(collector, Stock) else [collector.rollout()]


# ---------------------------------------- rounds


def play_round(
    world: World, recorded: Recorded, policies: tuple[VLLMPolicy, HFPolicy], clock: Clock, number: int
) -> dict[str, Round]:
    """One round of a world: everyone once, whoever comes first changes."""
    names, rounds = list(world.collectors), {}
    if world.name == "slow" and number:
        # the others wait long, and no target is about them: once is enough
        names = ["barrier", "async"]
    first = number % len(names)
    for name in names[first:] + names[:first]:
        _drop_caches(policies)
        rounds[name] = measure(functools.partial(play, world.collectors[name]), clock)
        print(f"{world.name} {number} {name}: {rounds[name].wall_s:.2f} s", file=sys.stderr)
    if world.name == "instant":
        _drop_caches(policies)
        rounds |= recorded.play_twice()
    for name in rounds.keys() - {"barrier", "hf"}:
        if rounds[name].responses != rounds["barrier"].responses:
            raise RuntimeError(f"{name!r} delivered other responses than 'barrier' in {world.name!r}: no comparison.")
    return rounds


def _drop_caches(policies: tuple[VLLMPolicy, HFPolicy]) -> None:
    for policy in policies:
        policy.drop_cache()


def ratios(world: World, rounds: dict[str, Round], token_seconds: float) -> dict[str, float]:
    """The ratios of one round; see the module."""
    barrier, mine = rounds["barrier"], rounds["async"]
    longest = world.longest(mine.responses, token_seconds)
    result = {
        "async_over_barrier": barrier.wall_s / mine.wall_s,
        "async_of_bound": max(longest, mine.parts["engine"]) / mine.wall_s,
        "longest_s": longest,
    }
    if "raw" in rounds:
        result["policy_over_raw"] = rounds["policy"].wall_s / rounds["raw"].wall_s - 1
    return result


def digest(world: World, rounds: list[dict[str, Round]], token_seconds: float) -> dict[str, Any]:
    """Medians over the rounds."""
    per_round = [ratios(world, r, token_seconds) for r in rounds]
    contenders = {name: summary([r[name] for r in rounds if name in r]) for name in rounds[0]}
    medians = {name: round(statistics.median(r[name] for r in per_round), 3) for name in per_round[0]}
    return {"contenders": contenders, "ratios": medians}


def summary(rounds: list[Round]) -> dict[str, float]:
    """Medians of a contender's figures."""
    figures = {"wall_s": [r.wall_s for r in rounds], "cpu_s": [r.cpu_s for r in rounds]}
    for part in ("policy", "engine", "waits"):
        if part in rounds[0].parts:
            figures[f"{part}_s"] = [r.parts[part] for r in rounds]
    result = {name: round(statistics.median(values), 4) for name, values in figures.items()}
    tokens = sum(map(len, rounds[0].responses.values()))
    return result | {
        "tokens": tokens,
        "turns": len(rounds[0].responses),
        "tokens_per_s": round(tokens / result["wall_s"]),
    }


def judge(results: dict[str, Any]) -> dict[str, Any]:
    """Every target, its value, and whether it is met."""
    verdicts = {}
    for world, targets in TARGETS.items():
        for name, (sign, target) in targets.items():
            value = results[world]["ratios"][name]
            met = value <= target if sign == "<=" else value >= target
            verdicts[f"{world}/{name}"] = {"value": value, "target": f"{sign} {target}", "met": met}
    return verdicts


def vllm_version() -> str:
    """The version of vLLM, under whichever name it was installed."""
    import vllm

    return str(vllm.__version__)


def run(work: Work, arguments: argparse.Namespace) -> dict[str, Any]:
    """All rounds in all worlds."""
    sizes, clock = {"slots": arguments.slots, "episodes": arguments.episodes}, Clock()
    policies = policy, _ = work.make_policies(arguments.slots)
    worlds = [make_world(name, work, policies, clock, **sizes) for name in TARGETS]
    # warms up, too
    recorded = Recorded(policy, functools.partial(play, worlds[0].collectors["barrier"]))
    token_seconds = recorded.lone_token_seconds()
    clock.time(policy.llm.llm_engine, "add_request", "engine")
    clock.time(policy.llm.llm_engine, "step", "engine")
    for method in ("forward", "submit", "poll"):
        clock.time(policy, method, "policy")
    results: dict[str, Any] = {"machine": f"{machine()}, vLLM {vllm_version()}", "responses": arguments.responses}
    results |= sizes | {"rounds": arguments.rounds}
    for world in worlds:
        rounds = [play_round(world, recorded, policies, clock, number) for number in range(arguments.rounds)]
        results[world.name] = digest(world, rounds, token_seconds)
    for world in worlds:
        for collector in world.collectors.values():
            collector.shutdown()
    policy.close()
    return results | {"targets": judge(results)}


def main() -> None:
    """Measure and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--responses", choices=["varied", "short"], default="varied")
    parser.add_argument("--episodes", type=int, default=256)
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="32 episodes over 8 slots, one round: does it run?")
    parser.add_argument("--output", type=Path, help="write the JSON here too")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.episodes, arguments.slots, arguments.rounds = 32, 8, 1
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        results = run(make_work(arguments.responses, Path(folder)), arguments)
    print(json.dumps(results, indent=2))
    if arguments.output:
        arguments.output.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
