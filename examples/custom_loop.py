"""LLMREINFORCE by hand: the whole training loop in one file, to read and to change.

    python examples/custom_loop.py

Collector and replay buffer are TorchRL's own. The environment's finished slots idle until every
slot is done, so one batch holds exactly NUM_ENVS episodes, all sampled by the same weights. The
parts of an update are the same as in LLMTrainer.
"""

import argparse

import torch
from accelerate import Accelerator
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, ReplayBuffer
from transformers import AutoModelForCausalLM, AutoTokenizer

from torchrl_llm import keys
from torchrl_llm.data import TurnsToSequence
from torchrl_llm.envs import GEMEnv
from torchrl_llm.modules import HFPolicy, SamplingConfig, TokenScorer, enable_prefix_sharing
from torchrl_llm.objectives import LLMReinforceLoss, ReBN
from torchrl_llm.testing.tiny import tiny_model_path
from torchrl_llm.trainers import Credit, Distributed, TrainerConfig, TrustRegion, Update

NUM_ENVS = 128
MAX_TURNS = 4
EPOCHS = 2
TARGET_KL = 0.05


def main(iterations: int = 100, lr: float = 1e-3, seed: int = 0) -> list[float]:
    """Train the shipped small model on GuessTheNumber; returns the win rate of each training
    batch."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_path())
    model = AutoModelForCausalLM.from_pretrained(tiny_model_path(), dtype=torch.float32)

    # Play: a text environment with NUM_ENVS slots, and a policy that answers all of them at once.
    sampling = SamplingConfig(temperature=1.0, max_output_tokens=16)
    env = GEMEnv(
        "game:GuessTheNumber-v0-easy",
        tokenizer=tokenizer,
        num_envs=NUM_ENVS,
        max_model_len=256,
        max_output_tokens=sampling.max_output_tokens,
        on_done="idle",
        seed=seed,
    )
    policy = HFPolicy(model, tokenizer, sampling, seed=seed)
    collector = Collector(
        env,
        policy,
        frames_per_batch=NUM_ENVS * MAX_TURNS,
        total_frames=NUM_ENVS * MAX_TURNS * iterations,
        reset_at_each_iter=True,
        use_buffers=False,
        trust_policy=True,
    )

    # Store: turns [N, T] go in, rows [B] come out, one episode each.
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(NUM_ENVS), transform=TurnsToSequence(max_model_len=256), batch_size=NUM_ENVS
    )

    # Learn: score the action tokens in one forward, in which what rows share (the rules of the
    # game, equal turns) is computed once; weight them by the normalized return of their turn. The
    # small model trains on the CPU.
    scorer = TokenScorer(model, sampling, prefixes=enable_prefix_sharing(model))
    loss = LLMReinforceLoss(scorer, kl_coeff=0.0, estimator=ReBN(gamma=0.9))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    here = Distributed.of(Accelerator(cpu=True))
    credit = Credit(loss, distributed=here)
    update = Update(loss, optimizer, here, config=TrainerConfig(max_grad_norm=1.0, max_tokens=16_384))

    win_rates = []
    try:
        for iteration, turns in enumerate(collector):
            buffer.extend(turns)
            batch = credit(buffer[:])
            buffer.empty()
            # update(batch), with epochs, minibatch_size and target_kl in its TrainerConfig, does
            # this too.
            region = TrustRegion(loss, optimizer, batch, TARGET_KL, distributed=here)
            for _ in range(EPOCHS):
                update.accumulate(update.micro_batches(batch))
                update.step(region)
                if region.settle(None):
                    break  # the step was shortened to the target
            policy.weights_changed()
            win_rates.append(batch[keys.TURN_SUCCESS].any(-1).float().mean().item())
            print(f"iteration {iteration:3d}  episodes {len(batch)}  win rate {win_rates[-1]:.3f}", flush=True)
    finally:
        collector.shutdown()
    return win_rates


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=100)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
