"""Runs for ``test_ranks.py``, started on one process and on two:
``python ranks_run.py OUT WHAT [NAME ...]``.

Each rank leaves its results in ``OUT-WHAT.RANK.pt``.
"""

import os
import signal
import sys
from pathlib import Path

import torch
from accelerate import PartialState

sys.path.insert(0, str(Path(__file__).parents[1]))
from exact_norms import exact_norms

from torchrl_llm import keys
from torchrl_llm.data import cat_rows
from torchrl_llm.objectives import LLMReinforceLoss, ReBN
from torchrl_llm.runs import RunSettings, build_run
from torchrl_llm.trainers import Callback
from torchrl_llm.trainers.fsdp import full_on_cpu

COMMON = {
    "model_path": "tiny",
    "env_name": "game:GuessTheNumber-v0-easy",
    "num_envs": 8,
    "batch_size": 16,
    "group_size": 4,
    "minibatch_size": 8,
    "max_tokens": 600,
    "epochs": 2,
    "max_model_len": 256,
    "max_output_tokens": 16,
    "max_iterations": 3,
    "lora_r": 0,
    "device": "cpu",
    "lr_actor": 1e-3,
    "progress": False,
    "overwrite": True,
    "evaluation_interval": 2,
    "evaluation_episodes": 9,
    "final_episodes": 9,
}
THINKS = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content.split('</think>')[-1].lstrip('\n') if m.role == 'assistant' else m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
<think>

</think>

