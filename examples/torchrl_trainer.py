"""The same components in TorchRL's own ``Trainer``: LLMPPO on GuessTheNumber.

    python examples/torchrl_trainer.py

It needs two adapters: a hook that writes values and advantages into the rows of a collected batch,
and an ``OptimizationStepper`` that adds up micro-batches. The trainer counts episodes as frames
here.
"""

import argparse

import torch
from tensordict import TensorDictBase
from torchrl.trainers import OptimizationStepper, Trainer
from transformers import AutoTokenizer

from torchrl_llm import keys
from torchrl_llm.collectors import TurnCollector
from torchrl_llm.data import micro_batches
from torchrl_llm.envs import GEMEnv
from torchrl_llm.modules import HFPolicy, SamplingConfig, load_actor_critic
from torchrl_llm.objectives import LLMPPOLoss, clipped_step, merge, total, write_loss_weights
from torchrl_llm.testing.tiny import tiny_model_path

CONVERSATIONS = 128


class TurnStepper(OptimizationStepper):
    """One optimizer step over all rows, in micro-batches of at most ``max_tokens`` tokens."""

    def __init__(self, max_tokens: int = 16_384) -> None:
        self.max_tokens = max_tokens

    def step(self, trainer: Trainer, sub_batch: TensorDictBase) -> TensorDictBase:
        """Backward through the weighted sums, clip, step; returns the batch's metrics."""
        outputs = []
        for part in micro_batches(write_loss_weights(sub_batch, trainer.loss_module), self.max_tokens):
            outputs.append(trainer.loss_module(part))
            total(outputs[-1]).backward()
        clipped_step(trainer.optimizer, trainer.clip_norm)
        return merge(outputs)


def main(iterations: int = 60, lr: float = 2e-3, seed: int = 0) -> list[float]:
    """Train the shipped small model; returns the win rate of each training batch."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_path())
    sampling = SamplingConfig(max_output_tokens=16)
    models = load_actor_critic(tiny_model_path(), critic=True, sampling=sampling, tokenizer=tokenizer)
    policy = HFPolicy(models.model, tokenizer, sampling, seed=seed)
    env = GEMEnv(
        "game:GuessTheNumber-v0-easy",
        tokenizer=tokenizer,
        num_envs=64,
        max_model_len=256,
        max_output_tokens=sampling.max_output_tokens,
        seed=seed,
    )
    loss = LLMPPOLoss(models.actor, models.critic, gamma=0.9, kl_coeff=0.0)
    win_rates: list[float] = []

    def credit(rows: TensorDictBase) -> TensorDictBase:
        """Rows with advantages; values are frozen for all epochs."""
        rows = loss.value_estimator(rows)
        win_rates.append(rows[keys.TURN_SUCCESS].any(-1).float().mean().item())
        print(f"iteration {len(win_rates):3d}  win rate {win_rates[-1]:.3f}", flush=True)
        return rows

    trainer = Trainer(
        collector=TurnCollector(env, policy, batch_size=CONVERSATIONS),
        total_frames=iterations * CONVERSATIONS,
        frame_skip=1,
        loss_module=loss,
        optimizer=torch.optim.AdamW(
            [
                {"params": models.actor_parameters(), "lr": lr},
                {"params": models.critic_parameters(), "lr": lr},
            ],
            weight_decay=0.0,
        ),
        optimization_stepper=TurnStepper(),
        optim_steps_per_batch=1,
        num_epochs=2,
        clip_norm=1.0,
        progress_bar=False,
    )
    trainer.register_op("batch_process", credit)
    trainer.register_op("post_steps", policy.weights_changed)
    trainer.train()
    return win_rates


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
