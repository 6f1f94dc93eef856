"""What a run on N GPUs would look like: computed from sizes and rates, and checked against the
simulated collector; the table of docs/scaling.md.

    python -m benchmarks.gpu.capacity                   # without the simulation's column
    python -m benchmarks.gpu.capacity --simulate        # a minute

Nothing here was measured on these machines. Sizes, contexts and what fits are those of ``fits``, by
the library's estimates; operations are those of ``arithmetic``, which ``speed`` measures with. A
GPU has the rates of its data sheet times the shares of them that good code reaches (:class:`GPU`);
conversations come from a game (:class:`Game`). On one GPU sampling and learning take turns. On
more they go on at the same time, on GPUs of their own, divided so that neither waits for the other.
"""

import argparse
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

from benchmarks.gpu.arithmetic import PEAKS, token_operations
from benchmarks.gpu.fits import CARDS, Case, asleep, estimate, fits, shaped
from torchrl_llm.runs.memory import engine_context, engine_contexts, engine_weights, memory_estimate
from torchrl_llm.testing.simulation import Costs, simulate, uniform_lengths

GB = 1e9


@dataclass(frozen=True)
class GPU:
    """A device: what its data sheet says, and the shares of it that are reached."""

    card: str
    flops: float
    bandwidth: float
    trained_share: float = 0.4
    read_share: float = 0.6
    network: float = 25 * GB

    def train_s(self, flops: float) -> float:
        """Seconds of dense arithmetic."""
        return flops / (self.flops * self.trained_share)

    def read_s(self, size: float) -> float:
        """Seconds to read so many bytes of its memory."""
        return size / (self.bandwidth * self.read_share)


H100 = GPU("80 GB", PEAKS["H100"], 3.35e12)

_SLEEPING = 0.7
"""Share of a GPU whose engine and trainer take turns, as in docs/gpu.md."""


class Model:
    """A language model by its numbers: sizes in bytes, operations of a token. LoRA of rank 16 on
    every linear layer of a base in bfloat16.

    Args:
        name: of ``benchmarks.gpu.place.SHAPES``.
        settings: of a run, beside those of docs/gpu.md.
    """

    def __init__(self, name: str, **settings: Any) -> None:
        self.name, self.settings = name, settings
        self.config, self.shapes = shaped(name, **settings)

    @cached_property
    def weights(self) -> int:
        """Of an engine, on all its GPUs."""
        return engine_weights(self.config, self.shapes)

    @cached_property
    def adapter(self) -> int:
        """Of the trained weights in float32: a quarter of what they take with their gradients and
        AdamW's moments."""
        return memory_estimate(self.config, self.shapes)["trained weights"] // 4

    @cached_property
    def token(self) -> float:
        """Of its keys and values."""
        return engine_context(self.config, self.shapes) / self.config.env.max_model_len

    def contexts(self, share: float, card: str, tensor_parallel: int) -> int:
        """Whole contexts of an engine with a share of its GPUs; at most 256."""
        config = self.config.replace(tensor_parallel_size=tensor_parallel)
        return max(1, min(256, engine_contexts(config, self.shapes, int(share * CARDS[card] * 2**30))))

    @cache  # noqa: B019 - models live as long as the script
    def operations(self, *, context: float, acted: float, backward: int = 0) -> float:
        """See :func:`~benchmarks.gpu.arithmetic.token_operations`."""
        return token_operations(self.shapes, context=context, acted=acted, backward=backward)


@cache
def model(name: str, **settings: Any) -> Model:
    """A :class:`Model`, made once."""
    return Model(name, **settings)


@dataclass(frozen=True)
class Game:
    """Conversations: turns and tokens of a response are drawn evenly up to twice their mean."""

    prompt: int = 400
    turns: int = 8
    response: int = 200
    feedback: int = 50
    env_s: float = 0.05
    group: int = 8
    shared: float = 1.5
    """Tokens of the rows over the different ones among them: what computing shared tokens once
    saves."""

    @property
    def tokens(self) -> int:
        """Of a row."""
        return self.prompt + self.turns * (self.response + self.feedback)

    @property
    def sampled(self) -> int:
        """Of a row, by the model."""
        return self.turns * self.response


