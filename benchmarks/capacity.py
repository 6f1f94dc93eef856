"""What a run on N GPUs would look like: computed from sizes and rates, and checked against the
simulated collector.

    python benchmarks/capacity.py                   # the tables of docs/scaling.md
    python benchmarks/capacity.py --simulate        # with the simulation's column; a minute

Nothing here was measured on these machines. A GPU has the rates of its data sheet times the shares
of them that good code reaches (:class:`GPU`); a model is its numbers (:class:`Model`);
conversations come from a game (:class:`Game`). On one GPU sampling and learning take turns. On
more they go on at the same time, on GPUs of their own, divided so that neither waits for the other.
"""

import argparse
from dataclasses import dataclass, replace
from functools import cached_property

from torchrl_llm.testing.simulation import Costs, simulate, uniform_lengths

GB = 1e9


@dataclass(frozen=True)
class GPU:
    """A device: what its data sheet says, and the shares of it that are reached."""

    name: str
    memory: float
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


H100 = GPU("H100 80 GB", 80 * GB, 989e12, 3.35e12)


@dataclass(frozen=True)
class Model:
    """A language model by its numbers; weights and activations in bfloat16, LoRA of rank ``rank``
    on every linear layer."""

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool = False
    rank: int = 16

    @property
    def _linear(self) -> list[tuple[int, int]]:
        """The linear layers of a block: inputs and outputs."""
        h, i, q, kv = self.hidden, self.intermediate, self.heads * self.head_dim, self.kv_heads * self.head_dim
        return [(h, q), (h, kv), (h, kv), (q, h), (h, i), (h, i), (i, h)]

    @property
    def parameters(self) -> int:
        """All of them."""
        embeddings = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return self.layers * sum(a * b for a, b in self._linear) + embeddings

    @property
    def adapter(self) -> int:
        """The trained ones."""
        return self.layers * sum(self.rank * (a + b) for a, b in self._linear)

    @property
    def kv_bytes(self) -> int:
        """Keys and values of a token."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim


QWEN_05B = Model("Qwen2.5-0.5B", 24, 896, 4864, 14, 2, 64, 151_936, tied=True)
QWEN_7B = Model("Qwen2.5-7B", 28, 3584, 18_944, 28, 4, 128, 152_064)
QWEN_32B = Model("Qwen2.5-32B", 64, 5120, 27_648, 40, 8, 128, 152_064)
QWEN_72B = Model("Qwen2.5-72B", 80, 8192, 29_568, 64, 8, 128, 152_064)


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
        size = 2 * self.model.parameters + self.slots * self.model.kv_bytes * self.game.tokens / 2
        return self.gpu.read_s(size) / self.tensor_parallel + 0.004  # launches, sampling, Python

    @cached_property
    def prefill_s(self) -> float:
        """Prompts and answers of an episode; earlier turns are in the engine's cache."""
        tokens = self.game.prompt / self.game.group + self.game.turns * self.game.feedback
        return self.gpu.train_s(2 * self.model.parameters * tokens) / self.tensor_parallel

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
        """Of the different tokens, in flops a parameter: forward and backward, 4 (frozen weights
        have no gradient), and the passes of the old policy and of the reference, 2 each."""
        tokens = self.batch * self.game.tokens / self.game.shared
        return self.gpu.train_s((4 + 2 + 2) * self.model.parameters * tokens) / self.learners

    @cached_property
    def sync_bytes(self) -> int:
        """Of the adapter, whose weights are float32."""
        return 4 * self.model.adapter

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


def fitting_slots(model: Model, game: Game, gpu: GPU, tensor_parallel: int, share: float) -> int:
    """Contexts that fit beside the weights in ``share`` of the memory; at most 256 an engine."""
    free = share * gpu.memory * tensor_parallel - 2 * model.parameters
    return max(1, min(256, int(free / (model.kv_bytes * game.tokens * 1.5))))


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
    fit = fitting_slots(model, game, gpu, tensor_parallel, 0.9 if staleness else 0.5)
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
        "conversations per s | sampled tokens per s | adapter, MB | next GPU |" + (" simulated |" if simulated else ""),
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|" + ("---|" if simulated else ""),
    ]
    for each in layouts:
        engines = f"{each.engines}" + (f" of {each.tensor_parallel}" if each.tensor_parallel > 1 else "")
        rate = each.batch / each.iteration_s
        lines.append(
            f"| {each.gpus} | {each.model.name} | {engines} | {each.learners} | {each.slots} | {1000 * each.step_s:.0f} | "
            f"{each.batch:,} | {each.staleness} | {each.rollout_s:.0f} | {each.update_s:.0f} | {rate:,.1f} | {rate * each.game.sampled:,.0f} | "
            f"{each.sync_bytes / 1e6:.0f} | {each.bottleneck} |"
            + (f" {simulated_share(each):.2f} |" if simulated else "")
        )
    return "\n".join(lines)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--simulate", action="store_true", help="add the simulated collector's rate, as a share of the computed one"
    )
    simulated = parser.parse_args().simulate
    layouts = [
        layout(QWEN_05B, 1, 256, staleness=0),
        layout(QWEN_05B, 8, 2048, staleness=1),
        layout(QWEN_7B, 1, 256, staleness=0),
        layout(QWEN_7B, 8, 1024, staleness=1),
        layout(QWEN_7B, 64, 4096, staleness=1),
        layout(QWEN_7B, 64, 4096, staleness=3),
        layout(QWEN_7B, 512, 8192, staleness=4),
        layout(QWEN_32B, 64, 4096, staleness=1, tensor_parallel=2),
        layout(QWEN_72B, 512, 8192, staleness=3, tensor_parallel=4),
    ]
    print(table(layouts, simulated=simulated))


if __name__ == "__main__":
    main()
