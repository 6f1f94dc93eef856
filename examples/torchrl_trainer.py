"""The same components in TorchRL's own ``Trainer``: GRPO on GuessTheNumber, with dynamic sampling
and ``target_kl``.

    python examples/torchrl_trainer.py

It needs one adapter, an ``OptimizationStepper`` that calls the parts of LLMTrainer: it fills a
batch with groups whose episodes differ, credits them, and takes the steps. The trainer counts the
episodes that its collector yields as frames here, so that it ends after ``iterations`` batches.
"""

import argparse

import torch
from accelerate import Accelerator
from tensordict import TensorDict, TensorDictBase
from torchrl.trainers import OptimizationStepper, Trainer
from transformers import AutoTokenizer

from torchrl_llm import keys
from torchrl_llm.collectors import TurnCollector
from torchrl_llm.envs import GEMEnv
from torchrl_llm.modules import HFPolicy, SamplingConfig, load_actor_critic
from torchrl_llm.objectives import GroupRelative, LLMGRPOLoss
from torchrl_llm.testing.tiny import tiny_model_path
from torchrl_llm.trainers import Credit, Distributed, DynamicSampling, TrainerConfig, Update

CONVERSATIONS = 128


class TurnStepper(OptimizationStepper):
    """All optimizer steps of an update.

    Args:
        credit: credits the batch, which is filled with groups that have an advantage.
        update: takes the steps.
    """

    def __init__(self, credit: Credit, update: Update) -> None:
        self.credit, self.update, self.groups = credit, update, DynamicSampling(credit)

    def step(self, trainer: Trainer, sub_batch: TensorDictBase) -> TensorDictBase:
        """The update's metrics; none where no group has an advantage, and no step is taken."""
        rows = self.groups.fill(sub_batch, CONVERSATIONS, trainer.collector.rollout)
        if not self.groups.found(rows):
            return TensorDict()
        return TensorDict(self.update(self.credit(self.groups.choose(rows, CONVERSATIONS))))


def main(iterations: int = 60, lr: float = 2e-3, seed: int = 0) -> list[float]:
    """Train the shipped small model; returns the win rate of each training batch."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_path())
    sampling = SamplingConfig(max_output_tokens=16)
    models = load_actor_critic(tiny_model_path(), sampling=sampling, tokenizer=tokenizer)
    policy = HFPolicy(models.model, tokenizer, sampling, seed=seed)
    env = GEMEnv(
        "game:GuessTheNumber-v0-easy",
        tokenizer=tokenizer,
        num_envs=64,
        group_size=8,
        max_model_len=256,
        max_output_tokens=sampling.max_output_tokens,
        seed=seed,
    )
    collector = TurnCollector(env, policy, batch_size=CONVERSATIONS)
    loss = LLMGRPOLoss(models.actor, kl_coeff=0.0, estimator=GroupRelative(gamma=0.9))
    config = TrainerConfig(epochs=2, dynamic_sampling=4, target_kl=0.05)
    here = Distributed.of(Accelerator(cpu=True))  # the small model trains on the CPU
    credit = Credit(loss, config=config, distributed=here)
    update = Update(loss, torch.optim.AdamW(models.actor_parameters(), lr=lr, weight_decay=0.0), here, config=config)
    win_rates: list[float] = []

    def show(rows: TensorDictBase) -> None:
        """The win rate of a batch."""
        win_rates.append(rows[keys.TURN_SUCCESS].any(-1).float().mean().item())
        print(f"iteration {len(win_rates):3d}  win rate {win_rates[-1]:.3f}", flush=True)

    trainer = Trainer(
        collector=collector,
        total_frames=iterations * CONVERSATIONS,
        frame_skip=1,
        loss_module=loss,
        optimizer=update.optimizer,
        optimization_stepper=TurnStepper(credit, update),
        optim_steps_per_batch=1,
        progress_bar=False,
    )
    trainer.register_op("batch_process", show)
    trainer.register_op("post_steps", policy.weights_changed)
    trainer.train()
    return win_rates


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