@dataclass(frozen=True)
class Layout:
    """A run: which GPUs do what, and what it takes.

    ``engines`` of ``tensor_parallel`` GPUs each sample, ``learners`` GPUs train; with one GPU both
    take turns on it.
    """

    model: Model
    game: Game
    gpu: GPU
    gpus: int
    engines: int
    tensor_parallel: int
    learners: int
    slots: int
    batch: int
    staleness: int

    # ---------------------------------------- rollouts

    @cached_property
    def step_s(self) -> float:
        """A step of an engine: its weights and the keys and values of all contexts are read
        once."""
        size = self.model.weights + self.slots * self.model.token * self.game.tokens / 2
        return self.gpu.read_s(size) / self.tensor_parallel + 0.004  # launches, sampling, Python

    @cached_property
    def prefill_s(self) -> float:
        """Prompts and answers of an episode; earlier turns are in the engine's cache."""
        tokens = self.game.prompt / self.game.group + self.game.turns * self.game.feedback
        operations = self.model.operations(context=self.game.tokens / 2, acted=0.0)
        return self.gpu.train_s(operations * tokens) / self.tensor_parallel

    @cached_property
    def episode_s(self) -> float:
        """An episode in a slot, of an engine whose slots are all busy."""
        return self.game.sampled * self.step_s + self.game.turns * self.game.env_s + self.slots * self.prefill_s

    @cached_property
    def rollout_s(self) -> float:
        """A batch. Where sampling waits for the update, the last conversations play alone, for
        about as long as one more takes."""
        rounds = self.batch / (self.engines * self.slots)
        return (rounds + (self.gpus == 1)) * self.episode_s

    # ---------------------------------------- updates

    @cached_property
    def update_s(self) -> float:
        """Of the different tokens: forward and backward, the passes of the old policy and of the
        reference, and a forward of the layers again with gradient checkpointing."""
        game, each = self.game, self.model.operations
        context, acted = game.tokens / 2, game.sampled / game.tokens
        passes = each(context=context, acted=acted, backward=2) + 2 * each(context=context, acted=acted)
        if self.model.config.model.gradient_checkpointing:
            passes += each(context=context, acted=0.0)
        return self.gpu.train_s(passes * self.batch * game.tokens / game.shared) / self.learners

    @cached_property
    def sync_bytes(self) -> int:
        """Of the adapter."""
        return self.model.adapter

    @cached_property
    def iteration_s(self) -> float:
        """Both at the same time, or one after the other on one GPU."""
        sync = self.sync_bytes / self.gpu.network
        return (self.rollout_s + self.update_s if self.gpus == 1 else max(self.rollout_s, self.update_s)) + sync

    @cached_property
    def bottleneck(self) -> str:
        """What a further GPU should do."""
        gap = self.rollout_s / self.update_s
        return "either" if 0.8 < gap < 1.25 else "samples" if gap > 1 else "learns"

    @cached_property
    def learner(self) -> tuple[float, bool]:
        """GiB that are taken of a learner's GPU at most, and whether they fit, by the estimate of
        docs/gpu.md."""
        where = asleep(_SLEEPING) if self.gpus == 1 else {"collector": "ray"}
        case = Case(self.gpu.card, self.model.name, self.model.settings | where)
        found = estimate(case)
        return max(found.update, found.sync), fits(case, found)