{% endif %}"""
"""As that of a model that thinks: what it opens for an answer is gone later, so rows have
segments."""
THINKING = {"chat_template": THINKS, "env": "Talk"}
LAWS = {
    "LLMREINFORCE": {
        "algo": "LLMREINFORCE",
        "dtype": "float64",
        "env_name": ["game:GuessTheNumber-v0-easy", "game:GuessTheNumber-v0-hard"],
        "adaptive_mixture": True,
    },
    "LLMPPO": {"algo": "LLMPPO", "dtype": "float64", "critic_warmup": 1, "whiten": True},
    "GRPO": {"algo": "GRPO", "dtype": "float64", "kl_coeff": 0.05},
    "LoRA": {"algo": "LLMPPO", "dtype": "float64", "lora_r": 4},
    "thinking": {"algo": "GRPO", "dtype": "float64", "lora_r": 4, **THINKING},
    "trees": {
        "algo": "GRPO",
        "dtype": "float64",
        "credit": "state",
        "baseline": "leave_one_out",
        "scale": "none",
        "tree_branches": 1,
        "tree_depth": 2,
    },
    "target_kl": {"algo": "LLMREINFORCE", "dtype": "float64", "target_kl": 1e-4},
    "vine": {
        "algo": "LLMREINFORCE",
        "dtype": "float64",
        "kl_coeff": 0.0,
        "gamma": 1.0,
        "group_size": 1,
        "env_options": {"max_turns": 4},
        "estimator": "TurnVine",
        "branches": 1,
        "branch_share": 0.5,
    },
    "SFT": {"algo": "SFT", "dtype": "float64", "demonstrations": "guess_by_half_the_hints", "imitate": "success"},
    "float32": {"algo": "GRPO", "dtype": "float32", "max_iterations": 1, "minibatch_size": None, "epochs": 1},
}
VLLM = {
    "DDP": {"algo": "GRPO", "policy": "vllm", "dtype": "float32", "max_iterations": 2, "evaluation_interval": 0},
    "FSDP2": {
        "algo": "GRPO",
        "policy": "vllm",
        "dtype": "float32",
        "max_iterations": 2,
        "evaluation_interval": 0,
        "lora_r": 4,
    },
}
"""Each process has an engine of its own."""
REPLAYED = {
    "LLMPPO": {"algo": "LLMPPO", "whiten": True},
    "LLMPPO-LoRA": {"algo": "LLMPPO", "lora_r": 4, "gradient_checkpointing": True},
    "LLMREINFORCE": {
        "algo": "LLMREINFORCE",
        "kl_coeff": 0.05,
        "lora_r": 4,
        "lr_actor": 0.01,
        "target_kl": 0.003,
        "target_kl_share": 1.0,
    },
    "GRPO": {"algo": "GRPO", "kl_coeff": 0.05, "refresh_reference": 1},
    "GRPO-LoRA": {"algo": "GRPO", "kl_coeff": 0.05, "lora_r": 4, "refresh_reference": 1},
    "own-parameters": {"algo": "LLMREINFORCE", "loss_class": "ranks_run:Biased", "kl_coeff": 0.05, "lr_loss": 0.1},
}
REPLAY = {"dtype": "float64", "epochs": 1, "warmup_fraction": 0.0, "evaluation_interval": 0}
UNEVEN = {
    "algo": "GRPO",
    "scale": "batch",
    "dtype": "float64",
    "dynamic_sampling": 1,
    "batch_size": 8,
    "minibatch_size": 4,
    "max_tokens": 150,
    "max_iterations": 5,
}
PARTS = {
    "dynamic": {
        "algo": "GRPO",
        "dtype": "float64",
        "dynamic_sampling": 3,
        "kl_in": "reward",  # so that groups are scored before they are chosen
        "kl_coeff": 0.05,
        "max_iterations": 2,
        "evaluation_interval": 0,
    },
    "overlong": {
        "algo": "GRPO",
        "dtype": "float64",
        "dynamic_sampling": 1,
        "overlong_filter": True,
        "minibatch_size": None,
        "max_iterations": 1,
        "evaluation_interval": 0,
    },
    "later": {"algo": "LLMREINFORCE", "dtype": "float64", "max_iterations": 1, "evaluation_interval": 0},
    "broken": {"algo": "LLMREINFORCE", "dtype": "float64", "max_iterations": 1, "evaluation_interval": 0},
}
"""A run that drops groups, one that leaves episodes out, one with a loss of its own whose estimator
is chosen after it was built, and one of whose gradients one is not finite, on the last rank."""
HALF = {
    "bfloat16": {"algo": "LLMPPO", "dtype": "bfloat16", "max_iterations": 2},
    "mixed": {"algo": "LLMPPO", "dtype": "float32", "mixed_precision": "bf16", "max_iterations": 2},
    "LoRA-bfloat16": {"algo": "LLMPPO", "dtype": "bfloat16", "lora_r": 4, "max_iterations": 2},
}
RESUMED = {"algo": "LLMPPO", "dtype": "float32", "checkpoint_interval": 1, "overwrite": False, "resume": True}


class Talk:
    """Three turns, whatever is said; pays by the length of the answers, which few share."""

    __module__ = "ranks_run"  # also where this file is the program: resumed runs compare the name

    def reset(self, seed=None):
        self.turn, self.length = 0, 0
        return f"Guess a number from 1 to {seed % 10}.", {}

    def step(self, action):
        self.turn, self.length = self.turn + 1, self.length + len(action)
        over = self.turn == 3
        return "Higher.", over * (self.length % 7) / 6, over, False, {}


class Biased(LLMReinforceLoss):
    """A loss with a parameter of its own."""

    def __init__(self, actor, **options):
        super().__init__(actor, **options)
        self.bias = torch.nn.Parameter(torch.ones((), dtype=torch.float64))

    def objective(self, log_ratio, advantage):
        return self.bias * super().objective(log_ratio, advantage)


class Die(Callback):
    """Kills this rank in an iteration."""

    def __init__(self, rank, iteration):
        self.rank, self.iteration = rank, iteration

    def on_iteration(self, trainer, metrics):
        if trainer.distributed.rank == self.rank and trainer.iteration == self.iteration:
            os.kill(os.getpid(), signal.SIGKILL)


class CountedLoss(LLMReinforceLoss):
    """The stock objective, counted."""

    calls = step = 0

    def objective(self, log_ratio, advantage):
        self.calls += 1
        return super().objective(log_ratio, advantage)


class BrokenLoss(CountedLoss):
    """The stock objective; in the second optimizer step its gradient is NaN on the last rank."""

    def objective(self, log_ratio, advantage):
        objective = super().objective(log_ratio, advantage)
        last = PartialState().process_index == PartialState().num_processes - 1
        return objective + 0.0 * (log_ratio * 0.0).sqrt() if last and self.step == 1 else objective


class Steps(Callback):
    """Tells the loss how many optimizer steps there were."""

    def on_minibatch(self, trainer, rows, metrics):
        trainer.loss.step += 1


def build(out, *, callbacks=(), make_loss=None, env=None, **settings):
    """A run with small settings; ``env`` names a class of this module."""
    return build_run(
        RunSettings.from_values(**COMMON | settings, output_dir=out),
        env=globals().get(env),
        callbacks=callbacks,
        make_loss=make_loss,
    )


def choose(out):
    """How many rows are chosen, and returned, where only the first rank has played groups that
    differ: two batches of them."""
    run = build(out, **PARTS["dynamic"])
    with run.trainer.policy_weights():
        next(iter(run.trainer.collector))
    rows = run.trainer.replay_buffer[:].contiguous()
    more = rows.clone()
    for key in (keys.EPISODE_ID, keys.GROUP_ID):
        more[key] += 1000
    rows = cat_rows([rows, more])
    rows[keys.TURN_REWARD] = torch.zeros_like(rows[keys.TURN_REWARD])
    if run.trainer.distributed.is_main:
        rows[keys.TURN_REWARD][:, 0] = torch.arange(len(rows)) % 2
    run.trainer.dynamic_sampling.score(rows)
    chosen = run.trainer.dynamic_sampling.choose(rows, run.trainer.batch_size(rows))
    run.close()
    return len(run.trainer.distributed.own_rows(chosen)), len(chosen)


def learn_from_overlong(out):
    """The metrics of learning where all that teaches was cut off and is on the first rank, and how
    far the weights moved."""
    run = build(out, **PARTS["overlong"])
    rows = run.trainer.collect(iter(run.trainer.collector))
    ends = rows[keys.TURN_TERMINATED] | rows[keys.TURN_TRUNCATED]
    rows[keys.TURN_TERMINATED], rows[keys.TURN_TRUNCATED] = torch.zeros_like(ends), ends
    before = whole_weights(run.trainer)
    rows = rows if run.trainer.distributed.is_main else run.trainer.distributed.nonempty(rows[:0], rows, len(rows))
    metrics = run.trainer.learn(rows)
    run.close()
    moved = [(value - before[name]).abs().max().item() for name, value in whole_weights(run.trainer).items()]
    return {"metrics": metrics, "moved": max(moved)}


def run_parts(out, name):
    """What a run of :data:`PARTS` learned, chose and called."""
    if name == "overlong":
        return learn_from_overlong(out / name)
    if name == "dynamic":
        return train(out / name, **PARTS[name]) | {"chosen": choose(out / "choose")}
    kind = BrokenLoss if name == "broken" else CountedLoss
    run = build(
        out / name,
        make_loss=lambda config, models: kind(models.actor, **config.loss_options(kind)),
        callbacks=[Steps()],
        **PARTS[name],
    )
    loss = run.trainer.loss.make_value_estimator(ReBN, gamma=0.8)
    rows = run.trainer.collect(iter(run.trainer.collector))
    seen = set(run.trainer.distributed.all_gather_rows(rows, [keys.EPISODE_ID, keys.ATTENTION_MASK]).keys())
    metrics = run.trainer.learn(rows)
    distributed = run.trainer.distributed
    counted = distributed.all_reduce_counts(
        {"data/faults": 2.0, "data/own_mean": 5.0 - distributed.rank, "own/mean": 0.5}
    )
    run.close()
    weights = whole_weights(run.trainer)
    return {"weights": weights, "metrics": metrics, "calls": loss.calls, "seen": seen, "counted": counted}


def whole_weights(trainer):
    """Copies of the trained weights."""
    return {name: full_on_cpu(value).clone() for name, value in trainer.loss.named_parameters() if value.requires_grad}


@exact_norms()
def train(out, *, callbacks=(), **settings):
    """Train; what was learned from, the metrics, and weights and optimizer at the end."""
    trainer = build(out, callbacks=callbacks, **settings).trainer
    learn, update, accumulate = trainer.learn, trainer.update, trainer.updater.accumulate
    batches, spoken, parts = [], [], []

    def recorded(batch, **options):
        batches.append(batch.select(keys.TOKENS, keys.ATTENTION_MASK, keys.EPISODE_ID, keys.GROUP_ID))
        return learn(batch, **options)

    def counted(batch):
        spoken.append(int((batch[keys.TURN_IDS] >= 0).any(-1).sum()))
        return update(batch)

    def cut(micro_batches, **options):
        parts.append(sum(bool((part[keys.TURN_IDS] >= 0).any()) for part in micro_batches))
        return accumulate(micro_batches, **options)

    trainer.learn, trainer.update, trainer.updater.accumulate = recorded, counted, cut
    history = trainer.train()
    return {
        "history": history,
        "batches": cat_rows(batches) if batches else None,
        "weights": whole_weights(trainer),
        "optimizer": trainer.distributed.full_state(trainer.optimizer.state_dict()),
        "ranks": trainer.distributed.world_size,
        "sharded": trainer.distributed.sharded,
        "spoken": spoken,
        "parts": parts,
        "files": sorted(str(path.relative_to(out)) for path in out.glob("checkpoints/**/*")),
    }


def play(out):
    """The rows of one batch, as the collector delivers them."""
    trainer = build(out, algo="GRPO", **REPLAY).trainer
    rows = trainer.collect(iter(trainer.collector))
    trainer.close()
    return rows


@exact_norms()
def replay(out, rows, **settings):
    """Learn three times from this rank's groups of ``rows``; the first gradient, and the weights at
    the end."""
    run = build(out, **REPLAY | settings)
    trainer, gradients = run.trainer, []
    step = trainer.updater.step

    def recorded(*args):
        gradients.append(
            {name: full_on_cpu(p.grad).clone() for name, p in trainer.loss.named_parameters() if p.requires_grad}
        )
        return step(*args)

    trainer.updater.step = recorded
    own = rows[rows[keys.GROUP_ID] % trainer.distributed.world_size == trainer.distributed.rank].to(
        trainer.accelerator.device
    )
    for _ in range(3):
        metrics = trainer.learn(own.clone())
        trainer.iteration += 1
        for callback in trainer.callbacks:
            callback.on_iteration(trainer, metrics | {"rollout/success": 0.0})
    weights = whole_weights(trainer)
    run.close()
    return {"gradient": gradients[0], "weights": weights, "sharded": trainer.distributed.sharded, "metrics": metrics}


def resume(out, **settings):
    """A run of two iterations, the same in two parts, and the second part of what another number of
    ranks began."""
    given = RESUMED | settings
    results = {"whole": train(out / "whole", max_iterations=2, **given)}
    for part, iterations in (("parts", 1), ("parts", 2), ("others", 2)):
        results[part] = train(out / part, max_iterations=iterations, accept_changes=["max_iterations"], **given)
    return results


def main():
    """Run what is asked for and save the results of this rank."""
    out, what, names = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
    device = os.environ.get("RANKS_RUN_DEVICE", "cpu")
    COMMON["device"] = None if device == "cuda" else device
    if what == "laws":
        given = LAWS | VLLM | {"uneven": UNEVEN, "bfloat16": HALF["LoRA-bfloat16"]}
        results = {name: train(out / name, **given[name]) for name in names}
    elif what == "replay":
        rows = torch.load(out / "rows.pt", weights_only=False)
        results = {name: replay(out / name, rows, **REPLAYED[name]) for name in names}
    elif what == "parts":
        results = {name: run_parts(out, name) for name in PARTS}
    elif what == "half":
        results = {name: train(out / name, **HALF[name]) for name in names}
    elif what == "resume":
        results = resume(out)
    elif what == "thinking":
        results = resume(out, **THINKING)
    elif what == "dies":
        train(out, callbacks=[Die(1, 2)], algo="GRPO", dtype="float32", checkpoint_interval=1)
    torch.save(results, f"{out}-{what}.{PartialState().process_index}.pt")


if __name__ == "__main__":
    main()
