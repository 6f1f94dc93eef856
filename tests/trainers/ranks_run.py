"""Runs for ``test_ranks.py``, started once alone and once on two processes: ``python ranks_run.py OUT WHAT``."""

import os
import signal
import sys
from pathlib import Path

import torch
from accelerate import PartialState

from torchrl_llm import keys
from torchrl_llm.data import cat_rows
from torchrl_llm.trainers import Callback, RunConfig, build_run

COMMON = {
    "model_path": "tiny",
    "env_name": "game:GuessTheNumber-v0-easy",
    "num_envs": 8,
    "batch_size": 32,
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
LAWS = {
    "LLMREINFORCE": {"algo": "LLMREINFORCE", "dtype": "float64"},
    "LLMPPO": {"algo": "LLMPPO", "dtype": "float64", "critic_warmup": 1, "whiten": True},
    "GRPO": {"algo": "GRPO", "dtype": "float64", "kl_coeff": 0.05},
    "LoRA": {"algo": "LLMPPO", "dtype": "float64", "lora_r": 4},
    "float32": {"algo": "GRPO", "dtype": "float32", "max_iterations": 1, "minibatch_size": None, "epochs": 1},
}
UNEVEN = {
    "algo": "GRPO",
    "dtype": "float32",
    "dynamic_sampling": 1,
    "batch_size": 8,
    "minibatch_size": 4,
    "max_iterations": 8,
}


class Die(Callback):
    """Kills this rank in an iteration."""

    def __init__(self, rank, iteration):
        self.rank, self.iteration = rank, iteration

    def on_iteration(self, trainer, metrics):
        if trainer.ranks.index == self.rank and trainer.iteration == self.iteration:
            os.kill(os.getpid(), signal.SIGKILL)


def train(out, *, callbacks=(), **settings):
    """Train; what was learned from, the gradient norms, and the weights at the end."""
    run = build_run(RunConfig(**COMMON | settings, output_dir=out), callbacks=callbacks)
    trainer, batches = run.trainer, []
    learn = trainer.learn

    def recorded(batch):
        batches.append(batch.select(keys.TOKENS, keys.ATTENTION_MASK, keys.EPISODE_ID, keys.GROUP_ID))
        return learn(batch)

    update, spoken = trainer.update, []

    def counted(batch):
        spoken.append(int((batch[keys.TURN_IDS] >= 0).any(-1).sum()))
        return update(batch)

    trainer.learn, trainer.update = recorded, counted
    history = trainer.train()
    return {
        "history": history,
        "batches": cat_rows(batches) if batches else None,
        "weights": {name: value.clone() for name, value in trainer.loss.named_parameters() if value.requires_grad},
        "ranks": trainer.ranks.count,
        "spoken": spoken,
        "files": sorted(path.name for path in out.glob("checkpoints/*")),
    }


def main():
    """Run what is asked for and save the results of this rank."""
    out, what = Path(sys.argv[1]), sys.argv[2]
    results = {}
    if what == "laws":
        for name, settings in LAWS.items():
            results[name] = train(out / name, **settings)
    elif what == "uneven":
        results = train(out, **UNEVEN)
    elif what == "dies":
        train(out, callbacks=[Die(1, 2)], algo="GRPO", dtype="float32", checkpoint_interval=1)
    else:
        resumed = {"max_iterations": int(what), "checkpoint_interval": 1, "overwrite": False, "resume": True}
        resumed["accept_changes"] = ["max_iterations"]
        results = train(out, algo="LLMPPO", dtype="float32", **resumed)
    torch.save(results, f"{out}-{what}.{PartialState().process_index}.pt")


if __name__ == "__main__":
    main()