def layout(
    model: Model,
    gpus: int,
    batch: int,
    *,
    staleness: int,
    tensor_parallel: int = 1,
    game: Game = Game(),
    gpu: GPU = H100,
) -> Layout:
    """The division of the GPUs with the shortest iteration."""
    on_ray = model.config.replace(collector="ray")
    alone = on_ray.engine.share(on_ray, None)
    fit = model.contexts(_SLEEPING if gpus == 1 else alone, gpu.card, tensor_parallel)
    choices = [
        # While an update runs, so many batches are in flight as they may be old, and one where
        # sampling waits for it.
        Layout(
            model, game, gpu, gpus, n, tensor_parallel, gpus - n * tensor_parallel or 1,
            max(1, min(fit, max(1, staleness) * batch // n)), batch, staleness,
        )
        for n in (range(1, gpus // tensor_parallel) if gpus > 1 else [1])
    ]  # fmt: skip
    return min(choices, key=lambda each: each.iteration_s)


def simulated_share(each: Layout, *, batches: int = 4) -> float:
    """Iterations per second of a simulated collector with its part of the engines, over what
    :class:`Layout` says.

    Its part is one learner, one engine at least. Groups are not simulated.
    """
    engines = max(1, round(each.engines / each.learners))
    alone = replace(each, engines=engines, batch=max(1, each.batch * engines // each.engines))
    game = each.game
    # The prompts and answers of an episode are read while the other slots' requests wait.
    costs = Costs(step=each.step_s, env=game.env_s, turn=each.prefill_s / game.turns)
    lengths = uniform_lengths((1, 2 * game.turns - 1), (1, 2 * game.response - 1))
    expected = max(alone.rollout_s, each.update_s) if each.staleness else alone.rollout_s
    run = simulate(
        costs, lengths, workers=engines, slots=each.slots, batch_size=alone.batch, batches=batches,
        max_staleness=each.staleness, update=expected if each.staleness else 0.0,
    )  # fmt: skip
    return batches * expected / run.seconds


def table(layouts: list[Layout], *, simulated: bool) -> str:
    """One line a layout, as Markdown."""
    lines = [
        "| GPUs | model | engines | learners | slots of an engine | step, ms | conversations of a batch | `max_staleness` | sampling, s | learning, s | "
        "conversations per s | sampled tokens per s | adapter, MB | learner, GiB | next GPU |"
        + (" simulated |" if simulated else ""),
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|" + ("---|" if simulated else ""),
    ]
    for each in layouts:
        engines = f"{each.engines}" + (f" of {each.tensor_parallel}" if each.tensor_parallel > 1 else "")
        rate, (taken, there) = each.batch / each.iteration_s, each.learner
        lines.append(
            f"| {each.gpus} | {each.model.name} | {engines} | {each.learners} | {each.slots} | {1000 * each.step_s:.0f} | "
            f"{each.batch:,} | {each.staleness} | {each.rollout_s:.0f} | {each.update_s:.0f} | {rate:,.1f} | {rate * each.game.sampled:,.0f} | "
            f"{each.sync_bytes / 1e6:.0f} | {taken:.1f}{'' if there else ', **no**'} | {each.bottleneck} |"
            + (f" {simulated_share(each):.2f} |" if simulated else "")
        )
    return "\n".join(lines)


def layouts() -> list[Layout]:
    """Those of docs/scaling.md."""
    small, middle = model("Qwen2.5-0.5B"), model("Qwen2.5-7B")
    large = model("Qwen2.5-32B", gradient_checkpointing=True)
    return [
        layout(small, 1, 256, staleness=0),
        layout(small, 8, 2048, staleness=1),
        layout(middle, 1, 256, staleness=0),
        layout(middle, 8, 1024, staleness=1),
        layout(middle, 64, 4096, staleness=1),
        layout(middle, 64, 4096, staleness=3),
        layout(middle, 512, 8192, staleness=4),
        layout(large, 64, 4096, staleness=1, tensor_parallel=2),
    ]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--simulate", action="store_true", help="add the simulated collector's rate, as a share of the computed one"
    )
    print(table(layouts(), simulated=parser.parse_args().simulate))


if __name__ == "__main__":
    main()
